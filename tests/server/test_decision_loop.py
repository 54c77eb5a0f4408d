"""When a policy is asked, and when it is asked again; one that cannot decide is asked again each
second, and given up after three; what is carried out, refused and logged of its decisions.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest

from kendall.policies import Decision, Dispatch, Policy, QueueState, Request, Single, WaitUntil
from kendall.policies.decision import DecisionError
from kendall.server.queue import batcher as batching
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.policy_failures import FAULTY, RETRY, PolicyFailures, decided
from tests.server.harness import engine_request_of, submitted
from tests.server.passed import Client, Desk, Scripted, passed
from tests.virtual_time import run_virtual


@pytest.mark.parametrize(("spent", "given_up_at"), [(0.0, 3.0), (0.5, 3.0), (1.0, 2.0), (5.0, 0.0)])
def test_a_policy_that_fails_is_given_up_after_three_seconds(
    spent: float, given_up_at: float
) -> None:
    """The time that its first decision took counts."""

    async def serve() -> tuple[list[float], list[float]]:
        loop = asyncio.get_running_loop()
        failures = PolicyFailures(loop)
        asked: list[float] = []
        told: list[float] = []

        def ask() -> None:
            asked.append(loop.time())
            error = DecisionError("got no decision; expected one")
            if spent:
                error.seconds = spent
            retry_at = failures.failed(error)
            if retry_at is not None:
                loop.call_at(retry_at, ask)

        def given_up(message: str) -> None:
            told.append(loop.time())
            assert message == failures.error == "got no decision; expected one"

        failures.on_faulty = given_up
        ask()
        await asyncio.sleep(10)
        return asked, told

    assert (FAULTY, RETRY) == (3.0, 1.0)
    asked, told = run_virtual(serve())
    assert told == [given_up_at]
    assert asked == [*range(round(given_up_at) + 1)]


def test_each_kind_of_failure_is_logged_once_a_minute_with_how_often_it_came_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages that differ in numbers and ids alone are of one kind. Beyond 16 kinds in a minute
    none is logged, and the next traceback counts those, too. None of these errors is a policy's:
    nobody is asked again.
    """

    async def serve() -> None:
        failures = PolicyFailures(asyncio.get_running_loop())

        def raises(message: str) -> None:
            raise RuntimeError(message)

        def fails(*messages: str) -> None:
            for message in messages:
                retry_at: float | None = 0.0
                try:
                    raises(message)
                except RuntimeError as error:
                    retry_at = failures.failed(error)
                assert retry_at is None

        a, b, c, *others = (f"no {letter}" for letter in "abcdefghijklmnopqr")
        fails(a, b, c, *others, a, a)
        await asyncio.sleep(59.5)
        fails(a)
        await asyncio.sleep(0.5)
        fails(b, a, c, "request 7 is odd", "request r-12.x is odd")

    with caplog.at_level(logging.ERROR, "kendall.batcher"):
        run_virtual(serve())
    logged = [record for record in caplog.records if record.exc_info]
    before, after = "a dispatch decision failed", "; the queue continues with the next event"
    meanwhile = [f" (and {n} times since the last traceback, not logged)" for n in (2, 3)]
    assert [record.getMessage() for record in logged] == [
        before + each + after for each in ("",) * 16 + (*meanwhile, "", "")
    ]
    assert [str(record.exc_info[1]) for record in logged if record.exc_info] == [
        *(f"no {letter}" for letter in "abcdefghijklmnop"),
        *("no b", "no a", "no c", "request 7 is odd"),
    ]


def waiting_until(answer: Callable[[], float]) -> Policy:
    """A policy that calls `answer` each time it is asked, and waits until then."""

    @dataclass(frozen=True, kw_only=True)
    class Patient(Policy):
        name: ClassVar[str] = "patient"

        def decide(self, state: QueueState, now: float) -> Decision:
            return WaitUntil(answer())

    return Patient()


def asking(answer: Callable[[], float]) -> Batcher:
    """One that asks such a policy while a request waits: for the first time when that came."""
    engine = Scripted()
    batcher = Batcher(engine, engine.capabilities, waiting_until(answer))
    request = Request(id="a", arrived_at=0.0, prompt_tokens=1, max_output_tokens=1)
    submitted(batcher, [engine_request_of(request, 1)])
    return batcher


def test_a_policy_that_waits_for_the_next_event_is_not_asked_at_an_instant_named_before() -> None:
    """Nor is the event loop given an instant at infinity."""

    async def serve() -> list[float]:
        loop = asyncio.get_running_loop()
        deadlines = iter([5.0, math.inf])  # a third question would be an error
        with patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            batcher = asking(lambda: next(deadlines))
            batcher.ask()
        await asyncio.sleep(10)
        assert batcher.policy_failures.error is None
        return [timer.args[0] for timer in timers.call_args_list]

    assert run_virtual(serve()) == [5.0]


