"""The energy law: what serving costs in joules.

    c[b] = beta b + c0               joules for a batch of b              (Inoue (2021), Eq. 17)
    eta  = 1 / (beta + c0 / E[B])    requests per joule in steady state   (Eq. 19)

Besides, for engines whose power follows their time or their tokens rather than their batches:
`per_token` joules for an output token, and `busy` and `idle`, the watts of a server while it serves
and while it does not. Per request of N tokens on c servers of utilisation U, at rate lam:

    beta + c0 / E[B] + per_token E[N] + (busy U + idle (1 - U)) c / lam

Without `idle` the energy of a server that does nothing is not counted. A policy that joins requests
to what runs has no batches, and so no c0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.policies.arguments import real_number
from kendall.policies.text import (
    SpecError,
    format_number,
    parse_number,
    short_number,
    split_pairs,
    suggest,
)
from kendall.queueing.latency.profile import profile_of
from kendall.queueing.latency.regression import LineFit, fit_line

_EXAMPLE = "beta=0.044,c0=0.155"


@dataclass(frozen=True, slots=True)
class EnergyLaw:
    """Joules and watts; all at least 0, and one more than that."""

    beta: float = 0.0  # J per request
    c0: float = 0.0  # J per batch
    per_token: float = 0.0  # J per output token
    busy: float = 0.0  # W of a server in service
    idle: float = 0.0  # W of a server that is not

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = real_number(field.name, getattr(self, field.name))
            if not 0 <= value < np.inf:
                raise SpecError(
                    f"got {field.name}={format_number(value)} in an energy law; expected "
                    f"{'watts' if field.name in ('busy', 'idle') else 'joules'} >= 0"
                )
        if not any(dataclasses.astuple(self)):
            raise SpecError(f"got an energy law of nothing; expected joules, as in {_EXAMPLE}")

    def batch(self, batch_size: float) -> float:
        """Energy of a batch, joules, beside its tokens and its time."""
        return self.beta * batch_size + self.c0

    def efficiency(self, mean_batch_size: float) -> float:
        """Requests per joule when a dispatched batch has this mean size (Eq. 19)."""
        if not mean_batch_size >= 1:
            raise SpecError(f"got a mean batch size of {mean_batch_size}; expected at least 1")
        return 1 / (self.beta + self.c0 / mean_batch_size)

    @property
    def needs_utilisation(self) -> bool:
        """Whether it has watts."""
        return bool(self.busy or self.idle)

    @property
    def assumption(self) -> str:
        """In words."""
        words = {
            "beta": "J a request",
            "c0": "J a batch",
            "per_token": "J a token",
            "busy": "W in service",
            "idle": "W out of it",
        }
        terms = [
            f"{short_number(value)} {unit}"
            for name, unit in words.items()
            if (value := getattr(self, name))
        ]
        return f"energy: {', '.join(terms)}{'' if self.idle else '; none while idle'}"

    def __str__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return ",".join(f"{name}={format_number(value)}" for name, value in values.items() if value)


@dataclass(frozen=True, slots=True)
class EnergyOfServers:
    """The law of each of several servers, whose requests have so many output tokens on average."""

    law: EnergyLaw
    output_tokens: float
    servers: int

    def joules(
        self, rate: float, batch_size: float | None, utilisation: float | None
    ) -> float | None:
        """Of a request, of so many a second; None where the mean batch or the utilisation is not
        known that the law needs.
        """
        law = self.law
        if (law.c0 and not batch_size) or (law.needs_utilisation and utilisation is None):
            return None
        used = utilisation or 0.0
        watts = self.servers * (law.busy * used + law.idle * (1 - used))
        of_tokens = law.per_token * self.output_tokens if law.per_token else 0.0
        return law.beta + law.c0 / (batch_size or 1.0) + of_tokens + watts / rate


@dataclass(frozen=True, slots=True)
class EnergyFit:
    """The law and the line it is, in joules over batch size."""

    law: EnergyLaw
    line: LineFit


def fit_energy(
    batch_sizes: Sequence[float], watts: Sequence[float], throughputs: Sequence[float]
) -> EnergyFit:
    """From mean power (W) and throughput (requests/s) at each batch size: a batch costs power x
    batch / throughput; unweighted least squares, as the source does it. Raises SpecError.
    """
    sizes, power, rates = (
        np.asarray(values, dtype=float) for values in (batch_sizes, watts, throughputs)
    )
    if not len(sizes) == len(power) == len(rates) or np.any(rates <= 0):
        raise SpecError(
            f"got {len(sizes)} sizes, {len(power)} powers, {len(rates)} rates; expected as many "
            "of each, rates > 0"
        )
    line = fit_line(sizes.tolist(), (power * sizes / rates).tolist())
    return EnergyFit(EnergyLaw(line.slope, line.intercept), line)


def parse_energy(text: str) -> EnergyLaw:
    """`beta=..,c0=..[,per_token=..,busy=..,idle=..]`, or the name or file of a profile that was
    measured with its power. Raises SpecError.
    """
    if "=" not in text:
        try:
            found = energy_of_profile(text)
        except SpecError:
            raise SpecError(
                f"got energy {text!r}; expected joules, as in {_EXAMPLE}, or the name of a profile "
                "that was measured with its power"
            ) from None
        if found is None:
            raise SpecError(
                f"got energy {text!r}, a profile without watts; expected one that has them, or "
                f"joules: {_EXAMPLE}"
            )
        return found
    known = tuple(field.name for field in dataclasses.fields(EnergyLaw))
    pairs = split_pairs(text, context=text, example=_EXAMPLE)
    for key in pairs:
        if key not in known:
            raise SpecError(
                f"got {key!r} in {text!r}; expected {', '.join(known)}{suggest(key, known)}"
            )
    return EnergyLaw(**{key: parse_number(key, value, text) for key, value in pairs.items()})


def energy_of_profile(latency: str) -> EnergyLaw | None:
    """By the power of its measurements; None where the text is a law itself, or the profile has
    none. Raises SpecError.
    """
    found = profile_of(latency)
    cells = [] if found is None else found.profile.cells
    columns = ("batch_size", "watts", "images_per_second")
    rows = [[cell[name] for name in columns] for cell in cells if cell.keys() >= set(columns)]
    return fit_energy(*zip(*rows, strict=True)).law if len(rows) > 2 else None
