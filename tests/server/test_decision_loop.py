"""A policy that cannot decide is asked again each second, given up after three, and logged now and
then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from unittest.mock import patch

import pytest

from policies.decision import DecisionError
from server.queue.decision_loop import FAULTY, RETRY, DecisionLoop
from tests.virtual_time import run_virtual


@pytest.mark.parametrize(("spent", "given_up_at"), [(0.0, 3.0), (0.5, 3.0), (1.0, 2.0), (5.0, 0.0)])
def test_a_policy_that_fails_is_given_up_after_three_seconds(
    spent: float, given_up_at: float
) -> None:
    """The time that its first decision took counts."""

    async def serve() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        asked: list[float] = []
        told: list[float] = []

        def step() -> float:
            asked.append(loop.time() - began)
            if told:
                return math.inf  # another policy is in force
            error = DecisionError("got no decision; expected one")
            if spent:
                error.seconds = spent
            raise error

        decisions = DecisionLoop(step, lambda: "mine")

        def given_up(message: str) -> None:
            told.append(loop.time() - began)
            assert message == "got no decision; expected one"
            decisions.ask()

        decisions.on_faulty = given_up
        decisions.ask()
        await asyncio.sleep(10)
        assert decisions.failing is None
        return asked, told

    assert (FAULTY, RETRY) == (3.0, 1.0)
    asked, told = run_virtual(serve())
    assert told == [pytest.approx(given_up_at)]
    assert asked == [pytest.approx(at) for at in (*range(round(given_up_at) + 1), given_up_at)]


def test_each_kind_of_failure_is_logged_once_a_minute_with_how_often_it_came_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages that differ in numbers and ids alone are of one kind. Beyond 16 kinds in a minute
    none is logged, and the next traceback counts those, too.
    """

    async def serve() -> None:
        said = ""

        def step() -> float:
            raise RuntimeError(said)

        decisions = DecisionLoop(step, lambda: "mine")

        def fails(*messages: str) -> None:
            nonlocal said
            for said in messages:  # noqa: B007 - what the step raises
                decisions.ask()

        a, b, c, *others = (f"no {letter}" for letter in "abcdefghijklmnopqr")
        fails(a, b, c, *others, a, a)
        await asyncio.sleep(59.5)
        fails(a)
        await asyncio.sleep(0.5)
        fails(b, a, c, "request 7 is odd", "request r-12.x is odd")

    with caplog.at_level(logging.ERROR, "kendall.batcher"):
        run_virtual(serve())
    before, after = "a dispatch decision failed", "; the queue continues with the next event"
    meanwhile = [f" (and {n} times since the last traceback, not logged)" for n in (2, 3)]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        before + each + after for each in ("",) * 16 + (*meanwhile, "", "")
    ]


@pytest.mark.parametrize(("decisions_first", "fails"), [(5000, False), (5001, True)])
def test_a_policy_that_decides_without_end_at_one_instant_has_failed(
    decisions_first: int, *, fails: bool
) -> None:
    async def serve() -> str | None:
        answers = itertools.chain(itertools.repeat(None, decisions_first), [math.inf])
        decisions = DecisionLoop(lambda: next(answers), lambda: "mine")
        decisions.ask()
        return decisions.failing

    says = "policy mine: got 5,000 decisions at one instant; expected a WaitUntil"
    assert run_virtual(serve()) == (says if fails else None)


def test_a_policy_that_waits_for_the_next_event_is_not_asked_at_an_instant_named_before() -> None:
    """Nor is the event loop given an instant at infinity."""

    async def serve() -> list[float]:
        loop = asyncio.get_running_loop()
        deadlines = iter([5.0, math.inf])  # a third question would be an error
        decisions = DecisionLoop(lambda: next(deadlines), lambda: "mine")
        with patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            decisions.ask()
            decisions.ask()
        await asyncio.sleep(10)
        assert decisions.failing is None
        return [timer.args[0] for timer in timers.call_args_list]

    assert run_virtual(serve()) == [5.0]
