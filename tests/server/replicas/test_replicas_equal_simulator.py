"""A gateway before replicas and the simulator of c servers: same batches, same instants."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kendall.policies import Policy, Request, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.replicas.servers import Servers
from kendall.server.supervision.supervisor import Supervisor
from tests.server.harness import Collector, engine_request_of, submitted
from tests.server.replicas.pooled import QUIET
from tests.server.test_gateway_equals_simulator import COUNT, LAW, assert_equal, trace
from tests.virtual_time import run_virtual

SEED = 3
POLICIES = {
    "single": 40.0,
    "dynamic": 120.0,
    "fixed:batch_size=4,max_wait=0.02": 60.0,
    "capped:max_batch_size=4": 90.0,
    "elastic:max_batch_size=3": 80.0,
    "continuous:max_batch_size=4": 150.0,
}


def replicas_of(
    count: int, law: LatencyModel = LAW, started: int | None = None
) -> tuple[Replicas, list[np.random.Generator]]:
    """The pool, and the same chance for the simulator; `started` of them at first."""
    pool = Replicas(lambda each: EmulatedEngine(law, seed=SEED + each), started or count, QUIET)
    # the first child of a seed draws lengths, the second one the service of its one server
    return pool, [
        np.random.default_rng(np.random.SeedSequence(SEED + each).spawn(2)[1])
        for each in range(count)
    ]


async def replay(
    policy: Policy,
    jobs: Sequence[tuple[Request, int]],
    pool: Replicas,
    sizes: Sequence[tuple[float, int]] = (),
) -> list[Record]:
    """`sizes`: how many replicas are to serve from an instant on."""
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(
        pool, QUIET, on_down=_never, on_up=_never, on_given_up=_never
    )  # as the gateway has one
    collector = Collector()
    batcher = Batcher(pool, await supervisor.start(), policy, [collector])
    never = {"on_loss": _never, "blame": _never, "on_forgiven": _never}
    servers = Servers(pool, most_interruptions=3, begin_epoch=batcher.switch, **never)
    servers.attach(batcher)

    def arrive(call: Sequence[tuple[Request, int]]) -> None:
        submitted(batcher, [engine_request_of(request, tokens) for request, tokens in call])

    for at, size in sizes:
        loop.call_at(at, servers.resize, size)
    for at, call in itertools.groupby(jobs, key=lambda job: job[0].arrived_at):
        loop.call_at(at, arrive, list(call))
    last = jobs[-1][0].arrived_at
    loop.call_at(last, lambda: loop.call_soon(batcher.close))
    await asyncio.sleep(last)
    await batcher.answered()
    await asyncio.sleep(0)
    await servers.close()
    await supervisor.stop()
    return collector.records


def _never(*_: Any) -> None:
    raise AssertionError("nothing is lost here")


@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(12)
def test_same_batches_at_the_same_instants(policy: str, servers: int) -> None:
    jobs = trace(POLICIES[policy] * servers, seed=7)
    pool, rngs = replicas_of(servers)
    live = run_virtual(replay(parse_policy(policy), jobs, pool))
    simulated = simulate_trace(
        parse_policy(policy),
        [Job(request, tokens, True) for request, tokens in jobs],
        SimulatedEngine(LAW, max_batch_size=64),
        rngs,
    )
    assert_equal(live, simulated)
    assert {record.outcome for record in live} == {"completed"}
    assert {record.server_id for record in live} == set(range(servers))
    assert sum(record.queueing_delay > 0 for record in live) > COUNT / 10, (
        "nothing waited: the trace tests nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "sizes"),
    [
        (LAW, (2, 3, 4, 3, 2)),  # each server has a chance of its own: none is added a second time
        (dataclasses.replace(LAW, cv=0.0), (2, 3, 2, 1, 2, 3, 4, 3)),
    ],
    ids=["chance", "again"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_servers_that_come_and_go(policy: str, law: LatencyModel, sizes: Sequence[int]) -> None:
    """Also epoch by epoch: what a new server takes at once belongs to the new one."""
    jobs = trace(POLICIES[policy] * 2.2, seed=7)
    span = jobs[-1][0].arrived_at
    instants = np.sort(np.random.default_rng(5).uniform(0, span, len(sizes) - 1)).tolist()
    pool, rngs = replicas_of(max(sizes), law, started=sizes[0])
    live = run_virtual(
        replay(parse_policy(policy), jobs, pool, list(zip(instants, sizes[1:], strict=True)))
    )
    in_use = [(at, range(size)) for at, size in zip([0.0, *instants], sizes, strict=True)]
    simulated = simulate_trace(
        parse_policy(policy),
        [Job(request, tokens, True) for request, tokens in jobs],
        SimulatedEngine(law, max_batch_size=64, in_use=in_use),
        rngs,
    )
    assert_equal(live, simulated)
    epochs = {record.request_id: record.epoch for record in simulated}
    assert {each.request_id: each.epoch for each in live} == epochs
    assert set(epochs.values()) == set(range(len(sizes)))
    assert {record.server_id for record in live} >= {0, 1, 2}
