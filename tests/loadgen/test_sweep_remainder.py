"""A remainder too small for a batch is dispatched and noted, not waited for: requests of other
clients break whole batches.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayClient, GatewayError
from kendall.loadgen.sending.job import Counters
from kendall.loadgen.sweep.cell import CellGuard
from kendall.loadgen.sweep.gateway import IDLE_LIMIT, until_idle
from kendall.loadgen.sweep.status import Status
from tests.virtual_time import run_virtual

FIXED = "fixed:batch_size=4"


class Gateway:
    """As little of one as is asked: what waits under fixed batching leaves once another policy
    is in force.
    """

    def __init__(
        self, policy: str = FIXED, waiting: int = 3, in_service: int = 0, served_at: float = 0.0
    ) -> None:
        self.policy, self.waiting, self.in_service, self.served_at = (
            policy,
            waiting,
            in_service,
            served_at,
        )
        self.switched_at: float | None = None

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        if method == "PUT":
            assert path == "/admin/policy"
            assert body is not None
            self.policy, self.waiting, self.switched_at = body["policy"], 0, now
        if self.in_service and self.served_at and now >= self.served_at:
            self.in_service = 0
        return {
            "policy": self.policy,
            "effective_max_batch_size": 4,
            "queue_length": self.waiting,
            "in_service": self.in_service,
            "unanswered": self.waiting + self.in_service,
        }


def client(gateway: Gateway) -> GatewayClient:
    return cast("GatewayClient", gateway)


def idle(gateway: Gateway) -> tuple[list[str], float]:
    """What is noted, and how long it takes."""
    said: list[str] = []

    async def waited() -> float:
        await until_idle(client(gateway), said.append)
        return asyncio.get_running_loop().time()

    return said, run_virtual(waited())


def test_a_remainder_is_let_go_at_once_and_said() -> None:
    said, seconds = idle(Gateway())
    assert said == [
        f"{FIXED}: 3 requests waiting for a batch that nothing more fills; served under dynamic now"
    ]
    assert seconds < 2


def test_a_remainder_waits_for_the_batch_that_is_in_service() -> None:
    gateway = Gateway(in_service=4, served_at=1.0)
    said, seconds = idle(gateway)
    assert len(said) == 1
    assert 1.0 <= seconds < 2


@pytest.mark.parametrize("policy", ["fixed:batch_size=4,max_wait=300", "single"])
def test_what_leaves_by_itself_is_waited_for_in_so_many_words(policy: str) -> None:
    gateway = Gateway(policy)
    with pytest.raises(GatewayError, match="still busy after 120 s; stop other clients"):
        idle(gateway)
    assert gateway.switched_at is None


def test_a_long_wait_for_an_idle_gateway_is_said_within_two_seconds_and_once() -> None:
    said, seconds = idle(Gateway("single", waiting=0, in_service=2, served_at=30.0))
    assert said == [f"waiting up to {IDLE_LIMIT:.0f} s for an idle gateway: 2 requests unanswered"]
    assert seconds == pytest.approx(30.0, abs=0.1)


@pytest.mark.parametrize(("sent", "let_go"), [(1004, True), (1003, False)])
def test_a_running_cell_lets_its_remainder_go_within_two_seconds_of_its_last_request(
    sent: int, let_go: bool, tmp_path: Path
) -> None:
    gateway = Gateway()

    async def watched() -> None:
        with (tmp_path / "said").open("w") as stream:
            guard = CellGuard(client(gateway), Status(stream), 10.0, stop_unstable=False)
            counters = Counters(asked=1004, sent=sent, completed=1001)
            tasks = {asyncio.create_task(task) for task in (guard.show(counters), guard.run())}
            await asyncio.wait(tasks, timeout=2.0)
            for task in tasks:
                task.cancel()

    run_virtual(watched())
    assert (gateway.switched_at is not None) == let_go
    assert (
        "3 requests waiting for a batch that nothing more fills" in (tmp_path / "said").read_text()
    ) == let_go


class Silent(Gateway):
    """One that answers once, and then no more."""

    def __init__(self) -> None:
        super().__init__("single", waiting=0)
        self.asked_at: list[float] = []

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self.asked_at.append(asyncio.get_running_loop().time())
        if len(self.asked_at) > 1:
            raise GatewayError("connection refused")
        return await super().ask(method, path, body)


def test_a_gateway_is_asked_once_a_second_and_is_lost_after_two_without_an_answer(
    tmp_path: Path,
) -> None:
    """From before the first request on, of which nothing is known yet."""
    gateway = Silent()

    async def watched() -> tuple[str, str]:
        with (tmp_path / "said").open("w") as stream:
            guard = CellGuard(client(gateway), Status(stream), 10.0, stop_unstable=True)
            return await asyncio.wait_for(guard.run(), 10)

    assert run_virtual(watched()) == ("lost", "connection refused")
    assert gateway.asked_at == pytest.approx([1.0, 2.0, 3.0], abs=0.25)


def test_a_cell_whose_queue_only_grows_ends_where_that_is_asked(tmp_path: Path) -> None:
    async def watched(*, stop: bool) -> tuple[str, str] | None:
        with (tmp_path / "said").open("w") as stream:
            guard = CellGuard(client(Gateway("single")), Status(stream), 100.0, stop_unstable=stop)
            counters = Counters(asked=10_000)
            showing = asyncio.create_task(guard.show(counters))
            watching = asyncio.create_task(guard.run())
            for _ in range(300):
                counters.sent += 10
                counters.completed += 3 + counters.sent % 3
                await asyncio.sleep(0.1)
                if watching.done():
                    showing.cancel()
                    return watching.result()
            showing.cancel()
            watching.cancel()
            return None

    ended = run_virtual(watched(stop=True))
    assert ended is not None
    assert ended[0] == "unstable"
    assert "unanswered after" in ended[1]
    assert run_virtual(watched(stop=False)) is None
