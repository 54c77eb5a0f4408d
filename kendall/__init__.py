"""Kendall: the queueing delay of LLM inference, predicted and simulated. The Python API;
`kendall.cli` is the command.

>>> import kendall
>>> answer = kendall.predict("single", 0.5, "deterministic:value=100", "a=0.01,c=0")
>>> answer.load, answer.queueing_delay.mean  # M/D/1: service 1 s, load 0.5
(0.5, 0.5)

Names are loaded at their first use, so that `import kendall` costs a millisecond; the first call
loads numpy and scipy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kendall.api import (
        LatencyModel,
        Limits,
        Mean,
        NotConvergedError,
        Number,
        Policy,
        Prediction,
        PredictionError,
        Quantiles,
        SpecError,
        TokenDistribution,
        UnstableQueueError,
        largest_stable_rate,
        model_text,
        parse_distribution,
        parse_latency,
        parse_policy,
        predict,
        simulate,
    )

    __version__: str

__all__ = [
    "LatencyModel",
    "Limits",
    "Mean",
    "NotConvergedError",
    "Number",
    "Policy",
    "Prediction",
    "PredictionError",
    "Quantiles",
    "SpecError",
    "TokenDistribution",
    "UnstableQueueError",
    "__version__",
    "largest_stable_rate",
    "model_text",
    "parse_distribution",
    "parse_latency",
    "parse_policy",
    "predict",
    "simulate",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            value = version("kendall")
        elif name in __all__:
            from kendall import api

            value = getattr(api, name)
        else:
            raise AttributeError(f"module 'kendall' has no attribute {name!r}")
        globals()[name] = value
        return value
