"""The validation script: what holds by which rule, what counts, when the machine was quiet, and the whole of it on an emulated engine."""

from __future__ import annotations

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

from bench.live.design import FAST, QUIET_MACHINE, chosen, plan_of, points
from bench.live.judgement import counted, counts, judge, noise
from bench.live.looks import Follower
from bench.live.observation import block_speeds
from bench.live.page import write_page
from bench.live.schedule import Schedule
from loadgen.gateway_process import free_port
from loadgen.sweep.grid import Basis, Bounds
from queueing.estimation.batch_times import BatchTimes
from queueing.latency import parse_law
from queueing.record import Record, to_line
from queueing.statistics import mean_interval

ROOT = Path(__file__).parents[2]


def result(**changed: Any) -> dict[str, Any]:
    """A cell's file, as far as it is judged and shown."""
    interval = {"value": 0.020, "low": 0.018, "high": 0.022, "effective_n": 300.0}
    quantiles = {"p99": 0.09}
    live = {
        "interval": interval,
        "wander_band": None,
        "load_interval": {"value": 0.51},
        "served_queueing_delay": quantiles,
        "comparison": {"verdict": "agree", "reasons": [], "assumptions": {"constant_speed": {"holds": False, "says": "slower"}}},
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
        "observed": {"value": 0.0205, "low": 0.0190, "high": 0.0220, "effective_n": 300.0, "p99": {"value": 0.1}},
        "measured_service": {"observed": 0.0205, "recursion": 0.0204, "n": 2000},
        "waiting": None,
        "live": live,
        "offline": {
            "interval": interval,
            "wander_band": None,
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
    return {"value": value, "low": value - half, "high": value + half, "effective_n": 300.0, "p99": {"value": p99}}


@pytest.mark.parametrize(
    ("value", "half", "holds"),
    [(0.0219, 0.0001, True), (0.0221, 0.0001, False), (0.0221, 0.0022, True), (0.0179, 0.0001, False), (0.0179, 0.0021, True)],
)
def test_up_to_load_06_ten_percent_or_the_half_width(value: float, half: float, holds: bool) -> None:
    assert judge(result(observed=observed(value, half))).holds is holds


def test_a_millisecond_is_always_allowed() -> None:
    small = result(observed=observed(0.0014))
    small["live"] = small["live"] | {"interval": {"value": 0.0005, "low": 0.0004, "high": 0.0006}}
    assert judge(small).holds
    assert not judge(small | {"observed": observed(0.0016)}).holds


def test_above_load_06_the_band_of_the_wander_decides_too() -> None:
    far = result(load=0.75, observed=observed(0.03))
    assert judge(far).holds is False
    banded = far | {"live": far["live"] | {"wander_band": {"mean": 0.022, "low": 0.015, "high": 0.031}}}
    assert judge(banded).holds is True
    assert judge(banded | {"observed": observed(0.032)}).holds is False
    assert judge(banded | {"load": 0.6}).holds is False, "the band is for high loads only"
    narrow = banded["live"] | {"wander_band": {"mean": 0.02, "low": 0.0199, "high": 0.0201}}
    assert judge(banded | {"live": narrow, "observed": observed(0.0205)}).holds is False, "beside a band, the band decides"
    open_above = banded["live"] | {"wander_band": {"mean": None, "low": 0.015, "high": None}}
    assert judge(banded | {"live": open_above, "observed": observed(0.5)}).in_band


@pytest.mark.parametrize(("by_recursion", "holds"), [(0.0201, True), (0.0200, False), (0.0209, True), (0.0210, False)])
def test_the_gateway_must_meet_its_measured_service(by_recursion: float, holds: bool) -> None:
    """2 % of 20 ms is more than 0.3 ms."""
    assert judge(result(measured_service={"observed": 0.0205, "recursion": by_recursion, "n": 1})).gateway_holds is holds
    assert judge(result(measured_service={"observed": 0.0009, "recursion": 0.0007, "n": 1})).gateway_holds


def test_an_unknown_half_width_forgives_nothing_silently() -> None:
    """A cell without an interval cannot be told apart from anything: its half width is infinite and shown as a dash."""
    unknown = judge(result(observed=observed(0.05) | {"low": None, "high": None}))
    assert math.isinf(unknown.half_width)


def test_without_a_live_prediction_the_offline_one_is_judged() -> None:
    alone = result(live=None)
    assert judge(alone).predicted == 0.020
    nothing = alone["offline"] | {"interval": {"value": None, "low": None, "high": None}}
    assert judge(alone | {"offline": nothing}).holds is None


def test_the_attempt_whose_mean_is_known_counts_whether_it_agrees_or_not() -> None:
    short = result(ended="time")
    longer = result(attempt=2, observed=observed(0.5), noise=["the speed changed by +6% from before to after"])
    assert counted([short, longer])["attempt"] == 2
    assert counted([longer, short])["attempt"] == 2


def test_the_quiet_attempt_counts_whatever_it_observed() -> None:
    loud = result(noise=["a block's speed lay 30% from the cell's"], block_speeds=[1.0, 1.4])
    quiet = result(attempt=2, observed=observed(0.5))
    assert counted([loud, quiet])["attempt"] == 2
    drifted = result(noise=["the speed changed by +6% from before to after"], block_speeds=[1.0, 1.0])
    assert counted([drifted, quiet])["attempt"] == 2
    louder = result(attempt=2, noise=["more"], block_speeds=[1.0, 1.9])
    assert counted([loud, louder])["attempt"] == 1


def test_the_noise_gate() -> None:
    gate = {"block_deviation": 0.1, "bracket_deviation": 0.05}
    assert noise([1.0, 1.05, 0.97], (1.0, 1.04), **gate) == []
    assert len(noise([1.0, 1.5, 1.0], (1.0, 1.04), **gate)) == 1
    assert "+6%" in noise([1.0], (1.0, 1.06), **gate)[0]
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
    assert [gateway.asked, hold.asked, error.asked, p99.asked] == [24, 21, 0.05, 14]
    assert (hold.found, p99.found) == (24, 18)
    assert error.found == pytest.approx(0.025)
    assert all(count.holds for count in (gateway, hold, error, p99))
    wrong = [judge(result(load=0.5, observed=observed(0.03, p99=0.2))) for _ in range(4)]
    _, hold, _, p99 = counts(wrong + cells[4:])
    assert (hold.holds, hold.found) == (False, 20)
    assert (p99.holds, p99.found) == (True, 14)


def test_the_plan_is_six_policies_at_four_loads_each_with_its_own_luck() -> None:
    every = list(points(plan_of(QUIET_MACHINE, 1, fast=False)))
    assert len({point.name for point in every}) == len({point.seed for point in every}) == 24
    assert [point.name for point in chosen(every, "single,dynamic", "0.3")] == ["single_load0.3", "dynamic_load0.3"]
    with pytest.raises(ValueError, match="name no cell"):
        chosen(every, "triple", None)


def test_cells_share_the_time_that_there_is() -> None:
    plan = plan_of(QUIET_MACHINE, 1, fast=False)
    basis = Basis(plan, parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.12"), Bounds(max_num_seqs=16, max_model_len=2048))
    every = list(points(plan))[:2]
    schedule = Schedule(basis, QUIET_MACHINE)
    schedule.advised = {every[0].name: 100.0, every[1].name: 300.0}
    assert schedule.allowed(every[0], 10_000.0, 314.0) == pytest.approx(200.0)
    assert schedule.allowed(every[0], 214.0, 314.0) == pytest.approx(50.0)
    assert schedule.allowed(every[0], 10.0, 314.0) == QUIET_MACHINE.least


def test_a_growing_run_file_is_read_on(tmp_path: Path) -> None:
    path, half = tmp_path / "run.jsonl", 700
    rng = np.random.default_rng(1)
    delays = rng.exponential(0.01, 2 * half)
    lines = [
        to_line(Record(request_id=str(i), outcome="completed", epoch=3, arrived_at=float(i), queueing_delay=float(delay)))
        for i, delay in enumerate(delays)
    ]
    other = to_line(Record(request_id="x", outcome="completed", epoch=2, arrived_at=0.5, queueing_delay=9.0))
    path.write_bytes(other + b"".join(lines[:half]) + lines[half][:20])
    follower = Follower(path, 0, 3, sojourn=False)
    assert follower.read().n == half - int(0.05 * half)
    path.write_bytes(other + b"".join(lines))
    assert follower.read() == mean_interval(delays[int(0.05 * 2 * half) :])


def test_the_page_says_what_holds_and_names_what_does_not(tmp_path: Path) -> None:
    cells = tmp_path / "run/cells"
    cells.mkdir(parents=True)
    found = [
        result(rules={"half_width": 0.1}),
        result(cell="dynamic_load0.5", policy="dynamic", seed=1007, observed=observed(0.04), ended="time"),
        result(cell="elastic_load0.75", policy="elastic", load=0.75, seed=1008, noise=["the speed changed by +9%"], waiting=None),
        result(
            cell="continuous_load0.3",
            policy="continuous",
            seed=1009,
            compared="sojourn_time",
            waiting={"observed": 0.021, "predicted": 0.024, "n": 900, "simulated_sojourn_p99": 0.08},
        ),
    ]
    for each in found:
        (cells / f"{each['cell']}.1.json").write_text(json.dumps(each))
    text = write_page(tmp_path / "run", tmp_path / "docs").read_text()
    assert "## 4 of 24 cells" in text
    assert "| cells that hold | 3 of 4 | at least 4 | **no** |" in text
    assert "20 (18 to 22) | +100.0 %" in text
    assert "dynamic_load0.5, error +100.0 %. The live model: constant_speed: slower." in text
    assert "Ended by the time limit (t), mean not yet known to 10 %: dynamic_load0.5." in text
    assert "elastic_load0.75: the speed changed by +9%" in text
    assert "| 0.5 | 2.1 % | 2.4 % | 900 |" in text
    assert (tmp_path / "docs/live-validation/observed-and-predicted.png").stat().st_size > 5000
    again = write_page(tmp_path / "docs/live-validation", tmp_path / "docs").read_text()
    assert again == text, "the committed data make the same page"


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    cells = "dynamic_load0.5,continuous-max-batch-size-4_load0.3"
    fast = ("--fast", "--cells", cells, "--folder", str(folder), "--port", str(free_port(0)))
    return subprocess.Popen([sys.executable, "bench/live_validation.py", *fast, *arguments], cwd=ROOT, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_validation_is_gone_on_with(tmp_path: Path) -> None:
    """On the emulated engine, in seconds: what it shows is that the machinery measures, judges, resumes and writes."""
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
    assert {cell["cell"] for cell in cells} == {"dynamic_load0.5", "continuous-max-batch-size-4_load0.3"}
    for cell in cells:
        service = cell["measured_service"]
        assert service["observed"] == pytest.approx(service["recursion"], rel=0.2)  # tests share their machine
        assert cell["n"] > 50
        assert cell["live"]["window"]["seconds"] > FAST.least / 2
        assert cell["live"]["n"] == pytest.approx(cell["n"], abs=3)
    assert "## 2 of 24 cells" in (folder / "live-validation.md").read_text()
