"""`kendall optimize --target order`: gains, prices and the worst predictor that still helps,
against the predictions that they come from.
"""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kendall.policies.orders import ORDERS
from kendall.policies.text import SpecError
from kendall.queueing.choosing.orders import PREDICTORS, WORST, OrderSearch, best_order
from kendall.queueing.choosing.search import Optimum, Point
from kendall.queueing.choosing.words import order_lines
from kendall.queueing.commands.optimize_cli import app, print_optimum
from kendall.queueing.errors import NoStableChoiceError
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.by_length import durations_by_length
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.golden_files import is_as_kept

LAW = "k1=0.0003,k2=0.001,k3=0.0002,k4=0.001"
LENGTHS = "lognormal:mu=2.5,sigma=0.8"


def queue(policy: str = "single", lengths: str = LENGTHS, **limits: object) -> Queue:
    return Queue.read(policy, lengths, LAW, **({"max_output_tokens": 64} | limits))


def found(policy: str = "single", load: float = 0.8, **asked: object) -> Optimum:
    model = queue(policy)
    return best_order(model, load * model.largest_stable_rate, **asked)  # type: ignore[arg-type]


def point(optimum: Optimum, order: str, predictor: str | None = None) -> Point:
    (one,) = [p for p in optimum.curve if (p["order"], p["predictor"]) == (order, predictor)]
    return one


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["single", "continuous:max_batch_size=4"])
def test_every_point_is_the_prediction_of_its_order_and_predictor(policy: str) -> None:
    told = ["exact", "lognormal:sigma=1"]
    optimum = found(policy, candidates=["spjf", "trail:c=0.5", "fb"], predictors=told)
    assert {(p["order"], p["predictor"]) for p in optimum.curve} == {
        ("fcfs", None),
        ("fb", None),
        *((order, each) for order in ("spjf", "trail:c=0.5") for each in told),
    }
    plain = queue(policy)
    rate = 0.8 * plain.largest_stable_rate
    usual = point(optimum, "fcfs")
    assert usual["delay_ratio"] == usual["longest_ratio"] == 1
    join = "," if ":" in policy else ":"
    for each in optimum.curve:
        text = f"{policy}{join}order={each['order'].replace(':', ',')}"
        model = queue(text, predictor=each["predictor"] or "none")
        assert each["load"] == pytest.approx(0.8)
        if each["order"] == "fb":  # each of its interruptions costs an admission
            assert not each["stable"] or each["method"] == "simulation"
            continue
        assert each["stable"]
        predicted, by_length = predict_model(model, rate), durations_by_length(model, rate)
        if each["method"] == "simulation":
            doubted = any("in doubt" in text for text in predicted.assumptions)
            assert doubted or predicted.method == "simulation"
            continue
        assert by_length is not None
        assert each["method"] == predicted.method
        assert each["queueing_delay"] == predicted.queueing_delay.mean == each["score"]
        assert each["sojourn_time"] == predicted.sojourn_time.mean
        longest = sum(by_length.of_longest(model.requests.output_tokens))
        assert each["longest_sojourn_time"] == pytest.approx(longest)
        assert each["delay_ratio"] == pytest.approx(
            each["queueing_delay"] / usual["queueing_delay"]
        )
        assert each["longest_ratio"] == pytest.approx(longest / usual["longest_sojourn_time"])
    scores = [each["score"] for each in optimum.curve if each["stable"]]
    assert scores == sorted(scores)
    assert optimum.best == optimum.curve[0]


@pytest.mark.left_out
def test_the_largest_sigma_is_where_the_gain_ends() -> None:
    """Of lengths that vary little, interruptions by bad predictions cost more than they gain."""
    model = queue(lengths="uniform:low=10,high=60")
    rate = 0.8 * model.largest_stable_rate
    optimum = best_order(model, rate, ["sprpt"], ["exact"])
    each = point(optimum, "sprpt", "exact")
    assert each["beats_fcfs"] == "up to largest_sigma"
    sigma = each["largest_sigma"]
    assert 0.2 < sigma < WORST
    usual = predict_model(model, rate).queueing_delay.mean
    for spread, is_shorter in ((sigma - 0.02, True), (sigma + 0.02, False)):
        told = queue(
            "single:order=sprpt",
            "uniform:low=10,high=60",
            predictor=f"lognormal:sigma={spread}",
        )
        assert (predict_model(told, rate).queueing_delay.mean < usual) is is_shorter


