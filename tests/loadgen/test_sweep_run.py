"""`kendall sweep` through interruptions: what is measured is kept, the rest is measured again,
and it is said.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import (
    GatewayError,
    GatewayLostError,
    GatewayProcess,
    free_port,
)
from kendall.loadgen.sweep.gateway import GivenGateway, stop_left_behind
from kendall.loadgen.sweep.journal import SweepProgress
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.report.report import drift_line
from kendall.loadgen.sweep.report.results import results_of
from kendall.loadgen.sweep.rig import Rig
from kendall.loadgen.sweep.run import Sweep
from kendall.loadgen.sweep.status import Status
from kendall.loadgen.sweep.store import Store
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import read_run
from tests.eventually import eventually_here
from tests.loadgen.failing_server import failing_server
from tests.loadgen.growing import completed_in
from tests.loadgen.sweeping import (
    LAW,
    count,
    events,
    finish,
    gateway_pid,
    is_alive,
    start,
    wait_for,
)
from tests.virtual_time import run_virtual

GRID = ("single", "dynamic", "--request-rates", "60,9000", "--duration", "2")
LONG = (*GRID[:-1], "8")  # to be caught in mid-cell
WRITTEN = 25  # records of a cell that is then cut


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted((folder / "cells").iterdir())
    }


def recorded(folder: Path) -> int:
    """How many records the sweep's gateway has written."""
    file = folder / "gateway-1.jsonl"
    return len(file.read_bytes().splitlines()) - 1 if file.exists() else 0


def wait_for_records(folder: Path, cell: str, process: subprocess.Popen[bytes]) -> None:
    """Until the load and the gateway have written `WRITTEN` more answers, of the cell in
    progress.
    """
    before, file = recorded(folder), folder / f"cells/{cell}.partial-1.load.jsonl"
    wait_for(
        folder,
        lambda _: recorded(folder) >= before + WRITTEN and completed_in(file) >= WRITTEN,
        process,
    )


