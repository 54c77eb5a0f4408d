"""Orders as the text of a policy names them, lengths in tokens: the order, the sizes and the
predictor of the analysis that they are, and the queue, solved.

A request alone takes S(N) = setup + step N seconds for N tokens, so that a threshold or a predicted
length of n tokens is S(n) seconds, and the age at n tokens too:

    order                  here                  keys, in tokens
    fcfs                   Fifo
    spjf, ljf              ShortestFirst, LongestFirst
    pspjf, sprpt, fb       PreemptiveShortest, ShortestRemaining, LeastAttained
    threshold[-preemptive] Threshold             threshold: predictions up to it are short
    trail                  Trail                 c: no interruption from S(c Y) on
    mlfq                   Levels                quantum tokens in each of `levels` - 1 levels, the
                                                 rest in the last

The remaining service that `sprpt` compares counts the setup of a request that has not begun; that
of one in service falls from its first second. In slots of a continuous engine (`in_slots`) the
service is that of a slot while all are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policies.text import SpecError, suggest
from queueing.distributions.token_distribution import TokenDistribution, Vector
from queueing.latency.law import LatencyModel
from queueing.latency.slot_time import SlotTime
from queueing.models.soap.orders import (
    Fifo,
    LeastAttained,
    Levels,
    LongestFirst,
    Order,
    PreemptiveShortest,
    ShortestFirst,
    ShortestRemaining,
    Threshold,
    Trail,
)
from queueing.models.soap.predictor_text import NO_PREDICTION, PredictorText
from queueing.models.soap.predictors import (
    ConstantPrediction,
    ExactPrediction,
    ExponentialPrediction,
    LognormalPrediction,
    OneBit,
    Predictor,
    WholeTokens,
)
from queueing.models.soap.queue import solve_order
from queueing.models.soap.several_servers import (
    SeveralOrdered,
    ratio_to_first_come,
    solve_on_servers,
)
from queueing.models.soap.sizes import Atoms, token_sizes


@dataclass(frozen=True, kw_only=True)
class NamedOrder:
    """`order=NAME` of a policy, with the keys that the order has; lengths in tokens."""

    name: str
    threshold: float | None = None
    c: float | None = None
    quantum: float | None = None
    levels: int | None = None

    def key(self, key: str) -> float:
        """A key of the order. Raises SpecError where it is missing or not above 0."""
        value = getattr(self, key)
        if value is None or not value > 0:
            raise SpecError(f"got order={self.name} with {key}={value}; expected {key} > 0")
        return float(value)


@dataclass(frozen=True, eq=False)
class TokenService:
    """One request alone: `setup` + `step` n seconds for n tokens; `sizes` its law."""

    setup: float
    step: float
    sizes: Atoms

    @classmethod
    def alone(cls, law: LatencyModel, tokens: TokenDistribution) -> TokenService:
        """A batch of one. Raises SpecError: lengths with a tail, a service below 0 s."""
        return cls(law.setup(1), law.step(1), token_sizes(tokens, law))

    @classmethod
    def in_slots(cls, time: SlotTime, slots: int) -> TokenService:
        """A slot of a continuous engine while all are taken. Raises as `alone`."""
        law, tokens = time.law, time.output_tokens
        setup = law.turnaround * law.speed + time.admitted
        step = (time.mean(slots, refilled=True) - setup) / tokens.mean
        flat = LatencyModel(k2=setup, k4=step)
        return cls(setup, step, token_sizes(tokens, flat))

    def seconds(self, tokens: float) -> float:
        """S(n)."""
        return self.setup + self.step * tokens

    def order(self, named: NamedOrder) -> Order:
        """Raises SpecError: an order without such a model."""
        if named.name not in SOLVED:
            raise SpecError(
                f"got order={named.name}; expected one of {', '.join(SOLVED)}"
                f"{suggest(named.name, SOLVED)}"
            )
        return _ORDERS[named.name](named, self)

    def predictor(self, text: PredictorText) -> Predictor:
        """Its law of predicted seconds."""
        match text.name:
            case "none":
                return ConstantPrediction(float(self.sizes.sizes[-1]))
            case "onebit":
                n, wrong = text.threshold, 1 - text.accuracy
                values = self.seconds(max(n // 2, 1)), self.seconds(2 * n)
                return OneBit(self.seconds(n + 0.5), None, wrong, wrong, values)
            case "exponential":
                return WholeTokens(ExponentialPrediction(), self.setup, self.step)
            case "lognormal" if text.sigma > 0:
                return WholeTokens(LognormalPrediction(text.sigma), self.setup, self.step)
            case _:
                return ExactPrediction()


def _levels(named: NamedOrder, service: TokenService) -> Order:
    first, levels = service.seconds(named.key("quantum")), round(named.key("levels"))
    quanta = (first, *np.full(max(levels - 2, 0), service.step * named.key("quantum")).tolist())
    return Levels(quanta[: levels - 1])


def _threshold(preemptive: bool) -> Callable[[NamedOrder, TokenService], Order]:
    def order(named: NamedOrder, service: TokenService) -> Order:
        return Threshold(service.seconds(named.key("threshold") + 0.5), preemptive)

    return order


_ORDERS: dict[str, Callable[[NamedOrder, TokenService], Order]] = {
    "fcfs": lambda *_: Fifo(),
    "spjf": lambda *_: ShortestFirst(),
    "ljf": lambda *_: LongestFirst(),
    "threshold": _threshold(preemptive=False),
    "sprpt": lambda *_: ShortestRemaining(),
    "pspjf": lambda *_: PreemptiveShortest(),
    "threshold-preemptive": _threshold(preemptive=True),
    "trail": lambda named, _: Trail(0.8 if named.c is None else named.c),
    "mlfq": _levels,
    "fb": lambda *_: LeastAttained(),
}
SOLVED = tuple(_ORDERS)
UNINTERRUPTED = ("fcfs", "spjf", "ljf", "threshold")  # no service is interrupted


def solve_named_order(
    named: NamedOrder,
    service: TokenService,
    arrival_rate: float,
    servers: int = 1,
    predictor: PredictorText = NO_PREDICTION,
) -> SeveralOrdered:
    """Mean sojourn and mean time outside of service. Raises UnstableQueueError, SpecError."""
    order, told = service.order(named), service.predictor(predictor)
    return solve_on_servers(order, service.sizes, arrival_rate, servers, told)


def predicted_tokens(
    predictor: PredictorText, rng: np.random.Generator, output_tokens: Vector, longest: int
) -> Vector:
    """A prediction, whole tokens >= 1, for each true length of at most `longest`; does not modify.
    As the load generator draws them.
    """
    one_token = TokenService(0.0, 1.0, Atoms(np.array([float(longest)]), np.ones(1)))
    return one_token.predictor(predictor).sample(rng, np.asarray(output_tokens, float))


def delay_ratio(
    named: NamedOrder, service: TokenService, load: float, predictor: PredictorText = NO_PREDICTION
) -> float:
    """W / W_fcfs of one server at this load. Raises UnstableQueueError, SpecError."""
    rate = load / service.sizes.mean
    queue = solve_order(service.order(named), service.sizes, rate, service.predictor(predictor))
    return ratio_to_first_come(queue, service.sizes, rate)