def test_what_always_and_what_never_gains_has_no_largest_sigma() -> None:
    """A request that is not interrupted waits no longer for a useless prediction; the longest first
    never helps.
    """
    optimum = found(candidates=["spjf", "ljf", "fb"], predictors=["lognormal:sigma=0.5"])
    shortest, longest = (point(optimum, order, "lognormal:sigma=0.5") for order in ("spjf", "ljf"))
    assert (shortest["beats_fcfs"], shortest["largest_sigma"]) == ("always", None)
    assert (longest["beats_fcfs"], longest["largest_sigma"]) == ("never", None)
    assert not point(optimum, "fb")["stable"], "each quantum costs an admission"
    assert point(optimum, "fcfs")["largest_sigma"] is None


def test_the_usual_candidates_are_the_orders_of_the_analysis_with_their_best_threshold() -> None:
    optimum = found()
    names = {each["order"].partition(":")[0] for each in optimum.curve}
    assert names >= {"fcfs", "spjf", "sprpt", "trail", "threshold", "threshold-preemptive", "fb"}
    assert names <= set(ORDERS)
    assert not names & {"edf", "hrrn", "binned"}
    assert {each["predictor"] for each in optimum.curve} == {None, *PREDICTORS}
    for name in ("threshold", "threshold-preemptive"):
        (text,) = {p["order"] for p in optimum.curve if p["order"].startswith(f"{name}:")}
        best = int(text.partition("=")[2])
        lengths = queue().requests.output_tokens
        delays = {
            lengths.quantile(share): predict_model(
                queue(
                    f"single:order={name},threshold={lengths.quantile(share)}",
                    predictor=f"onebit:threshold={lengths.quantile(share)}",
                ),
                0.8 * queue().largest_stable_rate,
            ).queueing_delay.mean
            for share in np.arange(0.1, 1.0, 0.1)
        }
        assert delays[best] == min(delays.values())
    batches = best_order(queue("capped:max_batch_size=4"), 20.0, ["fcfs"], ["exact"])
    assert [each["order"] for each in batches.curve] == ["fcfs"]


def test_it_tells_which_order_comes_next() -> None:
    told: list[str] = []
    best_order(queue(), 1.0, ["spjf", "sprpt"], ["exact"], told.append)
    assert told == ["1 of 3: fcfs", "2 of 3: spjf", "3 of 3: sprpt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "about", "load", "searched"),
    [
        ("single", {}, 0.8, True),
        ("continuous:max_batch_size=4", {}, 0.8, True),
        # simulated, or without a steady state: the median
        ("single", {"server_speeds": [1.0, 2.0]}, 0.8, False),
        ("single", {}, 1.0, False),
    ],
)
def test_a_threshold_is_the_best_of_nine_or_the_median(
    policy: str, about: dict[str, object], load: float, searched: bool
) -> None:
    model = queue(policy, **about)
    rate = load * model.largest_stable_rate
    tried = [model.requests.output_tokens.quantile(share) for share in np.arange(0.1, 1.0, 0.1)]
    best = model.requests.output_tokens.quantile(0.5)
    if searched:
        join = "," if ":" in policy else ":"
        delays = {
            threshold: predict_model(
                queue(
                    f"{policy}{join}order=threshold,threshold={threshold}",
                    predictor=f"onebit:threshold={threshold}",
                ),
                rate,
            ).queueing_delay.mean
            for threshold in tried
        }
        median, best = best, min(delays, key=lambda each: delays[each])
        assert best != median
    assert f"threshold:threshold={best}" in OrderSearch(model, rate, {}).usual()


