"""Everything at once, on virtual time: deaths, hangs, switches of policy and limit, disconnects
at every stage. Nothing is lost or left.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.gateway import Gateway
from kendall.server.live import LiveModel
from kendall.server.page import history
from kendall.server.queue.sequence import SequenceState
from kendall.server.supervision import restarts
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call
from tests.server.counts import tell
from tests.server.mortal import MortalEngine, faulty, words
from tests.virtual_time import run_virtual

POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=3,max_wait=0.02",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
    "continuous:max_batch_size=3,order=sprpt",
    "single:order=mlfq,quantum=4,levels=3",
    "continuous:max_batch_size=4,order=fb,quantum=2",
    "capped:max_batch_size=8,order=spjf,aging=0.01",
]
NEVER = 10**6
CALM = SupervisionSettings(
    max_restarts=NEVER,
    stuck_timeout=2.0,
    max_interruptions=NEVER,
    suspect_after=NEVER,
    max_parked=NEVER,
)


@pytest.fixture(autouse=True)
def _prompt_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that die every second would be started every half minute, and everything would
    happen to waiting requests.
    """
    monkeypatch.setattr(restarts, "LONGEST_WAIT", 0.1)


class Chaos:
    """One run: `requests` arrive as a Poisson stream while everything else happens to them."""

    def __init__(self, seed: int, requests: int, *, leaving: float, rate: float = 200.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.requests, self.leaving, self.rate = requests, leaving, rate
        self.calls: list[tuple[Call, int, int]] = []  # the call, its tokens, its choices
        self.stages: Counter[str] = Counter()  # where clients were when they left
        self.switches = self.deaths = self.hangs = 0

    async def arrivals(self, app: Any) -> None:
        for number in range(self.requests):
            await asyncio.sleep(float(self.rng.exponential(1 / self.rate)))
            tokens, choices = int(self.rng.integers(1, 20)), int(self.rng.choice([1, 1, 1, 3]))
            body = {
                "model": "tiny",
                "prompt": [5, 6, 7] if number % 3 else "a text to be encoded",
                "max_tokens": 60,
                "n": choices,
                "stream": bool(number % 2),
                "kendall_forced_output_tokens": tokens,
                "predicted_output_tokens": tokens * 1.5 if number % 5 else None,
                "seed": 1 if number % 7 == 0 else None,
            }
            made = Call(app, "POST", "/v1/completions", body)
            self.calls.append((made, tokens, choices))
            if self.rng.random() < self.leaving:
                asyncio.get_running_loop().call_later(
                    float(self.rng.exponential(0.05)), self._leave, made
                )

    def _leave(self, made: Call) -> None:
        stage = (
            "answered"
            if made.task.done()
            else "streaming"
            if made.body
            else "dispatched"
            if made.status
            else "waiting"
        )
        self.stages[stage] += 1
        made.leave()

    async def deaths_and_hangs(self, engine: MortalEngine, every: float) -> None:
        while True:
            await asyncio.sleep(float(self.rng.uniform(0.5, 1.5) * every))
            if not engine.alive:
                continue
            if self.rng.random() < 0.8:
                self.deaths += 1
                engine.kill()
            else:
                self.hangs += 1
                engine.hang()
            engine.start_fails = int(self.rng.integers(0, 3))

    async def switching(self, app: Any, every: float) -> None:
        while True:
            await asyncio.sleep(float(self.rng.uniform(0.5, 1.5) * every))
            limit = int(self.rng.integers(20, 60))
            body = {
                "policy": str(self.rng.choice(POLICIES)),
                "max_output_tokens": limit,
                "patience": None,
            }
            assert (await call(app, "PUT", "/admin/policy", body)).status == 200
            self.switches += 1


async def run(chaos: Chaos, *, deaths_every: float | None, switch_every: float) -> dict[str, Any]:
    """In a gateway of its own."""
    async with faulty(
        "single", MortalEngine(parse_law(LAW), start_takes=0.3), supervision=CALM
    ) as running:
        return await play(chaos, *running, deaths_every=deaths_every, switch_every=switch_every)


async def play(
    chaos: Chaos,
    app: Any,
    gateway: Gateway,
    engine: MortalEngine,
    records: list[Record],
    *,
    deaths_every: float | None,
    switch_every: float,
) -> dict[str, Any]:
    """The load and all that happens to it; then what is left of it."""
    before, restarts_before = len(asyncio.all_tasks()), gateway.supervisor.restarts
    broken: list[str] = []
    background = [
        asyncio.create_task(chaos.switching(app, switch_every)),
        asyncio.create_task(self_checking(gateway.live_model(), broken)),
    ]
    if deaths_every is not None:
        background.append(asyncio.create_task(chaos.deaths_and_hangs(engine, deaths_every)))
    await chaos.arrivals(app)
    async with asyncio.timeout(3600):
        await asyncio.gather(*(made.task for made, *_ in chaos.calls))
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    while not gateway.supervisor.serving:  # noqa: ASYNC110
        await asyncio.sleep(1.0)
    await asyncio.sleep(2.0)  # the last timers of clients that leave, which hold all calls
    batcher = gateway.batcher
    return {
        "records": records,
        "left": (
            batcher.unanswered,
            batcher.in_service,
            batcher.queue_length,
            len(batcher._expiries),
        ),
        "tasks": len(asyncio.all_tasks()) - before,
        "broken": broken,
        "restarts": gateway.supervisor.restarts - restarts_before,
        "in_emulation": sum(len(server._answers) for server in engine._servers),
        "faults": batcher.observers.faults,
    }


async def self_checking(live: LiveModel, broken: list[str]) -> None:
    """Conservation, Little's law and the utilisation law, every two seconds; gathers those that
    do not hold.
    """
    while True:
        await asyncio.sleep(2.0)
        live.check()
        broken += [each.name for each in live.checks if not each.holds]


def check(chaos: Chaos, found: dict[str, Any]) -> None:
    records = found["records"]
    outcomes = Counter(record.outcome for record in records)
    interrupted = sum(record.interruptions > 0 for record in records)
    happened = {
        "left": chaos.stages,
        "deaths": chaos.deaths,
        "hangs": chaos.hangs,
        "switches": chaos.switches,
    }
    tell(
        "virtual",
        calls=len(chaos.calls),
        sequences=len(records),
        outcomes=outcomes,
        interrupted=interrupted,
        **happened,
    )
    assert len({record.request_id for record in records}) == len(records), "one record each"
    assert set(outcomes) <= {"completed", "cancelled"}, outcomes
    assert found["broken"] == []
    assert found["left"] == (0, 0, 0, 0)
    assert (found["tasks"], found["in_emulation"], found["faults"]) == (0, 0, 0)
    whole = 0
    for made, tokens, choices in chaos.calls:
        if not made.whole:
            whole += made.body.count(
                b'"finish_reason":"'
            )  # of several choices, those that had left before the client did
            continue
        assert made.status == 200, made.body
        whole += choices
        for index in range(choices):
            assert text_of(made, index) == words(tokens)
    assert whole == outcomes["completed"], (
        "who has an answer has a record that says so, and the other way round"
    )


def text_of(made: Call, index: int) -> str:
    if b"data: " not in made.body:
        return str(made.json()["choices"][index]["text"])
    choices = [event["choices"][0] for event in made.events() if event != "[DONE]"]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_chaos_loses_and_leaves_nothing(seed: int) -> None:
    """600 calls, 30 % leave, an engine that dies or hangs every second or so, another policy and
    limit every half second.
    """
    chaos = Chaos(seed, 600, leaving=0.3, rate=60.0)
    found = run_virtual(run(chaos, deaths_every=1.0, switch_every=0.5))
    check(chaos, found)
    assert found["restarts"] >= 3
    assert chaos.switches >= 5
    assert sum(record.interruptions > 0 for record in found["records"]) >= 5
    assert {"waiting", "streaming"} <= set(chaos.stages)


@pytest.mark.slow
def test_ten_thousand_calls_with_thirty_percent_disconnects_at_every_stage() -> None:
    chaos = Chaos(100, 10_000, leaving=0.3, rate=40.0)
    found = run_virtual(run(chaos, deaths_every=None, switch_every=1.0))
    check(chaos, found)
    assert sum(chaos.stages.values()) > 2_700
    assert all(
        chaos.stages[stage] > 20 for stage in ("waiting", "dispatched", "streaming", "answered")
    ), chaos.stages


@pytest.mark.slow
def test_a_hundred_thousand_calls_leave_no_task_and_no_memory_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gateway, ten rounds, with deaths and disconnects. What it holds is counted after each;
    windows are full after the second.
    """
    monkeypatch.setattr(
        history, "FINE", 90
    )  # rows; the page's own quarter of an hour would be full in the last round only
    monkeypatch.setattr(history, "COARSE", 9)
    caplog.set_level(logging.CRITICAL + 1, "kendall")  # what it keeps would be counted
    rounds = []

    async def main() -> None:
        async with faulty(
            "single", MortalEngine(parse_law(LAW), start_takes=0.3), supervision=CALM
        ) as (app, gateway, engine, records):
            for seed in range(10):
                chaos = Chaos(200 + seed, 10_000, leaving=0.3, rate=100.0)
                check(
                    chaos,
                    await play(
                        chaos, app, gateway, engine, records, deaths_every=2.0, switch_every=1.0
                    ),
                )
                del chaos
                records.clear()
                engine.given.clear()
                rounds.append(what_is_held())
                tell("memory", **rounds[-1])

    run_virtual(main())
    assert [held["sequence_states"] for held in rounds] == [0] * 10
    grown = rounds[-1]["blocks"] - rounds[1]["blocks"]
    assert grown < 0.02 * 80_000, "less than one block of memory in fifty calls"


def what_is_held() -> dict[str, int]:
    """Objects that the collector follows, sequences among them, and blocks of memory that the
    interpreter gave out.
    """
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "sequence_states": sum(issubclass(type(each), SequenceState) for each in objects),
        "blocks": sys.getallocatedblocks(),
    }
