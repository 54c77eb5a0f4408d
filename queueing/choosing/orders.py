"""Orders of service for one policy: what each gains in the mean, what it costs the longest
requests, and how good a predictor it needs.

    delay ratio      W / W_fcfs, mean time outside of service
    longest ratio    mean sojourn of the tenth of the requests with the longest outputs, over that
                     under fcfs
    p99 ratio        p99 of the delay over that under fcfs, of the same simulated requests
    largest sigma    of predictions X e^{sigma Z} (sigma = 0: exact) the largest spread up to which
                     W < W_fcfs; found by Brent's method between 0 and `WORST`

By the analysis of orders where it has the order (`queueing.prediction.by_length`); else simulated,
each order on the same requests, and fcfs beside it. Thresholds that are not given are the best ones
for a right bit among the deciles of the lengths; of `boost`, gamma is read from the tail of the
delay under fcfs, P(W > t) ~ e^{-gamma t}, and a token takes its share of the largest rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import brentq

from kendall.policies.core import Policy
from kendall.policies.ordered import Ordered, order_of
from kendall.policies.orders import FIRST_COME, ORDERS
from kendall.policies.orders.by_length import Boost
from kendall.policies.orders.order import Order
from kendall.policies.orders.prefill import PrefillFirst
from kendall.policies.text import (
    SpecError,
    format_number,
    order_text,
    short_number,
    with_order,
)
from kendall.queueing.choosing.answer import by_formula
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.search import Optimum, Point, choose
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.models.soap.token_orders import is_solved
from kendall.queueing.prediction import methods
from kendall.queueing.prediction.by_length import LONGEST, durations_by_length
from kendall.queueing.predictors.predictor_text import (
    NO_PREDICTION,
    PredictorText,
    parse_predictor,
)
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import begin_of, check_kept_up, steady_run
from kendall.queueing.simulation.fast import SimulatedRun, is_compiled

PREDICTORS = ("exact", "lognormal:sigma=0.5")
WORST = 4.0  # sigma: every twentieth prediction is off by more than a factor of 2,500
PRECISION = 0.005
SIMULATED, SIMULATED_PRECISION = 20_000, 0.1  # requests
TAIL = 100_000  # requests that a p99 is of, where they are replayed by compiled code
DECILES = tuple(np.arange(0.1, 1.0, 0.1).tolist())
Beats = Literal["always", "up to largest_sigma", "never"]


@dataclass(frozen=True, slots=True)
class OrderDurations:
    """Mean durations under one order, seconds, and the method that gave them."""

    delay: float
    sojourn: float
    longest: float  # sojourn of the longest tenth
    method: str


def best_order(
    model: Queue,
    arrival_rate: float,
    candidates: Sequence[str] | None = None,
    predictors: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Optimum:
    """The order with the shortest mean delay; its curve has a point for each order and predictor.
    `progress` is told which order comes next. Raises SpecError, NoStableChoiceError.
    """
    if order_text(model.policy) != FIRST_COME.name:
        raise SpecError(
            f"got policy {model.text} for --target order; expected it without an order of its own"
        )
    asked = list(dict.fromkeys(map(parse_predictor, predictors or PREDICTORS)))
    search = OrderSearch(model, arrival_rate)
    orders = search.usual() if candidates is None else list(candidates)
    policies = [with_order(model.policy, order) for order in (FIRST_COME.name, *orders)]
    curve: list[Point] = []
    named = {order_text(each): each for each in policies}
    for number, (name, policy) in enumerate(named.items(), 1):
        progress(f"{number} of {len(named)}: {name}")
        curve += search.points(policy, asked)
    curve.sort(key=lambda point: (point["score"] is None, point["score"]))
    found = choose("order", Objective(name="delay"), curve)
    return dataclasses.replace(found, compared="queueing_delay")


def by_pair(delay: float, sojourn: float, usual: float, formula: float) -> tuple[float, float]:
    """Delay and sojourn under an order, where it is simulated and `formula` is the delay in the
    order of arrival: that times the ratio to `usual`, the delay of the same requests in the order
    of arrival.
    """
    corrected = delay / usual * formula
    return corrected, sojourn - delay + corrected


@dataclass(frozen=True)
class OrderSearch:
    """Orders of one queue; `known` keeps what was computed."""

    model: Queue
    rate: float
    known: dict[tuple[str, str], OrderDurations] = field(default_factory=dict)
    tails: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def usual(self, among: Callable[[type[Order]], bool] = lambda _: True) -> list[str]:
        """Orders of the analysis that this policy serves, with the thresholds that they need."""
        if not isinstance(self.model.policy, Ordered):
            raise SpecError(
                f"got policy {self.model.text}, which has no orders; expected a built-in one"
            )
        found = []
        for name, order in ORDERS.items():
            fields = dataclasses.fields(order)
            needed = [each.name for each in fields if each.default is dataclasses.MISSING]
            if needed not in ([], ["threshold"]) or not type(self.model.policy).serves(order):
                continue
            if not among(order) or (order is PrefillFirst and not self.model.engine.pooled):
                continue
            if not is_solved(order(**dict.fromkeys(needed, 1))):  # whatever its parameters
                continue
            best = f":threshold={format_number(self._best_threshold(name))}" if needed else ""
            found.append(f"{name}{best}")
        if type(self.model.policy).serves(Boost) and among(Boost):
            found += filter(None, [self._boost()])
        return found

    def _boost(self) -> str | None:
        """For this queue; None where hardly anybody waits, or the queue is unstable."""
        try:
            p90, p99 = self.tail(self.model.policy, NO_PREDICTION)
        except UnstableQueueError:
            return None
        if not p99 > p90 > 0:
            return None
        tokens = self.model.largest_stable_rate * self.model.requests.output_tokens.mean
        gamma, token_time = math.log(10) / (p99 - p90), 1 / tokens
        return f"boost:gamma={short_number(gamma, 3)},token_time={short_number(token_time, 3)}"

    def tail(self, policy: Policy, predictor: PredictorText) -> tuple[float, float]:
        """p90 and p99 of the delay, the same requests under every order. Raises
        UnstableQueueError.
        """
        model = self.model.but(policy=policy, predictor=predictor)
        key = (model.text, str(predictor))
        if key not in self.tails:
            count = TAIL if is_compiled(model) else SIMULATED
            run = _run(model, self.rate, count)
            p90, p99 = np.quantile(run.queueing_delay[~run.lost], (0.9, 0.99)).tolist()
            self.tails[key] = (p90, p99)
        return self.tails[key]

    def points(self, policy: Policy, predictors: Sequence[PredictorText]) -> list[Point]:
        """A point for each predictor; one for an order that reads none."""
        if not order_of(policy).predicts:
            return [self._point(policy, NO_PREDICTION, None, None)]
        beats, sigma = self._needs(policy)
        return [self._point(policy, each, beats, sigma) for each in predictors]

    def _point(
        self, policy: Policy, predictor: PredictorText, beats: Beats | None, sigma: float | None
    ) -> Point:
        reads = order_of(policy).predicts
        predictor = predictor if reads else NO_PREDICTION
        point: Point = {
            "order": order_text(policy),
            "predictor": str(predictor) if reads else None,
            "load": self.model.but(policy=policy, predictor=predictor).load(self.rate),
        }
        try:
            own = self.durations(policy, predictor)
            usual = self.durations(self.model.policy, NO_PREDICTION, like=own.method)
            shown = self.durations(self.model.policy, NO_PREDICTION)
            tail, usual_tail = (
                self.tail(each, by)[1]
                for each, by in ((policy, predictor), (self.model.policy, NO_PREDICTION))
            )
        except UnstableQueueError:
            return point | {"stable": False, "score": None}
        if usual is not shown and usual.delay:  # simulated: by what its pairs say of the formula's
            delay, sojourn = by_pair(own.delay, own.sojourn, usual.delay, shown.delay)
            longest = own.longest / usual.longest * shown.longest
            own, usual = OrderDurations(delay, sojourn, longest, own.method), shown
        return point | {
            "stable": True,
            "method": own.method,
            "queueing_delay": own.delay,
            "delay_ratio": own.delay / usual.delay if usual.delay else None,
            "p99_queueing_delay": tail,
            "p99_delay_ratio": tail / usual_tail if usual_tail else None,
            "sojourn_time": own.sojourn,
            "longest_sojourn_time": own.longest,
            "longest_ratio": own.longest / usual.longest,
            "largest_sigma": sigma,
            "beats_fcfs": beats,
            "score": own.delay,
        }

    def durations(
        self, policy: Policy, predictor: PredictorText, like: str | None = None
    ) -> OrderDurations:
        """`like`: the method of what it is compared with. Raises UnstableQueueError, SpecError."""
        model = self.model.but(policy=policy, predictor=predictor)
        simulated = methods(model)[0] == "simulation" or like == "simulation"
        key = (f"{model.text} simulated" if simulated else model.text, str(predictor))
        if key not in self.known:
            solved = None if simulated else _solved(model, self.rate)
            self.known[key] = _simulated(model, self.rate) if solved is None else solved
        return self.known[key]

    def gain(self, policy: Policy, sigma: float) -> float:
        """W / W_fcfs - 1 with predictions of this spread."""
        text = "exact" if not sigma else f"lognormal:sigma={format_number(sigma)}"
        own = self.durations(policy, parse_predictor(text))
        usual = self.durations(self.model.policy, NO_PREDICTION, like=own.method)
        return own.delay / usual.delay - 1 if usual.delay else 0.0

    def _needs(self, policy: Policy) -> tuple[Beats | None, float | None]:
        """Whether it beats the order of arrival, and up to which spread."""
        try:
            if self.gain(policy, 0.0) >= 0:
                return "never", None
            if self.gain(policy, WORST) < 0:
                return "always", None
        except UnstableQueueError:
            return None, None
        simulated = methods(dataclasses.replace(self.model, policy=policy))[0] == "simulation"
        precision = SIMULATED_PRECISION if simulated else PRECISION
        gain: Callable[[float], float] = lambda sigma: self.gain(policy, sigma)  # noqa: E731
        root = brentq(gain, 0.0, WORST, xtol=precision, rtol=1e-12)
        return "up to largest_sigma", round(float(root), 3)

    def _best_threshold(self, name: str) -> int:
        """With a right bit; the median where nothing is stable."""
        lengths = self.model.requests.output_tokens
        tried = sorted({lengths.quantile(share) for share in DECILES})

        def delay(threshold: int) -> float:
            policy = with_order(self.model.policy, f"{name}:threshold={threshold}")
            return self.durations(policy, parse_predictor(f"onebit:threshold={threshold}")).delay

        if methods(self.model)[0] == "simulation" or not self.model.load(self.rate) < 1:
            return lengths.quantile(0.5)
        return min(tried, key=delay)


def _solved(model: Queue, rate: float) -> OrderDurations | None:
    """None where `kendall predict` simulates too."""
    try:
        found = by_formula(model, rate, methods(model)[0])
    except NotConvergedError:
        return None
    by_length = durations_by_length(model, rate)
    if found is None or by_length is None:
        return None
    delay, sojourn = found.queueing_delay.mean, found.sojourn_time.mean
    if delay is None or sojourn is None:
        return None
    longest = sum(by_length.of_longest(model.requests.output_tokens))
    return OrderDurations(delay, sojourn, longest, found.method)


def _simulated(model: Queue, rate: float) -> OrderDurations:
    """The durations by simulation, with the same requests under every order."""
    run = _run(model, rate, SIMULATED)
    kept = ~run.lost
    sojourn, tokens = run.sojourn_time[kept], run.output_tokens[kept]
    count = max(1, round(LONGEST * tokens.size))
    longest = np.argsort(-tokens, kind="stable")[:count]
    return OrderDurations(
        float(run.queueing_delay[kept].mean()),
        float(sojourn.mean()),
        float(sojourn[longest].mean()),
        "simulation",
    )


def _run(model: Queue, rate: float, count: int) -> SimulatedRun:
    """The same requests whatever the order. Raises UnstableQueueError."""
    model.stable_load(rate)
    run = steady_run(model, rate, begin_of(model, rate, count), np.random.SeedSequence(0))
    check_kept_up(model, [run])
    return run
