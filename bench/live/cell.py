"""One cell: load flows, a new epoch begins in mid-flow, looks until enough is known or the time is
over, then the load is cut off.

The last live prediction is taken while the load still flows: a window that goes on after it would
hold too low a rate.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from bench.live.design import Point, Rules
from bench.live.judgement import noise
from bench.live.looks import Follower, Look, enough, look
from bench.live.observation import Cell as Observed
from bench.live.observation import observe, seen_in
from bench.live.results import Result
from bench.live.speed_path import WIDTH, LoadedQueue
from loadgen.gateway.gateway_process import GatewayClient, GatewayError
from loadgen.sweep.cell import CellRun, CellSender, StartedCell, begin
from loadgen.sweep.gateway import header_of, records_since
from loadgen.sweep.grid import Basis, SweepCell
from loadgen.sweep.plan import SweepPlan
from loadgen.sweep.rig import Rig
from policies import parse_policy
from queueing.arrivals.timetable import draw
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.speed.batch_times import batch_times
from queueing.estimation.window_queue import Limits
from queueing.measurement.machine import hardware
from queueing.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell's load run."""

    cell: SweepCell
    begun: StartedCell  # with the epoch in which it settled
    epoch: int  # the measured one
    ended: str  # half-width | time
    seconds: float  # of the measured epoch
    last: Look
    run: CellRun


