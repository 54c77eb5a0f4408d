"""A choice: ties, searches, thinned curves, limits, sentences and the words of an optimisation."""

from __future__ import annotations

import dataclasses
import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.advice.searches import (
    SHOWN,
    AdviceSearch,
    measure_of,
    search,
    thinned,
)
from kendall.queueing.choosing.advice.sentence import knob_text, sentence
from kendall.queueing.choosing.advice.what_if import usual_token_limits
from kendall.queueing.choosing.candidates import (
    at_sizes,
    sized_policy,
    usual_policies,
    usual_sizes,
    with_size,
)
from kendall.queueing.choosing.choices import best_batch_size, scored
from kendall.queueing.choosing.forecast import Advice, Forecast, Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.search import (
    Optimum,
    choose,
    near_scores,
    near_sojourns,
    point_of,
    refined,
)
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.choosing.token_limit import REFINED, best_token_limit
from kendall.queueing.choosing.words import judged_by_slo, legend, result_line
from kendall.queueing.commands.optimize_cli import print_optimum
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.errors import NoStableChoiceError, UnstableQueueError
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantiles
from tests.queueing.assessed_windows import LAW, LAWFUL, seen
from tests.queueing.made import prediction_of

DELAY, THROUGHPUT = Objective(name="delay"), Objective(name="throughput")
P99 = parse_slo("p99_queueing_delay=2s")
SLO = Objective(name="slo", slo=P99)


def point(
    choice: int, score: float | None, sojourn: float | None = 1.0, **about: Any
) -> dict[str, Any]:
    return {
        "batch_size": choice,
        "score": score,
        "sojourn_time": sojourn,
        "load": 0.5,
        "stable": score is not None,
    } | about


# ties


@pytest.mark.parametrize(("other", "near"), [(2.0019, True), (2.0021, False)])
def test_scores_within_a_thousandth_are_one(other: float, near: bool) -> None:
    assert len(near_scores([point(1, 2.0), point(2, other)])) == 1 + near
    assert len(near_scores([point(1, -2.0), point(2, -2.0 + other - 2.0)])) == 1 + near


@pytest.mark.parametrize(("other", "near"), [(0.9e-6, True), (1.1e-6, False)])
def test_delays_within_a_millionth_of_the_sojourn_are_one(other: float, near: bool) -> None:
    assert len(near_scores([point(1, 0.0), point(2, other)])) == 1 + near
    assert len(near_scores([point(1, 0.0, 9.0), point(2, other, 1.0)])) == 1 + near, (
        "of the shortest sojourn"
    )
    assert len(near_scores([point(1, 0.0, None), point(2, other, None)])) == 1


@pytest.mark.parametrize(("other", "first"), [(0.9991, 1), (0.9989, 2)])
def test_of_near_scores_the_shortest_sojourn_decides_and_then_the_first(
    other: float, first: int
) -> None:
    curve = [point(1, 2.0, 1.0), point(2, 2.001, other), point(3, 9.0, 0.1)]
    assert near_sojourns(curve[:2])[0]["batch_size"] == first
    assert choose("batch-size", DELAY, curve, by_sojourn=True).best["batch_size"] == first
    assert choose("batch-size", DELAY, curve).best["batch_size"] == 1
    assert choose("batch-size", DELAY, [point(4, 1.0), point(2, 1.0)]).best["batch_size"] == 4, (
        "the first of equal ones"
    )


def test_no_choice_says_how_many_were_tried_and_the_least_load() -> None:
    broken = [point(1, None, stable=True, load=0.8), point(2, None, load=1.2)]
    words = "tried 2 choices of batch-size: none keeps the constraint p99_queueing_delay=2"
    with pytest.raises(NoStableChoiceError, match=words) as caught:
        choose("batch-size", SLO, broken)
    assert caught.value.load == 0.8
    with pytest.raises(NoStableChoiceError, match="tried 1 choice of batch-size: none is stable"):
        choose("batch-size", DELAY, broken[1:])
    assert [Objective(name="clipped", max_clipped_fraction=0.2).constraint, DELAY.constraint] == [
        "max_clipped_fraction=0.2",
        "of the objective",
    ]


# searches


