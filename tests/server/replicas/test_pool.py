"""Replicas as one engine, without a gateway: what each of its calls means for several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kendall.server.engines.base import (
    Capabilities,
    EngineGoneError,
    EngineStartError,
    InvalidPromptError,
    InvalidSamplingError,
    Sampling,
    Step,
)
from kendall.server.supervision.replicas.pool import Replicas, ServingReplicas
from kendall.server.supervision.settings import SupervisionSettings
from tests.virtual_time import run_virtual


class Member:
    """An engine that says which one it is, and fails as it is told to."""

    def __init__(self, server_id: int) -> None:
        self.id = server_id
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] = lambda _: None
        self.fault: Callable[[], Exception] | None = None  # of each question
        self.starts_with: Exception | None = None
        self.well = True
        self.started = self.stopped = 0
        self.asked: list[Any] = []

    async def start(self) -> Capabilities:
        self.started += 1
        if self.starts_with is not None:
            raise self.starts_with
        return Capabilities(
            engine="fake",
            model="m",
            max_model_len=100,
            max_num_seqs=4,
            max_num_batched_tokens=100,
            kv_cache_tokens=1000 - 100 * self.id,
            eos_token_ids=frozenset(),
            vocab_size=9,
        )

    async def stop(self) -> None:
        self.stopped += 1

    async def healthy(self) -> bool:
        return self.well

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"{self.id}: {list(token_ids)}"

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.asked.append(("cancel", *request_ids))

    def client(self) -> str:
        return f"client {self.id}"

    async def encode(self, text: str, *, special_tokens: bool = True) -> Any:
        return await self.answer("encode", text, special_tokens)

    async def encode_chat(self, messages: Any, template_arguments: Any) -> Any:
        return await self.answer("encode_chat", messages, template_arguments)

    async def check_sampling(self, sampling: Sampling) -> Any:
        return await self.answer("check_sampling", sampling)

    async def answer(self, *question: Any) -> Any:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault()
        return (self.id, *question)


def members(
    count: int = 2,
    kind: type[Replicas] = Replicas,
    fails: int | None = None,
    **settings: Any,
) -> tuple[Any, list[Member]]:
    """`fails`: which one does not start."""
    made: list[Member] = []

    def make(server_id: int) -> Any:
        made.append(Member(server_id))
        made[-1].starts_with = EngineStartError("no memory") if server_id == fails else None
        return made[-1]

    return kind(make, count, SupervisionSettings(**settings)), made


def test_it_is_as_many_servers_as_started_with_the_least_memory() -> None:
    async def main() -> None:
        pool, engines = members(3)
        found = await pool.start()
        assert (found.servers, found.kv_cache_tokens, found.model) == (3, 800, "m")
        assert [each.started for each in engines] == [1, 1, 1]
        heard: list[Step] = []
        engines[2].on_step(Step(1.0, 4, 3, 2))  # nobody listens yet
        pool.on_step = heard.append
        engines[2].on_step(Step(1.0, 4, 3, 2))
        assert heard == [Step(1.0, 4, 3, 2, server_id=2)]
        assert pool.decode([1]) == "0: [1]"
        pool.cancel(["a"])
        assert [each.asked for each in engines] == [[("cancel", "a")]] * 3
        await pool.stop()
        assert [each.stopped for each in engines] == [1, 1, 1]
        assert pool.replicas == {}

    run_virtual(main())


def test_it_is_healthy_where_one_that_serves_is() -> None:
    async def main() -> None:
        pool, engines = members(2)
        assert not await pool.healthy(), "none serves"
        await pool.start()
        engines[0].well = False
        assert await pool.healthy()
        engines[1].on_death("gone")
        assert not await pool.healthy()
        await pool.stop()

    run_virtual(main())


def test_a_start_of_which_one_fails_stops_those_that_came_up() -> None:
    async def main() -> None:
        pool, engines = members(3, fails=1)
        with pytest.raises(EngineStartError, match="no memory"):
            await pool.start()
        assert [(each.started, each.stopped) for each in engines] == [(1, 1), (1, 1)]
        assert pool.replicas == {}

    run_virtual(main())


def test_each_question_goes_to_one_that_serves_as_it_was_asked() -> None:
    async def main() -> None:
        pool, engines = members(2)
        await pool.start()
        sampling = Sampling(max_tokens=1)
        assert await pool.encode("a") == (0, "encode", "a", True)
        assert await pool.encode("a", special_tokens=False) == (0, "encode", "a", False)
        assert await pool.encode_chat([], {"b": 1}) == (0, "encode_chat", [], {"b": 1})
        engines[0].on_death("gone")
        assert await pool.check_sampling(sampling) == (1, "check_sampling", sampling)
        assert pool.decode([2]) == "1: [2]"
        engines[1].on_death("gone")
        for call in (pool.encode("a"), pool.check_sampling(sampling)):
            with pytest.raises(RuntimeError, match=r"^no replica serves$"):
                await call
        await pool.stop()

    run_virtual(main())


@pytest.mark.parametrize("fault", [InvalidPromptError("p"), InvalidSamplingError("s")])
def test_what_is_wrong_with_a_question_is_told_though_its_engine_is_lost(fault: Exception) -> None:
    async def main() -> None:
        pool, engines = members(2)
        await pool.start()

        def lost() -> Exception:
            engines[0].on_death("gone")
            return fault

        engines[0].fault = lost
        with pytest.raises(type(fault)):
            await pool.encode("a")
        await pool.stop()

    run_virtual(main())


def test_another_one_answers_where_the_engine_is_lost_meanwhile_and_no_other_fault_is_retried() -> (
    None
):
    async def main() -> None:
        pool, engines = members(2)
        await pool.start()

        def lost() -> Exception:
            engines[0].on_death("gone")
            return OSError("the connection is closed")

        engines[0].fault = lost
        assert await pool.encode("a") == (1, "encode", "a", True)
        engines[1].fault = lambda: ValueError("of its own")
        with pytest.raises(ValueError, match="of its own"):
            await pool.encode("a")
        await pool.stop()

    run_virtual(main())


def test_a_question_is_made_again_where_the_next_life_of_its_engine_serves_already() -> None:
    async def main() -> None:
        pool, engines = members(1)
        await pool.start()

        async def restarted(*_: Any) -> Any:
            del engines[0].answer  # type: ignore[attr-defined]
            engines[0].on_death("gone")
            await asyncio.sleep(1.0)
            raise OSError("the connection is closed")

        engines[0].answer = restarted  # type: ignore[method-assign]
        assert await pool.encode("a") == (0, "encode", "a", True)
        assert engines[0].started == 2
        await pool.stop()

    run_virtual(main())


def test_the_last_loss_is_the_engines_own_which_then_waits_for_one_that_serves() -> None:
    async def main() -> None:
        pool, engines = members(2)
        deaths: list[str] = []
        pool.on_death = deaths.append
        await pool.start()
        engines[0].on_death("one")
        assert deaths == []
        engines[1].on_death("two")
        assert deaths == ["no server is left: two"]
        assert (await pool.start()).servers == 2
        assert deaths == ["no server is left: two"]
        await pool.start()  # in place of one that is up
        assert [each.started for each in engines] == [3, 3]
        assert pool.replicas[0].supervisor.last_loss == "it is replaced"
        assert deaths == ["no server is left: two"], "whoever starts it knows"
        await pool.stop()

    run_virtual(main())


def test_it_is_gone_once_each_of_them_is_lost_for_good() -> None:
    async def main() -> None:
        pool, engines = members(2, max_restarts=0)
        await pool.start()
        engines[0].on_death("one")
        assert pool.capabilities().servers == 1
        engines[1].on_death("two")
        assert pool.capabilities().servers == 2, "as it was"
        with pytest.raises(EngineGoneError, match="every replica is lost for good"):
            await pool.start()
        await pool.stop()

    run_virtual(main())


def test_one_that_is_removed_ends_and_its_restarts_are_remembered() -> None:
    async def main() -> None:
        pool, engines = members(2)
        deaths: list[str] = []
        pool.on_death = deaths.append
        await pool.start()
        engines[1].on_death("one")
        await asyncio.sleep(1.0)
        assert pool.replicas[1].supervisor.restarts == 1
        await pool.remove(1)
        assert (list(pool.replicas), pool.restarts_of_removed, engines[1].stopped) == ([0], 1, 1)
        assert deaths == []
        await pool.remove(0)
        assert deaths == ["no server is left: server 0 is removed"]

    run_virtual(main())


def test_the_librarys_client_is_that_of_one_that_serves() -> None:
    async def main() -> None:
        pool, engines = members(2, ServingReplicas)
        await pool.start()
        assert pool.client() == "client 0"
        engines[0].on_death("gone")
        assert pool.client() == "client 1"
        await pool.stop()
        with pytest.raises(RuntimeError, match="no replica serves"):
            pool.client()

    run_virtual(main())
