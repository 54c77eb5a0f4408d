"""What clients of a continuous engine feel: mean and p95 of the time to first token and of the
sojourn time, observed beside predicted.

A statistic holds where the predicted value is within 10 % of the observed one, or within its 95 %
interval; a cell holds where all four do. A statistic whose interval reaches further than a quarter
of it to either side is too short to say anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from queueing.control.assess import Assessment
from queueing.errors import PredictionError
from queueing.measurement.batch_means import TOO_WIDE, FloatArray
from queueing.measurement.record import Record
from queueing.measurement.statistics import mean_interval, quantile_interval
from queueing.prediction import predict_model

CLOSE = 0.10
LEVELS = {"p95": 0.95}
Plain = dict[str, Any]


def _first_token(record: Record) -> float:
    assert record.first_token_at is not None
    assert record.arrived_at is not None
    return record.first_token_at - record.arrived_at


def _sojourn(record: Record) -> float:
    assert record.sojourn_time is not None
    return record.sojourn_time


DURATIONS: Mapping[str, Callable[[Record], float]] = {
    "time_to_first_token": _first_token,
    "sojourn_time": _sojourn,
}


def answers(
    records: Sequence[Record], window: tuple[float, float], prediction: Mapping[str, Any]
) -> list[Plain]:
    """A row for each statistic, of the requests of an epoch that arrived in the window, up to the
    first one that was not answered at its end. `prediction`: as the gateway has it.
    """
    mine = answered(records, window)
    rows = []
    for quantity, duration in DURATIONS.items():
        values = np.array([duration(record) for record in mine])
        predicted = prediction.get(quantity) or {}
        for statistic, found in statistics(values).items():
            row = {"quantity": quantity, "statistic": statistic, "n": int(values.size)}
            rows.append(row | found | {"predicted": predicted.get(statistic)})
    return rows


def answered(records: Sequence[Record], window: tuple[float, float]) -> list[Record]:
    """In the order of their arrivals."""
    start, end = window
    arrived = [
        (record.arrived_at, record)
        for record in records
        if record.arrived_at is not None and start < record.arrived_at <= end
    ]
    pending = [at for at, record in arrived if not whole_by(record, end)]
    until = min(pending, default=end)
    return [record for at, record in sorted(arrived, key=lambda each: each[0]) if at < until]


def whole_by(record: Record, end: float) -> bool:
    """Whether its answer was."""
    released = record.released_at
    return record.outcome == "completed" and released is not None and released <= end


def statistics(values: FloatArray) -> dict[str, Plain]:
    """Seconds; without ends where the run is too short to say."""
    mean = mean_interval(values)
    found: dict[str, Plain] = {"mean": _interval(mean.mean, mean.low, mean.high)}
    for name, level in LEVELS.items():
        quantile = quantile_interval(values, level)
        value = float(np.quantile(values, level)) if values.size else None
        found[name] = (
            {"observed": value, "low": None, "high": None}
            if quantile is None
            else _interval(quantile.value, quantile.low, quantile.high)
        )
    return found


def _interval(value: float, low: float, high: float) -> Plain:
    ends = (low, high) if np.isfinite(low) and np.isfinite(high) else (None, None)
    return {"observed": float(value), "low": ends[0], "high": ends[1]}


def predicted_again(found: Assessment) -> Plain | None:
    """At the estimates of the window, as `kendall predict` does it, quantiles included."""
    if found.model is None:
        return None
    try:
        rate = found.estimates.arrival_rate.value
        prediction = predict_model(found.model, rate, quantiles=True)
    except PredictionError:
        return None
    return prediction.with_turnaround(found.estimates.gateway_turnaround).as_dict()


def verdict(row: Mapping[str, Any]) -> str:
    """Of one statistic: holds, does not hold, too short, nothing predicted."""
    observed, predicted = row["observed"], row["predicted"]
    if row["low"] is None:
        return "too short"
    half = max(observed - row["low"], row["high"] - observed)
    if half > TOO_WIDE * observed:
        return "too short"
    if predicted is None:
        return "nothing predicted"
    return "holds" if abs(observed - predicted) <= max(CLOSE * observed, half) else "does not hold"


def verdict_of_cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """holds: none of its statistics fails, and some were judged; does not hold; too short."""
    found = {verdict(row) for row in rows}
    if {"does not hold", "nothing predicted"} & found:
        return "does not hold"
    return "holds" if "holds" in found else "too short"
