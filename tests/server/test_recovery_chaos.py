"""Poison, forgotten sequences, time limits, deaths and disconnects at random, on virtual time:
one outcome each, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.supervision import restarts
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call
from tests.server.counts import tell
from tests.server.mortal import faulty, words
from tests.server.test_poison import MARK, Poisoned
from tests.virtual_time import run_virtual

NEVER = 10**6
SETTINGS = SupervisionSettings(max_restarts=NEVER, stuck_timeout=2.0)
STATUSES = {200, 400, 500, 503, 504}


class Chaos:
    """Calls of a Poisson stream, and what happens to them."""

    def __init__(self, seed: int, requests: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.requests = requests
        self.calls: list[tuple[Call, int, bool]] = []  # the call, its tokens, whether it is poison

    async def arrivals(self, app: Any) -> None:
        for number in range(self.requests):
            await asyncio.sleep(float(self.rng.exponential(1 / 60)))
            poison, tokens = self.rng.random() < 0.02, int(self.rng.integers(1, 60))
            body = {
                "model": "tiny",
                "prompt": [MARK if poison else 5, number],
                "max_tokens": 80,
                "stream": bool(number % 2),
                "kendall_forced_output_tokens": tokens,
                "request_timeout": float(self.rng.exponential(1.0)) + 0.001
                if number % 5 == 0
                else None,
                "first_token_timeout": float(self.rng.exponential(1.0)) + 0.001
                if number % 7 == 0
                else None,
            }
            made = Call(app, "POST", "/v1/completions", body)
            self.calls.append((made, tokens, bool(poison)))
            if self.rng.random() < 0.1:
                asyncio.get_running_loop().call_later(float(self.rng.exponential(0.1)), made.leave)

    async def faults(self, gateway: Any, engine: Poisoned) -> None:
        while True:
            await asyncio.sleep(float(self.rng.exponential(1.5)))
            ids = [running.request.id for server in gateway.batcher.running() for running in server]
            if not engine.alive or not ids:
                continue
            if self.rng.random() < 0.7:
                engine.cancel([str(self.rng.choice(ids))])
            else:
                engine.kill()


def status_of(made: Call) -> int:
    """Of a stream that ended with an error: the error's."""
    if made.status == 200 and b'"error"' in made.body:
        (code,) = (event["error"]["code"] for event in made.events() if "error" in event)
        return {"engine_killed": 500, "engine_unavailable": 503}.get(code, 504)
    return made.status or 0


def text_of(made: Call) -> str:
    if b"data: " not in made.body:
        return str(made.json()["choices"][0]["text"])
    return "".join(event["choices"][0]["text"] for event in made.events() if event != "[DONE]")


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "policy",
    [
        "continuous:max_batch_size=8",
        "capped:max_batch_size=8",
        "elastic:max_batch_size=8",
        "continuous:max_batch_size=4,order=fb,quantum=8",
    ],
)
def test_chaos_of_recoveries_leaves_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_WAIT", 0.1)
    chaos = Chaos(7, 400)

    async def main() -> None:
        engine = Poisoned(parse_law(LAW), start_takes=0.3)
        async with faulty(policy, engine, supervision=SETTINGS) as (app, gateway, _, records):
            before = len(asyncio.all_tasks())
            faults = asyncio.create_task(chaos.faults(gateway, engine))
            await chaos.arrivals(app)
            async with asyncio.timeout(3600):
                await asyncio.gather(*(made.task for made, *_ in chaos.calls))
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
            await asyncio.sleep(10.0)
            whole = [(status_of(made), poison) for made, _, poison in chaos.calls if made.whole]
            outcomes = Counter(record.outcome for record in records)
            convicted = gateway.batcher.recovery.trials.convicted
            statuses = Counter(status for status, _ in whole)
            tell(
                "recovery",
                policy=policy,
                statuses=statuses,
                outcomes=outcomes,
                convicted=convicted,
                lives=engine.life,
            )
            assert (
                len({record.request_id for record in records}) == len(records) == len(chaos.calls)
            ), "one record each"
            assert {status for status, _ in whole} <= STATUSES
            assert outcomes["completed"] == sum(status == 200 for status, _ in whole)
            assert all(
                text_of(made) == words(tokens)
                for made, tokens, _ in chaos.calls
                if made.whole and status_of(made) == 200
            )
            assert (500, True) in whole
            assert (504, False) in whole
            assert not any(poison and status == 200 for status, poison in whole)
            batcher = gateway.batcher
            assert (
                batcher.unanswered,
                batcher.in_service,
                batcher.queue_length,
                len(batcher._expiries),
            ) == (0, 0, 0, 0)
            assert (batcher.recovery.trials.suspect, len(asyncio.all_tasks()) - before) == (None, 0)
            assert sum(len(server._answers) for server in engine._servers) == 0
            assert outcomes["failed"] == sum(batcher.failures.values())
            assert (await call(app, "GET", "/ready")).status == 200

    run_virtual(main())
