"""Ends of connections, on a gateway over sockets: half-closed ones are answered, abandoned ones free the engine."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from tests.server import unruly
from tests.server.test_unruly_clients import Site, site

CALLS = 100


async def half_closing(port: int, seed: int, *, stream: bool) -> unruly.Client:
    client = await unruly.Client(np.random.default_rng(seed), port).open()
    await client.send(unruly.call(int(client.rng.integers(1, 30)), stream=stream))
    client.half_close()
    await client.read()
    client.writer.close()
    return client


async def settled(here: Site) -> Counter[str]:
    for _ in range(500):
        if here.gateway.batcher.unrecorded == 0:
            break
        await asyncio.sleep(0.01)
    return Counter(record.outcome for record in here.records)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["continuous:max_batch_size=8", "dynamic"])
def test_every_call_whose_connection_is_half_closed_is_answered(policy: str, stream: bool) -> None:
    async def main() -> None:
        async with site(policy) as here:
            ended = await asyncio.gather(*(half_closing(here.port, seed, stream=stream) for seed in range(CALLS)))
            assert {client.statuses[-1] for client in ended} == {200}
            assert all(client.whole == len(client.statuses) for client in ended)
            assert await settled(here) == {"completed": CALLS}

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_calls_left_behind_a_pipelined_second_one_are_all_cancelled(stream: bool) -> None:
    """The second comes when the first is in service; then the client goes."""

    async def leaving(port: int) -> None:
        client = await unruly.Client(np.random.default_rng(0), port).open()
        await client.send(unruly.call(2000, stream=stream))
        await asyncio.sleep(0.05)
        await client.send(unruly.call(2000))
        await asyncio.sleep(0.05)
        client.writer.close()

    async def main() -> None:
        async with site("continuous:max_batch_size=64") as here:
            await asyncio.gather(*(leaving(here.port) for _ in range(CALLS // 2)))
            assert await settled(here) == {"cancelled": CALLS // 2}, "the second one never began"

    asyncio.run(main())
