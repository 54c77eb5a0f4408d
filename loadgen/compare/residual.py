"""The difference between observed and predicted as a sum of named parts, and one verdict a
cell.

Every part changes one thing between two means of the compared quantity (queueing delay; for
continuous the sojourn), so the parts add up to observed - predicted exactly:

    V0  the prediction a priori: formula, asked rate and lengths, calibrated law
    V1  the steady state of the same inputs: V0 if the formula is exact, else one long simulation
    V1p the same under the process that was asked for, where it is not Poisson: a long simulation
    V2a calibrated law on the TIMETABLE's instants and the run's lengths, simulated with
        predictions drawn from the predictor that was asked for
    V2  the same with the predictions that came along
    V3  calibrated law on the instants at which requests ARRIVED
    V4  the same at the run's speed
    V5  the same with the run's scatter of service times
    V6  the run's own batches and service times, each dispatched as soon as it could be
        (loadgen.compare.epoch_sample.EpochSample)
    V7  observed

    part                what it is                             its chance

    theory = V1 - V0    the formula's own error                that of the long simulation
    process = V1p - V1  the asked process against Poisson      that of the long simulations
                        arrivals at its rate
    arrivals = V2a - V1p what was drawn against what was asked what runs of this length do
                        (without a process V2a - V1)           (loadgen.compare.sampling_error)
    predictor = V2 - V2a predictions as they came, against     draws of the predictor
                        those asked (orders that read them)
    sender = V3 - V2    delivered against the timetable        batch means of the paired differences
    speed = V4 - V3     machine against the calibration        batch means of measured - fitted
                                                               service times
    scatter = V5 - V4   residual cv against the calibration's  batch means of the paired differences
    shape = V6 - V5     service times that neither explains    the same
    gateway = V7 - V6   time lost before dispatches, and the   the same
                        waiting that it caused behind them

speed + scatter + shape is the service law's part. Without the load run's file V2 = V3 and the
sender's part is 0. Under an order other than that of arrival no recursion gives V6, and shape =
V7 - V5 holds the gateway's part too.

The verdict, first rule that holds:

    no prediction   there is no prediction a priori (no law, no steady state)
    disturbed       requests of other clients were in the queue: the run is not the one that was
                    asked for
    agree           the prediction lies within 10 % of the observation, or in its interval where the
                    run is long enough to have one (queueing.measurement.batch_means)
    a part's name   the largest part beyond its chance, of the difference's sign and at least a
                    quarter of it
    sampling noise  otherwise: no part is beyond chance
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from kendall.loadgen.compare.comparison import (
    Comparison,
    DifferencePart,
    Predicted,
    SamplingError,
    Split,
    Theory,
    Verdict,
)
from kendall.loadgen.compare.epoch_sample import EpochSample
from kendall.loadgen.compare.planned import as_planned, may_err_otherwise, with_asked_predictions
from kendall.policies import is_first_come
from kendall.policies.text import counted
from kendall.queueing.latency.speed import Speed
from kendall.queueing.measurement.check import AGREE
from kendall.queueing.measurement.statistics import FloatArray, batch_means_interval

PARTS = (
    "theory",
    "process",
    "arrivals",
    "predictor",
    "sender",
    "speed",
    "scatter",
    "shape",
    "gateway",
)
SHARE = 0.25  # of the difference that a part must explain to be named
ORDERED = "with the time that the gateway lost, which no recursion tells apart under this order"


def sampling_error_of(
    sample: EpochSample, theory: Theory, a_priori: Predicted
) -> SamplingError | None:
    """The sampling error of runs of this length by theory; None where there is no prediction or no
    simulator.
    """
    predicted = getattr(a_priori, sample.compared)
    if (
        predicted is None
        or not math.isfinite(predicted)
        or theory.sampling_error is None
        or not len(sample.judged(sample.compared))
    ):
        return None
    return theory.sampling_error(
        sample.policy, sample.rate, sample.requests, sample.compared, a_priori
    )


def split(
    sample: EpochSample,
    theory: Theory,
    a_priori: Predicted,
    speed: Speed | None,
    sampling: SamplingError | None,
) -> Split | None:
    """The parts; None where there is no prediction, no simulator or no speed."""
    name = sample.compared
    predicted = getattr(a_priori, name)
    if sampling is None or theory.replay is None or speed is None:
        return None
    law, replay = theory.law, theory.replay

    def simulated(speed: Speed) -> FloatArray:
        return sample.replayed(name, replay(sample.policy, sample.requests, speed.law(law)))

    calibrated = Speed(law.speed, law.cv, 0)
    delivered = simulated(calibrated)
    planned, note = as_planned(sample, theory, delivered)
    as_asked = with_asked_predictions(sample, theory, planned)
    at_speed = simulated(Speed(speed.factor, law.cv, speed.n))
    scattered = at_speed if speed.cv == law.cv or sample.policy.joins_running else simulated(speed)
    at_once, observed = sample.without_lost_time(name), sample.observed(name)
    ordered = not is_first_come(sample.policy)
    expected, known = sampling.long_run, sampling.long_run_half_width
    parts = [DifferencePart("theory", expected - predicted, known)]
    if sampling.process is not None:
        half_width = math.hypot(sampling.process_half_width, known)
        parts.append(DifferencePart("process", sampling.process - expected, half_width))
        expected, known = sampling.process, sampling.process_half_width
    slower = _difference("speed", delivered, at_speed)
    if off := speed.factor / law.speed - 1:  # the interval of the factor, by the part's own slope
        slower = dataclasses.replace(
            slower, half_width=abs(slower.seconds / off) * speed.half_width
        )
    parts += [
        DifferencePart("arrivals", as_asked.value - expected, math.hypot(sampling.spread, known)),
        DifferencePart("predictor", float(planned.mean()) - as_asked.value, as_asked.half_width),
        dataclasses.replace(_difference("sender", planned, delivered), note=note),
        slower,
        _difference("scatter", at_speed, scattered),
        dataclasses.replace(_difference("shape", scattered, at_once), note=ORDERED * ordered),
        _difference("gateway", at_once, observed),
    ]
    absent = {"gateway": ordered, "predictor": not may_err_otherwise(sample, theory)}
    present = tuple(part for part in parts if not absent.get(part.name))
    return Split(predicted=predicted, observed=float(observed.mean()), parts=present)


def parts_of(comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    """Names of the parts that some of these have: of predictions only where an order reads them,
    of a process only where it is not Poisson.
    """
    splits = [comparison.split for comparison in comparisons if comparison.split is not None]
    known = {part.name for split in splits for part in split.parts}
    return tuple(name for name in PARTS if name not in ("predictor", "process") or name in known)


def verdict(comparison: Comparison) -> Verdict:
    """One cell against the prediction a priori, in words, by the rules above."""
    observed, predicted = comparison.quantity.observed, comparison.quantity.a_priori
    difference = comparison.split
    if predicted is None:
        unstable = comparison.load is not None and comparison.load >= 1
        return Verdict(
            "no prediction",
            f"no steady state: load {comparison.load:.2f}" if unstable else "no prediction",
        )
    if comparison.of_others:
        return Verdict("disturbed", disturbance(comparison))
    within = not comparison.too_short and observed.covers(predicted.mean)
    if within or abs(predicted.deviation) <= AGREE:
        return Verdict("agree", "agree")
    if difference is None and not comparison.too_short:
        return Verdict("differ", f"differ by {_percent(predicted.deviation)}")
    cause = None if difference is None else cause_of(difference)
    if cause is None:
        return Verdict("sampling noise", "sampling noise")
    return Verdict(cause.name, _in_words(cause, comparison))


def disturbance(comparison: Comparison) -> str:
    """Say how many requests of other clients were measured along."""
    return f"{counted(comparison.of_others, 'request')} of other clients in its queue"


def cause_of(difference: Split) -> DifferencePart | None:
    """The part that a difference is named after; None where all of it may be chance."""
    candidates = [
        p
        for p in difference.parts
        if p.significant
        and p.seconds * difference.total > 0
        and abs(p.seconds) >= SHARE * abs(difference.total)
    ]
    return max(candidates, key=lambda part: abs(part.seconds), default=None)


def _in_words(cause: DifferencePart, comparison: Comparison) -> str:
    speed, calibrated = comparison.speed, comparison.calibrated
    if cause.name == "speed" and speed and calibrated:
        ratio = speed.factor / calibrated.factor - 1
        return f"machine {'slower' if ratio > 0 else 'faster'} than calibrated by {_percent(ratio)}"
    if cause.name == "scatter" and speed and calibrated:
        return (
            f"service times scatter {'more' if cause.seconds > 0 else 'less'} than calibrated "
            f"(cv {speed.cv:.2f}, {calibrated.cv:.2f})"
        )
    share = cause.seconds / comparison.quantity.observed.mean
    words = {
        "theory": f"approximation off by {_percent(share)}",
        "process": f"asked arrivals are not Poisson: {_percent(share)} of the delay",
        "arrivals": "arrivals are not the asked process",
        "predictor": f"predicted lengths as {comparison.predictor_measured}, asked as "
        f"{comparison.predictor}",
        "sender": "sender late",
        "shape": "law's shape, or a speed that wandered",
        "gateway": f"gateway loses time: {_percent(share)} of the delay",
    }
    return words[cause.name]


def _percent(share: float) -> str:
    return f"{abs(share) * 100:.0f} %"


def _difference(name: str, before: FloatArray, after: FloatArray) -> DifferencePart:
    """after - before; paired, so that what both share drops out of the interval."""
    return DifferencePart(
        name,
        float(after.mean()) - float(before.mean()),
        batch_means_interval(after - before).half_width,
    )
