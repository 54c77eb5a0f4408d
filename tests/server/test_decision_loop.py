"""A policy that cannot decide is asked again each second, and given up after three."""

from __future__ import annotations

import asyncio
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
