"""Several servers under an order with predictions: an approximation by one server.

    W(c) = W_fcfs(c) W(1) / W_fcfs(1)

W mean time outside of service, at the same load per server; W_fcfs(c) of M/G/c (`mgc`), W_fcfs(1)
of Pollaczek and Khinchine. Sojourn time: W(c) + E[S]. Exact for c = 1 and for first come first
served as far as `mgc` is. Conditions: predictions cost no server time, Poisson arrivals.

The ratio has not been checked here against simulation with several servers, so `doubt` says so for
every order but first come first served.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.text import SpecError
from queueing.latency.service_time import ServiceTime
from queueing.models.mgc import solve_servers
from queueing.models.soap.orders import Fifo, Order
from queueing.models.soap.predictors import Predictor
from queueing.models.soap.queue import EXACT, solve_order
from queueing.models.soap.sizes import Grid, SizeLaw

_CELLS = 400
UNCHECKED = "the ratio to first come first served is taken from one server, unchecked for several"


@dataclass(frozen=True)
class SeveralOrdered:
    """Seconds; `doubt`: why the approximation may be off by more than 10 %, or None."""

    sojourn: float
    delay: float
    load: float
    doubt: str | None


def solve_on_servers(
    order: Order,
    sizes: SizeLaw,
    arrival_rate: float,
    servers: int,
    predictor: Predictor = EXACT,
) -> SeveralOrdered:
    """`arrival_rate` jobs/s on `servers` equal servers. Raises UnstableQueueError, SpecError."""
    if servers < 1:
        raise SpecError(f"got {servers} servers; expected at least 1")
    one = solve_order(order, sizes, arrival_rate / servers, predictor)
    if servers == 1:
        return SeveralOrdered(one.sojourn, one.delay, one.load, None)
    if one.service > sizes.mean * (1 + 1e-9):
        raise SpecError("got predictions that take time on the server; expected one server")
    first_come = solve_order(Fifo(), sizes, arrival_rate / servers)
    atoms = sizes.cells(Grid(_CELLS))
    many = solve_servers(ServiceTime(atoms.sizes, atoms.weights), arrival_rate, servers)
    delay = float(many.delay.mean or 0.0) * one.delay / first_come.delay
    doubt = None if isinstance(order, Fifo) else UNCHECKED
    return SeveralOrdered(delay + sizes.mean, delay, one.load, doubt)
