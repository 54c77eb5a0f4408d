"""`kendall plan`: the fewest servers of every option, the frontier, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from typer.testing import CliRunner, Result

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.plan import check_costs, with_frontier
from kendall.queueing.commands import plan_cli
from kendall.queueing.commands.optimize_cli import app as optimize
from kendall.queueing.commands.plan_cli import app
from kendall.queueing.latency.law import parse_law
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

LAW = "k1=0,k2=0.02,k3=0.002,k4=0.02"
LENGTHS = ("--output-tokens", "geometric:mean=20")
GOAL = Objective(name="slo", **parse_slos("mean_queueing_delay<=50ms,mean_sojourn_time<=1s"))


def run(*more: str, rate: tuple[str, ...] = ("--arrival-rate", "12")) -> Result:
    slo = () if "--slo" in more else ("--slo", "mean_queueing_delay<=50ms,mean_sojourn_time<=1s")
    latency = () if "--latency" in more else ("--latency", LAW)
    return CliRunner().invoke(app, [*rate, *slo, *latency, *more])


def option(
    cost: float | None, cut: float, delay: float | None, **more: object
) -> dict[str, object]:
    servers = None if cost is None else 1
    return {
        "servers": servers,
        "cost": cost,
        "clipped_fraction": cut,
        "queueing_delay": delay,
        **more,
    }


@pytest.mark.slow
def test_each_option_has_the_fewest_servers_that_keep_every_slo() -> None:
    """Beside a scan: one server fewer breaks one of the SLOs, or is not stable."""
    found = json.loads(run(*LENGTHS, "--max-num-seqs", "4,8", "--json").stdout)
    assert [each["max_num_seqs"] for each in found["options"]] == [4, 8]
    for each in found["options"]:
        for servers, kept in ((each["servers"], True), (each["servers"] - 1, False)):
            model = Queue.read(
                parse_policy(f"continuous:max_batch_size={each['max_num_seqs']}"),
                LENGTHS[1],
                parse_law(LAW),
                servers=max(servers, 1),
            )
            stable = servers > 0 and model.load(12.0) < 1
            assert (stable and GOAL.kept(predict_model(model, 12.0))) is kept, (each, servers)
        assert each["cost"] == each["servers"]
    best = found["best"]
    assert best["cost"] == min(each["cost"] for each in found["options"])
    assert found["largest_rate"] >= 12
    above = Queue.read(
        parse_policy(f"continuous:max_batch_size={best['max_num_seqs']}"),
        LENGTHS[1],
        parse_law(LAW),
        servers=best["servers"],
    )
    assert not GOAL.kept(predict_model(above, 1.05 * found["largest_rate"]))


@pytest.mark.slow
def test_any_quantile_may_be_an_objective() -> None:
    """p99.99 takes more servers than the median, and is what `predict` says there."""
    needed = {}
    for level in ("p50", "p99.99"):
        slo = f"{level}_queueing_delay<=50ms"
        found = json.loads(run(*LENGTHS, "--max-num-seqs", "4", "--slo", slo, "--json").stdout)
        goal, needed[level] = Objective(name="slo", **parse_slos(slo)), found["best"]["servers"]
        for servers, kept in ((needed[level], True), (needed[level] - 1, False)):
            model = Queue.read(
                "continuous:max_batch_size=4",
                LENGTHS[1],
                LAW,
                servers=max(servers, 1),
                quantiles=(level,),
            )
            stable = servers > 0 and model.load(12.0) < 1
            assert (stable and goal.kept(predict_model(model, 12.0))) is kept, (level, servers)
    assert needed["p99.99"] > needed["p50"]


def test_the_frontier_is_what_no_other_option_beats() -> None:
    options = [
        option(2.0, 0.0, 0.5),
        option(3.0, 0.0, 0.4),
        option(3.0, 0.0, 0.45),  # dearer than none, but slower than the one above
        option(1.0, 0.1, 0.5),  # cheaper, and cuts answers
        option(2.0, 0.0, 0.5),  # the first one's equal
        option(None, 0.0, None),
    ]
    marked = with_frontier(options, GOAL)
    assert [each["frontier"] for each in marked] == [True, True, False, True, True, False]


@pytest.mark.slow
def test_cost_decides_between_kinds() -> None:
    """A server twice as fast at four times the price is the best only where it is cheap."""
    fast = "k1=0,k2=0.01,k3=0.001,k4=0.01"
    arguments = (*LENGTHS, "--max-num-seqs", "8", "--latency", LAW, "--latency", fast, "--json")
    for price, best in ((8.0, "law 1"), (1.0, "law 2")):
        found = json.loads(run(*arguments, "--cost", "1", "--cost", str(price)).stdout)
        assert found["best"]["latency"] == best
        for each, own in zip(found["options"], (1.0, price), strict=True):
            assert each["cost"] == each["servers"] * own


@pytest.mark.slow
def test_a_limit_that_cuts_too_many_answers_is_no_option() -> None:
    arguments = (*LENGTHS, "--max-num-seqs", "8", "--max-output-tokens", "10,80,none")
    found = json.loads(run(*arguments, "--json").stdout)
    cut, kept, whole = found["options"]
    assert cut["servers"] is None
    assert cut["why"].startswith("the token limit cuts 0.5")
    assert kept["clipped_fraction"] == pytest.approx(0.95**80, rel=1e-6)
    assert whole["clipped_fraction"] == 0
    text = run(*arguments).stdout
    assert "law 1 with 8 slots, limit 10: the token limit cuts" in text
    assert "best: " in text
    allowed = run(*arguments, "--max-clipped-fraction", "0.7", "--json")
    assert json.loads(allowed.stdout)["options"][0]["servers"] is not None


def test_what_no_option_keeps_ends_with_status_3_and_its_reason() -> None:
    slo = ("--slo", "mean_queueing_delay<=1us")
    found = run(*LENGTHS, "--max-num-seqs", "8", "--largest", "2", *slo)
    assert found.exit_code == 3
    assert "none of 1 option keeps mean_queueing_delay=1e-06; raise --largest" in found.stderr
    assert "(nearest: queueing_delay 0." in found.stdout
    assert (
        json.loads(run(*LENGTHS, "--max-num-seqs", "8", "--largest", "2", *slo, "--json").stdout)[
            "best"
        ]
        is None
    )


def test_a_trace_brings_its_own_lengths_and_a_picture_is_drawn(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [
        f"2023-11-16 18:15:{second:02d}.{half}00000,100,{20 + second % 7}"
        for second in range(50)
        for half in (0, 5)
    ]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    picture = tmp_path / "plan.svg"
    found = run(
        "--max-num-seqs", "2,4", "--plot", str(picture), "--json", rate=("--trace", str(trace))
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["largest_rate"] is None
    assert picture.read_text().count("<svg") == 1
    assert plt.get_fignums() == [], "a figure is left open"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "got no lengths; expected --output-tokens"),
        ((*LENGTHS, "--cost", "1", "--cost", "2"), "got 2 --cost for 1 --latency; expected one"),
        ((*LENGTHS, "--cost", "0"), "got --cost 0; expected a finite number > 0"),
        ((*LENGTHS, "--max-num-seqs", "8,x"), "got --max-num-seqs with 'x'; expected whole"),
        ((*LENGTHS, "--max-num-seqs", "0"), "max-num-seqs"),
        ((*LENGTHS, "--max-output-tokens", "many"), "got --max-output-tokens with 'many'"),
        ((*LENGTHS, "--slo", "p99_queueing_delay"), "expected mean_QUANTITY=TIME"),
        ((*LENGTHS, "--largest", "0"), "largest"),
        ((*LENGTHS, "--plot", "x.foo"), "got --plot x.foo; expected a name that ends in .png, "),
        ((*LENGTHS, "--routing", "nearest"), "nearest"),
        (
            ("--output-tokens", "pareto:alpha=1.5,minimum=5"),
            "a token limit: this mean is not finite",
        ),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments: tuple[str, ...], says: str) -> None:
    found = run(*arguments)
    assert isinstance(found.exception, SpecError)
    assert says in str(found.exception)


def test_slots_without_a_token_each_in_a_step_are_left_out() -> None:
    asked = (*LENGTHS, "--max-num-seqs", "4,6,8,7", "--max-output-tokens", "many")
    found = run(*asked, "--step-tokens", "6")
    assert found.stderr == "kendall: left out: 8, 7 slots, more than the 6 tokens of a step\n"
    assert run(*asked, "--step-tokens", "8").stderr == ""
    none = run(*asked, "--step-tokens", "3")
    assert str(none.exception) == (
        "got --step-tokens 3 with --max-num-seqs 4,6,8,7; expected at least as many tokens as "
        "slots, one for each"
    )


def test_costs_default_to_one_each() -> None:
    assert check_costs(["a", "b"], []) == [1.0, 1.0]


@pytest.mark.slow
def test_memory_that_binds_takes_more_servers() -> None:
    """1,000 tokens hold ten requests of at most 100; 160 hold one."""
    arguments = (*LENGTHS, "--max-num-seqs", "8", "--max-output-tokens", "100", "--json")
    servers = [
        json.loads(run(*arguments, "--max-context-tokens", memory).stdout)["best"]["servers"]
        for memory in ("1000", "160")
    ]
    assert servers[1] > 2 * servers[0]
    refused = run(*arguments, "--max-context-tokens", "60")
    assert isinstance(refused.exception, SpecError)
    assert "max_context_tokens" in str(refused.exception).replace("-", "_")


@pytest.mark.slow
def test_queues_of_their_own_behind_a_load_balancer_take_more_servers_than_one_queue() -> None:
    arguments = ["--target", "servers", "--policy", "single", "--arrival-rate", "6", *LENGTHS]
    arguments += ["--latency", LAW, "--slo", "mean_queueing_delay<=200ms", "--json"]
    counts = {}
    for routing in ("central", "round_robin", "random"):
        found = CliRunner().invoke(optimize, [*arguments, "--routing", routing])
        counts[routing] = json.loads(found.stdout)["best"]["servers"]
    assert counts["central"] <= counts["round_robin"] < counts["random"]
    planned = (*LENGTHS, "--max-num-seqs", "4", "--json")
    central, random = (
        json.loads(run(*planned, "--routing", each).stdout)["best"]["servers"]
        for each in ("central", "random")
    )
    assert central < random


def test_arrivals_that_end_are_refused_at_once() -> None:
    ramp = ("--arrivals", "ramp:start=5,end=20,duration=30")
    found = run(*LENGTHS, rate=ramp)
    assert isinstance(found.exception, SpecError)
    assert "which end; expected gamma, deterministic or mmpp" in str(found.exception)


@pytest.mark.slow
def test_a_choice_that_is_given_twice_is_one_option() -> None:
    twice = ("--max-num-seqs", "8,8", "--max-output-tokens", "none,none", "--json")
    found = run(*LENGTHS, *twice)
    assert len(json.loads(found.stdout)["options"]) == 1


@pytest.mark.slow
def test_every_prediction_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(plan_cli, "working", lambda _: nullcontext(told.append))
    run(*LENGTHS, "--max-num-seqs", "8")
    assert told[0].startswith("option 1 of 1: law 1, 8 slots, ")
    assert told[-1].startswith("headroom of ")


def test_limits_that_all_cut_too_much_are_what_is_to_be_changed() -> None:
    found = run(*LENGTHS, "--max-num-seqs", "1", "--max-output-tokens", "5")
    assert found.exit_code == 3
    assert "raise --max-output-tokens or --max-clipped-fraction" in found.stderr
    assert "with 1 slot," in found.stdout
