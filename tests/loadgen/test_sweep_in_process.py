"""A whole sweep against a gateway in this process: what it asks for, journals, writes and says."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayLostError
from kendall.loadgen.measures.stability import Growth, GrowthWatch
from kendall.loadgen.sending.operating_system import pin_to_gateway_cpus
from kendall.loadgen.sending.run import lateness
from kendall.loadgen.sweep import cell as cell_module
from kendall.loadgen.sweep import gateway as gateway_module
from kendall.loadgen.sweep import rig as rig_module
from kendall.loadgen.sweep import run as run_module
from kendall.loadgen.sweep.cell import StartedCell
from kendall.loadgen.sweep.gateway import OwnGateway
from kendall.loadgen.sweep.journal import read_journal
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.rig import Rig
from kendall.loadgen.sweep.run import Sweep
from kendall.loadgen.sweep.session import run_session
from kendall.loadgen.sweep.status import Status
from kendall.loadgen.sweep.store import Store
from kendall.queueing.measurement.record import Record, read_run
from tests.kept_values import moved
from tests.loadgen.fake_gateway import LAW, FakeGateway, phases_of, serving

SIZES = {"max_output_tokens": 10, "prompt_tokens": 32}
SPEED = {"speed_only": True, "seconds": 0.2, "latency": str(LAW)} | SIZES
LIMIT = {"max_output_tokens": None}


def plan(url: str, **about: Any) -> SweepPlan:
    given: dict[str, Any] = {
        "policies": ("single", "dynamic"),
        "request_rates": (60.0, 900.0),
        "num_prompts": 9,
        "output_tokens": "uniform:low=2,high=10",
        "bracket": 0.2,
        "base_url": url,
    }
    return SweepPlan(**(given | about))


def swept(folder: Path, *speeds: float, status: int = 200, **about: Any) -> tuple[int, FakeGateway]:
    """The exit status of a session, and the gateway that it asked."""
    fake = FakeGateway(folder, *speeds)
    fake.status = status

    async def session() -> int:
        async with serving(fake):
            return await run_session(plan(fake.url, **about), folder / "sweep", 0, [], json=False)

    return asyncio.run(session()), fake


def journal(folder: Path) -> list[tuple[Any, ...]]:
    """Its events by name, with what differs from run to run left out."""
    events = read_journal(folder / "sweep" / "journal.jsonl")
    kept = ("cell", "attempt", "epoch", "ended", "reason", "outcomes", "speeds", "resumed", "law")
    return [(event["event"], {key: event[key] for key in kept if key in event}) for event in events]


def notes(said: str, url: str) -> list[str]:
    """The lines that stay, without the instant and the port."""
    lines = [re.sub(r"^ +\d+ s  ", "", line).replace(url, "URL") for line in said.splitlines()]
    passing = (
        r"still$|unanswered$|setting cell|looking for the gateway|writing the report|stopping"
        r"|planning"
    )
    return [line for line in lines if not re.search(passing, line)]


@pytest.mark.slow
def test_what_a_whole_cell_leaves_in_the_gateway_may_take_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of an answer is for gateways that were lost."""
    until_idle = cell_module.until_idle

    async def slowly(*about: Any) -> Any:
        await asyncio.sleep(0.6)
        return await until_idle(*about)

    monkeypatch.setattr(cell_module, "ANSWER_LIMIT", 0.3)
    monkeypatch.setattr(cell_module, "until_idle", slowly)
    status, _ = swept(tmp_path, 1.0, 1.0, policies=("single",), request_rates=(60.0,))
    assert status == 0
    ended = [event.get("ended") for event in read_journal(tmp_path / "sweep" / "journal.jsonl")]
    assert [each for each in ended if each] == ["complete"]


