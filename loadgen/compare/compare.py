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

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kendall.loadgen.compare.by_order import ComparedSample
from kendall.loadgen.compare.comparison import (
    DISTRIBUTION_LEVELS,
    Compared,
    Comparison,
    DifferencePart,
    Instants,
    PaperKind,
    Predicted,
    Quantity,
    SamplingError,
    Split,
    Theory,
    TheoryEstimate,
    Verdict,
)
from kendall.loadgen.compare.epoch_sample import (
    EpochSample,
    epoch_samples,
    first_dispatches,
    of_others,
    predictor_of,
    timetable_of,
)
from kendall.loadgen.compare.residual import sampling_error_of, split
from kendall.policies import is_first_come
from kendall.policies.ordered import order_of
from kendall.queueing.estimation.checked import CheckedRun
from kendall.queueing.estimation.speed.batch_times import batch_times
from kendall.queueing.latency.speed import Speed, measured_speed
from kendall.queueing.measurement.check import Check
from kendall.queueing.measurement.delay_variance import AsymptoticVariance
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import measured_starts, served
from kendall.queueing.measurement.statistics import batch_means_interval, mean_interval
from kendall.queueing.result import LEVELS

__all__ = [
    "Comparison",
    "DifferencePart",
    "Predicted",
    "Quantity",
    "Split",
    "Theory",
    "TheoryEstimate",
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
        compared.comparison
        for compared in compare_samples(records, theory, sent, began_idle=began_idle)
    ]


def compare_samples(
    records: Iterable[Record],
    theory: Theory | None = None,
    sent: Iterable[Record] = (),
    *,
    began_idle: bool = False,
) -> list[ComparedSample]:
    """Compare, and keep what orders of service are compared by."""
    records, sent = list(records), list(sent)
    everyone = served(records)
    if not everyone:
        raise ValueError(
            "got no dispatched request with arrival, dispatch and server's end; expected a run "
            "file of a gateway or simulator"
        )
    starts, intended = measured_starts(everyone), timetable_of(records, sent)
    others = of_others(records, sent)
    pads = theory is None or theory.pads
    shortest = min(request.dispatched_at - request.arrived_at for request in everyone)
    return [
        compare_sample(
            EpochSample(requests, starts, intended, pads, shortest),
            theory,
            others.get(requests[0].epoch, 0),
        )
        for requests in epoch_samples(everyone, first_dispatches(records, began_idle=began_idle))
    ]


@dataclass(frozen=True, slots=True)
class TheoryAnswers:
    """The answers of every theory on one sample; None where it is absent or has none."""

    speed: Speed | None = None
    a_priori: Predicted | None = None
    predicted: Predicted | None = None
    live: Predicted | None = None
    checked: CheckedRun | None = None
    published: tuple[float, PaperKind] | None = None

    @classmethod
    def of(cls, sample: EpochSample, theory: Theory) -> TheoryAnswers:
        """Ask every theory. The speed is that of the check, else of the batches by the law
        alone, which a continuous engine does not have.
        """
        policy, requests, law = sample.policy, sample.requests, theory.law
        checked = theory.check(policy, requests, sample.window) if theory.check else None
        speed = None if checked is None else checked.speed
        if checked is None and not policy.joins_running:
            times = batch_times(policy, sample.window, law)
            speed = measured_speed(times.measured, times.fitted)
        at_speed = law if speed is None else speed.law(law)
        given = (policy, sample.rate, requests)
        a_priori = predicted = theory.predict(*given, law) if theory.predict else None
        if theory.predict and speed is not None:
            predicted = theory.predict(*given, at_speed)
        return cls(
            speed=speed,
            a_priori=a_priori,
            predicted=predicted,
            live=theory.live(*given, at_speed) if theory.live else None,
            checked=checked,
            published=theory.published(*given, at_speed) if theory.published else None,
        )

    def quantity(
        self, sample: EpochSample, name: Compared, variance: AsymptoticVariance | None
    ) -> Quantity:
        """One quantity as observed and by every theory; `variance`: what is known of that of its
        mean without the delays.
        """
        observed = sample.observed(name)
        interval = mean_interval(observed, theory=variance)
        check: Check | None = None if self.checked is None else getattr(self.checked, name)
        steady = {key: getattr(self, key) for key in ("a_priori", "predicted", "live")}
        means: dict[str, float | None] = {
            key: getattr(answer, name, None) for key, answer in steady.items()
        }
        means["paper"] = self.published[0] if self.published and name == "queueing_delay" else None
        beside = {
            key: None if mean is None else _estimate(interval.mean, mean, interval.half_width)
            for key, mean in means.items()
        }
        recursion = None
        if is_first_come(sample.policy):
            recursion = TheoryEstimate(np.nan, np.nan, np.inf)
            if observed.size:
                starts = sample.by_recursion(name)
                half_width = batch_means_interval(observed - starts).half_width
                recursion = _estimate(float(observed.mean()), float(starts.mean()), half_width)
        levels = np.quantile(observed, list(LEVELS.values())).tolist() if observed.size else []
        return Quantity(
            observed=interval,
            measured_service=recursion,
            same_arrivals=None
            if check is None
            else _estimate(check.observed, check.modelled, check.half_width),
            quantiles=dict(zip(LEVELS, levels, strict=False)),
            theory_quantiles={
                key: answer.quantiles[name]
                for key, answer in steady.items()
                if answer is not None and answer.quantiles.get(name)
            },
            **beside,
        )

    def simulated_variances(
        self, sample: EpochSample, sampling: SamplingError | None, theory: Theory | None
    ) -> dict[Compared, AsymptoticVariance]:
        """The variance of the mean of any queue, as far as it is known: by runs of this length
        under the asked process and the calibrated law.

        Where the machine was slower than calibrated the run was nearer to saturation, and its mean
        varies more, as 1 / (1 - load).
        """
        values = sample.observed(sample.compared)
        load = self.a_priori.load if self.a_priori else None
        if (
            sampling is None
            or theory is None
            or load is None
            or not sampling.long_run > 0
            or not values.mean() > 0
        ):
            return {}
        slower = max(1.0, self.speed.factor / theory.law.speed) if self.speed else 1.0
        nearer = (1 - load) / (1 - load * slower) if load * slower < 1 else np.inf
        relative = values.size * (sampling.relative_spread * nearer) ** 2
        scv = float(values.var() / values.mean() ** 2)
        ratio = max(1.0, relative / scv) if scv else 1.0
        return {sample.compared: AsymptoticVariance(relative, ratio)}


