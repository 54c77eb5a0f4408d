"""A queue for each server, compiled: every call goes to one of them as it arrives, where the fewest
requests are, of all or of two by chance, and stays there (`queueing.simulation.scenarios.routed`).
Or one queue for all, that rejects a call with which more than `most` requests would be there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.policies.core import UNBOUNDED
from kendall.queueing.simulation.kernels import Floats, Ints, inner


class Lanes(NamedTuple):
    """One for each server, or one for all.

    timers   when the policy asked to be asked again
    held     requests of each, waiting and in service
    serving  of these, for each server, those of the batch in service whose answers have not left,
             as far as was looked
    member   of these the first, -1 where there is none; the others behind it, by
             `OrderedQueue.following`
    last     the lane that was chosen last
    choices  of each request the two lanes that its call may join; empty: any
    most     requests that one lane for all holds; UNBOUNDED: any number
    """

    timers: Floats
    held: Ints
    serving: Ints
    member: Ints
    last: Ints
    choices: Ints
    most: int


def new_lanes(count: int, servers: int, choices: Ints, most: int) -> Lanes:
    """Empty ones."""
    held, serving = np.zeros(count, dtype=np.int64), np.zeros(servers, dtype=np.int64)
    member, last = np.full(servers, -1, dtype=np.int64), np.full(1, -1, dtype=np.int64)
    return Lanes(np.full(count, np.inf), held, serving, member, last, choices, most)


@inner
def route(routed, now, requests, system, path):  # type: ignore[no-untyped-def]
    """Choose the lanes of all calls that arrive now, before anything else happens now; how many
    requests have one.
    """
    queue, lanes = system
    call_ends, count = requests.call_ends, len(requests.arrived_at)
    while routed < count and requests.arrived_at[routed] == now:
        behind = call_ends[routed] if len(call_ends) > 0 else routed + 1
        lane = _lane_for(routed, now, queue, lanes, path)
        for job in range(routed, behind):
            queue.lane[job] = lane
        lanes.held[lane] += behind - routed
        routed = behind
    return routed


@inner
def _lane_for(job, now, queue, lanes, path):  # type: ignore[no-untyped-def]
    """Where the call goes that this request is the first of."""
    if len(lanes.held) == 1:
        return 0
    if len(lanes.choices) == 0:
        return _fewest(now, queue, lanes, path)
    first, other = lanes.choices[job, 0], lanes.choices[job, 1]
    _drop_released(first, now, queue, lanes, path)
    _drop_released(other, now, queue, lanes, path)
    return other if lanes.held[other] < lanes.held[first] else first


@inner
def _fewest(now, queue, lanes, path):  # type: ignore[no-untyped-def]
    """The lane with the fewest requests; of equal ones the next behind the last that was chosen."""
    count, best = len(lanes.held), -1
    for turn in range(1, count + 1):
        lane = (lanes.last[0] + turn) % count
        _drop_released(lane, now, queue, lanes, path)
        if best < 0 or lanes.held[lane] < lanes.held[best]:
            best = lane
    lanes.last[0] = best
    return best


@inner
def has_room(call, at, queue, lanes, path):  # type: ignore[no-untyped-def]
    """Whether a call, from its first request to one behind its last, is admitted now, after all
    that ends now; `at`: now, and how many requests have a lane, also later ones of this instant.
    """
    (first, behind), (now, routed) = call, at
    if lanes.most == UNBOUNDED:
        return True
    for server in range(len(lanes.member)):
        _drop_released(server, np.nextafter(now, np.inf), queue, lanes, path)
    if lanes.held[0] - (routed - behind) <= lanes.most:
        return True
    lanes.held[0] -= behind - first
    return False


@inner
def _drop_released(server, now, queue, lanes, path):  # type: ignore[no-untyped-def]
    """Members of an unpadded batch leave one by one."""
    following, job, kept = queue.following, lanes.member[server], -1
    lanes.member[server] = -1
    while job >= 0:
        behind = following[job]
        if path.released_at[job] < now:
            lanes.held[lane_of(server, lanes)] -= 1
            lanes.serving[server] -= 1
        else:
            following[job], kept = kept, job
        job = behind
    lanes.member[server] = kept


@inner
def dispatched(server, members, padded, queue, lanes):  # type: ignore[no-untyped-def]
    """A batch of a server is in service."""
    lanes.serving[server] = len(members)
    if padded or (len(lanes.held) == 1 and lanes.most == UNBOUNDED):
        return
    for job in members:
        queue.following[job] = lanes.member[server]
        lanes.member[server] = job


@inner
def ended(server, lanes):  # type: ignore[no-untyped-def]
    """The batch of a server is over; its lane."""
    lane = lane_of(server, lanes)
    lanes.held[lane] -= lanes.serving[server]
    lanes.serving[server], lanes.member[server] = 0, -1
    return lane


@inner
def lane_of(server, lanes):  # type: ignore[no-untyped-def]
    """The queue that a server takes from."""
    return server if len(lanes.held) > 1 else 0
