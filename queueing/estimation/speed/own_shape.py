"""The law's shape as a continuous engine shows it in the window, where it is not the calibrated one
at another speed.

One factor holds where everything is slower alike. On processors that are shared it is not: steps
took 1.3 to 1.5 times the law's time, prompts 1.0, and what passes before a request's first step
longer still. Three numbers are read off the requests that were served, beside a replay of the same
dispatches, lengths and prompts, in which waits for a step and the prompts of others count as they
were:

    steps        the mean time from first token to the end of the slot
    kp           the slope of the time from dispatch to first token on a request's own prompt
    turnaround   what is left of the mean time from dispatch to first token

No delay enters.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies import Continuous, Policy
from queueing.distributions.token_distribution import TokenDistribution
from queueing.estimation.change import Vector
from queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from queueing.estimation.window.snapshot import CENSORED, Snapshot, picked
from queueing.latency.law import LatencyModel
from queueing.model import Model

FEWEST = 200  # requests
MOST = 6000  # the last ones: a replay of more says little more
CLOSE = 0.1  # half width of kp over its value, at most
ROUNDS = 4  # each of the three moves the others a little
ROOM = 4  # times as many slots in the replay as were ever taken: a dispatch never waits there
SAME = 0.05  # of the mean time to the first token: less is not told apart from the calibrated law


@dataclass(frozen=True, eq=False)
class _Told:
    """Requests in the order of their dispatch, and of those that can be compared the observed
    times; seconds, tokens.
    """

    model: Model  # with room for all
    dispatched: Vector
    outputs: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    telling: npt.NDArray[np.bool_]
    first: Vector  # from dispatch to first token
    rest: Vector  # from there to the end of the slot

    def replayed(self, law: LatencyModel) -> tuple[Vector, Vector]:
        """First and rest under this law, of those that tell."""
        from queueing.simulation.fast import Trace, replay  # noqa: PLC0415 - numba

        model = dataclasses.replace(self.model, law=law)
        run = replay(model, Trace(self.dispatched, self.outputs, self.prompts, []))
        first = (run.first_token_at - self.dispatched)[self.telling]
        return first, (run.server_free_at - self.dispatched)[self.telling] - first


def own_shape(
    policy: Policy, seen: Snapshot, shape: LatencyModel, step_tokens: int | None = None
) -> LatencyModel:
    """With the window's kp and turnaround at the speed of its steps; as it is where they say
    nothing else, or too little.
    """
    told = _told(policy, seen.mine, shape, step_tokens)
    if told is None:
        return shape
    prompts = told.prompts[told.telling].astype(np.float64)
    slope = _slope(prompts, told.first) if shape.kp else UNKNOWN
    known = slope.known and slope.value > 0 and slope.relative <= CLOSE
    own, pace = shape, 1.0
    for _ in range(ROUNDS):
        first, rest = told.replayed(own.at_speed(pace))
        pace *= float(told.rest.mean() / rest.mean())
        if known:
            own = dataclasses.replace(own, kp=slope.value / pace)
        late = float(told.first.mean() - first.mean()) / pace
        own = dataclasses.replace(own, turnaround=max(0.0, own.turnaround + late))
    return own if _differs(told, shape, pace, slope if known else UNKNOWN) else shape


def _differs(told: _Told, shape: LatencyModel, pace: float, slope: Estimate) -> bool:
    """Whether the shape at the speed of the steps is not what was seen."""
    if slope.known and not slope.covers(shape.kp * pace):
        return True
    first, _ = told.replayed(shape.at_speed(pace))
    mean = float(told.first.mean())
    return abs(mean - float(first.mean())) > SAME * mean


def _told(
    policy: Policy, mine: Snapshot, shape: LatencyModel, step_tokens: int | None
) -> _Told | None:
    """None where too few requests tell anything, or their times are not those of one engine."""
    if not policy.joins_running or np.unique(mine.column("server_id")).size != 1:
        return None
    kept = mine.having(picked(mine.rows, np.isfinite(mine.column("server_free_at"))))
    kept = kept.having(kept.rows[np.argsort(kept.column("dispatched_at"), kind="stable")[-MOST:]])
    if (kept.column("preemptions") > 0).any():
        return None
    at, end = kept.column("dispatched_at"), kept.column("server_free_at")
    first = kept.column("first_token_at") - at
    longest = float((end - at).max(initial=0.0))
    telling = np.isfinite(first) & (kept.column("ending") <= CENSORED)
    telling &= (kept.column("output_tokens") > 1) & (end - at > first)
    # who was in service before them, or goes on behind them, is not known
    telling &= (at >= at.min(initial=math.inf) + longest) & (at <= at.max(initial=0.0) - longest)
    if np.count_nonzero(telling) < FEWEST:
        return None
    outputs = np.maximum(kept.column("output_tokens"), 1).astype(np.int64)
    prompts = np.maximum(kept.column("prompt_tokens"), 0).astype(np.int64)
    slots = ROOM * int(kept.column("batch_size").max())
    model = Model(
        policy=Continuous(max_batch_size=slots),
        output_tokens=TokenDistribution.from_counts(outputs),
        law=shape,
        prompt_tokens=TokenDistribution.from_counts(np.maximum(prompts, 1)),
        max_num_seqs=slots,
        step_tokens=step_tokens,
    )
    rest = (end - at - first)[telling]
    return _Told(model, at - at.min(), outputs, prompts, telling, first[telling], rest)


def _slope(prompts: Vector, first: Vector) -> Estimate:
    """Seconds a prompt token, with an interval for scatter of any kind (White, 1980): prompts are
    independent of all else.
    """
    apart = prompts - prompts.mean()
    square = float(apart @ apart)
    if not square:
        return UNKNOWN
    slope = float(apart @ first) / square
    rest = first - first.mean() - slope * apart
    half = NORMAL * math.sqrt(float((apart * rest) @ (apart * rest))) / square
    return Estimate(slope, slope - half, slope + half, float(prompts.size))
