"""SkipPredict and DelayPredict as orders of a policy, and what predictions cost: analysis,
simulation, the slides' curves, and the cases that are other orders.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from kendall.policies.durations import parse_duration
from kendall.policies.text import SpecError
from kendall.queueing.choosing.orders import best_order
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.orders import SkipRanks
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.token_orders import TokenService, solve_in_tokens
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.by_length import durations_by_length
from kendall.queueing.prediction.solutions import methods
from kendall.queueing.prediction.steady_state import unstable
from kendall.queueing.predictors.laws import ExactPrediction
from kendall.queueing.predictors.prediction_cost import PredictionCost, parse_prediction_cost
from kendall.queueing.predictors.sizes import Atoms
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_trace, simulate_model, simulate_run
from kendall.queueing.simulation.fast import SimulatedRun, Trace, draw_trace
from papers.prediction_costs import SkipPredict

SLIDES = Path(__file__).parents[2] / "docs/reproduction/slides-costs.json"
LAW = LatencyModel(k1=1e-3, k2=4e-3, k4=2e-3)
BARE = LatencyModel(k4=1e-3)
LENGTHS = "lognormal:mu=3,sigma=0.9"


def queue(order: str, law: LatencyModel = LAW, **limits: object) -> Queue:
    given = {"max_output_tokens": 150, "predictor": "lognormal:sigma=0.5"}
    return Queue.read(f"single:order={order}", LENGTHS, law, **(given | limits))  # type: ignore[arg-type]


def run(model: Queue, load: float = 0.8, count: int = 3000, seed: int = 1) -> SimulatedRun:
    rate = load * model.largest_stable_rate
    return simulate_run(model, rate, count, np.random.SeedSequence(seed))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


# the orders


@pytest.mark.parametrize(
    ("order", "other"),
    [
        ("skippredict,threshold=0", "sprpt"),
        ("skippredict,threshold=0.5", "sprpt"),
        ("delaypredict,limit=0", "sprpt"),
        ("skippredict,threshold=150", "fcfs"),
        ("skippredict,threshold=1e9", "fcfs"),
        ("delaypredict,limit=150", "fcfs"),
        ("delaypredict,limit=1000000000000", "fcfs"),
    ],
)
@pytest.mark.thinned(3)
def test_at_the_ends_of_their_parameters_they_are_other_orders(order: str, other: str) -> None:
    mine, theirs = run(queue(order)), run(queue(other))
    for name in ("dispatched_at", "first_token_at", "released_at"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=1e-12)
    assert (mine.queueing_delay > 0).mean() > 0.5


@pytest.mark.parametrize("order", ["skippredict,threshold=800", "delaypredict,limit=600"])
@pytest.mark.parametrize("predictor", ["exact", "exponential"])
def test_simulation_is_the_analysis_where_going_on_costs_nothing(
    order: str, predictor: str
) -> None:
    model = Queue.read(f"single:order={order}", "geometric:mean=1000", BARE, predictor=predictor)
    service = TokenService(0.0, 1e-3, TokenService.alone(BARE, model.requests.output_tokens).sizes)
    ranking = model.policy.ranking  # type: ignore[attr-defined]
    exact = solve_in_tokens(ranking, service, 0.7, predictor=model.requests.predictor).sojourn
    found, error = mean_and_error(
        [
            float(simulate_run(model, 0.7, 100_000, stream).sojourn_time[10_000:].mean())
            for stream in np.random.SeedSequence(3).spawn(8)
        ]
    )
    assert error < 0.02 * exact
    assert abs(found - exact) < 4 * error + 2e-3 * exact, "a token in the making is lost"


def test_the_analysis_is_that_of_the_papers_and_of_the_formula_for_short_requests() -> None:
    rng = np.random.default_rng(0)
    sizes = Atoms(np.sort(rng.exponential(size=40)), np.full(40, 1 / 40))
    rate = 0.8 / sizes.mean
    found = solve_order(SkipRanks(0.7), sizes, rate, ExactPrediction())
    paper = solve_order(SkipPredict(threshold=0.7), sizes, rate, ExactPrediction())
    assert found.by_size == pytest.approx(paper.by_size, rel=1e-12)
    short = sizes.sizes <= 0.7
    first, second = (float(sizes.weights[short] @ sizes.sizes[short] ** k) for k in (1, 2))
    wait = rate * second / (2 * (1 - rate * first))
    assert found.by_size[short] == pytest.approx(sizes.sizes[short] + wait, rel=1e-12)


def test_methods_say_where_the_analysis_has_them() -> None:
    """DelayPredict interrupts without an arrival, and going on costs something."""
    assert methods(queue("skippredict,threshold=20"))[0] == "approximation"
    assert methods(queue("delaypredict,limit=20")) == ("simulation",)
    several = queue("skippredict,threshold=20", servers=2)
    assert methods(several) == ("simulation",)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_approximation_of_resumes_holds_for_skippredict(load: float) -> None:
    model = queue("skippredict,threshold=20")
    rate = load * model.largest_stable_rate
    found = predict_model(model, rate, "approximation").queueing_delay.mean
    drawn = simulate_model(model, rate, num_requests=200_000, replications=4).queueing_delay
    assert found is not None
    assert drawn.mean is not None
    assert drawn.standard_error is not None
    assert abs(found - drawn.mean) < 4 * drawn.standard_error + 0.07 * drawn.mean


# the slides' curves


def slides(panel: str, label: str, load: float) -> float:
    (found,) = [each for each in json.loads(SLIDES.read_text())["panels"] if panel in each["title"]]
    (curve,) = [each for each in found["curves"] if each["label"] == label]
    return float(curve["y"][curve["x"].index(load)])


def told(order: str, outputs: Vector, rng: np.random.Generator) -> Vector:
    """Exponential predictions of exponential lengths of mean 1000. Under skippredict the bit is a
    draw of its own: `threshold` tokens more put those that it calls long behind all short ones, and
    keep their order.
    """
    sizes = np.maximum(np.rint(outputs * rng.exponential(size=outputs.size)), 1.0)
    if "skippredict" not in order:
        return sizes
    threshold = float(order.partition("threshold=")[2])
    bits = outputs * rng.exponential(size=outputs.size) > threshold
    return np.where(bits, threshold + sizes, 1.0)


@pytest.mark.parametrize(
    ("panel", "label", "order", "cost"),
    [
        ("large cost gap, external", "SkipPredict", "skippredict,threshold=4000", "4s,bit=0.5s"),
        ("small cost gap, external", "DelayPredict", "delaypredict,limit=6000", "4s"),
        (
            "large cost gap, server",
            "SkipPredict",
            "skippredict,threshold=1000",
            "server=40ms,bit=5ms",
        ),
        ("small cost gap, server", "DelayPredict", "delaypredict,limit=500", "server=40ms"),
        ("large cost gap, server", "SPRPT", "sprpt", "server=40tokens"),
        ("large cost gap, external", "SPRPT", "sprpt", "external=4"),
    ],
)
@pytest.mark.thinned(6)
def test_simulations_reproduce_the_slides(panel: str, label: str, order: str, cost: str) -> None:
    """Each with the threshold that is the best of those that the figure tries, at load 0.7."""
    model = Queue.read(
        f"single:order={order}",
        "geometric:mean=1000",
        BARE,
        max_output_tokens=10**6,
        predictor="exponential",
        prediction_cost=cost,
    )
    means = []
    for stream in np.random.SeedSequence(7).spawn(6):
        trace = draw_trace(model, 0.7, 150_000, stream)
        rng = np.random.default_rng(stream.spawn(1)[0])
        trace = dataclasses.replace(trace, predicted=told(order, trace.output_tokens * 1.0, rng))
        means.append(float(run_trace(model, trace).sojourn_time[15_000:].mean()))
    found, error = mean_and_error(means)
    expected = slides(panel, label, 0.7)
    assert error < 0.02 * expected
    assert abs(found - expected) < 4 * error


@pytest.mark.parametrize("cost", ["1000s", "1h"])
def test_a_prediction_outside_of_the_engine_is_no_load_however_long_it_takes(cost: str) -> None:
    """2,000 arrivals take about 2,500 s."""
    for order in ("spjf", "sprpt"):
        model = Queue.read(
            f"single:order={order}",
            "geometric:mean=100",
            "a=0.01",
            predictor="exact",
            prediction_cost=cost,
        )
        found = simulate_model(model, 0.8, num_requests=2000)
        assert found.load == pytest.approx(0.8, rel=0.01)
        assert found.queueing_delay.mean == pytest.approx(parse_duration(cost), rel=0.01)


# what predictions cost


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("2ms", "external=0.002"),
        (" external=2ms ", "external=0.002"),
        ("0.002", "external=0.002"),
        ("2ms,bit=0.5ms", "external=0.002,bit=0.0005"),
        ("bit=500us,server=2ms", "server=0.002,bit=0.0005"),
        ("8tokens", "server=8tokens"),
        ("server=8tokens,bit=0.5 tokens", "server=8tokens,bit=0.5tokens"),
        ("0", "external=0"),
    ],
)
def test_a_cost_is_read_and_written_canonically(text: str, canonical: str) -> None:
    cost = parse_prediction_cost(text)
    assert str(cost) == canonical
    assert parse_prediction_cost(canonical) == cost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty prediction cost; expected a duration such as 2ms"),
        ("server", "got external=server in the prediction cost .*; expected a duration such as"),
        ("-2ms", "got external=-2ms in .*; expected a duration"),
        ("nan", "got external=nan in .*; expected a duration"),
        ("inf", "got a prediction cost of external=inf; expected finite seconds >= 0"),
        ("server=2ms,bit=-1", "got bit=-1 in .*; expected a duration"),
        ("server=-8tokens", "got a prediction cost of server=-8; expected finite tokens >= 0"),
        ("server=xtokens", "got server='x' in 'server=xtokens'; expected a number"),
        ("server=2ms,external=1ms", "got external and server in .*; expected either external=.."),
        ("bit=1ms", "got no cost of a length in 'bit=1ms'; expected either external=.. or server"),
        ("server=2ms,bits=1ms", "got key 'bits' for a prediction cost; .*did you mean 'bit'"),
        ("server=2ms,server=3ms", "got server twice"),
        ("server=2ms,bit=1tokens", "expected both as durations or both in tokens"),
        ("external=8tokens", "got an external prediction cost in tokens; expected a duration"),
    ],
)
def test_what_is_no_cost_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        parse_prediction_cost(text)
    assert "\n" not in str(raised.value)


def test_a_cost_of_another_type_is_refused() -> None:
    with pytest.raises(SpecError, match="got prediction_cost=2; expected a text"):
        queue("sprpt", prediction_cost=2)
    own = PredictionCost(0.002)
    assert queue("sprpt", prediction_cost=own).requests.prediction_cost is own


def paid(order: str, cost: str, **limits: object) -> tuple[SimulatedRun, Vector, Queue]:
    """A run, what its requests wait longer than without the cost, and its queue."""
    model = queue(order, prediction_cost=cost, **limits)
    free = model.but(prediction_cost=None)
    mine, other = (
        simulate_run(each, 0.8 * free.largest_stable_rate, 3000, np.random.SeedSequence(2))
        for each in (model, free)
    )
    assert mine.sojourn_time - other.sojourn_time == pytest.approx(
        mine.queueing_delay - other.queueing_delay, abs=1e-9
    )
    return mine, mine.queueing_delay - other.queueing_delay, model


@pytest.mark.parametrize("order", ["spjf", "sprpt", "hrrn", "skippredict,threshold=0"])
def test_an_external_prediction_is_on_top_for_every_request(order: str) -> None:
    _, later, model = paid(order, "30ms")
    assert later == pytest.approx(np.full(3000, 0.03), abs=1e-9)
    assert model.load(1.0) == queue(order).load(1.0)


def test_one_bit_costs_a_bit_where_its_cost_is_given() -> None:
    for cost, seconds in (("30ms", 0.03), ("30ms,bit=10ms", 0.01)):
        _, later, _ = paid("threshold,threshold=20", cost)
        assert later == pytest.approx(np.full(3000, seconds), abs=1e-9)


def test_only_those_that_need_a_length_pay_for_it() -> None:
    known, later, _ = paid("delaypredict,limit=20", "30ms,bit=5ms")
    assert later == pytest.approx(np.where(known.output_tokens > 20, 0.03, 0.0), abs=1e-9)
    exact = {"predictor": "exact"}
    known, later, model = paid("skippredict,threshold=20", "30ms,bit=5ms", **exact)
    assert later == pytest.approx(0.005 + np.where(known.output_tokens > 20, 0.03, 0), abs=1e-9)
    share = float(model.requests.output_tokens.pmf[21:].sum())
    assert model.external_prediction == pytest.approx(0.005 + 0.03 * share)


def test_the_mean_of_a_formula_has_what_its_requests_pay() -> None:
    model = queue("skippredict,threshold=20", prediction_cost="30ms,bit=5ms")
    rate = 0.6 * model.largest_stable_rate
    found, free = (
        predict_model(each, rate, "approximation")
        for each in (model, queue("skippredict,threshold=20"))
    )
    drawn = draw_trace(model, rate, 100_000, np.random.SeedSequence(0)).predicted
    for name in ("queueing_delay", "sojourn_time"):
        more = getattr(found, name).mean - getattr(free, name).mean
        assert more == pytest.approx(model.external_prediction)
        assert more == pytest.approx(0.005 + 0.03 * float((drawn > 20).mean()), rel=0.02)
    assert found.service_time == free.service_time
    lengths, waits = (
        durations_by_length(model, rate),
        durations_by_length(queue("skippredict,threshold=20"), rate),
    )
    assert lengths is not None
    assert waits is not None
    pmf = model.requests.output_tokens.pmf[lengths.tokens.round().astype(int)]
    assert pmf @ (lengths.delay - waits.delay) == pytest.approx(model.external_prediction)


def test_quantiles_of_a_formula_move_where_all_pay_as_much() -> None:
    binned = "dynamic:order=binned,bins=1"
    found, free = (
        predict_model(
            Queue.read(
                binned, LENGTHS, LAW, max_output_tokens=150, predictor="exact", prediction_cost=cost
            ),
            5.0,
        )
        for cost in ("30ms", None)
    )
    for name in ("mean", "p50", "p99"):
        assert found.queueing_delay.value(name) == pytest.approx(
            free.queueing_delay.value(name) + 0.03
        )  # type: ignore[operator]
    assert found.utilisation == free.utilisation


@pytest.mark.parametrize("cost", ["30ms", "server=10ms", "server=5tokens"])
def test_theory_is_simulation_where_nobody_is_interrupted(cost: str) -> None:
    model = queue("spjf", prediction_cost=cost)
    rate = 0.7 * model.largest_stable_rate
    found = predict_model(model, rate, "exact")
    drawn = simulate_model(model, rate, num_requests=100_000, replications=6)
    for name in ("queueing_delay", "sojourn_time", "service_time", "time_to_first_token"):
        mean, of_run = getattr(found, name).mean, getattr(drawn, name)
        assert of_run.standard_error < 0.05 * mean
        assert abs(mean - of_run.mean) < 4 * of_run.standard_error, name


@pytest.mark.parametrize(
    "policy",
    [
        *("single:order=spjf", "continuous:max_batch_size=4,order=spjf", "dynamic:order=spjf"),
        *("fixed:batch_size=3,order=threshold,threshold=20", "dynamic:order=binned,bins=2"),
    ],
)
def test_where_nobody_is_interrupted_predictions_are_service_as_k1_is(policy: str) -> None:
    laws = (LAW, "server=5ms"), (dataclasses.replace(LAW, k1=LAW.k1 + 0.005), None)
    given = {"max_output_tokens": 150, "predictor": "exact"}
    mine, other = (
        Queue.read(policy, LENGTHS, law, prediction_cost=cost, **given)  # type: ignore[arg-type]
        for law, cost in laws
    )
    assert mine.largest_stable_rate == pytest.approx(other.largest_stable_rate)
    assert run(mine).released_at == pytest.approx(run(other).released_at, rel=1e-12)
    if methods(mine) != ("simulation",):
        rate, method = 0.3 * mine.largest_stable_rate, methods(mine)[0]
        found, expected = (predict_model(each, rate, method) for each in (mine, other))
        for name in ("queueing_delay", "sojourn_time", "service_time", "time_to_first_token"):
            assert getattr(found, name).mean == pytest.approx(getattr(expected, name).mean), name
    waits = [durations_by_length(each, 0.5 * mine.largest_stable_rate) for each in (mine, other)]
    assert (waits[0] is None) is (waits[1] is None)
    if waits[0] is not None and waits[1] is not None:
        assert waits[0].delay == pytest.approx(waits[1].delay)
        assert waits[0].service == pytest.approx(waits[1].service)


def test_predictions_on_the_server_are_load_and_said_as_a_share_of_it() -> None:
    model = queue("sprpt", prediction_cost="server=20ms")
    free = queue("sprpt")
    service = 1 / free.largest_stable_rate
    assert model.load(1.0) == pytest.approx(free.load(1.0) + 0.02)
    share = 0.02 / (service + 0.02)
    (said,) = [each for each in model.assumptions if "predictions cost" in each]
    assert said.startswith(f"predictions cost {share:.1%} of the server: 0.02 s for every request")
    rate = 1.02 * model.largest_stable_rate
    assert free.load(rate) < 1
    with pytest.raises(UnstableQueueError):
        predict_model(model, rate)
    assert said in unstable(model, model.load(rate), "auto").assumptions
    tokens = queue("sprpt", prediction_cost="server=10tokens")
    assert tokens.largest_stable_rate == pytest.approx(model.largest_stable_rate)


@pytest.mark.parametrize("order", ["fcfs", "fb", "mlfq", "edf"])
@pytest.mark.parametrize("cost", ["30ms", "server=30ms"])
def test_an_order_that_predicts_nothing_pays_nothing(order: str, cost: str) -> None:
    model, free = queue(order, prediction_cost=cost), queue(order)
    mine, other = run(model), run(free)
    assert np.array_equal(mine.released_at, other.released_at)
    unpaid = "the prediction cost is not paid: the order reads no predicted length"
    assert set(model.assumptions) - set(free.assumptions) == {unpaid}


def replayed(order: str, cost: str, *requests: tuple[float, int], **limits: object) -> SimulatedRun:
    """One request a second for each token, predictions exact."""
    law = LatencyModel(k4=1.0)
    model = Queue.read(
        f"single:order={order}",
        "uniform:low=1,high=9",
        law,
        predictor="exact",
        prediction_cost=cost,
        **limits,  # type: ignore[arg-type]
    )
    arrived, lengths = (np.array(column) for column in zip(*requests, strict=True))
    servers = model.engine.servers
    rngs = np.random.default_rng(0).spawn(servers)
    trace = Trace(arrived * 1.0, lengths, lengths * 0, rngs, predicted=lengths * 1.0)
    return run_trace(model, trace)


@pytest.mark.parametrize(
    ("order", "cost", "requests", "left", "waited"),
    [
        # bit of the first until 1, its length until 2; bit and service of the second, until 4; the
        # rest of the length until 7, the answer until 10
        ("skippredict,threshold=2", "server=4,bit=1", ((0, 3), (2, 1)), (10, 4), (2, 0)),
        # a bit waits for a short request, a length for a bit
        ("skippredict,threshold=2", "server=4,bit=1", ((0, 2), (0.5, 3)), (3, 11), (0, 2.5)),
        # a token, then the length of the first until 2; the second at once; the rest until 6
        ("delaypredict,limit=1", "server=4", ((0, 2), (2, 1)), (7, 3), (1, 0)),
        # one that ends with its first tokens needs no prediction
        ("delaypredict,limit=3", "server=4", ((0, 3),), (3,), (0,)),
        # predictions go before all answers: the second's interrupts the first's service
        ("sprpt", "server=2", ((0, 5), (3, 1)), (10, 6), (3, 0)),
        ("sprpt", "server=2tokens", ((0, 5), (1, 1)), (10, 5), (3, 1)),
    ],
)
def test_predictions_on_the_server_by_hand(
    order: str,
    cost: str,
    requests: tuple[tuple[float, int], ...],
    left: tuple[float, ...],
    waited: tuple[float, ...],
) -> None:
    found = replayed(order, cost, *requests)
    assert found.released_at.tolist() == list(left)
    assert found.queueing_delay.tolist() == list(waited)


def test_a_prediction_is_service_that_patience_does_not_end() -> None:
    found = replayed("sprpt", "server=2", (0, 5), (1, 1), (1.5, 2), patience=1.25)
    assert found.lost.tolist() == [False, False, True]
    assert replayed("sprpt", "server=2", (0, 5), (1, 1), servers=2).released_at.tolist() == [7, 4]


@pytest.mark.parametrize(
    ("policy", "limits", "message"),
    [
        ("single:order=spjf", {"patience": 3.0}, "and patience=3; expected one of the two"),
        (
            "single:order=spjf",
            {"disaggregated": True, "prompt_tokens": "deterministic:value=9"},
            "and disaggregated; expected one of the two",
        ),
        (
            "continuous:max_batch_size=4,order=sprpt",
            {"prediction_cost": "server=2ms"},
            "for order sprpt, which interrupts requests; expected policy single with one queue",
        ),
        (
            "single:order=trail",
            {"prediction_cost": "server=2ms", "sequences": "deterministic:value=2"},
            "expected policy single with one queue, one sequence a call",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(
    policy: str, limits: dict[str, object], message: str
) -> None:
    law = dataclasses.replace(LAW, kp=1e-4)
    given = {"prediction_cost": "2ms", **limits}
    with pytest.raises(SpecError, match=message):
        Queue.read(policy, LENGTHS, law, max_output_tokens=150, **given)  # type: ignore[arg-type]


def test_optimize_weighs_what_predictions_cost() -> None:
    """A cost above the gain leaves the order of arrival the best."""
    asked = ["spjf", "skippredict:threshold=20", "delaypredict:limit=20"]
    free, dear = queue("fcfs"), queue("fcfs", prediction_cost="10s")
    rate = 0.8 * free.largest_stable_rate
    cheap, costly = (best_order(each, rate, asked, ["exact"]) for each in (free, dear))
    assert cheap.best["order"] != "fcfs"
    assert costly.best["order"] == "fcfs"
    delays = {
        point["order"]: (point["queueing_delay"], point["longest_sojourn_time"])
        for point in costly.curve
    }
    assert delays["spjf"] > (10.0, 10.0)
    assert delays["skippredict:threshold=20"][1] > 10.0
    lengths: TokenDistribution = free.requests.output_tokens
    assert delays["delaypredict:limit=20"][0] > 10 * float(lengths.pmf[21:].sum()) * 0.95


def test_each_order_has_the_load_that_its_predictions_make() -> None:
    model = queue("fcfs", prediction_cost="server=20ms")
    rate = 0.5 * model.largest_stable_rate
    found = best_order(model, rate, ["spjf"], ["exact"])
    loads = {point["order"]: point["load"] for point in found.curve}
    assert loads["fcfs"] == pytest.approx(0.5)
    assert loads["spjf"] == pytest.approx(0.5 + 0.02 * rate)
