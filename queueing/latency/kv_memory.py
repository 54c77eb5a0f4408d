"""KV memory that requests take token by token, and calls to tools within them, as texts:

    preempt=recompute                    what is interrupted loses its memory, and has its prompt
                                         and its tokens computed again (vLLM)
    preempt=swap,setup=10ms,token=20us   its memory is moved out and back: setup + token x tokens
                                         seconds each way, in which all in service wait
    preempt=preserve                     it keeps its memory until the others need it

    share=0.7,mean=100ms/10s,keep=auto   share of the requests that call a tool once, at a uniform
                                         token of their output; mean duration of each kind of call
    weights=1/3                          how often each kind comes (equally often); exponential
    sigma=0.5                            predicted duration = duration x exp(sigma Z) (0)

`keep` says what becomes of the memory during the call, with C tokens of context:

    preserve    held                    wastes  call x C                     token-seconds
    discard     freed, computed again   wastes  (k1 + kr + kp C) x (all tokens in memory)
    swap        moved out and back      wastes  2 (setup + token C) x (all tokens in memory)
    auto        what wastes least by the predicted call, when it begins

Source: Abhyankar et al., INFERCEPT: efficient intercept support for augmented large language model
inference (2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.policies.durations import parse_duration
from kendall.policies.text import (
    SpecError,
    check_keys,
    check_text,
    format_number,
    parse_number,
    split_pairs,
    suggest,
)
from kendall.queueing.distributions.token_distribution import Vector

Ints = npt.NDArray[np.int64]
PRESERVE, DISCARD, SWAP, LEAST_WASTE = range(4)  # as the compiled replay has them
PREEMPT = {"recompute": DISCARD, "swap": SWAP, "preserve": PRESERVE}
KEEP = {"preserve": PRESERVE, "discard": DISCARD, "swap": SWAP, "auto": LEAST_WASTE}
MOST_KINDS = 100
LONGEST = 1e6  # seconds of a swap, or of a mean call
KV_EXAMPLE = "preempt=swap,setup=10ms,token=20us"
CALLS_EXAMPLE = "share=0.5,mean=2s,keep=preserve"


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What becomes of the memory of an interrupted request; seconds of a swap and of each token in
    it, one way (None: not given). Raises SpecError.
    """

    preempt: str = "recompute"
    setup: float | None = None
    token: float | None = None

    def __post_init__(self) -> None:
        if self.preempt not in PREEMPT:
            raise SpecError(
                f"got preempt={self.preempt} for kv; expected {_names(PREEMPT)}"
                f"{suggest(self.preempt, PREEMPT)}"
            )
        for key, value in (("setup", self.setup), ("token", self.token)):
            if value is not None and not 0 <= value <= LONGEST:
                raise SpecError(
                    f"got {key}={format_number(value)} for kv; expected 0 to {LONGEST:,.0f} s"
                )
        if self.preempt == "swap" and not self.swaps:
            raise SpecError(
                f"got kv preempt=swap without the time of a swap; expected setup or token too: "
                f"{KV_EXAMPLE}"
            )

    def __str__(self) -> str:
        times = {"setup": self.setup, "token": self.token}
        given = [
            f"{key}={format_number(value)}" for key, value in times.items() if value is not None
        ]
        return ",".join([f"preempt={self.preempt}", *given])

    @property
    def swaps(self) -> bool:
        """Whether the time of a swap is given."""
        return self.setup is not None or self.token is not None

    def swap(self, tokens: Vector) -> Vector:
        """Seconds of a swap one way."""
        return np.asarray((self.setup or 0.0) + (self.token or 0.0) * tokens)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """A share of the requests calls a tool once; `kinds` of calls as (probability, mean seconds),
    exponential. Raises SpecError.
    """

    share: float
    kinds: tuple[tuple[float, float], ...]
    sigma: float = 0.0
    keep: str = "discard"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SpecError(
                f"got share={format_number(self.share)} of tool calls; expected a number from 0 "
                "to 1"
            )
        if not self.kinds or len(self.kinds) > MOST_KINDS:
            raise SpecError(
                f"got {len(self.kinds)} kinds of tool calls; expected 1 to {MOST_KINDS}"
            )
        for chance, mean in self.kinds:
            if not 0 < chance <= 1 or not 0 <= mean <= LONGEST:
                raise SpecError(
                    f"got tool calls of mean {format_number(mean)} s with probability "
                    f"{format_number(chance)}; expected 0 to {LONGEST:,.0f} s, above 0"
                )
        if not math.isclose(sum(chance for chance, _ in self.kinds), 1.0):
            raise SpecError(f"got kinds of tool calls {self.kinds}; expected chances that add up "
                            "to 1")  # fmt: skip
        if not 0 <= self.sigma <= 10:
            raise SpecError(
                f"got sigma={format_number(self.sigma)} of tool calls; expected a number from 0 "
                "to 10"
            )
        if self.keep not in KEEP:
            raise SpecError(
                f"got keep={self.keep} for tool calls; expected {_names(KEEP)}"
                f"{suggest(self.keep, KEEP)}"
            )

    def __str__(self) -> str:
        given = {
            "share": format_number(self.share),
            "mean": "/".join(format_number(mean) for _, mean in self.kinds),
        }
        if len({chance for chance, _ in self.kinds}) > 1:
            given["weights"] = "/".join(format_number(chance) for chance, _ in self.kinds)
        if self.sigma:
            given["sigma"] = format_number(self.sigma)
        return ",".join(f"{key}={value}" for key, value in (given | {"keep": self.keep}).items())

    @property
    def mean(self) -> float:
        """Mean duration of a call, seconds."""
        return sum(chance * mean for chance, mean in self.kinds)

    def up_to(self, longest: float) -> tuple[float, float]:
        """Mean seconds of a call, counted as 0 where it is longer than that, and the chance of a
        longer one.
        """
        seconds, longer = 0.0, 0.0
        for chance, mean in self.kinds:
            beyond = math.exp(-longest / mean) if mean else 0.0
            left = longest * beyond if beyond else 0.0
            seconds += chance * (mean * (1 - beyond) - left)
            longer += chance * beyond
        return seconds, longer

    def drawn(self, rng: np.random.Generator, output: Ints) -> tuple[Ints, Vector, Vector]:
        """Tokens before the call (0: none, as of one token), its seconds and their prediction. The
        same numbers are drawn whatever `keep` is.
        """
        count = len(output)
        before = 1 + (rng.random(count) * (output - 1)).astype(np.int64)
        calls = (rng.random(count) < self.share) & (before < output)
        chances, means = np.array(self.kinds).T
        seconds = means[rng.choice(len(means), count, p=chances)] * rng.exponential(size=count)
        predicted = seconds * np.exp(self.sigma * rng.standard_normal(count))
        return np.where(calls, before, 0), seconds * calls, predicted * calls

    def context(self, output_tokens: Vector, mean_prompt: float) -> tuple[float, float]:
        """Mean calls of a request, and mean tokens of context of its calls, summed;
        `output_tokens`: the probabilities of 0, 1, .. tokens.
        """
        lengths = np.arange(len(output_tokens))
        chances = self.share * output_tokens * (lengths > 1)
        return float(chances.sum()), float(chances @ (mean_prompt + lengths / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """What a request needs of an engine on which none is interrupted, in the mean: `work`, seconds
    of every other's time; `alone`, seconds of its own steps besides; `held` tokens in each of its
    steps, its next one with them; token-seconds held `in_calls`.

        X(n) = n / (n work + alone),   n held + X(n) in_calls <= memory        n in service
    """

    work: float
    alone: float
    held: float
    in_calls: float

    def rate(self, slots: float) -> float:
        """X, requests/s."""
        return 1 / (self.work + self.alone / slots)

    def slots(self, memory: float) -> float:
        """The largest n."""
        square, product = self.held * self.work, memory * self.alone
        line = self.held * self.alone + self.in_calls - memory * self.work
        if not square:
            return product / line if line > 0 else math.inf
        return (math.sqrt(line**2 + 4 * square * product) - line) / (2 * square)


def wastes(call: Vector, context: Vector, again: Vector, moved: Vector, used: Vector) -> Vector:
    """Token-seconds wasted by preserve, discard and swap [3, n] in a call of so many seconds with
    so many tokens of context, which take `again` seconds to compute and `moved` to move one way,
    `used` tokens in memory.
    """
    return np.array([call * context, again * used, 2 * moved * used])


def held_in_calls(
    handling: Ints, call: Vector, context: Vector, again: Vector, moved: Vector, *, memory: float
) -> Vector:
    """Token-seconds that the context of each call holds under its handling; what wastes least is
    found with the whole memory in use.
    """
    used = np.full(len(call), memory)
    least = wastes(call, context, again, moved, used).argmin(axis=0)
    kind = np.where(handling == LEAST_WASTE, least, handling)
    return np.asarray(context * np.choose(kind, (call, again, 2 * moved)))


def parse_kv(text: str) -> KvMemory:
    """Raises SpecError: no text, unknown keys or values, a time out of range."""
    pairs = _pairs("kv", text, KV_EXAMPLE, ("preempt", "setup", "token"))
    if "preempt" not in pairs:
        raise SpecError(f"got kv {text!r} without preempt; expected {_names(PREEMPT)}: "
                        f"{KV_EXAMPLE}")  # fmt: skip
    times = {key: _seconds(key, pairs[key]) for key in ("setup", "token") if key in pairs}
    return KvMemory(pairs["preempt"].strip(), **times)


def parse_tool_calls(text: str) -> ToolCalls:
    """Raises SpecError: no text, unknown keys or values, numbers out of range."""
    keys = ("share", "mean", "weights", "sigma", "keep")
    pairs = _pairs("tool_calls", text, CALLS_EXAMPLE, keys)
    for key in ("share", "mean"):
        if key not in pairs:
            raise SpecError(f"got tool_calls {text!r} without {key}; expected {CALLS_EXAMPLE}")
    means = [_seconds("mean", each) for each in pairs["mean"].split("/")]
    given = pairs.get("weights", "/".join("1" for _ in means)).split("/")
    weights = [parse_number("weights", each, text) for each in given]
    if len(weights) != len(means) or not all(0 < each < math.inf for each in weights):
        raise SpecError(
            f"got weights={pairs['weights']} for {len(means)} kinds of tool calls; expected a "
            "number > 0 for each mean"
        )
    return ToolCalls(
        parse_number("share", pairs["share"], text),
        tuple((weight / sum(weights), mean) for weight, mean in zip(weights, means, strict=True)),
        parse_number("sigma", pairs.get("sigma", "0"), text),
        pairs.get("keep", "discard").strip(),
    )


def _pairs(name: str, text: str, example: str, keys: tuple[str, ...]) -> dict[str, str]:
    check_text(name, text, example)
    if not text.strip():
        raise SpecError(f"got an empty text for {name}; expected {example}")
    pairs = split_pairs(text, context=text, example=example)
    check_keys(pairs, keys, name)
    return dict(pairs)


def _seconds(key: str, value: str) -> float:
    try:
        return parse_duration(value)
    except SpecError:
        raise SpecError(
            f"got {key}={value}; expected a duration such as 10ms, 2s or a bare number of seconds"
        ) from None


def _names(known: Mapping[str, int]) -> str:
    *others, last = known
    return f"{', '.join(others)} or {last}"
