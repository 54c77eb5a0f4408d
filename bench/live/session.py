"""One session: the gateway up, the law's shape calibrated once, then cell after cell, each on the
disk before the next begins.

    speed measured -> pilot: speed under load -> policy in force -> load flows -> a new epoch begins
    in mid-flow
    -> looks, until enough or out of time -> the last live prediction is taken while the load still
    flows
    -> load cut off -> speed measured -> records judged

A cell that is too short to say anything is measured once more after all others, as long as the
whole time allows. A session may be shorter than that, or be killed: the next one goes on with the
cells that have no file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from bench.live.cell import RunningCell
from bench.live.design import Point, Rules
from bench.live.judgement import judge, source_of
from bench.live.results import Result, read_results
from bench.live.schedule import Schedule
from loadgen.gateway.gateway_process import GatewayError
from loadgen.sweep.gateway import stop_left_behind
from loadgen.sweep.rig import Rig
from queueing.latency.profile import Profile

ATTEMPTS = 3  # of a cell whose gateway is lost


@dataclass(slots=True)
class Session:
    """What is left of the points, within the time that there is."""

    apparatus: Rig
    rules: Rules
    every: Sequence[Point]  # of the plan: they share the time
    points: Sequence[Point]  # that this session is for
    seconds: float  # of this session
    total: float  # seconds of all sessions
    _began: float = field(init=False)
    _schedule: Schedule = field(init=False)

    async def run(self) -> bool:
        """Measure; whether every point has a result now. Raises GatewayError, CancelledError;
        what is done stays done.
        """
        self._began = asyncio.get_running_loop().time()
        apparatus = self.apparatus
        if stop_left_behind(apparatus.store.folder):
            apparatus.status.note("a gateway that a killed session left behind was ended")
        if not (self._missing() or self._unsure()):
            return True
        try:
            await apparatus.open()
            self._require_law()
            self._schedule = await self._planned()
            await self._first_pass()
            await self._second_pass()
        finally:
            await apparatus.close()
        return not self._missing()

    def _require_law(self) -> None:
        """Raises GatewayError where the calibration was disturbed: every rate and every
        prediction rests on its shape.
        """
        folder = self.apparatus.store.folder
        profile = msgspec.json.decode((folder / "profile.json").read_bytes(), type=Profile)
        if profile.mape is not None and profile.mape > self.rules.law_error:
            raise GatewayError(
                f"the law fits its cells within {profile.mape:.0%} on average; expected "
                f"{self.rules.law_error:.0%} on a quiet machine: start anew in an empty folder "
                f"(this one is {folder})"
            )

    async def _planned(self) -> Schedule:
        """At the first start; later ones go by the same."""
        store, schedule = self.apparatus.store, Schedule(self.apparatus.basis, self.rules)
        planned = store.journal.last("planned")
        schedule.advised = {} if planned is None else dict(planned["seconds"])
        if all(point.name in schedule.advised for point in self.every):
            return schedule
        self.apparatus.status.phase("planning the cells", len(self.every))
        await asyncio.to_thread(schedule.plan, self.every)
        store.append("planned", seconds=schedule.advised)
        advised = sum(schedule.advised[point.name] for point in self.every) / 60
        self.apparatus.status.note(
            f"advised: {advised:.0f} minutes of load, {self.total / 60:.0f} in all to spend"
        )
        return schedule

    async def _first_pass(self) -> None:
        missing = self._missing()
        for number, point in enumerate(missing, start=1):
            later = sum(
                self._schedule.seconds(other)
                for other in self.every
                if other is not point and not self._results(other)
            )
            self.apparatus.status.left_after = later
            allowed = self._schedule.allowed(point, self._left(), later)
            if not self._fits(point, allowed, first=number == 1):
                return
            await self._measure(point, min(allowed, self._room()), f"cell {number}/{len(missing)}")

    async def _second_pass(self) -> None:
        self.apparatus.status.left_after = 0.0
        for point in [] if self._missing() else self._unsure():
            allowed = self._schedule.allowed(point, self._left(), 0.0)
            if allowed + self.rules.overhead <= self._left() and self._fits(
                point, allowed, first=False
            ):
                await self._measure(point, allowed, "once more")

    def _fits(self, point: Point, allowed: float, *, first: bool) -> bool:
        """Into this session; its first cell is cut to it."""
        if self._room() >= (self.rules.least if first else allowed):
            return True
        self.apparatus.status.note(
            f"{point.name}: left for another session, the time of this one is over"
        )
        return False

    def _room(self) -> float:
        """Seconds of load that this session has left for one cell."""
        return self.seconds - self._elapsed() - self.rules.overhead

    def _left(self) -> float:
        """Seconds of all sessions, less what the cells took that have a file."""
        taken = [
            float(result["seconds"]) + self.rules.overhead
            for point in self.every
            for result in self._results(point)
        ]
        return self.total - sum(taken)

    def _elapsed(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    # what the folder has

    def _results(self, point: Point) -> list[Result]:
        return read_results(
            self.apparatus.store.folder.joinpath("cells").glob(f"{point.name}.*.json")
        )

    def _path(self) -> list[float]:
        """The engine's speed second by second in all cells so far, each relative to the speed
        measured just before it.
        """
        cells = read_results(self.apparatus.store.folder.joinpath("cells").glob("*.json"))
        cells.sort(key=lambda result: str(result["date"]))
        return [level / result["speeds"][0] for result in cells for level in result["speed_path"]]

    def _missing(self) -> list[Point]:
        return [point for point in self.points if not self._results(point)]

    def _unsure(self) -> list[Point]:
        """Measured once and too short to say anything; of these the ones that take the least
        time first.
        """
        once = [
            (point, found[0]) for point in self.points if len(found := self._results(point)) == 1
        ]
        return [
            point
            for point, result in sorted(once, key=lambda each: float(each[1]["seconds"]))
            if judge(result).too_short
        ]

    # one cell

    async def _measure(self, point: Point, allowed: float, place: str) -> None:
        for _ in range(ATTEMPTS):
            try:
                await self._attempt(
                    point, allowed, f"{place}, {point.policy} at load {point.load:g}"
                )
            except GatewayError as error:
                self.apparatus.store.append("cut", cell=point.name, reason=str(error), files={})
                await self.apparatus.recover(str(error))
            else:
                return
        self.apparatus.store.append(
            "failed", cell=point.name, reason=f"given up after {ATTEMPTS} attempts"
        )
        self.apparatus.status.note(f"{place}, {point.name}: given up after {ATTEMPTS} attempts")

    async def _attempt(self, point: Point, allowed: float, shown: str) -> None:
        apparatus = self.apparatus
        before = await apparatus.speed_now()
        number = 1 + apparatus.store.progress.of(point.name).attempts
        apparatus.store.append(
            "started", cell=point.name, attempt=number, allowed=allowed, speed=before
        )
        apparatus.speed = None
        running = RunningCell(apparatus, self.rules, point, allowed, shown)
        loaded = await running.speed_under_load(before)
        band = await asyncio.to_thread(running.stated_band, before, loaded, self._path())
        apparatus.store.append(
            "stated", cell=point.name, attempt=number, band=band, speed_under_load=loaded
        )
        measured = await running.run(loaded)
        after = await self._speed_after()
        apparatus.status.phase(f"{shown}: judging")
        result = await asyncio.to_thread(running.result, measured, (before, after))
        result |= {
            "attempt": number,
            "allowed_seconds": allowed,
            "stated_band": band,
            "speed_under_load": loaded,
        }
        path = apparatus.store.write_json(f"cells/{point.name}.{number}.json", result)
        apparatus.store.append(
            "done", cell=point.name, attempt=number, file=f"cells/{path.name}", ended=measured.ended
        )
        apparatus.status.note(f"{shown}: {in_words(result)}")

    async def _speed_after(self) -> float | None:
        """None where the gateway is lost just now: the cell is whole all the same."""
        try:
            return await self.apparatus.speed_now()
        except GatewayError:
            return None


def in_words(result: Result) -> str:
    """One line for who waits."""
    cell = judge(result)
    source = "predicted" if source_of(result) is result["live"] else "predicted offline"
    error = (
        "nothing predicted"
        if cell.error is None
        else f"{source} {(cell.predicted or 0) * 1e3:.4g} ms, error {cell.error:+.1%}"
    )
    service = result["measured_service"]
    gateway = (
        f"gateway {service['observed'] / service['recursion'] - 1:+.2%}"
        if service["recursion"]
        else "gateway"
    )
    half = cell.half_width / cell.observed if cell.observed else float("inf")
    quiet = "quiet" if cell.quiet else "; ".join(result["noise"])
    observed = (
        f"{cell.observed * 1e3:.4g} ms +-{half:.1%} ({result['n']} in "
        f"{result['seconds']:.0f} s, {result['ended']})"
    )
    return f"{observed}, {error}, {gateway}, {quiet}: {cell.says}"
