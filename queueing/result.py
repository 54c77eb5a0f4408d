"""What a prediction or a simulation answers: the same object, and its JSON form (DESIGN,
Contracts).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FALLBACK = "simulation, not "  # how the assumption begins that says why `auto` simulated
PARTIAL = "exact means, but "  # and the one that says why quantiles are simulated or missing
MEANLESS = "exact quantiles, but "  # or why means are
APPROXIMATE_MEANS = "approximate means, "  # and the one that says where their quantiles are from
_NOT_ALL_EXACT = FALLBACK, PARTIAL, MEANLESS, APPROXIMATE_MEANS
Quantity = Literal[
    "queueing_delay", "sojourn_time", "time_to_first_token", "inter_token_latency", "service_time"
]
QUANTITY_WORDS: dict[Quantity, str] = {
    "queueing_delay": "queueing delay",
    "sojourn_time": "sojourn time",
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter-token latency",
    "service_time": "service time",
}
LoadBound = Literal["slots", "memory"]
_DELAYS, _AFTER = (
    ("queueing_delay", "served_queueing_delay"),
    ("sojourn_time", "time_to_first_token"),
)
Levels = Mapping[str, float]  # of quantiles, by their names
LEVELS: Levels = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # that every answer has


@dataclass(frozen=True)
class Quantiles:
    """Mean and quantiles of a duration, seconds; None where the method cannot give it."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    standard_error: float | None = None  # of the mean; simulation only
    # asked for besides: p99.9
    others: Mapping[str, float | None] = field(default_factory=dict, kw_only=True)
    # standard errors of the quantiles, by their names; simulation only
    errors: Mapping[str, float] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(
        cls,
        levels: Levels,
        mean: float | None,
        values: Iterable[float | None],
        standard_error: float | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> Quantiles:
        """`values`: at each of `levels`, which begin with `LEVELS`."""
        found = dict(zip(levels, values, strict=True))
        usual = {name: found.pop(name) for name in LEVELS}
        return cls(mean, **usual, standard_error=standard_error, others=found, errors=errors or {})

    def value(self, name: str) -> float | None:
        """The mean, or a quantile by its name; None where it is not known."""
        if name in self.others:
            return self.others[name]
        known: float | None = getattr(self, name) if name == "mean" or name in LEVELS else None
        return known

    def numbers(self) -> dict[str, float | None]:
        """Mean and quantiles by name."""
        named = {name: getattr(self, name) for name in ("mean", *LEVELS)}
        return named | dict(self.others)

    def mapped(self, change: Callable[[str, float], float]) -> Quantiles:
        """Mean and quantiles, where they are known, as `change` makes them of name and value."""
        found = {
            name: None if number is None else change(name, number)
            for name, number in self.numbers().items()
        }
        mean = found.pop("mean")
        levels = dict.fromkeys(found, 0.0)
        return Quantiles.of(levels, mean, found.values(), self.standard_error, self.errors)

    def as_dict(self) -> dict[str, float | None]:
        """As JSON: `standard_error`, that of the mean, only where there is one."""
        numbers = {name: _finite(number) for name, number in self.numbers().items()}
        error = _finite(self.standard_error)
        return numbers if error is None else numbers | {"standard_error": error}


@dataclass(frozen=True)
class Mean:
    """A mean that has no quantiles here."""

    mean: float | None = None
    standard_error: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """As JSON: `standard_error` only where there is one."""
        numbers = {"mean": _finite(self.mean)}
        error = _finite(self.standard_error)
        return numbers if error is None else numbers | {"standard_error": error}


@dataclass(frozen=True)
class Count:
    """How many requests there are at any instant: the chance of none, and quantiles by their names;
    None where the method cannot give it.
    """

    empty: float | None = None
    quantiles: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Number:
    """How many requests there are, with its mean by Little's law."""

    mean: float | None = None
    standard_error: float | None = None
    count: Count = field(default_factory=Count)

    def value(self, name: str) -> float | None:
        """The mean, the chance of none ("p_empty"), or a quantile by its name."""
        own = {"mean": self.mean, "p_empty": self.count.empty}
        return own[name] if name in own else self.count.quantiles.get(name)

    def as_dict(self, levels: Iterable[str] = LEVELS) -> dict[str, float | None]:
        """As JSON: `standard_error`, that of the mean, only where there is one."""
        numbers = {name: _finite(self.value(name)) for name in ("mean", "p_empty", *levels)}
        error = _finite(self.standard_error)
        return numbers if error is None else numbers | {"standard_error": error}


class EnergyUse(Protocol):
    """What requests cost on the servers of a queue (queueing.latency.energy)."""

    def joules(
        self, rate: float, batch_size: float | None, utilisation: float | None
    ) -> float | None:
        """Of one of `rate` requests a second; None where what it needs is not known."""
        ...


@dataclass(frozen=True)
class Station:
    """One of several servers that a request passes in turn."""

    name: str
    load: float
    queueing_delay: Quantiles
    service_time: Mean

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        times = {
            "queueing_delay": self.queueing_delay.as_dict(),
            "service_time": self.service_time.as_dict(),
        }
        return {"name": self.name, "load": _finite(self.load), **times}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The steady state of one policy under one load. Null where the method cannot give a
    quantity, or the queue is unstable.
    """

    policy: str
    effective_max_batch_size: (
        int | None
    )  # what holds: the policy's own bound or the engine's, whichever is less
    model: str
    method: str  # exact | approximation | simulation
    methods: Mapping[str, str] = field(default_factory=dict)  # of fields with quantiles by another
    stable: bool
    load: float
    utilisation: float | None
    queueing_delay: Quantiles = field(default_factory=Quantiles)
    sojourn_time: Quantiles = field(default_factory=Quantiles)
    batch_size: Mean = field(default_factory=Mean)
    loss_fraction: float | None = 0.0
    rejected_fraction: float = 0.0  # of all requests: the lost ones that never waited
    served_queueing_delay: Quantiles = field(default_factory=Quantiles)
    time_to_first_token: Quantiles = field(
        default_factory=Quantiles
    )  # arrival to first token, of the served
    inter_token_latency: Quantiles = field(
        default_factory=Quantiles
    )  # from one token of an answer to its next
    # from a request's dispatch until its place can be taken again: of its batch, or its slot
    service_time: Quantiles = field(default_factory=Quantiles)
    bounds: Mapping[str, float] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    stations: tuple[Station, ...] = ()  # of a tandem, whose queueing delay is the sum of theirs
    flows: Mapping[str, Quantiles] = field(default_factory=dict)  # the queueing delay of each
    load_bound: LoadBound | None = None  # what load is counted by, where the memory is given
    # requests (of a call each sequence is one) that arrive per second; None: nothing is counted
    request_rate: float | None = None
    # of "queue_length" and "number_in_system", where their laws are known
    counts: Mapping[str, Count] = field(default_factory=dict)
    energy_use: EnergyUse | None = None  # where an energy law is given

    @property
    def queue_length(self) -> Number:
        """Requests that wait: of all that are admitted, rate times mean delay (Little)."""
        return self._number("queue_length", self.queueing_delay)

    @property
    def number_in_system(self) -> Number:
        """Requests that wait or are in service."""
        sojourn, served = self.sojourn_time, self.served_queueing_delay
        waiting, served_share = self.queueing_delay.mean, 1 - (self.loss_fraction or 0.0)
        admitted_share = 1 - self.rejected_fraction
        present = (
            None
            if waiting is None or sojourn.mean is None or served.mean is None
            else waiting + served_share / admitted_share * (sojourn.mean - served.mean)
        )
        return self._number(
            "number_in_system", Quantiles(present, standard_error=sojourn.standard_error)
        )

    def _number(self, name: str, time: Quantiles) -> Number:
        rate, mean, error = self.request_rate, time.mean, time.standard_error
        rate = None if rate is None else rate * (1 - self.rejected_fraction)
        return Number(
            None if rate is None or mean is None else rate * mean,
            None if rate is None or error is None else rate * error,
            self.counts.get(name, Count()),
        )

    @property
    def energy_per_request(self) -> float | None:
        """Joules of a request that is served; None without an energy law, or where the mean batch
        or the utilisation that it needs is not known.
        """
        rate = self._served_rate
        if self.energy_use is None or not rate:
            return None
        return self.energy_use.joules(rate, self.batch_size.mean, self.utilisation)

    @property
    def watts(self) -> float | None:
        """Mean power of all servers."""
        joules, rate = self.energy_per_request, self._served_rate
        return None if joules is None or rate is None else joules * rate

    @property
    def _served_rate(self) -> float | None:
        rate = self.request_rate
        return None if rate is None else rate * (1 - (self.loss_fraction or 0.0))

    @property
    def fallback(self) -> str | None:
        """What is not exact where more was to be expected: all is simulated, or quantiles or
        means are or are missing. Else None.
        """
        return next(
            (text for text in self.assumptions if text.startswith(_NOT_ALL_EXACT)),
            None,
        )

    def without_means(self, *names: str) -> Prediction:
        """Those of these durations say nothing."""
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(getattr(self, name), mean=None, standard_error=None)
                for name in names
            },
        )

    def with_turnaround(self, seconds: float) -> Prediction:
        """As a gateway measures it that needs `seconds` itself from an arrival to its dispatch: no
        delay is shorter.

        Waiting and the gateway's own work overlap, so only what is missing is added, also to all
        that follows the dispatch.
        """
        mean = self.served_queueing_delay.mean
        later = 0.0 if mean is None else max(0.0, seconds - mean)
        if not seconds > 0:
            return self
        delays: dict[str, Any] = {
            name: getattr(self, name).mapped(lambda _, value: max(value, seconds))
            for name in _DELAYS
        }
        after: dict[str, Any] = {
            name: getattr(self, name).mapped(lambda _, value: value + later) for name in _AFTER
        }
        bounds = {
            name: max(value, seconds) if name == "queueing_delay_upper" else value
            for name, value in self.bounds.items()
        }
        return dataclasses.replace(self, bounds=bounds, **delays, **after)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the contract; an infinite number, which JSON does not have, is
        null.
        """
        answer: dict[str, Any] = {}
        parts: dict[str, Any] = {
            "methods": dict(self.methods),
            "stations": [station.as_dict() for station in self.stations],
            "flows": {
                name: {"queueing_delay": delay.as_dict()} for name, delay in self.flows.items()
            },
            "load_bound": self.load_bound,
            "rejected_fraction": self.rejected_fraction,
            "energy_use": None,
            "counts": None,
            "standard_errors": self._errors(),
        }
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in parts:
                value = parts[item.name]
            elif isinstance(value, Quantiles | Mean):
                value = value.as_dict()
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = {name: _finite(number) for name, number in value.items()}
            answer[item.name] = _finite(value)
        levels = list(self.queueing_delay.numbers())[1:]
        for name in ("queue_length", "number_in_system"):
            answer[name] = getattr(self, name).as_dict(levels)
        answer["energy_per_request"] = _finite(self.energy_per_request)
        answer["watts"] = _finite(self.watts)
        answer["standard_errors"] = parts["standard_errors"]
        return {name: value for name, value in answer.items() if value or name not in parts}

    def _errors(self) -> dict[str, dict[str, float]]:
        """Of the quantiles of every simulated duration."""
        durations = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            name: dict(value.errors)
            for name, value in durations.items()
            if isinstance(value, Quantiles) and value.errors
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
