"""The clock of the event loop, at full resolution."""

from __future__ import annotations

import asyncio

import uvloop

from kendall.server.runtime.clock import clock_of


def test_the_clock_is_the_loops_own() -> None:
    loop = asyncio.new_event_loop()
    assert clock_of(loop) == loop.time
    loop.close()


def test_it_goes_on_where_the_loop_reads_it_once_a_turn() -> None:
    loop = uvloop.new_event_loop()
    clock = clock_of(loop)
    readings = [clock() for _ in range(1000)]
    assert readings == sorted(readings)
    assert len(set(readings)) > 100
    assert abs(readings[0] - loop.time()) < 60
    loop.close()
