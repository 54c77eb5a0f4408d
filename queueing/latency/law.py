"""The latency law: how long an engine takes for a batch, as a function of its size and its lengths.

    padded     H = k1 b + k2 + kp sum(prompt) + (k3 b + k4) l_max
    unpadded   H = k1 b + k2 + kp sum(prompt) + k3 sum(l) + k4 l_max
    continuous step(n, m admitted) = k3 n + k4 + k1 m + kp sum(prompt of the admitted), and
    `turnaround` per request
    resumed    kr more for each member that goes on behind tokens it has made

`b` is the batch size, `l` counts ALL output tokens of a sequence, seconds throughout. Everything is
multiplied by `speed` (> 1 = the machine is slower than when the shape was measured) and, batch by
batch, by an independent residual of mean 1 and coefficient of variation `cv` (gamma distributed).
Stalls of the machine hold the share `stall_share` of the mean time: they begin at random while a
batch is served, H = X ((1 - q) h + s K), K ~ Poisson(q h / s), and leave every mean as it is. A
continuous engine pays `turnaround` instead of `k2`, and its steps carry neither residual nor
stalls.

Without k3 and k4 a batch takes as long whatever its lengths (M/D^b/1, a server that computes
prompts only), and all its tokens come at its end; a continuous engine needs steps that take time.

A request that was taken out of service is admitted again as any other, with the tokens that it has
made as a part of its prompt: k1 and kp (prompt + made), in a batch of its own k2, on a continuous
engine `turnaround`. Behind its first token each such admission costs `kr` on top, in the step that
it enters: the engine recomputes the tokens, or finds them in its prefix cache. So does one that
continues after its engine was lost. Without a token it begins again, and pays no `kr`.

Source: Yang et al., Section IV; what had to be added to predict a real engine is in
docs/why/theory.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kendall.policies.arguments import real_number, short_repr
from kendall.policies.durations import parse_duration
from kendall.policies.text import (
    SpecError,
    format_number,
    parse_number,
    short_number,
    split_pairs,
    suggest,
)

NEVER_NEGATIVE = {
    "k3": "seconds",
    "k4": "seconds",
    "kr": "seconds",
    "turnaround": "seconds",
    "stall": "seconds",
    "cv": "a coefficient of variation",
    "speed": "a factor",
    "stall_share": "a share",
}


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Coefficients of the law, in seconds; `cv` and `speed` are pure numbers."""

    k1: float = 0.0  # per member of a batch (its prefill and book-keeping)
    k2: float = 0.0  # per batch
    k3: float = 0.0  # per member and token
    k4: float = 0.0  # per step
    kp: float = 0.0  # per prompt token
    kr: float = 0.0  # per resume of a request that has made tokens
    cv: float = 0.0  # coefficient of variation of a batch's residual
    turnaround: float = 0.0  # per request on a continuous engine: slot taken, but not in a step
    speed: float = 1.0  # factor on every duration but `stall`
    stall_share: float = 0.0  # q, of a batch's mean time; 0: no stalls
    stall: float = 0.0  # s, seconds one stall lasts, whatever the speed

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(real_number(field.name, value)):
                raise SpecError(
                    f"got {field.name}={short_repr(value)} in a latency law; expected a finite "
                    "number"
                )
            if field.name in NEVER_NEGATIVE and value < 0:
                raise SpecError(
                    f"got {field.name}={format_number(value)} in a latency law; expected "
                    f"{NEVER_NEGATIVE[field.name]} >= 0"
                )
        if self.speed == 0:
            raise SpecError("got speed=0 in a latency law; expected a factor > 0")
        if self.stall_share >= 1 or (self.stall_share > 0) != (self.stall > 0):
            got = (
                f"stall_share={format_number(self.stall_share)}, stall={format_number(self.stall)}"
            )
            raise SpecError(
                f"got {got} in a latency law; expected a share < 1 and seconds, both 0 or neither"
            )
        if not any((self.k1, self.k2, self.k3, self.k4, self.kp)):
            raise SpecError(
                "got k1=k2=k3=k4=kp=0 in a latency law; expected one that takes time, in a batch, "
                "a token or a prompt"
            )
        if 0 < self.stall < self.step(1) / 4:
            raise SpecError(
                f"got stall={self.stall}; expected at least a quarter of a step, "
                f"{self.step(1) / 4:.3g} s"
            )

    def padded(self, batch_size: float, longest: float, prompt_tokens: float = 0.0) -> float:
        """Mean service time of a padded batch, seconds; `prompt_tokens` is the sum over the
        batch.
        """
        return self.setup(batch_size, prompt_tokens) + self.step(batch_size) * longest

    def unpadded(
        self, batch_size: float, total: float, longest: float, prompt_tokens: float = 0.0
    ) -> float:
        """Mean service time of a batch whose members leave when done, seconds; `total` = sum of
        output tokens.
        """
        return self.setup(batch_size, prompt_tokens) + self.speed * (
            self.k3 * total + self.k4 * longest
        )

    def setup(self, batch_size: float, prompt_tokens: float = 0.0, resumed: float = 0.0) -> float:
        """What a batch costs before its first decode step, seconds; `resumed`: members that have
        made tokens before.
        """
        return self.speed * (
            self.k1 * batch_size + self.k2 + self.kp * prompt_tokens + self.kr * resumed
        )

    def admission(self, admitted: float, prompt_tokens: float = 0.0, resumed: float = 0.0) -> float:
        """What admitting sequences adds to a step of a continuous engine, seconds; `resumed` as
        in `setup`.
        """
        return self.speed * (self.k1 * admitted + self.kp * prompt_tokens + self.kr * resumed)

    def step(self, active: float) -> float:
        """One decode step with `active` sequences, seconds."""
        return self.speed * (self.k3 * active + self.k4)

    def residual(self, rng: np.random.Generator) -> float:
        """One draw of a batch's residual: gamma with mean 1 and coefficient of variation `cv`."""
        if self.cv == 0:
            return 1.0
        shape = self.cv**-2
        return float(rng.gamma(shape, 1 / shape))

    def at_speed(self, speed: float) -> LatencyModel:
        """The same shape at another speed."""
        return dataclasses.replace(self, speed=speed)

    @property
    def resume(self) -> float:
        """What going on behind tokens costs beyond another admission, seconds."""
        return self.speed * self.kr

    def resuming_as(self, other: LatencyModel | None) -> LatencyModel:
        """The same law, with the resume cost of `other` in seconds: a fit to uninterrupted batches
        cannot measure that cost.
        """
        seconds = 0.0 if other is None else other.resume
        return dataclasses.replace(self, kr=seconds / self.speed)

    @property
    def stall_rate(self) -> float:
        """Stalls per second of a batch's mean time."""
        return self.stall_share / self.stall if self.stall_share else 0.0

    def without_stalls(self) -> LatencyModel:
        """The law of the same machine if it did not stall."""
        return dataclasses.replace(
            self, speed=self.speed * (1 - self.stall_share), stall_share=0.0, stall=0.0
        )

    def as_dict(self) -> dict[str, float]:
        """Every coefficient by name; `kr` only where a resume costs something."""
        values = dataclasses.asdict(self)
        return values if self.kr else {k: v for k, v in values.items() if k != "kr"}

    def __str__(self) -> str:
        return self._text(format_number)

    def rounded(self) -> str:
        """The same for people: 4 significant digits each. It is not read back."""
        return self._text(short_number)

    def _text(self, form: Callable[[float], str]) -> str:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in defaults}
        return ",".join(
            f"{k}={form(v)}"
            for k, v in values.items()
            if k in ("k1", "k2", "k3", "k4") or v != defaults[k]
        )


