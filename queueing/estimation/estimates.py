"""Everything that a window says about what the model needs, in one frozen value that survives a
restart.

Where the arrival rate or the speed changed within the window, each is estimated from after its own
last change; a rate that changes more than `FEW_CHANGES` times does not change, it bursts. Lengths
are taken from all requests that were dispatched in the window, those of earlier epochs included as
long as they are of one law with this epoch's (queueing.estimation.lengths.same_lengths, said in
`notes`): how long answers are does not depend on the policy, and what an earlier limit cut is
censored there.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from kendall.policies import Policy, parse_policy
from kendall.policies.text import counted, policy_batch_size
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.arrivals import arrival_rate, dispersion
from kendall.queueing.estimation.change import FEW_CHANGES, changes
from kendall.queueing.estimation.interval import NORMAL, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import Lengths, SavedLengths, lengths, weigh
from kendall.queueing.estimation.lengths.predictions import predictor_of
from kendall.queueing.estimation.lengths.same_lengths import lengths_from, outputs, prompts
from kendall.queueing.estimation.lengths.within_calls import alike_within_calls
from kendall.queueing.estimation.speed.batch_times import SLOT_ERROR, BatchTimes
from kendall.queueing.estimation.speed.speed_process import residual_cv, rough_speed, speed
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import (
    EstimatesSummary,
    LengthsSummary,
    SlowSpeed,
    SpeedDrift,
    WindowEstimates,
)
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.json_form import from_json
from kendall.queueing.latency.law import LatencyModel

SCHEMA_VERSION = 2
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SAMPLES = ("output_tokens", "prompt_tokens", "sequences")
Form = TypeVar("Form", bound=WindowEstimates[Any])


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedEstimates(WindowEstimates[SavedLengths]):
    """The estimates as the state file keeps them."""

    schema_version: int
    sequences: SavedLengths = field(default_factory=SavedLengths)
    wander: SpeedDrift


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimates(WindowEstimates[Lengths]):
    """The estimates of a window, with its samples."""

    sequences: Lengths = field(default_factory=lambda: lengths([]))
    wander: SpeedDrift
    predictor: str | None = None  # of the lengths that requests were sent with; None: not known

    @cached_property
    def call_sizes(self) -> TokenDistribution | None:
        """The law of a call's number of sequences; None: each was of one."""
        return self.sequences.law() if self.sequences.known_to > 1 else None

    def alike(self, policy: Policy, max_num_seqs: int | None) -> Estimate:
        """The intraclass correlation of output lengths as that policy depends on it: by their
        longest in batches, by their total one by one and in slots.
        """
        bounds = (policy_batch_size(policy), max_num_seqs)
        batches = not policy.joins_running and 1 not in bounds
        return self.within_calls.longest if batches else self.within_calls.total

    def at_rate(self, factor: float) -> Estimates:
        """With so many times as many arrivals."""
        if factor == 1:
            return self
        return dataclasses.replace(self, arrival_rate=self.arrival_rate.scaled(factor))

    def with_shape(self, own: LatencyModel, shape: LatencyModel) -> Estimates:
        """With the law of the `speeds` that these come from beside the calibrated one."""
        speed = self.speed.value
        prefill = own.kp / shape.kp if shape.kp else 1.0
        admission = own.turnaround - shape.turnaround
        found = dataclasses.replace(self, prefill=prefill, admission=admission)
        if own == shape or not math.isfinite(speed):
            return found
        note = (
            f"steps take {speed:.2f} times the law's time, prompts {prefill * speed:.2f} times, "
            f"what passes before the first step of a request {own.turnaround * speed * 1e3:.1f} "
            f"ms (the law at this speed: {shape.turnaround * speed * 1e3:.1f} ms)"
        )
        return dataclasses.replace(found, notes=(*self.notes, note))

    def law(self, shape: LatencyModel) -> LatencyModel:
        """The shape at the speed, residual and stalls of the window, where these are known."""
        factor = self.speed.value if math.isfinite(self.speed.value) else shape.speed
        cv = self.cv.value if self.cv.known else shape.cv
        law = dataclasses.replace(
            shape,
            kp=shape.kp * self.prefill,
            turnaround=max(0.0, shape.turnaround + self.admission),
            speed=factor,
            cv=cv,
        )
        if not self.stalls.count or not self.speed.known or parse_policy(self.policy).joins_running:
            return law
        return dataclasses.replace(law, stall_share=self.stalls.time_share, stall=self.stalls.size)

    def summary(self) -> EstimatesSummary:
        """Every estimate with its interval and effective sample size, without the samples."""
        slow = SlowSpeed(self.wander.sigma, self.wander.tau, significant=self.wander.significant)
        samples = {name: _summary(getattr(self, name)) for name in _SAMPLES}
        return _with(self, EstimatesSummary, **samples, wander=slow)

    def saved(self) -> SavedEstimates:
        """All of it, for the state file."""
        samples = {name: getattr(self, name).saved() for name in _SAMPLES}
        return _with(self, SavedEstimates, **samples, schema_version=SCHEMA_VERSION)

    @classmethod
    def from_json(cls, plain: object) -> Estimates:
        """Read saved estimates. Raises ValueError, also for another schema."""
        saved = from_json(plain, SavedEstimates)
        if saved.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"got a state of schema version {saved.schema_version}; this Kendall reads "
                f"{SCHEMA_VERSION}"
            )
        return _with(saved, cls, **{n: Lengths.restored(getattr(saved, n)) for n in _SAMPLES})


def _with(estimates: Estimates | SavedEstimates, kind: type[Form], **other: object) -> Form:
    """The same in another form: these members are its own."""
    members = {each.name: getattr(estimates, each.name) for each in fields(WindowEstimates)}
    members.update(other)
    return kind(**members)