@pytest.mark.slow
def test_a_killed_sweep_is_gone_on_with_and_its_finished_cells_are_not_touched(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    process = start(folder, *LONG)
    wait_for(folder, count("started", 2), process)
    wait_for_records(folder, "dynamic_rate60", process)
    gateway = gateway_pid(folder)
    process.kill()
    process.communicate()
    before = contents(folder)
    done = ["single_rate60.gateway.jsonl", "single_rate60.load.jsonl"]
    assert sorted(before) == ["dynamic_rate60.partial-1.load.jsonl", *done]

    result = finish(start(folder, *LONG))
    eventually_here(lambda: not is_alive(gateway))
    after = contents(folder)
    assert {name: after[name] for name in done} == {name: before[name] for name in done}
    assert [event["cell"] for event in events(folder, "started")] == [
        "single_rate60",
        "dynamic_rate60",
        "dynamic_rate60",
    ]
    assert [c["cell"] for c in result["comparisons"]] == ["single_rate60", "dynamic_rate60"]
    (cut,) = events(folder, "cut")
    assert (cut["cell"], cut["reason"]) == ("dynamic_rate60", "the sweep was killed")
    assert sorted(cut["files"]) == [
        "cells/dynamic_rate60.partial-1.gateway.jsonl",
        "cells/dynamic_rate60.partial-1.load.jsonl",
    ]
    for name in cut["files"]:
        _, partial = read_run(folder / name)
        assert len(partial) > 15, "what both sides had written of the cut cell is kept"
    assert result["missing"] == []
    assert [refused["cell"] for refused in result["refused"]] == [
        "single_rate9000",
        "dynamic_rate9000",
    ], "beyond what the law allows"
    assert (folder / "report.html").stat().st_size > 10_000

    with (folder / "cells/single_rate60.load.jsonl").open("ab") as file:
        file.write(b"\n")
    finish(start(folder, *LONG))
    (damaged,) = events(folder, "damaged")
    assert "not as it was written" in damaged["reason"]
    assert [event["cell"] for event in events(folder, "started")][3:] == ["single_rate60"], (
        "only what was changed is measured again"
    )


@pytest.mark.slow
def test_a_gateway_killed_in_mid_cell_is_started_again_and_the_cell_repeated(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    process = start(folder, "single", "--loads", "0.5", "--duration", "8")
    wait_for(folder, count("started", 1), process)
    wait_for_records(folder, "single_load0.5", process)
    os.kill(gateway_pid(folder), signal.SIGKILL)
    result = finish(process)
    (cut,), (restarted,) = events(folder, "cut"), events(folder, "restarted")
    assert "the gateway ended" in cut["reason"]
    assert restarted["number"] == 1
    assert sorted(cut["files"]) == [
        "cells/single_load0.5.partial-1.gateway.jsonl",
        "cells/single_load0.5.partial-1.load.jsonl",
    ]
    for name in cut["files"]:
        _, kept = read_run(folder / name)
        assert sum(record.outcome == "completed" for record in kept) > 20
    (done,) = events(folder, "done")
    assert set(done["outcomes"]) == {"completed"}
    assert [event["record_file"] for event in events(folder, "started")] == [
        "gateway-1.jsonl",
        "gateway-2.jsonl",
    ]
    assert (result["restarts"], result["missing"]) == (1, [])
    assert "partial-1" in (folder / "sweep.json").read_text()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_an_interruption_keeps_the_cell_in_progress_as_partial_and_says_what_is_missing(
    tmp_path: Path, number: int
) -> None:
    """The cell would take 50 s."""
    folder = tmp_path / "sweep"
    process = start(folder, *GRID[:-1], "50")
    wait_for(folder, count("started", 1), process)
    before = recorded(folder)
    wait_for(folder, lambda _: recorded(folder) >= before + 10, process)
    gateway = gateway_pid(folder)
    process.send_signal(number)
    result = finish(process, expected=130)
    assert {missing["cell"]: missing["reason"] for missing in result["missing"]} == {
        "single_rate60": "interrupted",
        "dynamic_rate60": "not measured yet",
    }
    (cut,) = events(folder, "cut")
    _, kept = read_run(folder / "cells/single_rate60.partial-1.load.jsonl")
    assert len(kept) >= 10
    assert len(cut["files"]) == 2
    eventually_here(lambda: not is_alive(gateway))


async def _slow_gateway(folder: Path) -> None:
    """A running gateway, whose engine is twice as slow as the law that the sweep is given."""
    slow = "k1=0.0006,k2=0.002,k3=0.00004,k4=0.002"
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        slow,
        "--max-num-seqs",
        "16",
        "--allow-forced-lengths",
    ]
    async with GatewayProcess(
        [*arguments, "--record-file", str(folder / "run.jsonl")], free_port(0), folder / "log"
    ) as gateway:
        await gateway.ready()
        given = (
            "--base-url",
            gateway.url,
            "--latency",
            LAW,
            "--bracket",
            "0",
            "--json",
            "--output-tokens",
            "uniform:low=2,high=10",
        )
        process = start(
            folder / "sweep",
            "single",
            "--loads",
            "0.2,0.95",
            "--num-prompts",
            "2000",
            "--cell-limit",
            "7",
            *given,
            own=False,
        )
        await asyncio.to_thread(_check_unstable, process, folder / "sweep")
        assert await gateway.is_healthy(), "a gateway that was there before is left alone"


def _check_unstable(process: subprocess.Popen[bytes], folder: Path) -> None:
    result = finish(process)
    (stopped,) = result["unstable"]
    assert stopped["cell"] == "single_load0.95"
    assert "growing by" in stopped["reason"]
    assert [c["cell"] for c in result["comparisons"]] == ["single_load0.2"]
    (done,) = (event for event in events(folder, "done") if event["ended"] == "unstable")
    assert sum(done["outcomes"].values()) < 0.9 * done["asked"]["count"], (
        "it was stopped, not run to its end"
    )


@pytest.mark.slow
def test_an_unstable_point_is_stopped_and_named(tmp_path: Path) -> None:
    asyncio.run(_slow_gateway(tmp_path))


@pytest.mark.slow
def test_a_kill_at_every_stage_loses_nothing_that_was_done(tmp_path: Path) -> None:
    """Killed as soon as each further event is written, again and again in one folder, until it
    ends by itself.
    """
    folder = tmp_path / "sweep"
    done: dict[str, bytes] = {}
    stages = []
    for written in range(1, 40):
        process = start(folder, *GRID)
        before = len(events(folder)) if folder.exists() else 0
        try:
            wait_for(folder, lambda found, target=before + written: len(found) >= target, process)  # type: ignore[misc]
        except AssertionError:
            assert process.returncode == 0
            break
        process.kill()
        process.communicate()
        stages.append(events(folder)[-1]["event"])
        for event in events(folder, "done"):
            for name in event["files"]:
                content = (folder / name).read_bytes()
                assert done.setdefault(name, content) == content, f"{name} was written again"
    assert {"sweep", "started"} <= set(stages), (
        f"{stages}: others follow each other too fast to be told apart, these do not"
    )
    assert len(stages) >= 4, stages
    assert done, "no kill came after a finished cell"
    results = results_of(folder)
    assert [cell.state for cell in results.cells] == ["done", "done", "refused", "refused"]
    assert json.loads((folder / "sweep.json").read_text())["cells"][0]["state"] == "done"


@pytest.mark.slow
def test_a_cell_on_a_machine_whose_speed_changed_is_set_aside_and_measured_again_once(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    finish(start(folder, *GRID))
    journal, plan = folder / "journal.jsonl", folder / "plan.json"
    head, tail = journal.read_text().rsplit('"speeds":[', 1)
    journal.write_text(head + '"speeds":[1.0,1.5]' + tail[tail.index("]") + 1 :])
    plan.write_text(plan.read_text().replace('"repeat_noisy": 0', '"repeat_noisy": 1'))
    for _ in range(2):
        result = finish(start(folder, *GRID, "--repeat-noisy", "1"))
        (aside,) = events(folder, "noisy")
        assert (aside["cell"], sorted(aside["files"])) == (
            "dynamic_rate60",
            [
                "cells/dynamic_rate60.noisy-1.gateway.jsonl",
                "cells/dynamic_rate60.noisy-1.load.jsonl",
            ],
        ), (
            "what was measured on a machine whose speed changed is set aside and measured again, "
            "once"
        )
        assert all((folder / name).exists() for name in aside["files"])
        assert [event["cell"] for event in events(folder, "started")][2:] == ["dynamic_rate60"]
        assert result["missing"] == []


SPEEDS = [
    # of the bracketing calibrations; a cell is repeated beyond 15 %, and its mean not to be trusted
    # beyond 10 %
    ((1.0, 1.099), False, False),
    ((1.0, 1.101), False, True),
    ((1.0, 0.901), False, False),
    ((1.0, 0.899), False, True),
    ((2.0, 2.298), False, True),
    ((2.0, 2.302), True, True),
    ((2.0, 1.702), False, True),
    ((2.0, 1.698), True, True),
]


@pytest.mark.parametrize(("speeds", "noisy", "doubted"), SPEEDS)
def test_a_cell_is_measured_again_or_doubted_where_the_speed_changed_around_it(
    speeds: tuple[float, float], noisy: bool, doubted: bool
) -> None:
    plan, progress, cell = (
        SweepPlan(loads=(0.5,), num_prompts=100, repeat_noisy=1),
        SweepProgress(),
        SimpleNamespace(name="here"),
    )
    sweep = Sweep(plan, SimpleNamespace(progress=progress), None, None)  # type: ignore[arg-type]
    progress.apply({"event": "done", "cell": "here", "speeds": speeds})
    assert sweep.was_disturbed(cell) == noisy  # type: ignore[arg-type]
    result = SimpleNamespace(cell=cell, done={"speeds": speeds}, disturbed=0)
    said = drift_line(SimpleNamespace(plan=plan, cells=[result], of=lambda _: [result]))  # type: ignore[arg-type]
    assert said is not None
    assert f"changed by {abs(speeds[1] / speeds[0] - 1):.0%} at most" in said
    assert ("do not trust here" in said) == doubted
    progress.apply({"event": "noisy", "cell": "here", "reason": "noise"})
    progress.apply({"event": "done", "cell": "here", "speeds": speeds})
    assert not sweep.was_disturbed(cell), "once is enough"  # type: ignore[arg-type]
    progress.apply({"event": "done", "cell": "there", "speeds": (1.0, None)})
    there = SimpleNamespace(name="there")
    assert not sweep.was_disturbed(there), "the speed after it is not known"  # type: ignore[arg-type]


def test_a_server_that_is_no_gateway_is_told_apart_from_nobody() -> None:
    async def why(url: str) -> str:
        gateway = GivenGateway(url)
        with pytest.raises(GatewayLostError) as told:
            await gateway.start()
        await gateway.stop()
        return str(told.value)

    assert "connection refused" in asyncio.run(why(f"http://127.0.0.1:{free_port(0)}"))
    with failing_server() as port:
        assert "is no Kendall gateway, or is not ready" in asyncio.run(
            why(f"http://127.0.0.1:{port}")
        )


async def given(file: Path | None, *ready_at: float) -> tuple[Path, float]:
    """The run file of a gateway that writes this one, after as many starts, before each of which
    it is ready from an instant on; and when the last of them was over.
    """
    gateway, loop = GivenGateway("http://127.0.0.1:9"), asyncio.get_running_loop()

    async def ask(*_: object) -> dict[str, object]:
        return {"record_file": None if file is None else str(file)}

    async def begin(at: float) -> None:
        async def is_ready() -> bool:
            return loop.time() >= at

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway.client, "ask", ask)
            patch.setattr(gateway.client, "is_ready", is_ready)
            await gateway.start()

    try:
        for at in ready_at:
            await begin(at)
    finally:
        await gateway.stop()
    return gateway.record_file, loop.time()


def test_a_given_gateway_must_write_a_run_file_that_can_be_read_here(tmp_path: Path) -> None:
    here = tmp_path / "here.jsonl"
    here.touch()
    assert run_virtual(given(here, 0.0)) == (here, 0.0)
    for file in (None, tmp_path / "gone.jsonl", tmp_path):
        with pytest.raises(GatewayError, match=r"no run file that can be read here; .*--record"):
            run_virtual(given(file, 0.0))


def test_a_given_gateway_that_was_lost_is_waited_for_a_minute(tmp_path: Path) -> None:
    """It is looked for once a second. One that was never there is not waited for."""
    (here := tmp_path / "here.jsonl").touch()
    for back in (3.0, 61.0):
        assert run_virtual(given(here, 0.0, back)) == (here, back)
    for instants in ((0.0, 61.5), (0.5,)):
        with pytest.raises(GatewayLostError, match=r"the gateway at \S+ is not ready"):
            run_virtual(given(here, *instants))


@pytest.mark.parametrize("r2", [-0.0075, 0.95])
def test_a_law_that_fits_poorly_is_a_warning_on_the_terminal_and_again_when_the_sweep_goes_on(
    r2: float, tmp_path: Path
) -> None:
    """In the words of the gateway's log."""
    profile = Profile(name="tiny", law=LatencyModel(k4=0.01), r2=r2, mape=1.129)
    idle = {"unanswered": 0, "in_service": 0, "queue_length": 0}

    async def ask(method: str, *_: object) -> dict[str, object]:
        return (
            profile.to_dict()
            if method == "POST"
            else {**idle, "engine": {"max_num_seqs": 4, "max_model_len": 512}}
        )

    async def nothing(*_: object) -> None: ...

    async def said_by_a_session() -> str:
        said, plan = io.StringIO(), SweepPlan(loads=(0.5,))
        store = Store.open(tmp_path / "sweep", plan)
        gateway: Any = SimpleNamespace(
            client=SimpleNamespace(ask=ask, url="http://127.0.0.1:9"), start=nothing
        )
        async with Status(said) as status:
            rig = Rig(plan, store, status, gateway)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Rig, "start", nothing)
                await rig.open()
        store.journal.close()
        return said.getvalue()

    first, second = asyncio.run(said_by_a_session()), asyncio.run(said_by_a_session())
    assert f"law: k1=0,k2=0,k3=0,k4=0.01 (R2 {r2:.4f}, cells within 112.9% on average)" in first
    for said in (first, second):
        assert (
            (
                "the law fits poorly: R2 -0.01, where a quiet machine gives at least 0.9; stop "
                "other work"
            )
            in said
        ) == (r2 < 0.9)
        assert ("warning: " in said) == (r2 < 0.9)


