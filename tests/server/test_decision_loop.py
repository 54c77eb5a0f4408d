"""A policy that cannot decide is asked again each second, and given up after three; what is carried
out, refused and logged of its decisions.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest

from kendall.policies import Decision, Dispatch, Policy, QueueState, WaitUntil
from kendall.policies.decision import DecisionError, check_once
from kendall.server.queue.decision_loop import FAULTY, RETRY, DecisionLoop, decided
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


def test_a_question_from_within_a_decision_is_asked_after_it() -> None:
    """Not in the middle of it, and once however often it was put."""

    async def serve() -> list[str]:
        said: list[str] = []

        def step() -> float:
            said.append("begins")
            if said.count("begins") == 1:
                decisions.ask()
                decisions.ask()
            said.append("ends")
            return math.inf

        decisions = DecisionLoop(step, lambda: "mine")
        decisions.ask()
        return said

    assert run_virtual(serve()) == ["begins", "ends"] * 2


def test_a_policy_that_never_waits_is_refused_after_five_thousand_decisions() -> None:
    async def serve(waits_at: int) -> tuple[int, str | None]:
        asked = 0

        def step() -> float | None:
            nonlocal asked
            asked += 1
            return math.inf if asked == waits_at else None

        decisions = DecisionLoop(step, lambda: "mine")
        decisions.ask()
        return asked, decisions.failing

    said = "policy mine: got 5,000 decisions at one instant; expected a WaitUntil"
    assert run_virtual(serve(5001)) == (5001, None)
    assert run_virtual(serve(5002)) == (5001, said)


@pytest.mark.parametrize("given_back", [True, False])
def test_a_request_is_dispatched_again_at_one_instant_only_where_the_engine_gave_it_back(
    given_back: bool,
) -> None:
    async def serve() -> str | None:
        decision = Dispatch(("a",), 0)

        def step() -> float:
            check_once("mine", decision, decisions.dispatched)
            if given_back:
                decisions.put_back("a")
            check_once("mine", decision, decisions.dispatched)
            return math.inf

        decisions = DecisionLoop(step, lambda: "mine")
        decisions.ask()
        return decisions.failing

    found = run_virtual(serve())
    assert (found is None) == given_back
    assert found is None or "got a second dispatch of 'a' at one instant" in found


def test_the_first_failure_of_each_kind_is_logged_and_sixteen_kinds_in_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are counted: those of a kind that was logged with the next one of that kind, all
    others with the next one that is logged.
    """
    words = [chr(ord("a") + number) for number in range(18)]

    async def serve() -> None:
        word = ""

        def step() -> float:
            raise ValueError(word)

        decisions = DecisionLoop(step, lambda: "mine")
        for word in words:  # noqa: B007 - `step` reads it
            decisions.ask()
        for word in ("a", "a", "b"):  # noqa: B007
            decisions.ask()
        assert len(caplog.messages) == 16
        await asyncio.sleep(60.0)
        for word in ("a", "b", "q"):  # noqa: B007
            decisions.ask()

    with caplog.at_level(logging.ERROR):
        run_virtual(serve())
    assert [str(each.exc_info[1]) for each in caplog.records if each.exc_info] == [
        *words[:16],
        *("a", "b", "q"),
    ]
    begin, end = "a dispatch decision failed", "; the queue continues with the next event"
    assert caplog.messages == [
        *[f"{begin}{end}"] * 16,
        f"{begin} (and 4 times since the last traceback, not logged){end}",
        f"{begin} (and 1 time since the last traceback, not logged){end}",
        f"{begin}{end}",
    ]


def test_a_failure_that_was_logged_less_than_a_minute_ago_is_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def serve() -> None:
        def step() -> float:
            raise ValueError("the same")

        decisions = DecisionLoop(step, lambda: "mine")
        for seconds in (59.0, 0.9, 0.1):
            decisions.ask()
            await asyncio.sleep(seconds)
        assert len(caplog.messages) == 1
        decisions.ask()
        assert len(caplog.messages) == 2

    with caplog.at_level(logging.ERROR):
        run_virtual(serve())


@dataclass(frozen=True, kw_only=True)
class Patient(Policy):
    """A custom policy that never dispatches."""

    name: ClassVar[str] = "patient"

    def decide(self, state: QueueState, now: float) -> Decision:
        return WaitUntil(math.inf)


def test_a_decision_that_takes_over_a_second_is_refused() -> None:
    policy, state, now = Patient(), QueueState([], []), 10.0
    assert decided(policy, lambda: now + 1.0, state, now) == WaitUntil(math.inf)
    with pytest.raises(DecisionError) as refused:
        decided(policy, lambda: now + 1.25, state, now)
    assert str(refused.value) == (
        "policy patient took 1.2 s to decide; expected less than 1 s, as every request waits "
        "meanwhile"
    )
    assert refused.value.seconds == 1.25
