"""By which rule a balancer sends requests to servers with a queue each, read off where they went.

Each rule gives every arrival a probability of going where it went: the fewest requests to one of
those that have the fewest, round robin rather to the server that has had fewer of the last ones.
(Not to the one whose turn it is: two that come at nearly one instant may be told in the other
order.) A balancer knows what is in flight a little late and others send beside it, so one request
in ten may go anywhere. Only what came while every server is seen counts: spans of one may begin
later, or come later, than those of another. The rule with the largest likelihood is named where it
beats random choice, which needs no knowledge, by a factor that chance does not reach; servers
behind one queue are told by the delays: there nobody waits while a server has a free slot or takes
a request that came later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.token_distribution import Vector

FEWEST = 50  # requests
ASTRAY = 0.1  # of the requests, under any rule
SURE = math.log(1000.0)  # of the likelihood over that of random choice
LATE = 0.02  # seconds: a wait that is shorter is no wait for a slot
MEMORY = 20  # requests whose turns count
TURN = 0.5  # requests that a server has had too many, which make it e times less likely
CENTRAL = 0.05  # of the waits: as many may be out of turn in one queue

Servers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The rule that is named, as `Engine.routing` has it; `likelihoods`: mean log-likelihood of a
    request under each rule; `beside_free`: the share of the waits during which another server had
    a free slot, None where nobody waited.
    """

    rule: str
    requests: int
    likelihoods: dict[str, float]
    out_of_turn: float | None


def routing_of(
    arrived: Vector, dispatched: Vector, freed: Vector, server: Servers, slots: int
) -> Routing | None:
    """Requests in any order, seconds; servers are numbered from 0, each with so many slots. None
    with one server, or too few requests.
    """
    order = np.argsort(arrived, kind="stable")
    arrived, dispatched, freed = arrived[order], dispatched[order], freed[order]
    server = server[order]
    servers = int(server.max(initial=0)) + 1
    if servers == 1:
        return None
    seen = [arrived[server == each] for each in range(servers)]
    known = (arrived >= max(each[0] for each in seen)) & (arrived <= min(each[-1] for each in seen))
    arrived, dispatched, freed = arrived[known], dispatched[known], freed[known]
    server = server[known]
    if arrived.size < FEWEST:
        return None
    out_of_turn = _waits_out_of_turn(arrived, dispatched, freed, server, slots)
    present = _present(arrived, freed, server, servers)
    told = {name: _mean_log(p, servers) for name, p in _chances(present, server).items()}
    if out_of_turn is not None and out_of_turn <= CENTRAL:
        rule = "central"
    else:
        best = max(told, key=lambda name: told[name])
        rule = best if (told[best] - told["random"]) * arrived.size > SURE else "random"
    return Routing(rule=rule, requests=int(arrived.size), likelihoods=told, out_of_turn=out_of_turn)


def _present(arrived: Vector, freed: Vector, server: Servers, servers: int) -> Servers:
    """Requests at each server as each arrives, a row an arrival."""
    columns = []
    for each in range(servers):
        mine = server == each
        joined = np.cumsum(mine) - mine
        left = np.searchsorted(np.sort(freed[mine]), arrived, side="right")
        columns.append(joined - np.minimum(left, joined))
    return np.stack(columns, axis=1)


def _chances(present: Servers, server: Servers) -> dict[str, Vector]:
    """The probability of each request's server under each rule."""
    count, servers = present.shape
    own = present[np.arange(count), server][:, None]
    fewer = (present < own).sum(axis=1)
    equal = (present == own).sum(axis=1)
    found = {
        "random": np.full(count, 1 / servers),
        "round_robin": _in_turn(server, servers),
        "least_requests": np.where(fewer == 0, 1 / equal, 0.0),
    }
    if servers > 2:  # of two it is the one with the fewest
        pairs = servers * (servers - 1) / 2
        found["power_of_two"] = (servers - fewer - equal + (equal - 1) / 2) / pairs
    return found


def _in_turn(server: Servers, servers: int) -> Vector:
    """The probability of each request's server by how many each has had beyond its share."""
    beyond, chances = np.zeros(servers), np.empty(server.size)
    for number, each in enumerate(server):
        weights = np.exp((beyond.min() - beyond) / TURN)
        chances[number] = weights[each] / weights.sum()
        beyond = (1 - 1 / MEMORY) * beyond - 1 / servers
        beyond[each] += 1
    return chances


def _mean_log(chances: Vector, servers: int) -> float:
    return float(np.log((1 - ASTRAY) * chances + ASTRAY / servers).mean())


def _waits_out_of_turn(
    arrived: Vector, dispatched: Vector, freed: Vector, server: Servers, slots: int
) -> float | None:
    """The share of the waits in whose middle another server had a free slot, or before whose end
    it took a request that came later.
    """
    waits = np.flatnonzero(dispatched - arrived > LATE)
    if not waits.size:
        return None
    out_of_turn = np.zeros(waits.size, dtype=np.bool_)
    middle = (arrived[waits] + dispatched[waits]) / 2
    for each in range(int(server.max()) + 1):
        mine = server == each
        begun = np.searchsorted(np.sort(dispatched[mine]), middle, side="right")
        ended = np.searchsorted(np.sort(freed[mine]), middle, side="right")
        of_later = np.minimum.accumulate(np.where(mine, dispatched, math.inf)[::-1])[::-1]
        passed = of_later[waits] < dispatched[waits] - LATE
        out_of_turn |= (server[waits] != each) & ((begun - ended < slots) | passed)
    return float(out_of_turn.mean())