def estimate(
    seen: Snapshot,
    policy: Policy,
    shape: LatencyModel,
    *,
    half_life: float = math.inf,
    speeds: Speeds | None = None,
    slow: SpeedDrift | None = None,
) -> Estimates:
    """From a snapshot; `shape` is the calibrated law, `half_life` (s) lets older arrivals and
    lengths count less.

    `speeds`: those of the snapshot's batch times, where the caller has use for them too; `slow`:
    the wander where more is known of it than the snapshot says.
    """
    rates = changes(seen.arrivals)
    # none in bursts: their rate is that of the whole window, their interval wide
    changed = rates[-1].at if 0 < len(rates) <= FEW_CHANGES else None
    since = seen.start if changed is None else changed
    speeds = Speeds.of(policy, seen, shape) if speeds is None else speeds
    slow = speeds.slow if slow is None else slow
    continuous = policy.joins_running
    no_residual = Estimate(0.0, 0.0, 0.0, speeds.recent.count)  # slots have none
    of_one_law = seen.telling(lengths_from(seen))
    shortest = seen.shortest_delay
    return Estimates(
        policy=seen.policy,
        epoch=seen.epoch,
        start=seen.start,
        now=seen.now,
        count=len(seen.mine.rows),
        arrival_rate=arrival_rate(seen.arrivals, since, seen.now, half_life=half_life),
        dispersion=dispersion(seen.arrivals, seen.start, seen.now),
        rate_changed_at=changed,
        output_tokens=output_lengths(of_one_law, half_life),
        prompt_tokens=prompt_lengths(of_one_law, half_life),
        sequences=lengths(seen.call_sizes, ages=seen.now - seen.arrivals, half_life=half_life),
        within_calls=alike_within_calls(of_one_law),
        speed=window_speed(speeds.telling, slow, continuous=continuous),
        cv=no_residual if continuous else residual_cv(speeds.without_stalls),
        wander=slow,
        speed_changed_at=None if speeds.step is None else speeds.step.at,
        stalls=speeds.stalls,
        notes=_notes(seen, of_one_law.carried_from),
        gateway_turnaround=max(0.0, shortest) if math.isfinite(shortest) else 0.0,
        predictor=predictor_of(of_one_law),
    )


def held_tokens(mine: Snapshot, reserved: int | None) -> float:
    """On average what is kept free for the answer, `reserved` in place of a larger limit, and the
    part of the prompt that was there before; not a number where no limit is known.
    """
    limits, cached = mine.column("max_output_tokens"), mine.column("cached_tokens")
    known = np.isfinite(limits)
    if not known.any():
        return math.nan
    kept = np.minimum(limits, math.inf if reserved is None else reserved)
    return float((kept + cached)[known].mean())


def output_lengths(seen: Snapshot, half_life: float = math.inf) -> Lengths:
    """Output lengths of all requests dispatched in the window: ended, clipped, left, or still in
    service with some tokens.

    One in service that has n tokens says N >= n + 1; an answer that ends with its n-th token is not
    cut.
    """
    met = outputs(seen, seen.column("dispatched_at") >= seen.carried_from, half_life)
    going = [(at, tokens + 1, True) for at, tokens in seen.in_service if at >= seen.carried_from]
    going += [(at, tokens, False) for at, tokens in seen.ended if at >= seen.carried_from]
    at, tokens, is_open = (np.array([each[k] for each in going]) for k in range(3))
    return Lengths(
        np.concatenate([met.counts, tokens]).astype(np.int64),
        np.concatenate([met.censored, is_open]).astype(bool),
        np.concatenate([met.weights, weigh(seen.now - at, half_life)]),
    )


def prompt_lengths(seen: Snapshot, half_life: float = math.inf) -> Lengths:
    """Prompt lengths of all requests dispatched in the window."""
    return prompts(seen, seen.column("dispatched_at") >= seen.carried_from, half_life)


def window_speed(times: BatchTimes, slow: SpeedDrift, *, continuous: bool) -> Estimate:
    """The speed. Its interval is widened by the wander, whose mean over the window is not 0, and
    for slots by the error of their accounting.
    """
    found = speed(times)
    if not found.known:
        return rough_speed(times) if continuous else found
    half = (found.high - found.low) / 2
    if slow.significant:
        span = float(times.at[-1] - times.at[0])
        half = max(
            half, found.value * NORMAL * slow.sigma.value * math.sqrt(min(1.0, 2 * slow.tau / span))
        )
    if continuous:
        half += SLOT_ERROR * found.value
    return symmetric(found.value, half, found.effective_n)


def _notes(seen: Snapshot, used_from: float) -> tuple[str, ...]:
    """Which lengths of earlier epochs are used, and which are not."""
    earlier = seen.column("dispatched_at")[seen.column("epoch") != seen.epoch]
    used, known = (
        int(np.count_nonzero(earlier >= since)) for since in (used_from, seen.carried_from)
    )
    notes = []
    if used:
        notes.append(
            f"lengths of {counted(used, 'request')} of earlier epochs are used: they do not depend "
            "on the policy"
        )
    if used < known:
        notes.append(
            f"lengths of {counted(known - used, 'request')} of earlier epochs are not used: they "
            "differ from those that followed"
        )
    return tuple(notes)


def _summary(sample: Lengths) -> LengthsSummary:
    top = sample.known_to or None
    return LengthsSummary(
        known_to=sample.known_to,
        unknown_mass=sample.unknown_mass,
        mean_to_known=sample.mean(top) if top else sample.mean(),
        mean=sample.mean(),
        **{name: sample.quantile(level) for name, level in LEVELS.items()},
    )