@pytest.mark.parametrize("valley", [1, 2, 37, 500, 999, 1000])
def test_a_grid_that_is_refined_finds_the_valley(valley: int) -> None:
    tried: list[int] = []

    def score(number: int) -> float | None:
        tried.append(number)
        return None if number > 998 and valley < 900 else abs(math.log(number / valley))

    order = refined(1, 1000, score)
    assert sorted(tried) == list(order)
    assert valley in tried
    assert len(set(tried)) == len(tried) < 60


def test_a_grid_is_refined_between_the_neighbours_of_its_best_in_six_parts() -> None:
    """Eight numbers; then 19 to 139 about 52, 19 to 52 about 39, 30 to 39 about 36, 36 to 39."""
    tried: list[int] = []

    def score(number: int) -> float:
        tried.append(number)
        return abs(number - 37.2)

    refined(1, 1000, score, first=8)
    assert tried[:8] == [1, 3, 7, 19, 52, 139, 373, 1000]
    assert tried[8:13] == [39, 59, 79, 99, 119]
    assert tried[13:18] == [24, 30, 36, 41, 46]
    assert tried[18:] == [32, 33, 34, 38, 37]


def test_a_short_range_is_tried_whole_and_one_without_a_choice_once() -> None:
    assert list(refined(3, 9, lambda number: abs(number - 8.0))) == [3, 4, 5, 6, 7, 8, 9]
    assert list(refined(1, 1000, lambda _: None, first=8)) == [1, 3, 7, 19, 52, 139, 373, 1000]


def test_an_unstable_choice_has_its_load_and_no_more() -> None:
    queue = Queue.read("single", LAWFUL, LAW)

    def unstable(*_: Any) -> Prediction:
        raise UnstableQueueError(1.5)

    found, prediction = point_of({"servers": 1}, queue, 2 * queue.largest_stable_rate, unstable)
    assert (found, prediction) == (
        {"servers": 1, "load": pytest.approx(2.0), "stable": False, "score": None},
        None,
    )
    assert point_of({}, queue, 0.5 * queue.largest_stable_rate)[0]["stable"]


def test_throughput_scores_by_the_stable_rate_where_the_choice_is_stable() -> None:
    queue = Queue.read("capped:max_batch_size=4", LAWFUL, LAW)
    rate = queue.largest_stable_rate
    for at, stable in ((None, True), (0.999 * rate, True), (rate, False)):
        found = scored({}, queue, at, THROUGHPUT)
        assert (found["stable"], found["score"], found["largest_stable_rate"]) == (
            stable,
            -rate if stable else None,
            rate,
        )
    assert scored({}, queue.but(patience=1.0), 2 * rate, THROUGHPUT)["stable"]


@pytest.mark.parametrize(("largest", "count"), [(32, 32), (33, None)])
def test_up_to_32_batch_sizes_are_all_tried_and_under_an_slo_any_number(
    largest: int, count: int | None
) -> None:
    queue = Queue.read("capped:max_batch_size=4", parse_distribution("deterministic:value=8"), LAW)
    found = best_batch_size(queue, None, THROUGHPUT, largest)
    assert len(found.curve) == count or (count is None and len(found.curve) < largest)
    assert found.note == f"the throughput still rises at {largest}: no finite optimum up to there"
    assert (found.best["batch_size"], found.compared) == (largest, None)


def test_a_throughput_with_an_optimum_has_no_note() -> None:
    """Each member makes all steps longer, and a set-up is shared: the best is not the largest of
    20.
    """
    law = LatencyModel(k1=0.1, k2=0.05, k3=1e-3, k4=1e-3)
    found = best_batch_size(
        Queue.read("capped:max_batch_size=4", LAWFUL, law),
        None,
        THROUGHPUT,
        20,
    )
    rates = {each["batch_size"]: each["largest_stable_rate"] for each in found.curve}
    assert found.best["batch_size"] == max(rates, key=lambda size: rates[size])
    assert (found.note is None) == (found.best["batch_size"] < 20)


@pytest.mark.parametrize(
    ("text", "sized"),
    [
        ("fixed:batch_size=2,max_wait=3", "batch_size"),
        ("capped:max_batch_size=2", "max_batch_size"),
    ],
)
def test_a_batch_size_is_turned_under_its_own_name(text: str, sized: str) -> None:
    assert getattr(with_size(parse_policy(text), 7), sized) == 7
    with pytest.raises(SpecError, match="they have a batch size"):
        with_size(parse_policy("dynamic"), 7)


