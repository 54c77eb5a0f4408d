"""Objectives of a choice, and the score of one choice under each. Every score is smaller-is-better;
a choice that may not be made has none.

    delay        mean queueing delay; across families mean sojourn time
                 (queueing.choosing.quantity)
    throughput   minus the largest stable rate
    v1           Yang et al. Eq. 10: theta E[u] - (1 - theta) E[Wq]
    v2           Eq. 11 with patience: theta E[u] - (1 - theta) E[Wq | served] - l pi. Printed with
                 `+`, which rewards waiting: `sign=+1` gives that (their reported optimum comes out
                 with it only)
    clipped      mean queueing delay, at most `max_clipped_fraction` of the requests clipped
    slo          as delay, or the mean of the duration that the first SLO bounds, among the choices
                 that keep every SLO

E[u] = E[min(1, n_max / N)], the share of an answer that its reader gets (as printed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from kendall.policies.text import SpecError
from kendall.queueing.errors import INFINITE_MEAN
from kendall.queueing.measurement.slo import PREDICTED, read_slo, split_slos
from kendall.queueing.result import Levels, Prediction, Quantity

HIGH = 0.9  # a quantile from this level on is longer than the mean
OBJECTIVES = ("delay", "throughput", "v1", "v2", "clipped", "slo")


@dataclass(frozen=True)
class Slo:
    """`metric` (mean or a quantile, then with its `level`) of `field` at most `seconds`."""

    metric: str
    field: Quantity
    seconds: float
    level: float | None = None

    def value(self, prediction: Prediction) -> float | None:
        """The predicted value that the SLO bounds, seconds."""
        found: float | None = getattr(prediction, self.field).value(self.metric)
        return None if found is None else float(found)

    @property
    def name(self) -> str:
        """The name of the bounded value in the points of a search, such as `p99_queueing_delay`."""
        return self.field if self.metric == "mean" else f"{self.metric}_{self.field}"

    def kept(self, prediction: Prediction) -> bool:
        """Whether the prediction keeps the SLO. Raises SpecError where its method has no such
        value.
        """
        found, mean = self.value(prediction), getattr(prediction, self.field).mean
        if (
            found is None
            and mean is not None
            and self.level is not None
            and self.level >= HIGH
            and mean > self.seconds
        ):
            # where the law could not be followed: near saturation, with a mean that is too long
            # already
            return False
        if found is None and self.level is None and INFINITE_MEAN in prediction.assumptions:
            return False
        if found is None:
            expected = "a quantile that predictions have, or a mean"
            if self.field == "inter_token_latency":
                expected = "a policy of the continuous family, whose tokens leave one by one"
            elif self.metric == "mean":
                expected = "lengths with a lighter tail, or a token limit: this mean is not finite"
            raise SpecError(
                f"got slo={self}, which {prediction.method} does not give for "
                f"{prediction.policy}; expected {expected}"
            )
        return found <= self.seconds

    def __str__(self) -> str:
        return f"{self.metric}_{self.field}={self.seconds:g}"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective with its parameters. Raises SpecError where they do not fit."""

    name: str
    theta: float = 0.5
    loss_cost: float = 1.0
    max_clipped_fraction: float = 0.05
    slo: Slo | None = None  # the one that says what settings are compared by
    also: tuple[Slo, ...] = ()  # further ones, which are to be kept too
    sign: int = -1  # of the delay in V2

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise SpecError(f"got objective={self.name!r}; expected one of {', '.join(OBJECTIVES)}")
        self._check_weights()
        if (self.name == "slo") != (self.slo is not None):
            if self.slo is None:
                raise SpecError(
                    "got objective=slo without an SLO; expected one, for example "
                    "p99_queueing_delay=2s"
                )
            raise SpecError(
                f"got objective={self.name} and slo={self.slo}; expected the objective slo, "
                "the one that has an SLO"
            )

    def _check_weights(self) -> None:
        if not 0 <= self.theta <= 1:
            raise SpecError(f"got theta={self.theta:g}; expected a number from 0 to 1")
        if not 0 <= self.loss_cost < math.inf:
            raise SpecError(f"got loss_cost={self.loss_cost:g}; expected a finite number >= 0")
        if not 0 <= self.max_clipped_fraction < 1:
            raise SpecError(
                f"got max_clipped_fraction={self.max_clipped_fraction:g}; expected a number from "
                "0 to below 1"
            )

    @property
    def slos(self) -> tuple[Slo, ...]:
        """All of them, the one that compares first."""
        return () if self.slo is None else (self.slo, *self.also)

    @property
    def at_a_limit(self) -> Objective:
        """The objective where the token limit is given: v1, v2 and clipped weigh limits, and become
        delay.
        """
        plain = self.name in ("delay", "throughput", "slo")
        return self if plain else Objective(name="delay")

    def kept(self, prediction: Prediction) -> bool:
        """Whether every SLO is kept. Raises SpecError where the method has no such quantile."""
        return all(slo.kept(prediction) for slo in self.slos)

    def bounded(self, prediction: Prediction) -> dict[str, float | None]:
        """The predicted values that the SLOs bound, seconds, by name."""
        return {slo.name: slo.value(prediction) for slo in self.slos}

    @property
    def constraint(self) -> str:
        """The constraint that a stable choice may break, with its bound."""
        if self.slos:
            return ", ".join(map(str, self.slos))
        return (
            f"max_clipped_fraction={self.max_clipped_fraction:g}"
            if self.name == "clipped"
            else "of the objective"
        )

    def utility_score(self, utility: float, delay: float, loss: float) -> float:
        """The score of v1 or v2: its utility, negated; `delay` in seconds, `loss` a fraction."""
        signed = self.sign if self.name == "v2" else -1
        cost = self.loss_cost * loss if self.name == "v2" else 0.0
        return -(self.theta * utility + signed * (1 - self.theta) * delay - cost)


class Slos(TypedDict, total=False):
    """The SLOs of an `Objective`, as its parameters."""

    slo: Slo
    also: tuple[Slo, ...]


def parse_slos(text: str) -> Slos:
    """Read the SLOs of a text, separated by commas. Raises SpecError."""
    first, *others = map(parse_slo, split_slos(text))
    return {"slo": first, "also": tuple(others)}


def parse_slo(text: str) -> Slo:
    """Read an SLO on a predicted duration, such as `p99_queueing_delay=2s`. Raises SpecError."""
    read = read_slo(text, "slo=")
    for quantity in PREDICTED:
        if quantity == read.quantity:
            return Slo(read.statistic, quantity, read.seconds, read.level)
    raise SpecError(
        f"got slo={text!r}; expected one of {', '.join(PREDICTED)}: predictions have no "
        f"{read.quantity}"
    )


def levels_of(slos: Iterable[Slo]) -> Levels:
    """The quantiles that they bound."""
    return {slo.metric: slo.level for slo in slos if slo.level is not None}
