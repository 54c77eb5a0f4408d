"""The watch for a queue that stands still: what it looks at, how long it waits, what it says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.policies import Request, Running
from kendall.queueing.latency.law import LatencyModel
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.background import going_on
from kendall.server.supervision.progress import StuckWatch
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.01, k2=0.5, k3=0.02, k4=0.1, kp=0.001)


@dataclass
class FakeBatcher:
    """What the watch reads of a batcher; `servers`: the requests in service on each."""

    servers: list[list[Running]] = field(default_factory=list)
    failing: str | None = None
    down: bool = False
    proving: bool = False
    queue_length: int = 3
    asked: int = 0

    @property
    def policy_failures(self) -> Any:
        return SimpleNamespace(error=self.failing)

    @property
    def resting(self) -> bool:
        return self.down or self.proving

    @property
    def in_service(self) -> int:
        return sum(map(len, self.servers))

    def running(self) -> list[list[Running]]:
        return self.servers

    def in_service_sequences(self) -> list[list[SequenceState]]:
        return []  # none waits for a form

    def ask(self) -> None:
        self.asked += 1


def running(*tokens: int) -> list[Running]:
    """Requests with prompts of 100 tokens; `tokens` of their answers are made."""
    return [
        Running(
            Request(id=str(index), arrived_at=0.0, prompt_tokens=100, max_output_tokens=50),
            0.0,
            made,
        )
        for index, made in enumerate(tokens)
    ]


def watch(
    batcher: FakeBatcher, timeout: float = 5.0, law: LatencyModel | None = None
) -> tuple[StuckWatch, list[str]]:
    said: list[str] = []
    given: Any = batcher
    return StuckWatch(given, timeout, lambda: law, said.append), said


def looks(of: StuckWatch, count: int, start: float = 0.0) -> None:
    """One look a second, as it makes them."""
    for index in range(count):
        of.look(start + index)


def test_without_a_law_or_without_work_the_limit_is_the_timeout() -> None:
    busy, idle = FakeBatcher([running(0, 3)]), FakeBatcher([[], []])
    assert watch(busy, 5.0)[0].limit() == 5.0
    assert watch(idle, 5.0, LAW)[0].limit() == 5.0
    assert watch(idle, 5.0)[0].limit() == 5.0


@pytest.mark.parametrize(
    ("servers", "size", "prompts"),
    [
        ([running(1, 2)], 2, 0),
        ([running(0, 3)], 2, 100),
        ([running(0), running(0, 9)], 3, 200),
        ([[], running(4)], 1, 0),
    ],
)
def test_with_a_law_it_is_so_many_times_the_lawful_time_to_the_next_token(
    servers: list[list[Running]], size: int, prompts: int
) -> None:
    """Of all that is in service, with the prompts of those that have no token yet; never below
    the timeout.
    """
    lawful = 0.01 * size + 0.5 + 0.001 * prompts + (0.02 * size + 0.1)
    assert watch(FakeBatcher(servers), 5.0, LAW)[0].limit() == pytest.approx(20 * lawful)
    assert watch(FakeBatcher(servers), 1000.0, LAW)[0].limit() == 1000.0


def test_it_speaks_once_when_the_limit_is_exceeded_and_not_at_it() -> None:
    found, said = watch(FakeBatcher([running(3, 4)]), 5.0)
    looks(found, 6)  # the first look only remembers: five seconds are counted
    assert said == []
    looks(found, 1, start=6.0)
    assert len(said) == 1
    for words in ("6 s", "2 sequences", "3 waiting"):
        assert words in said[0]
    looks(found, 5, start=7.0)
    assert len(said) == 1, "it counts from nothing again"
    looks(found, 3, start=12.0)
    assert len(said) == 2


def test_a_token_or_an_end_is_movement_and_an_arrival_in_service_is_none() -> None:
    batcher = FakeBatcher([running(3, 4)])
    found, said = watch(batcher, 5.0)
    for start, servers in ((0.0, [running(3, 4)]), (5.0, [running(3, 5)]), (10.0, [running(3)])):
        batcher.servers = servers
        looks(found, 5, start)
    assert said == []
    batcher.servers = [running(3, 0)]
    looks(found, 3, 15.0)
    assert len(said) == 1, "who joins an engine that hangs is no sign of life"


@pytest.mark.parametrize(
    "about",
    [
        {"servers": [[], []]},
        {"servers": [running(3)], "down": True},
        {"failing": "no", "down": True},
    ],
)
def test_an_engine_with_nothing_to_do_or_that_restarts_is_not_stuck(about: dict[str, Any]) -> None:
    found, said = watch(FakeBatcher(**about), 5.0)
    looks(found, 30)
    assert said == []


def test_a_policy_that_fails_is_asked_again_at_every_look_and_named_at_last() -> None:
    batcher = FakeBatcher([[]], failing="ValueError: no batch size")
    found, said = watch(batcher, 5.0)
    looks(found, 7)
    assert batcher.asked == 7
    assert len(said) == 1
    assert "ValueError: no batch size" in said[0]
    well, _ = watch(sound := FakeBatcher([running(1)]), 5.0)
    looks(well, 3)
    assert sound.asked == 0


def test_a_pause_of_the_event_loop_counts_as_one_look() -> None:
    found, said = watch(FakeBatcher([running(3)]), 5.0)
    found.look(0.0)
    found.look(100.0)
    found.look(200.0)
    assert said == []


def test_it_looks_every_second_until_it_is_cancelled_and_survives_its_own_errors() -> None:
    async def main() -> None:
        batcher = FakeBatcher([running(3)])
        found, said = watch(batcher, 5.0)
        task = asyncio.create_task(going_on("the check", found.run))
        await asyncio.sleep(2.5)
        batcher.servers = SimpleNamespace()  # type: ignore[assignment] # a look fails
        await asyncio.sleep(2.0)
        batcher.servers = [running(3)]
        await asyncio.sleep(3.4)
        assert said == [], "the looks that failed count as one"
        await asyncio.sleep(0.5)
        assert len(said) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run_virtual(main())


class Moving(FakeBatcher):
    """Two of them; `sequences` says of each whether the engine has it and whether it is over."""

    sequences: list[Any]

    def in_service_sequences(self) -> list[list[Any]]:
        return [self.sequences]


def sequence(name: str, *, stream: object = "a stream", finish_reason: str | None = None) -> Any:
    engine_request = SimpleNamespace(sampling=SimpleNamespace(structured=None))
    detector, at = SimpleNamespace(finish_reason=finish_reason), SimpleNamespace(first_token=0.5)
    return SimpleNamespace(
        id=name, stream=stream, stop_detector=detector, engine_request=engine_request, at=at
    )


@pytest.mark.parametrize(
    ("about", "told_at"),
    [({}, [6.0, 13.0]), ({"stream": None}, []), ({"finish_reason": "stop"}, [])],
)
def test_a_sequence_that_stands_still_while_another_moves_is_told_alone(
    about: dict[str, Any], told_at: list[float]
) -> None:
    """Once it has for more than the limit, and again after as long; not one that only waits for
    its batch to end.
    """
    batcher, told = Moving([running(3, 0)]), list[tuple[str, float, float]]()
    batcher.sequences = [sequence("0", **about), sequence("1")]
    given: Any = batcher
    now = 0.0

    def on_still(still: Any, seconds: float) -> None:
        told.append((still.id, seconds, now))

    found = StuckWatch(
        given, 5.0, lambda: None, lambda _: pytest.fail("the engine moves"), on_still
    )
    for second in range(15):
        now = float(second)
        batcher.servers = [running(3, second)]
        found.look(now)
    assert told == [("0", 6.0, at) for at in told_at]


def test_a_form_has_no_time_where_none_is_given_for_it() -> None:
    batcher = Moving([running(3)])
    batcher.sequences = [sequence("0")]
    batcher.sequences[0].at.first_token = None
    batcher.sequences[0].engine_request.sampling.structured = "a form"
    found, said = watch(batcher, 5.0)
    looks(found, 7)
    assert len(said) == 1


def test_the_gateways_own_request_is_no_reason_to_replace_an_engine() -> None:
    found, said = watch(FakeBatcher([running(3)], proving=True), 5.0)
    looks(found, 30)
    assert said == []
