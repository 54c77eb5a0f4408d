"""The validation script: what holds by which rule, what counts, when the machine was quiet, and
the whole of it on an emulated engine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.live.cell import model_of
from bench.live.design import FAST, KINDS, QUIET_MACHINE, chosen, plan_of, points
from bench.live.judgement import counted, counts, judge, noise
from bench.live.looks import Follower, Look, enough
from bench.live.observation import Cell as Observed
from bench.live.observation import block_speeds, seen_in
from bench.live.page import write_page
from bench.live.schedule import Schedule
from loadgen.gateway.gateway_process import free_port
from loadgen.sweep.grid import Basis, EngineBounds
from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.speed.batch_times import BatchTimes
from queueing.estimation.window_queue import Limits
from queueing.latency.law import parse_law
from queueing.measurement.record import Record, to_line
from queueing.measurement.statistics import Interval, mean_interval
from queueing.model import Model
from queueing.simulation.run_length import advise_model

ROOT = Path(__file__).parents[2]
GEOMETRIC, SAME = KINDS["g"][1], KINDS["p"][1]


def result(**changed: Any) -> dict[str, Any]:
    """A cell's file, as far as it is judged and shown."""
    interval = {"value": 0.020, "low": 0.018, "high": 0.022, "effective_n": 300.0}
    quantiles = {"p99": 0.09}
    live = {
        "interval": interval,
        "load_interval": {"value": 0.51},
        "served_queueing_delay": quantiles,
        "comparison": {
            "verdict": "agree",
            "reasons": [],
            "assumptions": {"constant_speed": {"holds": False, "says": "slower"}},
        },
    }
    plain = {
        "cell": "single_load0.5",
        "policy": "single",
        "load": 0.5,
        "rate": 20.0,
        "seed": 1006,
        "attempt": 1,
        "ended": "half-width",
        "seconds": 100.0,
        "speeds": [1.0, 1.01],
        "noise": [],
        "block_speeds": [1.0, 1.02, 0.99],
        "compared": "queueing_delay",
        "n": 2000,
        "observed": {
            "value": 0.0205,
            "low": 0.0190,
            "high": 0.0220,
            "effective_n": 300.0,
            "p99": {"value": 0.1},
        },
        "measured_service": {"observed": 0.0205, "recursion": 0.0204, "n": 2000},
        "waiting": None,
        "live": live,
        "offline": {
            "interval": interval,
            "load_interval": {"value": 0.5},
            "prediction": {},
            "comparison": live["comparison"],
        },
        "rules": {"half_width": 0.1},
        "law": "k1=0.0003",
        "lateness": {"mean": 1e-5, "p99": 1e-4},
        "versions": {"python": "3.11"},
        "hardware": {"cpu": "some", "cores": 2},
        "engine": "vllm",
        "output_tokens": "uniform:low=1,high=31",
        "prompt_tokens": "deterministic:value=32",
        "max_num_seqs": 16,
        "date": "2026-01-01T00:00:00+00:00",
    }
    return plain | changed


def observed(value: float, half: float = 0.0001, p99: float = 0.1) -> dict[str, Any]:
    return {
        "value": value,
        "low": value - half,
        "high": value + half,
        "effective_n": 300.0,
        "p99": {"value": p99},
    }


@pytest.mark.parametrize("load", [0.3, 0.75, 0.9])
@pytest.mark.parametrize(
    ("value", "half", "says"),
    [
        (0.0210, 0.0001, "holds"),  # within 5 % of the observed mean
        (0.0212, 0.0001, "does not hold"),
        (0.0191, 0.0001, "holds"),
        (0.0189, 0.0001, "does not hold"),
        (0.0240, 0.0041, "holds"),  # in the interval of the observed mean
        (0.0240, 0.0039, "does not hold"),
        (0.0200, 0.0051, "too short"),  # whatever was predicted
        (0.0200, 0.0049, "holds"),
        (0.1000, 0.0300, "too short"),
    ],
)
def test_one_rule_at_every_load(load: float, value: float, half: float, says: str) -> None:
    """No band has a say, however wide."""
    cell = result(
        load=load,
        observed=observed(value, half),
        stated_band={"mean": 0.02, "low": 0.0, "high": 1.0},
    )
    assert judge(cell).says == says
    assert judge(cell).holds is {"holds": True, "does not hold": False, "too short": None}[says]


