"""A gateway core on virtual time: a batcher on the emulated engine, fed from a trace."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kendall.policies import Policy, Request, parse_policy
from kendall.queueing.engine_bounds import or_unbounded
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record, call_of
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from kendall.server.engines.base import EngineRequest, Sampling, Token
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import SequenceState
from tests.virtual_time import run_virtual

NEVER = 10**6  # deaths, after which a request is a suspect, or is given up
FRAGILE = {"presence_penalty": 0.5}  # sampled without a seed, with a state


@dataclass
class Collector(Observer):
    """An observer that keeps the records."""

    records: list[Record] = field(default_factory=list)

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


def ones(request: Request) -> Sequence[int]:
    """A prompt of its length."""
    return [1] * request.prompt_tokens


def engine_request_of(
    request: Request,
    output_tokens: int | None,
    prompt: Callable[[Request], Sequence[int]] = ones,
    **sampling: object,
) -> EngineRequest:
    options = {"max_tokens": request.max_output_tokens} | sampling
    return EngineRequest(request, prompt(request), Sampling(**options), output_tokens)


def submitted(batcher: Batcher, requests: Sequence[EngineRequest]) -> list[Immediate]:
    """One call of these requests; returns their consumers, which have their sequences."""
    consumers = [Immediate() for _ in requests]
    for consumer, sequence in zip(consumers, batcher.submit(requests, consumers), strict=True):
        consumer.sequence = sequence
    return consumers


def mortal(
    law: LatencyModel, **options: int
) -> tuple[EmulatedEngine, Callable[[Batcher, float], None]]:
    """An engine, and what kills it and starts it again, as the gateway's supervisor does."""
    from tests.server.mortal import MortalEngine  # which imports this module

    engine = MortalEngine(law, **options)
    restarts: set[asyncio.Task[None]] = set()

    async def restart(batcher: Batcher) -> None:
        batcher.recovery.resume(await engine.start())

    def die(batcher: Batcher, seconds: float) -> None:
        if engine.alive:
            engine.start_takes = seconds
            engine.on_death = lambda reason: batcher.recovery.interrupt(reason, NEVER)
            engine.kill()
            restarts.add(asyncio.get_running_loop().create_task(restart(batcher)))

    return engine, die


async def replay(
    policy: Policy,
    jobs: Sequence[tuple[Request, int]],
    law: LatencyModel,
    *,
    servers: int = 1,
    seed: int = 0,
    cancellations: Mapping[str, float] | None = None,
    switches: Sequence[tuple[float, Policy]] = (),
    deaths: Sequence[tuple[float, float]] = (),
    fragile: Collection[str] = (),
    observers: Sequence[Observer] = (),
    prompt: Callable[[Request], Sequence[int]] = ones,
    **bounds: int,
) -> list[Record]:
    """Feed a trace to a batcher on the running (virtual) loop; returns the records. `deaths`:
    instants, and seconds until the engine serves again; `fragile`: ids of what cannot be continued
    behind its tokens; `observers`: who else observes.
    """
    loop = asyncio.get_running_loop()
    engine, die = mortal(law, servers=servers, seed=seed, **bounds)
    collector = Collector()
    capabilities = await engine.start()
    batcher = Batcher(engine, capabilities, policy, [collector, *observers], suspect_after=NEVER)
    for at, seconds in deaths:
        loop.call_at(at, die, batcher, seconds)
    sequences: dict[str, SequenceState] = {}

    def arrive(call: Sequence[tuple[Request, int]]) -> None:
        requests = [
            engine_request_of(request, tokens, prompt, **(FRAGILE if request.id in fragile else {}))
            for request, tokens in call
        ]
        for consumer in submitted(batcher, requests):
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
    policy: str | Policy,
    jobs: Sequence[tuple[Request, int]],
    law: LatencyModel,
    *,
    servers: int = 1,
    deaths: Sequence[tuple[float, float]] = (),
    fragile: Collection[str] = (),
    step_tokens: int | None = None,
    prompt: Callable[[Request], Sequence[int]] = ones,
    **options: Any,
) -> tuple[list[Record], list[Record]]:
    """The records of a trace in the gateway on virtual time, and in the simulator; cancellations
    and switches are `options`. `step_tokens`: of an engine that computes long prompts in parts.
    """
    parsed = parse_policy(policy) if isinstance(policy, str) else policy
    bounds = dict[str, int]()
    if step_tokens is not None:
        bounds = {"max_num_batched_tokens": step_tokens, "enable_chunked_prefill": 1}
        bounds["max_num_seqs"] = min(64, step_tokens)
    of_engine = {"servers": servers, "seed": 3, "deaths": deaths, "fragile": fragile}
    live = run_virtual(replay(parsed, jobs, law, prompt=prompt, **of_engine, **bounds, **options))
    children = np.random.SeedSequence(3).spawn(servers + 1)[1:]  # the first draws lengths
    simulated = simulate_trace(
        parsed,
        [Job(request, tokens, request.id not in fragile) for request, tokens in jobs],
        SimulatedEngine(
            law,
            max_batch_size=64,
            max_prompt_tokens=bounds.get("max_num_batched_tokens", 2**31),
            step_tokens=or_unbounded(step_tokens),
            deaths=deaths,
        ),
        [np.random.default_rng(child) for child in children],
        **options,
    )
    return live, simulated
