"""The rate as a setting of an advice: so many times as many arrivals as the window's, and the
largest rates that the setting in force can serve, at the window's lengths and speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kendall.policies.text import SpecError, parse_number, short_number
from kendall.queueing.choosing.forecast import RateBounds, Setting
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.errors import NoStableChoiceError, PredictionError

LARGEST = 1000.0  # times the observed rate
PRECISION = 0.01  # of the largest rate that keeps an SLO


def rate_factor_of(parameters: Mapping[str, str]) -> float:
    """The factor on the arrival rate in the query of an advice, by default 1. Raises SpecError."""
    text = parameters.get("rate_factor")
    factor = 1.0 if text is None else parse_number("rate_factor", text, f"rate_factor={text}")
    if not 0 < factor <= LARGEST:
        raise SpecError(
            f"got rate_factor={text}; expected a factor on the observed rate, more than 0 and at "
            f"most {LARGEST:g}"
        )
    return factor


def rates(window: WindowModel, setting: Setting, objective: Objective) -> RateBounds:
    """The rates that `setting` can serve."""
    refusal = window.refusal(setting.max_output_tokens)
    bounds = RateBounds(
        observed=window.estimates.arrival_rate,
        slo=", ".join(f"{slo}s" for slo in objective.slos) or None,
        reason=refusal,
    )
    if refusal is not None:
        return bounds
    model = window.model(setting)
    if model.requests.patience is None and math.isfinite(model.largest_stable_rate):
        bounds = replace(bounds, largest_stable=model.largest_stable_rate)
    if objective.slo is None:
        return bounds
    try:
        best = largest_rate(model, objective, PRECISION, window.ranking(objective.slos)).best
    except (NoStableChoiceError, PredictionError, SpecError) as error:
        return replace(bounds, reason=str(error))
    return replace(bounds, largest_within_slo=best["arrival_rate"])


def rate_sentences(bounds: RateBounds) -> tuple[str, ...]:
    """In words: the rate that was asked about, then what the setting in force can serve."""
    observed, factor = bounds.observed.value, bounds.factor
    asked = f"{_rate(observed)} observed"
    if bounds.observed.known:
        low, high = (short_number(end, 3) for end in (bounds.observed.low, bounds.observed.high))
        asked += f" (95 %: {low} to {high})"
    said = [asked if factor == 1 else f"{_rate(observed * factor)}, {factor:g} times {asked}"]
    if bounds.refused:
        said.append(f"only admitted calls are counted: {bounds.refused}")
    for most, what in (
        (bounds.largest_within_slo, f"keeps {bounds.slo}"),
        (bounds.largest_stable, "has a steady state"),
    ):
        if most is not None:
            times = f"{short_number(most / observed, 3)} times the observed rate"
            said.append(f"the setting in force {what} up to {_rate(most)}, {times}")
    if bounds.slo is not None and bounds.largest_within_slo is None:
        said.append(f"no rate is known at which the setting in force keeps it: {bounds.reason}")
    return tuple(said)


def _rate(value: float) -> str:
    return f"{short_number(value, 3)} requests/s"
