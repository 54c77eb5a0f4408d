"""A load summary as a flat dict of numbers, for conditions (loadgen.compare.assertions) and tables:
one name, one number.

Statistics of durations and lengths are `p99_ttft`, `mean_queueing_delay`, `max_output_tokens`;
shares, rates and counts stand alone (`goodput`, `delivered_rate`, `completed`). Not a number where
nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kendall.loadgen.measures.metrics import ORDER, percentile_name
from kendall.loadgen.report.summary import PERCENTILES, LoadSummary

STATISTICS = ("mean", "std", "max")
_LENGTHS = ("prompt_tokens", "output_tokens")
_OUTCOMES = ("completed", "failed", "rejected", "abandoned", "cancelled")
_RATES = ("asked_rate", "drawn_rate", "delivered_rate", "duration")
_OTHERS = (
    "sent",
    "error_rate",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
)
_SINGLE = (*_OUTCOMES, *_RATES, *_OTHERS, "goodput", "request_goodput", "number_in_system")


def flat(summary: LoadSummary) -> dict[str, float]:
    """Every number of a summary."""
    named = dict.fromkeys(names(summary.percentiles), np.nan)
    named |= {name: float(summary.outcomes.get(name, 0)) for name in _OUTCOMES}
    named |= {name: value for name in _RATES if (value := getattr(summary, name)) is not None}
    named |= {
        "sent": float(summary.sent),
        # what a client cancelled is no error
        "error_rate": 1 - summary.completed / asked
        if (asked := summary.sent - summary.hung_up)
        else np.nan,
        "request_throughput": summary.completed_rate,
        "output_throughput": summary.output_tokens_per_second,
        "total_token_throughput": summary.tokens_per_second,
    }
    if summary.goodput is not None:
        named |= {"goodput": summary.goodput.share, "request_goodput": summary.goodput.rate}
    if summary.little is not None:
        named["number_in_system"] = summary.little.number_in_system
    if (queue := summary.server_queue) is not None and queue.mean is not None:
        named["mean_queueing_delay"] = queue.mean
    lengths = {name: getattr(summary, name) for name in _LENGTHS}
    for name, quantity in {**summary.durations, **lengths}.items():
        if quantity is not None:
            named |= {f"{one}_{name}": getattr(quantity, one) for one in STATISTICS}
            named |= {f"{level}_{name}": value for level, value in quantity.quantiles.items()}
    return named


def names(percentiles: Sequence[float] = PERCENTILES) -> list[str]:
    """The names that `flat` gives, known before a run."""
    levels = [*STATISTICS, *map(percentile_name, percentiles)]
    return [*_SINGLE, *(f"{level}_{name}" for name in (*ORDER, *_LENGTHS) for level in levels)]
