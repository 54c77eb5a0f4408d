"""The front door: `predict_model` and what it is made of."""

from kendall.queueing.prediction.solutions import best_method, methods
from kendall.queueing.prediction.steady_state import (
    infinite_mean,
    largest_stable_rate,
    predict,
    predict_durations,
    predict_model,
    unstable,
    without_means,
)

__all__ = [
    "best_method",
    "infinite_mean",
    "largest_stable_rate",
    "methods",
    "predict",
    "predict_durations",
    "predict_model",
    "unstable",
    "without_means",
]
