"""Rules that set the number of replicas of a fleet (queueing.simulation.fleet): a fixed number, a
Kubernetes HPA, and a forecast that keeps a record of its like."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.choosing.objective import Objective, Slo
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_given
from kendall.queueing.simulation.fast import SimulatedRun, Trace
from kendall.queueing.simulation.fleet import ScalingDecision, Seen, Tokens

HOUR = 3600.0  # seconds
WINDOWS = (75, 150, 300, 600, 1200, 3600)  # seconds
WARM_UP, FIRST, ENOUGH = 600.0, 150.0, 600.0  # seconds
LEAST_MARGIN = 0.1  # of the replicas that the last stretches needed
FEWEST, RECENT = 50, 1000  # answers that have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedReplicas:
    """So many, always."""

    replicas: int
    every: float = 3600.0

    def decide(self, seen: Seen) -> ScalingDecision:
        """The number."""
        return ScalingDecision(at=seen.now, asked=self.replicas, replicas=self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hpa:
    """A HorizontalPodAutoscaler (autoscaling/v2, its defaults) on waiting requests per replica.

    desired = ceil(replicas * metric / target), none where the ratio is within the tolerance of 1. A
    replica that still starts has no metric yet: it counts as 0 where the ratio is above 1, and as
    the target where it is below; where that turns the ratio round, nothing changes. The number goes
    down to the largest that was desired in `stabilisation` seconds, and up by 4 or to twice as many
    in each period of 15 s.
    """

    target: float  # waiting requests of a replica
    every: float = 15.0
    tolerance: float = 0.1
    stabilisation: float = 300.0

    def desired(self, waiting: float, ready: int, starting: int = 0) -> int:
        """By the metric alone; `waiting`: the mean of those that are ready."""
        replicas, ratio = ready + starting, waiting / self.target
        if starting:
            counted = ratio * ready + (starting if ratio < 1 else 0)
            turned = (counted / replicas > 1) != (ratio > 1)
            ratio = 1.0 if turned else counted / replicas
        if abs(ratio - 1) <= self.tolerance:
            return replicas
        return max(1, math.ceil(round(ratio * replicas, 9)))

    def decide(self, seen: Seen) -> ScalingDecision:
        """The desired number, held up by earlier ones and bounded in its growth."""
        now, replicas = seen.now, seen.replicas
        asked = self.desired(seen.waiting / max(seen.ready, 1), seen.ready, seen.starting)
        held = [each.asked for each in seen.earlier if each.at > now - self.stabilisation]
        stable = asked if asked >= replicas else min(replicas, max([asked, *held]))
        most = max(2 * replicas, replicas + 4)
        return ScalingDecision(at=now, asked=asked, replicas=min(stable, most))


def within(run: SimulatedRun, slo: Slo) -> npt.NDArray[np.bool_]:
    """Which requests have the duration that an SLO bounds within its bound."""
    ends = {
        "queueing_delay": run.dispatched_at,
        "sojourn_time": run.released_at,
        "time_to_first_token": run.first_token_at,
    }
    return ends[slo.field] - run.arrived_at <= slo.seconds


class ScaledLateness:
    """How many requests of a stretch would be late, by the number of replicas that serve it and
    what came in the `WARM_UP` seconds before: the model's replay of their own arrivals.
    """

    def __init__(self, model: Queue, goal: Objective, largest: int) -> None:
        self.goal, self.level = goal, max(slo.level or 0.0 for slo in goal.slos)
        self.fleets = [model.but(servers=number) for number in range(1, largest + 1)]

    def of(self, requests: Trace, begin: float, seconds: float) -> tuple[Tokens, int]:
        """Late requests with 1, 2, .. replicas, and how many requests the stretch has."""
        start = max(0.0, begin - WARM_UP)
        edges = (start, begin, begin + seconds)
        first, judged, end = np.searchsorted(requests.arrived_at, edges)
        late, number = np.full(len(self.fleets), end - judged), int(end - judged)
        given = Trace(
            requests.arrived_at[first:end] - start,
            requests.output_tokens[first:end],
            requests.prompt_tokens[first:end],
        )
        for place in reversed(range(len(self.fleets) if number else 0)):
            run = run_given(self.fleets[place], given, np.random.SeedSequence(0))
            kept = np.all([within(run, slo) for slo in self.goal.slos], axis=0)
            late[place] = np.count_nonzero(~kept[judged - first :])
            if late[place] == number:  # and with fewer
                break
        return late, number

    def fewest(self, late: Tokens, number: int) -> int:
        """The fewest replicas with which no more are late than the SLO allows; all, where none."""
        allowed = late <= (1 - self.level) * number
        return int(np.argmax(allowed)) + 1 if allowed.any() else len(self.fleets)


class ForecastScaler:
    """The fewest replicas that keep the SLOs until one that is ordered at the next decision serves,
    by the record of forecasts like this one.

    forecast  what the requests of the last `window` seconds needed (`ScaledLateness`)
    margin    the least with which such forecasts would have kept the SLOs in the last hour, by the
              replay of what came behind each; at least a tenth
    window    the one of `WINDOWS` whose forecasts, with their margins, cost least in that hour

    What it asks for stays for as long as a replica takes to start. Where a request has waited
    beyond its bound it asks for all, and before it has a record of `ENOUGH` seconds for what there
    is. Answers that have not ended are as long as some that have.
    """

    every = 15.0

    def __init__(
        self, model: Queue, goal: Objective, *, start_up: float, largest: int, seed: int = 0
    ) -> None:
        self.lateness, self.largest, self.seed = ScaledLateness(model, goal, largest), largest, seed
        self.bound, self.start_up = min(slo.seconds for slo in goal.slos), start_up
        self.ahead = math.ceil((start_up + self.every) / self.every)  # decisions until it is known
        self.late: list[Tokens] = []  # of the stretch behind each decision
        self.requests: list[int] = []
        self.needed: dict[int, list[int]] = {window: [] for window in WINDOWS}

    def decide(self, seen: Seen) -> ScalingDecision:
        """The decision of an instant, and its record of those before."""
        if np.count_nonzero(seen.output_tokens) < FEWEST:
            return ScalingDecision(at=seen.now, asked=seen.replicas, replicas=seen.replicas)
        self._learn(seen)
        record = (len(self.late) - self.ahead) * self.every
        asked = self._asked() if record > ENOUGH else seen.replicas
        if seen.waiting and seen.now - seen.arrived_at[-seen.waiting] > self.bound:
            asked = self.largest
        held = [each.asked for each in seen.earlier if each.at > seen.now - self.start_up]
        return ScalingDecision(at=seen.now, asked=asked, replicas=max([asked, *held]))

    def _learn(self, seen: Seen) -> None:
        """The stretches that are over, and what each window would have said as they began."""
        rng = np.random.default_rng([self.seed, len(seen.earlier)])
        ended = seen.output_tokens[seen.output_tokens > 0][-RECENT:]
        drawn = rng.choice(ended, seen.output_tokens.size)
        outputs = np.where(seen.output_tokens > 0, seen.output_tokens, drawn)
        known = Trace(seen.arrived_at, outputs, seen.prompt_tokens)
        seconds = self.ahead * self.every
        while (begin := FIRST + len(self.late) * self.every) + seconds <= seen.now:
            late, number = self.lateness.of(known, begin, seconds)
            for window, needed in self.needed.items():
                needed.append(self._needed(window, len(self.late) - self.ahead + 1))
            self.late.append(late)
            self.requests.append(number)

    def _needed(self, window: int, behind: int) -> int:
        """By the stretches of a window that ends with stretch `behind`, which is left out."""
        recent = slice(max(0, behind - int(window / self.every)), max(0, behind))
        if not self.late[recent]:
            return self.largest
        return self.lateness.fewest(np.sum(self.late[recent], axis=0), sum(self.requests[recent]))

    def _asked(self) -> int:
        """By the window that would have cost least."""
        return min(map(self._by_record, WINDOWS))[1]

    def _by_record(self, window: int) -> tuple[float, int]:
        """The mean number of replicas of an hour of such forecasts, and the number now."""
        hour = slice(max(self.ahead, len(self.late) - int(HOUR / self.every)), None)
        needed, late = np.array(self.needed[window][hour]), np.array(self.late[hour])
        allowed = (1 - self.lateness.level) * sum(self.requests[hour])
        numbers, row = needed, np.arange(needed.size)
        for margin in range(self.largest + 1):
            numbers = self._with_margin(needed, margin)
            if late[row, numbers - 1].sum() <= allowed:
                break
        now = np.array(self._needed(window, len(self.late)))
        return float(numbers.mean()), int(self._with_margin(now, margin))

    def _with_margin(self, needed: Tokens, margin: int) -> Tokens:
        least = np.ceil(LEAST_MARGIN * needed).astype(np.int64)
        found: Tokens = np.minimum(needed + np.maximum(margin, least), self.largest)
        return found