@pytest.mark.parametrize(
    ("by_recursion", "holds"), [(0.0201, True), (0.0200, False), (0.0209, True), (0.0210, False)]
)
def test_the_gateway_must_meet_its_measured_service(by_recursion: float, holds: bool) -> None:
    """2 % of 20 ms is more than 0.3 ms."""
    assert (
        judge(
            result(measured_service={"observed": 0.0205, "recursion": by_recursion, "n": 1})
        ).gateway_holds
        is holds
    )


@pytest.mark.parametrize(
    ("by_recursion", "holds"),
    [(0.00061, True), (0.00059, False), (0.00119, True), (0.00121, False)],
)
def test_of_short_delays_the_gateway_may_miss_the_measured_service_by_0_3_ms(
    by_recursion: float, holds: bool
) -> None:
    assert (
        judge(
            result(measured_service={"observed": 0.0009, "recursion": by_recursion, "n": 1})
        ).gateway_holds
        is holds
    )


@pytest.mark.parametrize(
    ("mean", "error", "holds"),
    [
        (0.02059, 0.0295, True),
        (0.02061, 0.0305, False),
        (0.01941, -0.0295, True),
        (0.01939, -0.0305, False),
    ],
)
def test_the_median_error_may_be_three_percent_up_or_down(
    mean: float, error: float, holds: bool
) -> None:
    cell = judge(result(observed=observed(mean)))
    assert cell.error == pytest.approx(error)
    _, _, median, _ = counts([cell])
    assert (median.found, median.holds) == (pytest.approx(abs(error)), holds)


@pytest.mark.parametrize(
    ("p99", "error", "holds"),
    [
        (0.1079, 0.199, True),
        (0.1081, 0.201, False),
        (0.0721, -0.199, True),
        (0.0719, -0.201, False),
    ],
)
def test_the_99th_percentile_may_be_a_fifth_off_up_or_down(
    p99: float, error: float, holds: bool
) -> None:
    """90 ms are predicted."""
    cell = judge(result(observed=observed(0.0205, p99=p99)))
    assert cell.p99_error == pytest.approx(error, abs=1e-3)
    assert counts([cell])[3].found == holds


@pytest.mark.parametrize(("load", "low"), [(0.6, True), (0.61, False)])
def test_errors_are_counted_up_to_load_0_6(load: float, low: bool) -> None:
    cells = [judge(result(load=load, observed=observed(0.03)))]
    assert cells[0].low is low
    _, _, error, p99 = counts(cells)
    assert (math.isnan(error.found), p99.of) == ((False, 1) if low else (True, 0))


@pytest.mark.parametrize(
    ("half", "effective_n", "seconds", "live", "known"),
    [
        (0.0999, 150.0, 30.0, {}, True),
        (0.1001, 150.0, 30.0, {}, False),
        (0.0999, 100.0, 30.0, {}, True),
        (0.0999, 99.0, 30.0, {}, False),
        (0.0999, 150.0, 29.9, {}, False),
        (0.0999, 150.0, 30.0, None, False),
    ],
)
def test_a_cell_ends_where_its_mean_is_known_and_predicted(
    half: float, effective_n: float, seconds: float, live: dict[str, Any] | None, known: bool
) -> None:
    seen = Look(Interval(1.0, half, 5000, effective_n, 0.0), live, None)
    assert enough(seen, seconds, half_width=0.1, least=30.0) == known


def test_an_unknown_half_width_forgives_nothing_silently() -> None:
    """A cell without an interval cannot be told apart from anything: it is too short, and its
    half width is shown as a dash.
    """
    unknown = judge(result(observed=observed(0.05) | {"low": None, "high": None}))
    assert math.isinf(unknown.half_width)
    assert unknown.says == "too short"


def test_without_a_live_prediction_the_offline_one_is_judged() -> None:
    alone = result(live=None)
    assert judge(alone).predicted == 0.020
    nothing = alone["offline"] | {"interval": {"value": None, "low": None, "high": None}}
    assert judge(alone | {"offline": nothing}).says == "nothing predicted"