@dataclass(frozen=True, slots=True)
class RunningCell:
    """A point of the table on the apparatus; `allowed` seconds of load, `shown` in the progress."""

    apparatus: Rig
    rules: Rules
    point: Point
    allowed: float
    shown: str

    async def speed_under_load(self, idle: float) -> float:
        """A pilot at the load that the idle engine's speed gives: how slow the engine is then.
        Raises GatewayError.
        """
        pilot = dataclasses.replace(self, allowed=self.rules.pilot, shown=f"{self.shown}: pilot")
        measured = await pilot.run(idle)
        return await asyncio.to_thread(pilot.speed_of, measured)

    def speed_of(self, measured: Measured) -> float:
        """Of the engine over the whole run, stalls included: the factor on the law. Raises
        GatewayError where no request began and ended in it.
        """
        observed = dataclasses.replace(self._observed(measured), live=None)
        times = batch_times(parse_policy(observed.policy), seen_in(observed).mine, observed.shape)
        if not times.count:
            raise GatewayError("a pilot in which no request began and ended: make pilots longer")
        return float(times.measured.sum() / times.fitted.sum())

    def stated_band(
        self, idle: float, loaded: float, path: Sequence[float]
    ) -> dict[str, float] | None:
        """Where the mean should lie, stated before the cell is measured; None for a continuous
        engine. `path`: relative to `idle`.
        """
        model = model_of(self.apparatus.basis.at_speed(idle), self.point)
        queue = LoadedQueue.of(model, self._cell(loaded).rate)
        if queue is None:
            return None
        found = queue.stated_band(path, self.allowed, self.rules.settle, self.point.seed)
        return dataclasses.asdict(found) | {
            "seconds": self.allowed,
            "path_seconds": len(path) * WIDTH,
        }

    async def run(self, speed: float) -> Measured:
        """The load run at that speed of the engine, cut off when enough is known or the time is
        over. Raises GatewayError.
        """
        cell = self._cell(speed)
        begun = await begin(
            self.apparatus.gateway.client,
            self.apparatus.gateway.record_file,
            cell,
            self.apparatus.status.note,
        )
        self.apparatus.status.phase(self.shown, self.rules.settle + self.allowed)
        sending = asyncio.create_task(self._sending(cell, begun).run())
        watching = asyncio.create_task(self._watch(begun))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # a sender that is cancelled hands back what was measured
            sending.cancel()
            watching.cancel()
            await asyncio.wait({sending, watching})
        run = sending.result()
        if watching.cancelled():
            raise GatewayError(run.why or "the load ended before the cell did")
        epoch, ended, seconds, last = watching.result()
        return Measured(
            cell=cell, begun=begun, epoch=epoch, ended=ended, seconds=seconds, last=last, run=run
        )

    def result(self, measured: Measured, speeds: tuple[float, float | None]) -> Result:
        """Everything of it as JSON, judged by nobody yet."""
        point, rules, header, load = (
            self.point,
            self.rules,
            header_of(measured.begun.record_file),
            measured.run.load,
        )
        seen = observe(self._observed(measured))
        deviations = {
            "block_deviation": rules.block_deviation,
            "bracket_deviation": rules.bracket_deviation,
        }
        return {
            "cell": point.name,
            **{
                name: getattr(point, name)
                for name in ("policy", "load", "seed", "output_tokens", "sequences", "longer")
            },
            "rate": measured.cell.rate,
            "ended": measured.ended,
            "seconds": measured.seconds,
            "rules": msgspec.to_builtins(rules),
            **self._conditions(),
            "speeds": speeds,
            "noise": noise(seen["block_speeds"], speeds, **deviations),
            "lateness": None
            if load is None
            else {"mean": load.lateness.mean, "p99": load.lateness.p99},
            **seen,
            "live": self._live(measured),
            "no_live_prediction": "a longer cell is assessed as a whole, from its records"
            if point.longer
            else measured.last.reason,
            "versions": header.versions | ({} if load is None else load.header.versions),
            "hardware": hardware() | header.hardware,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _cell(self, speed: float) -> SweepCell:
        point, rules = self.point, self.rules
        rate = (
            point.load * model_of(self.apparatus.basis.at_speed(speed), point).largest_stable_rate
        )
        count = int(rate * (self.allowed + rules.settle + 3 * rules.look)) + 100
        return SweepCell(
            name=point.name,
            policy=point.policy,
            load=point.load,
            rate=rate,
            max_output_tokens=longest_of(self.apparatus.plan),
            count=count,
        )

    def _sending(self, cell: SweepCell, begun: StartedCell) -> CellSender:
        apparatus, seed = self.apparatus, self.point.seed
        basis = basis_of(apparatus.basis, self.point)
        return CellSender(
            client=apparatus.gateway.client,
            begun=begun,
            cell=cell,
            timetable=draw(cell.rate, cell.count, seed, basis.prompt_tokens, basis.output_tokens),
            target=dataclasses.replace(apparatus.target, n=self.point.sequences),
            seed=seed,
            configuration={
                name: getattr(basis.plan, name) for name in ("output_tokens", "prompt_tokens")
            },
            progress=apparatus.status,
            why_lost=apparatus.gateway.why_lost,
            stop_unstable=False,
        )

    async def _watch(self, begun: StartedCell) -> tuple[int, str, float, Look]:
        """Begin the measured epoch in mid-flow and look until the cell may end: its epoch, why
        it ended, its seconds, the last look.
        """
        loop, rules, client = asyncio.get_running_loop(), self.rules, self.apparatus.gateway.client
        await _first_arrival(client)
        await asyncio.sleep(rules.settle)
        measured_limit = longest_of(self.apparatus.plan) + 1
        epoch = int(
            (await client.ask("PUT", "/admin/policy", {"max_output_tokens": measured_limit}))[
                "epoch"
            ]
        )
        began = loop.time()
        follower = Follower(
            begun.record_file,
            begun.offset,
            epoch,
            sojourn=parse_policy(self.point.policy).joins_running,
        )
        while True:
            await asyncio.sleep(min(rules.look, max(0.1, self.allowed - (loop.time() - began))))
            seen, seconds = await look(client, follower), loop.time() - began
            self.apparatus.status.phase(f"{self.shown}: {seen}", max(0.0, self.allowed - seconds))
            if enough(seen, seconds, half_width=rules.half_width, least=rules.least):
                return epoch, "half-width", seconds, seen
            if seconds >= self.allowed:
                return epoch, "time", seconds, seen

    def _observed(self, measured: Measured) -> Observed:
        basis, begun = self.apparatus.basis, measured.begun
        epochs = (
            begun.epoch,
            measured.epoch,
        )  # who was in service when the measured one began explains who waited then
        return Observed(
            policy=self.point.policy,
            epoch=measured.epoch,
            records=[
                record
                for epoch in epochs
                for record in records_since(begun.record_file, begun.offset, epoch)
            ],
            shape=basis.law,
            limits=Limits(
                max_output_tokens=longest_of(basis.plan) + 1,
                max_num_seqs=basis.bounds.max_num_seqs,
                max_context_tokens=self.point.memory,
                reserved_tokens=None if self.point.memory is None else longest_of(basis.plan) + 1,
            ),
            block=self.rules.block,
            live=self._live(measured),
        )

    def _live(self, measured: Measured) -> dict[str, object] | None:
        """The last live prediction. A longer cell has more requests than the gateway keeps: it
        is judged from the run file.
        """
        return None if self.point.longer else measured.last.live

    def _conditions(self) -> dict[str, object]:
        plan, basis = self.apparatus.plan, self.apparatus.basis
        asked = {name: getattr(plan, name) for name in ("engine", "prompt_tokens")}
        return {"law": str(basis.law), "max_num_seqs": basis.bounds.max_num_seqs} | asked


def basis_of(basis: Basis, point: Point) -> Basis:
    """With the lengths of one point."""
    return dataclasses.replace(
        basis, plan=msgspec.structs.replace(basis.plan, output_tokens=point.output_tokens)
    )


def model_of(basis: Basis, point: Point) -> Model:
    """The queue of one point, but for its rate, which is of calls."""
    model = basis_of(basis, point).model(point.policy, longest_of(basis.plan))
    if point.memory is not None:
        model = dataclasses.replace(model, max_context_tokens=point.memory)
    calls = parse_distribution(f"deterministic:value={point.sequences}")
    return model if point.sequences == 1 else dataclasses.replace(model, sequences=calls)


def longest_of(plan: SweepPlan) -> int:
    """Tokens: the gateway's limit while a cell settles."""
    (limit,) = plan.max_output_tokens
    assert limit is not None
    return limit


async def _first_arrival(client: GatewayClient) -> None:
    """Return when load has begun to flow: thousands of prompts are drawn first."""
    while True:
        state = await client.ask("GET", "/admin/state")
        if state["unanswered"]:
            return
        await asyncio.sleep(0.05)
