"""Whether the number in the system grows for good, told from watching it while requests are being
sent, or from the records of a run.

The time watched is cut into `BLOCKS` equal blocks. Under overload the number in the system is a
random walk with drift: its increments over blocks are nearly independent, whatever happens within a
block, and

    t = mean increment / (standard deviation of the increments / sqrt(BLOCKS))

tells a drift from luck. In a stable system the increments are negatively correlated (what came goes
again), so their sum stays small beside its estimated error and t is smaller still: the test errs on
the side of stability. One jump gives t of about 1. A point is called unstable only where the growth
is significant AND large (`LEAST_GROWTH` of what arrives is left behind) AND has been watched for
long enough. It is asked at growing intervals only, because every further look is a further chance
to be wrong.

tests/loadgen/test_sweep_stability.py shows by simulation how often it is wrong at load 0.8, and how
soon it is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.loadgen.measures.metrics import began_at
from kendall.policies.text import short_number
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.statistics import FloatArray

BLOCKS = 16
LEAST_T = 4.0
LEAST_GROWTH = 0.03  # share of the arrivals that stays behind
LEAST_ARRIVALS = 200
FEW_ARRIVALS, STEEP = 50, 0.2  # fewer will do where so large a share stays behind
LEAST_SECONDS = 5.0  # a shared machine that stalls for a second or two is not overloaded
LEAST_NUMBER = 20  # in the system, above what there was at the first look
WARM_UP = 0.2  # of the time watched, left out: the way from empty to a stationary level
SAMPLES = 1000  # of a run that is over
LOOKS = 1.15  # the time watched grows by this factor from one look to the next


@dataclass(frozen=True, slots=True)
class Growth:
    """How the number in the system went."""

    share: float  # growth per arrival
    half_width: float  # 95 %, of the share
    t: float
    number: int  # in the system at the end
    seconds: float
    arrivals: float  # expected in the time taken into account

    @property
    def unstable(self) -> bool:
        """Whether the growth is significant and large."""
        least = FEW_ARRIVALS if self.share > STEEP else LEAST_ARRIVALS
        enough = self.arrivals >= least and self.number >= LEAST_NUMBER
        return enough and self.t > LEAST_T and self.share > LEAST_GROWTH

    def __str__(self) -> str:
        return (
            f"{self.number} unanswered after {short_number(self.seconds, 3)} s, "
            f"growing by {self.share:.0%} of the arrivals (t = {self.t:.1f} over {BLOCKS} blocks)"
        )


def growth(at: FloatArray, number: FloatArray, rate: float) -> Growth:
    """From samples of the number in the system at instants in order, seconds from the first
    arrival; `rate` per second.
    """
    edges = np.linspace(at[0] + WARM_UP * (at[-1] - at[0]), at[-1], BLOCKS + 1)
    increments = np.diff(np.interp(edges, at, number))
    seconds = float(at[-1] - at[0])
    arrivals = rate * float(edges[-1] - edges[0])
    error = float(increments.std(ddof=1)) * math.sqrt(BLOCKS)  # of the sum of the increments
    total = float(increments.sum())
    t = total / error if error else math.inf * total if total else 0.0
    return Growth(
        share=total / arrivals if arrivals else 0.0,
        half_width=2.131 * error / arrivals
        if arrivals
        else math.inf,  # Student, 15 degrees of freedom
        t=t,
        number=int(number[-1]),
        seconds=seconds,
        arrivals=arrivals,
    )


class GrowthWatch:
    """Collects samples and looks at them at growing intervals."""

    def __init__(self, rate: float, least_seconds: float = LEAST_SECONDS) -> None:
        self._rate = rate
        self._at: list[float] = []
        self._number: list[float] = []
        self._next_look = max(least_seconds, LEAST_ARRIVALS / (1 - WARM_UP) / rate)

    def observe(self, at: float, number: int) -> Growth | None:
        """Take one sample, `at` seconds after the start; answers where it is a time to look,
        else None.
        """
        self._at.append(at)
        self._number.append(number)
        seconds = at - self._at[0]
        if seconds < self._next_look:
            return None
        self._next_look = LOOKS * seconds
        return self.so_far()

    def so_far(self) -> Growth | None:
        """The growth of the samples so far; None where they are too few."""
        if len(self._at) <= BLOCKS:
            return None
        return growth(np.array(self._at), np.array(self._number), self._rate)


def backlog(records: Sequence[Record]) -> Growth | None:
    """The growth of the queue in a run, from its records: between the first and the last intended
    instant; None where those are too near each other to say anything.

    Where the server reports queueing delays, those who wait are counted: long answers fill the
    server at the beginning of every run, and are no growth of a queue. Elsewhere the number in the
    system.
    """
    known = [(at, record) for record in records if (at := began_at(record)) is not None]
    begin = np.sort(np.array([at for at, _ in known]))
    if begin.size < 2 or begin[-1] - begin[0] < LEAST_SECONDS:
        return None
    reported = any(record.queueing_delay is not None for _, record in known)
    left = []  # the queue, or the system; what was never answered stays
    for at, record in known:
        if reported and record.queueing_delay is not None:
            sent_at = at if record.sent_at is None else record.sent_at
            left.append(sent_at + record.queueing_delay)
        else:
            left.append(math.inf if record.released_at is None else record.released_at)
    end = np.sort(np.array(left))
    instants = np.linspace(begin[0], begin[-1], SAMPLES)
    number = np.searchsorted(begin, instants, side="right") - np.searchsorted(
        end, instants, side="right"
    )
    return growth(
        instants - begin[0],
        number.astype(np.float64),
        (begin.size - 1) / float(begin[-1] - begin[0]),
    )