def compare_sample(sample: EpochSample, theory: Theory | None, of_others: int) -> ComparedSample:
    """Compare one policy in one epoch with theory; it has so many requests of other clients among
    its own.
    """
    answers = TheoryAnswers.of(sample, theory) if theory else TheoryAnswers()
    a_priori, predicted, speed = answers.a_priori, answers.predicted, answers.speed
    observed = sample.observed(sample.compared)
    sampling = sampling_error_of(sample, theory, a_priori) if theory and a_priori else None
    known = sample.variances() or answers.simulated_variances(sample, sampling, theory)
    asks_predictor = theory is not None and order_of(sample.policy).predicts
    asked = theory.predictor if theory else None
    comparison = Comparison(
        policy=sample.requests[0].policy,
        epoch=sample.requests[0].epoch,
        compared=sample.compared,
        n=len(sample.kept),
        arrival_rate=sample.rate,
        asked_rate=theory.asked_rate if theory else None,
        load=a_priori.load if a_priori else None,
        batch_size=sample.batch_size,
        speed=speed,
        calibrated=Speed(theory.law.speed, theory.law.cv, 0) if theory else None,
        queueing_delay=answers.quantity(sample, "queueing_delay", known.get("queueing_delay")),
        sojourn_time=answers.quantity(sample, "sojourn_time", known.get("sojourn_time")),
        utilisation=sample.utilisation,
        predicted_utilisation=predicted.utilisation if predicted else None,
        predicted_batch_size=predicted.batch_size if predicted else None,
        method=a_priori.method if a_priori else None,
        paper_kind=answers.published[1] if answers.published else None,
        distribution=tuple(np.quantile(observed, DISTRIBUTION_LEVELS).tolist())
        if observed.size
        else (),
        split=split(sample, theory, a_priori, speed, sampling) if theory and a_priori else None,
        of_others=of_others,
        predictor=str(asked) if asks_predictor and asked is not None else None,
        predictor_measured=str(predictor_of(sample.requests)) if asks_predictor else None,
    )
    replayed: Instants | None = None
    if (checked := answers.checked) is not None:
        instants = zip(checked.dispatched.tolist(), checked.released.tolist(), strict=True)
        replayed = {r.id: each for r, each in zip(sample.requests, instants, strict=True)}
    return ComparedSample(comparison, sample, theory, replayed)


def _estimate(observed: float, mean: float, half_width: float) -> TheoryEstimate:
    if not mean:
        return TheoryEstimate(mean, 0.0 if observed == mean else np.inf, np.inf)
    return TheoryEstimate(mean, observed / mean - 1, half_width / abs(mean))
