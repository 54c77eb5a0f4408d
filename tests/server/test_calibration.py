"""Which law a speed is measured against, and what `kendall calibrate` saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from queueing.latency import parse_law
from queueing.profile import Profile, profile_path
from server.law.command import calibrate
from tests.server.asgi import call, running
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012")


def test_the_speed_is_measured_against_the_law_in_force_wherever_it_came_from() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.law, gateway.profile = LAW, None  # as with --latency
            answer = await call(app, "POST", "/admin/calibrate", {"speed_only": True, "seconds": 0.1})
            assert answer.status == 200, answer.body
            assert gateway.law is not None
            assert gateway.law.at_speed(1.0) == LAW

    run_virtual(main())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"speed_only": True}, 409, ("none is in force", "--latency")),
        ({"latency": "k9=1"}, 400, ("got latency without speed_only",)),
        ({"latency": "k9=1", "speed_only": True}, 400, ("k9",)),
    ],
)
def test_a_law_that_is_missing_or_not_used_is_said(body: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.law = gateway.profile = None
            answer = await call(app, "POST", "/admin/calibrate", body)
            assert answer.status == status
            for words in says:
                assert words in answer.json()["error"]["message"]
            assert not gateway.calibrating

    run_virtual(main())


@pytest.mark.parametrize(
    ("engine", "plan", "saved_as", "says"),
    [
        ("vllm", {}, "tiny", "profiles/tiny.json"),
        ("emulated", {}, None, "the engine is emulated"),
        ("vllm", {"speed_only": True}, None, "only the speed was measured"),
        ("emulated", {"name": "mine"}, "mine", "profiles/mine.json"),
    ],
)
def test_a_profile_of_the_cache_is_replaced_only_by_a_measured_law(
    engine: str,
    plan: dict[str, Any],
    saved_as: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile = Profile(name=plan.get("name", "tiny"), law=LAW, engine=engine)
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200, json=profile.to_dict()))
    calibrate("http://127.0.0.1:8080", plan, None, json_output=False)
    kept = [path.stem for path in (tmp_path / "kendall").rglob("*.json")]
    assert kept == ([] if saved_as is None else [saved_as])
    assert says in " ".join(capsys.readouterr().out.split()).replace(" /", "/")
    calibrate("http://127.0.0.1:8080", plan, tmp_path / "asked.json", json_output=True)
    assert (tmp_path / "asked.json").is_file(), "--output always saves"
    assert profile_path("tiny").is_file() == (saved_as == "tiny")
