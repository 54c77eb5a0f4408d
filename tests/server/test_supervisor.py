"""The lives of one engine: how soon it is started again, when no more, and who hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kendall.options import option_of
from kendall.policies import SpecError
from kendall.server.engines.base import EngineStartError, InvalidPromptError
from kendall.server.runtime.errors import ApiError
from kendall.server.supervision.settings import SupervisionSettings
from kendall.server.supervision.supervisor import Supervisor
from tests.virtual_time import run_virtual


class FakeEngine:
    """Starts at once, or as `starts` says: seconds that a start takes, or why it fails; from the
    second start on.
    """

    def __init__(self, *starts: float | str) -> None:
        self.starts = iter(starts)
        self.started, self.started_at = asyncio.Event(), list[float]()
        self.stopped = 0
        self.starting = False
        self.on_death: Callable[[str], None] | None = None

    async def start(self) -> Any:
        self.started_at.append(asyncio.get_running_loop().time())
        self.started.set()
        takes = next(self.starts, 0.0) if len(self.started_at) > 1 else 0.0
        if isinstance(takes, str):
            raise EngineStartError(takes)
        self.starting = True
        try:
            await asyncio.sleep(takes)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # it tidies up
            raise
        finally:
            self.starting = False
        return f"capabilities {len(self.started_at)}"

    async def stop(self) -> None:
        assert not self.starting
        self.stopped += 1


class Supervised:
    """A supervisor with what it told, and when."""

    def __init__(
        self, *starts: float | str, refuse: bool = False, dies: int = 0, **settings: Any
    ) -> None:
        self.engine = FakeEngine(*starts)
        self.told: list[tuple[str, float, Any]] = []
        self.refuse = refuse
        self.dies = dies  # so many engines are lost while the gateway hears that they are up
        given: Any = self.engine
        self.supervisor = Supervisor(
            given,
            SupervisionSettings(**settings),
            on_down=self.hear("down"),
            on_up=self.up,
            on_given_up=self.hear("given up"),
        )

    def hear(self, what: str) -> Callable[[Any], None]:
        return lambda about: self.told.append((what, asyncio.get_running_loop().time(), about))

    def up(self, capabilities: Any) -> None:
        self.hear("up")(capabilities)
        if self.dies:
            self.dies -= 1
            self.supervisor.lost("it took no work")
        if self.refuse:
            raise RuntimeError("no place for it")

    async def live(self, *lives: float) -> list[float]:
        """Engines that serve for so many seconds each; the waits before they were started again."""
        await self.supervisor.start()
        waits = []
        for seconds in lives:
            await asyncio.sleep(seconds)
            lost_at = asyncio.get_running_loop().time()
            self.engine.started.clear()
            self.supervisor.lost(f"after {seconds:g} s")
            if self.supervisor.state == "restarting":
                await self.engine.started.wait()
                waits.append(self.engine.started_at[-1] - lost_at)
            await asyncio.sleep(0.001)
        return waits


def runs(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def test_after_sound_lives_it_is_started_again_at_once_every_time() -> None:
    async def main() -> None:
        of = Supervised()
        assert await of.live(*(11.0,) * 5) == pytest.approx([0.0] * 5)
        assert of.supervisor.serving
        assert of.supervisor.restarts == 5

    runs(main)


def test_after_short_lives_it_waits_twice_as_long_each_time_until_one_was_sound() -> None:
    async def main() -> None:
        of, short = Supervised(), 9.0
        assert await of.live(short, short, short, 11.0, short) == pytest.approx(
            [0.0, 0.5, 1.0, 0.0, 0.5]
        )

    runs(main)


def test_a_life_is_counted_from_the_end_of_its_start() -> None:
    """A start of eight seconds and a life of nine: none of 17."""

    async def main() -> None:
        of = Supervised(8.0)
        await of.live(11.0)
        await asyncio.sleep(8.0)
        assert of.supervisor.serving
        await asyncio.sleep(9.0)
        lost_at = asyncio.get_running_loop().time()
        of.supervisor.lost("again")
        await asyncio.sleep(2.0)
        assert of.engine.started_at[-1] - lost_at == pytest.approx(0.5)

    runs(main)


def test_a_start_that_fails_is_a_loss_of_its_own_and_its_reason_is_kept() -> None:
    async def main() -> None:
        of = Supervised("no memory", "no memory either", 0.0)
        await of.live(11.0)
        assert of.supervisor.last_loss == "no memory"
        assert of.supervisor.state == "restarting"
        await asyncio.sleep(5.0)
        assert [
            of.engine.started_at[i + 1] - of.engine.started_at[i] for i in (1, 2)
        ] == pytest.approx([0.5, 1.0])
        assert (of.supervisor.state, of.supervisor.restarts, of.supervisor.last_loss) == (
            "serving",
            1,
            "no memory either",
        )
        assert [what for what, *_ in of.told] == ["down", "up"]
        assert of.told[-1][2] == "capabilities 4"

    runs(main)


def test_a_start_that_takes_too_long_is_given_up_and_made_again() -> None:
    async def main() -> None:
        of = Supervised(100.0, 1.0, restart_timeout=20.0)
        await of.live(11.0)
        await asyncio.sleep(20.1)
        assert of.supervisor.last_loss == "not done within 20 s"
        await asyncio.sleep(1.5)
        assert of.supervisor.serving

    runs(main)


def test_the_limit_of_a_start_follows_how_long_starts_took_and_not_when_they_were() -> None:
    async def main() -> None:
        of = Supervised(1.0, 100.0, 1.0, restart_timeout=20.0)
        await of.live(50.0)
        await asyncio.sleep(12.0)
        assert of.supervisor.serving
        of.supervisor.lost("again")
        await asyncio.sleep(20.1)
        assert of.supervisor.last_loss == "not done within 20 s"

    runs(main)


def test_a_start_that_cannot_be_cancelled_is_the_last_one_and_the_reason() -> None:
    class Deaf(FakeEngine):
        async def start(self) -> Any:
            if self.started_at:
                ends_at = asyncio.get_running_loop().time() + 100.0
                while (left := ends_at - asyncio.get_running_loop().time()) > 0:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(left)
            return await super().start()

    async def main() -> None:
        of = Supervised(restart_timeout=20.0)
        of.supervisor._engine = of.engine = Deaf()
        await of.supervisor.start()
        of.supervisor.lost("it broke")
        await asyncio.sleep(60.0)
        why = "not done within 20 s, and still running 20 s after its cancellation"
        assert (of.supervisor.state, of.supervisor.last_loss) == ("lost", why)
        assert [(what, about) for what, _, about in of.told][1:] == [("given up", why)]
        await asyncio.sleep(60.0)

    runs(main)


@pytest.mark.parametrize(("most", "starts"), [(0, 0), (1, 1), (3, 3)])
def test_it_gives_up_after_so_many_starts_within_the_window_and_says_why(
    most: int, starts: int
) -> None:
    async def main() -> None:
        of = Supervised(max_restarts=most, restart_window=1e6)
        await of.live(*(11.0,) * (most + 1))
        assert len(of.engine.started_at) == 1 + starts
        assert of.supervisor.state == "lost"
        assert [what for what, *_ in of.told] == ["down", "up"] * most + ["given up"]
        assert of.told[-1][2] == "after 11 s"
        of.supervisor.lost("once more")
        assert len(of.told) == 2 * most + 1, "it is lost already"

    runs(main)


def test_losses_out_of_the_window_are_forgotten() -> None:
    async def main() -> None:
        of = Supervised(max_restarts=1, restart_window=50.0)
        assert await of.live(20.0, 51.0, 51.0) == pytest.approx([0.0, 0.0, 0.0])
        assert of.supervisor.serving

    runs(main)


def test_each_loss_each_failed_start_and_the_end_stand_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        await Supervised("no memory", max_restarts=1).live(11.0)

    runs(main)
    said = (
        "the engine failed: after 11 s",
        "the engine did not start again: no memory",
        "no further restart of the engine after 0 restarts",
    )
    assert [
        any(record.getMessage().startswith(line) for record in caplog.records) for line in said
    ] == [True] * 3


def test_a_restart_and_what_the_gateway_made_of_it_stand_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    runs(lambda: restarted(refuse=False))
    assert "the engine was restarted (restart 1)" in caplog.messages
    assert "the gateway failed after a restart of the engine" not in caplog.messages
    runs(lambda: restarted(refuse=True))
    (failed,) = [
        record
        for record in caplog.records
        if record.getMessage() == "the gateway failed after a restart of the engine"
    ]
    assert failed.exc_info is not None
    assert str(failed.exc_info[1]) == "no place for it"


async def restarted(refuse: bool) -> None:
    await Supervised(refuse=refuse).live(11.0)


def test_a_gateway_that_cannot_go_on_after_a_restart_gives_up() -> None:
    async def main() -> None:
        of = Supervised(refuse=True)
        await of.live(11.0)
        assert of.supervisor.state == "lost"
        assert [what for what, *_ in of.told] == ["down", "up", "given up"]
        with pytest.raises(ApiError) as refused:
            await of.supervisor.across_restarts(nothing)
        assert (refused.value.status, refused.value.code, refused.value.retry_after) == (
            503,
            "engine_unavailable",
            10,
        )

    runs(main)


def test_an_engine_that_dies_while_the_gateway_hears_that_it_is_up_is_started_again() -> None:
    async def main() -> None:
        of = Supervised(dies=2)
        await of.live(11.0)
        assert of.supervisor.state == "restarting"
        await asyncio.sleep(5.0)
        assert (of.supervisor.state, of.supervisor.restarts, of.supervisor.last_loss) == (
            "serving",
            3,
            "it took no work",
        )
        assert [what for what, *_ in of.told] == ["down", "up", "down", "up", "down", "up"]

    runs(main)


async def nothing() -> str:
    return "done"


def test_a_call_waits_for_the_restart_and_is_then_made() -> None:
    async def main() -> None:
        of = Supervised(3.0)
        await of.supervisor.start()
        assert await of.supervisor.across_restarts(nothing) == "done"
        of.supervisor.lost("gone")
        call = asyncio.create_task(of.supervisor.across_restarts(nothing))
        await asyncio.sleep(2.9)
        assert not call.done()
        assert of.supervisor.statistics() == {
            "state": "restarting",
            "restarts": 0,
            "last_loss": "gone",
            "parked": 1,
        }
        await asyncio.sleep(0.2)
        assert call.result() == "done"
        assert of.supervisor.statistics()["parked"] == 0

    runs(main)


def test_so_many_calls_wait_for_a_restart_and_no_more() -> None:
    async def main() -> None:
        of = Supervised(3.0, max_parked=2)
        await of.supervisor.start()
        of.supervisor.lost("gone")
        calls = [asyncio.create_task(of.supervisor.across_restarts(nothing)) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(ApiError) as refused:
            await of.supervisor.across_restarts(nothing)
        assert (refused.value.status, refused.value.retry_after) == (503, 2)
        assert await asyncio.gather(*calls) == ["done", "done"]

    runs(main)


def test_a_call_is_made_again_if_it_failed_with_its_engine_and_not_if_it_failed_by_itself() -> None:
    async def main() -> None:
        of = Supervised()
        await of.supervisor.start()
        await asyncio.sleep(11.0)
        made = itertools.count(1)

        async def dies_once() -> int:
            count = next(made)
            if count == 1:
                of.supervisor.lost("gone")
                raise RuntimeError("the connection is closed")
            return count

        async def fails() -> None:
            next(made)
            raise RuntimeError("no such thing")

        async def wrong() -> None:
            next(made)
            of.supervisor.lost("gone")
            raise InvalidPromptError("too long")

        assert await of.supervisor.across_restarts(dies_once) == 2
        with pytest.raises(RuntimeError, match="no such thing"):
            await of.supervisor.across_restarts(fails)
        with pytest.raises(InvalidPromptError):
            await of.supervisor.across_restarts(wrong)
        assert next(made) == 5, "one call each of the last two"

    runs(main)


def test_a_call_whose_engine_was_lost_is_made_again_also_where_the_next_one_serves_already() -> (
    None
):
    async def main() -> None:
        of = Supervised()
        await of.supervisor.start()
        await asyncio.sleep(11.0)
        made = itertools.count(1)

        async def outlives_its_engine() -> int:
            count = next(made)
            if count == 1:
                of.supervisor.lost("gone")
                await asyncio.sleep(1.0)
                assert of.supervisor.serving
                raise RuntimeError("the connection is closed")
            return count

        assert await of.supervisor.across_restarts(outlives_its_engine) == 2

    runs(main)


def test_after_a_stop_nothing_is_started_any_more() -> None:
    async def main() -> None:
        of = Supervised(3.0)
        await of.supervisor.start()
        of.supervisor.lost("gone")
        await asyncio.sleep(0.1)
        await of.supervisor.stop()
        assert of.engine.stopped == 1
        count = len(of.engine.started_at)
        await asyncio.sleep(60.0)
        assert len(of.engine.started_at) == count
        assert of.engine.stopped == 1
        assert of.supervisor.state == "lost"

    runs(main)


@pytest.mark.parametrize(("how", "seconds"), [("fails", 0.0), ("hangs", 20.0)])
def test_an_engine_that_fails_or_hangs_while_it_stops_holds_up_no_end(
    how: str, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        of = Supervised()
        await of.supervisor.start()

        async def stop() -> None:
            if how == "fails":
                raise LookupError("no such process")
            await asyncio.sleep(1e6)

        of.engine.stop = stop  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        await of.supervisor.stop()
        assert asyncio.get_running_loop().time() - began == seconds

    runs(main)
    assert caplog.messages == [
        {
            "fails": "the engine failed while stopping",
            "hangs": "the engine did not stop within 20 s; the gateway does not wait for it any "
            "longer",
        }[how]
    ]


def test_a_long_start_is_said_to_go_on_after_10_20_and_40_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        of = Supervised(75.0)
        await of.live(11.0)
        await asyncio.sleep(200.0)
        assert of.supervisor.serving

    with caplog.at_level(logging.INFO, "kendall.supervision"):
        runs(main)
    said = [text for text in caplog.messages if "so far" in text]
    assert said == [f"the engine is starting: {seconds} s so far" for seconds in (10, 20, 40)]


@pytest.mark.parametrize(
    ("ends", "code", "within"),
    [
        ("stop", "engine_unavailable", 0.1),
        ("refuse", "shutting_down", 0.1),
        ("give up", "engine_unavailable", 1.0),
    ],
)
def test_those_that_wait_for_a_restart_are_told_at_once_that_there_is_none(
    ends: str, code: str, within: float
) -> None:
    """The second start fails at once, the third after half a second: the last that
    `max_restarts` allows.
    """

    async def main() -> None:
        of, never = Supervised("no", "no", max_restarts=2 if ends == "give up" else 8), pytest.fail
        await of.supervisor.start()
        of.supervisor.lost("gone")
        waiting = asyncio.ensure_future(
            of.supervisor.across_restarts(lambda: never("there is no engine"))
        )
        await asyncio.sleep(0.1)
        assert of.supervisor.statistics()["parked"] == 1
        if ends == "stop":
            await of.supervisor.stop()
        elif ends == "refuse":
            of.supervisor.refuse("the gateway ends")
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(waiting, within)
        assert (caught.value.status, caught.value.code) == (503, code)
        assert of.supervisor.statistics()["parked"] == 0

    runs(main)


RULES = {
    field.name: described.rules
    for field in dataclasses.fields(SupervisionSettings)
    if (described := option_of(field)) is not None
}


def test_no_restart_and_no_call_that_waits_for_one_may_be_allowed() -> None:
    async def main() -> None:
        of = Supervised(max_restarts=RULES["max_restarts"]["min"])
        await of.supervisor.start()
        of.supervisor.lost("gone")
        assert of.supervisor.state == "lost"
        of = Supervised(9.0, max_parked=RULES["max_parked"]["min"])
        await of.supervisor.start()
        of.supervisor.lost("gone")
        with pytest.raises(ApiError, match="too many requests wait for it"):
            await of.supervisor.across_restarts(lambda: pytest.fail("it restarts"))

    runs(main)


@pytest.mark.parametrize("name", ["start_timeout", "restart_timeout", "restart_window"])
def test_a_limit_of_a_start_is_a_second_at_least(name: str) -> None:
    async def main() -> None:
        parse = RULES[name]["parser"]
        with pytest.raises(SpecError):
            parse("0.9s")
        of = Supervised(1.5, **{name: parse("1s")})
        await of.supervisor.start()
        of.supervisor.lost("gone")
        await asyncio.sleep(1.2)
        failed = of.supervisor.last_loss == "not done within 1 s"
        assert failed is (name == "restart_timeout")

    runs(main)
