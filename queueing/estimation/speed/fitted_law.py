"""The law's shape as a continuous engine shows it in the window, where it is not the calibrated one
at another speed.

One factor holds where everything is slower alike. On processors that are shared it is not: steps
took 1.3 to 1.5 times the law's time, prompts 1.0, and what passes before a request's first step
longer still. Three numbers are read off the requests that were served, beside a replay of the same
dispatches, lengths and prompts, in which waits for a step and the prompts of others count as they
were:

    steps        the mean time from first token to the end of the slot
    kp           the slope, on a request's own prompt, of what its time from dispatch to first
                 token is beside the replay
    turnaround   what is left of the mean of that

What the engine took beside the replay with these three, request by request, is its scatter: steps
of a real engine vary, those of the law do not. No delay enters.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kendall.policies import Continuous, Policy
from kendall.queueing.description.parts import Engine, Requests
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import NORMAL
from kendall.queueing.estimation.window.snapshot import CENSORED, Snapshot, picked
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue

FEWEST = 200  # requests
MOST = 6000  # the last ones: a replay of more says little more
CLOSE = 0.1  # half width of kp over its value, at most
ROUNDS = 12  # each of the three moves the others; the mean of the later half is taken
PART = 0.5  # of a difference that a round takes: a slower engine serves more at once, and so on
ROOM = 4  # times as many slots in the replay as were ever taken: a dispatch never waits there
SAME = 0.05  # of the mean time to the first token: less is not told apart from the calibrated law
SURE = 3.0  # standard errors by which kp differs from the law's, where it is told apart
TOGETHER = 1e-6  # seconds: a request that is dispatched in the instant in which a slot is released


@dataclass(frozen=True, eq=False)
class ResidualVariance:
    """What requests took beside what the law says, a value each, about 0; seconds."""

    first: Vector  # from dispatch to first token
    whole: Vector  # from dispatch to the end


@dataclass(frozen=True, eq=False)
class FittedLaw:
    """The law, and without a value where too little is known of them the scatter about it."""

    law: LatencyModel
    scatter: ResidualVariance | None = None


@dataclass(frozen=True, eq=False)
class _Comparable:
    """Requests in the order of their dispatch, and of those that can be compared the observed
    times; seconds, tokens.
    """

    model: Queue  # with room for all
    dispatched: Vector
    outputs: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    telling: npt.NDArray[np.bool_]
    first: Vector  # from dispatch to first token
    rest: Vector  # from there to the end of the slot

    @classmethod
    def of(cls, mine: Snapshot, shape: LatencyModel, step_tokens: int | None) -> _Comparable | None:
        """None where too few requests tell anything, or their times are not those of one engine."""
        if np.unique(mine.column("server_id")).size != 1:
            return None
        kept = mine.having(picked(mine.rows, np.isfinite(mine.column("server_free_at"))))
        order = np.argsort(kept.column("dispatched_at"), kind="stable")
        kept = kept.having(kept.rows[order[-MOST:]])
        if (kept.column("preemptions") > 0).any():
            return None
        at, end = kept.column("dispatched_at"), kept.column("server_free_at")
        first = kept.column("first_token_at") - at
        longest = float((end - at).max(initial=0.0))
        telling = np.isfinite(first) & (kept.column("ending") <= CENSORED)
        telling &= (kept.column("output_tokens") > 1) & (end - at > first)
        # who was in service before them, or goes on behind them, is not known
        telling &= at >= at.min(initial=math.inf) + longest
        telling &= at <= at.max(initial=0.0) - longest
        # in virtual time: whether such a one comes before that step's end or after it is not known
        instants = np.sort(end)
        place = np.searchsorted(instants, at)
        before = instants[np.maximum(place - 1, 0)]
        after = instants[np.minimum(place, instants.size - 1)]
        telling &= np.minimum(np.abs(at - before), np.abs(after - at)) > TOGETHER
        if np.count_nonzero(telling) < FEWEST:
            return None
        outputs = np.maximum(kept.column("output_tokens"), 1).astype(np.int64)
        prompts = np.maximum(kept.column("prompt_tokens"), 0).astype(np.int64)
        slots = ROOM * int(kept.column("batch_size").max())
        model = Queue(
            policy=Continuous(max_batch_size=slots),
            requests=Requests(
                output_tokens=TokenDistribution.from_counts(outputs),
                prompt_tokens=TokenDistribution.from_counts(np.maximum(prompts, 1)),
            ),
            engine=Engine(
                law=shape, bounds=EngineBounds(max_num_seqs=slots, step_tokens=step_tokens)
            ),
        )
        rest = (end - at - first)[telling]
        return cls(model, at - at.min(), outputs, prompts, telling, first[telling], rest)

    def replayed(self, law: LatencyModel) -> tuple[Vector, Vector]:
        """First and rest under this law, of those that tell."""
        from kendall.queueing.simulation.fast import Trace, replay  # noqa: PLC0415 - numba

        model = self.model.but(law=law)
        run = replay(model, Trace(self.dispatched, self.outputs, self.prompts, []))
        first = (run.first_token_at - self.dispatched)[self.telling]
        return first, (run.server_free_at - self.dispatched)[self.telling] - first

    @cached_property
    def telling_prompts(self) -> Vector:
        """Tokens."""
        return self.prompts[self.telling].astype(np.float64)

    def slope(self, late: Vector) -> tuple[float, float]:
        """Seconds a prompt token, with a standard error for scatter of any kind (White, 1980):
        prompts are independent of all else. 0 and infinity where all are alike.
        """
        prompts = self.telling_prompts
        apart = prompts - prompts.mean()
        square = float(apart @ apart)
        if not square:
            return 0.0, math.inf
        slope = float(apart @ late) / square
        rest = apart * (late - late.mean() - slope * apart)
        return slope, math.sqrt(float(rest @ rest)) / square

    def fitted(self, shape: LatencyModel, *, by_prompt: bool) -> LatencyModel:
        """The law at the engine's speed; kp stays that of the shape unless it is fitted too."""
        kp, turnaround, pace = shape.kp, shape.turnaround, 1.0  # of the engine: seconds
        path = []
        for _ in range(ROUNDS):
            first, rest = self.replayed(_at(shape, kp, turnaround, pace))
            late = self.first - first
            pace *= float(self.rest.mean() / rest.mean()) ** PART
            steeper = PART * max(self.slope(late)[0], -kp) if by_prompt else shape.kp * pace - kp
            later = PART * float(late.mean()) - steeper * float(self.telling_prompts.mean())
            kp, turnaround = kp + steeper, max(0.0, turnaround + later)
            path.append((kp, turnaround, pace))
        kp, turnaround, pace = np.mean(path[ROUNDS // 2 :], axis=0).tolist()
        return _at(shape, kp, turnaround, pace)

    def tells_kp(self, law: LatencyModel) -> bool:
        """Whether the kp of this law, which was fitted, is known well enough."""
        _, error = self.slope(self.first - self.replayed(law)[0])
        return NORMAL * error <= CLOSE * law.kp * law.speed

    def is_as(self, first: Vector) -> bool:
        """Whether times from dispatch to first token differ from these by nothing but chance, and
        on average by little.
        """
        late = self.first - first
        slope, error = self.slope(late)
        return not abs(slope) > SURE * error and abs(late.mean()) <= SAME * self.first.mean()

    def scatter(self, first: Vector, rest: Vector) -> ResidualVariance:
        """About what was replayed."""
        early, late = self.first - first, self.first + self.rest - first - rest
        return ResidualVariance(early - early.mean(), late - late.mean())


def fitted_law(
    policy: Policy, seen: Snapshot, shape: LatencyModel, step_tokens: int | None = None
) -> FittedLaw:
    """With the window's kp and turnaround at the speed of its steps; the shape as it is where they
    say nothing else, or too little, and where calls hold several sequences.
    """
    one_by_one = policy.joins_running and not (seen.call_sizes > 1).any()
    told = _Comparable.of(seen.mine, shape, step_tokens) if one_by_one else None
    if told is None:
        return FittedLaw(shape)
    own = told.fitted(shape, by_prompt=True) if shape.kp else None
    if own is None or not told.tells_kp(own):
        own = told.fitted(shape, by_prompt=False)
    first, rest = told.replayed(shape.at_speed(own.speed))
    if told.is_as(first):
        return FittedLaw(shape, told.scatter(first, rest))
    return FittedLaw(own.at_speed(shape.speed), told.scatter(*told.replayed(own)))


def _at(shape: LatencyModel, kp: float, turnaround: float, pace: float) -> LatencyModel:
    return dataclasses.replace(shape, kp=kp / pace, turnaround=turnaround / pace, speed=pace)