class Scripted(Sweep):
    """Cells that end as the script says; a speed that changed is said of those `noisy`."""

    def follow(self, *script: str, done: bool = False, noisy: tuple[bool, ...] = ()) -> None:
        self.script, self.done, self.noisy, self.aside = list(script), done, list(noisy), 0

    async def attempt(self, cell: Any, shown: str) -> Any:
        assert shown == "cell 1/2, here"
        attempt = 1 + self.store.progress.of(cell.name).attempts
        self.store.append("started", cell=cell.name, attempt=attempt)
        ended = self.script.pop(0)
        if ended == "no gateway":
            raise GatewayLostError("it is gone")
        return SimpleNamespace(ended=ended, why=None if ended == "complete" else "killed")

    def _is_done(self, cell: Any) -> bool:
        return self.done

    def was_disturbed(self, cell: Any) -> bool:
        return bool(self.noisy) and self.noisy.pop(0)

    def _set_aside(self, cell: Any, shown: str) -> None:
        self.aside += 1


class Here(SimpleNamespace):
    """A cell."""

    def __str__(self) -> str:
        return "here"


@pytest.mark.parametrize(
    ("load", "script", "done", "noisy", "left", "aside", "recovered", "last"),
    [
        (0.5, ("complete", "complete"), False, (), 1, 0, [], "started"),
        (0.5, ("complete",), True, (False,), 1, 0, [], None),
        (0.5, ("complete", "complete"), True, (True, False), 1, 1, [], "started"),
        (0.5, ("complete", "complete"), False, (True, False), 0, 1, [], "started"),
        (0.5, ("lost", "complete"), False, (), 0, 0, ["killed"], "started"),
        (0.5, ("no gateway", "unstable"), False, (), 0, 0, ["it is gone"], "started"),
        (
            0.5,
            ("lost", "no gateway", "lost", "x"),
            False,
            (),
            1,
            0,
            ["killed", "it is gone", "killed"],
            "failed",
        ),
        (1.0, ("complete",), False, (), 1, 0, [], "refused"),
    ],
)
def test_a_cell_is_measured_until_it_is_whole_and_quiet_three_times_at_most(
    load: float,
    script: tuple[str, ...],
    done: bool,
    noisy: tuple[bool, ...],
    left: int,
    aside: int,
    recovered: list[str],
    last: str | None,
    tmp_path: Path,
) -> None:
    plan, said = SweepPlan(loads=(0.5,)), list[str]()

    async def recover(why: str) -> None:
        said.append(why)

    store = Store.open(tmp_path / "sweep", plan)
    sweep = Scripted(plan, store, Status(io.StringIO()), SimpleNamespace(recover=recover))  # type: ignore[arg-type]
    sweep.follow(*script, done=done, noisy=noisy)

    async def measure() -> None:
        await sweep.measure(Here(name="here", load=load, purpose="grid"), "cell 1/2")  # type: ignore[arg-type]

    asyncio.run(measure())
    events = store.journal.events
    store.journal.close()
    assert (len(sweep.script), sweep.aside, said) == (left, aside, recovered)
    assert (events[-1]["event"] if events else None) == last
    if last == "failed":
        assert events[-1]["reason"] == "given up after 3 attempts: no reason known"