@pytest.mark.slow
def test_a_sweep_measures_each_cell_between_two_speeds_and_a_disturbed_one_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = phases_of(monkeypatch)
    status, fake = swept(tmp_path, 1.0, 1.02, 1.3, 1.31)
    assert status == 0
    (single, dynamic) = json.loads((tmp_path / "sweep" / "comparison.json").read_text())
    assert [single["of_others"], dynamic["of_others"]] == [0, 0]
    dynamic, single = {"policy": "dynamic"} | LIMIT, {"policy": "single"} | LIMIT
    assert fake.asked == [
        ("calibrate", {"repeats": 5} | SIZES),
        ("calibrate", SPEED),
        ("policy", single),
        ("calibrate", SPEED),
        ("policy", dynamic),
        ("calibrate", SPEED),
        ("policy", dynamic),
        ("calibrate", SPEED),
    ]
    done = {"ended": "complete", "outcomes": {"completed": 9}}
    refusal = (
        "load {} by the law: the queue would grow without bound; --allow-unstable runs it anyway"
    )
    assert journal(tmp_path) == [
        ("sweep", {"resumed": False}),
        ("calibrated", {"law": str(LAW)}),
        ("planned", {}),
        ("started", {"cell": "single_rate60", "attempt": 1, "epoch": 1}),
        ("done", {"cell": "single_rate60", "speeds": [1.0, 1.02]} | done),
        ("started", {"cell": "dynamic_rate60", "attempt": 1, "epoch": 2}),
        ("done", {"cell": "dynamic_rate60", "speeds": [1.02, 1.3]} | done),
        (
            "noisy",
            {
                "cell": "dynamic_rate60",
                "reason": "the speed of the engine changed by 27% around it",
            },
        ),
        ("started", {"cell": "dynamic_rate60", "attempt": 2, "epoch": 3}),
        ("done", {"cell": "dynamic_rate60", "speeds": [1.3, 1.31]} | done),
        ("refused", {"cell": "single_rate900", "reason": refusal.format("6.68")}),
        ("refused", {"cell": "dynamic_rate900", "reason": refusal.format("2.54")}),
        ("finished", {}),
    ]
    assert moved("sweep-phases.json", {"": lambda: phases}) == []
    out, err = capsys.readouterr()
    single_said = "cell 1/4, single at load 0.445 (60/s): 9 of 9 completed"
    dynamic_said = "cell 2/4, dynamic at load 0.169 (60/s): "
    assert notes(err, fake.url) == [
        "law: k1=0.0003,k2=0.001,k3=2e-05,k4=0.001 (R2 0.9900, cells within 2.0% on average)",
        single_said,
        f"{dynamic_said}9 of 9 completed",
        f"{dynamic_said}the speed of the engine changed by 27% around it; measured again",
        f"{dynamic_said}9 of 9 completed",
        f"single at load 6.68 (900/s): not run, {refusal.format('6.68')}",
        f"dynamic at load 2.54 (900/s): not run, {refusal.format('2.54')}",
    ]
    assert "comparison.json, sweep.json, report.html" in " ".join(out.split())
    folder = tmp_path / "sweep"
    assert sorted(path.name for path in (folder / "cells").iterdir()) == [
        "dynamic_rate60.gateway.jsonl",
        "dynamic_rate60.load.jsonl",
        "dynamic_rate60.noisy-1.gateway.jsonl",
        "dynamic_rate60.noisy-1.load.jsonl",
        "single_rate60.gateway.jsonl",
        "single_rate60.load.jsonl",
    ]
    header, records = read_run(folder / "cells" / "single_rate60.gateway.jsonl")
    asked = {
        "policy": "single",
        "request_rate": 60.0,
        "max_output_tokens": None,
        "output_tokens": "uniform:low=2,high=10",
        "prompt_tokens": "deterministic:value=32",
    }
    assert {key: header.configuration[key] for key in asked} == asked
    assert (header.writer, header.seed, len(records)) == ("gateway", 1, 9)
    assert {record.epoch for record in records} == {1}
    header, sent = read_run(folder / "cells" / "single_rate60.load.jsonl")
    assert {key: header.configuration[key] for key in asked} == asked
    assert [record.output_tokens for record in sorted(sent, key=_number)] == [
        record.output_tokens for record in sorted(records, key=_number)
    ]


def _number(record: Record) -> int:
    return int((record.client_request_id or record.request_id).rpartition("-")[2])


