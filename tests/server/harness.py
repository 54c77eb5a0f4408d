"""A gateway core on virtual time: a batcher on the emulated engine, fed from a trace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies import Policy, Request, parse_policy
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Record, call_of
from queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from server.engines.base import EngineRequest, Sampling, Token
from server.engines.emulated import EmulatedEngine
from server.queue.batcher import Batcher
from server.queue.sequence import Batch, SequenceState
from tests.virtual_time import run_virtual


@dataclass
class Collector:
    """An observer that keeps the records."""

    records: list[Record] = field(default_factory=list)

    def on_arrival(self, sequence: SequenceState) -> None: ...
    def on_dispatch(self, batch: Batch) -> None: ...
    def on_idle(self, server_id: int, at: float) -> None: ...
    def on_settle(self, sequence: SequenceState) -> None: ...
    def on_record(self, record: Record) -> None:
        self.records.append(record)


class Immediate:
    """A consumer whose last byte leaves at once."""

    def __init__(self) -> None:
        self.sequence: SequenceState | None = None
        self.text = ""
        self.tokens = 0
        self.failed: tuple[str, str] | None = None

    def on_dispatched(self) -> None: ...
    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        self.text += text
        self.tokens += len(tokens)

    def on_release(self) -> None:
        assert self.sequence is not None
        self.sequence.released()

    def on_failed(self, outcome: str, code: str, message: str) -> None:
        self.failed = (outcome, code)


def engine_request_of(
    request: Request, output_tokens: int | None, **sampling: object
) -> EngineRequest:
    options = {"max_tokens": request.max_output_tokens} | sampling
    return EngineRequest(request, [1] * request.prompt_tokens, Sampling(**options), output_tokens)


def submitted(batcher: Batcher, requests: Sequence[EngineRequest]) -> list[Immediate]:
    """One call of these requests; returns their consumers, which have their sequences."""
    consumers = [Immediate() for _ in requests]
    for consumer, sequence in zip(consumers, batcher.submit(requests, consumers), strict=True):
        consumer.sequence = sequence
    return consumers


async def replay(
    policy: Policy,
    jobs: Sequence[tuple[Request, int]],
    law: LatencyModel,
    *,
    servers: int = 1,
    seed: int = 0,
    cancellations: Mapping[str, float] | None = None,
    switches: Sequence[tuple[float, Policy]] = (),
    **bounds: int,
) -> list[Record]:
    """Feed a trace to a batcher on the running (virtual) loop; returns the records."""
    loop = asyncio.get_running_loop()
    engine = EmulatedEngine(law, servers=servers, seed=seed, **bounds)
    collector = Collector()
    batcher = Batcher(engine, await engine.start(), policy, [collector])
    sequences: dict[str, SequenceState] = {}

    def arrive(call: Sequence[tuple[Request, int]]) -> None:
        for consumer in submitted(
            batcher, [engine_request_of(request, output_tokens) for request, output_tokens in call]
        ):
            assert consumer.sequence is not None
            sequences[consumer.sequence.id] = consumer.sequence

    for (at, _), call in itertools.groupby(
        jobs, key=lambda job: (job[0].arrived_at, call_of(job[0].id) or job[0].id)
    ):
        loop.call_at(at, arrive, list(call))
    for request_id, at in (cancellations or {}).items():
        loop.call_at(at, lambda request_id=request_id: sequences[request_id].cancel())
    for at, other in switches:
        loop.call_at(at, batcher.switch, other)
    loop.call_at(
        max(request.arrived_at for request, _ in jobs), lambda: loop.call_soon(batcher.close)
    )
    await asyncio.sleep(max(request.arrived_at for request, _ in jobs))
    await batcher.answered()
    await asyncio.sleep(0)
    return collector.records


def driven_by_both(
    policy: str,
    jobs: Sequence[tuple[Request, int]],
    law: LatencyModel,
    *,
    servers: int = 1,
    **options: Any,
) -> tuple[list[Record], list[Record]]:
    """The records of a trace in the gateway on virtual time, and in the simulator; cancellations
    and switches are `options`.
    """
    live = run_virtual(replay(parse_policy(policy), jobs, law, servers=servers, seed=3, **options))
    children = np.random.SeedSequence(3).spawn(servers + 1)[1:]  # the first draws lengths
    simulated = simulate_trace(
        parse_policy(policy),
        [Job(request, tokens) for request, tokens in jobs],
        SimulatedEngine(law, max_batch_size=64),
        [np.random.default_rng(child) for child in children],
        **options,
    )
    return live, simulated
