"""Replicas that die, hang, come and go at random under load, on virtual time: every request ends in
exactly one outcome, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kendall.server.supervision import restarts
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import Call, call
from tests.server.counts import tell
from tests.server.mortal import MortalEngine, words
from tests.server.replicas.pooled import Pooled, pooled
from tests.server.test_poison import MARK, Poisoned
from tests.server.test_recovery_chaos import status_of, text_of
from tests.virtual_time import run_virtual

NEVER = 10**6
REQUESTS = 400


class Chaos:
    """Calls of a Poisson stream, and what happens to their servers. `lasts`: mean seconds between
    two faults.
    """

    def __init__(self, pool: Pooled, seed: int, *, poison: float, lasts: float) -> None:
        self.pool, self.rng = pool, np.random.default_rng(seed)
        self.poison, self.lasts = poison, lasts
        self.calls: list[tuple[Call, int, bool]] = []

    async def arrivals(self) -> None:
        for number in range(REQUESTS):
            await asyncio.sleep(float(self.rng.exponential(1 / 80)))
            poison, tokens = bool(self.rng.random() < self.poison), int(self.rng.integers(1, 60))
            made = self.pool.ask(
                tokens,
                prompt=[MARK if poison else 5, number],
                stream=bool(number % 2),
                presence_penalty=0.5 if number % 9 == 0 else 0.0,
                seed=1 if number % 18 == 0 else None,
            )
            self.calls.append((made, tokens, poison))
            if self.rng.random() < 0.1:
                asyncio.get_running_loop().call_later(float(self.rng.exponential(0.1)), made.leave)

    async def faults(self) -> None:
        while True:
            await asyncio.sleep(float(self.rng.exponential(self.lasts)))
            here = list(self.pool.pool.replicas.values())
            engine = here[int(self.rng.integers(len(here)))].engine
            assert isinstance(engine, MortalEngine)
            kind = self.rng.random()
            if kind < 0.6:
                engine.kill()
            elif kind < 0.7 and engine.alive:
                engine.hang()
            else:
                assert (await self.pool.resize(int(self.rng.integers(1, 5)))).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("poison", [0.0, 0.02])
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=4",
        "elastic:max_batch_size=4",
        "continuous:max_batch_size=4",
        "continuous:max_batch_size=4,order=fb,quantum=8",
    ],
)
def test_chaos_of_replicas_leaves_nothing(
    policy: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "LONGEST_WAIT", 0.1)

    async def main() -> None:
        supervision = SupervisionSettings(
            max_restarts=NEVER, stuck_timeout=2.0, max_interruptions=6
        )
        options: dict[str, Any] = {"engine": Poisoned if poison else MortalEngine}
        async with pooled(3, policy, start_takes=0.3, supervision=supervision, **options) as pool:
            tasks = len(asyncio.all_tasks())
            seed, lasts = (27, 0.08) if poison else (7, 0.4)
            chaos = Chaos(pool, seed, poison=poison, lasts=lasts)
            faults = asyncio.create_task(chaos.faults())
            await chaos.arrivals()
            async with asyncio.timeout(3600):
                await asyncio.gather(*(made.task for made, *_ in chaos.calls))
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)
            await pool.resize(2)
            await asyncio.sleep(20.0)
            outcomes = Counter(record.outcome for record in pool.records)
            whole = [(status_of(made), bad) for made, _, bad in chaos.calls if made.whole]
            tell(
                "replicas",
                policy=policy,
                outcomes=outcomes,
                statuses=Counter(f"{status} poison" if bad else status for status, bad in whole),
                interruptions=Counter(record.interruptions for record in pool.records),
                lives=sum(engine.life for engine in pool.engines.values()),
            )
            assert len({record.request_id for record in pool.records}) == len(pool.records)
            refused = sum(status == 400 for status, _ in whole)
            assert len(pool.records) == len(chaos.calls), refused
            assert outcomes["completed"] == sum(status == 200 for status, _ in whole)
            assert all(
                text_of(made) == words(tokens)
                for made, tokens, _ in chaos.calls
                if made.whole and status_of(made) == 200
            )
            assert any(record.interruptions for record in pool.records)
            if not poison:
                assert outcomes["completed"] > 0.75 * REQUESTS
            assert not any(bad and status == 200 for status, bad in whole)
            assert_nothing_is_left(pool)
            assert len(asyncio.all_tasks()) == tasks
            assert await pool.states() == dict.fromkeys(pool.pool.replicas, "serving")
            assert len(pool.pool.replicas) == pool.gateway.batcher.servers == 2
            assert (await call(pool.app, "GET", "/ready")).status == 200

    run_virtual(main())


def assert_nothing_is_left(pool: Pooled) -> None:
    batcher = pool.gateway.batcher
    assert (
        batcher.unanswered,
        batcher.unrecorded,
        batcher.in_service,
        batcher.queue_length,
        len(batcher._expiries),
    ) == (0, 0, 0, 0, 0)
    assert not batcher.recovery.tries
    engines = [replica.engine for replica in pool.pool.replicas.values()]
    assert sum(len(server._answers) for each in engines for server in each._servers) == 0  # type: ignore[attr-defined]
