"""A look of the live model that fails again and again: one line in the log, a counter, and a
word when it succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kendall.server.live.answers import Answer
from kendall.server.live.prediction_client import PredictorClient, PredictorLostError
from tests.server.asgi import call, completion, running
from tests.virtual_time import run_virtual

EVERY, LOOKS = 5.0, 12


@pytest.fixture(autouse=True)
def without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_: PredictorClient) -> None: ...

    monkeypatch.setattr(PredictorClient, "start", start)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("float division by zero"), PredictorLostError("the process died")]
)
def test_a_look_that_fails_every_time_is_logged_once_and_counted(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    async def fails(_: PredictorClient, function: str, *arguments: Any) -> Any:
        asked.append(function)
        raise error

    async def main() -> dict[str, Any]:
        async with running("capped:max_batch_size=4", prediction_interval=EVERY) as (app, _):
            await call(app, "POST", "/v1/completions", completion())
            await asyncio.sleep((LOOKS + 0.5) * EVERY)
            return dict((await call(app, "GET", "/admin/state")).json()["failures"])

    monkeypatch.setattr(PredictorClient, "ask", fails)
    with caplog.at_level(logging.INFO, logger="kendall.live"):
        state = run_virtual(main())
    looks = asked.count("assess_window")
    assert looks >= LOOKS - 1
    failed = [
        record
        for record in caplog.records
        if record.name == "kendall.live" and record.levelno >= logging.WARNING
    ]
    assert len(failed) == 1, [record.getMessage() for record in failed]
    assert str(error) in failed[0].getMessage()
    assert (state["prediction"]["count"], state["prediction"]["in_a_row"]) == (looks, looks)


def test_after_a_success_the_next_failure_is_logged_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(_: PredictorClient, function: str, *arguments: Any) -> Any:
        raise ValueError(function)

    async def nothing(_: PredictorClient, function: str, *arguments: Any) -> Any:
        return Answer(reason="too few")

    async def main() -> tuple[int, int]:
        async with running("capped:max_batch_size=4") as (_, gateway):
            live = gateway.live_model()
            for ask in (fails, fails, nothing, fails, fails):
                monkeypatch.setattr(PredictorClient, "ask", ask)
                await live.assess()
            return live.failures.count, live.failures.in_a_row

    with caplog.at_level(logging.INFO, logger="kendall.live"):
        assert run_virtual(main()) == (4, 2)
    lines = [
        record.levelname
        for record in caplog.records
        if record.name == "kendall.live" and "live prediction" in record.getMessage()
    ]
    assert lines == ["ERROR", "INFO", "ERROR"]
