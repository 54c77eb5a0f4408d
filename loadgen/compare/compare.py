"""One run beside theory: what was observed, and what it should have been for several reasons to
differ.

    measured service   the recursion on the run's own arrivals, batches and service times: gateway
                       right or wrong
    same arrivals      the run's own arrivals and lengths through the simulator, law at the run's
                       speed: law right or wrong
    live               theory with rate, lengths, speed and residual of the run: the formula without
                       the run's sample path
    predicted          the asked rate and lengths, law at the run's speed and residual (from service
                       times, never from delays)
    a priori           the asked rate and lengths and the law as calibrated: what could be known
                       before the run
    paper              the formula as the documents print it, where they have one
    observed           with an interval that no lucky run makes narrow
                       (queueing.measurement.mean_interval)

`loadgen.compare.residual` splits observed - a priori into named parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from loadgen.compare.by_order import ComparedSample
from loadgen.compare.comparison import (
    DISTRIBUTION_LEVELS,
    Compared,
    Comparison,
    Estimate,
    Instants,
    PaperKind,
    Part,
    Predicted,
    Quantity,
    SamplingError,
    Split,
    Theory,
    Verdict,
)
from loadgen.compare.epoch_sample import (
    EpochSample,
    epoch_samples,
    first_dispatches,
    of_others,
    predictor_of,
    timetable_of,
)
from loadgen.compare.residual import sampling_error_of, split
from policies import is_first_come
from policies.ordered import order_of
from queueing.estimation.checked import CheckedRun
from queueing.estimation.speed.batch_times import batch_times
from queueing.estimation.window.of_run import window_of_run
from queueing.latency.law import LatencyModel
from queueing.latency.speed import Speed, measured_speed
from queueing.measurement.check import Check
from queueing.measurement.delay_variance import AsymptoticVariance, single_server_variance
from queueing.measurement.record import Record
from queueing.measurement.recursion import measured_starts, served
from queueing.measurement.statistics import FloatArray, batch_means_interval, mean_interval
from queueing.result import LEVELS

__all__ = [
    "Comparison",
    "Estimate",
    "Part",
    "Predicted",
    "Quantity",
    "Split",
    "Theory",
    "Verdict",
    "compare",
    "epoch_samples",
]


def compare(
    records: Iterable[Record],
    theory: Theory | None = None,
    sent: Iterable[Record] = (),
    *,
    began_idle: bool = False,
) -> list[Comparison]:
    """One comparison per policy and epoch, in their order; `sent` are the load generator's records
    of the same requests. `began_idle`: the records begin with an epoch before which nothing had
    arrived, as those of a sweep's cell do.

    Raises ValueError where no record was dispatched.
    """
    return [
        found.comparison for found in compare_samples(records, theory, sent, began_idle=began_idle)
    ]


def compare_samples(
    records: Iterable[Record],
    theory: Theory | None = None,
    sent: Iterable[Record] = (),
    *,
    began_idle: bool = False,
) -> list[ComparedSample]:
    """As `compare`, with what orders of service are compared by."""
    records = list(records)
    everyone = served(records)
    if not everyone:
        raise ValueError(
            "got no dispatched request with arrival, dispatch and server's end; expected a run "
            "file of a gateway or simulator"
        )
    sent = list(sent)
    starts, intended, others = (
        measured_starts(everyone),
        timetable_of(records, sent),
        of_others(records, sent),
    )
    pads = theory is None or theory.pads
    shortest = min(request.dispatched_at - request.arrived_at for request in everyone)
    found = [
        _compare(EpochSample(requests, starts, intended, pads, shortest), theory)
        for requests in epoch_samples(everyone, first_dispatches(records, began_idle=began_idle))
    ]
    return [
        dataclasses.replace(
            each,
            comparison=dataclasses.replace(
                each.comparison, of_others=others.get(each.comparison.epoch, 0)
            ),
        )
        for each in found
    ]


@dataclass(frozen=True, slots=True)
class _Answers:
    """What every theory says; None where it is not there or cannot say."""

    speed: Speed | None = None
    a_priori: Predicted | None = None
    predicted: Predicted | None = None
    live: Predicted | None = None
    checked: CheckedRun | None = None
    published: tuple[float, PaperKind] | None = None

    def means(self, name: Compared) -> dict[str, float | None]:
        """Of one quantity, by theory."""
        found = {
            key: getattr(getattr(self, key), name, None)
            for key in ("a_priori", "predicted", "live")
        }
        return found | {
            "paper": self.published[0] if self.published and name == "queueing_delay" else None
        }

    def quantiles(self, name: Compared) -> dict[str, Mapping[str, float]]:
        """Of one quantity, by theory, then level; only where there are some."""
        every = {key: getattr(self, key) for key in ("a_priori", "predicted", "live")}
        return {
            key: answer.quantiles[name]
            for key, answer in every.items()
            if answer is not None and answer.quantiles.get(name)
        }


def _compare(sample: EpochSample, theory: Theory | None) -> ComparedSample:
    answers = _answers(sample, theory) if theory else _Answers()
    a_priori, predicted = answers.a_priori, answers.predicted
    observed = sample.observed(sample.compared)
    sampling = sampling_error_of(sample, theory, a_priori) if theory and a_priori else None
    known = _by_service_times(sample) or _by_simulation(sample, answers, sampling, theory)
    comparison = Comparison(
        policy=sample.requests[0].policy,
        epoch=sample.requests[0].epoch,
        compared=sample.compared,
        n=len(sample.kept),
        arrival_rate=sample.rate,
        asked_rate=theory.asked_rate if theory else None,
        load=a_priori.load if a_priori else None,
        batch_size=sample.batch_size,
        speed=answers.speed,
        calibrated=Speed(theory.law.speed, theory.law.cv, 0) if theory else None,
        queueing_delay=_quantity(sample, "queueing_delay", answers, known.get("queueing_delay")),
        sojourn_time=_quantity(sample, "sojourn_time", answers, known.get("sojourn_time")),
        utilisation=sample.utilisation,
        predicted_utilisation=predicted.utilisation if predicted else None,
        predicted_batch_size=predicted.batch_size if predicted else None,
        method=a_priori.method if a_priori else None,
        paper_kind=answers.published[1] if answers.published else None,
        distribution=tuple(np.quantile(observed, DISTRIBUTION_LEVELS).tolist())
        if observed.size
        else (),
        split=split(sample, theory, a_priori, answers.speed, sampling)
        if theory and a_priori
        else None,
    )
    if theory is not None and order_of(sample.policy).predicts:
        asked = theory.predictor
        comparison = dataclasses.replace(
            comparison,
            predictor=None if asked is None else str(asked),
            predictor_measured=str(predictor_of(sample.requests)),
        )
    return ComparedSample(comparison, sample, theory, _instants(sample, answers.checked))


def _instants(sample: EpochSample, checked: CheckedRun | None) -> Instants | None:
    if checked is None:
        return None
    instants = zip(checked.dispatched.tolist(), checked.released.tolist(), strict=True)
    return {request.id: each for request, each in zip(sample.requests, instants, strict=True)}


def _answers(sample: EpochSample, theory: Theory) -> _Answers:
    policy, requests, law = sample.policy, sample.requests, theory.law
    checked = theory.check(policy, requests, sample.shortest_delay) if theory.check else None
    speed = _speed_of_batches(sample, law) if checked is None else checked.speed
    at_speed = law if speed is None else speed.law(law)
    given = (policy, sample.rate, requests)
    a_priori = theory.predict(*given, law) if theory.predict else None
    return _Answers(
        speed=speed,
        a_priori=a_priori,
        predicted=a_priori
        if speed is None or theory.predict is None
        else theory.predict(*given, at_speed),
        live=theory.live(*given, at_speed) if theory.live else None,
        checked=checked,
        published=theory.published(*given, at_speed) if theory.published else None,
    )


def _speed_of_batches(sample: EpochSample, law: LatencyModel) -> Speed | None:
    """What a law alone says; None of a continuous engine."""
    if sample.policy.joins_running:
        return None
    times = batch_times(sample.policy, window_of_run(sample.requests), law)
    return measured_speed(times.measured, times.fitted)


def _by_service_times(sample: EpochSample) -> dict[Compared, AsymptoticVariance]:
    """What is known of the variance of the means without the delays: by the formula of M/G/1,
    where the run is one.
    """
    arrived_at, service_times = (
        np.array([(r.arrived_at, r.server_free_at - r.dispatched_at) for r in sample.kept])
        .reshape(-1, 2)
        .T
    )
    delays, sojourns = sample.observed("queueing_delay"), sample.observed("sojourn_time")
    single = single_server_variance(arrived_at, delays, service_times)
    if single is None:
        return {}
    rest: dict[Compared, AsymptoticVariance] = (
        {"sojourn_time": single.with_rest(delays, sojourns)} if sojourns.size == delays.size else {}
    )
    return {"queueing_delay": single, **rest}


def _by_simulation(
    sample: EpochSample, answers: _Answers, sampling: SamplingError | None, theory: Theory | None
) -> dict[Compared, AsymptoticVariance]:
    """The same of any other queue: by runs of this length under the asked process and the
    calibrated law.

    Where the machine was slower than calibrated the run was nearer to saturation, and its mean
    varies more, as 1 / (1 - load).
    """
    values, load = (
        sample.observed(sample.compared),
        answers.a_priori.load if answers.a_priori else None,
    )
    if (
        sampling is None
        or theory is None
        or load is None
        or not sampling.long_run > 0
        or not values.mean() > 0
    ):
        return {}
    slower = max(1.0, answers.speed.factor / theory.law.speed) if answers.speed else 1.0
    nearer = (1 - load) / (1 - load * slower) if load * slower < 1 else np.inf
    relative = values.size * (sampling.relative_spread * nearer) ** 2
    scv = float(values.var() / values.mean() ** 2)
    return {sample.compared: AsymptoticVariance(relative, max(1.0, relative / scv) if scv else 1.0)}


def _quantity(
    sample: EpochSample, name: Compared, answers: _Answers, variance: AsymptoticVariance | None
) -> Quantity:
    observed = sample.observed(name)
    interval = mean_interval(observed, theory=variance)
    check: Check | None = None if answers.checked is None else getattr(answers.checked, name)
    beside = {
        key: None if mean is None else _estimate(interval.mean, mean, interval.half_width)
        for key, mean in answers.means(name).items()
    }
    return Quantity(
        observed=interval,
        measured_service=_paired(observed, sample.by_recursion(name))
        if is_first_come(sample.policy)
        else None,
        same_arrivals=None
        if check is None
        else _estimate(check.observed, check.modelled, check.half_width),
        quantiles=_quantiles(observed),
        theory_quantiles=answers.quantiles(name),
        **beside,
    )


def _paired(observed: FloatArray, theory: FloatArray) -> Estimate:
    if not observed.size:
        return Estimate(np.nan, np.nan, np.inf)
    return _estimate(
        float(observed.mean()),
        float(theory.mean()),
        batch_means_interval(observed - theory).half_width,
    )


def _estimate(observed: float, mean: float, half_width: float) -> Estimate:
    if not mean:
        return Estimate(mean, 0.0 if observed == mean else np.inf, np.inf)
    return Estimate(mean, observed / mean - 1, half_width / abs(mean))


def _quantiles(values: FloatArray) -> dict[str, float]:
    return (
        dict(zip(LEVELS, np.quantile(values, list(LEVELS.values())).tolist(), strict=True))
        if values.size
        else {}
    )
