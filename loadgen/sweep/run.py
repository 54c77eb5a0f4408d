"""A sweep from its first cell to its last, through interruptions.

    gateway up -> law (calibrated once, kept) -> cells, each between two short calibrations of the
    speed -> searches

A cell is done when both sides' records are on the disk and the journal says so. Everything else is
repeated: after a Ctrl-C or a kill by the next run of the same command, after the loss of the
gateway or its engine by this one, which starts the gateway anew (a bounded number of times, each
time waiting longer) and measures its speed again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kendall.loadgen.gateway.gateway_process import GatewayError
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sweep.cell import CellRun, CellSender, StartedCell, begin, gateway_side
from kendall.loadgen.sweep.gateway import stop_left_behind
from kendall.loadgen.sweep.grid import SweepCell, planned_cells
from kendall.loadgen.sweep.journal import Event, damage
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.rig import Rig
from kendall.loadgen.sweep.status import Status
from kendall.loadgen.sweep.store import Store
from kendall.policies.text import counted
from kendall.queueing.measurement.machine import versions

ATTEMPTS = 3  # of a cell, in one session
MOST_CHANGE = 0.15  # change of the engine's speed from before a cell to after it
OVERHEAD = 1.0  # seconds of a cell besides sending and calibrating


def speed_change(done: Event) -> float:
    """The relative change between the bracketing calibrations; 0 where one is not known."""
    before, after = done["speeds"]
    return 0.0 if before is None or after is None else abs(after / before - 1)


@dataclass(slots=True)
class Sweep:
    """One session of a plan in a folder."""

    plan: SweepPlan
    store: Store
    status: Status
    rig: Rig

    async def run(self, search: Callable[[Sweep], Awaitable[None]]) -> None:
        """Measure what is not done yet: the cells, then the plan's searches, by `search`.

        Raises GatewayError, SpecError, CancelledError; what is done stays done.
        """
        resumed = bool(self.store.journal.events)
        if stop_left_behind(self.store.folder):
            self.status.note("a gateway that a killed sweep left behind was ended")
        self.store.append("sweep", resumed=resumed, versions=versions())
        self.salvage()
        if resumed and self._is_complete():
            self.status.note("everything is measured already")
            return
        try:
            await self.rig.open()
            if self.plan.searches:
                self.status.note(self.plan.searches_in_words)
            cells = await self._planned()
            for number, cell in enumerate(cells, start=1):
                self.status.left_after = sum(
                    self.seconds(later) for later in cells[number:] if self._is_left(later)
                )
                await self.measure(cell, f"cell {number}/{len(cells)}")
            if self.plan.searches:
                await search(self)
            self.store.append("finished")
        finally:
            await self.rig.close()

    async def measure(self, cell: SweepCell, place: str) -> None:
        """Return when the cell is done, refused, or has failed too often; `place` names it in
        what is shown.
        """
        if self._is_done(cell):
            if not self.was_disturbed(cell):
                return
            self._set_aside(cell, f"{place}, {cell}")
        if self._is_refused(cell):
            self._refuse(cell)
        else:
            await self._attempts(cell, place)

    async def _attempts(self, cell: SweepCell, place: str) -> None:
        for _ in range(ATTEMPTS):
            try:
                run = await self.attempt(cell, f"{place}, {cell}")
            except GatewayError as error:
                if self.store.progress.of(cell.name).open is not None:
                    self.store.append("cut", cell=cell.name, reason=str(error), files={})
                await self.rig.recover(str(error))
                continue
            if run.ended == "interrupted":
                raise asyncio.CancelledError
            if run.ended != "lost":
                if not self.was_disturbed(cell):
                    return
                self._set_aside(cell, f"{place}, {cell}")
                continue
            await self.rig.recover(run.why or "no reason known")
        known = self.store.progress.of(cell.name)
        given_up = f"given up after {counted(known.attempts, 'attempt')}"
        self.store.append(
            "failed", cell=cell.name, reason=f"{given_up}: {known.reason or 'no reason known'}"
        )
        self.status.note(f"{place}, {cell}: {given_up}")

    async def attempt(self, cell: SweepCell, shown: str) -> CellRun:
        """Send a cell once and write down what came of it. Raises GatewayError."""
        rig = self.rig
        before = await rig.speed_now()
        begun = await begin(rig.gateway.client, rig.gateway.record_file, cell, self.status.note)
        attempt = 1 + self.store.progress.of(cell.name).attempts
        where = {
            "epoch": begun.epoch,
            "record_file": self.store.relative(begun.record_file),
            "offset": begun.offset,
        }
        self.store.append("started", cell=cell.name, attempt=attempt, **where)
        self.status.phase(shown, self.seconds(cell))
        rig.speed = None
        run = await CellSender(
            client=rig.gateway.client,
            begun=begun,
            cell=cell,
            timetable=rig.basis.timetable(cell),
            target=self._target(cell),
            slots=self.plan.max_num_seqs if self.plan.plain_server else None,
            seed=self.plan.seed,
            configuration=self._asked(),
            progress=self.status,
            path=self.store.growing(cell.name, attempt),
            processes=self.plan.processes,
            why_lost=rig.gateway.why_lost,
            stop_unstable=not (
                self.plan.allow_unstable and cell.load >= 1 and cell.purpose == "grid"
            ),
        ).run()
        files = self.store.write(run, attempt)
        if run.ended in ("interrupted", "lost"):
            self.store.append("cut", cell=cell.name, reason=run.why or run.ended, files=files)
            self.status.note(f"{shown}: cut ({run.why or run.ended})")
        else:
            self._keep(run, files, (before, await self._speed_after()), shown)
        return run

    def _target(self, cell: SweepCell) -> Target:
        """With the token limit of the cell, where no gateway sets it."""
        target = self.rig.target
        if not self.plan.plain_server or cell.max_output_tokens is None:
            return target
        return dataclasses.replace(target, max_tokens=cell.max_output_tokens)

    async def _speed_after(self) -> float | None:
        """None where the gateway is lost just now: the cell is whole all the same."""
        try:
            return await self.rig.speed_now()
        except GatewayError:
            return None

    def _keep(
        self, run: CellRun, files: dict[str, str], speeds: tuple[float, float | None], shown: str
    ) -> None:
        records = run.load.records if run.load else []
        outcomes = Counter(record.outcome for record in records)
        if not outcomes["completed"]:
            reason = (
                "no request was completed: "
                f"{next((record.error for record in records if record.error), 'none was answered')}"
            )
            self.store.append("failed", cell=run.cell.name, reason=reason, files=files)
            self.status.note(f"{shown}: {reason}")
            return
        self.store.append(
            "done",
            cell=run.cell.name,
            ended=run.ended,
            why=run.why,
            files=files,
            speeds=speeds,
            outcomes=dict(outcomes),
            lateness={"mean": run.load.lateness.mean, "p99": run.load.lateness.p99}
            if run.load
            else None,
            growth=None if run.growth is None else msgspec.to_builtins(run.growth),
            asked=msgspec.to_builtins(run.cell),
        )
        stopped = (
            f"UNSTABLE, stopped: {run.why}"
            if run.ended == "unstable"
            else f"{outcomes['completed']} of {outcomes.total()} completed"
        )
        self.status.note(f"{shown}: {stopped}")

    def seconds(self, cell: SweepCell) -> float:
        """That a cell takes, about."""
        return cell.seconds + self.plan.bracket + OVERHEAD

    # noise

    def was_disturbed(self, cell: SweepCell) -> bool:
        """Whether the speed of the engine changed too much around a cell that may be measured
        again.
        """
        known = self.store.progress.of(cell.name)
        return (
            known.done is not None
            and known.disturbed < self.plan.repeat_noisy
            and speed_change(known.done) > MOST_CHANGE
        )

    def _set_aside(self, cell: SweepCell, shown: str) -> None:
        known = self.store.progress.of(cell.name)
        assert known.done is not None
        changed = speed_change(known.done)
        files = self.store.set_aside(known.done, known.attempts)
        self.store.append(
            "noisy",
            cell=cell.name,
            reason=f"the speed of the engine changed by {changed:.0%} around it",
            files=files,
        )
        self.status.note(
            f"{shown}: the speed of the engine changed by {changed:.0%} around it; measured again"
        )

    # the journal

    def _is_done(self, cell: SweepCell) -> bool:
        done = self.store.progress.of(cell.name).done
        if done is None:
            return False
        if (wrong := damage(self.store.folder, done)) is None:
            return True
        self.store.append("damaged", cell=cell.name, reason=wrong)
        self.status.note(f"{cell.name}: {wrong}; measured again")
        return False

    def _is_complete(self) -> bool:
        """Whether a session came to its end and its files are intact."""
        if self.store.journal.last("finished") is None:
            return False
        cells = planned_cells(self.store.journal.events)
        return all(
            self._is_refused(cell) or (self._is_done(cell) and not self.was_disturbed(cell))
            for cell in cells
        )

    def _is_refused(self, cell: SweepCell) -> bool:
        return cell.load >= 1 and not self.plan.allow_unstable and cell.purpose == "grid"

    def _is_left(self, cell: SweepCell) -> bool:
        return (
            self.store.progress.of(cell.name).done is None or self.was_disturbed(cell)
        ) and not self._is_refused(cell)

    def _refuse(self, cell: SweepCell) -> None:
        reason = (
            f"load {cell.load:.3g} by the law: the queue would grow without bound; "
            "--allow-unstable runs it anyway"
        )
        if self.store.progress.of(cell.name).reason != reason:
            self.store.append("refused", cell=cell.name, reason=reason)
        self.status.note(f"{cell}: not run, {reason}")

    def salvage(self) -> None:
        """Keep what the gateway wrote of a cell whose sweep was killed."""
        for name, known in list(self.store.progress.cells.items()):
            if (started := known.open) is None:
                continue
            begun = StartedCell(
                started["epoch"], self.store.folder / started["record_file"], started["offset"]
            )
            files = self.store.salvage_load_side(name, started["attempt"])
            try:
                files |= self.store.write_gateway_side(
                    name, started["attempt"], *gateway_side(begun, self._asked(), self.plan.seed)
                )
            except (
                OSError,
                msgspec.MsgspecError,
            ):  # no such file, or another gateway writes it now
                self.status.note(f"{name}: nothing is left of attempt {started['attempt']}")
            self.store.append("cut", cell=name, reason="the sweep was killed", files=files)

    def _asked(self) -> dict[str, Any]:
        names = ("output_tokens", "prompt_tokens", "predictor")
        return {name: getattr(self.plan, name) for name in names}

    async def _planned(self) -> list[SweepCell]:
        """The cells as planned at the first start: lengths are advised once."""
        if self.store.journal.last("planned") is None:
            self.status.phase("planning the cells")
            cells = await asyncio.to_thread(lambda: list(self.rig.basis.cells()))
            self.store.append("planned", cells=msgspec.to_builtins(cells))
        return planned_cells(self.store.journal.events)
