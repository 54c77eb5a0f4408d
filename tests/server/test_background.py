"""Background tasks of the gateway: after an unexpected error they log it and start again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kendall.server.calibration.idle_probes import IdleProbes
from kendall.server.engines.http.exchange import UpstreamExchange
from kendall.server.live.model import LiveModel
from kendall.server.runtime.background import PAUSE, going_on
from kendall.server.supervision.progress import StuckWatch
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import call, completion, running
from tests.server.passing_gateway import before
from tests.server.upstream_stub import Stub, answers, play
from tests.virtual_time import run_virtual


def failing(times: int, then: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """A method that raises LookupError in its first `times` calls and later calls `then`; a list
    that holds the number of calls.
    """
    calls = [0]

    def method(*given: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] <= times:
            raise LookupError("nobody thought of it")
        return then(*given, **options)

    return method, calls


def test_what_fails_begins_again_until_it_returns_and_is_explained_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[float] = []

    async def work() -> None:
        ran.append(asyncio.get_running_loop().time())
        if len(ran) < 4:
            raise LookupError("nobody thought of it")

    run_virtual(going_on("a test", work))
    assert [later - ran[0] for later in ran] == pytest.approx([0, PAUSE, 2 * PAUSE, 3 * PAUSE])
    assert [bool(each.exc_info) for each in caplog.records] == [True, False, False]
    assert all("a test failed; it is repeated" in each.getMessage() for each in caplog.records)


def test_a_task_that_is_cancelled_ends() -> None:
    async def main() -> None:
        task = asyncio.create_task(going_on("a test", lambda: asyncio.sleep(1000)))
        await asyncio.sleep(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    run_virtual(main())


@pytest.mark.parametrize(
    ("owner", "name", "settings"),
    [
        (LiveModel, "check", {"prediction_interval": 1.0}),
        (IdleProbes, "_allowed", {"idle_probes": True}),
        (StuckWatch, "look", {"supervision": SupervisionSettings(stuck_timeout=5.0)}),
    ],
)
def test_a_gateways_own_tasks_go_on(
    owner: type,
    name: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    method, calls = failing(2, getattr(owner, name))
    monkeypatch.setattr(owner, name, method)

    async def main() -> None:
        async with running(**settings) as (app, _):
            await asyncio.sleep(20)
            assert (
                await call(app, "POST", "/v1/completions", completion(max_tokens=2))
            ).status == 200

    run_virtual(main())
    assert calls[0] > 4, "it is asked again and again"
    said = [each.getMessage() for each in caplog.records if "it is repeated" in each.getMessage()]
    assert len(said) == 2


def test_the_watch_of_calls_at_servers_behind_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    method, calls = failing(2, UpstreamExchange.look)
    monkeypatch.setattr(UpstreamExchange, "look", method)

    async def test(stub: Stub) -> None:
        stub.behave = answers(after=30.0)
        async with before(stub) as kendall:
            assert (await kendall.answer({"model": "m", "prompt": "a"})).status == 200

    play(test)
    assert calls[0] > 4
    assert sum("it is repeated" in each.getMessage() for each in caplog.records) == 2
