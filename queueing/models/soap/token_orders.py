"""The orders of policies (`policies.orders`), lengths in tokens: the ranks, the sizes and the
predictor of the analysis that they are, and the queue, solved.

A request alone takes S(N) = setup + step N seconds for N tokens, so that a threshold or a predicted
length of n tokens is S(n) seconds, and the age at n tokens too. Of an order's form
(`policies.orders.order.Form`):

    levels by tokens made    LevelsRanks; LeastAttainedRanks where they are many, or a token each
    levels with ranks        SteppedRanks, of each class of predictions
    nothing but the arrival  FifoRanks
    above                    ThresholdRanks, in order of arrival among short requests
    a prediction             PredictedRanks; with each token made they change by step x per_token
    a prediction, bouncing   BounceRanks
    first_up_to              SkipRanks
    first_tokens             DelayRanks

Predictions are at most the token limit, without one the longest length. Aging, deadlines,
priorities, ratios, bins, levels beside predictions, ranks that rise with each token, and what an
order decides by code of its own: no such rank. Each resume of an interrupted request costs setup +
kr and the step that it lost (`resuming`); for orders of which a request keeps its rank.
In slots of a continuous engine (`in_slots`) the service is that of a slot while all are taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kendall.policies.errors import SpecError
from kendall.policies.orders.order import Form
from kendall.policies.orders.order import Order as PolicyOrder
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.slot_time import SlotTime
from kendall.queueing.models.soap.orders import (
    BounceRanks,
    DelayRanks,
    FifoRanks,
    LeastAttainedRanks,
    LevelsRanks,
    Order,
    PredictedRanks,
    SkipRanks,
    SteppedRanks,
    ThresholdRanks,
)
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.resuming import ResumeCost, Resuming
from kendall.queueing.models.soap.several_servers import (
    SeveralOrdered,
    ratio_to_first_come,
    solve_on_servers,
)
from kendall.queueing.predictors.laws import (
    ConstantPrediction,
    ExactPrediction,
    ExponentialPrediction,
    LognormalPrediction,
    OneBit,
    PairedPrediction,
    Predictor,
    UniformPrediction,
    WholeTokens,
)
from kendall.queueing.predictors.pairs import read_pairs
from kendall.queueing.predictors.predictor_text import NO_PREDICTION, PredictorText
from kendall.queueing.predictors.sizes import Atoms, token_sizes


@dataclass(frozen=True, eq=False)
class TokenService:
    """One request alone: `setup` + `step` n seconds for n tokens; `sizes` its law. A resume takes
    `resume` seconds more than a start; None: it takes none at all, and no token is lost.
    """

    setup: float
    step: float
    sizes: Atoms
    resume: float | None = None
    limit: int = 0  # of tokens, where it is above the longest length

    @classmethod
    def alone(cls, law: LatencyModel, tokens: TokenDistribution, limit: int = 0) -> TokenService:
        """A batch of one. Raises SpecError: lengths with a tail, a service below 0 s."""
        return cls(law.setup(1), law.step(1), token_sizes(tokens, law), law.resume, limit)

    @classmethod
    def in_slots(cls, time: SlotTime, slots: int, limit: int = 0) -> TokenService:
        """A slot of a continuous engine while all are taken. Raises as `alone`."""
        law, tokens = time.law, time.output_tokens
        setup = law.turnaround * law.speed + time.admitted
        step = (time.mean(slots, refilled=True) - setup) / tokens.mean
        flat = LatencyModel(k2=setup, k4=step)
        return cls(setup, step, token_sizes(tokens, flat), limit=limit)

    def seconds(self, tokens: float) -> float:
        """S(n)."""
        return self.setup + self.step * tokens

    @property
    def longest(self) -> float:
        """Tokens of the longest length."""
        return float(np.rint((self.sizes.sizes[-1] - self.setup) / self.step))

    @property
    def most(self) -> float:
        """Tokens of the longest prediction: the token limit."""
        return max(self.longest, self.limit)

    def order(self, asked: PolicyOrder) -> Order:
        """Raises SpecError: an order without such a model."""
        if not is_solved(asked):
            raise SpecError(
                f"got order {asked.name}; expected one by arrival, by predicted lengths or by "
                "tokens made, without aging"
            )
        order = self._ranks(asked)
        if not asked.preemptive or self.resume is None:
            return order
        cost = max(self.setup + self.resume, 0.0)
        return Resuming(order, ResumeCost(cost, self.setup + self.step, self.step))

    def _ranks(self, asked: PolicyOrder) -> Order:
        form = asked.form
        if asked.preemptive and form.ranks:
            ages = (0.0, *map(self.seconds, form.starts[1:]))
            classes = tuple(self.seconds(math.floor(most) + 0.5) for most in form.classes)
            return SteppedRanks(ages, form.ranks, classes)
        if asked.preemptive and form.starts:
            return self._levels(form)
        if form.quantity == "arrival":
            return FifoRanks()
        return self._predicted_ranks(asked)

    def _predicted_ranks(self, asked: PolicyOrder) -> Order:
        form = asked.form
        if form.first_up_to is not None:
            at = self.seconds(math.floor(form.first_up_to) + 0.5)
            return SkipRanks(at, max(self.setup, 0.0))
        if form.first_tokens:
            return DelayRanks(self.seconds(form.first_tokens))
        if form.above is not None:
            at = self.seconds(math.floor(form.above) + 0.5)
            return ThresholdRanks(at, asked.preemptive, last_come=False)
        if form.bounces:
            return BounceRanks(max(self.setup, 0.0))
        return PredictedRanks(
            weight=form.weight,
            interrupts=asked.preemptive,
            slope=form.per_token,
            share=form.settled,
            setup=max(self.setup, 0.0),
        )

    def _levels(self, form: Form) -> Order:
        starts = list(form.starts)
        if form.every:
            more = math.ceil((self.longest - starts[-1]) / form.every)
            if len(starts) == 1 and (form.every == 1 or more > _MOST_LEVELS):
                return LeastAttainedRanks()
            starts += [starts[-1] + form.every * level for level in range(1, more)]
        seconds = [self.step * (end - begin) for begin, end in pairwise(starts)]
        return LevelsRanks((self.setup + seconds[0], *seconds[1:]) if seconds else ())

    def predictor(self, text: PredictorText) -> Predictor:
        """Its law of predicted seconds."""
        if text.name == "none":
            return ConstantPrediction(self.seconds(self.most))
        if text.name == "onebit":
            n = text.threshold
            told = (min(float(each), self.most) for each in (max(n // 2, 1), 2 * n))
            low, high = map(self.seconds, told)
            return OneBit(self.seconds(n + 0.5), None, *text.misses, (low, high))
        source = _with_errors(text)
        if source is None:
            return ExactPrediction()
        return WholeTokens(source, self.setup, self.step, self.most)


def _with_errors(text: PredictorText) -> Predictor | None:
    """The law of predicted tokens; None where they are the true ones."""
    match text.name:
        case "exponential":
            return ExponentialPrediction()
        case "lognormal" if text.sigma > 0:
            return LognormalPrediction(text.sigma)
        case "uniform":
            return UniformPrediction(text.low, text.high)
        case "joint":
            return PairedPrediction.of(*read_pairs(text.path))
        case _:
            return None


_MOST_LEVELS = 64


def is_solved(order: PolicyOrder, *, resuming: bool = False) -> bool:
    """Whether the analysis has it, `resuming` where it costs something to go on."""
    form, plain = order.form, order.form.per_token == 0 and order.form.settled is None
    if not order.is_formal() or form.aging is not None or form.ratio or form.bins is not None:
        return False
    if form.prompt_weight:
        return False
    if order.preemptive and form.starts:  # interrupted without an arrival
        by_age = form.quantity == "arrival" or not form.weight
        return by_age and plain and not resuming
    if form.bounces or form.first_tokens:  # so too
        return form.quantity == "prediction" and form.per_token == -1 and not resuming
    if form.quantity == "prediction":
        return form.per_token <= 0 if form.above is None else plain and form.weight == 1
    return form.quantity == "arrival" and form.per_token <= 0


def solve_in_tokens(
    asked: PolicyOrder,
    service: TokenService,
    arrival_rate: float,
    servers: int = 1,
    predictor: PredictorText = NO_PREDICTION,
) -> SeveralOrdered:
    """Mean sojourn and mean time outside of service. Raises UnstableQueueError, SpecError."""
    order, told = service.order(asked), service.predictor(predictor)
    return solve_on_servers(order, service.sizes, arrival_rate, servers, told)


def predicted_tokens(
    predictor: PredictorText, rng: np.random.Generator, output_tokens: Vector, longest: int
) -> Vector:
    """A prediction, whole tokens >= 1, for each true length of at most `longest`; does not modify.
    As the load generator draws them.
    """
    told = predictor_in_tokens(predictor, longest)
    return told.sample(rng, np.asarray(output_tokens, float))


def predictor_in_tokens(predictor: PredictorText, longest: float) -> Predictor:
    """Its law of predicted tokens, of at most `longest`."""
    one_token = TokenService(0.0, 1.0, Atoms(np.array([float(longest)]), np.ones(1)))
    return one_token.predictor(predictor)


def delay_ratio(
    asked: PolicyOrder, service: TokenService, load: float, predictor: PredictorText = NO_PREDICTION
) -> float:
    """W / W_fcfs of one server at this load. Raises UnstableQueueError, SpecError."""
    rate = load / service.sizes.mean
    queue = solve_order(service.order(asked), service.sizes, rate, service.predictor(predictor))
    return ratio_to_first_come(queue, service.sizes, rate)


def ratios_by_length(
    asked: PolicyOrder, service: TokenService, load: float, predictor: PredictorText = NO_PREDICTION
) -> tuple[Vector, Vector]:
    """Lengths, tokens, and W(n) / W_fcfs of one server at this load for each. Raises as
    `delay_ratio`.
    """
    rate = load / service.sizes.mean
    queue = solve_order(service.order(asked), service.sizes, rate, service.predictor(predictor))
    ratio = ratio_to_first_come(queue, service.sizes, rate)
    tokens = (queue.sizes - service.setup) / service.step
    return tokens, (queue.by_size - queue.sizes) / queue.delay * ratio