def test_every_limit_of_a_stalling_machine_scores_as_prediction_does() -> None:
    """At another speed, with prompts, a residual and stalls."""
    law = LatencyModel(
        k1=1e-3, k2=2e-3, k3=1e-4, k4=1e-3, kp=1e-5, cv=0.2, speed=1.5, stall_share=0.05, stall=0.2
    )
    short = parse_distribution("uniform:low=1,high=32")
    queue = Queue.read(
        "single", short, law, prompt_tokens=parse_distribution("uniform:low=5,high=40")
    )
    for name in ("delay", "throughput"):
        found = best_token_limit(queue, 15.0, Objective(name=name))
        for each in found.curve[4::9]:
            limit = each["max_output_tokens"]
            there = queue.but(output_tokens=short.clip(limit))
            exact = predict_model(there, 15.0)
            assert each["queueing_delay"] == pytest.approx(exact.queueing_delay.mean, rel=1e-9)
            assert each["sojourn_time"] == pytest.approx(exact.sojourn_time.mean, rel=1e-9)
            assert each["load"] == pytest.approx(exact.load)
            assert each["score"] == pytest.approx(
                each["queueing_delay"] if name == "delay" else -there.largest_stable_rate
            )
            assert each["clipped_fraction"] == pytest.approx(short.survival[limit])
        assert [each["max_output_tokens"] for each in found.curve] == list(range(1, 33))
        assert found.compared == ("queueing_delay" if name == "delay" else None)


def told(model: Queue, _: float) -> Prediction:
    """A millisecond of delay a token, of the served four fifths of it, a tenth is lost."""
    delay = model.requests.output_tokens.mean / 1000
    return prediction_of(
        effective_max_batch_size=2,
        queueing_delay=Quantiles(delay),
        served_queueing_delay=Quantiles(0.8 * delay),
        sojourn_time=Quantiles(2 * delay),
        loss_fraction=0.1,
    )


@pytest.mark.parametrize(("name", "score"), [("delay", 0.0), ("v1", -0.25), ("v2", 0.05)])
def test_where_nobody_waits_no_delay_is_weighed(name: str, score: float) -> None:
    """The whole utility of the longest limit, and of v2 a tenth that is lost."""

    def at_once(model: Queue, arrival_rate: float) -> Prediction:
        none = Quantiles(0.0)
        return replace(told(model, arrival_rate), queueing_delay=none, served_queueing_delay=none)

    queue = Queue.read(
        "capped:max_batch_size=2", parse_distribution("uniform:low=1,high=8"), LAW, patience=1.0
    )
    found = best_token_limit(
        queue, 1.0, Objective(name=name, theta=0.25, loss_cost=3.0), predict=at_once
    )
    (whole,) = (each for each in found.curve if each["max_output_tokens"] == 8)
    assert whole["score"] == pytest.approx(score)


