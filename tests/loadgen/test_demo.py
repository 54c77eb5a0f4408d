"""`kendall demo`: what it refuses before an engine starts, how it ends, what its table and its
last sentence say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kendall import cli
from kendall.loadgen.commands.demo import Demo, DemoProgress
from kendall.loadgen.commands.demo_plan import DemoPlan
from kendall.loadgen.commands.demo_report import DemoCell, conclusion, print_report
from kendall.loadgen.compare.comparison import Comparison, Quantity, TheoryEstimate
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.job import Counters
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.latency.speed import Speed
from kendall.queueing.measurement.statistics import Interval
from tests.eventually import eventually_here
from tests.golden_files import is_as_kept
from tests.loadgen.sweeping import is_alive
from tests.virtual_time import VirtualTimeLoop, run_virtual

# arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--load", "7"],
            "got --load 7; expected a fraction of the largest stable rate, above 0 and below 1",
        ),
        (["--load", "0.3", "--load", "0"], "got --load 0; expected a fraction"),
        (["--load", "nan"], "got --load nan; expected a fraction"),
        (["--model", "smolm2"], "got --model 'smolm2'; expected one of tiny, smollm2"),
        (["--policy", "singel"], "did you mean 'single'?"),
        (["--engine", "gpu"], "got --engine 'gpu'; expected one of auto, vllm, emulated"),
        (["--result-dir", __file__], "test_demo.py; expected a folder"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_arguments_are_checked_before_an_engine_starts(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        GatewayProcess, "__aenter__", lambda _: pytest.fail("an engine was started")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *arguments])
    shown = capsys.readouterr().err
    assert ended.value.code == 2, shown
    assert said in shown
    assert shown.count("\n") == 1


def test_two_policies_of_one_name_have_files_of_their_own() -> None:
    plan = DemoPlan(policies=("single", "fixed:batch_size=4", "fixed:batch_size=8,max_wait=1"))
    names = {plan.name(load, policy) for load, policy in plan.cells}
    assert len(names) == len(plan.cells)
    assert {"0.3-single", "0.3-fixed-batch_size-4", "0.5-fixed-batch_size-8-max_wait-1"} <= names
    assert DemoPlan().name(0.3, "fixed:batch_size=4") == "0.3-fixed"


def test_outside_of_a_terminal_a_cell_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = DemoPlan(policies=("dynamic", "single"), loads=(0.3, 0.5))
    asked: list[tuple[str, float, str]] = []

    async def sent(_: object, policy: str, load: float, law: LatencyModel) -> tuple[None, float]:
        asked.append((policy, load, str(law)))
        await asyncio.sleep(20.0)
        return None, 10 * load

    async def calibrated(_: object) -> Profile:
        return Profile(name="tiny", law=LatencyModel(k2=0.1, k4=0.01, speed=1.3))

    async def main() -> list[DemoCell]:
        async with DemoProgress(plan) as progress:
            return await Demo(plan, gateway, progress).run()

    gateway = GatewayProcess([], 1, Path("gateway.log"))
    monkeypatch.setattr(gateway, "ready", lambda: asyncio.sleep(0))
    monkeypatch.setattr("kendall.loadgen.commands.demo.pin_to_gateway_cpus", lambda: None)
    for name, stand_in in (("measure", sent), ("calibrate", calibrated)):
        monkeypatch.setattr(Demo, name, stand_in)
    monkeypatch.setattr(Demo, "compare", lambda *_: cell("single", 0.3).comparison)
    found = run_virtual(main())
    assert [(each.load, each.policy) for each in found] == plan.cells
    assert {law for *_, law in asked} == {str(LatencyModel(k2=0.1, k4=0.01))}, (
        "at speed 1: each cell has its own"
    )
    said = [line.split("s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "engine ready",
        *(
            f"{policy} at {load:g}: 600 requests, observed 102.0 ms, model 100.0 ms (+2.0 ± 4.0 %)"
            for load, policy in plan.cells
        ),
    ]


@pytest.mark.parametrize("r2", [-0.0075, 0.95])
def test_a_law_that_fits_poorly_is_a_warning_on_the_terminal(
    r2: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of the gateway's log."""
    profile = Profile(name="tiny", law=LatencyModel(k4=0.01), r2=r2, mape=1.129)
    gateway = GatewayProcess([], 1, tmp_path / "gateway.log")

    async def answer(*_: object) -> dict[str, Any]:
        return profile.to_dict()

    async def main() -> None:
        await Demo(plan, gateway, DemoProgress(plan)).calibrate()

    plan = DemoPlan(folder=tmp_path)
    monkeypatch.setattr(gateway, "ask", answer)
    asyncio.run(main())
    said = capsys.readouterr().err
    assert f"law: R2 {r2:.4f}" in said
    assert (
        (
            "warning: the law fits poorly: R2 -0.01, where a quiet machine gives at least 0.9; "
            "stop other work"
        )
        in said
    ) == (r2 < 0.9)


