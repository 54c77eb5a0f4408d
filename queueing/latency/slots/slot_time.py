"""How long a slot of a continuously batching engine is taken: the closed system with n slots, none
ever empty. Means, seconds.

With n slots taken, each one passes through a gap (turnaround, then the wait for the next step) and
l = E[N] steps:

    f = A / S                         share of its slot time that a slot spends in steps
    A = a + l (k4 + k3 (1 + (n - 1) f)) + (n - 1) f a,   a = k1 + kp E[P]
    S = A + gap,   throughput X(n) = n / S(n)

gap: `turnaround` plus what is left of a step if another slot is in one: half of E[Z^2] / E[Z], Z =
step + Poisson(mu) admissions, mu entries a step; those who came in the excess E[a^2] mu / E[Z]
enter in front.
While requests wait, a slot is refilled at the end of a step, so its gap is a whole number of steps:
to the first end at or after the turnaround. Without a turnaround the refilled X(c) = c / (l t(c) +
c a) is exact, t(n) = k3 n + k4.

Deviation of departures. An admission holds up all slots together, so it is engine time per
departure, as the own steps of the c slots are not: c times the engine time of many departures has
the variance, per departure,

    E[S]^2 C^2 = Var N t^2 + c^2 kp^2 Var P        t: the step without admissions

(counting the admissions of others as a stretch of one's own steps, C^2 = Var N / E[N]^2, makes the
delay up to 30 % too long at c = 32). Measured: with a turnaround the refilled X(c) is within 0.4 %
of simulation; outputs of 1 to 4 tokens 1.2 %, of one length 2 %.

Where a step computes a bounded number of tokens (chunked prefill), a request takes more steps than
tokens: queueing.latency.slots.prompt_parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammaln, pdtr

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import NotConvergedError, OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.prompt_parts import PromptParts

_MANY = 256  # slots from which on only the likely numbers of active ones are followed
_MOST_STEPS = 20_000_000  # within the turnaround, over all numbers of active slots


@dataclass(frozen=True)
class SlotTime:
    """How long a slot is taken when n are, one of them in question. Means."""

    law: LatencyModel
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None = None
    step_tokens: int | None = None  # that a step computes, at most

    def mean(self, slots: int, *, refilled: bool) -> float:
        """S(n), the mean time that a slot is taken."""
        return self.parts(slots, refilled=refilled)[0]

    def parts(self, slots: int, *, refilled: bool, share: float = 0.5) -> tuple[float, float]:
        """S(n) and its share in steps, by iteration from `share`; `refilled` = a slot is taken
        again at the step in which it became free.

        Raises NotConvergedError.
        """
        total = math.inf
        for _ in range(500):
            active = self._active(slots, share) + (
                0.0 if refilled else self._followed(slots - 1, share)
            )
            previous, total = total, active + self.gap(slots, share, refilled=refilled)
            share = active / total
            if abs(total - previous) < 1e-12 * total:
                return total, share
        raise NotConvergedError(
            f"the slot time of {slots} slots", abs(total - previous) / abs(total)
        )

    def gap(self, slots: int, share: float, *, refilled: bool) -> float:
        """Slot taken, not in a step: turnaround and the wait for a boundary; `share` of the
        others is in steps.
        """
        turnaround = self.law.turnaround * self.law.speed
        others = slots - 1
        if not refilled:
            _, step, excess = self._met(others, share)
            return turnaround + (1 - (1 - share) ** others) * (step + excess) / 2
        if turnaround == 0:
            return 0.0
        chances = _binomial(others, share)
        likely = np.flatnonzero(chances > 1e-20) if slots > _MANY else np.arange(slots)
        waits = [
            self._aligned(turnaround, int(active)) if active else turnaround for active in likely
        ]
        return float(chances[likely] @ waits)

    def throughput(self, slots: int, *, refilled: bool) -> float:
        """X(n) = n / S(n)."""
        return slots / self.mean(slots, refilled=refilled)

    def throughput_of(self, chances: Mapping[int, float]) -> float:
        """Of refilled slots whose number varies, with the chances that departures see:
        1 / E[S(N) / N] (queueing.distributions.packing).
        """
        return 1 / sum(
            chance * self.mean(slots, refilled=True) / slots for slots, chance in chances.items()
        )

    def limit(self) -> float:
        """The throughput of infinitely many slots: each request costs its own share only."""
        seconds = self.admitted + self.law.speed * self.law.k3 * self.mean_tokens
        return 1 / seconds if seconds > 0 else math.inf

    @cached_property
    def mean_tokens(self) -> float:
        """E[N]."""
        return self.output_tokens.mean

    @cached_property
    def _prompts(self) -> PromptParts:
        return PromptParts(self.law, self.prompt_tokens, self.step_tokens, self.mean_tokens)

    def prompt_shares(self, arrival_rate: float, slots: int) -> tuple[float, float]:
        """Share of time in which the steps are full of prompts, and the share of a request's steps,
        while all slots are taken, in which it waits for other prompts. Both 0 without a bound.
        """
        if self.step_tokens is None or self.prompt_tokens is None:
            return 0.0, 0.0
        share = self.parts(slots, refilled=True)[1]
        found = self._prompts.with_others((slots - 1) * share)
        busy = arrival_rate * self._prompts.mean / found.room * found.full
        return busy, found.waiting / found.steps

    @cached_property
    def admitted(self) -> float:
        """a, the engine time of one admission."""
        return self.law.admission(1, 0.0 if self.prompt_tokens is None else self.prompt_tokens.mean)

    def _met(self, others: int, share: float) -> tuple[float, float, float]:
        """Entries and mean of a step, and by how much longer the one is that an arrival meets:
        steps with many admissions, and with long prompts, are met more often.
        """
        if not others or not share:
            return 0.0, 0.0, 0.0
        found, law = self._prompts.with_others(others * share), self.law
        entering = others * share / found.steps
        decoding = share * (found.decoding / (others * share))
        step = law.step(1 + (others - 1) * decoding) + self.admitted * entering
        spread = (law.speed * law.kp) ** 2 * (found.square - self._prompts.mean**2)
        return entering, step, (self.admitted**2 + spread) * entering / step

    def _followed(self, others: int, share: float) -> float:
        """What those who came in the excess of that step add to the entry of the one who came in
        it too.
        """
        entering, step, excess = self._met(others, share)
        return self.admitted * entering * excess / step if step else 0.0

    def first_token(self, slots: int, share: float, *, refilled: bool) -> float:
        """From the dispatch to the end of the step with the first token; others are admitted in
        that step, and in those before in which the prompt is not whole.
        """
        others = (slots - 1) * share
        found = self._prompts.with_others(others)
        entry = self.admitted * (1 + others / found.steps) + self.law.step(1 + found.decoding)
        entry += found.waiting * found.full + found.further * found.between
        behind = 0.0 if refilled else self._followed(slots - 1, share)
        return self.gap(slots, share, refilled=refilled) + entry + behind

    def scv(self, slots: int, mean: float, share: float) -> float:
        """C^2 of the departures of `slots` refilled slots."""
        own = self.law.step(1 + (slots - 1) * share) ** 2 * self.output_tokens.variance
        prompts = (
            0.0
            if self.prompt_tokens is None
            else (self.law.speed * self.law.kp * slots) ** 2 * self.prompt_tokens.variance
        )
        return (own + prompts) / mean**2

    def third(self, slots: int, mean: float, share: float) -> float:
        """E[X^3] of the same, of mean 1."""
        own = self.law.step(1 + (slots - 1) * share) ** 3 * _third_cumulant(self.output_tokens)
        if self.prompt_tokens is not None and self.law.kp:
            each = self.law.speed * self.law.kp * slots
            own += each**3 * _third_cumulant(self.prompt_tokens)
        return own / mean**3 + 3 * self.scv(slots, mean, share) + 1

    def smallest_of(self, slots: int, mean: float, share: float) -> float:
        """g: from a random instant to the first end among c taken slots. Ends fall on the ends of
        steps, the same for all slots.

        With Se the residual slot time and s the seconds per token, admissions of others included: s
        (sum_{k>=0} P(Se > k s)^c - 1/2).
        """
        pace = (mean * share - self.admitted) / self._prompts.with_others((slots - 1) * share).steps
        fixed = mean - pace * self.mean_tokens
        survival = self.output_tokens.survival
        knots = np.append(
            0.0, fixed + pace * np.arange(len(survival))
        )  # the slot time exceeds knots[n + 1] with probability survival[n]
        left = np.append(mean, pace * np.cumsum(survival[::-1])[::-1]) / mean  # P(Se > knots)
        grid = pace * np.arange(math.ceil(knots[-1] / pace) + 1)
        return float(pace * (np.sum(np.interp(grid, knots, left) ** slots) - 0.5))

    def _active(self, slots: int, share: float) -> float:
        others = (slots - 1) * share
        found = self._prompts.with_others(others)
        own = self.mean_tokens * self.law.step(1 + found.decoding)
        before = (found.waiting + found.further) * found.between
        return self.admitted * (1 + others) + own + before

    def _aligned(self, turnaround: float, active: int) -> float:
        """E[end of the first step at or after the turnaround], steps with `active` others,
        admissions among them Poisson.
        """
        if active in self._known_ends:
            return self._known_ends[active]
        step, rate = self.law.step(active), active / self.mean_tokens
        most = math.ceil(turnaround / step)
        self._taken_steps.append(most)
        if sum(self._taken_steps) > _MOST_STEPS:
            raise OutOfReachError(
                f"a turnaround of {turnaround:.4g} s, of {turnaround / step:.4g} steps"
            )
        k = np.arange(1.0, most)
        within = (
            pdtr(np.ceil((turnaround - k * step) / self.admitted) - 1, k * rate)
            if self.admitted > 0
            else np.ones(len(k))
        )
        steps = 1.0 + (float(np.cumsum(within)[-1]) if most > 1 else 0.0)
        self._known_ends[active] = steps * (step + rate * self.admitted)
        return self._known_ends[active]

    @cached_property
    def _known_ends(self) -> dict[int, float]:
        return {}

    @cached_property
    def _taken_steps(self) -> list[int]:
        return []


def _third_cumulant(tokens: TokenDistribution) -> float:
    return float(tokens.pmf @ (np.arange(len(tokens.pmf)) - tokens.mean) ** 3)


def _binomial(n: int, p: float) -> Vector:
    k = np.arange(n + 1)
    if p in (0.0, 1.0):
        return np.asarray(k == n * p, dtype=float)
    log = (
        gammaln(n + 1)
        - gammaln(k + 1)
        - gammaln(n - k + 1)
        + k * math.log(p)
        + (n - k) * math.log1p(-p)
    )
    return np.asarray(np.exp(log))