@pytest.mark.parametrize("name", ["delay", "clipped", "throughput", "v1", "v2", "slo"])
def test_limits_that_are_predicted_one_by_one_score_by_their_objective(name: str) -> None:
    short = parse_distribution("uniform:low=1,high=32")
    slo = parse_slo("mean_queueing_delay=10ms") if name == "slo" else None
    objective = Objective(name=name, theta=0.25, loss_cost=3.0, max_clipped_fraction=0.25, slo=slo)
    queue = Queue.read("capped:max_batch_size=2", short, LAW, patience=1.0)
    found = best_token_limit(queue, 1.0, objective, predict=told)
    for each in found.curve:
        limit = each["max_output_tokens"]
        delay = short.clip(limit).mean / 1000
        kept = sum(
            short.pmf[length] * min(1.0, limit / length) for length in range(1, short.longest + 1)
        )
        expected = {
            "delay": delay,
            "clipped": delay if short.survival[limit] <= 0.25 else None,
            "throughput": -queue.but(output_tokens=short.clip(limit)).largest_stable_rate,
            "v1": -(0.25 * kept - 0.75 * delay),
            "v2": -(0.25 * kept - 0.75 * 0.8 * delay - 0.3),
            "slo": -float(limit) if delay <= 0.01 else None,
        }[name]
        assert each["score"] == (None if expected is None else pytest.approx(expected))
        assert (each["utility"], each["clipped_fraction"]) == pytest.approx(
            (kept, short.survival[limit])
        )
    scores = [each["score"] for each in found.curve if each["score"] is not None]
    assert found.best["score"] == min(scores)
    assert found.note == (None if len(found.curve) == 32 else REFINED)
    assert found.compared == ("queueing_delay" if name in ("delay", "clipped") else None)
    bounded = best_token_limit(queue, 1.0, objective, 30, told)
    assert max(each["max_output_tokens"] for each in bounded.curve) == 30


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=2"])
@pytest.mark.parametrize(("most", "least"), [(0.5, 2), (0.499, 3), (0.25, 3), (0.0, 4)])
def test_a_limit_may_cut_as_many_answers_as_are_allowed(
    policy: str, most: float, least: int
) -> None:
    """Of 1 to 4 tokens: limits of 1 to 4 cut three quarters, a half, a quarter and none."""
    queue = Queue.read(policy, parse_distribution("uniform:low=1,high=4"), LAW)
    rate = 0.5 * queue.largest_stable_rate
    found = best_token_limit(queue, rate, Objective(name="clipped", max_clipped_fraction=most))
    assert found.best["max_output_tokens"] == least
    assert [each["max_output_tokens"] for each in found.curve if each["score"] is not None] == list(
        range(least, 5)
    )


def test_a_bisection_of_the_rate_is_as_precise_as_it_is_asked_to_be() -> None:
    """M/G/1: the mean delay r m2 / (2 (1 - r m)) is 50 ms at a known rate."""
    queue = Queue.read("single", parse_distribution("deterministic:value=1"), LatencyModel(k4=0.1))
    exact = 0.05 / (0.05 * 0.1 + 0.01 / 2)
    for precision in (1e-3, 1e-6):
        found = largest_rate(
            queue, Objective(name="slo", slo=parse_slo("mean_queueing_delay=50ms")), precision
        )
        assert exact * (1 - precision) <= found.best["arrival_rate"] <= exact
        assert found.best["score"] == pytest.approx(-found.best["load"])
    easy = largest_rate(queue, Objective(name="slo", slo=parse_slo("mean_queueing_delay=1h")))
    assert easy.note == "the SLO still holds at load 0.999, the largest that was tried"
    assert easy.best["load"] == pytest.approx(0.999)
    with pytest.raises(SpecError, match="expected throughput or slo"):
        largest_rate(queue, DELAY)
    impatient = queue.but(patience=0.05)
    with pytest.raises(SpecError, match="no request waits longer"):
        largest_rate(impatient, Objective(name="slo", slo=parse_slo("mean_queueing_delay=50ms")))
    assert "load 16" in (
        largest_rate(impatient, Objective(name="slo", slo=parse_slo("mean_sojourn_time=1h"))).note
        or ""
    )


def test_the_fewest_servers_are_above_the_load_in_whole_servers() -> None:
    asked: list[int] = []

    def predict(model: Queue, rate: float) -> Prediction:
        asked.append(model.engine.servers)
        return dataclasses.replace(
            predict_model(
                model.but(servers=1), 0.5 * model.largest_stable_rate / model.engine.servers
            ),
            load=0.0,
        )

    queue = Queue.read("single", parse_distribution("deterministic:value=1"), LatencyModel(k4=0.1))
    easy = Objective(name="slo", slo=parse_slo("mean_queueing_delay=1h"))
    for rate, first in ((9.0, 1), (10.0, 2), (25.0, 3), (29.9, 3)):
        asked.clear()
        assert fewest_servers(queue, rate, easy, 8, predict).best["servers"] == first
        assert asked[0] == first


# curves, limits, targets


@pytest.mark.parametrize(("size", "every"), [(79, 1), (80, 2), (119, 2), (120, 3)])
def test_a_curve_shows_some_forty_points_and_the_best(size: int, every: int) -> None:
    curve = [point(number, float(number)) for number in range(size)]
    found = thinned(Optimum("batch-size", "delay", curve[7], curve))
    assert SHOWN == 40
    assert [each["batch_size"] for each in found] == [
        number for number in range(size) if number % every == 0 or number == 7
    ]


