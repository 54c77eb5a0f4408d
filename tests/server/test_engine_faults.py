"""The real engine killed, stopped and orphaned under load: every request is answered, none
twice, and no process is left.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.queueing.measurement.record import Record, read_run
from kendall.server.engines.vllm.process import descendants
from tests.server.counts import tell
from tests.server.processes import (
    SocketCall,
    alive,
    arrived,
    engine_process,
    events,
    gateway,
    gone,
    stream_text,
)

pytestmark = pytest.mark.engine
POLICIES = [
    "continuous:max_batch_size=8",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=8",
    "fixed:batch_size=3,max_wait=0.05",
    "single",
]
TIED = (
    2**-10
    # nats between the best two tokens: two steps of what the engine tells; sums in another order
    # (batch, prompt) swap them
)


@dataclass(frozen=True)
class Answered:
    """One call and its answer."""

    prompt: tuple[int, ...]
    length: int
    status: int
    text: str
    whole: bool
    token_ids: tuple[int, ...]


@dataclass
class Load:
    """A closed loop of clients; each call's forced length, and what came of it."""

    url: str
    clients: int = 12
    longest: int = 120
    going: bool = True
    turns: list[int] = field(init=False)
    asked: list[int] = field(default_factory=list)
    answers: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = [0] * self.clients

    async def client(self, number: int) -> None:
        for call in itertools.count():
            if not self.going:
                return
            await self.ask(
                (300 + number, 301, 302 + call % 50), 1 + (number * 37 + call * 61) % self.longest
            )
            self.turns[number] += 1

    async def turn_over(self) -> None:
        """Return when every client has had another answer: no call sees more than two engines
        die.
        """
        seen = self.turns.copy()
        async with asyncio.timeout(180):
            while any(now == before for now, before in zip(self.turns, seen, strict=True)):  # noqa: ASYNC110 - test
                await asyncio.sleep(0.05)

    async def ask(self, prompt: tuple[int, ...], length: int) -> Answered:
        """One greedy answer of a forced length."""
        self.asked.append(length)
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 400,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            status, answer = await (
                await SocketCall(self.url, body | {"kendall_forced_output_tokens": length}).send()
            ).answer()
        except OSError:
            status, answer = 0, b""
        ids = [
            number
            for event in events(answer)
            for choice in event.get("choices", ())
            for number in choice.get("token_ids") or ()
        ]
        self.answers.append(Answered(prompt, length, status, *stream_text(answer), tuple(ids)))
        return self.answers[-1]

    async def compare(self, running: GatewayProcess, most: int) -> int:
        """The longest answers, which met the most, are the same when nothing happens to them, up
        to a tie. Returns how many tied.
        """
        tied = 0
        for old in sorted(self.answers, key=lambda answered: -answered.length)[:most]:
            new = await self.ask(old.prompt, old.length)
            if new.token_ids == old.token_ids:
                assert new.text == old.text
                continue
            tied += 1
            same = next(
                at
                for at, (one, other) in enumerate(zip(old.token_ids, new.token_ids, strict=True))
                if one != other
            )
            assert await self.gap(running, [*old.prompt, *old.token_ids[:same]]) < TIED, (
                same,
                old,
                new,
            )
        return tied

    async def gap(self, running: GatewayProcess, prompt: list[int]) -> float:
        """Nats between the best two next tokens."""
        self.asked.append(1)
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 2,
            "ignore_eos": True,
        }
        answer = await running.ask("POST", "/v1/completions", body)
        best, second = sorted(
            answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True
        )[:2]
        return float(best - second)

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        tasks = [asyncio.create_task(self.client(number)) for number in range(self.clients)]
        try:
            await meanwhile()
        finally:
            self.going = False
            await asyncio.gather(*tasks)


async def ready_again(running: GatewayProcess) -> None:
    """Health stays 200 while the engine restarts; ready comes back."""
    async with asyncio.timeout(180):
        while not await running.is_ready():
            assert await running.is_healthy()
            await asyncio.sleep(0.1)


async def hurt(running: GatewayProcess, load: Load, signals: list[signal.Signals]) -> list[int]:
    """The engine gets one signal after the other, each some answers after it serves again;
    returns its processes.
    """
    engines = []
    for number in signals:
        await ready_again(running)
        await load.turn_over()
        engines.append(engine_process(running.pid))
        os.kill(engines[-1], number)
        async with asyncio.timeout(60):
            while await running.is_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await ready_again(running)
    await load.turn_over()
    return engines


def engine_chaos(
    folder: Path, signals: list[signal.Signals], *, switching: bool
) -> tuple[Load, list[Record], dict[str, Any]]:
    async def main() -> tuple[Load, dict[str, Any]]:
        async with gateway(folder, "tiny", "--engine", "vllm", "--policy", POLICIES[0]) as running:
            await running.ready()
            load = Load(running.url)
            engines: list[int] = []

            async def switch() -> None:
                for policy in itertools.cycle(POLICIES):
                    await asyncio.sleep(1.0)
                    await running.ask("PUT", "/admin/policy", {"policy": policy})

            async def meanwhile() -> None:
                switches = asyncio.create_task(switch()) if switching else None
                try:
                    engines.extend(await hurt(running, load, signals))
                finally:
                    if switches is not None:
                        switches.cancel()

            await load.run(meanwhile)
            whole, tied = len(load.answers), await load.compare(running, 20)
            state = await running.ask("GET", "/admin/state")
            assert await gone(engines) == [], "an engine that was replaced stayed"
            assert tied <= 5, "one in four at most"
            tell(
                "engine",
                under_load=whole,
                compared=20,
                tied=tied,
                signals=[number.name for number in signals],
            )
            return load, state

    load, state = asyncio.run(main())
    return load, read_run(folder / "records.jsonl")[1], state


