"""What an objective compares two settings by: one number of a setting, smaller is better; and what
an objective forbids.

delay, clipped    mean of the duration that compares the settings (queueing.choosing.quantity),
                  seconds
throughput        1 / largest stable rate, seconds a request
v1, v2            theta (1 - E[u]) + (1 - theta) E[Wq] + l pi: how far the objective V stays below
                  theta, its value without any loss
slo               what the SLO bounds; as delay where that is the queueing delay of different
                  families, seconds
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kendall.policies.text import SpecError, parse_number, short_number, suggest
from kendall.queueing.choosing.forecast import Forecast
from kendall.queueing.choosing.objective import Objective, Slo, Slos, parse_slos
from kendall.queueing.choosing.quantity import mean_of
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.queue import Queue
from kendall.queueing.result import QUANTITY_WORDS, Prediction, Quantity

WEIGHS = {
    "theta": ("v1", "v2"),
    "loss_cost": ("v2",),
    "max_clipped_fraction": ("delay", "throughput", "clipped", "slo"),
}
FIELDS = ("objective", "slo", *WEIGHS)
BESIDE = ("family", "target", "routing", "rate_factor")  # of the same query, read elsewhere


def parse_objective(params: Mapping[str, str]) -> Objective:
    """From the texts of a query; `slo` alone means the objective slo. Raises SpecError."""
    for key in params:
        if key not in FIELDS + BESIDE:
            raise SpecError(
                f"got {key}={params[key]}; expected "
                f"{', '.join(FIELDS + BESIDE)}{suggest(key, FIELDS + BESIDE)}"
            )
    name = params.get("objective", "slo" if "slo" in params else "delay")
    numbers = {
        key: parse_number(key, params[key], f"objective={name}") for key in WEIGHS if key in params
    }
    slos: Slos = parse_slos(params["slo"]) if "slo" in params else {}
    objective = Objective(
        name=name,
        theta=numbers.get("theta", Objective.theta),
        loss_cost=numbers.get("loss_cost", Objective.loss_cost),
        max_clipped_fraction=numbers.get("max_clipped_fraction", Objective.max_clipped_fraction),
        **slos,
    )
    for key in numbers:
        if name not in WEIGHS[key]:
            raise SpecError(
                f"got {key} with the objective {name}; expected it with {' or '.join(WEIGHS[key])}"
            )
    return objective


@dataclass(frozen=True)
class Criterion:
    """Of an objective; without one the mean of `quantity`, of dispatched requests."""

    objective: Objective | None = None
    quantity: Quantity = "queueing_delay"

    @property
    def slo(self) -> Slo | None:
        """The SLO that it needs the quantile of."""
        slo = None if self.objective is None else self.objective.slo
        return slo if slo is not None and slo.field == self.quantity else None

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The same, for `queueing.choosing.answer.rough`."""
        return () if self.slo is None else (self.slo,)

    @property
    def compared(self) -> Quantity | None:
        """The duration that it is about; None of throughput, v1 and v2."""
        plain = self.objective is None or self.objective.name in ("delay", "clipped", "slo")
        return self.quantity if plain else None

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
            words = QUANTITY_WORDS[self.slo.field]
            return (
                f"mean {words}"
                if self.slo.metric == "mean"
                else f"{self.slo.metric} of the {words}"
            )
        named = {
            "throughput": "time per request at the largest stable rate",
            "v1": "shortfall of V1",
            "v2": "shortfall of V2",
        }
        plain = f"mean {QUANTITY_WORDS[self.quantity]}"
        return plain if self.objective is None else named.get(self.objective.name, plain)

    @property
    def seconds(self) -> bool:
        """Whether it is a time."""
        return self.objective is None or self.objective.name not in ("v1", "v2")

    def of(self, prediction: Prediction, model: Queue, whole: TokenDistribution) -> float:
        """Of one setting; `whole` are the lengths before its limit. Not a number where the
        method cannot give it.
        """
        goal = self.objective
        if goal is not None and goal.name == "throughput":
            return 1 / model.largest_stable_rate
        if self.slo is not None:
            found = self.slo.value(prediction)
            return math.nan if found is None else found
        if goal is None or goal.name not in ("v1", "v2"):
            alone = goal is None and self.quantity == "queueing_delay"
            mean = (
                prediction.served_queueing_delay.mean
                if alone
                else mean_of(prediction, self.quantity)
            )
            return math.nan if mean is None else mean
        mean = (
            prediction.served_queueing_delay if goal.name == "v2" else prediction.queueing_delay
        ).mean
        if mean is None:
            return math.nan
        kept = float(whole.utilities[model.requests.output_tokens.longest])
        lost = goal.loss_cost * (prediction.loss_fraction or 0.0) if goal.name == "v2" else 0.0
        return goal.theta * (1 - kept) + (1 - goal.theta) * mean + lost


def forbidden(
    objective: Objective,
    found: Forecast,
    *,
    limits_tokens: bool,
    simulated: Sequence[float] | None = None,
) -> str | None:
    """What the objective has against a setting, as the end of a sentence; `limits_tokens`: the
    token limit is what is chosen.

    `simulated`: what each SLO bounds, seconds, where the prediction does not have it.
    """
    if not found.stable or found.prediction is None:
        return f"has no steady state (load {found.load:.3g})"
    for place, slo in enumerate(objective.slos):
        value = slo.value(found.prediction)
        if value is None and simulated is not None:
            value = simulated[place]
        if value is not None and value > slo.seconds:
            return f"breaks the SLO {slo} (predicted {short_number(value, 3)} s)"
    most, cut = objective.max_clipped_fraction, found.clipped_fraction
    if (
        limits_tokens
        and objective.name in WEIGHS["max_clipped_fraction"]
        and cut is not None
        and cut > most
    ):
        return f"cuts {cut:.1%} of the answers, more than {most:.1%}"
    return None
