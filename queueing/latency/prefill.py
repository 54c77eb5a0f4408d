"""Prompts of a batch: padding to the longest, and how prefill time grows with the length of a
prompt.

    P(D_max <= x) = P(D <= x)^b,  for D uniform on (0, m1): (x / m1)^b
    E[D_max] = m1 b / (b + 1)                               (Yang et al., Eq. 17)
    padded prompts (Eq. 18 with its prompts kept):
        H = k1 b + k2 + kp b D_max + (k3 b + k4) L
    prefill of one prompt of n tokens (c: attention, every token with every earlier one):
        T = a + b n + c n^2

The source takes m1 for D_max ("its upper bound") and puts it into k1 and k2; the difference is kp b
(m1 - E[D_max]), which falls with b. Conditions: lengths independent of each other and of the batch
size. Method: exact sums; the fit is unweighted least squares (queueing/latency/regression.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.text import SpecError
from queueing.distributions.token_distribution import TokenDistribution
from queueing.latency.law import LatencyModel
from queueing.latency.regression import Interval, Vector, least_squares


@dataclass(frozen=True, slots=True, eq=False)
class PrefillFit:
    """T = a + b n + c n^2, seconds, with 95 % intervals by name, R2 and residuals."""

    a: float
    b: float
    c: float
    intervals: dict[str, Interval]
    r2: float
    residuals: Vector

    def __call__(self, prompt_tokens: float) -> float:
        """Fitted prefill time of a prompt, seconds."""
        return self.a + (self.b + self.c * prompt_tokens) * prompt_tokens


def fit_prefill(prompt_tokens: Sequence[float], seconds: Sequence[float]) -> PrefillFit:
    """Prefill time as a quadratic of the prompt's length. Raises SpecError: fewer than four
    points or three lengths.
    """
    lengths = np.asarray(prompt_tokens, dtype=float)
    fit = least_squares({"a": np.ones_like(lengths), "b": lengths, "c": lengths**2}, seconds)
    return PrefillFit(
        **fit.coefficients, intervals=fit.intervals, r2=fit.r2, residuals=fit.residuals
    )


def uniform_longest_prompt(longest: float, batch_size: int) -> float:
    """E[D_max] of `batch_size` prompts, continuous uniform on (0, `longest`): Eq. 17."""
    if batch_size < 1 or longest < 0:
        raise SpecError(
            f"got a batch of {batch_size} and prompts up to {longest}; expected at least 1 and a "
            "length >= 0"
        )
    return longest * batch_size / (batch_size + 1)


def padding_share(prompt_tokens: TokenDistribution, batch_size: int) -> float:
    """Share of a padded batch's prompt tokens that is padding: 1 - E[D] / E[D_max]."""
    return 1 - prompt_tokens.mean / prompt_tokens.maximum(batch_size).mean


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


def padded_prompt_service_time(
    law: LatencyModel,
    prompt_tokens: TokenDistribution,
    output_tokens: TokenDistribution,
    batch_size: int,
) -> float:
    """Mean service time, seconds, of a batch whose prompts and outputs are both padded to the
    longest: E[H] of Eq. 18.
    """
    prompts = prompt_total(prompt_tokens, batch_size, padded=True)[0]
    return law.padded(batch_size, output_tokens.maximum(batch_size).mean, prompts)
