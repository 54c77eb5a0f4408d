"""Queue states for the tests of policies: a short way to write one by hand, and a strategy for
all of them.
"""

from __future__ import annotations

import math

from hypothesis import strategies as st

from kendall.policies import (
    Capped,
    Continuous,
    Dynamic,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    Request,
    Running,
    Server,
    Single,
    Waiting,
)
from kendall.policies.routes import ROUTES


def waiting(
    *ids: str, arrived_at: float = 0.0, prompt: int = 10, limit: int = 20, so_far: int = 0
) -> list[Waiting]:
    """Requests in the queue, alike but for their ids; they arrive one second apart."""
    return [
        Waiting(
            Request(
                id=id_, arrived_at=arrived_at + i, prompt_tokens=prompt, max_output_tokens=limit
            ),
            so_far,
        )
        for i, id_ in enumerate(ids)
    ]


def calls(**sequences: int) -> list[Waiting]:
    """Calls in the queue, by id the number of their sequences; they arrive one second apart."""
    return [
        Waiting(item.request._replace(sequences=sequences[item.request.id]))
        for item in waiting(*sequences)
    ]


def running(*ids: str, prompt: int = 10, limit: int = 20) -> list[Running]:
    """Requests in service."""
    return [
        Running(item.request, started_at=0.0) for item in waiting(*ids, prompt=prompt, limit=limit)
    ]


sizes = st.integers(1, 12)
seconds = st.floats(0.0, 100.0)
flows = st.sampled_from(["", "a", "b"])
waits = st.floats(1e-9, 1e9) | st.just(math.inf)

routes = st.sampled_from(ROUTES)
work_conserving: dict[str, st.SearchStrategy[Policy]] = {
    "single": st.builds(Single, route=routes),
    "dynamic": st.builds(Dynamic, route=routes),
    "capped": st.builds(Capped, max_batch_size=sizes, route=routes),
    "elastic": st.builds(Elastic, max_batch_size=st.none() | sizes, route=routes),
    "continuous": st.builds(Continuous, max_batch_size=st.none() | sizes, route=routes),
}
by_name = work_conserving | {
    "fixed": st.builds(Fixed, batch_size=sizes, max_wait=waits, route=routes)
}
policies = st.one_of(*by_name.values())


@st.composite
def states(draw: st.DrawFn) -> QueueState:
    """A queue, oldest first, before up to three servers, each empty or at work, under tight or
    loose bounds.
    """
    fresh = iter(range(10**6))
    request = st.builds(
        lambda arrived_at, prompt, limit, flow, sequences: Request(
            id=f"r{next(fresh)}",
            arrived_at=arrived_at,
            prompt_tokens=prompt,
            max_output_tokens=limit,
            flow=flow,
            sequences=sequences,
        ),
        seconds,
        st.integers(1, 500),
        st.integers(1, 500),
        flows,
        st.just(1) | st.integers(1, 5),
    )
    queue = draw(st.lists(st.builds(Waiting, request, st.integers(0, 50)), max_size=10))
    queue.sort(key=lambda item: item.request.arrived_at)
    in_service = st.just([]) | st.lists(st.builds(Running, request, seconds), max_size=4)
    server = st.builds(
        Server,
        st.integers(0, 1000),
        in_service,
        max_batch_size=st.just(2**31) | sizes,
        max_prompt_tokens=st.just(2**31) | st.integers(1, 2000),
        max_context_tokens=st.just(2**62) | st.integers(1, 4000),
    )
    servers = draw(st.lists(server, max_size=3, unique_by=lambda item: item.id))
    virtual_tokens = draw(st.dictionaries(flows, st.floats(0.0, 1e4)))
    known = st.sampled_from([server.id for server in servers] or [0])
    asked = st.sampled_from([each.request.id for each in queue] or ["none"])
    matches = draw(st.dictionaries(asked, st.dictionaries(known, st.integers(1, 9)), max_size=3))
    return QueueState(queue, servers, {}, draw(st.booleans()), virtual_tokens, matches)
