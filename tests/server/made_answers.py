"""Looks of the live model, made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from kendall.queueing.choosing.forecast import ForecastSummary, Gains, WhatIf
from kendall.queueing.estimation.interval import UNKNOWN
from kendall.queueing.result import Quantiles


def what_if(policy: str = "single", at: float = 0.0, **changes: Any) -> WhatIf:
    """A stable setting at load 0.5, of which `changes` are other members of the forecast."""
    forecast = ForecastSummary(
        policy=policy,
        max_output_tokens=None,
        servers=1,
        effective_max_batch_size=8,
        stable=True,
        load=0.5,
        method="exact",
        queueing_delay=Quantiles(mean=0.1, p50=0.1, p90=0.1, p95=0.1, p99=0.1),
        sojourn_time=Quantiles(mean=0.2, p50=0.1, p90=0.1, p95=0.1, p99=0.1),
        time_to_first_token=Quantiles(mean=0.1, p50=0.1, p90=0.1, p95=0.1, p99=0.1),
        interval=UNKNOWN,
        sojourn_interval=UNKNOWN,
        clipped_fraction=0.0,
        notes=(),
    )
    forecast = dataclasses.replace(forecast, **changes)
    return WhatIf(forecast=forecast, gains=Gains(), compared="queueing_delay", at=at)
