"""Chunked prefill: how many steps of a continuous engine a request takes where a step computes T
tokens at most. Means, an approximation.

Each sequence that makes tokens takes one of them, d all together; prompts take the room R = T - d
in the order of their entry, and a prompt P that does not fit takes further steps. With a others in
steps, x steps a request, l = E[N] of them with a token:

    d = a l / x,   q = P / R
    b = l + E[ceil(q)] - 1                              steps of a request on its own
    x = b + W,     W = g a E[q (q - 1)+] / (2 (x - a E[q]))    those in which others leave no room
    g = (t(d) + kp R) / t(d)                            a full step over one without prompts

W is the wait at a single server, M/G/1, whose work is prompts, R tokens a step, without the step in
which a request comes; full steps are longer, and more come in them. So a / x is less than R / E[P]:
prompts bound the rate too, at T / (E[N] + E[P]) requests a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel


class InParts(NamedTuple):
    """Of one request: its steps; of those, the ones in which others' prompts leave no room, and
    those with parts of its own prompt but the last. Seconds of a step in which it makes no token,
    without prompts and full of them. Others that make tokens in a step; room for prompts; E of the
    sum of the squares of the parts of a prompt. Without a bound no seconds and no room.
    """

    steps: float
    waiting: float
    further: float
    between: float
    full: float
    decoding: float
    room: float
    square: float


@dataclass(frozen=True)
class PromptParts:
    """`step_tokens`: T, None: as many as there are; `tokens`: l."""

    law: LatencyModel
    prompts: TokenDistribution | None
    step_tokens: int | None
    tokens: float

    def with_others(self, others: float) -> InParts:
        """So many others are in steps, on average."""
        if self.step_tokens is None or self.prompts is None:
            return InParts(self.tokens, 0.0, 0.0, 0.0, 0.0, others, 0.0, self._whole)
        least = max(1.0, self.step_tokens - others)
        found = self._in_room(least, others)
        if found.steps < self.tokens * (1 + 1e-12):  # they all make tokens
            return found._replace(steps=self.tokens, waiting=0.0, further=0.0, decoding=others)
        from scipy.optimize import brentq  # noqa: PLC0415 - a quarter of a second, and only here

        # more room takes fewer steps, in which more of the others make tokens and leave less room
        room = brentq(
            lambda room: self.step_tokens - self._in_room(room, others).decoding - room,
            least,
            float(self.step_tokens),
            xtol=1e-11,
        )
        return self._in_room(room, others)

    def _in_room(self, room: float, others: float) -> InParts:
        """With so much of it for prompts in a step."""
        low = math.floor(room)
        below, above = self._alone(low), self._alone(low + 1)
        further, square, left = (
            one + (room - low) * (other - one) for one, other in zip(below, above, strict=True)
        )
        alone, busy = self.tokens + further, others * self.mean / room
        steps = decoding = 0.0
        between = full = self.law.step(max(1.0, others))
        for _ in range(2):  # a full step is longer by its prompts, whoever makes tokens
            waiting = 2 * full / between * others * left
            steps = (alone + busy + math.sqrt((alone - busy) ** 2 + waiting)) / 2
            decoding = others * self.tokens / steps
            between = self.law.step(max(1.0, decoding))
            full = between + self.law.admission(0, room)
        waits = steps - alone
        return InParts(steps, waits, further, between, full, decoding, room, square)

    def _alone(self, room: int) -> tuple[float, float, float]:
        """E[ceil(q)] - 1, E of the sum of the squares of the parts, and E[q (q - 1)+]."""
        if room not in self._known:
            chance, first, second = self._from
            size = len(chance) - 2  # the longest prompt
            ends = np.arange(room, size + 1, room)  # the k-th part is whole from here on
            whole = np.arange(1, len(ends) + 1) @ chance[ends]
            squares = second[0] + 2 * room * (room * whole - first[ends].sum())
            beyond = min(room + 1, size + 1)
            left = (second[beyond] / room - first[beyond]) / room
            self._known[room] = float(chance[ends + 1].sum()), float(squares), float(left)
        return self._known[room]

    @cached_property
    def _from(self) -> tuple[Vector, Vector, Vector]:
        """E[P^0], E[P] and E[P^2] over prompts of n tokens and more, for each n; 0 at last."""
        assert self.prompts is not None
        pmf = np.append(self.prompts.pmf, 0.0)
        counts = np.arange(len(pmf), dtype=float)
        zeroth, first, second = (np.cumsum((pmf * counts**power)[::-1])[::-1] for power in range(3))
        return zeroth, first, second

    @cached_property
    def mean(self) -> float:
        """E[P], 0 without prompts."""
        return 0.0 if self.prompts is None else self.prompts.mean

    @cached_property
    def _whole(self) -> float:
        """E[P^2]."""
        return 0.0 if self.prompts is None else self.prompts.variance + self.mean**2

    @cached_property
    def _known(self) -> dict[int, tuple[float, float, float]]:
        return {}
