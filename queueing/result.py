"""What a prediction or a simulation answers: the same object, and its JSON form (DESIGN, Contracts)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FALLBACK = "simulation, not "  # how the assumption begins that says why `auto` simulated
LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Quantiles:
    """Mean and quantiles of a duration, seconds; None where the method cannot give it."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    standard_error: float | None = None  # of the mean; simulation only

    def as_dict(self) -> dict[str, float | None]:
        """As JSON: `standard_error` only where there is one."""
        return _without_empty_error(self)


@dataclass(frozen=True)
class Mean:
    """A mean that has no quantiles here."""

    mean: float | None = None
    standard_error: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """As JSON: `standard_error` only where there is one."""
        return _without_empty_error(self)


@dataclass(frozen=True)
class Station:
    """One of several servers that a request passes in turn."""

    name: str
    load: float
    queueing_delay: Quantiles
    service_time: Mean

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        times = {"queueing_delay": self.queueing_delay.as_dict(), "service_time": self.service_time.as_dict()}
        return {"name": self.name, "load": _finite(self.load), **times}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The steady state of one policy under one load. Null where the method cannot give a quantity, or the queue is unstable."""

    policy: str
    effective_max_batch_size: int | None  # what holds: the policy's own bound or the engine's, whichever is less
    model: str
    method: str  # exact | approximation | simulation
    stable: bool
    load: float
    utilisation: float | None
    queueing_delay: Quantiles = field(default_factory=Quantiles)
    sojourn_time: Quantiles = field(default_factory=Quantiles)
    batch_size: Mean = field(default_factory=Mean)
    loss_fraction: float | None = 0.0
    served_queueing_delay: Quantiles = field(default_factory=Quantiles)
    time_to_first_token: Mean = field(default_factory=Mean)  # arrival to first token, of the served
    inter_token_latency: Mean = field(default_factory=Mean)  # from one token of an answer to its next
    bounds: Mapping[str, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    stations: tuple[Station, ...] = ()  # of a tandem, whose queueing delay is the sum of theirs

    @property
    def fallback(self) -> str | None:
        """Why `auto` simulated; None where it did not."""
        return next((text for text in self.assumptions if text.startswith(FALLBACK)), None)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the contract; an infinite number, which JSON does not have, is null."""
        answer: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "stations":
                value = [station.as_dict() for station in self.stations]
            elif isinstance(value, Quantiles | Mean):
                value = value.as_dict()
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = {name: _finite(number) for name, number in value.items()}
            answer[item.name] = _finite(value)
        if not self.stations:
            del answer["stations"]
        return answer


def _without_empty_error(value: Quantiles | Mean) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {name: _finite(number) for name, number in dataclasses.asdict(value).items()}
    if numbers["standard_error"] is None:
        del numbers["standard_error"]
    return numbers


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
