"""Questions to the predicting process: the same one once, none for askers that have left, and
looks before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from kendall.policies import SpecError
from kendall.server.live.answers import AdviceAnswer
from kendall.server.live.prediction_client import PredictorLostError
from kendall.server.live.questions import Questions
from kendall.server.runtime.errors import ApiError
from tests.server.asgi import Call, call, running
from tests.virtual_time import run_virtual


def never(_: Callable[[], None]) -> Callable[[], object]:
    """The watch of a client that stays."""
    return lambda: None


class Leaving:
    """The watch of a client that leaves when it is told."""

    def __init__(self) -> None:
        self.leave: Callable[[], None] = lambda: None
        self.unwatched = False

    def __call__(self, on_gone: Callable[[], None]) -> Callable[[], object]:
        self.leave = on_gone
        return lambda: setattr(self, "unwatched", True)


def counting(answers: list[str], name: str, seconds: float = 1.0) -> Callable[[], Any]:
    async def work() -> str:
        answers.append(name)
        await asyncio.sleep(seconds)
        return name

    return work


def test_the_same_question_is_asked_once_and_answers_all() -> None:
    async def main() -> None:
        questions, begun = Questions(), list[str]()
        asked = [questions.ask("a", counting(begun, "a"), never) for _ in range(60)]
        assert await asyncio.gather(*asked) == ["a"] * 60
        assert begun == ["a"]
        assert await questions.ask("a", counting(begun, "again"), never) == "again", (
            "an answer is not kept"
        )

    run_virtual(main())


def test_different_questions_are_asked_one_at_a_time() -> None:
    async def main() -> None:
        questions, begun = Questions(), list[str]()
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(questions.ask(name, counting(begun, name), never) for name in "abc"))
        assert (begun, loop.time()) == (["a", "b", "c"], pytest.approx(3.0))

    run_virtual(main())


def test_trap_a_question_whose_askers_have_left_is_not_asked() -> None:
    """Sixty GETs of a page that was closed held the live prediction for half a minute."""

    async def main() -> None:
        questions, begun = Questions(), list[str]()
        first = asyncio.create_task(questions.ask("first", counting(begun, "first"), never))
        watches = [Leaving() for _ in range(60)]
        abandoned = [
            asyncio.create_task(questions.ask(n % 30, counting(begun, "abandoned"), watch))
            for n, watch in enumerate(watches)
        ]
        wanted = asyncio.create_task(
            questions.ask(0, counting(begun, "wanted"), never)
        )  # one of them has another asker
        await asyncio.sleep(0.1)
        for watch in watches:
            watch.leave()
            watch.leave()
        gone = await asyncio.gather(*abandoned, return_exceptions=True)
        assert {type(each) for each in gone} == {ClientDisconnect}
        assert all(watch.unwatched for watch in watches)
        assert (await first, await wanted) == ("first", "abandoned")
        assert begun == ["first", "abandoned"]
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)

    run_virtual(main())


def test_an_error_reaches_every_asker_and_ends_nothing_else() -> None:
    async def main() -> None:
        async def fail() -> None:
            await asyncio.sleep(0.1)
            raise SpecError("no")

        questions, leaving = Questions(), Leaving()
        asked = [questions.ask("a", fail, never) for _ in range(2)]
        assert [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == [
            "no",
            "no",
        ]
        alone = asyncio.create_task(questions.ask("a", fail, leaving))
        await asyncio.sleep(0.01)
        leaving.leave()
        with pytest.raises(ClientDisconnect):
            await alone
        await asyncio.sleep(1)  # it fails with nobody there
        assert await questions.ask("a", counting([], "b"), never) == "b"

    run_virtual(main())


def test_a_process_that_is_lost_over_a_question_is_told_in_words() -> None:
    """And not an internal error: the next question may be answered."""

    async def lost() -> None:
        raise PredictorLostError("the predicting process did not answer within 120 s")

    async def main() -> None:
        with pytest.raises(
            ApiError, match=r"within 120 s; ask again when .* for one target"
        ) as told:
            await Questions().ask("a", lost, never)
        assert (told.value.status, told.value.code) == (504, "prediction_timeout")

    run_virtual(main())


async def no_question() -> None:
    """No look is due."""


def test_a_look_waits_for_one_question_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty different questions over HTTP, one at a time; the look comes behind the one that is
    being answered.
    """

    async def main() -> None:
        async with running() as (app, gateway):
            live, order, one = gateway.live_model(), list[str](), asyncio.Lock()

            async def ask(function: str, *_: Any) -> Any:
                async with one:
                    await asyncio.sleep(1.0)
                    order.append(function)
                return []

            monkeypatch.setattr(live._predictor, "ask", ask)
            monkeypatch.setattr(live, "_asked", no_question)
            calls = [Call(app, "GET", "/admin/advice", query=b"theta=0.%d" % n) for n in range(20)]
            await asyncio.sleep(0.5)
            await ask("assess_window")
            assert order == ["ask_advice", "assess_window"]
            for each in calls[1:]:
                each.leave()
            await asyncio.gather(*(each.task for each in calls))
            assert calls[0].status == 200
            assert order.count("ask_advice") <= 2, "one was answered, one may have begun"

    run_virtual(main())


def test_the_advice_of_two_who_ask_the_same_is_computed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            asked: list[Any] = []

            async def advice(parameters: Any) -> AdviceAnswer:
                asked.append(dict(parameters))
                await asyncio.sleep(1)
                if "objective" in parameters:
                    raise SpecError("got objective")
                return AdviceAnswer(advice=[], load_balancer=None, rate=None)

            monkeypatch.setattr(gateway.live_model(), "advice", advice)
            calls = [Call(app, "GET", "/admin/advice", query=b"theta=0.5") for _ in range(5)]
            await asyncio.gather(*(each.task for each in calls))
            assert [each.status for each in calls] == [200] * 5
            assert asked == [{"theta": "0.5"}]
            bad = await call(app, "GET", "/admin/advice")
            assert bad.status == 200
            wrong = Call(app, "GET", "/admin/advice", query=b"objective=x")
            await wrong.task
            assert (wrong.status, wrong.json()["error"]["code"]) == (400, "invalid_objective")
            before = len(asked)
            twice = Call(app, "GET", "/admin/advice", query=b"target=policy&target=servers")
            await twice.task
            error = twice.json()["error"]
            assert (twice.status, error["param"], len(asked)) == (400, "target", before)
            assert error["message"] == "got target=policy and target=servers; expected it once"

    run_virtual(main())
