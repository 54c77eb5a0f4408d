"""Compiled waiting queues in the orders of policies that interrupt nobody (policies.orders): the
requests that a batch or the free slots take next, as `Order.first` chooses them.

    first in  in the order of arrival
    ranked    a heap by (rank, arrival): spjf, ljf, threshold, with aging or without, and what is
              served in order of arrival
    ratio     hrrn: a scan of those that wait at each dispatch, `rank` the predicted lengths
    groups    binned: lists in order of arrival; a batch is of the group of the oldest request

One queue for all servers, or a lane for each: then a request waits in the lane of the server that
it was sent to. Requests are numbered in order of arrival; those of a group in a lane are a list in
that order. With one patience for all, who is lost next is the oldest that waits; a heap keeps the
lost until they come first. The heap is a pairing heap: of all lanes in the same few arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kendall.policies.core import UNBOUNDED
from kendall.queueing.simulation.kernels import Floats, Ints, inner

FIRST_IN, RANKED, RATIO, GROUPS = range(4)
FIRST, LAST, COUNT = range(3)  # rows of `ends`


class RankedQueue(NamedTuple):
    """Of each request `rank`, `group`, `lane` (a router sets it) and whether it `waits`.

    ends       of each list (a group of a lane) its first and last request and how many wait
    following, preceding  requests in the same list
    tops       of each lane the first of its heap, -1 where it is empty
    child, sibling  in the heap
    waiting    how many wait in each lane
    chosen     room for those that are taken together
    """

    kind: int
    rank: Floats
    group: Ints
    lane: Ints
    waits: npt.NDArray[np.bool_]
    ends: Ints
    following: Ints
    preceding: Ints
    tops: Ints
    child: Ints
    sibling: Ints
    waiting: Ints
    chosen: Ints


def ordered_queue(
    kind: int, rank: npt.NDArray[Any], group: npt.NDArray[Any], largest: int, lanes: int = 1
) -> RankedQueue:
    """An empty one, of which at most `largest` are taken at once."""
    count = len(rank)
    groups = int(group.max()) + 1 if kind == GROUPS and count else 1
    heap = np.full((2, count if kind == RANKED else 0), -1, dtype=np.int64)
    following, preceding = np.full((2, count), -1, dtype=np.int64)
    return RankedQueue(
        kind,
        np.asarray(rank, float),
        np.asarray(group, np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.bool_),
        np.zeros((3, groups * lanes), dtype=np.int64),
        following,
        preceding,
        np.full(lanes, -1, dtype=np.int64),
        heap[0],
        heap[1],
        np.zeros(lanes, dtype=np.int64),
        np.empty(min(largest, max(count, 1)), dtype=np.int64),
    )


@inner
def _list_of(lane, group, queue):  # type: ignore[no-untyped-def]
    """The number of a list; of `group` 0 and the next lane: behind the last one of this lane."""
    return lane * (queue.ends.shape[1] // len(queue.waiting)) + group


@inner
def enter(job, queue):  # type: ignore[no-untyped-def]
    """A request arrives."""
    ends, lane = queue.ends, queue.lane[job]
    own = _list_of(lane, queue.group[job], queue)
    queue.waits[job] = True
    if ends[COUNT, own] == 0:
        ends[FIRST, own] = job
    else:
        queue.following[ends[LAST, own]] = job
        queue.preceding[job] = ends[LAST, own]
    ends[LAST, own] = job
    ends[COUNT, own] += 1
    if queue.kind == RANKED:
        queue.tops[lane] = job if queue.tops[lane] < 0 else _meld(queue.tops[lane], job, queue)
    queue.waiting[lane] += 1


@inner
def leave(job, queue):  # type: ignore[no-untyped-def]
    """A request waits no more."""
    ends, following, preceding = queue.ends, queue.following, queue.preceding
    own = _list_of(queue.lane[job], queue.group[job], queue)
    before, behind = preceding[job], following[job]
    if before < 0:
        ends[FIRST, own] = behind
    else:
        following[before] = behind
    if behind < 0:
        ends[LAST, own] = before
    else:
        preceding[behind] = before
    following[job] = preceding[job] = -1
    ends[COUNT, own] -= 1
    queue.waits[job] = False
    queue.waiting[queue.lane[job]] -= 1


@inner
def _oldest_in(first, last, ends):  # type: ignore[no-untyped-def]
    """Of these lists, the request that has waited longest; -1 where nobody waits."""
    best = -1
    for own in range(first, last):
        if ends[COUNT, own] > 0 and (best < 0 or ends[FIRST, own] < best):
            best = ends[FIRST, own]
    return best


@inner
def oldest(queue):  # type: ignore[no-untyped-def]
    """The request that has waited longest, -1 where nobody waits."""
    return _oldest_in(0, queue.ends.shape[1], queue.ends)


@inner
def _meld(one, other, queue):  # type: ignore[no-untyped-def]
    """The first of two heaps becomes that of both."""
    rank, child, sibling = queue.rank, queue.child, queue.sibling
    if rank[other] < rank[one] or (rank[other] == rank[one] and other < one):
        one, other = other, one
    sibling[other] = child[one]
    child[one] = other
    return one


@inner
def _pop(lane, queue):  # type: ignore[no-untyped-def]
    """Take the first out of the heap."""
    child, sibling = queue.child, queue.sibling
    node, pairs = child[queue.tops[lane]], -1
    child[queue.tops[lane]] = -1
    while node >= 0:
        pair, other, node = node, sibling[node], -1
        if other >= 0:
            node = sibling[other]
            pair = _meld(pair, other, queue)
        sibling[pair] = pairs
        pairs = pair
    top = -1
    while pairs >= 0:
        pair = pairs
        pairs = sibling[pair]
        sibling[pair] = -1
        top = pair if top < 0 else _meld(top, pair, queue)
    queue.tops[lane] = top


@inner
def _highest_ratio(lane, now, requests, queue):  # type: ignore[no-untyped-def]
    """(arrival - now) / predicted least, the oldest of equal ones."""
    best, least = -1, np.inf
    job = queue.ends[FIRST, lane] if queue.waiting[lane] > 0 else -1
    while job >= 0:
        ratio = (requests.arrived_at[job] - now) / max(queue.rank[job], 1e-9)
        if ratio < least:
            best, least = job, ratio
        job = queue.following[job]
    return best


@inner
def next_of(lane, group, now, requests, queue):  # type: ignore[no-untyped-def]
    """Who of a lane is served next, of that group where there are groups; -1 where nobody waits."""
    if queue.kind == RATIO:
        return _highest_ratio(lane, now, requests, queue)
    if queue.kind == RANKED:
        while queue.tops[lane] >= 0 and not queue.waits[queue.tops[lane]]:
            _pop(lane, queue)  # it was lost
        return queue.tops[lane]
    own = _list_of(lane, group if queue.kind == GROUPS else 0, queue)
    return queue.ends[FIRST, own] if queue.ends[COUNT, own] > 0 else -1


@inner
def serve(job, queue):  # type: ignore[no-untyped-def]
    """The request that `next_of` named waits no more."""
    if queue.kind == RANKED:
        _pop(queue.lane[job], queue)
    leave(job, queue)


@inner
def take(size, lane, group, now, given, queue):  # type: ignore[no-untyped-def]
    """Put up to `size` requests in the order of service into `chosen`, of that group where there
    are groups, until the prompts of the next one are too many; how many.
    """
    (requests, bounds), taken, total = given, 0, 0
    while taken < size:
        job = next_of(lane, group, now, requests, queue)
        if job < 0:
            break
        total += requests.prompt_tokens[job]
        if taken > 0 and total > bounds.prompt_tokens:
            break
        serve(job, queue)
        queue.chosen[taken] = job
        taken += 1
    return taken


@inner
def _is_full(own, bounds, requests, queue):  # type: ignore[no-untyped-def]
    """Whether a list has a batch that waits for nobody: enough requests, or prompts enough."""
    if queue.ends[COUNT, own] >= bounds.wait_for:
        return True
    if bounds.prompt_tokens == UNBOUNDED or queue.ends[COUNT, own] < 2:
        return False
    job, total = queue.ends[FIRST, own], 0
    while job >= 0:
        total += requests.prompt_tokens[job]
        job = queue.following[job]
    return total > bounds.prompt_tokens


@inner
def _full_group(first, last, bounds, requests, queue):  # type: ignore[no-untyped-def]
    """Of the full groups the one whose oldest request arrived first; -1: none."""
    best, ends = -1, queue.ends
    for own in range(first, last):
        sooner = best < 0 or ends[FIRST, own] < ends[FIRST, best]
        if sooner and _is_full(own, bounds, requests, queue):
            best = own
    return best if best < 0 else best - first


@inner
def ready(bounds, lane, now, closing, requests, queue):  # type: ignore[no-untyped-def]
    """What the next batch of a lane is, as a policy decides: its size and its group, and the
    instant at which to ask again if nothing starts yet (size 0).
    """
    kind, waiting = queue.kind, queue.waiting[lane]
    if waiting == 0:
        return 0, -1, np.inf
    begin, end = _list_of(lane, 0, queue), _list_of(lane + 1, 0, queue)
    first = _oldest_in(begin, end, queue.ends)
    group = queue.group[first]
    if bounds.wait_for > 1:
        full = _full_group(begin, end, bounds, requests, queue)
        if full >= 0:
            return min(bounds.batch_size, waiting), full, np.inf
        if kind == GROUPS or waiting < bounds.wait_for:
            deadline = requests.arrived_at[first] + bounds.max_wait
            if now < deadline and not closing:
                return 0, -1, deadline
    return min(bounds.batch_size, waiting), group, np.inf