def test_a_limit_that_would_cut_nothing_is_none() -> None:
    free, limited = Setting(policy="single"), Setting(policy="single", max_output_tokens=50)
    of_free, of_limited = (AdviceSearch(operating_point(), each, DELAY) for each in (free, limited))
    assert [of_free.limited(limit, 100).max_output_tokens for limit in (99, 100, 101)] == [
        99,
        None,
        None,
    ]
    assert [of_limited.limited(limit, 100).max_output_tokens for limit in (99, 100)] == [99, 100]


def operating_point(**about: Any) -> OperatingPoint:
    assessed = seen(0.0, Setting(policy="dynamic"), 10.0)
    return OperatingPoint(
        **(
            {
                "estimates": assessed.estimates,
                "shape": LAW,
                "limits": QueueLimits(engine=EngineBounds(max_num_seqs=16)),
            }
            | about
        )
    )


@pytest.mark.parametrize(("load", "servers"), [(15.5, 16), (16.5, None)])
def test_sixteen_servers_are_the_most_that_are_advised(load: float, servers: int | None) -> None:
    current = Setting(policy="single")
    rate = load * operating_point().model(current).largest_stable_rate
    busy = operating_point(estimates=seen(0.0, current, rate).estimates)
    goal = Objective(name="slo", slo=parse_slo("mean_queueing_delay=1h"))
    found = search(busy, current, goal, "servers").setting
    assert (None if found is None else found.servers) == servers


def test_what_the_choices_of_a_target_are_compared_by() -> None:
    one = Setting(policy="capped:max_batch_size=8")
    v1 = Objective(name="v1")

    def of(objective: Objective, target: str, best: Setting = one) -> Criterion:
        return measure_of(operating_point(), (one, best), objective, target)

    assert of(DELAY, "policy") == Criterion(DELAY, "sojourn_time")
    assert of(DELAY, "policy", Setting(policy="single")) == Criterion(DELAY, "sojourn_time")
    assert of(DELAY, "policy", Setting(policy="dynamic")) == Criterion(DELAY, "queueing_delay"), (
        "as the autopilot compares these two"
    )
    assert of(DELAY, "batch-size") == Criterion(DELAY, "queueing_delay")
    assert of(v1, "batch-size") == Criterion(DELAY, "queueing_delay")
    assert of(v1, "max-output-tokens") == Criterion(v1, "queueing_delay")
    assert of(SLO, "servers") == Criterion(SLO, "queueing_delay")
    sojourn = Objective(name="slo", slo=parse_slo("mean_sojourn_time=2s"))
    assert of(sojourn, "max-output-tokens") == Criterion(sojourn, "sojourn_time")
    assert [
        each.at_a_limit for each in (DELAY, THROUGHPUT, SLO, v1, Objective(name="clipped"))
    ] == [DELAY, THROUGHPUT, SLO, DELAY, DELAY]


@pytest.mark.parametrize(
    ("policy", "most", "size"),
    [
        ("dynamic", None, 8),
        ("dynamic", 4, 4),
        ("single", 16, 8),
        ("capped:max_batch_size=6", 16, 6),
        ("capped:max_batch_size=6", 5, 5),
    ],
)
def test_the_usual_policies_have_one_size(policy: str, most: int | None, size: int) -> None:
    found = usual_policies(Setting(policy=policy), most)
    expected = {
        "single",
        "dynamic",
        f"fixed:batch_size={size}",
        *(f"{name}:max_batch_size={size}" for name in ("elastic", "continuous")),
    }
    assert set(found) == expected | {
        policy if policy.startswith("capped") else f"capped:max_batch_size={size}"
    }


def test_the_usual_limits_are_quantiles_as_far_as_they_are_known() -> None:
    def of(*given: Any) -> OperatingPoint:
        return operating_point(
            estimates=replace(operating_point().estimates, output_tokens=lengths(*given))
        )

    assert usual_token_limits(of(range(1, 101))) == (50, 75, 90)
    assert usual_token_limits(of([5] * 100)) == (5,)
    assert usual_token_limits(of([5] * 60 + [9] * 40, [False] * 60 + [True] * 40)) == (5,)
    assert usual_token_limits(of([5] * 49)) == ()


