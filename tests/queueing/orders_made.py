"""Orders, laws and predictors on which the analysis of orders is checked."""

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.orders import (
    LONGEST_FIRST,
    PREEMPTIVE_SHORTEST,
    SHORTEST_FIRST,
    SHORTEST_REMAINING,
    BounceRanks,
    FifoRanks,
    LeastAttainedRanks,
    LevelsRanks,
    Order,
    PredictedRanks,
    ThresholdRanks,
)
from kendall.queueing.predictors.laws import (
    ExactPrediction,
    ExponentialPrediction,
    LognormalPrediction,
    Predictor,
    WholeTokens,
)
from kendall.queueing.predictors.sizes import SizeLaw, WeibullSizes, exponential_sizes, token_sizes
from papers.prediction_costs import DelayPredict, SkipPredict

LATENCY = LatencyModel(k2=0.1, k4=0.0406)  # mean service time about 1 s
LAWS: dict[str, SizeLaw] = {
    "exponential": exponential_sizes(),
    "weibull": WeibullSizes(0.5, 0.5),
    "tokens": token_sizes(parse_distribution("lognormal:mu=2.8,sigma=0.8", 120), LATENCY),
}
SOURCES: dict[str, Predictor] = {
    "exact": ExactPrediction(),
    "exponential": ExponentialPrediction(),
    "lognormal": LognormalPrediction(0.5),
}
ORDERS: dict[str, Order] = {
    "fifo": FifoRanks(),
    "fb": LeastAttainedRanks(),
    "levels": LevelsRanks((0.5, 1.0)),
    "spjf": SHORTEST_FIRST,
    "ljf": LONGEST_FIRST,
    "pspjf": PREEMPTIVE_SHORTEST,
    "sprpt": SHORTEST_REMAINING,
    "bounce": BounceRanks(),
    "trail": PredictedRanks(slope=-1.0, share=0.8),
    "threshold": ThresholdRanks(1.0),
    "threshold-preemptive": ThresholdRanks(1.0, preemptive=True),
    "skip": SkipPredict(threshold=1.0, bit=ExponentialPrediction()),
    "skip-server": SkipPredict(threshold=1.0, bit_cost=0.01, size_cost=0.04, external=False),
    "delay": DelayPredict(limit=1.0),
    "delay-server": DelayPredict(limit=1.0, size_cost=0.04, external=False),
}
ASKS_NOTHING = ("fifo", "fb", "levels")


def predictor(law: str, source: str) -> Predictor:
    """Tokens are predicted as whole tokens."""
    if law == "tokens" and source != "exact":
        return WholeTokens(SOURCES[source], LATENCY.setup(1), LATENCY.step(1))
    return SOURCES[source]