def check(load: Load, records: list[Record], state: dict[str, Any], losses: int) -> None:
    interrupted = sum(bool(record.interruptions) for record in records)
    tell(
        "outcomes",
        asked=len(load.asked),
        outcomes=Counter(record.outcome for record in records),
        interrupted=interrupted,
    )
    assert Counter(answered.status for answered in load.answers) == {200: len(load.answers)}
    assert all(answered.whole for answered in load.answers)
    assert Counter(record.outcome for record in records) == {"completed": len(load.asked)}
    assert sorted(record.output_tokens or 0 for record in records) == sorted(load.asked), (
        "every token once"
    )
    assert state["supervision"]["restarts"] == losses
    assert (state["queue_length"], state["in_service"], state["unanswered"]) == (0, 0, 0)
    assert sum(record.interruptions or 0 for record in records) >= losses, "there was load"


@pytest.mark.slow
def test_an_engine_killed_under_load_costs_nobody_an_answer(tmp_path: Path) -> None:
    load, records, state = engine_chaos(tmp_path, [signal.SIGKILL], switching=False)
    check(load, records, state, 1)


@pytest.mark.slow
def test_five_kills_and_a_stop_under_load_with_switches_of_policy(tmp_path: Path) -> None:
    """Acceptance A2 and A3: SIGKILL five times, SIGSTOP once, another policy every second."""
    signals = [signal.SIGKILL] * 3 + [signal.SIGSTOP] + [signal.SIGKILL] * 2
    load, records, state = engine_chaos(tmp_path, signals, switching=True)
    check(load, records, state, 6)
    policies, last = (
        Counter(record.policy for record in records),
        max(record.epoch or 0 for record in records),
    )
    tell("switches", served_under=policies, epochs=last)
    assert len(policies) >= 3, (
        "on a slow machine a policy may be over before a server is free for it"
    )
    assert last >= 12


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_gateway_ended_under_load_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM: what had arrived is answered whole; SIGKILL: it is not, but nothing stays behind
    either way.
    """

    async def main() -> Load:
        async with gateway(
            tmp_path, "tiny", "--engine", "vllm", "--policy", POLICIES[0]
        ) as running:
            await running.ready()
            load = Load(running.url, clients=6)
            below = descendants(running.pid)
            assert engine_process(running.pid) in below

            async def meanwhile() -> None:
                for _ in range(2):
                    await load.turn_over()  # of each of the clients another answer
                os.kill(running.pid, number)
                load.going = False

            await load.run(meanwhile)
            assert await gone([running.pid, *below]) == []
            assert not alive(running.pid)
            return load

    load = asyncio.run(main())
    statuses = Counter(answered.status for answered in load.answers)
    tell(number.name, asked=len(load.asked), statuses=statuses, orphans=0)
    assert sum(answered.whole for answered in load.answers) > 6
    if number == signal.SIGTERM:
        assert all(answered.whole for answered in load.answers if answered.status == 200)
        records = Counter(record.outcome for record in read_run(tmp_path / "records.jsonl")[1])
        assert records == Counter(completed=statuses[200]) + Counter(rejected=statuses[503]), (
            "what arrived behind the signal is told"
        )


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.3, 1.0])
def test_a_gateway_killed_while_its_engine_starts_leaves_no_process(
    tmp_path: Path, after: float
) -> None:
    """An engine waits minutes for a gateway that does not answer its greeting."""

    async def main() -> None:
        async with asyncio.timeout(300), gateway(tmp_path, "tiny", "--engine", "vllm") as running:
            while not (below := [pid for pid in descendants(running.pid) if descendants(pid)]):  # noqa: ASYNC110 - its child
                await asyncio.sleep(0.02)
            await asyncio.sleep(after)
            below = descendants(running.pid)
            os.kill(running.pid, signal.SIGKILL)
            assert await gone([running.pid, *below]) == []

    asyncio.run(main())


@pytest.mark.slow
def test_an_engine_that_cannot_come_back_ends_the_gateway_with_a_non_zero_status(
    tmp_path: Path,
) -> None:
    async def main() -> int | None:
        async with gateway(
            tmp_path, "tiny", "--engine", "vllm", "--policy", "single", "--max-restarts", "0"
        ) as running:
            await running.ready()
            made = await SocketCall(
                running.url,
                {"model": "tiny", "prompt": [300], "max_tokens": 1900, "ignore_eos": True},
            ).send()
            await arrived(running, 1)
            below = descendants(running.pid)
            os.kill(engine_process(running.pid), signal.SIGKILL)
            status, answer = await made.answer()
            assert status == 503
            assert b"engine_unavailable" in answer
            async with asyncio.timeout(60):
                await running.finished()
            assert await gone(below) == []
            assert (
                "the engine failed and could not be restarted"
                in (tmp_path / "gateway.log").read_text()
            )
            assert running._process is not None
            return running._process.returncode

    assert asyncio.run(main()) == 1