def test_an_interrupted_cell_ends_the_sweep(tmp_path: Path) -> None:
    plan = SweepPlan(loads=(0.5,))
    store = Store.open(tmp_path / "sweep", plan)
    sweep = Scripted(plan, store, Status(io.StringIO()), SimpleNamespace())  # type: ignore[arg-type]
    sweep.follow("interrupted", "complete")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(sweep.measure(Here(name="here", load=0.5, purpose="grid"), "cell 1/2"))  # type: ignore[arg-type]
    store.journal.close()
    assert sweep.script == ["complete"]


@pytest.mark.parametrize("own", [True, False])
def test_a_gateway_that_a_killed_sweep_left_behind_is_ended_and_no_other_process(
    own: bool, tmp_path: Path
) -> None:
    """A number of a process may belong to another by now: its arguments say whose it is."""
    name = str(tmp_path / "gateway-1.log") if own else "something else"
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", name],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        (tmp_path / "gateway.pid").write_text(f"{process.pid}\n")
        assert stop_left_behind(tmp_path) == own
        assert not (tmp_path / "gateway.pid").exists(), "another process may get that number"
        assert not stop_left_behind(tmp_path), "once is enough"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == (-signal.SIGKILL if own else 0)


LEAVING = """
import subprocess, sys
code = "import signal; signal.alarm(120); signal.pause()"
print(subprocess.Popen([sys.executable, "-c", code]).pid)
"""


def test_an_engine_that_a_gateway_left_behind_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(GatewayProcess, "module", "leaving")

    async def engine() -> int:
        async with GatewayProcess([], 1, tmp_path / "log") as gateway:
            await gateway.finished()
            left = int(gateway.log())
            assert is_alive(left)
        return left

    left = asyncio.run(engine())
    eventually_here(lambda: not is_alive(left))


@pytest.mark.parametrize("text", ["", "no number", "999999999"])
def test_a_damaged_note_of_a_gateway_ends_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "gateway.pid").write_text(text)
    assert not stop_left_behind(tmp_path)
