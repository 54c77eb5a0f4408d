"""What the engine must be: a constant speed, no stalls, service times of the law's shape, a queue
that is stable and settled.

equal_servers    of several servers: fails where their speeds differ
                 (queueing.estimation.speed.server_speeds); the prediction takes each at its own
                 speed then. Not judged where fewer than two have served enough.
no_stalls        fails where stalls (queueing.estimation.speed.speed_process) lengthen the predicted
                 mean delay by `MATERIAL` of it and by `FLOOR`: beside the prediction of the same
                 machine without them, which the caller computed. Without a prediction: where they
                 hold at least `STALL_SHARE` of the busy time.
constant_speed   fails where the speed made a step (queueing.estimation.speed.speed_change), or
                 wanders significantly (queueing.estimation.speed.wander) and so much that the mean
                 delay moves by `MATERIAL`: by the band that the caller computed, else by 3 sigma.
law_shape        log r_i, minus the average of `BEFORE` batches before it, the last excepted,
                 regressed on two things that the law says of batch i. On the share of decoding, as
                 far as no polynomial of the size explains it: the lengths that were drawn, which no
                 slow moment changes; this is judged whatever the speed does. And on the logarithm
                 of the size: slow moments make batches larger (they let the queue grow), so sizes
                 go with slow batches under a perfect law; the batches before share the slow moment,
                 but not the size. (The last is left out: how long it took is how many this one
                 takes.) This is judged where the speed is constant. What is left of a wander enters
                 the errors by blocks of consecutive batches. Fails where the coefficient is beyond
                 `SIGNIFICANT` errors and moves the time by `MISFIT` between the 10th and 90th
                 percentile.
stable_queue     fails where the load's interval lies above 1, or the load is above `NEAR_ONE` and
                 the delay grows over the window: Kendall's score of its means in `TREND` blocks is
                 at least `RISES` of 45 (one in 1000 without a trend), and its later half is twice
                 its earlier.
settled          fails where the time that the queue needs to forget how the epoch began,
                 `RELAXATIONS` relaxation times and the clearing of what waited then, is more than
                 `UNSETTLED` of the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.text import short_number
from queueing.estimation.assumptions.assumption import Assumption, factor
from queueing.estimation.change import Vector
from queueing.estimation.interval import Estimate
from queueing.estimation.speed.batch_times import BatchTimes
from queueing.estimation.speed.server_speeds import LEAST, ServerSpeed, differ, ends_of
from queueing.estimation.speed.speed_process import Stalls, stalls
from queueing.estimation.speed.speeds import Speeds
from queueing.measurement.batch_means import batch_means, batch_means_interval

STALL_SHARE = 0.02
MATERIAL = 0.10
FLOOR = 1e-3  # seconds
SIGNIFICANT, MISFIT = 4.5, 0.08
BEFORE = 5
FEWEST = 100  # batches
NEAR_ONE = 0.95
TREND, RISES = 10, 35
RELAXATIONS, UNSETTLED = 3.0, 0.2


def equal_servers(speeds: Sequence[ServerSpeed]) -> Assumption:
    """Of several servers."""
    if len(speeds) < 2:
        return Assumption(
            "equal_servers", None, math.nan, f"fewer than two servers have had {LEAST} batches"
        )
    slow, fast = ends_of(speeds)
    ratio = math.exp(slow.log - fast.log)
    if not differ(speeds):
        return Assumption("equal_servers", True, ratio, "the servers are equally fast")
    says = (
        f"server {slow.server} takes {factor(ratio)} times as long as server {fast.server} for the "
        "same work; the prediction takes each at its own speed"
    )
    return Assumption("equal_servers", False, ratio, says)


def engine_assumptions(
    speeds: Speeds,
    *,
    continuous: bool,
    wander_effect: float | None = None,
    stalled: StalledDelay | None = None,
) -> tuple[Assumption, ...]:
    """no_stalls, constant_speed, law_shape; `wander_effect`: relative half width or shift that
    the wander gives to the mean delay.
    """
    constant = _constant_speed(speeds, wander_effect)
    not_judged = Assumption("law_shape", None, math.nan, "not judged: slots are not batches")
    shape = (
        not_judged if continuous else law_shape(speeds.steady, constant=constant.holds is not False)
    )
    return (_no_stalls(speeds.times.count, speeds.stalls, stalled), constant, shape)


@dataclass(frozen=True, slots=True)
class StalledDelay:
    """The predicted mean delay, and what it would be without the stalls; seconds."""

    mean: float
    smooth: float

    @property
    def price(self) -> float:
        """What the stalls add."""
        return self.mean - self.smooth

    @property
    def effect(self) -> float:
        """The same as a share of the mean."""
        return self.price / self.mean if self.mean else 0.0


def no_stalls(times: BatchTimes, stalled: StalledDelay | None = None) -> Assumption:
    """Rare long batches."""
    return _no_stalls(times.count, stalls(times), stalled)


def _no_stalls(count: int, found: Stalls, stalled: StalledDelay | None) -> Assumption:
    if not count:
        return Assumption("no_stalls", None, math.nan, "no batch was served whole")
    if not found.count:
        return Assumption("no_stalls", True, 0.0, "no stalls")
    number = f"{found.count} stalls hold" if found.count > 1 else "1 stall holds"
    says = (
        f"{number} {found.time_share:.1%} of the busy time, the longest "
        f"{short_number(found.longest, 3)} s"
    )
    if stalled is None:
        return Assumption("no_stalls", found.time_share < STALL_SHARE, found.time_share, says)
    fails = stalled.effect >= MATERIAL and stalled.price >= FLOOR
    says += f": {short_number(1000 * stalled.price, 3)} ms of the predicted delay"
    return Assumption("no_stalls", not fails, stalled.effect, says)


def constant_speed(times: BatchTimes, wander_effect: float | None = None) -> Assumption:
    """A step in the speed, or wander."""
    return _constant_speed(Speeds(times), wander_effect)


def _constant_speed(speeds: Speeds, wander_effect: float | None) -> Assumption:
    stepped, slow = speeds.step, speeds.slow
    if stepped is not None:
        word = "slower" if stepped.ratio > 1 else "faster"
        ago = speeds.times.at[-1] - stepped.at
        says = (
            f"the engine became {word} by a factor of {factor(stepped.ratio)}, "
            f"{short_number(ago, 3)} s before the last batch"
        )
        return Assumption("constant_speed", False, stepped.ratio, says)
    if not slow.sigma.known:
        return Assumption("constant_speed", None, math.nan, "too few batches")
    effect = 3 * slow.sigma.value if wander_effect is None else wander_effect
    if slow.significant and effect >= MATERIAL:
        moves = f"moves by {effect:.0%}" if math.isfinite(effect) else "has no bound"
        says = (
            f"the speed wanders by {slow.sigma.value:.1%} over {slow.tau:.2g} s (a noisy "
            f"neighbour?): the delay {moves}"
        )
        return Assumption("constant_speed", False, slow.sigma.value, says)
    return Assumption("constant_speed", True, slow.sigma.value, "the speed does not change")


def law_shape(times: BatchTimes, *, constant: bool = True) -> Assumption:
    """Whether the ratio depends on lengths or, at a `constant` speed, on sizes in a way that a
    factor cannot mend.
    """
    if times.count < FEWEST:
        return Assumption("law_shape", None, math.nan, "too few batches")
    sizes = np.log(times.size)
    by_length = _misfit(times, _unexplained(times.decoding, sizes), "length")
    if constant:
        return max(by_length, _misfit(times, sizes, "batch size"), key=lambda found: found.measure)
    if by_length.holds is False:
        return by_length
    return Assumption(
        "law_shape",
        None,
        math.nan,
        "right for the lengths; not judged for the sizes, which change with the speed",
    )


def _unexplained(column: Vector, other: Vector) -> Vector:
    """What a polynomial of `other` leaves of the column."""
    powers = np.vander(other, 3)
    return np.asarray(column - powers @ np.linalg.lstsq(powers, column, rcond=None)[0])


def _misfit(times: BatchTimes, column: Vector, name: str) -> Assumption:
    logs = np.log(times.ratio)
    logs, column = _against_before(logs), column[BEFORE + 1 :]
    spread = float(np.quantile(column, 0.9) - np.quantile(column, 0.1))
    centred = column - column.mean()
    total = float(centred @ centred)
    if not total > 1e-9 * column.size or not spread:
        return Assumption("law_shape", True, 0.0, f"the {name} does not vary")
    slope = float(centred @ logs) / total
    errors = batch_means_interval(centred * (logs - logs.mean() - slope * centred))
    error = errors.half_width / 2.093 * column.size / total  # Student's t of 20 blocks
    moved = abs(slope) * spread
    fails = moved >= MISFIT and abs(slope) > SIGNIFICANT * error
    says = (
        f"the law misses how the time depends on the {name}: {moved:.0%} between small and large"
        if fails
        else "the law's shape fits"
    )
    return Assumption("law_shape", not fails, moved if fails else 0.0, says)


def _against_before(values: Vector) -> Vector:
    sums = np.cumsum(np.concatenate([[0.0], values]))
    before = (sums[BEFORE:-2] - sums[: -BEFORE - 2]) / BEFORE
    return np.asarray(values[BEFORE + 1 :] - before)


def stable_queue(load: Estimate, delays: Vector, *, kept_finite: str | None = None) -> Assumption:
    """Whether there is a steady state; `delays` in order of arrival, `kept_finite` by what, where
    there is one at any load.
    """
    if kept_finite is not None:
        says = f"{kept_finite} keeps the queue finite"
        return Assumption("stable_queue", True, load.value, says)
    if not math.isfinite(load.value):
        return Assumption("stable_queue", None, load.value, "no law, or no arrivals")
    growing = load.value > NEAR_ONE and _grows(delays)
    fails = load.low > 1 or growing
    says = f"the load is {load.value:.2f} ({load.low:.2f} to {load.high:.2f})"
    if fails:
        says += ": the queue grows without bound"
    elif load.value >= 1:
        says += ": whether there is a steady state is not known yet"
    return Assumption("stable_queue", False if fails else load.value < 1 or None, load.value, says)


def _grows(delays: Vector) -> bool:
    if delays.size < FEWEST:
        return False
    means = batch_means(delays, TREND)
    rises = int(
        sum(
            np.sign(means[later] - means[earlier])
            for earlier in range(TREND)
            for later in range(earlier + 1, TREND)
        )
    )
    return rises >= RISES and float(means[TREND // 2 :].mean()) > 2 * float(
        means[: TREND // 2].mean()
    )


def settled(
    window: float,
    since_epoch: float,
    relaxation: float,
    *,
    waiting_before: int = 0,
    free_rate: float = math.inf,
) -> Assumption:
    """Whether the window is long against what the epoch began with.

    `window` seconds of data, `since_epoch` seconds from the epoch's start to the window's start,
    `waiting_before` requests that waited when the epoch began, `free_rate` requests/s that can be
    served beyond those that arrive.
    """
    transient = RELAXATIONS * relaxation + (waiting_before / free_rate if waiting_before else 0.0)
    if math.isnan(transient) or math.isinf(relaxation):
        return Assumption("settled", None, math.nan, "the queue's relaxation time is not known")
    share = max(0.0, transient - since_epoch) / window if window > 0 else math.inf
    fails = share > UNSETTLED
    says = (
        f"the queue needs {short_number(transient, 3)} s to forget how this epoch began"
        if fails
        else "settled"
    )
    return Assumption("settled", not fails, share, says)
