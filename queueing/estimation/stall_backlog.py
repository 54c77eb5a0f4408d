"""The cost of a continuous engine's stalls for the requests behind them.

Its law does not hold them, in theory and in simulation alike; what they cost the sequences in
service, its speed does. Stalls of s seconds hold the share q of the busy time. Who comes in one,
with probability q times the utilisation, waits for s / 2; the work that has come
meanwhile is gone s / (1 - load) after its beginning. As in M/G/1:

    added = q utilisation s / 2 / (1 - load)

A speed that was measured in slots holds the first part already, that of those who came into a stall
and took a slot in it: the rest is q s / 2 * load / (1 - load). Exact for work that is served at a
rate in proportion to the sequences, and for one slot.

Of c servers of one queue the others take the work of one that stalls, at `Stalls.others` times
their pace: what is left is the rate of service that they have no room for,

    E[(X(n) / X - others (c - 1) / c)^+] / (1 - load)    in place of load / (1 - load)

n requests at once, evenly on the servers, as a birth-death process (queueing.models.slots); X(n)
their rate, X that of full slots. It is load / (1 - load) for one server and for others = 0, stalls
of the whole machine, and P(all busy) / c / (1 - load) for one slot each, as in M/G/c.

Simulated slot by slot and told from the records alone (stalls exponential, 0.15 s on average and
15 % of the time, services of 0.06 to 0.1 s; 2 and 4 servers of 1 and 8 slots, loads 0.5 to 0.8;
40,000 requests a cell): the mean sojourn is -1 to +6 % off where each stalls for itself, 0 to +8 %
where the other one is half as fast again meanwhile, -15 to +1 % where it is half as fast, -8 to
+10 % where all stall at once. One server: -2 to 0 % with one slot, +5 to +11 % with 8, because a
speed measured in slots takes those who came in a stall for work.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kendall.queueing.errors import NotConvergedError
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.models.slots.continuous import solve_continuous
from kendall.queueing.models.slots.processor_sharing import log_weights
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction

_ENOUGH = 1024  # slots of a server without a bound
_FOLLOWED = 64  # numbers of slots whose rates are computed; those between are interpolated


def stall_backlog(
    stalls: Stalls,
    model: Queue,
    load: float,
    *,
    utilisation: float | None = None,
) -> float:
    """Seconds that they add to the mean sojourn: with patience at most that, without it 0 where
    there is no steady state.

    `utilisation`: of the engine, where the speed was not measured in slots.
    """
    patience = model.requests.patience
    if not stalls.count or (load >= 1 and patience is None):
        return 0.0
    added = math.inf
    if load < 1:
        behind = work_left(model, load, stalls.others)
        held = behind if utilisation is None else utilisation * (1 + behind)
        added = stalls.time_share * stalls.size / 2 * held
    return added if patience is None else min(added, patience)


def work_left(model: Queue, load: float, others: float = 1.0) -> float:
    """How long the work that is left behind a stall of one server lasts on average, as a multiple
    of the stall; the other servers continue at `others` times their pace. `load` < 1.
    """
    if model.engine.servers == 1:
        return load / (1 - load)
    slots, servers = model.bound or _ENOUGH, model.engine.servers
    known = np.unique(np.geomspace(1, slots, min(slots, _FOLLOWED)).astype(int))
    time = model.slot_time
    followed = [time.throughput(n, refilled=n == slots) for n in known.tolist()]
    each = np.interp(np.arange(slots + 1), [0, *known], [0.0, *followed])
    share, more = np.divmod(np.arange(1, servers * slots + 1), servers)
    total = (servers - more) * each[share] + more * each[np.minimum(share + 1, slots)]
    rates = total / total[-1]  # X(n) / X for n = 1, ..., all slots of all servers
    weights = log_weights(load, rates)
    weights = np.exp(weights - weights.max())
    weights[-1] /= 1 - load  # with the states in which requests wait
    room = others * (servers - 1) / servers
    left = np.maximum(np.append(0.0, rates) - room, 0.0)
    return float(left @ weights / weights.sum()) / (1 - load)


def utilisation_of(model: Queue, arrival_rate: float) -> float:
    """The share of the time in which a continuous engine serves; 1 without a steady state, and
    where so many slots are taken.
    """
    if model.load(arrival_rate) >= 1:
        return 1.0
    try:
        return solve_continuous(
            model.slot_time,
            arrival_rate * model.requests.call_size / model.engine.servers,
            model.bound,
        ).utilisation
    except NotConvergedError:
        return 1.0


def behind_stalls(prediction: Prediction, backlog: float) -> Prediction:
    """The mean sojourn later by the backlog; its quantiles, queueing delay and time to first
    token are those without it.
    """
    if not backlog or prediction.sojourn_time.mean is None:
        return prediction
    note = (
        f"stalls of the engine add {1000 * backlog:.3g} ms to the mean sojourn, not to its "
        "quantiles nor to the time to first token"
    )
    sojourn = dataclasses.replace(
        prediction.sojourn_time, mean=prediction.sojourn_time.mean + backlog
    )
    return dataclasses.replace(
        prediction, sojourn_time=sojourn, assumptions=(*prediction.assumptions, note)
    )
