"""Probes: the law's shape measured one designed cell at a time while the gateway has nothing to do.

Only after `quiet` seconds without arrival or outcome, and in at most a stated share of idle time.
The engine is borrowed from the batcher: an arrival takes it back at once, the probe's sequences are
cancelled before the request is dispatched. What is left is the engine step in flight (it shows in
the request's service time, not in its delay), never more than one cell (`longest`, 250 ms). A probe
runs in a batcher without observers: it is in no metric, record, window or count.

A law in force is replaced only if two fits in a row say so, the second on measurements of its own:
a machine's slow moments last longer than a round of probes, and one fit would follow them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import numpy as np

from kendall.server.calibration.calibration import profile_of
from kendall.server.calibration.candidate_law import CandidateLaw, KnownLaw, weigh
from kendall.server.calibration.designed import (
    LONGEST_CELL,
    PROMPT_TOKENS,
    TOO_LONG,
    Cell,
    DesignedBatches,
    InterruptedCellError,
    design,
    usual_length,
)
from kendall.server.calibration.host import CalibrationHost
from kendall.server.calibration.probe_schedule import (
    ProbedCell,
    ProbedLoop,
    ProbeLimits,
    ProbeSchedule,
)
from kendall.server.calibration.turnaround import ClosedLoop
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.pools import end_at_once, serve_the_gateway

log = logging.getLogger("kendall.probes")
WARM = 4  # tokens of the unmeasured batch before each cell: the first steps after a rest are slower
LOOP_REQUESTS = 12
LOOP_LENGTHS = 4, 13  # short ones: the turnaround is a larger part of the time a slot is held
SOON = 1e-6  # seconds: what is nearer is now
NOTE = "measured in idle moments"


class IdleProbes:
    """Runs the probes of one gateway. `on_candidate` gets the law of every fit and whether it was
    taken; by then a law that was taken is in force, and an epoch under it has begun.
    """

    def __init__(
        self,
        gateway: CalibrationHost,
        limits: ProbeLimits | None = None,
        *,
        executor: Callable[[], Executor] | None = None,
        seed: int = 0,
        on_candidate: Callable[[CandidateLaw, bool], None] | None = None,
    ) -> None:
        self._gateway = gateway
        self._batcher = gateway.batcher
        self._limits = limits or ProbeLimits()
        self._executor = executor or niced_executor
        self._rng = np.random.default_rng(seed)
        self._on_candidate = on_candidate
        bounds = self._batcher.capabilities
        self._batches = DesignedBatches(
            gateway.engine, bounds, gateway.settings.supervision.stuck_timeout or LONGEST_CELL
        )
        lengths = tuple(int(length) for length in self._rng.integers(*LOOP_LENGTHS, LOOP_REQUESTS))
        loop = ClosedLoop(min(4, bounds.max_num_seqs), lengths, PROMPT_TOKENS)
        self.schedule = ProbeSchedule(
            design(bounds, max_output_tokens=gateway.limits.max_output_tokens or 64),
            loop,
            self._limits,
        )
        self._rested_at = gateway.now()
        self.candidate: CandidateLaw | None = None  # the last
        # the last candidate would replace the law in force: it is measured afresh
        self.suspected = False
        self.seconds = 0.0  # of the engine's time used so far
        self.measured = self.interrupted = 0

    async def run(self) -> None:
        """Probe whenever the gateway has been idle for long enough, until cancelled."""
        while True:
            wait = (
                max(self._batcher.moved_at + self._limits.quiet, self._rested_at)
                - self._gateway.now()
            )
            if wait > SOON:
                await asyncio.sleep(wait)
            elif not self._allowed():
                await asyncio.sleep(max(self._limits.quiet, 0.1))
            else:
                await self._turn()

    def state(self) -> dict[str, Any]:
        """For `/admin/state`: counts of probes, and the last candidate for a law."""
        candidate = self.candidate
        return {
            "measured": self.measured,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "rounds": self.schedule.rounds,
            "cells": len(self.schedule.admitted()),
            "suspected": self.suspected,
            "offer": None
            if candidate is None
            else {
                "law": str(candidate.fit.law),
                "verdict": candidate.verdict,
                "says": candidate.says,
                "doubts": list(candidate.doubts),
            },
        }

    def _allowed(self) -> bool:
        gateway = self._gateway
        return (
            gateway.lifecycle.ready
            and not gateway.lifecycle.draining
            and not gateway.latency.calibrating
            and self._batcher.idle
        )

    async def _turn(self) -> None:
        """Run one probe, plan the rest behind it, and fit the law at the end of a round."""
        probe = self.schedule.next(self._rng)
        began = self._gateway.now()
        if probe is None:
            log.info(
                "no idle probe: the smallest batch takes more than %.0f ms; the next attempt "
                "follows later",
                self._limits.longest * 1e3,
            )
            self.schedule.forget_smallest()
            self._rested_at = began + self._limits.retry
            return
        await self._run(probe)
        took = self._gateway.now() - began
        self.seconds += took
        self._rested_at = self._gateway.now() + self.schedule.rest(took)
        if self.schedule.is_due_for_fit:
            self.schedule.mark_fitted()
            await self._refit()

    async def _run(self, probe: ProbedCell | ProbedLoop) -> None:
        gateway = self._gateway
        self._batches.serve_on_one_of(self._batcher.servers_in_use)
        self._batcher.lease.acquire(self._batches.interrupt)
        try:
            await self._measure(probe)
        except InterruptedCellError:
            self.interrupted += 1
        except ApiError as error:
            log.warning("an idle probe failed: %s", error)
            if error.code == TOO_LONG:
                gateway.supervisor.lost(str(error))
        else:
            self.measured += 1
        finally:
            self._batcher.lease.revoke()

    async def _measure(self, probe: ProbedCell | ProbedLoop) -> None:
        """Warm the engine by a short batch of the same size, then measure."""
        if isinstance(probe, ProbedCell):
            await self._warm(probe.batch_size, probe.cell.lengths, probe.prompt_tokens)
            probe.add(await self._batches.measure(probe.cell, self._rng))
        else:
            loop = probe.loop
            await self._warm(loop.slots, loop.lengths, loop.prompt_tokens)
            probe.add(await self._batches.slot_time(loop, self._rng))

    async def _warm(self, size: int, lengths: tuple[int, ...], prompt_tokens: int) -> None:
        warm = Cell((min(WARM, *lengths),) * size, prompt_tokens)
        await self._batches.measure(warm, self._rng)

    async def _refit(self) -> None:
        gateway, schedule = self._gateway, self.schedule
        profile = gateway.latency.profile
        cells = [] if profile is None else [cell["lengths"] for cell in profile.cells]
        known = gateway.latency.law
        reach = max(map(len, cells), default=0), usual_length(cells)
        in_force = None if known is None else KnownLaw(known, *reach)
        question = (
            schedule.measured(),
            in_force,
            schedule.loop,
            schedule.slot_time(),
            int(self._rng.integers(2**31)),
        )
        executor = self._executor()
        try:
            candidate = await asyncio.get_running_loop().run_in_executor(executor, weigh, *question)
        except Exception:
            log.exception("no latency law could be fitted to the idle probes")
            return
        finally:
            await end_at_once(executor)
        if gateway.latency.law is known and not gateway.latency.calibrating:
            self._decide(candidate)

    def _decide(self, candidate: CandidateLaw) -> None:
        self.candidate = candidate
        taken = candidate.verdict == "first" or (candidate.verdict == "replaces" and self.suspected)
        if taken:
            self._gateway.latency.adopt(
                profile_of(
                    self._gateway, candidate.fit, self.schedule.measured(), PROMPT_TOKENS, note=NOTE
                )
            )
        self.suspected = candidate.verdict == "replaces" and not taken
        if self.suspected:
            self.schedule.clear()
        word = "in force" if taken else "measured afresh" if self.suspected else "kept aside"
        law, r2 = candidate.fit.law.rounded(), candidate.fit.r2
        log.info(
            "latency law from idle probes %s (%s): %s; R2 %.4f; %s",
            word,
            candidate.verdict,
            law,
            r2,
            candidate.says,
        )
        if taken:
            for doubt in candidate.doubts:
                log.info("  doubt: %s", doubt)
            self._gateway.limits.begin_epoch()  # under another law
        if self._on_candidate is not None:
            self._on_candidate(candidate, taken)


def niced_executor() -> Executor:
    return ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=serve_the_gateway
    )
