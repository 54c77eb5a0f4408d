"""Cancellations: clients of a share of the requests hang up before their answers end.

When is drawn beforehand, as everything that a run sends: a time after sending, or a number of
tokens received. A request that ends before that is not cancelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kendall.policies.durations import seconds_or_nan
from kendall.policies.text import SpecError, split_spec, suggest
from kendall.queueing.arrivals.timetable import FloatArray, IntArray, Timetable, streams
from kendall.queueing.distributions.token_distribution import SHORTER, parse_distribution

EXAMPLES = {
    "exponential": "exponential:mean=2s",
    "uniform": "uniform:low=1s,high=5s",
    "tokens": "tokens:geometric:mean=16",
}
EXPECTED = f"a duration, {', '.join(EXAMPLES.values())} or tokens:16"


@dataclass(frozen=True, slots=True)
class Cancellations:
    """The share of the requests whose clients hang up, and when: `seconds` or `tokens` draws so
    many independent values > 0.
    """

    share: float
    seconds: Callable[[np.random.Generator, int], FloatArray] | None = None
    tokens: Callable[[np.random.Generator, int], IntArray] | None = None

    def of(self, timetable: Timetable, seed: int) -> Timetable:
        """The same requests, some with an end drawn from streams of their own."""
        chosen, when = streams(seed).cancellations.spawn(2)
        size = len(timetable)
        leaves = chosen.random(size) < self.share
        if self.tokens is not None:
            return dataclasses.replace(
                timetable, hang_up_tokens=np.where(leaves, self.tokens(when, size), 0)
            )
        assert self.seconds is not None
        return dataclasses.replace(
            timetable, hang_up_after=np.where(leaves, self.seconds(when, size), 0.0)
        )


def parse_cancellations(share: float | None, after: str | None) -> Cancellations | None:
    """From --cancel and --cancel-after; None without them. Raises SpecError."""
    if share is None and after is None:
        return None
    if share is None or after is None:
        given, other = (
            ("--cancel-after", "--cancel") if share is None else ("--cancel", "--cancel-after")
        )
        raise SpecError(f"got {given} without {other}; expected both: a share, and when")
    if not 0 <= share <= 1:
        raise SpecError(
            f"got --cancel {share:g}; expected a share between 0 and 1, for example 0.1"
        )
    if after.startswith("tokens:"):
        text = after.removeprefix("tokens:")
        if text.isdigit() and int(text) == 0:
            raise SpecError("got --cancel-after tokens:0; expected at least 1 token")
        law = parse_distribution(
            f"deterministic:value={text}" if text.isdigit() else text, remedy=SHORTER
        )
        return Cancellations(share, tokens=lambda rng, size: np.maximum(law.sample(rng, size), 1))
    return Cancellations(share, seconds=_times(after))


def _times(text: str) -> Callable[[np.random.Generator, int], FloatArray]:
    bare = seconds_or_nan(text)
    if bare > 0:
        return lambda _, size: np.full(size, bare)
    name, pairs = split_spec(text, EXAMPLES)
    values = {key: seconds_or_nan(value) for key, value in pairs.items()}
    match name, sorted(values):
        case "exponential", ["mean"] if values["mean"] > 0:
            mean = values["mean"]
            return lambda rng, size: rng.exponential(mean, size)
        case "uniform", ["high", "low"] if 0 <= values["low"] < values["high"]:
            low, high = values["low"], values["high"]
            return lambda rng, size: high - (high - low) * rng.random(size)
    raise SpecError(
        f"got --cancel-after {text!r}; expected {EXPECTED}{suggest(name, tuple(EXAMPLES))}"
    )