def test_the_attempt_whose_mean_is_known_better_counts_whether_it_agrees_or_not() -> None:
    wide = result(observed=observed(0.0205, 0.006))
    narrow = result(
        attempt=2,
        observed=observed(0.5, 0.05),
        noise=["the speed changed by +6% from before to after"],
    )
    assert counted([wide, narrow])["attempt"] == 2
    assert counted([narrow, wide])["attempt"] == 2
    unknown = result(attempt=3, observed=observed(0.02) | {"low": None, "high": None})
    assert counted([unknown, wide])["attempt"] == 1


def test_the_noise_gate() -> None:
    gate = {"block_deviation": 0.1, "bracket_deviation": 0.05}
    assert noise([1.0999, 0.9001], (1.0, 1.0499), **gate) == noise([], (1.0, 0.9501), **gate) == []
    for blocks in ([1.1001, 0.8999], [1.0, 1.0, 0.85], [1.0, 1.0, 1.16]):  # of their mean
        (said,) = noise(blocks, (1.0, 1.04), **gate)
        assert said.startswith("a block's speed lay 1")
    for after, sign in ((1.0501, "+5%"), (0.9499, "-5%")):
        (said,) = noise([1.0], (1.0, after), **gate)
        assert sign in said
    assert "not known" in noise([1.0], (1.0, None), **gate)[0]


def test_block_speeds_show_a_slow_block_and_join_thin_ones() -> None:
    at = np.arange(0.0, 20.0, 0.1)
    ones = np.ones(at.size)
    slow = np.where((at >= 5) & (at < 10), 1.5, 1.0)
    times = BatchTimes(at, 0.05 * slow, 0.05 * ones, ones, ones, ones)
    assert block_speeds(times, 5.0) == pytest.approx([1.0, 1.5, 1.0, 1.0])
    thin = times.part(np.arange(0, at.size, 25))
    assert block_speeds(thin, 5.0) == []
    assert len(block_speeds(times.part(np.arange(0, at.size, 9)), 5.0)) == 2


def test_the_acceptance_numbers_of_a_whole_table() -> None:
    cells = [judge(result(load=load, seed=i)) for load in (0.3, 0.5, 0.6, 0.75) for i in range(6)]
    gateway, hold, error, p99 = counts(cells)
    assert [gateway.asked, hold.asked, error.asked, p99.asked] == [24, 23, 0.03, 14]
    assert (hold.found, p99.found) == (24, 18)
    assert error.found == pytest.approx(0.025)
    assert counts([*cells, judge(result(longer=True))])[1].of == 24, "longer cells are not counted"
    assert all(count.holds for count in (gateway, hold, error, p99))
    wrong = [judge(result(load=0.5, observed=observed(0.03, p99=0.2))) for _ in range(4)]
    _, hold, _, p99 = counts(wrong + cells[4:])
    assert (hold.holds, hold.found) == (False, 20)
    assert (p99.holds, p99.found) == (True, 14)


def test_the_plan_is_six_policies_at_four_loads_each_with_its_own_luck() -> None:
    every = list(points(plan_of(QUIET_MACHINE, 1, fast=False)))
    table, longer = (
        [point for point in every if not point.longer],
        [point for point in every if point.longer],
    )
    assert (
        len({point.name for point in every}) == len({point.seed for point in every}) == len(every)
    )
    assert len(table) == 24
    assert [point.load for point in longer] == [0.75, 0.9]
    assert sum(point.output_tokens == GEOMETRIC for point in table) == 12
    assert [point.sequences for point in table if point.output_tokens == SAME] == [2, 2], (
        "one forced length is that of both sequences"
    )
    assert sum(point.sequences > 1 for point in table) == 2
    assert [point.name for point in chosen(table, "single,dynamic", "0.3")] == [
        "single_load0.3",
        "dynamic_load0.3",
    ]
    with pytest.raises(ValueError, match="name no cell"):
        chosen(table, "triple", None)


def test_a_longer_cell_runs_as_long_as_the_run_length_rule_advises() -> None:
    plan = plan_of(QUIET_MACHINE, 1, fast=False)
    basis = Basis(
        plan,
        parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.12"),
        EngineBounds(max_num_seqs=16, max_model_len=2048),
    )
    point = next(point for point in points(plan) if point.longer)
    model = model_of(basis, point)
    advised = advise_model(
        model, point.load * model.largest_stable_rate, relative=QUIET_MACHINE.half_width
    ).seconds
    schedule = Schedule(basis, QUIET_MACHINE)
    schedule.plan([point])
    assert schedule.advised[point.name] == pytest.approx(max(QUIET_MACHINE.planned, advised))
    assert schedule.allowed(point, 10.0, 1000.0) == schedule.advised[point.name], (
        "the time of the others does not cut it"
    )