@pytest.mark.parametrize(("later", "asked_at"), [(8.0, [0.0, 1.0, 8.0]), (math.inf, [0.0, 1.0])])
def test_a_policy_is_not_asked_at_a_deadline_that_it_has_put_off(
    later: float, asked_at: list[float]
) -> None:
    """First it waits until 5 s, and after an event at 1 s until `later`."""

    async def serve() -> list[float]:
        loop, asked = asyncio.get_running_loop(), list[float]()

        def answer() -> float:
            asked.append(loop.time())
            return (5.0, later, math.inf)[len(asked) - 1]

        batcher = asking(answer)
        await asyncio.sleep(1.0)
        batcher.ask()
        await asyncio.sleep(20.0)
        return asked

    assert run_virtual(serve()) == asked_at


def test_a_question_from_within_a_decision_is_asked_after_it() -> None:
    """Not in the middle of it, and once however often it was put."""

    async def serve() -> list[str]:
        said: list[str] = []

        def answer() -> float:
            said.append("begins")
            if said.count("begins") == 2:
                batcher.ask()
                batcher.ask()
            said.append("ends")
            return math.inf

        batcher = asking(answer)
        batcher.ask()
        return said

    assert run_virtual(serve()) == ["begins", "ends"] * 3


@dataclass(frozen=True, kw_only=True)
class OneByOne(Policy):
    """Dispatches one request a decision, and never waits before all are in service."""

    name: ClassVar[str] = "one-by-one"
    joins_running: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        return Dispatch((state.waiting[0].request.id,), 0)


@pytest.mark.parametrize(("requests", "waiting", "fails"), [(30, 0, False), (33, 2, True)])
def test_a_policy_that_decides_without_end_at_one_instant_has_failed(
    requests: int, waiting: int, *, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 5,000 decisions and the first one; here 30."""
    assert batching.MOST_AT_ONCE == 5000
    monkeypatch.setattr(batching, "MOST_AT_ONCE", 30)

    async def serve() -> tuple[int, str | None]:
        engine = Scripted(max_num_seqs=100)
        batcher = Batcher(engine, engine.capabilities, OneByOne())
        arrived = [
            Request(id=str(index), arrived_at=0.0, prompt_tokens=1, max_output_tokens=1)
            for index in range(requests)
        ]
        submitted(batcher, [engine_request_of(request, 1) for request in arrived])
        return batcher.queue_length, batcher.policy_failures.error

    says = "policy one-by-one: got 30 decisions at one instant; expected a WaitUntil"
    assert run_virtual(serve()) == (waiting, says if fails else None)


def test_a_request_that_the_engine_gave_back_may_be_dispatched_again_at_the_same_instant() -> None:
    async def serve() -> None:
        desk = Desk("continuous")

        class Returned(Client):
            def on_dispatched(self) -> None:
                desk.engine.answer("a").on_returned("gone", cause="gone")

        desk.batcher.submit([passed("a")], [Returned()])
        assert desk.engine.dispatched == [(0, ["a"], False)] * 2
        assert desk.batcher.policy_failures.error is None

    run_virtual(serve())


@dataclass(frozen=True, kw_only=True)
class Astray(Policy):
    """Dispatches what does not wait."""

    name: ClassVar[str] = "astray"

    def decide(self, state: QueueState, now: float) -> Decision:
        return Dispatch(("nobody",), 0)


def test_what_a_policy_from_outside_decides_is_checked_before_it_is_carried_out() -> None:
    """It is asked again after a second, and its request waits."""

    async def serve() -> None:
        engine = Scripted()
        batcher = Batcher(engine, engine.capabilities, Astray())
        request = Request(id="a", arrived_at=0.0, prompt_tokens=1, max_output_tokens=1)
        submitted(batcher, [engine_request_of(request, 1)])
        assert batcher.policy_failures.error == (
            "policy astray: got a dispatch of 'nobody'; expected waiting requests, each once"
        )
        assert (batcher.queue_length, engine.dispatched) == (1, [])
        batcher.switch(Single())
        assert (batcher.policy_failures.error, engine.dispatched) == (None, [(0, ["a"], False)])

    run_virtual(serve())


def test_a_decision_that_takes_over_a_second_is_refused() -> None:
    policy, state, now = waiting_until(lambda: math.inf), QueueState([], []), 10.0
    assert decided(policy, lambda: now + 1.0, state, now) == WaitUntil(math.inf)
    with pytest.raises(DecisionError) as refused:
        decided(policy, lambda: now + 1.25, state, now)
    assert str(refused.value) == (
        "policy patient took 1.2 s to decide; expected less than 1 s, as every request waits "
        "meanwhile"
    )
    assert refused.value.seconds == 1.25
