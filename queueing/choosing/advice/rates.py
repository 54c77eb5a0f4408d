"""The rate as a setting of an advice: so many times as many arrivals as the window's, and the
largest rates that the setting in force can serve, at the window's lengths and speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kendall.policies.text import SpecError, parse_number, short_number
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.errors import NoStableChoiceError, PredictionError

LARGEST = 1000.0  # times the observed rate
PRECISION = 0.01  # of the largest rate that keeps an SLO


def rate_factor_of(parameters: Mapping[str, str]) -> float:
    """What the query of an advice multiplies the rate with; 1 without it. Raises SpecError."""
    text = parameters.get("rate_factor")
    factor = 1.0 if text is None else parse_number("rate_factor", text, f"rate_factor={text}")
    if not 0 < factor <= LARGEST:
        raise SpecError(
            f"got rate_factor={text}; expected a factor on the observed rate, more than 0 and at "
            f"most {LARGEST:g}"
        )
    return factor


def rates(window: WindowModel, setting: Setting, objective: Objective) -> dict[str, Any]:
    """Requests per second, as JSON: observed, and the largest that `setting` can serve, with a
    steady state and within the SLO; null where there is none, and `reason` says why.
    """
    observed = window.estimates.arrival_rate
    refusal = window.refusal(setting.max_output_tokens)
    found: dict[str, Any] = {
        "observed": observed.to_dict(),
        "largest_stable": None,
        "slo": ", ".join(f"{slo}s" for slo in objective.slos) or None,
        "largest_within_slo": None,
        "reason": refusal,
    }
    if refusal is not None:
        return found
    model = window.model(setting)
    stable = model.largest_stable_rate
    if model.requests.patience is None and math.isfinite(stable):
        found["largest_stable"] = stable
    if objective.slo is not None:
        try:
            best = largest_rate(model, objective, PRECISION, window.ranking(objective.slos)).best
        except (NoStableChoiceError, PredictionError, SpecError) as error:
            return found | {"reason": str(error)}
        found["largest_within_slo"] = best["arrival_rate"]
    return found


def rate_sentences(found: Mapping[str, Any]) -> list[str]:
    """In words: the rate that was asked about, then what the setting in force can serve."""
    observed, factor = found["observed"]["value"], found["factor"]
    ends = [found["observed"][end] for end in ("low", "high")]
    asked = f"{_rate(observed)} observed"
    if None not in ends:
        asked += f" (95 %: {short_number(ends[0], 3)} to {short_number(ends[1], 3)})"
    said = [asked if factor == 1 else f"{_rate(observed * factor)}, {factor:g} times {asked}"]
    if found["refused"]:
        said.append(f"only admitted calls are counted: {found['refused']}")
    bounds = {"largest_within_slo": f"keeps {found['slo']}", "largest_stable": "has a steady state"}
    for key, what in bounds.items():
        if (most := found[key]) is not None:
            times = f"{short_number(most / observed, 3)} times the observed rate"
            said.append(f"the setting in force {what} up to {_rate(most)}, {times}")
    if found["slo"] is not None and found["largest_within_slo"] is None:
        said.append(f"no rate is known at which the setting in force keeps it: {found['reason']}")
    return said


def _rate(value: float) -> str:
    return f"{short_number(value, 3)} requests/s"
