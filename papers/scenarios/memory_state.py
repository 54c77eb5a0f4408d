"""What the compiled engine with bounded memory works on (memory_kernels): requests, ranks, the
engine, the path, and the state between two steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.queueing.simulation.kernels import Floats, Ints

PRESERVE, DISCARD, SWAP, LEAST_WASTE = 0, 1, 2, 3
# places in `counts`
RUNNING, WAITING, CALLING, KEPT, COMING, USED, COMPUTED, AGAIN, ENTERED = range(9)
NOW, OWED, IDLE_WASTE, STALL_WASTE = range(4)  # places in `clock`


class Work(NamedTuple):
    """Requests in order of arrival; a call begins once `call_after` tokens are made (0: none)."""

    arrived_at: Floats
    prompt: Ints
    output: Ints
    call_after: Ints
    call_seconds: Floats
    predicted_call: Floats
    handling: Ints


class Ranking(NamedTuple):
    """value + slope x tokens made, lower first; one that has made `limit` tokens of its output or
    more is not interrupted for another.
    """

    value: Floats
    slope: float
    limit: Floats


class Engine(NamedTuple):
    """`keep`: an interrupted request keeps its memory until others need it."""

    slots: int
    memory: int
    keep: bool
    k1: float
    k3: float
    k4: float
    kp: float
    swap_setup: float
    swap_token: float


class Path(NamedTuple):
    """Of each request: the end of its first token and of its last, and how often it lost its memory
    before its end, calls aside.
    """

    first_token_at: Floats
    ended_at: Floats
    lost_memory: Ints


class State(NamedTuple):
    """Of each request the tokens made, those in memory, and whether they are swapped out; who is in
    service, waits (a heap), calls (a heap), waits and holds memory; counts and instants as above.
    """

    made: Ints
    held: Ints
    hosted: Ints
    running: Ints
    queue: Floats
    calls: Floats
    kept: Ints
    counts: Ints
    clock: Floats


def new_state(count: int, slots: int) -> State:
    """Nothing has arrived."""
    made, held, hosted, kept = np.zeros((4, count), dtype=np.int64)
    queue, calls = np.empty((2, count, 4))
    running = np.zeros(min(slots, count), dtype=np.int64)
    return State(
        made, held, hosted, running, queue, calls, kept, np.zeros(9, np.int64), np.zeros(4)
    )
