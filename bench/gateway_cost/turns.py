"""Servers that share one core and take turns under a closed loop, in slices so short that what else
runs on the machine meets all of them alike.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np

from bench.gateway_cost.servers import Server, used
from bench.gateway_cost.wire import Load, Pool

CONNECTIONS = 32
WARM_UP = 1.0  # seconds, before the slices of a kind
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counted:
    """The slices of one server and kind of request in one round. `cpu` is the processor time by
    which its rate is reckoned: of the process that speaks HTTP, or of all.
    """

    server: str
    kind: str  # "whole": requests are counted; "stream": tokens
    count: int
    seconds: float
    cpu: float
    cpu_all: float
    sender_cpu: float

    @property
    def by_cpu(self) -> float:
        """Requests or tokens a processor second."""
        return self.count / self.cpu

    @property
    def by_clock(self) -> float:
        """Requests or tokens a second of the clock."""
        return self.count / self.seconds

    @property
    def share(self) -> float:
        """The share of one core that the server had."""
        return self.cpu / self.seconds

    def line(self) -> str:
        return (
            f"  {self.server:<10}{self.kind:<8}{self.by_cpu:9.0f} by processor second "
            f"{self.by_clock:9.0f} by clock   share {self.share:4.2f}, sender "
            f"{self.sender_cpu / self.seconds:4.2f}"
        )


def together(slices: Sequence[Counted]) -> Counted:
    """The slices of one server and kind as one."""
    names = [field.name for field in fields(Counted) if field.name not in ("server", "kind")]
    sums = {name: sum(getattr(part, name) for part in slices) for name in names}
    return replace(slices[0], **sums)


class Cores:
    """The first core for the servers that are compared, another one for what loads them. As a
    context manager it gives the process all of them back.
    """

    def __init__(self) -> None:
        self._every = sorted(os.sched_getaffinity(0))

    def for_servers(self) -> None:
        """Pin this process, and so the servers that it starts next, to the first core."""
        os.sched_setaffinity(0, self._every[:1])

    def for_sender(self) -> None:
        """Pin this process to another core."""
        os.sched_setaffinity(0, self._every[1:2] or self._every)

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._every)


def shuffled(some: Sequence[T], rng: np.random.Generator) -> list[T]:
    return [some[place] for place in rng.permutation(len(some)).tolist()]


@contextmanager
def sharing_a_core(
    launches: Sequence[AbstractContextManager[Server]], cores: Cores, rng: np.random.Generator
) -> Iterator[list[Server]]:
    """Servers that are started in random order: which one starts first is slower, by 7 % between
    two gateways of the same code.
    """
    with ExitStack() as stack:
        cores.for_servers()
        servers = [stack.enter_context(launch) for launch in shuffled(launches, rng)]
        cores.for_sender()
        yield servers


def closed_loop(
    server: Server, pool: Pool, request: bytes, seconds: float
) -> tuple[Load, float, float]:
    """One slice and the processor seconds of it: of the process that speaks HTTP, and of all. What
    is in flight at the end is waited for and counted, as its processor time is.
    """
    before = server.cpu()
    load = pool.keep_asking(itertools.repeat(request), seconds)
    return load, *used(before, server.cpu())


def in_turns(
    servers: Sequence[Server],
    kinds: Sequence[str],
    ask: Callable[[Server, Pool, str, float], Counted],
    *,
    slices: int,
    seconds: float,
    rng: np.random.Generator,
) -> Iterator[Counted]:
    """Each kind of request in turn; `ask` takes one slice of so many seconds."""
    with ExitStack() as stack:
        pools = {
            server.name: stack.enter_context(Pool(server.port, CONNECTIONS)) for server in servers
        }
        for kind in kinds:
            for server in servers:
                ask(server, pools[server.name], kind, WARM_UP)
            counted: dict[str, list[Counted]] = {server.name: [] for server in servers}
            turns = (shuffled(servers, rng) for _ in range(slices))
            for server in itertools.chain.from_iterable(turns):
                counted[server.name].append(ask(server, pools[server.name], kind, seconds))
            yield from map(together, counted.values())
