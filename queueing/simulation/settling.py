"""Which means of a simulation say nothing, however long it is: those of durations that a tail of
the lengths leaves without a variance.

Without a second moment of the lengths the delay behind one server has no mean, and a mean that
exists elsewhere, as of a sojourn, has no standard error. With patience a delay is bounded, and so
settles.
"""

from __future__ import annotations

import dataclasses

from queueing.model import Model
from queueing.result import Prediction

_BOUNDED = ("queueing_delay", "served_queueing_delay", "time_to_first_token")  # by the patience


def no_second_moment(model: Model) -> str:
    """Of lengths that have none."""
    return f"the lengths have no second moment (tail index {model.tail_index:g}, at most 2)"


def tail_notes(model: Model) -> tuple[str, ...]:
    """What a tail of the lengths does to simulated means."""
    if model.tail_index <= 2:
        which = "no means of durations" if model.patience is None else "no mean of the sojourn time"
        return (
            f"{which}: {no_second_moment(model)}, so that a simulated mean does not settle, "
            "however long the run",
        )
    if model.tail_index <= 3:
        return (
            "simulated means settle slowly: the delays have no variance (tail index "
            f"{model.tail_index:g}, at most 3)",
        )
    return ()


def without_unsettled(simulated: Prediction, model: Model) -> Prediction:
    """Quantiles only, of the durations whose mean does not settle."""
    if model.tail_index > 2:
        return simulated
    bare = simulated.without_means(
        "sojourn_time", *(() if model.patience is not None else _BOUNDED)
    )
    if not simulated.stations:
        return bare
    *before, decode = simulated.stations
    delay = dataclasses.replace(decode.queueing_delay, mean=None, standard_error=None)
    return dataclasses.replace(
        bare, stations=(*before, dataclasses.replace(decode, queueing_delay=delay))
    )