# progress


def test_progress_counts_the_cells_and_the_time_to_go_within_eighty_columns() -> None:
    async def lines() -> list[str]:
        progress = DemoProgress(plan := DemoPlan())
        progress.phase("the engine starts", 35.0)
        seen = [progress.line]
        progress._counters = Counters(asked=12345, completed=12345)
        for number in range(len(plan.cells)):
            progress.cell(number)
            seen.append(progress.line)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.stand(7.0)
        seen.append(progress.line)
        progress._counters = None
        progress.over()
        progress.phase("drawing the picture")
        return [*seen, progress.line]

    first, *cells, later, last = run_virtual(lines())
    assert first == "12 cells to go, 3 min: the engine starts"
    assert cells[0] == "12 cells to go, 3 min: single at 0.3 12345/12345"
    assert cells[8] == "4 cells to go, 58 s: fixed:batch_size=4 at 0.5 12345/12345"
    assert cells[-1].startswith("1 cell to go, 14 s: continuous:max_batch_size=4 at 0.5")
    assert later.startswith("1 cell to go, 8 s: continuous:max_batch_size=4 at 0.5")
    assert last == "drawing the picture"
    assert max(len(f"{0:6.0f} s  {line}") for line in cells) <= 79


# endings


def descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return
    for child in map(int, children.split()):
        yield child
        yield from descendants(child)


def until_gone(pids: list[int]) -> None:
    """What was killed is gone when the kernel has the time."""
    eventually_here(lambda: not [pid for pid in pids if is_alive(pid)])


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    port = ("--port", str(free_port(0)), "--result-dir", str(folder))
    command = [
        sys.executable,
        "-m",
        "kendall",
        "demo",
        "--engine",
        "emulated",
        "--policy",
        "dynamic",
        *port,
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"KENDALL_DEBUG": "1"},
    )


def heard(lines: Iterable[str], what: str) -> list[str]:
    """Lines up to the first that holds `what`. Raises AssertionError where it does not come."""
    before: list[str] = []
    for line in lines:
        before.append(line.rstrip())
        if what in line:
            return before
    raise AssertionError(f"{what!r} was not said: {before[-5:]}")


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it has still to say; one that does not end is killed."""
    try:
        return process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "when",
    [
        "the engine starts",
        pytest.param("engine ready", marks=pytest.mark.slow),
        pytest.param("dynamic at 0.3", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_it_in_one_line_and_leaves_no_process(
    tmp_path: Path, when: str, number: int
) -> None:
    with demo(tmp_path / "demo", "--load", "0.3", "--once") as process:
        assert process.stderr is not None
        heard(process.stderr, when)
        started = list(descendants(process.pid))
        process.send_signal(number)
        out, err = ended(process)
    assert process.returncode == 130, err
    assert out == ""
    said = [line for line in err.splitlines() if not re.match(r" *\d+ s  ", line)]
    measured = f"kendall: interrupted; what was measured is in {tmp_path}/demo/"
    nothing = "kendall: interrupted; nothing was measured"
    possible = {"the engine starts": [nothing], "dynamic at 0.3": [measured]}
    assert len(said) == 1
    assert said[0] in possible.get(when, [nothing, measured])
    assert started
    until_gone(started)


@pytest.mark.slow
def test_the_whole_demo_prints_its_report_serves_on_and_ends_well_with_sigterm(
    tmp_path: Path,
) -> None:
    with demo(tmp_path, "--load", "0.5", "--scale", "0.2") as process:
        assert process.stdout is not None
        shown = heard(process.stdout, "/#zoom=")
        started = list(descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        err = ended(process)[1]
    assert process.returncode == 0, err
    assert "Traceback" not in err
    until_gone(started)
    assert max(map(len, shown[: shown.index("")])) <= 80
    assert re.search(r"^dynamic +0\.5 +\d+ ", "\n".join(shown), flags=re.MULTILINE)
    assert re.search(
        r"^\d+ requests under one policy: observed delays are", "\n".join(shown), flags=re.MULTILINE
    )
    assert {path.name for path in tmp_path.iterdir()} >= {
        "comparison.json",
        "profile.json",
        "load-0.5-dynamic.jsonl",
        "observed-and-predicted.png",
    }


def test_a_gateway_that_does_not_start_is_a_failure_and_not_a_wrong_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayProcess, "module", "loadgen.nothing_of_that_name")
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--result-dir", str(tmp_path)])
    assert ended.value.code == 1


@pytest.mark.parametrize("taken", [True, False])
def test_where_the_gateway_listens_is_said_first(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be another port than was asked for, and the live page is there while the cells are
    measured.
    """
    monkeypatch.setattr(GatewayProcess, "module", "loadgen.nothing_of_that_name")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if taken else free_port(0)
        with pytest.raises(SystemExit):
            cli.main(["demo", "--port", str(port), "--result-dir", str(tmp_path)])
    first = capsys.readouterr().err.splitlines()[0]
    assert "the gateway is at http://127.0.0.1:" in first
    assert (f"; port {port} is in use; " in first) == taken
    assert (f"http://127.0.0.1:{port}/; requests" in first) != taken


