"""The run as it was meant to be, simulated under the calibrated law: its requests at the
timetable's instants, with the predictions that came along or with those of the predictor that was
asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from kendall.loadgen.compare.comparison import Instants, RatioInterval, Theory
from kendall.loadgen.compare.epoch_sample import EpochSample
from kendall.policies.ordered import order_of
from kendall.queueing.measurement.batch_means import student
from kendall.queueing.measurement.statistics import FloatArray
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.predictors.predictor_text import NO_PREDICTION

JOINED = 0.95  # share of the requests that the load run's file must know
DRAWS = 5  # of the predictions that were asked for


def as_planned(
    sample: EpochSample, theory: Theory, delivered: FloatArray
) -> tuple[FloatArray, str]:
    """The compared quantity had every request arrived when the timetable meant it to, and a note
    where that is not known.
    """
    at = _intended(sample)
    if at is None:
        return (
            delivered,
            "no load run beside it: the sender's part is unknown and counted as arrivals",
        )
    return sample.replayed(sample.compared, _replayed_at(sample, theory, at), at), ""


def may_err_otherwise(sample: EpochSample, theory: Theory) -> bool:
    """True where the order reads predictions, and a predictor was asked for that they can be
    compared with.
    """
    return theory.predictor is not None and order_of(sample.policy).predicts


def with_asked_predictions(
    sample: EpochSample, theory: Theory, planned: FloatArray
) -> RatioInterval:
    """Mean of the planned values, seconds, had the predictions been drawn from the predictor that
    was asked for; the half width is that of one draw about it.
    """
    if not may_err_otherwise(sample, theory):
        return RatioInterval(float(planned.mean()), 0.0)
    predictor = theory.predictor
    assert predictor is not None
    at = _intended(sample) or {r.id: r.arrived_at for r in sample.requests}
    draws = 1 if predictor.name in ("none", "exact") else DRAWS
    ids = [request.id for request in sample.requests]
    lengths = np.array([max(1, r.output_tokens) for r in sample.requests], dtype=np.float64)
    means = []
    for stream in np.random.SeedSequence(len(sample.requests)).spawn(draws):
        rng = np.random.default_rng(stream)
        predicted: dict[str, float | None] = dict.fromkeys(ids)
        if predictor != NO_PREDICTION:
            drawn = predicted_tokens(predictor, rng, lengths, int(lengths.max()))
            predicted.update(zip(ids, drawn.tolist(), strict=True))
        instants = _replayed_at(sample, theory, at, predicted)
        means.append(float(sample.replayed(sample.compared, instants, at).mean()))
    if draws == 1:
        return RatioInterval(means[0], 0.0)
    spread = student(draws - 1, 0.95) * math.sqrt(1 + 1 / draws) * float(np.std(means, ddof=1))
    return RatioInterval(float(np.mean(means)), spread)


def _intended(sample: EpochSample) -> dict[str, float] | None:
    """Instants of the timetable on the run's clock, by id; None without a load run beside it."""
    intended = {
        r.id: sample.intended[r.id]
        for r in sample.requests
        if sample.intended and r.id in sample.intended
    }
    if len(intended) < JOINED * len(sample.requests):
        return None
    offset = float(
        np.median([r.arrived_at - intended[r.id] for r in sample.requests if r.id in intended])
    )
    return {r.id: intended.get(r.id, r.arrived_at - offset) for r in sample.requests}


def _replayed_at(
    sample: EpochSample,
    theory: Theory,
    at: Mapping[str, float],
    predicted: Mapping[str, float | None] | None = None,
) -> Instants:
    assert theory.replay is not None
    predictions = predicted or {r.id: r.predicted_output_tokens for r in sample.requests}
    moved = sorted(
        (
            dataclasses.replace(r, arrived_at=at[r.id], predicted_output_tokens=predictions[r.id])
            for r in sample.requests
        ),
        key=lambda r: r.arrived_at,
    )
    return theory.replay(sample.policy, moved, theory.law)
