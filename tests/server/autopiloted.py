"""A gateway core on virtual time with an autopilot: does what the gateway's own driver does, and
keeps what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kendall.policies import Request, SpecError, parse_policy
from kendall.queueing.choosing.autopilot.assessed_window import assessed_window
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.control.assess import assess
from kendall.queueing.control.long_run import LongRun
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import Batch, SequenceState
from tests.server.harness import Collector, engine_request_of, submitted
from tests.virtual_time import run_virtual

LONGEST = 2048  # tokens: the engine's context


class Fed(Collector):
    """An observer that feeds the window, and knows who is in service."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(epoch_at=0.0)
        self.running: dict[str, SequenceState] = {}

    def on_arrival(self, sequence: SequenceState) -> None:
        self.window.on_arrival(sequence.engine_request.request.arrived_at)

    def on_dispatch(self, batch: Batch) -> None:
        self.running.update((sequence.id, sequence) for sequence in batch.sequences)

    def on_record(self, record: Record) -> None:
        self.running.pop(record.request_id, None)
        self.window.on_record(record)

    def in_service(self) -> tuple[tuple[float, int], ...]:
        """Dispatch and tokens so far of those whose own end has not come."""
        return tuple(
            (sequence.at.dispatched, sequence.stop_detector.output_tokens)
            for sequence in self.running.values()
            if sequence.at.dispatched is not None and sequence.stop_detector.finish_reason is None
        )


@dataclass
class Run:
    """What happened: every decision, and the settings in force from their instants on."""

    decisions: list[Decision] = field(default_factory=list)
    in_force: list[tuple[float, Setting]] = field(default_factory=list)

    def at(self, instant: float) -> Setting:
        """What was in force then."""
        return [setting for since, setting in self.in_force if since <= instant][-1]


@dataclass
class Driver:
    """Looks every `interval` seconds, asks, switches."""

    autopilot: Autopilot
    shape: LatencyModel
    batcher: Batcher
    fed: Fed
    max_num_seqs: int
    limit: int | None = None
    interval: float = 5.0
    run: Run = field(default_factory=Run)
    known: LongRun | None = None
    waited: int = 0

    @property
    def setting(self) -> Setting:
        return Setting(policy=self.batcher.policy_text, max_output_tokens=self.limit)

    async def drive(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        self.run.in_force.append((loop.time(), self.setting))
        while loop.time() + self.interval <= until:
            await asyncio.sleep(self.interval)
            decision = self.decide(loop.time())
            if decision is None:
                continue
            self.run.decisions.append(decision)
            if decision.acts:
                self.limit = decision.after.max_output_tokens
                self.waited = self.batcher.queue_length
                epoch = self.batcher.switch(parse_policy(decision.after.policy))
                self.fed.window.begin_epoch(epoch, loop.time())
                self.run.in_force.append((loop.time(), self.setting))

    def decide(self, now: float) -> Decision | None:
        waiting = self.batcher.queue_length
        seen = self.fed.window.snapshot(
            self.batcher.policy_text, now, in_service=self.fed.in_service(), waiting=waiting
        )
        limits = QueueLimits(
            max_output_tokens=self.limit, engine=EngineBounds(max_num_seqs=self.max_num_seqs)
        )
        try:
            found = assess(
                seen,
                self.shape,
                limits,
                known=self.known,
                waiting_before=self.waited,
            )
            self.known = found.long_run
        except SpecError:
            found = None
        return self.autopilot.decide(
            assessed_window(
                seen,
                self.shape,
                self.setting,
                limits,
                None if found is None else found.estimates,
                assumptions=() if found is None else found.compared.assumptions,
                longest=LONGEST,
            )
        )


def steered(
    autopilot: Autopilot,
    start: Setting,
    rates: Sequence[tuple[float, float]],
    lengths: TokenDistribution,
    law: LatencyModel,
    *,
    shape: LatencyModel | None = None,
    max_num_seqs: int = 64,
    seed: int = 0,
    interval: float = 5.0,
) -> Run:
    """Poisson arrivals at each (seconds, rate) in turn; returns what the autopilot did. `shape`:
    what it believes of the law.
    """

    async def main() -> Run:
        engine = EmulatedEngine(
            law,
            seed=seed,
            max_num_seqs=max_num_seqs,
            max_model_len=LONGEST + 16,
            kv_cache_tokens=2**30,
        )
        fed = Fed()
        batcher = Batcher(engine, await engine.start(), parse_policy(start.policy), [fed])
        driver = Driver(
            autopilot, shape or law, batcher, fed, max_num_seqs, start.max_output_tokens, interval
        )
        feeding = asyncio.create_task(feed(driver))
        await driver.drive(sum(seconds for seconds, _ in rates))
        feeding.cancel()
        return driver.run

    async def feed(driver: Driver) -> None:
        rng = np.random.default_rng(seed)
        loop, end, number = asyncio.get_running_loop(), 0.0, 0
        for seconds, rate in rates:
            begin, end = end, end + seconds
            for at in begin + np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds))):
                await asyncio.sleep(float(at) - loop.time())
                arrive(
                    driver, str(number := number + 1), int(lengths.sample(rng, 1)[0]), loop.time()
                )

    def arrive(driver: Driver, name: str, tokens: int, now: float) -> None:
        limit = LONGEST if driver.limit is None else driver.limit
        request = Request(id=name, arrived_at=now, prompt_tokens=8, max_output_tokens=limit)
        submitted(driver.batcher, [engine_request_of(request, tokens)])

    return run_virtual(main())