@pytest.mark.parametrize(
    ("policy", "most", "sizes", "found"),
    [
        ("dynamic", 16, None, [4, 8, 16]),
        ("dynamic", 15, None, [4, 8]),
        ("capped:max_batch_size=3", None, None, [1, 6, 12]),
        ("capped:max_batch_size=1", 4, None, [2, 4]),
        ("capped:max_batch_size=3", 9, (0, 1, 9, 10), [1, 9]),
        ("single", 16, None, []),
    ],
)
def test_other_batch_sizes_are_half_twice_and_four_times(
    policy: str, most: int | None, sizes: Any, found: list[int]
) -> None:
    current = Setting(policy=policy)
    asked = usual_sizes(current, most) if sizes is None else at_sizes(current, sizes, most)
    assert asked == [f"capped:max_batch_size={size}" for size in found]
    assert (sized_policy(parse_policy(policy)) is None) == (policy == "single")


# sentences


def forecast(
    policy: str = "capped:max_batch_size=8",
    *,
    stable: bool = True,
    cut: float | None = 0.02,
    **about: Any,
) -> Forecast:
    answer = prediction_of(queueing_delay=Quantiles(0.0125, p99=1.0))
    return Forecast(
        setting=Setting(policy=policy, **about),
        load=0.5 if stable else 1.25,
        prediction=answer if stable else None,
        mean=UNKNOWN,
        clipped_fraction=cut,
    )


def said(
    target: str,
    now: Forecast,
    best: Forecast,
    *,
    gain: tuple[float, float, float] = (0.4, 0.3, 0.5),
    objective: Objective = DELAY,
    measure: Criterion | None = None,
    values: tuple[float | None, float | None] = (2.0, 1.2),
    **about: Any,
) -> str:
    found = Advice(
        target=target,
        objective=objective.name,
        current=now,
        best=best,
        gain=Estimate(*gain, 9.0),
        curve=(),
        says="",
    )
    return sentence(found, best, objective, measure or Criterion(objective), values, **about)


SIX = forecast("capped:max_batch_size=6")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (
            "set capped:max_batch_size=6 instead of capped:max_batch_size=8: mean queueing delay "
            "2 s -> 1.2 s, 40 % less (95 %: 30 to 50 % less)",
            ("batch-size", forecast(), SIX),
        ),
        (
            "capped:max_batch_size=8 is the best choice already: mean queueing delay 2 s",
            ("batch-size", forecast(), forecast()),
        ),
        (
            "set capped:max_batch_size=6: mean queueing delay without bound -> 1.2 s; what is in "
            "force cannot be forecast",
            ("batch-size", replace(forecast(), prediction=None, load=0.9), SIX),
        ),
        (
            "set capped:max_batch_size=6: the current capped:max_batch_size=8 has no steady state "
            "(load 1.25); mean queueing delay without bound -> 1.2 s",
            ("batch-size", forecast(stable=False), SIX),
        ),
        (
            "one more server (2): mean queueing delay 2 s -> 1.2 s, 40 % less (95 %: 30 to 50 % "
            "less); without an SLO more is always faster",
            ("servers", forecast(), forecast(servers=2)),
        ),
        (
            "set the token limit 96 instead of no token limit: mean queueing delay 2 s -> 1.2 s, "
            "40 % less (95 %: 30 to 50 % less); cuts 3 % of the answers, now 0 %",
            ("max-output-tokens", forecast(cut=0.0), forecast(cut=0.03, max_output_tokens=96)),
        ),
        (
            "the token limit 96 is the best choice already: mean queueing delay 2 s; cuts 3 % of "
            "the answers",
            (
                "max-output-tokens",
                forecast(cut=0.03, max_output_tokens=96),
                forecast(cut=0.03, max_output_tokens=96),
            ),
        ),
    ],
)
def test_each_kind_of_advice_has_its_sentence(words: str, given: tuple[Any, ...]) -> None:
    values = (None, 1.2) if "without bound" in words else (2.0, 1.2)
    assert said(*given, values=values) == words


