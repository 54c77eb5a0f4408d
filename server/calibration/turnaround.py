"""The turnaround of a continuous engine: at which the law's own closed loop holds a slot as long
as was measured.
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
    """`slots` that are always taken: whenever one is left, the next of these requests has it."""

    slots: int
    lengths: tuple[int, ...]  # output tokens, in order
    prompt_tokens: int  # of each


def solve_turnaround(law: LatencyModel, loop: ClosedLoop, measured: float) -> float:
    """Seconds a slot is held outside the steps: bisection until the law's loop holds one as long
    as measured.
    """
    low, high = 0.0, max(0.05, measured)
    for _ in range(30):
        middle = (low + high) / 2
        if slot_time(dataclasses.replace(law, turnaround=middle), loop) < measured:
            low = middle
        else:
            high = middle
    return low


def slot_time(law: LatencyModel, loop: ClosedLoop) -> float:
    """Mean seconds a slot is held under the law."""
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