def test_calls_of_two_sequences_ask_for_half_as_many_calls() -> None:
    plan = plan_of(QUIET_MACHINE, 1, fast=False)
    basis = Basis(
        plan,
        parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012"),
        EngineBounds(max_num_seqs=16, max_model_len=2048),
    )
    pairs = next(point for point in points(plan) if point.sequences == 2)
    alone = dataclasses.replace(pairs, sequences=1)
    assert model_of(basis, pairs).largest_stable_rate == pytest.approx(
        model_of(basis, alone).largest_stable_rate / 2
    )


def test_calls_are_found_again_in_the_records() -> None:
    records = [
        Record(
            request_id=f"c{call}-{place}",
            outcome="completed",
            epoch=1,
            arrived_at=float(call),
            dispatched_at=call + 0.1,
            released_at=call + 0.2,
            server_free_at=call + 0.2,
            batch_id=call,
            batch_size=2,
            server_id=0,
            prompt_tokens=3,
            output_tokens=4,
        )
        for call in range(1, 6)
        for place in range(2)
    ]
    live = {"window": {"start": 0.0, "end": 10.0}}
    cell = Observed(
        policy="dynamic",
        epoch=1,
        records=records,
        shape=parse_law("a=0.001,c=0.01"),
        limits=Limits(max_output_tokens=9),
        block=5.0,
        live=live,
    )
    seen = seen_in(cell)
    assert seen.arrivals.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen.sequences is not None
    assert seen.sequences.tolist() == [2.0] * 5


def test_cells_share_the_time_that_there_is() -> None:
    plan = plan_of(QUIET_MACHINE, 1, fast=False)
    basis = Basis(
        plan,
        parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.12"),
        EngineBounds(max_num_seqs=16, max_model_len=2048),
    )
    every = list(points(plan))[:2]
    schedule = Schedule(basis, QUIET_MACHINE)
    schedule.advised = {every[0].name: 100.0, every[1].name: 300.0}
    later = schedule.seconds(every[1])
    assert later == 300.0 + QUIET_MACHINE.overhead
    half = (schedule.seconds(every[0]) + later) / 2
    assert schedule.allowed(every[0], 10_000.0, later) == pytest.approx(200.0)
    assert schedule.allowed(every[0], half, later) == pytest.approx(50.0)
    assert schedule.allowed(every[0], 10.0, later) == QUIET_MACHINE.least


def test_a_growing_run_file_is_read_on(tmp_path: Path) -> None:
    path, half = tmp_path / "run.jsonl", 700
    rng = np.random.default_rng(1)
    delays = rng.exponential(0.01, 2 * half)
    lines = [
        to_line(
            Record(
                request_id=str(i),
                outcome="completed",
                epoch=3,
                arrived_at=float(i),
                queueing_delay=float(delay),
            )
        )
        for i, delay in enumerate(delays)
    ]
    other = to_line(
        Record(request_id="x", outcome="completed", epoch=2, arrived_at=0.5, queueing_delay=9.0)
    )
    path.write_bytes(other + b"".join(lines[:half]) + lines[half][:20])
    follower = Follower(path, 0, 3, sojourn=False)
    assert follower.read().n == half - int(0.05 * half)
    path.write_bytes(other + b"".join(lines))
    assert follower.read() == mean_interval(delays[int(0.05 * 2 * half) :])


