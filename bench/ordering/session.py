"""One part measured: gateway up, law calibrated, then round after round, each cell on the disk
before the next begins.

    pilot: speed under load -> rate of the round -> its orders at random: load sent, records kept

A cell that was not quiet is measured once more, at once; the quieter attempt counts. A session
that was cut goes on with the cells that have no file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.ordering.design import LIMIT, PREDICTION, Part, Rules, name_of
from bench.ordering.observed import columns_of, quietness
from loadgen.gateway.gateway_process import GatewayError
from loadgen.sweep.cell import CellRun, CellSender, begin
from loadgen.sweep.gateway import stop_left_behind
from loadgen.sweep.grid import SweepCell
from loadgen.sweep.rig import Rig
from loadgen.sweep.status import duration
from queueing.arrivals.length_prediction import parse_length_prediction
from queueing.arrivals.timetable import Timetable, draw, with_predictions
from queueing.measurement.machine import hardware

LOST = 3  # attempts of a cell whose gateway is lost
PILOT = 500  # seed of a pilot, added to that of its round
_Found = TypeVar("_Found")


@dataclass(slots=True)
class Session:
    """What is left of one part."""

    rig: Rig
    part: Part
    rules: Rules

    async def run(self) -> None:
        """Measure what has no file. Raises GatewayError, CancelledError; what is done stays
        done.
        """
        missing = [cell for cell in self.part.cells if not self._path(*cell).is_file()]
        if not missing:
            return
        if stop_left_behind(self.rig.store.folder):
            self.rig.status.note("a gateway that a killed session left behind was ended")
        try:
            await self.rig.open()
            self._announce(missing)
            for number in sorted({number for number, _ in missing}):
                await self._round(number, [text for round_, text in missing if round_ == number])
        finally:
            await self.rig.close()

    def _path(self, number: int, policy: str) -> Path:
        return self.rig.store.folder / f"cells/{name_of(number, policy)}.json"

    def _announce(self, missing: list[tuple[int, str]]) -> None:
        seconds = self.rules.sent(self.part.requests) / self._rate(1.0) + self.rules.overhead
        rounds = len({number for number, _ in missing})
        pilot = len(self.part.pilots) * (self.rules.pilot + self.rules.overhead)
        total = len(missing) * seconds + rounds * pilot
        self.rig.status.note(
            f"{self.part.name}: {len(missing)} cells of about {duration(seconds)} each, at the "
            f"calibrated speed {duration(total)} in all"
        )

    def _rate(self, speed: float) -> float:
        model = self.rig.basis.at_speed(speed).model(self.part.policies[0], LIMIT)
        return self.part.load * model.largest_stable_rate

    async def _round(self, number: int, policies: list[str]) -> None:
        rng = np.random.default_rng((self.rig.plan.seed, number))
        places = rng.permutation(len(self.part.policies)).tolist()
        shuffled = [text for text in (self.part.policies[p] for p in places) if text in policies]
        speed = await self._guarded(lambda: self._pilot(number))
        for place, policy in enumerate(shuffled, 1):
            self.rig.status.left_after = (len(shuffled) - place) * self._seconds(speed)
            shown = f"{self.part.name}, round {number} of {self.part.rounds}, {policy}"
            await self._quietest(number, policy, speed, shown)

    def _seconds(self, speed: float) -> float:
        return self.rules.sent(self.part.requests) / self._rate(speed) + self.rules.overhead

    async def _guarded(self, measure: Callable[[], Awaitable[_Found]]) -> _Found:
        """Raises GatewayError when the gateway was lost too often."""
        for _ in range(LOST):
            try:
                return await measure()
            except GatewayError as error:
                await self.rig.recover(str(error))
        raise GatewayError(f"given up after {LOST} attempts; the same command goes on")

    # one run

    async def _pilot(self, number: int) -> float:
        """The speed under load that all orders of a round go by."""
        events = self.rig.store.journal.events
        for event in events:
            if event["event"] == "round" and event["number"] == number:
                return float(event["speed"])
        first_come, speed = self.part.policies[0], 1.0
        for place, load in enumerate(self.part.pilots):
            rate = self._rate(speed) * load / self.part.load
            run = await self._run(
                first_come,
                rate,
                round(rate * self.rules.pilot),
                self._seed(number) + PILOT * (place + 1),
                f"round {number}: pilot at load {load:g}",
            )
            law = self.rig.basis.law
            speed, _ = quietness(run.records, first_come, law, self.rules.block)
        self.rig.store.append("round", number=number, speed=speed, rate=self._rate(speed))
        self.rig.status.note(
            f"round {number}: the engine takes {speed:.2f} times the law's time under load; "
            f"{self._rate(speed):.1f} requests/s"
        )
        return speed

    async def _quietest(self, number: int, policy: str, speed: float, shown: str) -> None:
        """Of the attempts that a cell takes, the one whose speed changed least is kept."""
        best: dict[str, Any] | None = None
        for attempt in range(1, self.rules.attempts + 1):
            self.rig.store.append("started", cell=name_of(number, policy), attempt=attempt)
            found = await self._guarded(lambda: self._attempt(number, policy, speed, shown))
            noise = found["noise"]
            if best is None or noise < best["noise"]:
                best = found
            if noise <= 1.0:
                break
            self.rig.status.note(
                f"{shown}: not quiet, {noise:.1f} times as far from the pilot's speed as allowed"
            )
        self.rig.store.write_json(f"cells/{name_of(number, policy)}.json", best)
        self.rig.store.append("done", cell=name_of(number, policy), files={}, ended="complete")

    async def _attempt(self, number: int, policy: str, speed: float, shown: str) -> dict[str, Any]:
        rate, seed = self._rate(speed), self._seed(number)
        run = await self._run(policy, rate, self.rules.sent(self.part.requests), seed, shown)
        columns = columns_of(run.records)
        if len(columns["arrived_at"]) < self.rules.sent(self.part.requests):
            raise GatewayError(f"{shown}: not every request was answered ({run.why or 'failed'})")
        own, blocks = quietness(run.records, policy, self.rig.basis.law, self.rules.block)
        rules = self.rules
        worst = max((abs(block / own - 1) for block in blocks), default=0.0)
        apart = abs(own / speed - 1)
        assert run.load is not None
        self.rig.status.note(
            f"{shown}: mean delay {1e3 * float(np.mean(columns['queueing_delay'])):.3g} ms, speed "
            f"{own:.2f} (pilot {speed:.2f}), blocks within {worst:.0%}"
        )
        return {
            "round": number,
            "policy": policy,
            "slots": self.part.slots,
            "rate": rate,
            "seed": seed,
            "counted": self.part.requests,
            "first": rules.first(self.part.requests),
            "law": str(self.rig.basis.law),
            "max_num_seqs": self.rig.basis.bounds.max_num_seqs,
            "speed_of_pilot": speed,
            "estimated_speed": own,
            "block_speeds": blocks,
            "noise": max(worst / rules.block_deviation, apart / rules.pilot_deviation),
            "lateness": {"mean": run.load.lateness.mean, "p99": run.load.lateness.p99},
            "versions": run.header.versions | run.load.header.versions,
            "hardware": hardware() | run.header.hardware,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "columns": columns,
        }

    def _seed(self, number: int) -> int:
        return self.rig.plan.seed * 1000 + number

    async def _run(self, policy: str, rate: float, count: int, seed: int, shown: str) -> CellRun:
        """Every attempt has its own prompts: the engine would know those that came before."""
        rig = self.rig
        cell = SweepCell(
            name="run",
            policy=policy,
            load=self.part.load,
            rate=rate,
            max_output_tokens=LIMIT,
            count=count,
        )
        begun = await begin(rig.gateway.client, rig.gateway.record_file, cell, rig.status.note)
        rig.status.phase(shown, count / rate)
        sending = CellSender(
            client=rig.gateway.client,
            begun=begun,
            cell=cell,
            timetable=self._timetable(rate, count, seed),
            target=rig.target,
            seed=len(rig.store.journal.events) + 1,
            configuration={"prediction": PREDICTION},
            progress=rig.status,
            why_lost=rig.gateway.why_lost,
            stop_unstable=False,
        )
        run = await sending.run()
        if run.ended != "complete":
            raise GatewayError(run.why or run.ended)
        return run

    def _timetable(self, rate: float, count: int, seed: int) -> Timetable:
        basis = self.rig.basis
        drawn = draw(rate, count, seed, basis.prompt_tokens, basis.limited(LIMIT))
        return with_predictions(drawn, parse_length_prediction(PREDICTION), seed)
