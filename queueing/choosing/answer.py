"""Predictions of a setting at three prices.

    precise    what is reported: exact or an approximation where there is one for up to
               `LARGEST_EXACT` in a batch; 0.1 to 0.5 s for batches, of long answers 1 s
    searched   what ranks dozens: simulated, unless the answer is a formula (single, continuous);
               30 ms, standard error about 1 % at load 0.6
    rough      simulated means, and the quantiles of an SLO: 5 ms for 30,000 requests; for ratios on
               common random numbers

And of `kendall optimize` and `kendall plan` at two (`Prices`): `quick` for each of dozens, a
formula or 100,000 requests; `full` for the one that is chosen, as `kendall predict` says it.

Simulated answers say so in `method` and in their assumptions; all see the same requests arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kendall.policies.immediate import Single
from kendall.queueing.choosing.objective import Slo, levels_of
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.prediction import (
    best_method,
    infinite_mean,
    predict_durations,
    predict_model,
    without_means,
)
from kendall.queueing.prediction.steady_state import doubt_of, known_delay, with_quantiles_of
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Mean, Prediction, Quantiles, Quantity
from kendall.queueing.simulation.experiment import (
    mean_gaps,
    quantiles_of_gaps,
    simulate_model,
    simulate_run,
    simulate_steady_state,
    sizes_per_dispatch,
)

SIMULATED, ROUGH, SHORTEST = 100_000, 30_000, 5_000  # requests
_MANY, _FEW, _FULL = 64, 20, 3  # predictions that share the time of a search, of each kind
LARGEST_EXACT, LARGEST_UNPADDED = 64, 8  # in a batch; of dozens of unpadded ones, 0.4 s each
# relative standard errors of the continuous approximation where it is not in doubt (table in
# queueing.models.slots.continuous)
APPROXIMATE, APPROXIMATE_SERVICE = 0.04, 0.015  # of the delay; of all that follows the dispatch
SHORT, APPROXIMATE_SHORT = 0.02, 0.8  # a delay below this share of the sojourn is up to 80 % off
NOTE = f"simulated with {SIMULATED:,} requests: an exact answer takes longer than this may"


def precise(model: Queue, arrival_rate: float) -> Prediction:
    """The steady state. Raises UnstableQueueError."""
    model.stable_load(arrival_rate)
    method = best_method(model)
    if method == "simulation" or (method == "exact" and _is_dear(model)):
        return simulated(model, arrival_rate)
    return _solved(model, arrival_rate, method)


def simulated(model: Queue, arrival_rate: float, note: str = NOTE) -> Prediction:
    """By `SIMULATED` requests; `note`: why."""
    found = simulate_model(model, arrival_rate, num_requests=SIMULATED, notes=(note,))
    return without_means(found) if infinite_mean(model, found.load) else found


def rough(
    model: Queue, arrival_rate: float, slos: Sequence[Slo] = (), requests: int = ROUGH
) -> Prediction:
    """Mean delays and loss, and the quantiles that `slos` bound. A queue with a steady state."""
    warm_up = requests // 10
    gaps = Quantiles()
    whole = simulate_run(model, arrival_rate, requests, np.random.SeedSequence(0), since=warm_up)
    run = whole.after(warm_up)
    served = ~run.lost
    own = run.queueing_delay[served]
    lost = 1 - own.size / served.size
    every = (
        own
        if not lost
        else np.where(served, run.queueing_delay, model.requests.patience or math.inf)
    )
    if not model.policy.padded and any(slo.field == "inter_token_latency" for slo in slos):
        _, means, weights = mean_gaps(run)
        levels = levels_of(slo for slo in slos if slo.field == "inter_token_latency")
        if means.size:
            found = quantiles_of_gaps([run], levels) if levels else {}
            gaps = _quantiles(float(np.average(means, weights=weights)), found)
    return Prediction(
        policy=model.text,
        effective_max_batch_size=model.bound,
        model=model.name,
        method="simulation",
        stable=True,
        load=math.nan,
        utilisation=None,
        queueing_delay=_of(every, slos, "queueing_delay"),
        sojourn_time=_of(run.sojourn_time[served], slos, "sojourn_time"),
        served_queueing_delay=Quantiles(float(own.mean())),
        time_to_first_token=_of(
            (run.first_token_at - run.arrived_at)[served], slos, "time_to_first_token"
        ),
        inter_token_latency=gaps,
        service_time=_of((run.server_free_at - run.dispatched_at)[served], slos, "service_time"),
        loss_fraction=lost,
        batch_size=Mean(float(sizes_per_dispatch(run).mean()) if own.size else None),
        **model.counted(arrival_rate),
    )


def searched(model: Queue, arrival_rate: float, slos: Sequence[Slo] = ()) -> Prediction:
    """One of dozens in a search: a formula, or as `rough` with more requests. Raises
    UnstableQueueError.
    """
    model.stable_load(arrival_rate)
    method = best_method(model)
    if (
        method == "approximation" or (method == "exact" and isinstance(model.policy, Single))
    ) and all(_trusted(model, slo) for slo in slos):
        solved = _solved(model.with_quantiles(levels_of(slos)), arrival_rate, method)
        if all(slo.value(solved) is not None for slo in slos):
            return solved
    found = rough(model, arrival_rate, slos, SIMULATED)
    return without_means(found) if infinite_mean(model, model.load(arrival_rate)) else found


@dataclass(frozen=True)
class Prices:
    """Predictions of settings that `slos` bound, `many` of them or a dozen."""

    slos: Sequence[Slo] = ()
    many: bool = False

    def quick(self, model: Queue, arrival_rate: float) -> Prediction:
        """By a formula, and where it lacks what the SLOs bound by a short simulation: on the same
        arrivals, so that the noise of two settings is one. Of dozens, which their means put in
        order, these are the formula's then too. Raises UnstableQueueError.
        """
        model.stable_load(arrival_rate)
        bounded, trusted = self._bounded, all(_trusted(model, slo) for slo in self.slos)
        if not (trusted or self.many):
            return self._simulated(model, arrival_rate)
        found = self._by_formula(model, arrival_rate)
        if found is None:
            return self._simulated(model, arrival_rate)
        if trusted and all(slo.value(found) is not None for slo in bounded):
            return found
        names = tuple(dict.fromkeys(slo.field for slo in bounded))
        simulated = self._simulated(model, arrival_rate, known_delay(found, model))
        return with_quantiles_of(simulated, found, names)

    def full(self, model: Queue, arrival_rate: float) -> Prediction:
        """The prediction that `kendall predict --slo` prints. Raises UnstableQueueError."""
        wanted = tuple(dict.fromkeys(slo.field for slo in self._bounded))
        if not wanted:
            return predict_model(model, arrival_rate, of=_FULL)
        return predict_durations(model, arrival_rate, wanted, of=_FULL)

    @property
    def _bounded(self) -> Sequence[Slo]:
        """The SLOs on quantiles. A mean that a formula lacks is not finite, nor when simulated."""
        return [slo for slo in self.slos if slo.level is not None]

    def _simulated(
        self, model: Queue, arrival_rate: float, delay: Quantiles | None = None
    ) -> Prediction:
        from kendall.queueing.simulation.run_limits import affordable_requests, enough_slots  # noqa: PLC0415 - loads numba

        of = _MANY if self.many else _FEW
        count = affordable_requests(model, arrival_rate, SIMULATED, of=of, fewest=1)
        roomy = enough_slots(model, arrival_rate)
        found = simulate_steady_state(roomy, arrival_rate, max(count, SHORTEST), delay)
        return without_means(found) if infinite_mean(model, model.load(arrival_rate)) else found

    def _by_formula(self, model: Queue, arrival_rate: float) -> Prediction | None:
        """None where there is none, it is in doubt, or dozens of it take too long."""
        method = best_method(model)
        largest = LARGEST_UNPADDED if self.many and not model.policy.padded else LARGEST_EXACT
        if method == "simulation" or (method == "exact" and _is_dear(model, largest)):
            return None
        try:
            return by_formula(model, arrival_rate, method)
        except NotConvergedError:
            return None


def own_error(prediction: Prediction, quantity: Quantity = "queueing_delay") -> float:
    """Relative standard error that the method itself leaves in a mean."""
    found = getattr(prediction, quantity)
    if prediction.method != "approximation":
        known = found.standard_error and found.mean
        return float(found.standard_error / found.mean) if known else 0.0
    delay, sojourn = prediction.queueing_delay.mean, prediction.sojourn_time.mean
    if delay is None or not found.mean or sojourn is None:
        return APPROXIMATE
    of_delay = APPROXIMATE if delay > SHORT * sojourn else APPROXIMATE_SHORT
    if quantity == "queueing_delay":
        return of_delay
    return math.hypot(of_delay * delay / found.mean, APPROXIMATE_SERVICE)


def by_formula(model: Queue, arrival_rate: float, method: str) -> Prediction | None:
    """By an exact method or an approximation; None where that is in doubt. Raises
    NotConvergedError, UnstableQueueError.
    """
    found = predict_model(model, arrival_rate, method)
    return None if doubt_of(found) is not None else found


def _solved(model: Queue, arrival_rate: float, method: str) -> Prediction:
    """By a formula, else simulated."""
    note = NOTE
    try:
        found = by_formula(model, arrival_rate, method)
    except NotConvergedError as error:
        found, note = None, f"simulated with {SIMULATED:,} requests, not {method}: {error.reason}"
    return simulated(model, arrival_rate, note) if found is None else found


def _is_dear(model: Queue, largest: int = LARGEST_EXACT) -> bool:
    """Whether an exact answer takes seconds: large batches, and those without a bound."""
    return model.bound is None or model.bound > largest


def _trusted(model: Queue, slo: Slo) -> bool:
    """Whether the method's quantile is used: an approximation knows less of it than of means."""
    return slo.level is None or best_method(model) != "approximation"


def _of(values: Vector, slos: Sequence[Slo], field: Quantity) -> Quantiles:
    levels = levels_of(slo for slo in slos if slo.field == field)
    return _quantiles(
        float(values.mean()), {name: float(np.quantile(values, levels[name])) for name in levels}
    )


def _quantiles(mean: float, known: Mapping[str, float]) -> Quantiles:
    """A mean with the quantiles of `known`; the others are not known."""
    values = {name: float(value) for name, value in known.items()}
    levels = {**LEVELS, **dict.fromkeys(values, 0.0)}
    return Quantiles.of(levels, mean, map(values.get, levels))
