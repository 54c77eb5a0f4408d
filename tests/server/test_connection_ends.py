"""Ends of connections, on a gateway over sockets: half-closed ones are answered, abandoned ones
free the engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.wire import transport
from tests.eventually import eventually
from tests.server import unruly
from tests.server.test_unruly_clients import Hasty, Site, site

CALLS = 100
SLOW = parse_law("k1=0,k2=0.1e-3,k3=1e-6,k4=50e-3")  # 2,000 tokens take 100 s


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients share the loop with the gateway: where it stands still between their connecting
    and their sending, they are not late.
    """
    monkeypatch.setattr(Hasty, "head_timeout", 120.0)
    monkeypatch.setattr(Hasty, "body_timeout", 120.0)


async def half_closing(port: int, seed: int, *, stream: bool) -> unruly.Client:
    client = await unruly.Client(np.random.default_rng(seed), port).open()
    await client.send(unruly.call(int(client.rng.integers(1, 30)), stream=stream))
    client.half_close()
    await client.read()
    client.writer.close()
    return client


async def settled(here: Site) -> Counter[str]:
    await eventually(lambda: here.gateway.batcher.unrecorded == 0)
    return Counter(record.outcome for record in here.records)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["continuous:max_batch_size=8", "dynamic"])
def test_every_call_whose_connection_is_half_closed_is_answered(policy: str, stream: bool) -> None:
    async def main() -> None:
        async with site(policy) as here:
            ended = await asyncio.gather(
                *(half_closing(here.port, seed, stream=stream) for seed in range(CALLS))
            )
            assert {client.statuses[-1] for client in ended} == {200}
            assert all(client.whole == len(client.statuses) for client in ended)
            assert await settled(here) == {"completed": CALLS}

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_calls_left_behind_a_pipelined_second_one_are_all_cancelled(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first is in service; then the client goes. It is noticed by its
    going, not by a question later.
    """
    monkeypatch.setattr(transport, "ASK_EVERY", 3600.0)

    async def begun(port: int) -> unruly.Client:
        client = await unruly.Client(np.random.default_rng(0), port).open()
        await client.send(unruly.call(2000, stream=stream))
        return client

    async def main() -> None:
        async with site("continuous:max_batch_size=64", SLOW) as here:
            clients = await asyncio.gather(*(begun(here.port) for _ in range(CALLS // 2)))
            await eventually(lambda: here.gateway.batcher.in_service == CALLS // 2)
            for client in clients:
                await client.send(unruly.call(2000))
            await asyncio.sleep(
                0.2
            )  # as a rule it has been read by then; where it has not, the outcome is the same
            for client in clients:
                client.writer.close()
            assert await settled(here) == {"cancelled": CALLS // 2}, "the second one never began"

    asyncio.run(main())
