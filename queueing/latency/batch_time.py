"""H | b, the service time of a batch of b requests under the latency law: exact moments.

    padded    H = X (k1 b + k2 + kp sum P_i + (k3 b + k4) max N_i)
    unpadded  H = X (k1 b + k2 + kp sum P_i + k3 sum N_i + k4 max N_i)

With padded prompts (Yang et al., Eq. 17 and 18) kp b max P_i instead of kp sum P_i. N_i output
tokens, P_i prompt tokens, X the gamma residual (mean 1, SCV cv^2), all independent, but lengths in
a call (queueing.distributions.call_lengths). Stalls of s seconds that hold the share q of the time
add q s E[H] to E[H^2] (queueing.latency.stalls). Its law: queueing.latency.service_table.

Where calls of n sequences are served whole, a call may stand for a request: `of_calls` is H of c
calls, b = c n.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.lattice import Vector
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import SMALLER, OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_laws import thinned
from kendall.queueing.latency.service_table import ServiceTable, TabulatedService

_MOST_NUMBERS = 17_000_000  # of the laws of the longest output, some seconds


@dataclass(frozen=True, eq=False)
class BatchTime:
    """The law of H given the batch size, in requests of `unit` sequences each."""

    law: LatencyModel
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None
    padded: bool
    pad_prompts: bool = False
    sequences: TokenDistribution | None = None  # of a call; None: one
    intraclass_correlation: float = 0.0  # of the output lengths in a call
    unit: int = 1

    def of_calls(self) -> BatchTime:
        """The same with calls for requests, of which all have as many sequences."""
        assert self.outputs.size is not None
        return self if self.outputs.size == 1 else replace(self, unit=self.outputs.size)

    def table(self, largest: int) -> ServiceTable:
        """The laws for b = 1 .. `largest`, kept: they do not depend on the arrival rate."""
        if largest not in self._tables:
            self._check_reach(largest)
            service = TabulatedService(
                law=self.law,
                outputs=self.outputs,
                unit=self.unit,
                prompt_tokens=self.prompt_tokens,
                padded=self.padded,
                pad_prompts=self.pad_prompts,
            )
            self._tables[largest] = ServiceTable(service, largest=largest, mean=self.mean(largest))
        return self._tables[largest]

    @cached_property
    def _tables(self) -> dict[int, ServiceTable]:
        return {}

    @cached_property
    def lengths(self) -> TokenDistribution:
        """The output lengths as the numerics carry them, one law for tables and moments:
        unpadded ones are thinned where they are many.
        """
        return (
            self.output_tokens
            if self.padded or self.output_tokens.tail is not None
            else thinned(self.output_tokens)
        )

    @cached_property
    def outputs(self) -> CallLengths:
        """The output lengths, in calls."""
        return CallLengths(self.lengths, self.sequences, self.intraclass_correlation)

    def moments(self, largest: int) -> tuple[Vector, Vector, Vector]:
        """E[H | b], E[H^2 | b] and the mean time to a member's own release, each for b = 1 ..
        `largest`.
        """
        known = self._moments
        self._check_reach(largest)
        for b in range(len(known) + 1, largest + 1):
            known.append((self.mean(b), self.second_moment(b), self.own_mean(b)))
        first, second, own = np.array(known[:largest]).T
        return first, second, own

    def _check_reach(self, largest: int) -> None:
        """Raises OutOfReachError: the law of the longest of b outputs, or of b padded prompts,
        is computed for each b.
        """
        prompts = self.prompt_tokens if self.pad_prompts else None
        for what, law in (("outputs", self.output_tokens), ("prompts", prompts)):
            if law is not None and largest * len(law.pmf) > _MOST_NUMBERS:
                raise OutOfReachError(
                    f"the service time of 1 to {largest} {what} of up to {law.longest} tokens",
                    SMALLER,
                )

    def _longest(self, batch_size: int) -> TokenDistribution:
        """The law of the longest output; the last is kept: a batch's moments ask for it one
        after the other.
        """
        if self._last.get("size") != batch_size:
            self._last.update(size=batch_size, law=self.outputs.longest(self.unit * batch_size))
        law: TokenDistribution = self._last["law"]
        return law

    @cached_property
    def _last(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _moments(self) -> list[tuple[float, float, float]]:
        return []

    def mean(self, batch_size: int) -> float:
        """E[H | b]."""
        return self._decode_mean(batch_size) + self._setup_mean(batch_size)

    def second_moment(self, batch_size: int) -> float:
        """E[H^2 | b]."""
        variance = (
            self._decode_variance(batch_size)
            + (self.law.speed * self.law.kp) ** 2 * self._prompts(batch_size)[1]
        )
        stalls = self.law.stall_share * self.law.stall * self.mean(batch_size)
        return (1 + self.law.cv**2) * (variance + stalls + self.mean(batch_size) ** 2)

    def own_mean(self, batch_size: int) -> float:
        """Mean time from dispatch to one member's own release: H where padded, its own last
        token where not.
        """
        if self.padded:
            return self.mean(batch_size)
        lengths, law, count = self.lengths, self.law, self.unit * batch_size
        shorter = float(np.sum((1 - lengths.cdf[:-1]) ** 2))  # E min(N1, N2)
        equal = self.outputs.equal_pairs(count) / count  # others of a member's own draw
        beside = equal * lengths.mean + (count - 1 - equal) * shorter
        decode = law.k3 * (lengths.mean + beside) + law.k4 * lengths.mean
        return self._setup_mean(batch_size) + law.speed * decode

    def first_token(self, batch_size: int) -> float:
        """Mean time from dispatch to the first token: the prefill of the batch and one step."""
        return self._setup_mean(batch_size) + self.step(batch_size)

    def step(self, batch_size: int) -> float:
        """One decode step of a whole batch."""
        return self.law.step(self.unit * batch_size)

    def largest_stable_rate(self, bound: int | None) -> float:
        """lim b / E[H(b)] at the bound: more than this cannot be served."""
        if bound is not None:
            return bound / self.mean(bound)
        each = self.lengths.longest if self.padded else self.lengths.mean
        prompt = (
            0.0
            if self.prompt_tokens is None
            else self.prompt_tokens.longest
            if self.pad_prompts
            else self.prompt_tokens.mean
        )
        seconds = self.law.admission(1, prompt) + self.law.speed * self.law.k3 * each
        seconds *= self.unit
        return 1 / seconds if seconds > 0 else float("inf")

    def _prompts(self, batch_size: int) -> tuple[float, float]:
        """Mean and variance of the prompt tokens of a batch."""
        if self.prompt_tokens is None or self.law.kp == 0:
            return 0.0, 0.0
        if batch_size not in self._known_prompts:
            self._known_prompts[batch_size] = prompt_total(
                self.prompt_tokens, self.unit * batch_size, padded=self.pad_prompts
            )
        return self._known_prompts[batch_size]

    @cached_property
    def _known_prompts(self) -> dict[int, tuple[float, float]]:
        return {}

    def _setup_mean(self, batch_size: int) -> float:
        return self.law.setup(self.unit * batch_size, self._prompts(batch_size)[0])

    def _decode_mean(self, batch_size: int) -> float:
        longest = self._longest(batch_size).mean
        if self.padded:
            return self.step(batch_size) * longest
        return self.law.speed * (
            self.law.k3 * self.unit * batch_size * self.lengths.mean + self.law.k4 * longest
        )

    def _decode_variance(self, batch_size: int) -> float:
        law, count, longest = self.law, self.unit * batch_size, self._longest(batch_size)
        if self.padded:
            return self.step(batch_size) ** 2 * longest.variance
        # a variance may be infinite, also where its coefficient is 0
        own = law.k3**2 * self.outputs.total_variance(count) if law.k3 else 0.0
        own += law.k4**2 * longest.variance if law.k4 else 0.0
        covariance = self.outputs.total_with_longest(count)
        return law.speed**2 * (own + 2 * law.k3 * law.k4 * covariance)


def prompt_total(
    prompt_tokens: TokenDistribution, batch_size: int, *, padded: bool
) -> tuple[float, float]:
    """Mean and variance of the prompt tokens that a batch of `batch_size` computes: their sum,
    or b D_max where they are padded.
    """
    if not padded:
        return batch_size * prompt_tokens.mean, batch_size * prompt_tokens.variance
    longest = prompt_tokens.maximum(batch_size)
    return batch_size * longest.mean, batch_size**2 * longest.variance
