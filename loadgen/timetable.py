"""The timetable of a run: who is sent when, with how many tokens, drawn as data before anything is sent.

Poisson arrivals are sums of exponential gaps of rate 1, divided by the asked rate. The gaps, the lengths and the
prompts come from streams of their own, spawned from one seed: another rate, policy or prompt leaves the rest as it
was (common random numbers), and a longer run begins as the shorter one did. The instants are never rescaled to end
on time: a process that is pinned to its last arrival is not Poisson, and waits too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.text import SpecError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Lengths(Protocol):
    """Where token counts come from: a `queueing.distributions.TokenDistribution`."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[Any]:
        """`size` independent counts >= 1."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """One row per request, in the order of sending; three arrays of one length."""

    intended_at: FloatArray  # seconds after the start of the run
    prompt_tokens: IntArray
    output_tokens: IntArray

    def __post_init__(self) -> None:
        sizes = {self.intended_at.size, self.prompt_tokens.size, self.output_tokens.size}
        if len(sizes) > 1:
            raise ValueError(f"got arrays of {sorted(sizes)} entries; expected three of one length")
        if np.any(np.diff(self.intended_at) < 0):
            raise ValueError("got instants that go back; expected a timetable in the order of sending")

    def __len__(self) -> int:
        return self.intended_at.size

    @property
    def rate(self) -> float:
        """Requests per second over its own span: the drawn rate, not the asked one."""
        return delivered_rate(self.intended_at)


def delivered_rate(instants: FloatArray) -> float:
    """Arrivals per second between the first and the last; not a number below two arrivals, infinity for a burst."""
    if instants.size < 2:
        return float("nan")
    span = float(instants.max() - instants.min())
    return (instants.size - 1) / span if span > 0 else float("inf")


def draw(rate: float, num_prompts: int, seed: int, prompt_tokens: Lengths, output_tokens: Lengths) -> Timetable:
    """A Poisson timetable: `rate` in requests per second (infinity sends all at once). Raises SpecError."""
    if not rate > 0:
        raise SpecError(f"got request rate {rate}; expected requests per second > 0")
    if num_prompts < 1:
        raise SpecError(f"got {num_prompts} prompts; expected a whole number >= 1")
    if seed < 0:
        raise SpecError(f"got seed {seed}; expected a whole number >= 0")
    arrivals, outputs, prompts, _ = streams(seed)
    gaps = arrivals.exponential(size=num_prompts) / rate
    return Timetable(
        intended_at=np.cumsum(gaps),
        prompt_tokens=np.asarray(prompt_tokens.sample(prompts, num_prompts), dtype=np.int64),
        output_tokens=np.asarray(output_tokens.sample(outputs, num_prompts), dtype=np.int64),
    )


def streams(seed: int) -> tuple[np.random.Generator, np.random.Generator, np.random.Generator, np.random.Generator]:
    """The independent generators of a seed: arrivals, output lengths, prompt lengths, prompts."""
    arrivals, outputs, prompts, words = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4))
    return arrivals, outputs, prompts, words


def draw_prompts(timetable: Timetable, seed: int, vocabulary: range) -> list[IntArray]:
    """Token ids of every prompt, uniform over `vocabulary`; different prompts share no prefix but by chance."""
    words = streams(seed)[3]
    ids = words.integers(vocabulary.start, vocabulary.stop, size=int(timetable.prompt_tokens.sum()))
    return np.split(ids, np.cumsum(timetable.prompt_tokens)[:-1])
