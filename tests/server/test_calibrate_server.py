"""`kendall calibrate URL` before a small server that is no gateway, with three slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.profile import Profile, load_profile
from kendall.server.operations import calibrate_server
from kendall.server.operations.calibrate import calibrate
from tests.small_server import SLOTS, serving

PLAN = {"repeats": 2, "max_batch_size": 4, "max_output_tokens": 4}


def calibrated(url: str, folder: Path, **more: Any) -> Profile:
    calibrate(url, PLAN, folder / "law.json", json_output=False, **more)
    return load_profile(str(folder / "law.json"))


@pytest.mark.left_out
def test_the_law_and_how_many_are_served_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        profile = calibrated(server.url, tmp_path)
    assert (profile.engine, profile.model, profile.max_num_seqs) == ("http", "small", SLOTS)
    assert max(len(cell["lengths"]) for cell in profile.cells) == SLOTS
    assert profile.law.step(1) > 0
    assert profile.note == f"through the API of {server.url}"
    assert "imprecise" in capsys.readouterr().out, "what could not be separated"


@pytest.mark.left_out
def test_without_metrics_nobody_knows_of_others(tmp_path: Path) -> None:
    with serving(metrics=False) as server:
        profile = calibrated(server.url, tmp_path)
    assert profile.note is not None
    assert "whether others used the server is not known" in profile.note
    assert "/metrics answered 404" in profile.note


@pytest.mark.left_out
def test_requests_of_others_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_server, "SETTLE", 0.1)
    with serving(others=2) as server:
        with pytest.raises(CommandError, match="with 2 running and 0 waiting requests of others"):
            calibrated(server.url, tmp_path)
        assert server.ended == 0
        assert calibrated(server.url, tmp_path, share=True).max_num_seqs == SLOTS


@pytest.mark.left_out
def test_requests_of_others_during_the_measurement(tmp_path: Path) -> None:
    with serving(ended_of_others=1) as server:
        with pytest.raises(CommandError, match=r"\d+ requests of others ended during the measur"):
            calibrated(server.url, tmp_path)
        note = calibrated(server.url, tmp_path, share=True).note
    assert note is not None
    assert "of others ended during the measurement" in note


def test_a_key_is_sent_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    with serving(key="right") as server:
        with pytest.raises(SpecError, match=r"/v1/models answered 401: .*; expected --api-key"):
            calibrated(server.url, tmp_path, api_key="wrong")
        assert calibrated(server.url, tmp_path, api_key="right").model == "small"


def test_the_speed_alone_needs_a_gateway(tmp_path: Path) -> None:
    with serving() as server, pytest.raises(SpecError, match="got --speed-only with http"):
        calibrate(server.url, {"speed_only": True}, tmp_path / "x.json", json_output=True)
