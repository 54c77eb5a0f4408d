"""An engine whose start or stop hangs, fails or takes long: up again or given up within a stated
time, and everyone is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from kendall.server.engines.base import Engine
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.supervision.supervisor import LET_GO, EngineLostError
from tests.server.asgi import Call, call, completion
from tests.server.mortal import faulty, words
from tests.server.stubborn import Stubborn
from tests.virtual_time import run_virtual

PATH = "/v1/completions"
ALL = range(1, 100)


def ask(app: Any, tokens: int = 30, **fields: Any) -> Call:
    return Call(
        app,
        "POST",
        PATH,
        completion(kendall_forced_output_tokens=tokens, max_tokens=300, ignore_eos=False) | fields,
    )


def supervision(**changed: Any) -> SupervisionSettings:
    return SupervisionSettings(**({"restart_timeout": 30.0, "stuck_timeout": 0} | changed))


async def probes(app: Any) -> tuple[int | None, int | None]:
    return (await call(app, "GET", "/health")).status, (await call(app, "GET", "/ready")).status


async def killed_with_callers(app: Any, engine: Stubborn) -> list[Call]:
    """In service, waiting and, with a text to be read first, parked."""
    calls = [ask(app) for _ in range(4)]
    await asyncio.sleep(0.02)
    engine.kill()
    return [*calls, ask(app, prompt="a text")]


def test_a_restart_that_hangs_is_ended_at_its_limit_and_the_next_one_serves_everyone() -> None:
    async def main() -> None:
        async with faulty(
            "capped:max_batch_size=2", Stubborn(hangs={1}), supervision=supervision()
        ) as (app, gateway, engine, records):
            calls, at = await killed_with_callers(app, engine), gateway.now()
            await asyncio.sleep(29.0)
            assert await probes(app) == (200, 503), (
                "it is being replaced: leave it alone, send nothing new"
            )
            for made in calls:
                await made.task
            assert [made.json()["choices"][0]["text"] for made in calls] == [words(30)] * 5
            assert 30.0 < gateway.now() - at < 30.0 + 0.5 + engine.start_takes + 1.0
            assert (gateway.supervisor.restarts, gateway.supervisor.last_loss) == (
                1,
                "not done within 30 s",
            )
            assert await probes(app) == (200, 200)
            assert Counter(record.outcome for record in records) == {"completed": 5}

    run_virtual(main())


def test_restarts_that_all_hang_are_given_up_after_the_third_each_with_twice_the_time() -> None:
    async def main() -> None:
        async with faulty(
            "capped:max_batch_size=2", Stubborn(hangs=ALL), supervision=supervision()
        ) as (app, gateway, engine, records):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            calls, at = await killed_with_callers(app, engine), gateway.now()
            for made in calls:
                await made.task
            assert gateway.now() - at == pytest.approx(30.0 + 0.5 + 60.0 + 1.0 + 120.0)
            assert [(made.status, made.json()["error"]["code"]) for made in calls] == [
                (503, "engine_unavailable")
            ] * 5
            assert (ends, engine.starts, await probes(app)) == (
                [gateway.supervisor.last_loss],
                4,
                (503, 503),
            )
            assert sum(Counter(record.outcome for record in records).values()) == 5

    run_virtual(main())


def test_failed_starts_are_counted_however_long_they_take() -> None:
    """Each takes most of its limit: within `restart_window` there are never more than a few, and
    still it comes to an end.
    """

    async def main() -> None:
        engine = Stubborn(start_takes=280.0, start_fails=99)
        async with faulty("single", engine, supervision=supervision(restart_timeout=300.0)) as (
            app,
            gateway,
            _,
            _,
        ):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            (made, *_), at = await killed_with_callers(app, engine), gateway.now()
            await made.task
            assert (made.status, len(ends), engine.starts) == (503, 1, 1 + 8)
            assert gateway.now() - at < 8 * (280.0 + 30.0)

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_takes", "start_takes", "starts"), [(400.0, 350.0, 1), (0.0, 500.0, 2), (0.0, 1100.0, 3)]
)
def test_a_start_that_takes_longer_than_the_limit_is_not_thrown_away_for_ever(
    first_takes: float, start_takes: float, starts: int
) -> None:
    """A large model from a cold disk: it may take as long as the first start did, and twice,
    then four times as long as the limit.
    """

    async def main() -> None:
        engine = Stubborn(first_takes=first_takes, start_takes=start_takes)
        async with faulty("single", engine, supervision=supervision(restart_timeout=300.0)) as (
            app,
            gateway,
            _,
            _,
        ):
            calls = await killed_with_callers(app, engine)
            for made in calls:
                await made.task
            assert {made.status for made in calls} == {200}
            assert (gateway.supervisor.restarts, engine.starts - 1) == (1, starts)

    run_virtual(main())


def test_an_engine_that_does_not_end_a_cancelled_start_is_given_up() -> None:
    """Another start beside it would be another engine."""

    async def main() -> None:
        async with faulty("single", Stubborn(hangs={1}, deaf=True), supervision=supervision()) as (
            app,
            gateway,
            engine,
            _,
        ):
            calls, at = await killed_with_callers(app, engine), gateway.now()
            for made in calls:
                await made.task
            assert {made.status for made in calls} == {503}
            assert (gateway.now() - at, engine.starts) == (pytest.approx(30.0 + LET_GO), 2)
            engine.release.set()

    run_virtual(main())


def test_a_start_that_is_cancelled_by_the_engine_itself_has_failed_and_the_next_one_serves() -> (
    None
):
    """A stop that awaits a cancelled start raises CancelledError, which no `except Exception`
    catches.
    """

    def cancelled() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        async with faulty("single", Stubborn(), supervision=supervision()) as (
            app,
            gateway,
            engine,
            _,
        ):
            engine.meanwhile = {1: cancelled}
            calls = await killed_with_callers(app, engine)
            for made in calls:
                await made.task
            assert {made.status for made in calls} == {200}
            assert (gateway.supervisor.restarts, engine.starts) == (1, 3)

    run_virtual(main())


def test_a_restart_that_breaks_off_in_any_way_is_given_up() -> None:
    async def main() -> None:
        async with faulty("single", Stubborn(hangs=ALL), supervision=supervision()) as (
            app,
            gateway,
            engine,
            _,
        ):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            calls = await killed_with_callers(app, engine)
            await asyncio.sleep(1.0)
            assert gateway.supervisor._task is not None
            gateway.supervisor._task.cancel()
            for made in calls:
                await made.task
            assert {made.status for made in calls} == {503}
            assert ends == ["the restart was interrupted: it was cancelled"]
            assert await probes(app) == (503, 503)

    run_virtual(main())


def test_an_engine_that_dies_the_moment_it_is_up_has_failed_to_start() -> None:
    """Its death is told before anybody knows that it serves; nobody would tell it again."""

    async def main() -> None:
        async with faulty("single", Stubborn(), supervision=supervision()) as (
            app,
            gateway,
            engine,
            _,
        ):
            engine.meanwhile = {1: engine.kill}
            calls = await killed_with_callers(app, engine)
            for made in calls:
                await made.task
            assert {made.status for made in calls} == {200}
            assert (gateway.supervisor.restarts, engine.starts) == (1, 3)

    run_virtual(main())


@pytest.mark.parametrize(("timeout", "lives"), [(0.0, 1), (0.5, 2)])
def test_an_engine_that_makes_no_token_is_replaced_unless_nobody_is_to_watch_it(
    timeout: float, lives: int
) -> None:
    """--stuck-timeout, 0: never."""

    async def main() -> None:
        async with faulty("single", Stubborn(), supervision=supervision(stuck_timeout=timeout)) as (
            app,
            _,
            engine,
            _,
        ):
            made = ask(app)
            await asyncio.sleep(0.01)
            engine.hang()
            await asyncio.sleep(60.0)
            assert (engine.life, made.task.done()) == (lives, lives == 2)
            made.leave()
            await made.task

    run_virtual(main())


def first_start(
    engine: Engine, failures: list[BaseException], start_timeout: float = 60.0
) -> tuple[Any, Gateway]:
    settings = Settings(
        model="tiny",
        served_model_name="tiny",
        prediction_interval=0,
        supervision=supervision(start_timeout=start_timeout, stuck_timeout=0),
    )
    gateway = Gateway(settings, engine)
    return create_app(gateway, failures.append), gateway


def test_a_first_start_that_hangs_ends_the_gateway_at_its_limit() -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        app, _ = first_start(Stubborn(hangs={0}), failures)
        async with app.router.lifespan_context(app):
            await asyncio.sleep(59.9)
            assert (failures, await probes(app)) == ([], (200, 503))
            await asyncio.sleep(0.2)
            assert [str(failure) for failure in failures] == [
                "the engine did not start within 60 s (--start-timeout); the log may say why"
            ]
            assert isinstance(failures[0], EngineLostError), "status 1: no argument was wrong"
            assert await probes(app) == (503, 503)

    run_virtual(main())


@pytest.mark.parametrize(("deaf", "at_most"), [(False, 0.0), (True, 2 * LET_GO)])
def test_the_gateway_ends_while_its_engine_boots_without_waiting_for_it(
    deaf: bool, at_most: float
) -> None:
    async def main() -> None:
        engine = Stubborn(hangs={0}, deaf=deaf)
        app, _ = first_start(engine, [])
        loop = asyncio.get_running_loop()
        async with app.router.lifespan_context(app):
            await asyncio.sleep(1.0)
            at = loop.time()
        assert loop.time() - at <= at_most
        engine.release.set()

    run_virtual(main())


def starts_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "is starting" in each.getMessage()]


@pytest.mark.parametrize(
    ("takes", "said"), [(9.0, []), (35.0, [10, 20]), (107.0, [10, 20, 40, 80])]
)
def test_a_long_start_says_in_the_log_that_it_goes_on(
    takes: float, said: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        app, _ = first_start(Stubborn(first_takes=takes), [], start_timeout=600.0)
        async with app.router.lifespan_context(app):
            await asyncio.sleep(500.0)

    with caplog.at_level(logging.INFO, "kendall"):
        run_virtual(main())
    assert starts_said(caplog) == [f"the engine is starting: {each} s so far" for each in said]


def test_a_start_that_failed_is_said_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        app, _ = first_start(Stubborn(hangs={0}), [])
        async with app.router.lifespan_context(app):
            await asyncio.sleep(500.0)

    with caplog.at_level(logging.INFO, "kendall"):
        run_virtual(main())
    assert starts_said(caplog)[-1] == "the engine is starting: 40 s so far"


def test_of_replicas_each_says_so_and_they_together_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = supervision(start_timeout=600.0, stuck_timeout=0)

    async def main() -> None:
        app, _ = first_start(Replicas(lambda _: Stubborn(first_takes=15.0), 2, settings), [])
        async with app.router.lifespan_context(app):
            await asyncio.sleep(50.0)

    with caplog.at_level(logging.INFO, "kendall"):
        run_virtual(main())
    assert starts_said(caplog) == [
        "server 0 is starting: 10 s so far",
        "server 1 is starting: 10 s so far",
    ]


def test_the_gateway_ends_though_its_engine_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with faulty("single", Stubborn(deaf=True), supervision=supervision()) as (
            _,
            _,
            engine,
            _,
        ):
            engine.stop_hangs = True
            at = loop.time()
        assert loop.time() - at == pytest.approx(LET_GO)
        engine.release.set()

    run_virtual(main())
    assert "the engine did not stop within 20 s" in caplog.text


def test_the_gateway_ends_while_its_engine_restarts_and_everyone_is_told() -> None:
    """What waits for the end of the restart too, which is in no queue."""

    async def main() -> None:
        async with faulty("single", Stubborn(hangs=ALL), supervision=supervision()) as (
            app,
            gateway,
            engine,
            _,
        ):
            calls = await killed_with_callers(app, engine)
            await asyncio.sleep(5.0)
            assert gateway.supervisor.statistics()["parked"] == 1
            gateway.begin_drain()
            gateway.abandon("the gateway is shutting down at once")
            at = gateway.now()
            for made in calls:
                await made.task
            assert [(made.status, made.json()["error"]["code"]) for made in calls] == [
                (503, "shutting_down")
            ] * 5
            assert gateway.now() == at
        assert asyncio.get_running_loop().time() == at

    run_virtual(main())
