"""What the stalls of a continuous engine cost those who come after.

Its law does not hold them; what they cost the sequences in service, its speed does. A stall of s seconds leaves the work of as many
seconds, which is gone after s / (1 - load): of M/G/1.
"""

from __future__ import annotations

import dataclasses

from queueing.estimation.speed_process import Stalls
from queueing.result import Prediction


def stall_backlog(stalls: Stalls, load: float) -> float:
    """Seconds that they add to the mean sojourn; 0 where there is no steady state."""
    return stalls.time_share * stalls.size * load / (2 * (1 - load)) if stalls.count and load < 1 else 0.0


def behind_stalls(prediction: Prediction, backlog: float) -> Prediction:
    """The mean sojourn later by the backlog; quantiles and queueing delay are those without it."""
    if not backlog or prediction.sojourn_time.mean is None:
        return prediction
    note = f"stalls of the engine add {1000 * backlog:.3g} ms to the mean sojourn, not to its quantiles"
    sojourn = dataclasses.replace(prediction.sojourn_time, mean=prediction.sojourn_time.mean + backlog)
    return dataclasses.replace(prediction, sojourn_time=sojourn, assumptions=(*prediction.assumptions, note))