def test_an_order_without_analysis_is_simulated_beside_fcfs_on_the_same_requests() -> None:
    optimum = found(candidates=["spjf:aging=0.05"], predictors=["exact"])
    aged = point(optimum, "spjf:aging=0.05", "exact")
    assert aged["method"] == "simulation"
    rate = 0.8 * queue().largest_stable_rate
    runs = [
        simulate_run(model, rate, 20_000, np.random.SeedSequence(0)).after(2000)
        for model in (queue("single:order=spjf,aging=0.05", predictor="exact"), queue())
    ]
    delays = [float(run.queueing_delay.mean()) for run in runs]
    usual = point(optimum, "fcfs")
    assert usual["method"] == "exact"
    assert aged["delay_ratio"] == pytest.approx(delays[0] / delays[1])
    assert aged["queueing_delay"] == aged["delay_ratio"] * usual["queueing_delay"], "on one screen"
    longest = np.argsort(-runs[0].output_tokens, kind="stable")[:1800]
    told = [float(run.sojourn_time[longest].mean()) for run in runs]
    assert aged["longest_ratio"] == pytest.approx(told[0] / told[1])
    assert aged["longest_sojourn_time"] == pytest.approx(
        aged["longest_ratio"] * usual["longest_sojourn_time"]
    )


def test_refusals() -> None:
    with pytest.raises(SpecError, match="without an order of its own"):
        found("single:order=spjf")
    with pytest.raises(SpecError, match="did you mean 'spjf'"):
        found(candidates=["sjf"])
    with pytest.raises(SpecError, match="which interrupts a batch"):
        best_order(queue("dynamic"), 1.0, ["sprpt"])
    with pytest.raises(SpecError, match="got predictor 'magic'"):
        found(predictors=["magic"])
    with pytest.raises(NoStableChoiceError):
        found(load=1.2, candidates=["spjf"])


QUEUE = ["--output-tokens", LENGTHS, "--max-output-tokens", "64", "--latency", LAW]
FLAGS = ["--target", "order", *QUEUE]
ASKED = [*FLAGS, "--policy", "continuous:max_batch_size=4", "--arrival-rate", "100"]


def test_the_command_prints_one_object() -> None:
    told = ["--candidates", "spjf", "--predictor", "lognormal:sigma=1", "--json"]
    shown = CliRunner().invoke(app, [*ASKED, *told])
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    assert (answer["target"], answer["objective"], answer["compared"]) == (
        "order", "delay", "queueing_delay"
    )  # fmt: skip
    assert answer["best"] == answer["curve"][0]
    assert answer["best"]["order"] == "spjf"
    assert {each["order"] for each in answer["curve"]} == {"fcfs", "spjf"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*FLAGS, "--policy", "single"], "got no --arrival-rate"),
        ([*ASKED, "--objective", "throughput"], "got --objective throughput for order"),
        ([*ASKED, "--largest", "3"], "got --largest with --target order; expected it"),
        (["--target", "servers", *ASKED[2:], "--predictor", "exact"], "expected --target order"),
        (
            ["--target", "servers", *ASKED[2:], "--candidates", "spjf"],
            "expected --target policy or order",
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags: list[str], said: str) -> None:
    error = CliRunner().invoke(app, flags).exception
    assert isinstance(error, SpecError)
    assert said in str(error)


def test_a_predictor_of_the_environment_does_not_disturb_other_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """See `fitting`: only a flag that does not fit is an error."""
    from kendall import cli

    monkeypatch.setenv("KENDALL_PREDICTOR", "exact")
    arguments = ["--target", "arrival-rate", "--slo", "mean_queueing_delay=1s", *QUEUE, "--json"]
    assert cli.run_command("optimize", arguments) == 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 130])
def test_the_table_is_as_kept(width: int) -> None:
    optimum = found("continuous:max_batch_size=4", candidates=["spjf", "ljf", "sprpt", "fb"])
    to = io.StringIO()
    print_optimum(optimum, Console(file=to, width=width))
    assert is_as_kept(f"optimize-order-{width}.txt", to.getvalue())


def test_a_line_for_each_predictor_says_gain_price_and_need() -> None:
    optimum = found(candidates=["spjf"], predictors=["exact", "lognormal:sigma=1"])
    lines = order_lines(optimum)
    each = point(optimum, "spjf", "lognormal:sigma=1")
    cut = f"{1 - each['delay_ratio']:.0%}".replace("%", " %")
    assert lines[1] == (
        f"with lognormal:sigma=1 predictions: spjf cuts the mean delay by {cut}, and the longest "
        f"tenth of the requests take {each['longest_ratio']:.2f} times as long; it gains with "
        "predictions of any spread; none gains with a p99 within 5 % of fcfs"
    )
    (only,) = order_lines(found(candidates=["ljf"], predictors=["exact"]))
    assert only == "with exact predictions: fcfs, no order has a shorter mean delay than fcfs"