def test_a_sweep_that_is_done_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeGateway(tmp_path)
    about: dict[str, Any] = {
        "policies": ("dynamic",),
        "request_rates": (60.0,),
        "bracket": 0.0,
        "latency": str(LAW),
    }

    async def sessions() -> list[int]:
        async with serving(fake):
            wanted = plan(fake.url, **about)
            return [
                await run_session(wanted, tmp_path / "sweep", 0, [], json=True) for _ in range(2)
            ]

    assert asyncio.run(sessions()) == [0, 0]
    assert fake.asked == [("policy", {"policy": "dynamic"} | LIMIT)], "no calibration, one cell"
    assert [event for event, _ in journal(tmp_path)] == [
        "sweep",
        "calibrated",
        "planned",
        "started",
        "done",
        "finished",
        "sweep",
    ]
    out, err = capsys.readouterr()
    assert notes(err, fake.url) == [
        "cell 1/1, dynamic at load 0.169 (60/s): 9 of 9 completed",
        "everything is measured already",
    ]
    first, second = map(json.loads, out.splitlines())
    assert first == second
    assert first["missing"] == first["refused"] == first["searches"] == []
    assert [each["cell"] for each in first["comparisons"]] == ["dynamic_rate60"]
    assert first["comparisons"][0]["bracketing_speeds"] == [1.0, 1.0]
    profile = json.loads((tmp_path / "sweep" / "profile.json").read_text())
    assert profile["note"] == "given by --latency, not measured here"


@pytest.mark.slow
def test_a_cell_whose_sweep_was_killed_is_kept_as_partial_and_measured_again(
    tmp_path: Path,
) -> None:
    """The journal ends where the second cell was begun; the gateway has all of its records."""
    fake = FakeGateway(tmp_path)
    about: dict[str, Any] = {"request_rates": (60.0,), "bracket": 0.0, "latency": str(LAW)}
    file = tmp_path / "sweep" / "journal.jsonl"

    async def sessions() -> list[int]:
        async with serving(fake):
            wanted = plan(fake.url, **about)
            first = await run_session(wanted, tmp_path / "sweep", 0, [], json=True)
            lines = file.read_bytes().splitlines(keepends=True)
            begun = max(place for place, line in enumerate(lines) if b'"started"' in line)
            file.write_bytes(b"".join(lines[: begun + 1]))
            return [first, await run_session(wanted, tmp_path / "sweep", 0, [], json=True)]

    assert asyncio.run(sessions()) == [0, 0]
    assert [event for event, _ in journal(tmp_path)] == [
        *("sweep", "calibrated", "planned", "started", "done", "started"),
        *("sweep", "cut", "started", "done", "finished"),
    ]
    _, cut, started, done, _ = journal(tmp_path)[-5:]
    assert cut == ("cut", {"cell": "dynamic_rate60", "reason": "the sweep was killed"})
    assert started == ("started", {"cell": "dynamic_rate60", "attempt": 2, "epoch": 3})
    assert done[1]["cell"] == "dynamic_rate60"
    _, kept = read_run(tmp_path / "sweep" / "cells" / "dynamic_rate60.partial-1.gateway.jsonl")
    assert {record.epoch for record in kept} == {2}
    assert len(kept) == 9


