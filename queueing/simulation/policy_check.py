"""Whether a policy keeps its contracts (policies.contract) in random states, and serves a simulated
run to its end.

The states are the same for every policy: up to ten requests wait, before up to three servers, each
empty or at work, under tight or loose bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kendall.policies.contract import CONTRACTS, checked
from kendall.policies.core import Policy, QueueState, Request, Running, Server, Waiting
from kendall.policies.text import SpecError, counted
from kendall.queueing.errors import PredictionError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

REQUESTS = 500  # of the simulated run
RUN = "a simulated run completes each request once, and the same run twice"
LAW = LatencyModel(k1=0.001, k2=0.02, k3=0.0002, k4=0.01)
LARGEST = 16  # batch of the simulated engine
TIGHT = 0.4  # share of the bounds that are
FLOWS = ("", "a", "b")
CONTRACT_NAMES = tuple(contract.name for contract in CONTRACTS)


@dataclass(frozen=True, slots=True)
class Checked:
    """A contract: `fault` in some state, or None; `note`: where it was not checked, and why."""

    contract: str
    fault: str | None = None
    note: str | None = None


def check_policy(policy: Policy, *, states: int, seed: int = 0) -> Iterator[Checked]:
    """Each contract with the first state that breaks it."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()  # of the states in which a contract could be checked
    for state, now in random_states(states, seed):
        found = checked(policy, state, now)
        counts.update(found.keys())
        for name, fault in found.items():
            if fault is not None:
                first.setdefault(name, f"{fault} ({_described(state, now)})")
    for name in CONTRACT_NAMES:
        fault = first.get(name)
        note = None if fault is not None else not_checked(counts[name], states)
        yield Checked(name, fault, note)
    if first:
        yield Checked(RUN, note="not checked, as another contract is broken")
    else:
        yield _run_checked(policy, seed)


def not_checked(count: int, states: int) -> str | None:
    if count == states:
        return None
    where = f"in {states - count:,} of the {counted(states, 'state')}" if count else "in any state"
    return f"not checked {where}, as another contract is broken there"


def random_states(count: int, seed: int) -> Iterator[tuple[QueueState, float]]:
    """So many states, each with an instant."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        now = float(rng.uniform(0, 100))
        waiting = [
            Waiting(request, int(rng.integers(0, 51)) if rng.random() < TIGHT else 0)
            for request in _requests(rng, f"{number}-w", int(rng.integers(0, 11)), now)
        ]
        servers = [_server(rng, number, each, now) for each in range(int(rng.integers(0, 4)))]
        closing = bool(rng.random() < TIGHT)
        virtual_tokens = {flow: 1000 * now % (place + 7) for place, flow in enumerate(FLOWS)}
        yield QueueState(waiting, servers, {}, closing, virtual_tokens), now


def _requests(rng: np.random.Generator, name: str, count: int, now: float) -> list[Request]:
    arrived = np.sort(rng.uniform(0, now, count))
    return [
        Request(
            id=f"{name}{place}",
            arrived_at=float(at),
            prompt_tokens=int(rng.integers(1, 501)),
            max_output_tokens=int(rng.integers(1, 501)),
            predicted_output_tokens=float(rng.uniform(1, 500)) if rng.random() < TIGHT else None,
            priority=int(rng.integers(-5, 6)) if rng.random() < TIGHT else 0,
            deadline=now + float(rng.uniform(0, 100)) if rng.random() < TIGHT else math.inf,
            flow=FLOWS[place % len(FLOWS)],
        )
        for place, at in enumerate(arrived)
    ]


def _server(rng: np.random.Generator, number: int, place: int, now: float) -> Server:
    count = int(rng.integers(1, 5)) if rng.random() < TIGHT else 0
    in_service = [
        Running(request, request.arrived_at, int(rng.integers(0, 51)), bool(rng.random() < 0.5))
        for request in _requests(rng, f"{number}-s{place}-", count, now)
    ]
    loose = Server(7 * place + 1, in_service)  # an id is no place
    tight = (int(rng.integers(1, 13)), int(rng.integers(1, 2001)), int(rng.integers(1, 4001)))
    bounds = (loose.max_batch_size, loose.max_prompt_tokens, loose.max_context_tokens)
    chosen = [
        own if rng.random() < TIGHT else free for own, free in zip(tight, bounds, strict=True)
    ]
    return Server(loose.id, in_service, chosen[0], chosen[1], chosen[2])


def _described(state: QueueState, now: float) -> str:
    busy = [len(server.in_service) for server in state.servers]
    return (
        f"in a state with {len(state.waiting)} waiting, {busy} in service on its servers, "
        f"closing={state.closing}, now={now:.3f}"
    )


def _run_checked(policy: Policy, seed: int) -> Checked:
    try:
        first, second = _run(policy, seed), _run(policy, seed)
    except PredictionError as error:
        if "preempts" in str(error):
            return Checked(RUN, note=f"not checked, as {error}")
        return Checked(RUN, str(error))
    except SpecError as error:
        return Checked(RUN, str(error))
    completed = {record.request_id for record in first if record.outcome == "completed"}
    if len(first) != REQUESTS or len(completed) != REQUESTS:
        return Checked(RUN, f"got {counted(len(completed), 'request')} of {REQUESTS} completed")
    if first != second:
        return Checked(RUN, "got two different runs of the same arrivals")
    return Checked(RUN)


def _run(policy: Policy, seed: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(0.2, REQUESTS))
    limits = rng.integers(1, 65, REQUESTS)
    jobs = [
        Job(
            Request(
                id=str(place),
                arrived_at=float(at),
                prompt_tokens=int(rng.integers(1, 100)),
                max_output_tokens=int(limit),
                priority=int(rng.integers(-2, 3)),
                flow=FLOWS[place % len(FLOWS)],
            ),
            int(rng.integers(1, limit + 1)),
        )
        for place, (at, limit) in enumerate(zip(arrived, limits, strict=True))
    ]
    return simulate_trace(policy, jobs, SimulatedEngine(LAW, LARGEST), [rng])
