"""`kendall serve` whose event loop is pinged every other millisecond by a thread: how late each
ping ran goes into a file.

Pairs of doubles, seconds: when it was posted (CLOCK_MONOTONIC, which all processes share), and how
much later it ran.
"""

from __future__ import annotations

import array
import asyncio
import os
import sys
import threading
import time
from collections import deque
from itertools import chain

from loadgen.gateway.gateway_child import end_with
from loadgen.gateway.gateway_process import GatewayProcess
from server.engines import emulated
from server.engines.base import Capabilities

PINGS_FILE = "PINGS_FILE"
EVERY = 0.002  # seconds
KEPT = 500  # pings between two writes


class PingedEngine(emulated.EmulatedEngine):
    """Starts the pings with itself: it runs on the gateway's loop."""

    async def start(self) -> Capabilities:
        """As ever, pinged."""
        threading.Thread(target=_ping, args=(asyncio.get_running_loop(),), daemon=True).start()
        return await super().start()


def _ping(loop: asyncio.AbstractEventLoop) -> None:
    clock, seen, pause = time.perf_counter, deque[tuple[float, float]](), threading.Event()

    def ran(posted: float) -> None:
        seen.append((posted, clock() - posted))

    with open(os.environ[PINGS_FILE], "ab") as file:
        while True:
            pause.wait(EVERY)
            loop.call_soon_threadsafe(ran, clock())
            if len(seen) >= KEPT:
                array.array("d", chain.from_iterable(seen.popleft() for _ in range(KEPT))).tofile(
                    file
                )
                file.flush()


class PingedGateway(GatewayProcess):
    """Its child is this module."""

    module = "bench.live.pinged_gateway"


if __name__ == "__main__":
    from kendall import cli

    end_with(int(sys.argv[1]))
    emulated.EmulatedEngine = PingedEngine  # type: ignore[misc]
    cli.main(sys.argv[2:])