def _coefficient(key: str, value: str, text: str) -> float:
    try:
        return parse_number(key, value, text)
    except SpecError:
        try:
            seconds = parse_duration(value)
        except SpecError:
            raise SpecError(
                f"got {key}={value!r} in {text!r}; expected a number of seconds, for example "
                f"{key}=0.02"
            ) from None
        raise SpecError(
            f"got {key}={value!r} in {text!r}; expected seconds without a unit: "
            f"{key}={format_number(seconds)}"
        ) from None


def slow_law(law: LatencyModel) -> str | None:
    """A sentence where a token takes a second or longer: milliseconds were probably meant; None
    elsewhere.
    """
    step = law.step(1)
    if step < 1:
        return None
    return (
        f"the latency law takes {step:g} s per token; its coefficients are seconds (20 ms is 0.02)"
    )


def parse_law(text: str) -> LatencyModel:
    """`k1=..,k2=..,k3=..,k4=..[,kp,kr,cv,turnaround,speed]`, or `a=..,c=..` for single requests (S
    = a n + c).
    """
    pairs = split_pairs(text, context=text, example="k1=0.001,k2=0.01,k3=0.0001,k4=0.005")
    numbers = {key: _coefficient(key, value, text) for key, value in pairs.items()}
    if "a" in numbers or "c" in numbers:
        return _of_single_requests(numbers, pairs, text)
    known = tuple(field.name for field in dataclasses.fields(LatencyModel))
    for key in numbers:
        if key not in known:
            raise SpecError(
                f"got coefficient {key!r} in {text!r}; expected "
                f"{', '.join(known)}{suggest(key, known)}"
            )
    missing = [key for key in ("k1", "k2", "k3", "k4") if key not in numbers]
    if missing:
        raise SpecError(
            f"got {text!r} without {missing[0]}; expected k1=..,k2=..,k3=..,k4=.. in seconds, or "
            "a=..,c=.."
        )
    return LatencyModel(**numbers)


def _of_single_requests(
    numbers: dict[str, float], pairs: dict[str, str], text: str
) -> LatencyModel:
    """S = a n + c."""
    if set(numbers) - {"a", "c", "cv", "speed"} or "a" not in numbers:
        raise SpecError(
            f"got {text!r}; expected a=..,c=.. (seconds per token, seconds per request)"
        )
    if not 0 <= numbers["a"] < math.inf:
        raise SpecError(f"got a={pairs['a']} in {text!r}; expected finite seconds per token >= 0")
    if not math.isfinite(numbers.get("c", 0.0)):
        raise SpecError(f"got c={pairs['c']} in {text!r}; expected finite seconds per request")
    if not (numbers["a"] or numbers.get("c", 0.0)):
        raise SpecError(f"got {text!r}, by which a request takes no time; expected a > 0 or c > 0")
    return LatencyModel(
        k2=numbers.get("c", 0.0),
        k4=numbers["a"],
        cv=numbers.get("cv", 0.0),
        speed=numbers.get("speed", 1.0),
    )
