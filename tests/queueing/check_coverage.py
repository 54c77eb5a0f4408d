"""Does the interval of the check cover zero where the law is right, whatever arrives?

    python -m tests.queueing.check_coverage --windows 400

The gateway's batcher and the emulated engine on virtual time: windows of 200 to 5,000 requests of
six policies at loads 0.3 to 1.3. Arrivals are Poisson, in bursts, of clients that wait for their
answers (closed), admitted up to a bound of the queue, or go on over a switch of the policy.

And is the cause named where something is wrong: an engine that becomes 15 % slower, that follows
another law, that stands still now and then, whose memory is too small, of which one of two servers
is slower?
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kendall.policies import Request, parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.window import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import draw_trace
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from tests.queueing.estimation_windows import snapshot_of_run, window_of
from tests.server.autopiloted import Fed
from tests.server.harness import Immediate, engine_request_of, submitted
from tests.server.stalled_runs import clocks, on_clock
from tests.virtual_time import run_virtual

POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
)
LOADS = (0.3, 0.5, 0.7, 0.9, 1.1, 1.3)
KINDS = ("poisson", "bursts", "closed", "admitted", "switched")
LAW = LatencyModel(k1=0.002, k2=0.004, k3=0.0003, k4=0.006, cv=0.15)
LENGTHS = parse_distribution("geometric:mean=12")
MOST, LONGEST = 16, 256  # requests at once, tokens
LEAST_WINDOW, LARGEST_WINDOW = 200, 5_000  # requests
QUEUED = 25  # requests that may wait, where calls are admitted
BEFORE = 0.4  # of the requests of a window come before the switch


@dataclass(frozen=True, slots=True)
class Window:
    """What is asked of one run."""

    policy: str
    load: float
    kind: str
    requests: int
    seed: int

    @property
    def rate(self) -> float:
        """Calls per second."""
        return self.load * capacity(self.policy)


def capacity(policy: str) -> float:
    return Queue.read(parse_policy(policy), LENGTHS, LAW, max_num_seqs=MOST).largest_stable_rate


def windows(count: int, seed: int = 0) -> Iterator[Window]:
    """Every policy, load and kind alike often."""
    rng = np.random.default_rng(seed)
    every = [(p, load, kind) for kind in KINDS for p in POLICIES for load in LOADS]
    for number in range(count):
        if number % len(every) == 0:
            rng.shuffle(every)
        policy, load, kind = every[number % len(every)]
        size = LEAST_WINDOW * (LARGEST_WINDOW / LEAST_WINDOW) ** rng.uniform()
        yield Window(str(policy), float(load), str(kind), round(size), seed * 100_000 + number)


@dataclass
class Gateway:
    """The batcher on virtual time, and what it has seen."""

    window: Window
    batcher: Batcher
    fed: Fed
    rng: np.random.Generator
    number: int = 0

    def arrive(self) -> Immediate | None:
        """A call now; None where it is not admitted."""
        if self.window.kind == "admitted" and self.batcher.queue_length >= QUEUED:
            return None
        self.number += 1
        request = Request(
            id=str(self.number),
            arrived_at=asyncio.get_running_loop().time(),
            prompt_tokens=8,
            max_output_tokens=LONGEST,
        )
        tokens = min(LONGEST, int(LENGTHS.sample(self.rng, 1)[0]))
        (consumer,) = submitted(self.batcher, [engine_request_of(request, tokens)])
        return consumer

    async def serve(self) -> None:
        """All calls of the window."""
        if self.window.kind == "closed":
            await self._closed()
            return
        async for _ in self._gaps():
            self.arrive()
            if self.window.kind == "switched" and self.number == int(BEFORE * self.window.requests):
                self._switch()

    async def _gaps(self) -> AsyncIterator[int]:
        burst, until = False, 0.0
        loop, rate = asyncio.get_running_loop(), self.window.rate
        for number in range(self.window.requests):
            factor = 1.0
            if self.window.kind == "bursts":
                if loop.time() >= until:
                    burst = not burst
                    until = loop.time() + self.rng.exponential(20 / rate)
                factor = 1.7 if burst else 0.3
            await asyncio.sleep(self.rng.exponential(1 / (factor * rate)))
            yield number

    async def _closed(self) -> None:
        """Clients that wait for each answer and think for a while."""
        clients = MOST + math.ceil(10 * self.window.load)
        think = clients / self.window.rate
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        async def client() -> None:
            while not ended.done():
                await asyncio.sleep(self.rng.exponential(think))
                if self.number >= self.window.requests:
                    if not ended.done():
                        ended.set_result(None)
                    return
                consumer = self.arrive()
                assert consumer is not None
                done = loop.create_future()
                consumer.on_release = released(consumer, done)  # type: ignore[method-assign]
                await done

        def released(consumer: Immediate, done: asyncio.Future[None]) -> Callable[[], None]:
            def release() -> None:
                Immediate.on_release(consumer)
                done.set_result(None)

            return release

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        await ended
        for task in tasks:
            task.cancel()

    def _switch(self) -> None:
        epoch = self.batcher.switch(parse_policy(self.window.policy))
        self.fed.window.begin_epoch(epoch, asyncio.get_running_loop().time())


def seen(window: Window) -> Snapshot:
    """The window as the live model has it."""

    async def main() -> Snapshot:
        engine = EmulatedEngine(
            LAW, seed=window.seed, max_num_seqs=MOST, max_model_len=LONGEST + 16
        )
        fed = Fed()
        first = "dynamic" if window.kind == "switched" else window.policy
        batcher = Batcher(engine, await engine.start(), parse_policy(first), [fed])
        gateway = Gateway(window, batcher, fed, np.random.default_rng(window.seed))
        await gateway.serve()
        return fed.window.snapshot(
            batcher.policy_text,
            asyncio.get_running_loop().time(),
            in_service=fed.in_service(),
            waiting=batcher.queue_length,
        )

    return run_virtual(main())


def stepped(policy: str, seed: int) -> Assessment:
    """From the middle of the window on 15 % slower."""
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=MOST)
    trace = draw_trace(model, 0.6 * model.largest_stable_rate, WRONG, np.random.SeedSequence(seed))
    half = float(np.median(trace.arrived_at))
    wall, machine = np.array([0.0, half, half + 1e6]), np.array([0.0, half, half + 1e6 / SLOWER])
    return _assessed(snapshot_of_run(on_clock(model, trace, wall, machine), model))


def of_another_shape(policy: str, seed: int) -> Assessment:
    """Each sequence more takes as long as the first, where the law has it nearly for nothing."""
    other = LatencyModel(k1=0.02, k2=0.001, k3=0.003, k4=0.0001, cv=LAW.cv)
    model = Queue.read(policy, LENGTHS, other, max_num_seqs=MOST)
    return _assessed(window_of(model, 0.7, WRONG, seed))


def stalling(policy: str, seed: int) -> Assessment:
    """Still for the time of some batches, 4 % of the time, in a run that has a stall."""
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=MOST)
    trace = draw_trace(model, 0.6 * model.largest_stable_rate, WRONG, np.random.SeedSequence(seed))
    until, rng = float(trace.arrived_at[-1]), np.random.default_rng(seed)
    wall, machine = clocks(until, rng, 0.04, 1.0)
    while wall[2] > until:  # the first one ends later
        wall, machine = clocks(until, rng, 0.04, 1.0)
    return _assessed(snapshot_of_run(on_clock(model, trace, wall, machine), model))


def short_of_memory(policy: str, seed: int) -> Assessment:
    """For half of the slots."""
    model = Queue.read(
        policy,
        LENGTHS.clip(LONGEST),
        LAW,
        max_num_seqs=MOST,
        prompt_tokens="deterministic:value=8",
        max_context_tokens=4 * (LONGEST + 8),
    )
    return _assessed(window_of(model, 0.8, WRONG, seed))


def of_unequal_servers(policy: str, seed: int) -> Assessment:
    """One of two is 1.4 times as slow."""
    speeds = (1.0, 1.4)
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=MOST, servers=2, server_speeds=speeds)
    return _assessed(window_of(model, 0.6, WRONG, seed))


def _assessed(seen: Snapshot) -> Assessment:
    """With the law as calibrated."""
    limits = QueueLimits(
        max_output_tokens=LONGEST, servers=seen.servers, engine=EngineBounds(max_num_seqs=MOST)
    )
    return assess(seen, LAW, limits)


BATCHED = ("single", "dynamic", "capped:max_batch_size=8", "elastic:max_batch_size=8")
CONTINUOUS = ("continuous:max_batch_size=8",)
Wrong = Callable[[str, int], Assessment]
CAUSES: dict[str, tuple[Wrong, tuple[str, ...]]] = {  # by the name of the assumption
    "constant_speed": (stepped, (*BATCHED, *CONTINUOUS)),
    "law_shape": (of_another_shape, BATCHED[1:]),
    "no_stalls": (stalling, (*BATCHED, *CONTINUOUS)),
    "enough_memory": (short_of_memory, CONTINUOUS),
    "equal_servers": (of_unequal_servers, (*BATCHED, *CONTINUOUS)),
}
WRONG = 1_500  # requests of such a window
SLOWER = 1.15


def named(cause: str, seeds: Sequence[int]) -> list[tuple[str, tuple[str, ...]]]:
    """Of each window its policy, and the assumptions that fail."""
    make, policies = CAUSES[cause]
    return [
        (
            policy,
            tuple(
                each.name for each in make(policy, seed).compared.assumptions if each.holds is False
            ),
        )
        for seed in seeds
        for policy in policies
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """Of a check with an interval."""

    window: Window
    off: float  # difference over the modelled mean
    half: float  # half width, likewise
    verdict: str

    @property
    def covers(self) -> bool:
        """Zero."""
        return abs(self.off) <= self.half + 1e-9


def found_of(window: Window) -> Found | None:
    """None where the check gives no interval: too few batches."""
    check = _assessed(seen(window)).compared.check
    if check is None or not math.isfinite(check.half_width) or not check.modelled:
        return None
    return Found(window, check.ratio - 1, check.relative_half_width, check.verdict)


def share(found: Sequence[Found]) -> str:
    if not found:
        return "-"
    covering = sum(each.covers for each in found)
    return f"{covering} of {len(found)} ({100 * covering / len(found):.1f} %)"


def told_of(found: Sequence[Found]) -> Iterator[str]:
    """How many of them cover zero, by what they are and by how narrow they are."""
    yield f"all: {share(found)}"
    for name in ("policy", "load", "kind"):
        for value in sorted({getattr(each.window, name) for each in found}):
            part = [each for each in found if getattr(each.window, name) == value]
            yield f"{name} {value}: {share(part)}"
    for number, part in enumerate(tenths(found), start=1):
        narrow, wide = part[0].half, part[-1].half
        yield f"tenth {number}, +-{100 * narrow:.1f} to {100 * wide:.1f} %: {share(part)}"
    for each in found:
        if not each.covers:
            yield f"{each.window}: {100 * each.off:+.1f} +- {100 * each.half:.1f} %"
    off = 100 * np.mean([each.off for each in found])
    accused = sum(each.verdict == "disagree" for each in found)
    yield f"accused: {accused}; mean deviation {off:+.2f} %"


def tenths(found: Sequence[Found]) -> list[list[Found]]:
    """By the width of their intervals."""
    order = sorted(found, key=lambda each: each.half)
    parts = np.array_split(np.arange(len(order)), min(10, len(order)))
    return [[order[at] for at in part] for part in parts]


def told_of_causes(seeds: Sequence[int]) -> Iterator[str]:
    """Where something is wrong."""
    for cause in CAUSES:
        found = named(cause, seeds)
        others = [f"{policy} {fails}" for policy, fails in found if cause not in fails]
        yield f"wrong {cause}: named in {len(found) - len(others)} of {len(found)} {others or ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    every = list(map(found_of, windows(asked.windows, asked.seed)))
    found = [each for each in every if each is not None]
    lines = (
        f"{len(every)} windows, {len(every) - len(found)} without an interval; zero is covered in",
        *told_of(found),
        *told_of_causes(range(asked.seed, asked.seed + 8)),
    )
    print("\n".join(lines))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
