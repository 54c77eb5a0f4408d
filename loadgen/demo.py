"""The main job in a few minutes: calibrate a real engine, load it under every policy, put observed beside predicted.

Arrivals and lengths are the same under every policy and load (unit-rate gaps divided by the rate). Every cell is
bracketed by short calibrations; the law's shape comes from the designed cells before the runs, its speed and residual
from the run's own service times, never from its delays.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.client import Target
from loadgen.compare import Comparison, compare
from loadgen.gateway_process import GatewayError, GatewayProcess
from loadgen.picture import draw_picture
from loadgen.report import as_object, notes, table
from loadgen.run import Tally
from loadgen.sweep.apparatus import share_the_gateways_cpus
from loadgen.sweep.cell import Sending, begin
from loadgen.sweep.grid import Cell as SweptCell
from loadgen.theory import theory_of
from loadgen.timetable import draw
from policies import parse_policy, policy_batch_size
from queueing.distributions import parse_distribution
from queueing.latency import LatencyModel
from queueing.prediction import largest_stable_rate
from queueing.profile import Profile
from queueing.record import Record, write_run

POLICIES = ("single", "dynamic", "fixed:batch_size=4", "capped:max_batch_size=8", "elastic:max_batch_size=8", "continuous:max_batch_size=4")
LOADS = (0.3, 0.6)
OUTPUT_TOKENS = "uniform:low=8,high=24"
PROMPT_TOKENS = 32
MAX_OUTPUT_TOKENS = 32
MAX_NUM_SEQS = 16
SPEED_SECONDS = 2.0
# seconds of a cell: the fewer requests a policy serves a second, the longer its mean takes to settle
SECONDS = {"single": 30.0, "fixed": 20.0}
OTHER_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo measures."""

    model: str = "tiny"
    engine: str = "auto"
    port: int = 8080
    seed: int = 1
    scale: float = 1.0  # of the time of every cell
    folder: Path = Path("runs/demo")
    policies: Sequence[str] = POLICIES
    loads: Sequence[float] = LOADS


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one load, and what came of it."""

    load: float
    comparison: Comparison
    speeds: tuple[float, float]  # of the short calibrations before and after


async def run_demo(plan: Plan, console: Console, *, once: bool) -> list[Cell]:
    """The whole demo; keeps serving afterwards unless `once`."""
    arguments = [
        plan.model,
        *("--engine", plan.engine, "--allow-forced-lengths", "--max-output-tokens", str(MAX_OUTPUT_TOKENS)),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--record-file", str(plan.folder / "gateway.jsonl"), "--served-model-name", "tiny"),
    ]
    async with GatewayProcess(arguments, plan.port, plan.folder / "gateway.log") as gateway:
        with _progress(console) as progress:
            cells = await _Demo(plan, gateway, progress).run()
        _report(plan, cells, console)
        if not once:
            console.print(
                f"\nThe gateway goes on serving at {gateway.url} (metrics: {gateway.url}/metrics). Ctrl-C ends it.", highlight=False
            )
            await gateway.finished()
    return cells


class _Demo:
    """One run of the plan against a gateway."""

    def __init__(self, plan: Plan, gateway: GatewayProcess, progress: Progress) -> None:
        self._plan = plan
        self._gateway = gateway
        self._progress = progress
        self._lengths = parse_distribution(OUTPUT_TOKENS)

    async def run(self) -> list[Cell]:
        starting = self._progress.add_task("engine starts", total=None)
        await self._gateway.ready()
        share_the_gateways_cpus()
        self._done(starting, "engine ready")
        calibrating = self._progress.add_task("calibrating the engine's law", total=None)
        body = {"max_output_tokens": MAX_OUTPUT_TOKENS, "prompt_tokens": PROMPT_TOKENS, "repeats": 5}
        profile = Profile.from_dict(await self._gateway.ask("POST", "/admin/calibrate", body))
        profile.save(self._plan.folder / "profile.json")
        self._done(calibrating, f"law: R2 {profile.r2:.4f}, cells within {profile.mape:.1%} on average")
        cells, speed = [], await self._speed()
        for load in self._plan.loads:
            for policy in self._plan.policies:
                records, rate = await self._cell(policy, load, profile.law.at_speed(1.0))
                after = await self._speed()
                comparison = self._compare(records, profile.law.at_speed(1.0), rate)
                cells.append(Cell(load, comparison, (speed, after)))
                speed = after
        return cells

    async def _speed(self) -> float:
        body = {"speed_only": True, "seconds": SPEED_SECONDS, "max_output_tokens": MAX_OUTPUT_TOKENS, "prompt_tokens": PROMPT_TOKENS}
        return Profile.from_dict(await self._gateway.ask("POST", "/admin/calibrate", body)).law.speed

    async def _cell(self, policy_text: str, load: float, law: LatencyModel) -> tuple[list[Record], float]:
        """Load under one policy; the gateway's own records of it, and the asked rate."""
        plan, policy = self._plan, parse_policy(policy_text)
        prompts = parse_distribution(f"deterministic:value={PROMPT_TOKENS}")
        rate = load * largest_stable_rate(policy, self._lengths, law, max_num_seqs=MAX_NUM_SEQS, prompt_tokens=prompts)
        whole = policy_batch_size(policy) or 1  # fixed batching would keep the last, partial batch waiting
        count = whole * max(1, round(rate * SECONDS.get(policy.name, OTHER_SECONDS) * plan.scale / whole))
        name = f"{load}-{policy.name}"
        cell = SweptCell(name=name, policy=policy_text, load=load, rate=rate, max_output_tokens=MAX_OUTPUT_TOKENS, count=count)
        bar = self._progress.add_task(f"load {load}  {policy_text}", total=count)
        run = await Sending(
            client=self._gateway,
            begun=await begin(self._gateway, plan.folder / "gateway.jsonl", cell),
            cell=cell,
            timetable=draw(rate, count, plan.seed, prompts, self._lengths),
            target=Target(base_url=self._gateway.url, model="tiny", max_tokens=MAX_OUTPUT_TOKENS),
            seed=plan.seed,
            configuration={"output_tokens": OUTPUT_TOKENS},
            progress=_Bar(self._progress, bar),
            path=plan.folder / f"load-{name}.jsonl",
            stop_unstable=False,
        ).run()
        if run.ended == "interrupted":
            raise asyncio.CancelledError
        if run.ended != "complete":
            raise GatewayError(run.why)
        write_run(plan.folder / f"gateway-{name}.jsonl", run.header, run.records)
        self._done(bar, f"load {load}  {policy_text}")
        return run.records, rate

    def _compare(self, records: list[Record], law: LatencyModel, rate: float) -> Comparison:
        (comparison,) = compare(records, theory_of(law, self._lengths, asked_rate=rate, max_num_seqs=MAX_NUM_SEQS))
        return comparison

    def _done(self, task: Any, text: str) -> None:
        self._progress.update(task, description=text, total=1, completed=1)
        if not self._progress.console.is_terminal:  # no bars there: a line for every step
            self._progress.console.print(f"{self._progress.tasks[task].elapsed or 0:5.0f} s  {text}", highlight=False)


class _Bar:
    """A cell's progress."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self._progress, self._task = progress, task

    async def show(self, tally: Tally) -> None:
        """Four times a second."""
        while True:
            self._progress.update(self._task, completed=tally.completed + tally.other)
            await asyncio.sleep(0.25)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _report(plan: Plan, cells: Sequence[Cell], console: Console) -> None:
    comparisons = [dataclasses.replace(cell.comparison, load=cell.load) for cell in cells]
    console.print(table(comparisons))
    for line in notes(comparisons):
        console.print(line, highlight=False)
    drift = [abs(after / before - 1) for before, after in (cell.speeds for cell in cells)]
    console.print(f"speed of the machine between two short calibrations: changed by {max(drift):.0%} at most", highlight=False)
    found = [as_object(comparison) | {"bracketing_speeds": cell.speeds} for cell, comparison in zip(cells, comparisons, strict=True)]
    (plan.folder / "comparison.json").write_bytes(msgspec.json.format(msgspec.json.encode(found, enc_hook=float), indent=1))
    picture = draw_picture(comparisons, plan.folder / "observed-and-predicted.png")
    console.print(f"run files and picture: {plan.folder}/ ({picture.name})", highlight=False)