# report


def cell(
    policy: str = "single",
    load: float = 0.3,
    *,
    observed: float = 0.102,
    modelled: float | None = 0.100,
    half_width: float = 0.004,
    measured: float | None = 0.101,
    n: int = 600,
) -> DemoCell:
    """A cell whose pairs differ by observed - modelled, with that half width."""

    def estimate(mean: float | None, width: float = 0.001) -> TheoryEstimate | None:
        return None if mean is None else TheoryEstimate(mean, observed / mean - 1, width / mean)

    quantity = Quantity(
        observed=Interval(observed, 0.05, n, 20.0, 0.0),
        same_arrivals=estimate(modelled, half_width),
        measured_service=estimate(measured),
        a_priori=None if modelled is None else estimate(modelled / 2),
    )
    comparison = Comparison(
        policy=policy,
        epoch=1,
        compared="sojourn_time" if policy.startswith("continuous") else "queueing_delay",
        n=n,
        arrival_rate=5.0,
        asked_rate=5.0,
        load=load,
        batch_size=1.0,
        speed=Speed(2.0, 0.0, n),
        calibrated=Speed(1.0, 0.0, 0),
        queueing_delay=quantity,
        sojourn_time=quantity,
    )
    return DemoCell(policy, load, comparison)


def disturbed(found: DemoCell, others: int) -> DemoCell:
    return dataclasses.replace(
        found, comparison=dataclasses.replace(found.comparison, of_others=others)
    )


OFF = {"observed": 0.150, "half_width": 0.010}
ENGINE = "the engine: its service times do not follow the law, or it stalled"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [cell(), cell("dynamic", observed=0.098, n=1200)],
            "1,800 requests under two policies: observed delays are 0.7 % below the model's "
            "(95 %: -3.6 to +2.3 %).",
        ),
        (
            [cell(half_width=0.001)],
            "600 requests under one policy: observed delays are 2.0 % above the model's "
            "(95 %: 1.0 to 3.0 %).",
        ),
        (
            [cell(), cell("dynamic", 0.6, **OFF, measured=0.149)],
            "1,200 requests under two policies: observed delays are 26.0 % above the model's "
            "(95 %: 20.6 to 31.4 %). dynamic at load 0.60: +50.0 ± 10.0 %; cause: "
            f"{ENGINE}.",
        ),
        (
            [cell(**OFF)],
            "600 requests under one policy: observed delays are 50.0 % above the model's "
            "(95 %: 40.0 to 60.0 %). single at load 0.30: +50.0 ± 10.0 %; cause: "
            "the gateway: 49 % of the delay.",
        ),
        ([cell(modelled=None)], "Nothing could be compared."),
        (
            [disturbed(cell(), 49), disturbed(cell(load=0.6), 1), cell("dynamic")],
            "600 requests under one policy: observed delays are 2.0 % above the model's "
            "(95 %: -2.0 to +6.0 %). Disturbed and left out: single at 0.3 (49 requests of other "
            "clients in its queue), single at 0.6 (1 request of other clients in its queue).",
        ),
        ([cell(half_width=math.inf)], "Nothing could be compared."),
    ],
)
def test_the_last_sentence_is_about_all_requests_and_names_every_cell_that_disagrees(
    cells: list[DemoCell], said: str
) -> None:
    assert conclusion(cells) == said


def test_the_report_fits_eighty_columns_and_cuts_nothing() -> None:
    huge = {"observed": 123.4567, "half_width": 98.7654, "modelled": 65.4321, "measured": 100.0}
    cells = [cell(policy, load, **huge) for load, policy in DemoPlan().cells]  # type: ignore[arg-type]
    cells += [cell("continuous:max_batch_size=128,order=spjf,aging=0.02", modelled=None)]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        print_report(cells, console)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in capture.get()
    assert len([line for line in lines if "123456.7" in line and "+88.7 ± 150.9 %" in line]) == 12


def test_the_report_is_as_kept() -> None:
    """With a cell whose sojourn is compared, one that was disturbed, and one that disagrees."""
    to = io.StringIO()
    console = Console(file=to, width=80)
    print_report([cell(), cell("continuous", 0.6), disturbed(cell("dynamic"), 3)], console)
    to.write("==\n")
    print_report([cell("dynamic", **OFF)], console)
    assert is_as_kept("demo-report.txt", to.getvalue())
