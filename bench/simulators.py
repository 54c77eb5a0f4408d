"""How fast is the compiled simulator? The same queues by SimPy, by Ciw and by us: one thread, one
run, sampling included.

Six queues at load 0.8: M/M/1 and M/G/1 first come, first served, padded batches of at most 8 and at
most 64, and M/G/1 under two orders by length, exactly known: shortest first, not interrupted, and
shortest remaining first, preemptive. SimPy is written twice. `textbook` is how its documentation
writes it: a process per customer that requests a `Resource`, by length a `PriorityResource`; for
batches, which it has no word for, a server that draws on a `Store`. `lean` is the fastest that we
could write: a queue of our own, one process for the arrivals, one for the server, an event only
where the server sleeps. No resource of SimPy compares remaining times, so the preemptive order has
the lean program only. All numbers that SimPy needs are drawn by NumPy in one block. Ciw has no
batch service and no order by length, so it serves the first two. Ours is `simulate_run`, or the
kernels of queueing.simulation.orders: the draws and the whole sample path; all return each
request's queueing delay (time outside of service).

Rounds are interleaved. The rate is requests per CPU second of the process (others may use the
machine), the median of the rounds; ratios are the medians of those within a round. Compilation is
over before the first. The mean delays must agree within 4 standard errors, else the bench fails;
it fails too where ours serves fewer requests per CPU second than `LEAST_RATE`.

    pip install simpy ciw
    .venv/bin/python bench/simulators.py
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.machine import hardware, versions
from kendall.queueing.models.soap.orders import SHORTEST_FIRST, SHORTEST_REMAINING, Order
from kendall.queueing.predictors.laws import ExactPrediction
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.queueing.simulation.fast import sample_tokens
from papers.sample_paths import sojourns

LOAD = 0.8
OURS_PER_ROUND = 20  # replications, so that a round of ours can be timed
LEAST_RATIO = {"fcfs": 100, "batch": 70}  # against the textbook program
LEAST_RATE = {"spjf": 5e6, "sprpt": 3e6}  # requests per CPU second
ORDERS: dict[str, Order] = {"spjf": SHORTEST_FIRST, "sprpt": SHORTEST_REMAINING}
TOKENS = parse_distribution("lognormal:mu=7,sigma=0.7", 3000)
BATCH_LAW = LatencyModel(k1=1e-3, k2=3e-3, k3=4.09e-4, k4=2.05e-3)

Run = Callable[["Case", int, int], Vector]  # queue, requests, seed -> queueing delays


@dataclass(frozen=True, eq=False)
class Case:
    """One model; `kind` says which programs can simulate it."""

    name: str
    kind: str
    model: Queue

    @property
    def rate(self) -> float:
        """Arrivals/s."""
        return LOAD * self.model.largest_stable_rate

    def draws(self, requests: int, seed: int) -> tuple[list[float], list[int], list[float]]:
        """Gaps, tokens and residuals for the other simulators."""
        rng, cv = np.random.default_rng(seed), self.model.engine.law.cv
        gaps = rng.exponential(1 / self.rate, requests).tolist()
        residuals = rng.gamma(cv**-2, cv**2, requests).tolist() if cv else [1.0] * requests
        return gaps, self.model.requests.output_tokens.sample(rng, requests).tolist(), residuals

    def sizes(self, requests: int, seed: int) -> tuple[list[float], list[float]]:
        """Gaps and service times."""
        gaps, tokens, _ = self.draws(requests, seed)
        law = self.model.engine.law
        return gaps, [law.setup(1) + law.step(1) * n for n in tokens]


def queues() -> list[Case]:
    exponential = Queue.read("single", "deterministic:value=1", LatencyModel(k4=1, cv=1))
    general = Queue.read("single", TOKENS, LatencyModel(k2=0.776, k4=0.022))
    batches = [
        Case(
            f"M/G^[1,{size}]/1",
            "batch",
            Queue.read(f"capped:max_batch_size={size}", TOKENS, BATCH_LAW),
        )
        for size in (8, 64)
    ]
    ordered = [Case(f"M/G/1 {name}", name, general) for name in ORDERS]
    fcfs = [Case("M/M/1", "fcfs", exponential), Case("M/G/1", "fcfs", general)]
    return [*fcfs, *batches, *ordered]


def ours(queue: Case, requests: int, seed: int) -> Vector:
    return simulate_run(
        queue.model, queue.rate, requests, np.random.SeedSequence(seed)
    ).queueing_delay


def ours_in_order(queue: Case, requests: int, seed: int) -> Vector:
    """Shortest first or shortest remaining first, lengths known."""
    rng, order, law = np.random.default_rng(seed), ORDERS[queue.kind], queue.model.engine.law
    arrived_at = np.cumsum(rng.exponential(1 / queue.rate, requests))
    sizes = law.setup(1) + law.step(1) * sample_tokens(
        queue.model.requests.output_tokens, rng, requests
    )
    drawn = order.draw(rng, sizes, ExactPrediction())
    return sojourns(order, arrived_at, drawn) - sizes


def simpy_resource(queue: Case, requests: int, seed: int) -> Vector:
    """A process per customer."""
    import simpy

    gaps, tokens, residuals = queue.draws(requests, seed)
    law = queue.model.engine.law
    setup, step = law.setup(1), law.step(1)
    services = iter(
        [residual * (setup + step * n) for n, residual in zip(tokens, residuals, strict=True)]
    )
    env = simpy.Environment()
    server, delays = simpy.Resource(env), []

    def customer() -> Iterator[simpy.Event]:
        arrived_at = env.now
        with server.request() as turn:
            yield turn
            delays.append(env.now - arrived_at)
            yield env.timeout(next(services))

    def arrivals() -> Iterator[simpy.Event]:
        for gap in gaps:
            yield env.timeout(gap)
            env.process(customer())

    env.process(arrivals())
    env.run()
    return np.array(delays)


def simpy_store(queue: Case, requests: int, seed: int) -> Vector:
    """A server that sleeps on a Store and empties it up to the bound: one `get` a batch, the
    others without an event.
    """
    import simpy

    gaps, tokens, _ = queue.draws(requests, seed)
    law, bound = queue.model.engine.law, queue.model.bound
    assert bound is not None
    env = simpy.Environment()
    waiting, delays = simpy.Store(env), []

    def server() -> Iterator[simpy.Event]:
        while True:
            batch = [(yield waiting.get()), *waiting.items[: bound - 1]]
            del waiting.items[: bound - 1]
            now = env.now
            delays.extend([now - arrived_at for arrived_at, _ in batch])
            yield env.timeout(law.padded(len(batch), max([n for _, n in batch])))

    def arrivals() -> Iterator[simpy.Event]:
        for gap, n in zip(gaps, tokens, strict=True):
            yield env.timeout(gap)
            waiting.put((env.now, n))

    env.process(server())
    env.process(arrivals())
    env.run()
    return np.array(delays)


def simpy_lean(queue: Case, requests: int, seed: int) -> Vector:  # noqa: C901  # one program, as its author would write it
    """The fewest events: one an arrival, one a service, one where the server sleeps."""
    import simpy

    gaps, tokens, residuals = queue.draws(requests, seed)
    law, bound = queue.model.engine.law, queue.model.bound
    assert bound is not None
    k1, k2, k3, k4, noise = law.k1, law.k2, law.k3, law.k4, iter(residuals)
    env = simpy.Environment()
    timeout = env.timeout
    waiting: deque[tuple[float, int]] = deque()
    delays: list[float] = []
    sleeping: list[simpy.Event] = []

    def server() -> Iterator[simpy.Event]:
        while True:
            if not waiting:
                sleeping.append(env.event())
                yield sleeping[0]
            now, size, longest = env.now, min(len(waiting), bound), 0
            for _ in range(size):
                arrived_at, n = waiting.popleft()
                delays.append(now - arrived_at)
                if n > longest:  # max() costs a call
                    longest = n
            yield timeout(next(noise) * (k1 * size + k2 + (k3 * size + k4) * longest))

    def arrivals() -> Iterator[simpy.Event]:
        for gap, n in zip(gaps, tokens, strict=True):
            yield timeout(gap)
            waiting.append((env.now, n))
            if sleeping:
                sleeping.pop().succeed()

    env.process(server())
    env.process(arrivals())
    env.run()
    return np.array(delays)


def simpy_priority(queue: Case, requests: int, seed: int) -> Vector:
    """A process per customer, whose priority is its service time."""
    import simpy

    gaps, sizes = queue.sizes(requests, seed)
    env = simpy.Environment()
    server, delays = simpy.PriorityResource(env), []

    def customer(size: float) -> Iterator[simpy.Event]:
        arrived_at = env.now
        with server.request(priority=size) as turn:
            yield turn
            delays.append(env.now - arrived_at)
            yield env.timeout(size)

    def arrivals() -> Iterator[simpy.Event]:
        for gap, size in zip(gaps, sizes, strict=True):
            yield env.timeout(gap)
            env.process(customer(size))

    env.process(arrivals())
    env.run()
    return np.array(delays)


def simpy_heap(queue: Case, requests: int, seed: int) -> Vector:  # noqa: C901  # as simpy_lean
    """A heap by remaining service, and an event an arrival and a stint; a preemptive order
    interrupts the server where the new one is shorter.
    """
    import simpy

    gaps, sizes = queue.sizes(requests, seed)
    env, preemptive = simpy.Environment(), queue.kind == "sprpt"
    heap: list[tuple[float, int]] = []
    arrived_at, left = [0.0] * requests, [0.0] * requests
    serving, sleeping = [math.inf], []  # the end of the stint; the event of an idle server

    def server() -> Iterator[simpy.Event]:
        while True:
            if not heap:
                sleeping.append(env.event())
                yield sleeping[0]
            remaining, job = heapq.heappop(heap)
            serving[0] = env.now + remaining
            try:
                yield env.timeout(remaining)
                left[job] = env.now
            except simpy.Interrupt:
                heapq.heappush(heap, (serving[0] - env.now, job))
            serving[0] = math.inf

    def arrivals(process: simpy.Process) -> Iterator[simpy.Event]:
        for job, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
            yield env.timeout(gap)
            arrived_at[job] = env.now
            heapq.heappush(heap, (size, job))
            if sleeping:
                sleeping.pop().succeed()
            elif preemptive and math.isfinite(serving[0]) and size < serving[0] - env.now:
                process.interrupt()

    env.process(arrivals(env.process(server())))
    env.run()
    return np.asarray(np.array(left) - np.array(arrived_at) - np.array(sizes))


def ciw_network(queue: Case, requests: int, seed: int) -> Vector:
    """One node, one server; it draws its own numbers, as its users let it."""
    import ciw

    law, tokens = queue.model.engine.law, queue.model.requests.output_tokens

    class Service(ciw.dists.Distribution):  # type: ignore[misc]
        """a n + c, n drawn in blocks."""

        def __init__(self) -> None:
            self.times = iter(
                (
                    law.setup(1)
                    + law.step(1) * tokens.sample(np.random.default_rng(seed), requests + 1000)
                ).tolist()
            )

        def sample(self, t: float | None = None, ind: object = None) -> float:  # noqa: ARG002  # Ciw's own names
            return float(next(self.times))

    ciw.seed(seed)
    service = ciw.dists.Exponential(1 / law.k4) if law.cv else Service()
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(queue.rate)],
        service_distributions=[service],
        number_of_servers=[1],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(requests, method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda record: record.arrival_date)
    return np.array([record.waiting_time for record in records])


PROGRAMS: dict[str, dict[str, Run]] = {
    "fcfs": {
        "ours": ours,
        "SimPy, textbook": simpy_resource,
        "SimPy, lean": simpy_lean,
        "Ciw": ciw_network,
    },
    "batch": {"ours": ours, "SimPy, textbook": simpy_store, "SimPy, lean": simpy_lean},
    "spjf": {"ours": ours_in_order, "SimPy, textbook": simpy_priority, "SimPy, lean": simpy_heap},
    "sprpt": {"ours": ours_in_order, "SimPy, lean": simpy_heap},
}


@dataclass
class Measured:
    """One program on one queue, round by round."""

    rates: list[float] = field(default_factory=list)  # requests per CPU second
    means: list[float] = field(default_factory=list)  # queueing delay of each replication, seconds

    @property
    def rate(self) -> float:
        """The median of the rounds."""
        return float(np.median(self.rates))

    @property
    def mean(self) -> float:
        """Queueing delay, seconds."""
        return float(np.mean(self.means))

    @property
    def error(self) -> float:
        """Standard error of it, from the replications."""
        return float(np.std(self.means, ddof=1)) / math.sqrt(len(self.means))

    def ratio_to(self, other: Measured) -> float:
        """How many times faster, round by round, since the machine's speed drifts; the median."""
        return float(np.median(np.array(self.rates) / np.array(other.rates)))


