"""The turnaround of a continuous engine, seconds that a slot is held outside the steps: the value
at which the closed loop under the law holds a slot as long as the measured loop did.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np

from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import Member, ServiceProcess


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Requests on a fixed number of slots: whenever a slot is left, the next request takes it."""

    slots: int
    lengths: tuple[int, ...]  # output tokens, in order
    prompt_tokens: int  # of each


def solve_turnaround(law: LatencyModel, loop: ClosedLoop, measured: float) -> float:
    """The turnaround, by bisection: `slot_time` of the law with it is `measured` (seconds)."""
    low, high = 0.0, max(0.05, measured)
    for _ in range(30):
        middle = (low + high) / 2
        if slot_time(dataclasses.replace(law, turnaround=middle), loop) < measured:
            low = middle
        else:
            high = middle
    return low


def slot_time(law: LatencyModel, loop: ClosedLoop) -> float:
    """Mean seconds that a request holds its slot, by a simulation of the loop under the law."""
    process = ServiceProcess(law, np.random.default_rng(0))
    left = iter(enumerate(loop.lengths))
    started: dict[str, float] = {}
    held = []

    def admit(now: float, count: int) -> None:
        for index, length in itertools.islice(left, count):
            started[str(index)] = now
            process.admit(
                now, [Member(str(index), loop.prompt_tokens, length)], padded=False, joining=True
            )

    admit(0.0, loop.slots)
    while not process.idle:
        now = process.next_change_at()
        for member in process.advance(to_change=True):
            held.append(now - started[member.id])
            admit(now, 1)
    return float(np.mean(held))
