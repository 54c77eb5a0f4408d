"""Measuring the engine's law: designed batches in random order, each several times, and a fit.

Batch sizes and lengths are set here, never taken from traffic. The queue is held meanwhile:
requests in service finish first, those that wait keep their place and their patience, and those
that arrive wait behind them. Each wait for the engine has a bound: one batch may take
`LONGEST_CELL`, an engine that makes no token is replaced as ever (`--stuck-timeout`), and one that
is lost ends the calibration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kendall.policies import SpecError
from kendall.policies.ordered import order_of
from kendall.queueing.latency.fit import Fit, Measured, fit_law
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import Profile
from kendall.server.calibration.designed import (
    LONGEST_REPEATS,
    PROMPT_TOKENS,
    Cell,
    DesignedBatches,
    design,
    longest_cells,
)
from kendall.server.calibration.host import CalibrationHost
from kendall.server.calibration.turnaround import ClosedLoop, solve_turnaround
from kendall.server.runtime.errors import ApiError
from kendall.server.supervision.progress import StuckWatch

log = logging.getLogger("kendall")
USUAL_LENGTH = 64  # tokens of the longest answers of every batch size
LOOP_REQUESTS = 40  # of one closed loop
STINTS, RESUMES = (16, 8), 4  # tokens of a request that goes on; requests for each repeat
CANCELLED, BUSY = "calibration_cancelled", "busy"  # codes of errors
LONGEST_SERVICE = 30.0  # seconds that a calibration waits for the requests in service
Progress = Callable[[int, int], None]


class CalibrationRequest(BaseModel):
    """`POST /admin/calibrate`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    speed_only: bool = False
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0  # of a speed_only measurement
    # the law that a speed_only measurement is set against; without it the one measured here
    latency: str | None = None
    # measure kr too; without it where the policy in force takes requests out of service
    resume_cost: bool = False
    repeats: Annotated[int, Field(ge=2, le=100)] = 5
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=2)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    name: str | None = None