class Comparison:
    """Each program's rates and means on one queue; the programs take turns, in random order."""

    def __init__(self, queue: Case, requests: int, rounds: int) -> None:
        programs = PROGRAMS[queue.kind]
        self.queue = queue
        self.measured = {name: Measured() for name in programs}
        self.ours = self.measured["ours"]
        programs["ours"](queue, requests, 0)  # compiles, or loads what was compiled before
        order = np.random.default_rng(1)
        for turn in range(rounds):
            for name in order.permutation(list(programs)).tolist():
                replications, spent = OURS_PER_ROUND if name == "ours" else 1, 0.0
                for part in range(replications):
                    began = time.process_time()
                    delays = programs[name](queue, requests, 1 + turn * OURS_PER_ROUND + part)
                    mean = float(delays.mean())
                    spent += time.process_time() - began
                    self.measured[name].means.append(mean)
                self.measured[name].rates.append(replications * requests / spent)

    def rows(self) -> Iterator[str]:
        for name, one in self.measured.items():
            ratio = "" if name == "ours" else f"{self.ours.ratio_to(one):.0f} x"
            spread = f"{min(one.rates) / 1e6:.3g} to {max(one.rates) / 1e6:.3g}"
            yield (
                f"| {self.queue.name} | {name} | {one.rate / 1e6:.3g} | {spread} | {ratio} "
                f"| {one.mean:.4g} ± {one.error:.1g} |"
            )

    def faults(self) -> Iterator[str]:
        """Simulators that do not give our mean delay or are too noisy to tell, and where ours is
        slower than promised.
        """
        ours, kind = self.ours, self.queue.kind
        for name, one in self.measured.items():
            apart, error = abs(one.mean - ours.mean), math.hypot(one.error, ours.error)
            if apart > 4 * error or one.error > 0.05 * one.mean:
                yield (
                    f"{self.queue.name}, {name}: mean delay {one.mean:.4g} +- {one.error:.2g} s, "
                    f"ours {ours.mean:.4g} s"
                )
        least = LEAST_RATE.get(kind, 0.0)
        if ours.rate < least:
            yield f"{self.queue.name}: {ours.rate:.3g} requests/s; expected at least {least:.3g}"
        if kind in LEAST_RATIO:
            ratio, wanted = ours.ratio_to(self.measured["SimPy, textbook"]), LEAST_RATIO[kind]
            if ratio < wanted:
                yield f"{self.queue.name}: {ratio:.0f} times SimPy; expected at least {wanted}"


def main() -> int:
    """Measure, print the table, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=100_000, help="per replication; the product's default"
    )
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    if any(importlib.util.find_spec(name) is None for name in ("simpy", "ciw")):
        print("this bench compares with SimPy and Ciw: pip install simpy ciw", file=sys.stderr)
        return 1
    print(
        json.dumps(
            {
                "requests": options.requests,
                "rounds": options.rounds,
                "hardware": hardware(),
                "versions": versions(("simpy", "ciw", "numpy", "numba")),
            }
        )
    )
    print(
        "| queue | simulator | 10^6 requests/s, median | rounds | ours against it | mean delay "
        "(s) |\n|---|---|--:|--:|--:|--:|"
    )
    faults: list[str] = []
    for queue in queues():
        comparison = Comparison(queue, options.requests, options.rounds)
        print("\n".join(comparison.rows()), flush=True)
        faults += comparison.faults()
    for fault in faults:
        print(fault, file=sys.stderr)
    return 3 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