def test_an_slo_changes_the_sentence() -> None:
    fewer = said("servers", forecast(servers=3), forecast(servers=2), objective=SLO)
    assert fewer == (
        "2 servers is enough in place of 3 servers: p99 of the queueing delay 2 s -> 1.2 s, "
        "within 2 s"
    )
    broken, why = (
        Objective(name="slo", slo=parse_slo("p99_queueing_delay=900ms")),
        "breaks the SLO p99_queueing_delay=0.9 (predicted 1 s)",
    )
    text = said("batch-size", forecast(), SIX, objective=broken)
    assert text.startswith(
        f"set capped:max_batch_size=6: the current capped:max_batch_size=8 {why}; p99 of the "
        "queueing delay 2 s"
    )
    held = said("batch-size", forecast(), forecast(), objective=broken)
    assert held.startswith(f"capped:max_batch_size=8 is the best choice already, though it {why}: ")
    small = said("batch-size", forecast(), SIX, objective=SLO, gain=(0.1, -0.1, 0.2))
    assert small == (
        "capped:max_batch_size=8 meets the SLO; no change is worth making: p99 of the queueing "
        "delay 2 s with capped:max_batch_size=8, 1.2 s with capped:max_batch_size=6; the gain is "
        "uncertain and may be none"
    )


def test_a_limit_that_cuts_too_much_is_said_where_the_limit_is_what_is_chosen() -> None:
    """A fifth of the answers, where a twentieth may be."""
    now = forecast(cut=0.2, max_output_tokens=8)
    cuts = "cuts 20.0% of the answers, more than 5.0%"
    assert said("max-output-tokens", now, forecast(cut=0.03, max_output_tokens=96)).startswith(
        f"set the token limit 96: the current the token limit 8 {cuts}; "
    )
    assert said("max-output-tokens", now, now).startswith(
        f"the token limit 8 is the best choice already, though it {cuts}: "
    )
    six = forecast("capped:max_batch_size=6", cut=0.2, max_output_tokens=8)
    for target in ("batch-size", "policy"):
        assert said(target, now, six).startswith("set capped:max_batch_size=6 instead of ")


def test_delays_stand_beside_sojourns_and_notes_behind_all() -> None:
    best = replace(forecast("elastic"), notes=("extrapolated: x", "y"))
    text = said("policy", forecast(), best, measure=Criterion(DELAY, "sojourn_time"))
    assert text.endswith("; mean queueing delay 12.5 ms -> 12.5 ms; extrapolated: x; y")
    assert "mean sojourn time 2 s -> 1.2 s" in text
    plain = said(
        "policy",
        forecast(),
        best,
        measure=Criterion(Objective(name="v1"), "sojourn_time"),
        values=(0.5, 0.25),
    )
    assert "shortfall of V1 0.5 -> 0.25" in plain
    assert "12.5 ms" not in plain
    assert [knob_text(Setting(policy="single", servers=count), "servers") for count in (1, 2)] == [
        "1 server",
        "2 servers",
    ]


@pytest.mark.parametrize(
    ("gain", "worth"),
    [((0.005, 0.005, 0.2), True), ((0.2, 0.0049, 0.3), False), ((0.0049, 0.2, 0.3), False)],
)
def test_half_a_per_cent_at_the_lower_end_is_worth_a_change(
    gain: tuple[float, float, float], worth: bool
) -> None:
    assert ("no change is worth making" in said("batch-size", forecast(), SIX, gain=gain)) != worth
    text = said("servers", forecast(), forecast(servers=2), gain=gain)
    assert text.startswith("one more server" if worth else "no change is worth making")


# words of an optimisation