def test_the_page_says_what_holds_and_names_what_does_not(tmp_path: Path) -> None:
    cells = tmp_path / "run/cells"
    cells.mkdir(parents=True)
    found = [
        result(
            rules={"half_width": 0.1},
            at_its_speeds=0.022,
            stated_band={"mean": 0.021, "low": 0.012, "high": 0.04},
        ),
        result(
            cell="longer", longer=True, seed=1024, sequences=2, output_tokens="geometric:mean=16"
        ),
        result(
            cell="dynamic_load0.5",
            policy="dynamic",
            seed=1007,
            observed=observed(0.04),
            ended="time",
        ),
        result(
            cell="elastic_load0.75",
            policy="elastic",
            load=0.75,
            seed=1008,
            noise=["the speed changed by +9%"],
            observed=observed(0.02, 0.006),
        ),
        result(
            cell="continuous_load0.3",
            policy="continuous",
            seed=1009,
            compared="sojourn_time",
            waiting={
                "observed": 0.021,
                "predicted": 0.024,
                "n": 900,
                "simulated_sojourn_p99": 0.08,
            },
        ),
    ]
    for each in found:
        (cells / f"{each['cell']}.1.json").write_text(json.dumps(each))
    text = write_page(tmp_path / "run", tmp_path / "docs").read_text()
    assert "## 2 of 4 cells hold, 1 is too short\n" in text, "the heading says what the table says"
    assert "Measured: 4 of 24 cells. A cell that is too short does not hold." in text
    assert "| cells that hold | 2 of 4 | at least 4 | **no** |" in text
    assert "20 (18 to 22) | +100.0 %" in text
    assert "| too short |" in text
    assert "| 12 to 40 |" in text
    assert "| 22 |" in text, "the prediction at the cell's speeds"
    assert (
        text.index("## Every cell") < text.index("## Longer cells") < text.index("geometric, n = 2")
    )
    assert "dynamic_load0.5, error +100.0 %. The live model: constant_speed: slower." in text
    assert "Ended by the time limit (t), mean not yet known well enough: dynamic_load0.5." in text
    assert "elastic_load0.75: the speed changed by +9%" in text
    assert "| 0.5 | 2.1 % | 2.4 % | 900 |" in text
    assert (tmp_path / "docs/live-validation/observed-and-predicted.png").stat().st_size > 5000
    assert "at the speed measured just before the cell." in text
    for each in found:
        (cells / f"{each['cell']}.1.json").write_text(json.dumps(each | {"speed_under_load": 1.1}))
    piloted = write_page(tmp_path / "run", tmp_path / "other").read_text()
    assert "at the speed of a pilot under load, 12 s, just before the cell." in piloted
    again = write_page(tmp_path / "docs/live-validation", tmp_path / "docs").read_text()
    assert again == text, "the committed data make the same page"


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    cells = "dynamic_load0.5,continuous-max-batch-size-4_load0.3"
    fast = ("--fast", "--cells", cells, "--folder", str(folder), "--port", str(free_port(0)))
    return subprocess.Popen(
        [sys.executable, "bench/live_validation.py", *fast, *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_a_killed_validation_is_gone_on_with(tmp_path: Path) -> None:
    """On the emulated engine, in seconds: what it shows is that the machinery measures, judges,
    resumes and writes.
    """
    folder = tmp_path / "run"
    process = start(folder)
    deadline = time.perf_counter() + 120
    while not list(folder.glob("cells/*.json")):
        assert process.poll() is None, process.communicate()[1].decode()[-3000:]
        assert time.perf_counter() < deadline
        time.sleep(0.1)
    time.sleep(2.0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.read_bytes() for path in folder.glob("cells/*.json")}
    refused = start(folder)
    assert b"expected --resume" in refused.communicate(timeout=60)[1]
    assert refused.returncode == 2
    process = start(folder, "--resume")
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said.decode()[-3000:]
    assert all(path.read_bytes() == content for path, content in before.items())
    cells = [json.loads(path.read_bytes()) for path in sorted(folder.glob("cells/*.json"))]
    assert {cell["cell"] for cell in cells} == {
        "dynamic_load0.5",
        "continuous-max-batch-size-4_load0.3",
    }
    for cell in cells:
        service = cell["measured_service"]
        assert service["observed"] == pytest.approx(
            service["recursion"], rel=0.2
        )  # tests share their machine
        assert cell["n"] > 50
        law = parse_law(cell["law"]).at_speed(cell["speed_under_load"])
        model = Model(
            policy=parse_policy(cell["policy"]),
            output_tokens=parse_distribution(cell["output_tokens"]),
            law=law,
            max_num_seqs=16,
        )
        assert cell["rate"] == pytest.approx(cell["load"] * model.largest_stable_rate, rel=0.02)
        assert cell["live"]["window"]["seconds"] > FAST.least / 2
        assert cell["live"]["n"] == pytest.approx(cell["n"], abs=3)
    assert "Measured: 2 of 24 cells." in (folder / "live-validation.md").read_text()
