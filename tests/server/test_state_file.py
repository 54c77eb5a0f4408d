"""The state file of one gateway is never lost to another one, and no other file to a gateway."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kendall.policies import SpecError
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import Profile
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.gateway import Gateway
from kendall.server.live.pilot import SavedPilot
from kendall.server.live.state_file import (
    SCHEMA_VERSION,
    EngineKey,
    SavedState,
    StateKeeper,
    check_state_file,
    load_state,
    save_state,
)
from kendall.server.settings import Settings

GIVEN = parse_law("k1=1e-3,k2=2e-3,k3=0,k4=1e-3")
OURS = EngineKey("vllm", "tiny", 64, 1)


def saved(path: Path, **state: Any) -> bytes:
    known = SavedState(schema_version=SCHEMA_VERSION, engine=OURS, law="k1=1")
    save_state(path, msgspec.structs.replace(known, **state))
    return path.read_bytes()


def renamed(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir() if path.name.startswith("state.")]


def test_what_was_saved_is_loaded_by_the_same_engine(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert load_state(path, OURS) is None
    saved(path)
    check_state_file(path)
    state = load_state(path, OURS)
    assert state is not None
    assert state.law == "k1=1"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("state", "engine", "why"),
    [
        ({}, replace(OURS, max_num_seqs=8), "of another engine: max_num_seqs 64"),
        (
            {},
            replace(OURS, engine="emulated", model="other"),
            "of another engine: engine vllm, model tiny",
        ),
        ({"engine": None}, OURS, "of another engine: engine unknown"),
        ({"schema_version": 2}, OURS, f"got schema 2, expected {SCHEMA_VERSION}"),
    ],
)
def test_a_state_that_cannot_be_used_is_renamed(
    state: dict[str, Any],
    engine: EngineKey,
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "state"
    before = saved(path, **state)
    check_state_file(path)
    assert load_state(path, engine) is None
    assert why in caplog.text
    assert f"renamed to {path}." in caplog.text
    saved(path)
    assert renamed(tmp_path) == [before]


@pytest.mark.parametrize(
    "content",
    [b"not JSON", b"[1, 2]", b'{"request_id": "a"}\n{"request_id": "b"}\n', b'{"a": 1}', b"\xff"],
)
def test_a_file_that_is_no_state_is_refused_and_stays(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(
        SpecError,
        match=(
            r"^got --state-file .*/state, which is not a state file; expected a state file of "
            r"`kendall"
        ),
    ):
        check_state_file(path)
    assert load_state(path, OURS) is None
    assert "cannot use --state-file" in caplog.text
    assert renamed(tmp_path) == [content], "were it written after the check"


def test_an_empty_file_is_like_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state"
    path.touch()
    check_state_file(path)
    assert load_state(path, OURS) is None
    assert caplog.text == ""


def test_one_that_cannot_be_renamed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    saved(path)

    def refused(_: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kendall.server.live.state_file.put_aside", refused)
    assert load_state(path, replace(OURS, servers=2)) is None
    assert "cannot rename it: [Errno 13] Permission denied" in caplog.text


@pytest.mark.slow
def test_a_gateway_that_ends_has_saved_its_law_and_the_next_one_begins_with_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    settings = Settings(
        model="tiny", served_model_name="tiny", prediction_interval=0, state_file=path
    )

    async def main() -> None:
        for law in (GIVEN, None):
            gateway = Gateway(settings, EmulatedEngine(GIVEN), law)
            await gateway.start()
            assert path.exists() is (law is None)
            assert gateway.latency.law == GIVEN
            await gateway.stop()

    asyncio.run(main())  # a process of its own has been asked, and is gone at the end


class Host:
    """What a state is of, at `seconds` of its clock."""

    def __init__(self, path: Path | None, law: str | None = str(GIVEN)) -> None:
        self.seconds = 1000.0
        self.settings = SimpleNamespace(state_file=path, served_model_name="tiny", policy="single")
        self.latency = LatencyModelInForce(None if law is None else parse_law(law))
        known = SimpleNamespace(engine="vllm", max_num_seqs=64, servers=1)
        self.batcher = SimpleNamespace(capabilities=known)
        self.restored: list[SavedPilot] = []

    def now(self) -> float:
        return self.seconds

    def keeper(self) -> StateKeeper:
        pilot: Any = SimpleNamespace(
            saved=lambda: SavedPilot(clock=self.seconds, followed="dynamic"),
            restore=self.restored.append,
        )
        host: Any = self
        return StateKeeper(host, pilot)


def test_what_is_kept_is_the_law_the_estimates_and_the_autopilot(tmp_path: Path) -> None:
    path, estimates = tmp_path / "folder" / "state", msgspec.Raw(b'{"n":1}')
    host = Host(path)
    asyncio.run(host.keeper().keep(estimates, 5.0))
    state = msgspec.json.decode(path.read_bytes())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", state.pop("saved_at"))
    assert state == {
        "schema_version": 1,
        "engine": {"engine": "vllm", "model": "tiny", "max_num_seqs": 64, "servers": 1},
        "law": str(GIVEN),
        "profile": None,
        "estimates": {"n": 1},
        "autopilot": None,
        "clock": 1000.0,
        "knobs": None,
        "followed": "dynamic",
    }
    assert [each.name for each in path.parent.iterdir()] == ["state"]
    later = Host(path, None)
    keeper = later.keeper()
    keeper.restore()
    assert (later.latency.law, keeper.estimates) == (GIVEN, estimates)
    assert [each.followed for each in later.restored] == ["dynamic"]


def test_a_state_is_kept_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    host = Host(tmp_path / "state")
    keeper = host.keeper()
    assert (keeper.wanted, keeper.due) == (True, True)
    asyncio.run(keeper.keep(msgspec.Raw(b"1"), 1000.0))
    due = []
    for host.seconds in (1059.9, 1060.0):
        due.append(keeper.due)
    assert due == [False, True]
    host.seconds = 1001.0
    keeper.make_due()
    assert keeper.due
    (tmp_path / "state").unlink()
    keeper.save_last()
    assert (tmp_path / "state").exists()


def test_nothing_is_kept_without_a_file_or_a_law(tmp_path: Path) -> None:
    keeper = Host(None).keeper()
    assert (keeper.wanted, keeper.due) == (False, False)
    keeper.save()
    Host(tmp_path / "state", None).keeper().save()
    assert not (tmp_path / "state").exists()
    keeper.restore()
    assert keeper.estimates is None


def test_a_state_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Host(tmp_path / "file" / "state").keeper().save()
    assert f"cannot write the state file {tmp_path}/file/state: [Errno " in caplog.text


def test_a_restored_law_never_replaces_one_that_is_there() -> None:
    kept = "k1=5e-3,k2=0,k3=0,k4=1e-3"
    settings = Settings(model="tiny", served_model_name="tiny")
    engine = EmulatedEngine(GIVEN)
    profile = Profile(name="tiny", law=GIVEN)
    gateway = Gateway(settings, engine, None)
    gateway.latency.restore(None, None)
    assert gateway.latency.law is None
    gateway.latency.restore(None, kept)
    assert gateway.latency.law == parse_law(kept)
    gateway.latency.restore(profile.to_dict(), None)
    assert gateway.latency.law == parse_law(kept)
    assert gateway.latency.profile is None
    other = Gateway(settings, engine, None)
    other.latency.restore(profile.to_dict(), kept)
    assert (other.latency.law, other.latency.profile) == (GIVEN, profile), (
        "the profile says more than the text"
    )
