"""Plans and the cells that follow from them: the same requests for every policy, whole batches,
refusals.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.loadgen.commands.flags import SweepCommand, in_a_row
from kendall.loadgen.commands.sweep_cli import app, sweep_command
from kendall.loadgen.report.conditions import parse_conditions
from kendall.loadgen.sending.run import VOCABULARY
from kendall.loadgen.sweep.dry_run import plan_as_object
from kendall.loadgen.sweep.grid import Basis, GatewayBounds, SweepCell, cell_name
from kendall.loadgen.sweep.plan import LOADS, POLICIES, SweepPlan, load_plan, save_plan
from kendall.loadgen.sweep.slo import parse_slo
from kendall.loadgen.sweep.status import duration
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import draw_prompts
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.run_length import advise_model
from kendall.server.engines.base import describe_engine
from kendall.server.engines.emulated import EmulatedEngine
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.0003, k2=0.0014, k3=0.000025, k4=0.00092)
BOUNDS = GatewayBounds(max_num_seqs=16, max_model_len=512)


def basis(**changes: Any) -> Basis:
    return Basis(SweepPlan(**{"loads": (0.3, 0.7), "num_prompts": 200} | changes), LAW, BOUNDS)


def cells_of(**changes: Any) -> list[SweepCell]:
    return list(basis(**changes).cells())


def test_every_policy_rate_and_limit_meets_the_same_requests() -> None:
    """The unit gaps are equal after scaling with the rate, lengths and prompts are equal at
    once.
    """
    grid = basis(
        max_output_tokens=(16, None), request_rates=(7.0,), prompt_tokens="uniform:low=4,high=40"
    )
    cells = list(grid.cells())
    assert len(cells) == 6 * 3 * 2
    first = grid.timetable(cells[0])
    prompts = draw_prompts(first, grid.plan.seed, VOCABULARY)
    for cell in cells[1:]:
        table = grid.timetable(cell)
        np.testing.assert_allclose(
            table.intended_at * cell.rate, first.intended_at * cells[0].rate, rtol=1e-9
        )
        np.testing.assert_array_equal(table.output_tokens, first.output_tokens)
        np.testing.assert_array_equal(table.prompt_tokens, first.prompt_tokens)
    for one, other in zip(
        prompts, draw_prompts(grid.timetable(cells[-1]), grid.plan.seed, VOCABULARY), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(
        first.output_tokens,
        Basis(SweepPlan(loads=(0.3,), num_prompts=200, seed=2), LAW, BOUNDS)
        .timetable(cells[0])
        .output_tokens,
    )


@pytest.mark.parametrize("evenly", [False, True])
def test_a_search_for_the_saturation_sends_at_equal_distances(evenly: bool) -> None:
    cell = msgspec.structs.replace(cells_of()[0], evenly=evenly)
    gaps = np.diff(basis().timetable(cell).intended_at)
    assert gaps.mean() == pytest.approx(1 / cell.rate, rel=0.3)
    assert (gaps.std() < 1e-9 * gaps.mean()) == evenly


def test_a_longer_cell_begins_as_a_shorter_one() -> None:
    grid = basis(num_prompts=None, duration=10.0)
    short, long = (
        grid.timetable(cell) for cell in sorted(grid.cells(), key=lambda cell: cell.count)[::11]
    )
    assert len(short) < len(long)
    np.testing.assert_array_equal(short.output_tokens, long.output_tokens[: len(short)])


def test_loads_are_fractions_of_each_policys_own_largest_stable_rate() -> None:
    for cell in cells_of():
        model = basis().model(cell.policy, None)
        assert cell.rate == pytest.approx(cell.load * model.largest_stable_rate)
    assert cells_of(max_output_tokens=(12,))[0].rate > cells_of()[0].rate, (
        "a token limit lets more requests through at the same load"
    )


def test_fixed_batches_are_whole() -> None:
    cells = basis(policies=("fixed:batch_size=7",), num_prompts=100).cells()
    assert [cell.count for cell in cells] == [105, 105]


def test_the_time_limit_cuts_a_cell_and_says_so() -> None:
    free, limited = cells_of(cell_limit=1e6)[0], cells_of(cell_limit=2.0)[0]
    assert (free.count, free.cut) == (200, False)
    assert (limited.count, limited.cut) == (int(2 * limited.rate), True)


def test_a_random_order_is_the_seeds_and_holds_the_same_cells() -> None:
    listed, shuffled = cells_of(), cells_of(order="random")
    assert shuffled != listed
    assert sorted(shuffled, key=lambda cell: cell.name) == sorted(
        listed, key=lambda cell: cell.name
    )
    assert shuffled == cells_of(order="random")
    assert shuffled != cells_of(order="random", seed=2)


def test_names_are_good_for_files_and_differ() -> None:
    names = [
        cell.name for cell in basis(max_output_tokens=(16, None), request_rates=(7.0,)).cells()
    ]
    assert len(set(names)) == len(names)
    assert "fixed-batch-size-4_limit16_load0.3" in names
    assert not any(set(name) & set(":,=/ ") for name in names)
    assert (
        cell_name("single", None, "p99_queueing_delay<=2s-probe-1.5")
        == "single_p99-queueing-delay-2s-probe-1.5"
    )


def test_a_plan_reads_back_as_it_was_and_differences_are_named(tmp_path: Path) -> None:
    plan = SweepPlan(loads=(0.3,), max_output_tokens=(16, None), slo=("p99_queueing_delay=2s",))
    save_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.differences(plan) == []
    other = SweepPlan(
        loads=(0.3, 0.5), max_output_tokens=(16, None), slo=("p99_queueing_delay=2s",), seed=9
    )
    assert plan.differences(other) == [
        "loads: 0.3 there, 0.3, 0.5 here",
        "seed: 1 there, 9 here",
    ]
    with pytest.raises(SpecError, match="the folder of a sweep"):
        load_plan(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loads": ()}, "nothing to measure"),
        ({"loads": (0.5, 1.2)}, "allow-unstable"),
        ({"loads": (-0.1,)}, "numbers > 0"),
        ({"loads": (0.3, 0.3)}, "different numbers"),
        ({"policies": ("single", "single")}, "each once"),
        ({"policies": ("singel",)}, "singel"),
        ({"output_tokens": "gaussian:mean=3"}, "gaussian"),
        ({"duration": 0.0}, "duration"),
        ({"bracket": -1.0}, "bracket"),
        ({"precision": 0.5}, "too short"),
        ({"slo": ("q98_queueing_delay=2s",)}, "p99_queueing_delay=2s"),
        ({"slo": ("p99_delay=2s",)}, "queueing_delay"),
        ({"slo": ("p99_queueing_delay=0s",)}, "seconds > 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        SweepPlan(**{"loads": (0.3,)} | changes)


ORDERED: dict[str, Any] = {
    "policies": ("single", "continuous:max_batch_size=4"),
    "orders": ("fcfs", "spjf:aging=0.020", "mlfq:levels=3,quantum=8"),
}


def test_every_policy_is_measured_under_every_order() -> None:
    plan = SweepPlan(loads=(0.5,), find_saturation=True, **ORDERED)
    assert plan.orders == ("fcfs", "spjf:aging=0.02", "mlfq:quantum=8,levels=3")
    assert plan.ordered_policies == (
        "single",
        "single:order=spjf,aging=0.02",
        "single:order=mlfq,quantum=8,levels=3",
        "continuous:max_batch_size=4",
        "continuous:max_batch_size=4,order=spjf,aging=0.02",
        "continuous:max_batch_size=4,order=mlfq,quantum=8,levels=3",
    )
    assert [policy for policy, _, _ in plan.searches] == list(plan.ordered_policies)
    assert {cell.policy for cell in cells_of(**ORDERED)} == set(plan.ordered_policies)
    assert plan.has_orders
    assert not SweepPlan(loads=(0.5,), policies=("single",), orders=("fcfs",)).has_orders
    assert SweepPlan(loads=(0.5,), policies=("single:order=ljf",)).has_orders


def test_a_plan_with_orders_reads_back_as_it_was(tmp_path: Path) -> None:
    plan = SweepPlan(loads=(0.3,), predictor="one_bit:threshold=9,accuracy=1", **ORDERED)
    assert plan.predictor == "onebit:threshold=9"
    save_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"policies": ("single", "dynamic"), "orders": ("fcfs", "sprpt")},
            r"got order sprpt, which interrupts a batch; expected fcfs, .*under each order\)",
        ),
        ({"policies": ("single",), "orders": ("sjf",)}, "did you mean 'spjf'"),
        ({"policies": ("single",), "orders": ("threshold",)}, "expected threshold=NUMBER"),
        ({"policies": ("single:order=spjf",), "orders": ("fcfs",)}, "an order of its own"),
        ({"policies": ("single",), "orders": ("spjf:aging=-1",)}, "expected finite seconds >= 0"),
        ({"policies": ("single",), "orders": ("fcfs", "fcfs")}, "got the orders fcfs, fcfs"),
        ({"predictor": "magic"}, "got predictor 'magic'"),
    ],
)
def test_an_order_that_cannot_be_measured_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        SweepPlan(**{"loads": (0.3,)} | changes)


def test_an_order_that_misses_its_predictions_is_named_and_no_other() -> None:
    warning = SweepPlan(loads=(0.3,), **ORDERED).reads_no_prediction
    assert warning is not None
    assert "for the order spjf:aging=0.02; expected one" in warning
    assert SweepPlan(loads=(0.3,), predictor="exact", **ORDERED).reads_no_prediction is None
    unread: dict[str, Any] = {"policies": ("single",), "orders": ("fcfs", "fb")}
    assert SweepPlan(loads=(0.3,), **unread).reads_no_prediction is None


def test_every_order_meets_the_same_requests_with_the_same_predictions() -> None:
    grid = basis(**ORDERED, loads=(0.5, 0.8), predictor="lognormal:sigma=0.5")
    first, *others = [grid.timetable(cell) for cell in grid.cells()]
    assert first.predicted_output_tokens is not None
    assert len(others) == 11
    for table in others:
        np.testing.assert_array_equal(table.output_tokens, first.output_tokens)
        np.testing.assert_array_equal(table.predicted_output_tokens, first.predicted_output_tokens)
    one, other = (grid.timetable(cell) for cell in list(grid.cells())[:2])
    np.testing.assert_array_equal(one.intended_at, other.intended_at)
    assert basis().timetable(cells_of()[0]).predicted_output_tokens is None


def test_predicted_lengths_are_those_behind_the_gateways_limit() -> None:
    """As theory has them; the lengths themselves are those before it."""
    grid = basis(max_output_tokens=(12, None), predictor="exact", policies=("single",))
    limited, free = (
        grid.timetable(next(cell for cell in grid.cells() if cell.max_output_tokens == limit))
        for limit in (12, None)
    )
    assert free.output_tokens.max() > 12
    np.testing.assert_array_equal(limited.output_tokens, free.output_tokens)
    np.testing.assert_array_equal(free.predicted_output_tokens, free.output_tokens)
    np.testing.assert_array_equal(
        limited.predicted_output_tokens, np.minimum(free.output_tokens, 12)
    )


def test_cells_that_differ_in_their_order_are_equally_long() -> None:
    """As long as the precision takes in the order of arrival."""
    found = cells_of(**ORDERED, num_prompts=None, precision=0.2, loads=(0.6,), cell_limit=1e9)
    plain = cells_of(
        policies=ORDERED["policies"], num_prompts=None, precision=0.2, loads=(0.6,), cell_limit=1e9
    )
    assert [cell.count for cell in found] == [cell.count for cell in plain for _ in range(3)]


def test_the_model_of_a_cell_has_the_bound_of_the_engines_step() -> None:
    engine = EmulatedEngine(LAW, enable_chunked_prefill=1, max_num_batched_tokens=256)
    bounds = msgspec.convert(describe_engine(run_virtual(engine.start()), "tiny"), GatewayBounds)
    assert bounds == GatewayBounds(max_num_seqs=64, max_model_len=2048, step_tokens=256)
    assert str(bounds) == "max_num_seqs=64, max_model_len=2048, step_tokens=256"
    assert msgspec.convert(msgspec.to_builtins(bounds), GatewayBounds) == bounds
    assert "step_tokens" not in msgspec.to_builtins(BOUNDS)
    chunked = Basis(SweepPlan(loads=(0.3,)), LAW, bounds)
    assert chunked.model("continuous:max_batch_size=4", None).step_tokens == 256
    assert chunked.model("capped:max_batch_size=4", None).step_tokens is None
    assert basis().model("continuous:max_batch_size=4", None).step_tokens is None


def test_the_model_of_a_cell_has_the_plans_predictor() -> None:
    grid = basis(**ORDERED, predictor="lognormal:sigma=0.5")
    assert str(grid.model("single:order=spjf", None).requests.predictor) == "lognormal:sigma=0.5"


def test_prompts_without_room_for_an_answer_are_refused() -> None:
    with pytest.raises(SpecError, match="context of 512"):
        cells_of(prompt_tokens="deterministic:value=512")


def test_precision_asks_for_the_advised_length() -> None:
    grid = basis(
        num_prompts=None,
        precision=0.1,
        cell_limit=1e9,
        policies=("single", "dynamic"),
        loads=(0.5, 0.8),
    )
    cells = list(grid.cells())
    for cell in cells:
        advised = advise_model(grid.model(cell.policy, None), cell.rate, relative=0.1).requests
        assert cell.count == max(advised, math.ceil(15 * cell.rate)), (
            "and no less than the wander of a machine's speed"
        )
    assert cells[2].count > 3 * cells[0].count, "a higher load takes longer"


def test_a_point_without_a_steady_state_ends_with_its_limit_of_time() -> None:
    (cell,) = cells_of(
        num_prompts=None, policies=("single",), loads=(1.5,), allow_unstable=True, cell_limit=10.0
    )
    assert cell.seconds == pytest.approx(10.0, abs=0.1)
    assert cell.cut


def test_an_slo_is_judged_by_its_quantile_and_what_was_lost_broke_it() -> None:
    slo = parse_slo("p90_queueing_delay=250ms")
    assert (slo.bound, slo.stat) == (0.25, "p90")
    records = [
        Record(request_id=str(i), outcome="completed", queueing_delay=i / 100) for i in range(100)
    ]
    assert slo.observed(records) == pytest.approx(0.89)
    assert slo.observed([Record(request_id="x", outcome="failed")] * 20 + records) == np.inf
    assert slo.observed([]) == np.inf


def test_conditions_are_read_before_anything_runs() -> None:
    assert [
        condition.name
        for condition in parse_conditions(["prediction_error < 0.15", "p99_queueing_delay < 2s"])
    ] == [
        "prediction_error",
        "p99_queueing_delay",
    ]
    with pytest.raises(SpecError, match="did you mean p99_queueing_delay"):
        parse_conditions(["p99_quing_delay < 2s"])


def test_the_defaults_are_six_policies_at_four_loads() -> None:
    """What `kendall sweep` does without options."""
    shown = CliRunner().invoke(app, ["--dry-run", "--json", "--num-prompts", "1000"])
    assert shown.exit_code == 0, shown.output
    planned = json.loads(shown.stdout)
    assert {(cell["policy"], round(cell["load"], 6)) for cell in planned["cells"]} == {
        (p, load) for p in POLICIES for load in (0.3, 0.5, 0.7, 0.8)
    }
    assert planned["law_is_a_guess"]
    assert SweepPlan(loads=(0.3,)).precision == 0.1
    assert planned["plan"]["output_tokens"] == "uniform:low=8,high=24"


def test_a_dry_run_says_lengths_refusals_and_searches() -> None:
    arguments = [
        "--policies",
        "single",
        "dynamic",
        "--request-rates",
        "5,100",
        "--num-prompts",
        "50",
        "--latency",
        "k1=0,k2=0.05,k3=0,k4=0.001",
    ]
    shown = CliRunner().invoke(app, [*arguments, "--dry-run", "--find-saturation"]).stdout
    assert sum("policy" in line for line in shown.splitlines()) == 1, (
        "a head above rows that come one at a time"
    )
    assert re.search(r"single +0\.\d{3} +5 +50 +10 s$", shown, re.MULTILINE)
    assert shown.count("NOT RUN") == 1
    assert "2 searches: 2 for saturation (--find-saturation); each of about 5 probes" in shown
    assert re.search(r"^4 cells and 2 searches, about \d+ min in all, ", shown, re.MULTILINE)
    assert "law: k1=0" in shown
    assert "guess" not in shown


def test_token_limits_begin_at_one() -> None:
    arguments = ["--policies", "single", "--max-output-tokens", "1,none,64", "--num-prompts", "9"]
    result = CliRunner().invoke(app, [*arguments, "--dry-run", "--json"])
    assert json.loads(result.stdout)["plan"]["max_output_tokens"] == [1, None, 64]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--loads", "a"],
        ["--max-output-tokens", "0"],
        ["--preset", "none"],
        ["--order", "sorted"],
        ["--resume", "/nowhere"],
        ["--orders", "fcfs,,spjf"],
        ["--orders", "aging=1"],
        ["--predictor", "magic"],
        ["--assert", "p99_nonsense < 2s"],
        ["--assert", "mean_queueing_delay < 200"],
    ],
)
def test_wrong_arguments_raise_a_spec_error(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, [*arguments, "--dry-run"]).exception, SpecError)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("given", "loads", "num_prompts", "duration"),
    [
        ([], [0.3, 0.6], None, 10.0),
        (["--num-prompts", "50"], [0.3, 0.6], 50, None),
        (["--precision", "0.2"], [0.3, 0.6], None, None),
        (["--duration", "3"], [0.3, 0.6], None, 3.0),
        (["--request-rates", "4"], [], None, 10.0),
        (["--loads", "0.5"], [0.5], None, 10.0),
    ],
)
def test_what_is_given_takes_the_place_of_what_a_preset_says_about_it(
    given: list[str], loads: list[float], num_prompts: int | None, duration: float | None
) -> None:
    arguments = ["--preset", "quick", "--dry-run", "--json", *given]
    plan = json.loads(CliRunner().invoke(app, arguments).stdout)["plan"]
    assert (plan["loads"], plan["num_prompts"], plan["duration"]) == (loads, num_prompts, duration)


@pytest.mark.slow
def test_searches_are_one_per_policy_limit_and_goal() -> None:
    plan = SweepPlan(
        policies=("single", "dynamic"),
        find_saturation=True,
        slo=("mean_queueing_delay=1s",),
        max_output_tokens=(8, 16),
    )
    assert len(plan.searches) == 8
    assert plan_as_object(plan)["cells"] == []


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--loads", "0.3", "0.6"], ["--loads", "0.3,0.6"]),
        (["--loads", "0.3,", "0.6", "dynamic"], ["--loads", "0.3,0.6", "dynamic"]),
        (["--loads=0.3", "0.6", "--seed", "7"], ["--loads=0.3,0.6", "--seed", "7"]),
        (
            ["dynamic", "--loads", "0.3", "single", "5"],
            ["dynamic", "--loads", "0.3", "single", "5"],
        ),
        (["--request-rates", "2", "4e1"], ["--request-rates", "2,4e1"]),
        (["--max-output-tokens", "16", "none"], ["--max-output-tokens", "16,none"]),
        (
            ["--slo", "p99_queueing_delay=2s", "p50_queueing_delay=1s"],
            ["--slo", "p99_queueing_delay=2s", "--slo", "p50_queueing_delay=1s"],
        ),
        (
            ["--slo", "p99_queueing_delay=2s", "capped:max_batch_size=8"],
            ["--slo", "p99_queueing_delay=2s", "capped:max_batch_size=8"],
        ),
        (["--json", "single", "--loads"], ["--json", "single", "--loads"]),
    ],
)
def test_the_values_of_a_list_may_follow_one_another(
    arguments: list[str], meant: list[str]
) -> None:
    assert in_a_row(arguments, SweepCommand.lists, SweepCommand.repeatable) == meant


@pytest.mark.slow
def test_blanks_separate_loads_as_commas_do() -> None:
    def loads(*arguments: str) -> list[float]:
        result = CliRunner().invoke(
            app, ["dynamic", *arguments, "--latency", "reference", "--dry-run", "--json"]
        )
        assert result.exit_code == 0, result.output
        return [cell["load"] for cell in json.loads(result.stdout)["cells"]]

    assert (
        loads("--loads", "0.3", "0.6")
        == loads("--loads", "0.3 0.6")
        == loads("--loads", "0.3, 0.6")
        == loads("--loads", "0.3,0.6")
    )
    wrong = CliRunner().invoke(app, ["dynamic", "--loads", "0.3,", "--dry-run"])
    assert isinstance(wrong.exception, SpecError)


@pytest.mark.parametrize(
    ("arguments", "said", "probes"),
    [
        (["--find-saturation"], "1 search: 1 for saturation (--find-saturation)", 5),
        (["--slo", "p99_queueing_delay=2s"], "1 search: 1 for p99_queueing_delay=2s (--slo)", 5),
        (
            ["--find-saturation", "--slo", "p99_queueing_delay=2s", "--tolerance", "0.01"],
            "2 searches: 1 for saturation (--find-saturation), 1 for p99_queueing_delay=2s (--slo)",
            8,
        ),
    ],
)
def test_a_dry_run_of_searches_alone_says_how_long_they_take(
    arguments: list[str], said: str, probes: int
) -> None:
    """No empty table; each probe takes as long as the one at the predicted rate, with its
    calibration and what is between.
    """
    given = ["--dry-run", "--policies", "single", "--duration", "20", *arguments]
    shown = " ".join(CliRunner().invoke(app, given).stdout.split())
    number = said.split(maxsplit=1)[0]
    assert f"{said}; each of about {probes} probes {said.partition(':')[0]}, about " in shown
    assert "requests" not in shown
    assert "0 cells" not in shown
    planned = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert [search["probes"] for search in planned["searches"]] == [probes] * int(number)
    assert planned["seconds"] == pytest.approx(int(number) * probes * (20 + 2 + 1) + 2, rel=0.01)
    assert (
        f"{duration(planned['seconds'])} in all, without the engine's start, its calibration and "
        "repeated cells"
    ) in shown


@pytest.mark.slow
def test_the_help_and_a_dry_run_say_the_same_of_the_default() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--dry-run"]).stdout.split())
    (takes,) = re.findall(
        r"24 cells, about \d+ min in all, without the engine's start, its calibration and "
        r"repeated cells",
        shown,
    )
    assert takes in " ".join((sweep_command.__doc__ or "").split())


def test_docs_name_the_loads_of_a_plan_that_has_none() -> None:
    text = Path("docs/how-to/sweep.md").read_text(encoding="utf-8")
    *others, last = map(str, LOADS)
    assert f"runs six policies at loads {', '.join(others)} and {last}," in text
    assert len(POLICIES) == 6
