"""The stalls of continuous servers, request by request: a stall holds all that are in service at
once, and takes the largest of their excesses.

What the other servers of the queue do meanwhile is measured. Servers that share processors are
faster then, and a stall of the whole machine holds them too:

    p     lawful slot seconds over seconds of the others in the times of those that were held most,
          over what it is on the whole
    pace  (p - (1 - x)) / x,   x the share of these times that the stalls had
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.speed_process import FloatArray, stalled
from kendall.queueing.estimation.summaries import Stalls


class _Episodes(NamedTuple):
    """Stretches of slots that were stalled while they overlapped, in order of start; of each the
    slot that was held most.
    """

    excess: FloatArray  # seconds
    first: FloatArray  # start of the stretch
    begin: FloatArray  # of the slot
    end: FloatArray

    @classmethod
    def of(cls, slots: BatchTimes) -> _Episodes:
        """Of one server."""
        slow = slots.part(stalled(slots))
        if not slow.count:
            return cls(*[np.empty(0)] * 4)
        excess = slow.measured - float(np.median(slots.ratio)) * slow.fitted
        ends = np.maximum.accumulate(slow.at + slow.measured)
        first = np.flatnonzero(np.append(True, slow.at[1:] > ends[:-1]))
        stretch = np.repeat(np.arange(first.size), np.diff(np.append(first, slow.count)))
        most = np.lexsort((excess, stretch))[np.append(first[1:], slow.count) - 1]
        begin = slow.at[most]
        return cls(excess[most], slow.at[first], begin, begin + slow.measured[most])

    def overlapping(
        self, served: BatchTimes
    ) -> Iterator[tuple[float, float, float, FloatArray, BatchTimes]]:
        """Excess, begin and end of each, the slots of another server beside it and how long."""
        longest = float(served.measured.max())
        for excess, _, begin, end in zip(*self, strict=True):
            low, high = np.searchsorted(served.at, (begin - longest, end))
            near = served.part(np.arange(low, high))
            overlap = np.minimum(near.at + near.measured, end) - np.maximum(near.at, begin)
            beside: npt.NDArray[np.bool_] = overlap > 0
            yield excess, begin, end, overlap[beside], near.part(beside)


def slot_stalls(slots: Sequence[BatchTimes]) -> Stalls:
    """Of all servers of one queue, each one entry."""
    each_server = [each.part(np.argsort(each.at, kind="stable")) for each in slots if each.count]
    found = list(map(_Episodes.of, each_server))
    excess = np.concatenate([np.empty(0), *(each.excess for each in found)])
    if not excess.size:
        return Stalls(0, 0.0, 0.0, None)
    total, busy = float(excess.sum()), 0.0  # seconds in which somebody was in service
    for slots_of in each_server:
        ends = np.maximum.accumulate(slots_of.at + slots_of.measured)
        following = np.append(slots_of.at[1:], np.inf)
        busy += float((np.minimum(following, ends) - slots_of.at).sum())
    return Stalls(
        excess.size,
        total / busy,
        float(excess.max()),
        float(max(each.first.max() for each in found if each.first.size)),
        size=float(excess @ excess) / total,
        others=_pace_of_others(each_server, found),
    )


def _pace_of_others(slots: Sequence[BatchTimes], found: Sequence[_Episodes]) -> float:
    """1 where nobody else served."""
    seconds = lawful = stalling = 0.0
    for server, episodes in enumerate(found):
        for other, served in enumerate(slots):
            if other == server:
                continue
            whole = float(served.measured.sum() / served.fitted.sum())
            for excess, begin, end, overlap, near in episodes.overlapping(served):
                seconds += float(overlap.sum())
                lawful += whole * float(overlap @ (near.fitted / near.measured))
                stalling += float(overlap.sum()) * excess / (end - begin)
    return max(0.0, (lawful - (seconds - stalling)) / stalling) if stalling else 1.0
