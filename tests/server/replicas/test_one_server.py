"""What the watch for stuck engines reads of one server of several."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.policies import Request, Running
from kendall.server.supervision.replicas.stuck import OneServer, StuckReplicas
from tests.virtual_time import run_virtual


@pytest.mark.parametrize(
    ("down", "proving", "resting"),
    [
        (False, None, False),
        (False, False, False),
        (False, True, True),
        (True, None, True),
        (True, False, True),
    ],
)
def test_a_server_rests_while_all_are_down_or_it_proves_itself(
    down: bool, proving: bool | None, resting: bool
) -> None:
    """`proving` None: it was never lost; the trials of another server do not matter."""
    others = {0: SimpleNamespace(proving=True)}
    own = {} if proving is None else {1: SimpleNamespace(proving=proving)}
    recovery = SimpleNamespace(down=down, servers=others | own)
    batcher: Any = SimpleNamespace(recovery=recovery, policy_failures=None, ask=None)
    assert OneServer(batcher, 1).resting is resting


def sequence(name: str, *, stream: object = "a stream") -> Any:
    return SimpleNamespace(
        id=name,
        stream=stream,
        stop_detector=SimpleNamespace(finish_reason=None),
        engine_request=SimpleNamespace(sampling=SimpleNamespace(structured=None)),
        at=SimpleNamespace(first_token=0.5),
    )


def running(name: str, made: int = 3) -> Running:
    request = Request(id=name, arrived_at=0.0, prompt_tokens=1, max_output_tokens=9)
    return Running(request, 0.0, made)


class Queue:
    """Of two servers, as far as the watches ask: the second one stands still."""

    def __init__(self) -> None:
        self.recovery = SimpleNamespace(down=False, servers={})
        self.policy_failures = SimpleNamespace(error=None)
        self.queue_length = 3
        self.made = 0
        self.fails = False

    def ask(self) -> None:
        pytest.fail("no policy has failed")

    def running(self) -> list[list[Running]]:
        if self.fails:
            raise LookupError("nobody thought of it")
        self.made += 1
        return [[running("a", self.made)], [running("b")] * 2]

    def in_service_sequences(self) -> list[list[Any]]:
        return [[sequence("a")], [sequence("b"), sequence("c", stream=None)]]


def test_each_server_is_looked_at_alone() -> None:
    batcher: Any = Queue()
    first, second, third = (OneServer(batcher, number) for number in range(3))
    assert [each.in_service for each in (first, second, third)] == [1, 1, 0]
    assert [[len(server) for server in each.running()] for each in (first, second, third)] == [
        [1],
        [2],
        [],
    ]
    assert [each.id for each in second.in_service_sequences()[0]] == ["b", "c"]
    assert (third.in_service_sequences(), second.queue_length) == ([[]], 3)


@pytest.mark.parametrize("serves", [True, False])
def test_one_that_stands_still_is_replaced_alone_and_a_look_that_fails_is_repeated(
    serves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[tuple[int, str]] = []

    def replica(number: int) -> Any:
        supervisor = SimpleNamespace(lost=lambda reason: lost.append((number, reason)))
        return SimpleNamespace(serves=serves, supervisor=supervisor)

    async def main() -> None:
        batcher: Any = Queue()
        pool: Any = SimpleNamespace(replicas={0: replica(0), 1: replica(1)})
        watching = asyncio.create_task(StuckReplicas(pool, batcher, 5.0, lambda: None, 0.0).run())
        await asyncio.sleep(2.5)
        batcher.fails = True
        await asyncio.sleep(1.0)
        batcher.fails = False
        await asyncio.sleep(3.0)
        assert lost == []
        await asyncio.sleep(1.0)
        reason = "nothing moved for 6 s (1 sequence in service, 3 waiting)"
        assert lost == ([(1, reason)] if serves else [])
        watching.cancel()

    run_virtual(main())
    assert caplog.messages == ["the check for a stuck engine failed; it is repeated"] * 2
