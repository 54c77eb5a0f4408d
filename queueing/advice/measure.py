"""What an objective compares two settings by: one number of a setting, smaller is better; and what an objective forbids.

delay, clipped    mean queueing delay, seconds
throughput        1 / largest stable rate, seconds a request
v1, v2            theta (1 - E[u]) + (1 - theta) E[Wq] + l pi: how far the objective V stays below theta, its value without any loss
slo               the quantity that the SLO bounds, seconds
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.text import SpecError, parse_number, suggest
from queueing.advice.forecast import Forecast
from queueing.distributions import TokenDistribution
from queueing.model import Model
from queueing.optimisation.objective import Objective, Slo, parse_slo, utilities
from queueing.result import Prediction

WEIGHS = {"theta": ("v1", "v2"), "loss_cost": ("v2",), "max_clipped_fraction": ("delay", "throughput", "clipped")}
FIELDS = ("objective", "slo", *WEIGHS)
BESIDE = ("family", "target")  # of the same query, read elsewhere


def parse_objective(params: Mapping[str, str]) -> Objective:
    """From the texts of a query; `slo` alone means the objective slo. Raises SpecError."""
    for key in params:
        if key not in FIELDS + BESIDE:
            raise SpecError(f"got {key}={params[key]}; expected {', '.join(FIELDS + BESIDE)}{suggest(key, FIELDS + BESIDE)}")
    name = params.get("objective", "slo" if "slo" in params else "delay")
    numbers: dict[str, Any] = {key: parse_number(key, params[key], "the objective") for key in WEIGHS if key in params}
    objective = Objective(name=name, slo=parse_slo(params["slo"]) if "slo" in params else None, **numbers)
    for key in numbers:
        if name not in WEIGHS[key]:
            raise SpecError(f"got {key} with the objective {name}; expected it with {' or '.join(WEIGHS[key])}")
    return objective


@dataclass(frozen=True)
class Measure:
    """Of an objective; without one the mean queueing delay of dispatched requests."""

    objective: Objective | None = None

    @property
    def slo(self) -> Slo | None:
        """The SLO that it needs the quantile of."""
        return None if self.objective is None else self.objective.slo

    @property
    def has_pole(self) -> bool:
        """Whether it grows like 1 / (1 - load)."""
        return self.objective is None or self.objective.name in ("delay", "clipped", "slo")

    @property
    def needs_stability(self) -> bool:
        """Whether it has a value in a steady state only."""
        return self.objective is None or self.objective.name != "throughput"

    @property
    def name(self) -> str:
        """As in a sentence."""
        if self.slo is not None:
            return f"{self.slo.metric} of the {self.slo.field.replace('_', ' ')}"
        named = {"throughput": "time a request takes of the full engine", "v1": "loss of v1", "v2": "loss of v2"}
        return "mean queueing delay" if self.objective is None else named.get(self.objective.name, "mean queueing delay")

    @property
    def seconds(self) -> bool:
        """Whether it is a time."""
        return self.objective is None or self.objective.name not in ("v1", "v2")

    def of(self, prediction: Prediction, model: Model, whole: TokenDistribution) -> float:
        """Of one setting; `whole` are the lengths before its limit. Not a number where the method cannot give it."""
        goal = self.objective
        if goal is not None and goal.name == "throughput":
            return 1 / model.largest_stable_rate
        if self.slo is not None:
            found = self.slo.value(prediction)
            return math.nan if found is None else found
        mean = (prediction.served_queueing_delay if goal is None or goal.name == "v2" else prediction.queueing_delay).mean
        if mean is None or goal is None or goal.name not in ("v1", "v2"):
            return math.nan if mean is None else mean
        kept = float(utilities(whole)[model.output_tokens.longest])
        lost = goal.loss_cost * (prediction.loss_fraction or 0.0) if goal.name == "v2" else 0.0
        return goal.theta * (1 - kept) + (1 - goal.theta) * mean + lost


def forbidden(objective: Objective, found: Forecast, *, limits_tokens: bool) -> str | None:
    """What the objective has against a setting, as the end of a sentence; `limits_tokens`: the token limit is what is chosen."""
    if not found.stable or found.prediction is None:
        return f"has no steady state (load {found.load:.3g})"
    if objective.slo is not None:
        value = objective.slo.value(found.prediction)
        return None if value is None or value <= objective.slo.seconds else f"breaks the SLO {objective.slo} (predicted {value:.3g} s)"
    most, cut = objective.max_clipped_fraction, found.clipped_fraction
    if limits_tokens and objective.name in WEIGHS["max_clipped_fraction"] and cut is not None and cut > most:
        return f"cuts {cut:.1%} of the answers, more than {most:.1%}"
    return None