class Calibrator:
    """Measures the latency law on an engine that serves nothing else meanwhile."""

    def __init__(self, gateway: CalibrationHost, on_progress: Progress | None = None) -> None:
        self._gateway = gateway
        self._capabilities = gateway.batcher.capabilities
        self._batches = DesignedBatches(gateway.engine, self._capabilities)
        self._on_progress = on_progress
        self._measuring: asyncio.Task[Profile] | None = None
        self._stopped: ApiError | None = None

    @property
    def requests(self) -> int:
        """Requests that were sent to the engine so far."""
        return self._batches.made

    async def run(self, plan: CalibrationRequest) -> Profile:
        """Measure, fit, and put the law in force in the gateway. Raises ApiError, also where
        another calibration runs.
        """
        gateway = self._gateway
        known = self._known(plan)
        if gateway.latency.calibrating:
            raise ApiError(
                409,
                BUSY,
                (
                    "got a second calibration; expected one at a time: wait until the first one "
                    "has ended"
                ),
            )
        if not gateway.supervisor.serving:
            raise ApiError(
                503,
                "engine_unavailable",
                "calibration: the engine is not serving; try again later",
                retry_after=5,
            )
        gateway.batcher.pause_dispatch(True)
        self._batches.serve_on_one_of(gateway.batcher.servers_in_use)
        try:
            with gateway.latency.measured_by(self):
                profile = await self._watched(self._measure(plan, known))
                gateway.latency.adopt(profile)
        finally:
            gateway.batcher.pause_dispatch(False)
            gateway.limits.begin_epoch()  # what waited meanwhile waited for the calibration
        return profile

    def stop(self, error: ApiError) -> None:
        """End it now: `run` raises `error`, the queue goes on, the law stays. No effect on one
        that was stopped before.
        """
        if self._measuring is not None and self._stopped is None:
            self._stopped = error
            self._measuring.cancel()

    async def _watched(self, measuring: Coroutine[Any, Any, Profile]) -> Profile:
        """Run a measurement, which `stop` can end, beside a watch for stuck batches: the watch of
        the gateway's queue does not see the batches of a calibration.
        """
        gateway = self._gateway
        self._measuring = asyncio.create_task(measuring, name="calibration")
        tasks: list[asyncio.Task[Any]] = [self._measuring]
        if (timeout := gateway.settings.supervision.stuck_timeout) > 0:
            watch = StuckWatch(
                self._batches.batcher, timeout, lambda: gateway.latency.law, gateway.supervisor.lost
            )
            tasks.append(asyncio.create_task(watch.run(), name="calibration-watch"))
        try:
            return await self._measuring
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self, plan: CalibrationRequest, known: Profile | None) -> Profile:
        await self._served()
        rng = np.random.default_rng(plan.seed)
        return await (self._full(plan, rng) if known is None else self._speed(plan, known, rng))

    async def _served(self) -> None:
        """The queue is held; return once what is in service has ended. Raises ApiError."""
        batcher = self._gateway.batcher
        if not (batcher.in_service or batcher.recovery.tries):
            return
        log.info(
            "calibration: %d in service finish first, %d wait",
            batcher.in_service,
            batcher.queue_length,
        )
        try:
            async with asyncio.timeout(LONGEST_SERVICE):
                await batcher.served()
        except TimeoutError:
            got = (
                f"got {batcher.in_service} in service that did not end within {LONGEST_SERVICE:g} s"
            )
            raise ApiError(
                409,
                BUSY,
                f"{got}; expected an idle engine, try again when shorter answers are in service",
            ) from None

    async def _full(self, plan: CalibrationRequest, rng: np.random.Generator) -> Profile:
        """The cells and the closed loop in one random order: both see the same slow and fast
        moments of the machine.
        """
        grid = self._grid(plan)
        repeats = [plan.repeats] * (len(grid) + 1)
        if plan.max_output_tokens is None:
            limit = self._gateway.limits.max_output_tokens
            longest = longest_cells(self._capabilities, grid, plan.repeats, limit)
            repeats += [LONGEST_REPEATS] * len(longest)
            grid += longest
        order = rng.permutation(np.repeat(np.arange(-1, len(grid)), repeats))
        await self._warm_up(grid, rng)
        measured: list[Measured] = []
        held: list[float] = []
        lengths = tuple(int(length) for length in rng.integers(8, 25, LOOP_REQUESTS))
        loop = ClosedLoop(min(4, self._capabilities.max_num_seqs), lengths, grid[0].prompt_tokens)
        for done, index in enumerate(order):
            if index < 0:
                held += [await self._batches.slot_time(loop, rng)]
            else:
                measured += [await self._batches.measure(grid[index], rng)]
            if self._on_progress is not None:
                self._on_progress(done + 1, len(order))
        fit = _fit(measured, rng)
        turnaround = solve_turnaround(fit.law, loop, float(np.mean(held)))
        law = dataclasses.replace(fit.law, turnaround=turnaround)
        fit = dataclasses.replace(fit, law=law.resuming_as(self._gateway.latency.law))
        if self._measures_resumes(plan):
            fit = await self._with_resumes(fit, plan, rng)
        return profile_of(self._gateway, fit, measured, loop.prompt_tokens, name=plan.name)

    def _measures_resumes(self, plan: CalibrationRequest) -> bool:
        """Whether it is asked for, or the policy in force needs it, and the engine can go on."""
        wanted = plan.resume_cost or order_of(self._gateway.batcher.policy).preemptive
        return wanted and self._capabilities.engine != "http"

    async def _with_resumes(
        self, fit: Fit, plan: CalibrationRequest, rng: np.random.Generator
    ) -> Fit:
        """`kr` of the law: what going on takes beyond a new request of the same context. Both are
        measured one after the other, so that no error of the fit, and little of a machine that
        has other work, is in it.
        """
        prompt = min(plan.prompt_tokens or PROMPT_TOKENS, self._capabilities.max_model_len // 2)
        cost = np.array(
            [
                await self._batches.resume_cost(prompt, STINTS, rng)
                for _ in range(RESUMES * plan.repeats)
            ]
        )
        kr, half = float(cost.mean()), 1.96 * float(cost.std(ddof=1)) / math.sqrt(cost.size)
        if kr + half < 0:
            log.warning(
                "calibration: a resume took %.3g ms less than the law charges for an admission; "
                "kr is 0",
                -1e3 * kr,
            )
        interval = {"kr": (max(kr - half, 0.0), max(kr + half, 0.0))}
        law = dataclasses.replace(fit.law, kr=max(kr, 0.0))  # the law has none below 0
        return dataclasses.replace(fit, law=law, intervals=fit.intervals | interval)

    async def _speed(
        self, plan: CalibrationRequest, known: Profile, rng: np.random.Generator
    ) -> Profile:
        """Measured over lawful time of a few mixed cells, for five seconds."""
        grid = [
            cell
            for cell in self._grid(plan)
            if len(cell.lengths) in (1, 4, 16) and cell.lengths[0] in (4, 16, 32)
        ]
        law = known.law.at_speed(1.0)
        await self._warm_up(grid, rng)
        until = self._gateway.now() + plan.seconds
        measured: list[Measured] = []
        while self._gateway.now() < until or len(measured) < len(grid):
            for index in rng.permutation(len(grid)):
                measured += [await self._batches.measure(grid[index], rng)]
        lawful = sum(
            law.padded(len(batch.lengths), max(batch.lengths), batch.prompt_tokens)
            for batch in measured
        )
        speed = sum(batch.service_time for batch in measured) / lawful
        return msgspec.structs.replace(
            known, name=plan.name or known.name, law=known.law.at_speed(speed), date=_now()
        )

    def _known(self, plan: CalibrationRequest) -> Profile | None:
        """The law that the speed is measured against; None where the law itself is to be
        measured. Raises ApiError.
        """
        gateway = self._gateway
        self._check_resumes(plan)
        if not plan.speed_only:
            if plan.latency is not None:
                raise ApiError(
                    400,
                    "invalid_request",
                    "got latency without speed_only; expected both, or neither",
                    param="latency",
                )
            return None
        if plan.latency is None and gateway.latency.profile is not None:
            return gateway.latency.profile
        try:
            law = gateway.latency.law if plan.latency is None else parse_law(plan.latency)
        except SpecError as error:
            raise ApiError(400, "invalid_latency", str(error), param="latency") from None
        if law is None:
            remedy = (
                "calibrate without speed_only first, or start the gateway with --latency "
                "(over HTTP: send the law as `latency`)"
            )
            raise ApiError(
                409, "no_law", f"speed_only needs a latency law, and none is in force; {remedy}"
            )
        return Profile(
            name=gateway.settings.served_model_name, law=law, engine=self._capabilities.engine
        )

    def _check_resumes(self, plan: CalibrationRequest) -> None:
        """Raises ApiError where they are asked for and cannot be measured."""
        if not plan.resume_cost:
            return
        got = None
        if plan.speed_only:
            got = "got resume_cost with speed_only; expected one of them"
        elif self._capabilities.engine == "http":
            got = (
                "got resume_cost on an engine of another server, which continues no answer; "
                "expected the engine vllm or emulated"
            )
        if got is not None:
            raise ApiError(400, "invalid_request", got, param="resume_cost")

    async def _warm_up(self, grid: Sequence[Cell], rng: np.random.Generator) -> None:
        """Every batch size once, unmeasured."""
        for size in sorted({len(cell.lengths) for cell in grid}):
            await self._batches.measure(
                next(cell for cell in grid if len(cell.lengths) == size), rng
            )

    def _grid(self, plan: CalibrationRequest) -> list[Cell]:
        longest = plan.max_output_tokens or min(
            self._gateway.limits.max_output_tokens or USUAL_LENGTH, USUAL_LENGTH
        )
        return design(
            self._capabilities, plan.prompt_tokens or PROMPT_TOKENS, plan.max_batch_size, longest
        )


async def calibrate_at_start(gateway: CalibrationHost) -> None:
    """Before serving. An engine that was lost is calibrated once more when another one serves; what
    ends that too is logged, and the gateway serves without a measured law. Raises ApiError where no
    law fits, or no engine comes back.
    """
    for last in (False, True):
        try:
            profile = await Calibrator(gateway).run(CalibrationRequest())
        except ApiError as error:
            if error.status < 500 and error.code not in (CANCELLED, BUSY):
                raise
            log.error("the calibration at the start failed: %s", error.message)  # noqa: TRY400 - one line
            if last or gateway.lifecycle.draining or error.code in (CANCELLED, BUSY):
                break
            await gateway.supervisor.across_restarts(_at_once)
        else:
            log.info("calibrated: %s", profile.law.rounded())
            warn_of_fit(profile)
            return
    log.error(
        "the gateway serves without a measured latency law; run `kendall calibrate URL` later"
    )


async def _at_once() -> None:
    """Awaited through `Supervisor.across_restarts`: returns when an engine serves."""


def _fit(measured: Sequence[Measured], rng: np.random.Generator) -> Fit:
    """Raises ApiError: what was measured tells no law, which is not the gateway's failure."""
    try:
        return fit_law(measured, rng)
    except ValueError as error:
        remedy = (
            "measure again on a quiet machine, with longer answers, larger batches or more repeats"
        )
        raise ApiError(409, "no_law_fits", f"{error}: {remedy}") from None


def profile_of(
    gateway: CalibrationHost,
    fit: Fit,
    measured: Sequence[Measured],
    prompt_tokens: int,
    *,
    name: str | None = None,
    note: str | None = None,
) -> Profile:
    """The fitted law with what it was measured on."""
    bounds = gateway.batcher.capabilities
    return Profile(
        name=name or gateway.settings.served_model_name,
        law=fit.law,
        intervals=fit.intervals,
        r2=fit.r2,
        mape=fit.mape,
        engine=bounds.engine,
        model=gateway.settings.served_model_name,
        machine=dict(bounds.hardware),
        date=_now(),
        versions=dict(bounds.versions),
        max_num_seqs=bounds.max_num_seqs,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max(max(batch.lengths) for batch in measured),
        note=note,
        cells=[dataclasses.asdict(batch) for batch in measured],
    )


def warn_of_fit(profile: Profile) -> None:
    """In the log, where the law fits poorly; it is in force all the same."""
    if profile.poor_fit is not None:
        log.warning("%s", profile.poor_fit)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
