"""The parts of an operating point: lengths that are known, prices of a prediction, what a measured
value does with its estimates.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing import answer
from kendall.queueing.choosing.advice.searches import AdviceSearch
from kendall.queueing.choosing.answer import (
    own_error,
    precise,
    rough,
    searched,
    simulated,
)
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.known_lengths import known_lengths
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.gain.sensitivity import STEP, log_half_width
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.choosing.search import Optimum, largest_kept
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.estimation.interval import NORMAL, UNKNOWN, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.stall_backlog import utilisation_of
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantiles
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.assessed_windows import LAW, LAWFUL, capacity, seen
from tests.queueing.made import made_queue, prediction_of

FOUR, SINGLE, SLOTS = (
    Setting(policy="capped:max_batch_size=4"),
    Setting(policy="single"),
    Setting(policy="continuous:max_batch_size=4"),
)
DELAY = Criterion()


def operating_point(load: float = 0.5, **about: Any) -> OperatingPoint:
    shown = seen(0.0, Setting(policy="elastic"), load * capacity(FOUR))
    return OperatingPoint(
        **(
            {
                "estimates": shown.estimates,
                "shape": LAW,
                "limits": QueueLimits(engine=EngineBounds(max_num_seqs=8)),
            }
            | about
        )
    )


def but(of: OperatingPoint, **about: Any) -> OperatingPoint:
    """With other estimates."""
    return replace(of, estimates=replace(of.estimates, **about))


def model(policy: str, **about: Any) -> Queue:
    return made_queue(**({"policy": policy, "output_tokens": LAWFUL, "law": LAW} | about))


# lengths


@pytest.mark.parametrize(("count", "known"), [(49, False), (50, True)])
def test_fifty_lengths_are_known(count: int, known: bool) -> None:
    assert (known_lengths(lengths([5] * count)) is not None) == known


def test_parts_are_every_fifth_and_scatter_more_by_the_root() -> None:
    counts = np.arange(1, 101)
    found = known_lengths(lengths(counts))
    assert found is not None
    assert [part.mean for part in found.parts] == pytest.approx(
        [counts[group::5].mean() for group in range(5)]
    )
    assert found.to_error == pytest.approx(5**-0.5)
    assert (found.known_to, found.reach, found.note) == (math.inf, math.inf, "")
    assert (
        found.clipped_fraction(None),
        found.clipped_fraction(40),
        found.clipped_fraction(1000),
    ) == (0.0, pytest.approx(0.6), 0.0)
    assert found.notes(10**6) == ()
    assert found.refusal(None) is None


def test_beyond_what_is_known_a_family_goes_on_or_nothing_is_said() -> None:
    drawn = parse_distribution("lognormal:mu=3,sigma=0.7", 2000).sample(
        np.random.default_rng(1), 800
    )
    cut = lengths(np.minimum(drawn, 30), drawn >= 30)
    plain, named = known_lengths(cut), known_lengths(cut, "lognormal")
    assert plain is not None
    assert named is not None
    assert (plain.known_to, plain.reach, named.known_to, named.reach) == (
        30.0,
        30.0,
        30.0,
        math.inf,
    )
    said = plain.refusal(31) or ""
    assert said.startswith(
        "nothing is known at the token limit 31: limits so far say no more than how many answers "
        "go beyond 30 tokens; "
    )
    assert "name a family for the longer ones" in said
    assert (plain.refusal(30), named.refusal(None), named.refusal(31)) == (None, None, None)
    assert (plain.notes(30), named.notes(30), named.notes(31)) == ((), (), (named.note,))
    assert (plain.clipped_fraction(30), plain.clipped_fraction(None)) == (None, None)
    assert plain.clipped_fraction(29) == pytest.approx(np.mean(drawn > 29))
    assert named.clipped_fraction(30) == pytest.approx(np.mean(drawn >= 30), abs=0.05)
    assert (len(named.parts), named.to_error) == (8, pytest.approx(7 / math.sqrt(8)))
    assert named.law(10).longest == 10
    assert named.law(None) is named.whole
    with pytest.raises(SpecError, match="did you mean"):
        known_lengths(lengths([1]), "lognorml")


# prices


def test_which_answer_is_exact_and_which_is_simulated() -> None:
    rate = 0.3 * model("single").largest_stable_rate
    for policy, method_precise, method_searched in (
        ("single", "exact", "exact"),
        ("capped:max_batch_size=4", "exact", "simulation"),
        ("continuous:max_batch_size=4", "approximation", "approximation"),
    ):
        assert (precise(model(policy), rate).method, searched(model(policy), rate).method) == (
            method_precise,
            method_searched,
        )
    for price in (precise, searched):
        with pytest.raises(UnstableQueueError):
            price(model("single"), 1.01 * model("single").largest_stable_rate)


@pytest.mark.parametrize(("size", "method"), [(64, "exact"), (65, "simulation")])
def test_batches_of_up_to_sixty_four_are_solved(
    size: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        answer, "predict_model", lambda *given: asked.append(given[2]) or _prediction("exact")
    )
    monkeypatch.setattr(answer, "simulated", lambda *_: _prediction("simulation"))
    assert precise(model(f"capped:max_batch_size={size}"), 1.0).method == method
    assert precise(model("dynamic"), 1.0).method == "simulation"


def _prediction(
    method: str, *notes: str, delay: float = 0.5, sojourn: float = 1.2, error: float | None = None
) -> Prediction:
    return prediction_of(
        effective_max_batch_size=1,
        method=method,
        queueing_delay=Quantiles(delay, standard_error=error),
        sojourn_time=Quantiles(sojourn),
        assumptions=notes,
    )


def test_an_approximation_in_doubt_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "simulated", lambda *_: _prediction("simulation"))
    for note, method in (
        ("approximation in doubt: x", "simulation"),
        ("an approximation", "approximation"),
    ):
        monkeypatch.setattr(
            answer, "predict_model", lambda *_, note=note: _prediction("approximation", note)
        )
        assert precise(model("continuous:max_batch_size=4"), 1.0).method == method


@pytest.mark.parametrize(
    ("found", "quantity", "error"),
    [
        (_prediction("exact"), "queueing_delay", 0.0),
        (_prediction("simulation", error=0.01), "queueing_delay", 0.02),
        (_prediction("simulation", delay=0.0, error=0.01), "queueing_delay", 0.0),
        (_prediction("approximation"), "queueing_delay", 0.04),
        (_prediction("approximation", delay=0.025), "queueing_delay", 0.04),
        (_prediction("approximation", delay=0.023), "queueing_delay", 0.8),
        (_prediction("approximation"), "sojourn_time", math.hypot(0.04 * 0.5 / 1.2, 0.015)),
        (
            _prediction("approximation", delay=0.02),
            "sojourn_time",
            math.hypot(0.8 * 0.02 / 1.2, 0.015),
        ),
        (_prediction("approximation", sojourn=0.0), "sojourn_time", 0.04),
    ],
)
def test_the_error_that_a_method_leaves(found: Prediction, quantity: Any, error: float) -> None:
    """Of the continuous approximation 4 %, of a delay below two hundredths of the sojourn 80 %;
    1.5 % of what follows the dispatch.
    """
    assert own_error(found, quantity) == pytest.approx(error)


@pytest.mark.parametrize("patience", [None, 0.02])
def test_a_rough_answer_is_that_of_one_run(patience: float | None) -> None:
    queue = model("capped:max_batch_size=4", patience=patience)
    rate = 0.8 * queue.largest_stable_rate
    run = simulate_run(queue, rate, 5000, np.random.SeedSequence(0)).after(500)
    kept = ~run.lost
    found = rough(queue, rate, [parse_slo("p90_sojourn_time=1s")], 5000)
    assert found.loss_fraction == pytest.approx(np.mean(run.lost))
    assert (found.loss_fraction > 0) == (patience is not None)
    assert found.queueing_delay.mean == pytest.approx(
        np.where(run.lost, patience or 0.0, run.queueing_delay).mean()
    )
    assert found.served_queueing_delay.mean == pytest.approx(run.queueing_delay[kept].mean())
    assert (found.sojourn_time.mean, found.sojourn_time.p90) == pytest.approx(
        (run.sojourn_time[kept].mean(), np.quantile(run.sojourn_time[kept], 0.9))
    )
    assert (found.queueing_delay.p90, found.sojourn_time.p99) == (None, None)
    assert found.time_to_first_token.mean == pytest.approx(
        (run.first_token_at - run.arrived_at)[kept].mean()
    )
    assert (found.method, found.stable, found.effective_max_batch_size) == ("simulation", True, 4)


def test_a_search_asks_for_a_formula_that_has_the_quantile() -> None:
    queue = model("continuous:max_batch_size=4")
    rate = 0.5 * queue.largest_stable_rate
    assert searched(queue, rate).method == "approximation"
    assert searched(queue, rate, [parse_slo("p99_sojourn_time=1s")]).method == "simulation"
    assert searched(queue, rate, [parse_slo("mean_sojourn_time=1s")]).method == "approximation"
    assert (
        searched(model("single"), rate / 10, [parse_slo("p99_queueing_delay=1s")]).method == "exact"
    )
    assert any(
        "simulated with 100,000 requests" in note
        for note in simulated(model("single"), rate / 10).assumptions
    )


# what a value does with its estimates


def test_what_is_known_of_a_window_bounds_what_is_known_of_a_setting() -> None:
    of = operating_point()
    assert (of.rate, of.effective_n) == (of.estimates.arrival_rate.value, 500.0)
    assert [
        log_half_width(each)
        for each in (symmetric(4.0, 1.0, 9.0), UNKNOWN, symmetric(0.0, 1.0, 9.0))
    ] == [0.25, 2.0, 2.0]
    assert (
        but(of, arrival_rate=symmetric(0.0, 0.1, 9.0)).refusal(None)
        == "nothing arrived in the window: there is no rate to forecast at"
    )
    few = but(of, output_tokens=lengths([5] * 9))
    assert (
        few.refusal(None)
        == "nothing is known of the lengths yet: got 9 answers, expected at least 50"
    )
    assert few.forecast(FOUR).notes == (few.refusal(None),)
    assert of.refusal(None) is None


def test_a_continuous_window_has_the_calibrated_residual() -> None:
    assert operating_point().law.cv == operating_point().estimates.cv.value
    assert but(operating_point(), policy="continuous", cv=symmetric(0.0, 0.0, 9.0)).law.cv == LAW.cv


def test_a_response_has_the_directions_of_every_estimate() -> None:
    """Slopes by a step of a twentieth downwards at common random numbers, residual at its upper
    end, lengths by their parts.
    """
    of = operating_point(0.5)
    base, rate = (
        of.sensitivity.evaluated(FOUR, DELAY),
        of.sensitivity.evaluated(FOUR, DELAY, rate=1 - STEP),
    )
    found = of.sensitivity.response(FOUR, DELAY)
    assert (found.load, found.pole, found.needs_stability) == (base.load, True, True)
    assert found.loads[:5].tolist() == pytest.approx([0.01, 0.005, 0.0, 0.0, 0.0])
    per_rate = math.log(base.value * (1 - base.load) / (rate.value * (1 - rate.load))) / -math.log(
        0.95
    )
    assert found.smooth[0] == pytest.approx(0.01 * per_rate, rel=1e-4)
    speed = of.sensitivity.evaluated(FOUR, DELAY, speed=1 - STEP)
    per_speed = math.log(
        base.value * (1 - base.load) / (speed.value * (1 - speed.load))
    ) / -math.log(0.95)
    assert found.smooth[1] == pytest.approx(0.005 * per_speed, rel=1e-4)
    wider = of.sensitivity.evaluated(FOUR, DELAY, law=replace(of.law, cv=0.16))
    assert found.smooth[2] == pytest.approx(math.log(wider.value / base.value), rel=1e-4)
    assert found.smooth[3:5].tolist() == [0.0, 0.0]
    assert of.lengths is not None
    heavier = [of.model(FOUR, part).load(of.rate) / base.load for part in of.lengths.parts]
    scale = stats.t.ppf(0.975, 4) * 5**-0.5 / 2
    logs = np.log(heavier)
    assert found.loads[5:] == pytest.approx(scale * (logs - logs.mean()))
    parts = [
        of.sensitivity.evaluated(FOUR, DELAY, rate=1 / each, whole=part)
        for each, part in zip(heavier, of.lengths.parts, strict=True)
    ]
    smooth = np.array(
        [
            math.log(each.value * (1 - each.load)) + per_rate * log
            for each, log in zip(parts, logs, strict=True)
        ]
    )
    assert found.smooth[5:] == pytest.approx(scale * (smooth - smooth.mean()), rel=1e-3, abs=1e-6)
    assert of.sensitivity.response(FOUR, DELAY) is found
    assert (
        operating_point(limits=QueueLimits(patience=9.0, engine=EngineBounds(max_num_seqs=8)))
        .sensitivity.response(FOUR, DELAY)
        .pole
        is False
    )


def test_another_rate_or_speed_is_asked_of_the_model_there() -> None:
    of = operating_point(0.5)
    assert of.sensitivity.evaluated(FOUR, DELAY, rate=0.8).load == pytest.approx(
        0.8 * of.sensitivity.evaluated(FOUR, DELAY).load
    )
    assert of.sensitivity.evaluated(FOUR, DELAY, speed=0.8).load == pytest.approx(
        0.8 * of.sensitivity.evaluated(FOUR, DELAY).load
    )
    assert (
        of.sensitivity.at_rate(FOUR, DELAY, 0.8)
        == of.sensitivity.evaluated(FOUR, DELAY, rate=0.8).value
        < of.sensitivity.at_rate(FOUR, DELAY, 1.0)
    )


def test_the_residual_counts_where_it_may_be_larger() -> None:
    of = operating_point()
    base = of.sensitivity.evaluated(FOUR, DELAY)
    vague = but(of, cv=symmetric(0.15, 0.3, 9.0))

    def by_residual(point: OperatingPoint, setting: Setting) -> float:
        return float(point.sensitivity.response(setting, DELAY).smooth[2])

    assert by_residual(vague, FOUR) == pytest.approx(
        math.log(
            of.sensitivity.evaluated(FOUR, DELAY, law=replace(of.law, cv=0.45)).value / base.value
        ),
        rel=1e-4,
    )
    assert by_residual(vague, FOUR) > 0
    assert by_residual(vague, SLOTS) == 0.0
    assert by_residual(but(of, cv=UNKNOWN), FOUR) == 0.0


@pytest.mark.parametrize("count", [1, 4, 100])
def test_what_stalls_add_is_known_by_the_root_of_their_number(count: int) -> None:
    of = but(operating_point(0.4), stalls=Stalls(count, 0.05, 1.0, None, 0.5))
    base = of.sensitivity.evaluated(FOUR, DELAY, law=of.law)
    calm = of.sensitivity.evaluated(FOUR, DELAY, stalling=False)
    assert calm.value < 0.8 * base.value
    assert of.sensitivity.response(FOUR, DELAY).smooth[3] == pytest.approx(
        NORMAL * (1 - calm.value / base.value) / math.sqrt(count)
    )
    assert operating_point(0.4).sensitivity.response(FOUR, DELAY).smooth[3] == 0.0


@pytest.mark.parametrize(("share", "named"), [(0.0098, False), (0.0103, True)])
def test_a_backlog_of_a_hundredth_of_the_sojourn_is_named(share: float, named: bool) -> None:
    of = operating_point(0.4)
    sojourn = of.predicted(SLOTS).sojourn_time.mean or 0.0
    load, busy = of.model(SLOTS).load(of.rate), utilisation_of(of.model(SLOTS), of.rate)
    size = share * sojourn * 2 * (1 - load) / busy / 0.001
    stalling = but(of, stalls=Stalls(3, 0.001, 1.0, None, size))
    backlog = stalling.backlog(stalling.model(SLOTS), stalling.rate)
    assert backlog == pytest.approx(share * sojourn)
    found = stalling.forecast(SLOTS)
    assert found.prediction is not None
    behind = found.prediction.sojourn_time.mean or 0.0
    assert behind == pytest.approx(sojourn + backlog)
    assert bool(found.notes) == (backlog > 0.01 * behind) == named
    assert stalling.forecast(FOUR).notes == (), "its law holds them"


# what is reported


def told(values: dict[int, float]) -> Any:
    """An operating point whose predictions of a batch size have that mean delay; without one they
    have no steady state.
    """

    def predicted(setting: Setting, *_: Any) -> Prediction:
        size = parse_policy(setting.policy).max_batch_size  # type: ignore[attr-defined]
        if size not in values:
            raise UnstableQueueError(1.5)
        return _prediction("exact", delay=values[size], sojourn=2 * values[size])

    of: Any = dataclasses.replace(operating_point())
    object.__setattr__(of, "predicted", predicted)
    return of


def sized(size: int) -> Setting:
    return Setting(policy=f"capped:max_batch_size={size}")


SLO = Objective(name="slo", slo=parse_slo("mean_queueing_delay=1s"))


def test_an_slo_is_kept_by_the_value_that_is_reported() -> None:
    of = told({1: 0.999, 2: 1.0, 3: 1.001})
    assert [of.reported(sized(size), Criterion(SLO)) for size in (1, 2, 3)] == [0.999, 1.0, 1.001]
    assert [of.keeps_slo(sized(size), SLO) for size in (1, 2, 3, 4)] == [True, True, False, False]
    assert (
        of.reported_slos(sized(4), SLO),
        of.reported_slos(sized(1), Objective(name="delay")),
    ) == ([math.inf], [])
    assert of.keeps_slo(sized(4), Objective(name="delay"))


def test_a_choice_that_breaks_the_slo_when_it_is_reported_gives_way_to_the_next() -> None:
    scores: dict[int, float | None] = {3: 0.3, 2: 0.5, 1: 0.9, 4: None}
    same = {"sojourn_time": 1.0, "load": 0.5}
    curve = [
        same | {"size": size, "score": score, "queueing_delay": score or 1.4}
        for size, score in scores.items()
    ]

    def of(values: dict[int, float], current: int) -> tuple[int, Any]:
        optimum = Optimum("batch-size", "slo", curve[0], curve, compared="queueing_delay")
        found = AdviceSearch(told(values), sized(current), SLO).verified(
            optimum, lambda each: sized(each["size"])
        )
        assert found.setting is not None
        size = parse_policy(found.setting.policy).max_batch_size  # type: ignore[attr-defined]
        return size, next(each["score"] for each in found.curve if each["size"] == current)

    assert of({1: 0.9, 2: 0.5, 3: 0.3, 4: 1.4}, 1) == (3, 0.9)
    assert of({1: 0.9, 2: 0.5, 3: 1.1, 4: 1.4}, 1) == (2, 0.9)
    assert of({1: 0.9, 2: 1.2, 3: 1.1, 4: 1.4}, 1) == (1, 0.9)
    assert of({1: 0.9, 2: 0.5, 3: 0.3, 4: 0.8}, 4) == (3, 1.4), "what is in force counts by its own"
    assert of({1: 0.9, 2: 0.5, 3: 1.3, 4: 0.8}, 3) == (2, None)
    plain = Optimum("batch-size", "delay", curve[0], curve, compared="queueing_delay")
    found = AdviceSearch(told({}), sized(1), Objective(name="delay")).verified(
        plain, lambda _: sized(1)
    )
    assert (found.setting, found.curve) == (sized(1), tuple(curve))


@pytest.mark.parametrize("start", [1, 30, 64, 100])
@pytest.mark.parametrize("last", [0, 1, 29, 30, 31, 63, 64, 65, 99, 100])
def test_the_largest_that_keeps_is_found_in_few_questions(start: int, last: int) -> None:
    asked: list[int] = []

    def keeps(number: int) -> bool:
        asked.append(number)
        return number <= last

    assert largest_kept(keeps, start, 1, 100) == (last or None)
    assert len(asked) <= 16
    assert all(1 <= number <= 100 for number in asked)
