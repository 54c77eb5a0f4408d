"""What the stalls of a continuous engine cost those who come after.

Its law does not hold them, in theory and in simulation alike; what they cost the sequences in
service, its speed does. Stalls of s seconds hold the share q of the busy time. Who comes in one,
with probability q times the utilisation, waits for s / 2; the work that has come
meanwhile is gone s / (1 - load) after its beginning. As in M/G/1:

    added = q utilisation s / 2 / (1 - load)

A speed that was measured in slots holds the first part already, that of those who came into a stall
and took a slot in it: the rest is q s / 2 * load / (1 - load). Exact for work that is served at a
rate in proportion to the sequences, and for one slot.

Of c servers of one queue the others go on while one stalls, so that work is left behind only where
they are busy: P(all busy) / c of M/M/c in place of the load, as in M/G/c; simulated (one
slot, 2 and 4 servers, loads 0.5 to 0.9, stalls of 2 to 20 services) it is less by up to 0.13 of
what one server would leave. Stalls of the whole machine, which hold all servers at once, cost more.
"""

from __future__ import annotations

import dataclasses
import math

from queueing.errors import NotConvergedError
from queueing.estimation.speed.speed_process import Stalls
from queueing.model import Model
from queueing.models.mgc import ExponentialServers
from queueing.models.slots.continuous import solve_continuous
from queueing.result import Prediction


def stall_backlog(
    stalls: Stalls,
    load: float,
    patience: float | None = None,
    *,
    servers: int = 1,
    utilisation: float | None = None,
) -> float:
    """Seconds that they add to the mean sojourn: with patience at most that, without it 0 where
    there is no steady state.

    `utilisation`: of the engine, where the speed was not measured in slots.
    """
    if not stalls.count or (load >= 1 and patience is None):
        return 0.0
    added = math.inf
    if load < 1:
        behind = ExponentialServers(load * servers, 1.0, servers).waiting / servers / (1 - load)
        held = behind if utilisation is None else utilisation * (1 + behind)
        added = stalls.time_share * stalls.size / 2 * held
    return added if patience is None else min(added, patience)


def utilisation_of(model: Model, arrival_rate: float) -> float:
    """The share of the time in which a continuous engine serves; 1 without a steady state, and
    where so many slots are taken.
    """
    if model.load(arrival_rate) >= 1:
        return 1.0
    try:
        return solve_continuous(
            model.slot_time, arrival_rate * model.call_size / model.servers, model.bound
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
