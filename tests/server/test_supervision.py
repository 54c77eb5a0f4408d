"""The parts of supervision on their own: restarts, the ping rule, stillness, ways to continue."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from kendall.policies import Request, Running
from kendall.server.engines.base import EngineRequest, Sampling, Structured
from kendall.server.engines.vllm.watch import (
    EngineWatch,
    Patience,
    how_it_ended,
)
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.continuing import stateful, way_to_continue
from kendall.server.supervision.progress import Stillness, StuckWatch
from kendall.server.supervision.restarts import (
    LONGEST_WAIT,
    MOST_OVERDUE,
    SOUND_LIFE,
    RestartBudget,
)
from tests.virtual_time import run_virtual

# seconds; multiples
IDLE_PING_EVERY, PING_EVERY, PING, WORKING, FORM_TIMES = 10.0, 2.0, 1.0, 6.0, 4

SEED = {"seed": 1}
GREEDY = {"temperature": 0.0}
STATE = {"presence_penalty": 0.1}


@pytest.mark.parametrize(
    ("sampling", "made", "way"),
    [
        ({}, 0, "behind"),
        ({}, 9, "behind"),
        (GREEDY, 9, "behind"),
        (GREEDY | SEED, 9, "behind"),  # nothing is drawn
        (SEED, 0, "behind"),
        (SEED, 9, "again"),
        (STATE, 0, "behind"),
        (STATE, 9, "none"),
        (STATE | GREEDY, 9, "again"),
        (STATE | SEED, 9, "again"),
        ({"frequency_penalty": -1.0}, 9, "none"),
        (
            {
                "repetition_penalty": 1.2,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "min_tokens": 4,
                "logit_bias": {3: 1.0},
            },
            9,
            "behind",
        ),
        (
            {
                "stop": ("x",),
                "stop_token_ids": (4,),
                "logprobs": 3,
                "ignore_eos": True,
                "skip_special_tokens": False,
            },
            9,
            "behind",
        ),
    ],
)
def test_ways_to_continue(sampling: dict[str, object], made: int, way: str) -> None:
    assert way_to_continue(Sampling(max_tokens=20, **sampling), made) == way


def test_a_parameter_that_nobody_has_judged_is_taken_to_have_a_state() -> None:
    class Later(Sampling, frozen=True, kw_only=True):
        grammar: str | None = None

    assert stateful(Later(max_tokens=5)) == []
    assert stateful(Later(max_tokens=5, grammar="digits")) == ["grammar"]


def test_restarts_come_at_once_then_later_and_later_then_no_more() -> None:
    budget = RestartBudget(6, 100.0, 30.0)
    assert budget.next_wait(50.0, 0.0) == 0.0
    assert budget.next_wait(52.0, 51.0) == 0.5, "it lived for a second"
    assert budget.next_wait(53.0, None) == 1.0, "it did not come up"
    assert budget.next_wait(54.0, None) == 2.0
    assert budget.next_wait(70.0, 55.0) == 0.0, "a sound life begins anew"
    assert budget.next_wait(71.0, None) == 0.5
    assert budget.next_wait(72.0, None) is None
    assert budget.next_wait(151.0, 72.0) == 0.0, "the first of them is out of the window"


def test_a_wait_is_bounded_and_no_restart_may_be_allowed_at_all() -> None:
    budget = RestartBudget(50, math.inf, 30.0)
    waits = [budget.next_wait(100.0 + at, None) for at in range(20)]
    assert max(waits) == LONGEST_WAIT
    assert waits == sorted(waits)
    assert RestartBudget(0, 100.0, 30.0).next_wait(100.0, 100.0 - 2 * SOUND_LIFE) is None


def test_starts_that_fail_are_counted_outside_the_window_until_a_life_was_sound() -> None:
    budget = RestartBudget(3, 10.0, 30.0)
    assert [budget.next_wait(at, None) for at in (0.0, 100.0, 200.0, 300.0)] == [
        0.0,
        0.5,
        1.0,
        None,
    ]
    assert budget.next_wait(400.0, 301.0) == 0.0


def test_a_start_may_take_longer_after_one_that_ran_out_of_time_or_where_one_took_longer() -> None:
    budget = RestartBudget(100, math.inf, 30.0)
    assert budget.start_limit() == 30.0
    budget.came_up(20.0)
    assert budget.start_limit() == 30.0
    budget.came_up(50.0)
    limits, waits = [], []
    for at in range(MOST_OVERDUE):
        limits.append(budget.start_limit())
        waits.append(budget.next_wait(1000.0 + at, None, overdue=True))
    assert (limits, waits) == ([50.0, 100.0, 200.0], [0.0, 0.5, None])
    assert budget.next_wait(2000.0, 2000.0 - SOUND_LIFE) == 0.0
    assert budget.start_limit() == 50.0, "a sound life begins anew"


class Pinged:
    """A watch on this very process with a ping that says what the test wants."""

    def __init__(
        self,
        ping: Callable[[float], object],
        used: Callable[[float], float | None],
        every: float = PING_EVERY,
        silence: float = 5.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.lost: list[float] = []
        self.pings = 0

        async def counted(limit: float) -> bool:
            self.pings += 1
            return bool(await ping(limit))  # type: ignore[misc]

        patience = Patience(silence, every)

        def lost(reason: str) -> None:
            assert reason == (
                f"the engine process ({os.getpid()}) did not answer within {silence:g} s"
            )
            self.lost.append(loop.time())

        self.watch = EngineWatch(
            os.getpid(), counted, lambda: patience, lost, used=lambda _: used(loop.time())
        )


async def silent(limit: float) -> bool:
    await asyncio.sleep(limit)
    return False


def test_a_stopped_engine_is_lost_after_its_patience_and_several_pings() -> None:
    async def main() -> None:
        pinged = Pinged(silent, lambda _: 3.0)
        await asyncio.sleep(20.0)
        pinged.watch.close()
        assert (pinged.lost, pinged.pings) == ([2.0 + 5.0], 5)

    run_virtual(main())


@pytest.mark.parametrize(
    ("silence", "share", "late", "lost_at"),
    [
        (2.0, 0.0, 0.0, 2.0 + 4 * 0.5),  # four pings at least
        (5.0, 0.04, 0.0, 2.0 + 5.0),
        (5.0, 0.06, 0.0, 2.0 + 6 * 5.0),  # the main thread had a twentieth of its time: it works
        (4.5, 0.0, 0.4, 2.0 + 4 * 1.4),  # each counts as long as it took
        (4.5, 0.0, 0.6, None),  # it was held up here
    ],
)
def test_silence_counts_by_pings_and_by_what_the_engine_does_meanwhile(
    silence: float, share: float, late: float, lost_at: float | None
) -> None:
    async def main() -> None:
        async def ping(limit: float) -> bool:
            await asyncio.sleep(limit + late)
            return False

        pinged = Pinged(ping, lambda now: share * now, silence=silence)
        await asyncio.sleep(100.0)
        pinged.watch.close()
        assert pinged.lost == ([] if lost_at is None else [pytest.approx(lost_at)])

    run_virtual(main())


def test_an_engine_that_computes_or_is_starved_of_a_processor_has_more_patience() -> None:
    async def main() -> None:
        pinged = Pinged(silent, lambda now: now * 0.8)
        await asyncio.sleep(2.0 + 5.0 * WORKING - 1.0)
        assert pinged.lost == []
        await asyncio.sleep(3.0)
        pinged.watch.close()
        assert len(pinged.lost) == 1, "but not for ever: it may be in a step without end"

    run_virtual(main())


def test_a_ping_that_was_held_up_here_does_not_count() -> None:
    """The event loop was late: the answer may lie unread."""

    async def main() -> None:
        async def late(limit: float) -> bool:
            await asyncio.sleep(limit + 2.0)
            return False

        pinged = Pinged(late, lambda _: 3.0)
        await asyncio.sleep(200.0)
        pinged.watch.close()
        assert pinged.lost == []
        assert pinged.pings > 20

    run_virtual(main())


def test_one_answer_among_many_pings_is_enough() -> None:
    async def main() -> None:
        answers = iter([False, False, False, True] * 50)

        async def now_and_then(limit: float) -> bool:
            await asyncio.sleep(limit * 0.99)
            return next(answers)

        pinged = Pinged(now_and_then, lambda _: None)
        await asyncio.sleep(60.0)
        pinged.watch.close()
        assert pinged.lost == []

    run_virtual(main())


def test_an_idle_engine_is_asked_every_ten_seconds_and_is_lost_where_it_is_silent() -> None:
    """Stopped while nothing is in flight, it is replaced before somebody comes who would wait
    for it.
    """

    async def main() -> None:
        async def answers(_: float) -> bool:
            return True

        sound, stopped = (
            Pinged(answers, lambda _: None, IDLE_PING_EVERY),
            Pinged(silent, lambda _: 3.0, IDLE_PING_EVERY),
        )
        await asyncio.sleep(61.0)
        sound.watch.close()
        stopped.watch.close()
        assert (sound.lost, sound.pings) == ([], 6)
        assert len(stopped.lost) == 1
        assert IDLE_PING_EVERY + 5.0 <= stopped.lost[0] <= IDLE_PING_EVERY + 5.0 + PING

    run_virtual(main())


def test_a_connection_that_refuses_at_once_is_lost_no_faster_and_does_not_spin() -> None:
    async def main() -> None:
        async def refuses(_: float) -> bool:
            return False

        pinged = Pinged(refuses, lambda _: None)
        await asyncio.sleep(10.0)
        pinged.watch.close()
        assert len(pinged.lost) == 1
        assert pinged.pings <= 6

    run_virtual(main())


class _Serving:
    """A batcher with one sequence in service that makes no token."""

    in_service, queue_length = 1, 0
    policy_failures = SimpleNamespace(error=None)
    resting = False

    def __init__(self, structured: Structured | None) -> None:
        request = Request(id="a", arrived_at=0.0, prompt_tokens=1, max_output_tokens=9)
        self._running = Running(request, 0.0)
        engine_request = EngineRequest(request, [1], Sampling(max_tokens=9, structured=structured))
        self.sequence = SimpleNamespace(
            engine_request=engine_request, at=SimpleNamespace(first_token=None)
        )

    def running(self) -> list[list[Running]]:
        return [[self._running]]

    def in_service_sequences(self) -> list[list[SimpleNamespace]]:
        return [[self.sequence]]


@pytest.mark.parametrize(
    ("structured", "first_token", "told_at"),
    [
        (None, None, 7),
        (Structured("regex", "a+"), None, 6 + FORM_TIMES * 5 + 1),
        (Structured("regex", "a+"), 0.5, 7),
    ],
    ids=["no form", "waits for its form", "has its form"],
)
def test_a_sequence_that_waits_for_its_form_is_not_stuck(
    structured: Structured | None, first_token: float | None, told_at: int
) -> None:
    told: list[str] = []
    batcher = _Serving(structured)
    batcher.sequence.at.first_token = first_token
    watch = StuckWatch(cast("Batcher", batcher), 6.0, lambda: None, told.append, form_time=5.0)
    seconds = 0
    while not told and seconds < 100:
        watch.look(float(seconds))
        seconds += 1
    assert seconds - 1 == told_at


def test_stillness_counts_only_what_was_watched_and_only_when_busy() -> None:
    still = Stillness(longest_step=1.5)
    assert still.look(0.0, "a", busy=True) == 0.0
    assert still.look(1.0, "a", busy=True) == 1.0
    assert still.look(31.0, "a", busy=True) == 2.5, (
        "the event loop stood still for 30 s, not the queue"
    )
    assert still.look(32.0, "b", busy=True) == 0.0, "something moved"
    assert still.look(33.0, "b", busy=True) == 1.0
    assert still.look(34.0, "b", busy=False) == 0.0


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (None, "has ended"),
        (255, "has ended"),  # multiprocessing could not read it
        (0, "has ended with status 0"),
        (1, "has ended with status 1"),
        (-signal.SIGILL, "was ended by SIGILL (illegal instruction)"),
        (
            -signal.SIGKILL,
            "was ended by SIGKILL (killed; if nobody sent it, the machine ran out of memory)",
        ),
        (-99, "was ended by signal 99"),
    ],
)
def test_the_end_of_an_engine_is_named(exit_code: int | None, expected: str) -> None:
    assert how_it_ended(exit_code) == expected