def optimum(
    target: str,
    objective: str,
    *curve: dict[str, Any],
    best: int = 0,
    compared: Any = "queueing_delay",
) -> Optimum:
    return Optimum(target, objective, curve[best], list(curve), compared=compared)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            optimum("batch-size", "delay", point(4, 1.0), point(5, 2.0)),
            "best: batch size 4, the shortest mean queueing delay",
        ),
        (
            optimum("batch-size", "delay", point(4, 1.0), point(5, 1.0005)),
            (
                "best: batch size 4, the smallest of 2 choices with the shortest mean queueing "
                "delay, within 0.1 %"
            ),
        ),
        (
            optimum("batch-size", "delay", point(4, 1.0, 2.0), point(5, 1.0005, 1.0), best=1),
            (
                "best: batch size 5, the one with the shortest sojourn time of 2 choices with the "
                "shortest mean queueing delay, within 0.1 %"
            ),
        ),
        (
            optimum(
                "policy",
                "delay",
                point(0, 1.0, policy="a"),
                point(0, 1.0, policy="b"),
                compared="sojourn_time",
            ),
            "best: a, the first of 2 choices with the shortest mean sojourn time, within 0.1 %",
        ),
        (
            optimum(
                "batch-size",
                "throughput",
                point(4, -1.0),
                point(5, -1.0),
                point(6, 2.0),
                compared=None,
            ),
            "best: batch size 4, the smallest of 2 with the highest stable rate",
        ),
        (
            optimum("servers", "slo", point(0, 3.0, servers=3)),
            "best: 3 servers, the fewest that keep the SLO",
        ),
        (
            optimum("servers", "slo", point(0, 1.0, servers=1)),
            "best: 1 server, the fewest that keep the SLO",
        ),
        (
            optimum(
                "max-output-tokens", "v1", point(0, 1.0, max_output_tokens=1200), compared=None
            ),
            "best: a limit of 1,200 output tokens, the largest V1",
        ),
        (
            optimum("max-output-tokens", "slo", point(0, 1.0, max_output_tokens=12), compared=None),
            "best: a limit of 12 output tokens, the largest limit that keeps the SLO",
        ),
        (
            optimum("arrival-rate", "slo", point(0, -1.0, arrival_rate=12.3456789), compared=None),
            "best: 12.346 requests per second, the largest that keeps the SLO",
        ),
        (
            optimum("batch-size", "slo", point(4, 1.0)),
            "best: batch size 4, the shortest mean queueing delay that keeps the SLO",
        ),
    ],
)
def test_a_result_is_a_sentence(found: Optimum, line: str) -> None:
    assert result_line(found) == line


SCORE = "> marks the best choice; score: the mean queueing delay in seconds (less is better)"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (optimum("batch-size", "delay", point(4, 1.0)), SCORE),
        (
            optimum("batch-size", "delay", point(4, 1.0), point(5, None, stable=False)),
            f"{SCORE}; - as a score: unstable",
        ),
        (
            optimum("batch-size", "delay", point(4, 1.0), point(5, None, stable=True)),
            f"{SCORE}; - as a score: unstable, or outside the constraint",
        ),
        (optimum("servers", "slo", point(0, 1.0, servers=1)), "> marks the best choice"),
        (
            optimum("arrival-rate", "throughput", {"arrival_rate": 2.0, "load": 1.0}),
            "> marks the best choice",
        ),
        (
            optimum("batch-size", "delay", point(4, 1.0, loss_fraction=0.1)),
            f"{SCORE}; a lost request counts as its patience in the queueing delay and in the "
            "score; sojourn time and first token: of the requests that are served",
        ),
        (
            optimum("servers", "slo", point(0, 1.0, servers=1, loss_fraction=0.1)),
            "> marks the best choice; a lost request counts as its patience in the queueing delay; "
            "sojourn time and first token: of the requests that are served",
        ),
        (
            optimum("max-output-tokens", "v2", point(0, 1.0, loss_fraction=0.1), compared=None),
            "> marks the best choice; score: -V2 (less is better); a lost request counts as its "
            "patience in the queueing delay; sojourn time and first token: of the requests that "
            "are served",
        ),
    ],
)
def test_the_legend_says_what_each_mark_means(found: Optimum, text: str) -> None:
    assert legend(found) == text


def test_the_table_says_which_choices_keep_the_slo() -> None:
    points = point(2, 1.0, servers=2), point(1, None, servers=1)
    found, to = optimum("servers", "slo", *points), io.StringIO()
    print_optimum(found, Console(file=to, width=80))
    kept = [line.split()[-1] for line in to.getvalue().splitlines() if line.endswith(("yes", "no"))]
    assert kept == ["yes", "no"]


def test_what_an_slo_judges_is_limits_servers_and_rates() -> None:
    targets = ("max-output-tokens", "servers", "arrival-rate", "batch-size", "policy")
    assert [judged_by_slo(optimum(target, "slo", point(1, 1.0))) for target in targets] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not judged_by_slo(optimum("servers", "delay", point(1, 1.0)))
