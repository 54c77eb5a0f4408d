"""Assumptions about the engine: servers that are equally fast, no stalls, a constant speed, service
times of the law's shape, and memory enough that requests wait for slots only, as the model has it.

equal_servers    of several servers: fails where their speeds differ
                 (queueing.estimation.speed.server_speeds); the prediction takes each at its own
                 speed then. Not judged where fewer than two have served enough.
no_stalls        fails where stalls (queueing.estimation.speed.speed_process) lengthen the predicted
                 mean delay by `MATERIAL` of it and by `FLOOR`: beside the prediction of the same
                 machine without them, which the caller computed. Without a prediction: where they
                 hold at least `STALL_SHARE` of the busy time.
constant_speed   fails where the speed made a step (queueing.estimation.speed.speed_change), or
                 wanders significantly (queueing.estimation.speed.drift) and so much that the mean
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
enough_memory    of policies whose requests join running ones. A request waits from `lag` after its
                 arrival to its dispatch, and is in service until `lag` after its slot is free; lag
                 is twice the gateway's shortest delay, at least `LEAST_LAG`: the gateway's own work
                 is no wait for memory. Fails where for more than `NEGLIGIBLE` of the window a
                 request waited while fewer were in service than there are slots. Without a bound on
                 the slots each wait is one for memory.

Not judged: batches; an order that preempts, whose records do not say when each wait was; a window
in which nobody was served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kendall.policies.core import Policy
from kendall.policies.ordered import order_of
from kendall.policies.text import short_number
from kendall.queueing.estimation.assumptions.assumption import (
    Assumption,
    ForecastTest,
    StalledDelay,
    factor,
    not_judged,
)
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.server_speeds import LEAST, ServerSpeed, differ, ends_of
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.batch_means import batch_means_interval

STALL_SHARE = 0.02
MATERIAL = 0.10
FLOOR = 1e-3  # seconds
SIGNIFICANT, MISFIT = 4.5, 0.08
BEFORE = 5
FEWEST = 100  # batches
NEGLIGIBLE = 0.02  # of the time
LEAST_LAG = 0.002  # seconds


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


def no_stalls(count: int, found: Stalls, stalled: StalledDelay | None = None) -> Assumption:
    """Whether rare long batches, of so many, cost little."""
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


def constant_speed(speeds: Speeds, wander_effect: float | None = None) -> Assumption:
    """Whether the speed neither made a step nor wanders so much that the delay moves."""
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
    powers = np.vander(sizes, 3)
    explained = powers @ np.linalg.lstsq(powers, times.decoding, rcond=None)[0]
    by_length = _misfit(times, times.decoding - explained, "length")
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


def _misfit(times: BatchTimes, column: Vector, name: str) -> Assumption:
    logs, column = np.log(times.ratio), column[BEFORE + 1 :]
    sums = np.cumsum(np.concatenate([[0.0], logs]))
    logs = logs[BEFORE + 1 :] - (sums[BEFORE:-2] - sums[: -BEFORE - 2]) / BEFORE
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


def enough_memory(
    seen: Snapshot, policy: Policy, slots: int | None, *, own_queues: bool = False
) -> Assumption:
    """`slots` of each server; None: no bound."""
    if not policy.joins_running or order_of(policy).preemptive:
        return not_judged("enough_memory", "batches, or preemption")
    if not len(seen.rows) or not seen.now > seen.start:
        return Assumption("enough_memory", None, math.nan, "nobody was served")
    shares = [
        waits_beside_free_slots(each, math.inf if slots is None else slots * each.servers)
        for each in (seen.of_servers() if own_queues else [seen])
    ]
    share = max(shares)
    if share <= NEGLIGIBLE:
        return Assumption("enough_memory", True, share, "requests wait for slots only")
    says = (
        f"for {share:.0%} of the time a request waited although a slot was free: prompts and token "
        "limits of those in service fill the KV memory"
    )
    return Assumption("enough_memory", False, share, says)


def waits_beside_free_slots(seen: Snapshot, slots: float) -> float:
    """The share of the window in which a request waited and not all slots were taken."""
    shortest = seen.shortest_delay if math.isfinite(seen.shortest_delay) else 0.0
    lag = max(LEAST_LAG, 2 * shortest)
    mine = seen.column("epoch") == seen.epoch
    arrived_at, begun_at, free_at = (
        seen.column(name)[mine] for name in ("arrived_at", "dispatched_at", "server_free_at")
    )
    waited = begun_at > arrived_at + lag
    running = np.array([at for at, _ in seen.in_service])
    changes = (
        (arrived_at[waited] + lag, 1, 0),
        (begun_at[waited], -1, 0),
        (begun_at, 0, 1),
        (np.where(np.isnan(free_at), begun_at, free_at) + lag, 0, -1),
        (running, 0, 1),
    )
    window = seen.start, seen.now
    times = np.clip(np.concatenate([at for at, _, _ in changes]), *window)
    waits, serves = (
        np.concatenate([np.full(len(change[0]), change[kind]) for change in changes])
        for kind in (1, 2)
    )
    order = np.argsort(times, kind="stable")
    waiting, serving = np.cumsum(waits[order]), np.cumsum(serves[order])
    seconds = np.diff(times[order], append=window[1])
    return float(seconds[(waiting > 0) & (serving < slots)].sum()) / (window[1] - window[0])


ENGINE_TESTS = (
    ForecastTest(
        "equal_servers",
        lambda evidence, forecast: (
            equal_servers(forecast.speeds.servers) if evidence.seen.servers > 1 else None
        ),
    ),
    ForecastTest(
        "no_stalls",
        lambda _, forecast: no_stalls(
            forecast.speeds.times.count, forecast.speeds.stalls, forecast.stalled
        ),
    ),
    ForecastTest(
        "constant_speed",
        lambda _, forecast: constant_speed(forecast.speeds, forecast.wander_effect),
    ),
    ForecastTest(
        "law_shape",
        lambda evidence, forecast: law_shape(
            forecast.speeds.steady, constant=not evidence.fails("constant_speed")
        ),
        lambda forecast: "slots are not batches" if forecast.policy.joins_running else None,
    ),
    ForecastTest(
        "enough_memory",
        lambda evidence, forecast: enough_memory(
            evidence.seen, forecast.policy, forecast.slots, own_queues=forecast.own_queues
        ),
    ),
)