def test_a_cell_keeps_how_its_queue_grew_and_how_late_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Growth(share=0.01, half_width=0.02, t=1.0, number=3, seconds=9.0, arrivals=9.0)
    monkeypatch.setattr(GrowthWatch, "so_far", lambda _: found)
    status, _ = swept(
        tmp_path, policies=("dynamic",), request_rates=(60.0,), bracket=0.0, latency=str(LAW)
    )
    assert status == 0
    (cell,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["cells"]
    assert cell["growth"] == dataclasses.asdict(found)
    _, sent = read_run(tmp_path / "sweep" / "cells" / "dynamic_rate60.load.jsonl")
    late = lateness(sent)
    assert cell["lateness"] == pytest.approx({"mean": late.mean, "p99": late.p99})


def test_a_cell_without_a_completed_request_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, fake = swept(
        tmp_path,
        status=400,
        policies=("dynamic",),
        request_rates=(60.0,),
        bracket=0.0,
        latency=str(LAW),
    )
    assert status == 1
    event, about = journal(tmp_path)[-2]
    assert (event, about["cell"]) == ("failed", "dynamic_rate60")
    assert about["reason"].startswith("no request was completed: ")
    out, err = capsys.readouterr()
    (said, again) = notes(err, fake.url)
    assert said == f"cell 1/1, dynamic at load 0.169 (60/s): {about['reason']}"
    assert again.startswith("kendall: `kendall sweep --resume ")
    assert "MISSING: dynamic_rate60: no request was completed" in " ".join(out.split())


class Scripted:
    """A gateway whose starts fail as the script says."""

    def __init__(self, *errors: str | None) -> None:
        self.errors = list(errors)
        self.client = SimpleNamespace(url="http://127.0.0.1:9")
        self.stopped = 0

    async def start(self) -> None:
        if (error := self.errors.pop(0)) is not None:
            raise GatewayLostError(error)

    async def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(
    ("script", "before", "waits", "restarts", "last"),
    [
        (
            (None,),
            0,
            [1, 11],
            1,
            "the gateway was lost (gone) and was started again (1 of 5 times)",
        ),
        (
            ("no port", None),
            2,
            [4, 14, 8, 18],
            4,
            "the gateway was lost (no port) and was started again (4 of 5 times)",
        ),
        (("a", "b"), 3, [8, 18, 16, 26], 5, None),
        ((), 5, [], 5, None),
    ],
)
def test_a_lost_gateway_is_started_again_five_times_each_time_later(
    script: tuple[str | None, ...],
    before: int,
    waits: list[float],
    restarts: int,
    last: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    wanted, store = plan("http://127.0.0.1:9"), Store.open(tmp_path / "sweep", plan("http://a:1"))
    said = io.StringIO()
    phases: list[str] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def look_at(_: Any) -> Any:
        return SimpleNamespace(models=("m",), length_fields=None, kendall=True)

    async def recover() -> Rig:
        status = Status(said)
        monkeypatch.setattr(
            status,
            "phase",
            lambda text, seconds: (waited.append(seconds), phases.append(text)),  # type: ignore[func-returns-value]
        )
        rig = Rig(wanted, store, status, Scripted(*script), speed=2.0, restarts=before)  # type: ignore[arg-type]
        monkeypatch.setattr(asyncio, "sleep", sleep)
        try:
            await rig.recover("gone")
        except GatewayLostError as error:  # what `start` raises is not passed on
            raise AssertionError from error
        except GatewayError as error:
            said.write(str(error))
        return rig

    monkeypatch.setattr(rig_module, "look_at", look_at)
    rig = asyncio.run(recover())
    assert waited == [
        number for pair in zip(waits[1::2], waits[::2], strict=True) for number in pair
    ]
    assert rig.restarts == restarts
    assert phases[:1] == (
        [f"the gateway was lost (gone); started again in {waits[0]} s"] if waits else []
    )
    restarted = store.journal.last("restarted")
    store.journal.close()
    if last is None:
        assert restarted is None
        reason = script[-1] if script else "gone"
        assert said.getvalue() == (
            f"the gateway was lost 6 times, the last time: {reason}; the same command continues "
            "the sweep"
        )
    else:
        assert restarted is not None
        assert restarted["number"] == restarts
        lines = [line[10:] for line in said.getvalue().splitlines()]
        assert lines == [
            "this gateway runs without --allow-forced-lengths; each request carries ignore_eos "
            "and its drawn length as max_tokens",
            last,
        ]
        assert (rig.speed, rig.target.model) == (None, "m")


class Child:
    """Stands for the process of a gateway."""

    made: list[Child]

    def __init__(self, arguments: list[str], port: int, log_file: Path) -> None:
        self.arguments, self.port, self.log_file, self.pid, self.left = (
            arguments,
            port,
            log_file,
            4711,
            False,
        )
        self.ended, self.healthy = False, True
        self.made.append(self)

    async def __aenter__(self) -> Child:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True

    async def ready(self) -> None: ...

    async def is_healthy(self) -> bool:
        return self.healthy

    def last_line(self) -> str:
        return "killed"


def test_an_own_gateway_gets_what_the_plan_says_and_a_run_file_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Child.made = []
    monkeypatch.setattr(gateway_module, "GatewayProcess", Child)
    monkeypatch.setattr(gateway_module, "free_port", lambda wanted: wanted + 1)
    wanted = SweepPlan(loads=(0.5,), latency="reference", engine="emulated", max_num_seqs=7)
    own = OwnGateway(wanted, tmp_path, 9000, ("--x", "1"))
    assert own.record_file == tmp_path / "gateway-1.jsonl"

    async def starts() -> list[str | None]:
        await own.start()
        first = own.record_file
        assert (tmp_path / "gateway.pid").read_text() == "4711\n"
        said = [await own.why_lost()]
        Child.made[0].healthy = False
        said.append(await own.why_lost())
        Child.made[0].ended = True
        said.append(await own.why_lost())
        await own.start()
        assert Child.made[0].left
        assert (first.name, own.record_file.name) == ("gateway-1.jsonl", "gateway-2.jsonl")
        assert first.exists()
        assert own.record_file.exists()
        await own.stop()
        await own.stop()
        return said

    assert asyncio.run(starts()) == [
        None,
        "the gateway runs, but its /health does not answer 200",
        "the gateway ended: killed",
    ]
    assert not (tmp_path / "gateway.pid").exists()
    for number, child in enumerate(Child.made, start=1):
        assert (child.port, child.log_file) == (9001, tmp_path / f"gateway-{number}.log")
        record_file = str(tmp_path / f"gateway-{number}.jsonl")
        assert child.arguments == [
            *("tiny", "--engine", "emulated", "--max-num-seqs", "7", "--record-file", record_file),
            *("--allow-forced-lengths", "--served-model-name", "swept"),
            *("--prediction-interval", "0", "--max-num-queued-reqs", "0"),
            *("--latency", "reference", "--x", "1"),
        ]


@pytest.mark.parametrize(
    ("cpus", "kept"),
    [
        ({0}, None),
        ({3, 1}, [1]),
        ({5, 0, 2}, [0, 2]),
        ({0, 1, 2, 3}, [0, 1, 2]),
        ({0, 1, 2, 3, 4}, None),
    ],
)
def test_a_sweep_leaves_the_engine_the_last_of_few_processors(
    cpus: set[int],
    kept: list[int] | None,
    kept_processors: list[tuple[int, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
    pin_to_gateway_cpus()
    assert kept_processors == ([] if kept is None else [(0, kept)])


@pytest.mark.parametrize(
    ("allowed", "load", "purpose", "stopped"),
    [
        (False, 0.5, "grid", True),
        (False, 1.5, "grid", True),
        (True, 0.99, "grid", True),
        (True, 1.0, "grid", False),
        (True, 1.5, "grid", False),
        (True, 1.5, "saturation", True),
        (True, 1.5, "slo", True),
    ],
)
def test_a_cell_is_sent_as_the_plan_says_and_stopped_where_it_is_not_to_grow(
    allowed: bool,
    load: float,
    purpose: str,
    stopped: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    async def begin(client: str, record_file: Path, cell: Any, _: Any) -> StartedCell:
        assert (client, cell.name) == ("the client", "x")
        return StartedCell(7, record_file, 11)

    def sending(**about: Any) -> Any:
        given.update(about)
        raise GatewayError("not sent")

    async def speed_now() -> float:
        return 1.0

    monkeypatch.setattr(run_module, "begin", begin)
    monkeypatch.setattr(run_module, "CellSender", sending)
    wanted = plan("http://a:1", allow_unstable=allowed, seed=5, processes=2)
    store = Store.open(tmp_path / "sweep", wanted)
    gateway = SimpleNamespace(
        client="the client", record_file=tmp_path / "sweep" / "gateway-1.jsonl", why_lost="asked"
    )
    rig: Any = SimpleNamespace(
        speed_now=speed_now,
        gateway=gateway,
        basis=SimpleNamespace(timetable=lambda cell: f"of {cell.name}"),
        target="the target",
        speed=2.0,
    )
    cell: Any = SimpleNamespace(name="x", load=load, purpose=purpose, seconds=3.0)

    said = io.StringIO()

    async def attempt() -> None:
        sweep = Sweep(wanted, store, Status(said), rig)
        with pytest.raises(GatewayError, match=r"^not sent$"):
            await sweep.attempt(cell, "shown")
        sweep.salvage()

    asyncio.run(attempt())
    assert "x: nothing is left of attempt 1" in said.getvalue(), "no gateway wrote a file"
    event = store.journal.last("started")
    store.journal.close()
    assert event is not None
    assert (event["epoch"], event["record_file"], event["offset"]) == (7, "gateway-1.jsonl", 11)
    assert (given["seed"], given["processes"], given["timetable"]) == (5, 2, "of x")
    assert (given["target"], given["why_lost"]) == ("the target", "asked")
    assert given["path"] == tmp_path / "sweep" / "cells" / "x.partial-1.load.jsonl"
    assert given["configuration"] == {
        "output_tokens": "uniform:low=2,high=10",
        "prompt_tokens": "deterministic:value=32",
        "predictor": "none",
    }
    assert rig.speed is None, "something was run since"
    assert given["stop_unstable"] == stopped


def test_an_interrupt_before_the_first_cell_says_what_the_same_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Sweep, "run", interrupted)
    status, _ = swept(tmp_path, latency=str(LAW))
    assert status == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(
        "interrupted before a cell was measured; the same command, or another plan in "
        f"{tmp_path / 'sweep'}/, starts anew"
    )
