"""The main job in a few minutes: calibrate a real engine, load it under every policy, put the
model beside the requests that came.

Arrivals and lengths are the same under every policy and load (unit-rate gaps divided by the rate).
The law's shape comes from the designed cells before the runs, its speed and residual from the run's
own service times, never from its delays.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from kendall.loadgen.commands.demo_plan import BETWEEN_CELLS, DemoPlan
from kendall.loadgen.commands.demo_report import DemoCell, print_report
from kendall.loadgen.compare.compare import Comparison, compare
from kendall.loadgen.compare.picture import draw_picture
from kendall.loadgen.compare.theory import theory_of
from kendall.loadgen.datasets import draw_dataset, read_dataset
from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess
from kendall.loadgen.report.report import as_object
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.operating_system import pin_to_gateway_cpus
from kendall.loadgen.sweep.cell import CellRun, CellSender, begin
from kendall.loadgen.sweep.grid import SweepCell
from kendall.loadgen.sweep.status import Status, duration
from kendall.policies import parse_policy, policy_batch_size
from kendall.policies.text import counted
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.record import write_run
from kendall.queueing.prediction import largest_stable_rate

PROMPTS = Path(__file__).parents[1] / "prompts"


class DemoProgress(Status):
    """A status line that counts cells and is short enough for 80 columns."""

    def __init__(self, plan: DemoPlan) -> None:
        super().__init__(sys.stderr, notes_only=True)
        self._plan = plan
        self._cells_left = len(plan.cells)
        self._cell_ends = math.nan  # on the loop's clock

    def cell(self, number: int) -> None:
        """Begin the cell of this number."""
        load, policy = self._plan.cells[number]
        self._cells_left = len(self._plan.cells) - number
        self._cell_ends = asyncio.get_running_loop().time() + self._each
        self.phase(f"{policy} at {load:g}")

    def over(self) -> None:
        """End the count: no cell is left."""
        self._cells_left = 0

    @property
    def _each(self) -> float:
        return self._plan.seconds + BETWEEN_CELLS

    @property
    def line(self) -> str:
        """Cells and time to go, what is done now, and how many of its requests are answered."""
        if not self._cells_left:
            return self._phase
        now = asyncio.get_running_loop().time()
        ahead = self._cells_left * self._each
        if not math.isnan(self._cell_ends):
            ahead += max(0.0, self._cell_ends - now) - self._each
        seconds = ahead + max(0.0, self._phase_ends - now)
        cells = counted(self._cells_left, "cell")
        answered = (
            "" if self._counters is None else f" {self._counters.completed}/{self._counters.asked}"
        )
        return f"{cells} to go, {duration(seconds)}: {self._phase}{answered}"


async def run_demo(plan: DemoPlan, console: Console, *, once: bool) -> None:
    """The whole demo. Unless `once`, the gateway then serves until Ctrl-C or SIGTERM. Raises
    GatewayError where it cannot be measured or the gateway ends by itself.
    """
    # of an earlier run, whose cells have files of their own
    (plan.folder / "gateway.jsonl").unlink(missing_ok=True)
    began = datetime.now(UTC)
    log_file = plan.folder / "gateway.log"
    async with GatewayProcess(plan.serve_arguments, plan.port, log_file) as gateway:
        async with DemoProgress(plan) as progress:
            other = "" if plan.port == plan.asked_port else f"; port {plan.asked_port} is in use"
            progress.note(
                f"the gateway is at {gateway.url}/{other}; requests of other clients would "
                "disturb what is measured"
            )
            progress.note(
                f"{counted(len(plan.cells), 'cell')} of {plan.seconds:.0f} s, in all about "
                f"{duration(plan.lasts)}; the engine starts"
            )
            demo = Demo(plan, gateway, progress)
            cells = await demo.run()
            progress.phase("drawing the picture")
            picture = await asyncio.to_thread(demo.save, cells)
        print_report(cells, console)
        print_line = partial(console.print, highlight=False, soft_wrap=True)
        print_line("")
        print_line(f"run files and picture: {plan.folder}/ ({picture.name})")
        print_line(
            "what each difference is made of: kendall compare --sweep "
            f"{shlex.quote(str(plan.folder))}"
        )
        if once:
            return
        print_line("The gateway serves on; Ctrl-C ends it. The demo on its live page:")
        # the part of time that the page shows (server/page/static/view.js)
        zoom = f"{math.floor(began.timestamp())}-{math.ceil(datetime.now(UTC).timestamp())}"
        print_line(f"{gateway.url}/#zoom={zoom}")
        try:
            await gateway.finished()
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            sys.stderr.write("ending the gateway\n")
            return
        raise GatewayError(f"the gateway ended: {gateway.last_line()}")


class Demo:
    """One run of the plan against a gateway."""

    def __init__(self, plan: DemoPlan, gateway: GatewayProcess, progress: DemoProgress) -> None:
        self._plan = plan
        self._gateway = gateway
        self._progress = progress
        workload = plan.workload
        self._lengths = parse_distribution(workload.output_tokens, workload.max_output_tokens)
        self._prompts = parse_distribution(workload.prompt_tokens)
        self._dataset = (
            None if workload.prompts is None else read_dataset(PROMPTS / workload.prompts)
        )

    async def run(self) -> list[DemoCell]:
        """Calibrate, then measure every cell of the plan. Raises GatewayError."""
        workload = self._plan.workload
        self._progress.phase("the engine starts", workload.starting + workload.calibrating)
        await self._gateway.ready()
        pin_to_gateway_cpus()
        self._progress.note("engine ready")
        profile = await self.calibrate()
        law = profile.law.at_speed(1.0)
        cells: list[DemoCell] = []
        for number, (load, policy) in enumerate(self._plan.cells):
            self._progress.cell(number)
            run, rate = await self.measure(policy, load, law)
            self._progress.phase(f"{policy} at {load:g}: model")
            comparison = await asyncio.to_thread(self.compare, run, law, rate)
            cells.append(DemoCell(policy, load, comparison))
            self._progress.note(cells[-1].line)
        self._progress.over()
        return cells

    async def calibrate(self) -> Profile:
        """Measure the law of the engine and save it as a profile."""
        workload = self._plan.workload
        self._progress.phase("calibrating the engine's law", workload.calibrating)
        profile = Profile.from_dict(
            await self._gateway.ask("POST", "/admin/calibrate", dict(workload.calibration))
        )
        profile.save(self._plan.folder / "profile.json")
        self._progress.note(f"law: R2 {profile.r2:.4f}, cells within {profile.mape:.1%} on average")
        if profile.poor_fit is not None:
            self._progress.note(f"warning: {profile.poor_fit}")
        return profile

    async def measure(
        self, policy_text: str, load: float, law: LatencyModel
    ) -> tuple[CellRun, float]:
        """Load the gateway under one policy; the run and the requested rate. Raises
        GatewayError.
        """
        plan, policy, workload = self._plan, parse_policy(policy_text), self._plan.workload
        rate = load * largest_stable_rate(
            policy,
            self._lengths,
            law,
            max_num_seqs=workload.max_num_seqs,
            prompt_tokens=self._prompts,
        )
        # fixed batching would keep the last, partial batch waiting
        count = plan.count(rate, policy_batch_size(policy) or 1)
        name = plan.name(load, policy_text)
        cell = SweepCell(
            name=name,
            policy=policy_text,
            load=load,
            rate=rate,
            max_output_tokens=workload.max_output_tokens,
            count=count,
        )
        timetable, prompts = draw(rate, count, plan.seed, self._prompts, self._lengths), None
        answered = self._dataset is not None
        if self._dataset is not None:
            timetable, prompts = draw_dataset(timetable, self._dataset, plan.seed)
        record_file = plan.folder / "gateway.jsonl"
        run = await CellSender(
            client=self._gateway,
            begun=await begin(self._gateway, record_file, cell, self._progress.note),
            cell=cell,
            timetable=timetable,
            prompts=prompts,
            target=Target(
                base_url=self._gateway.url,
                model=plan.model,
                max_tokens=workload.max_output_tokens,
                chat=answered,
                natural_lengths=answered,
            ),
            seed=plan.seed,
            configuration={} if answered else {"output_tokens": workload.output_tokens},
            progress=self._progress,
            path=plan.folder / f"load-{name}.jsonl",
            stop_unstable=False,
        ).run()
        if run.ended == "interrupted":
            raise asyncio.CancelledError
        if run.ended != "complete":
            raise GatewayError(run.why)
        with writing(path := plan.folder / f"gateway-{name}.jsonl"):
            write_run(path, run.header, run.records)
        return run, rate

    def compare(self, run: CellRun, law: LatencyModel, rate: float) -> Comparison:
        """Observed delays of a run beside the model's."""
        theory = theory_of(
            law,
            None if self._dataset else self._lengths,
            asked_rate=rate,
            bounds=EngineBounds(max_num_seqs=self._plan.workload.max_num_seqs),
        )
        sent = run.load.records if run.load else []
        (comparison,) = compare(run.records, theory, sent, began_idle=True)
        return comparison

    def save(self, cells: Sequence[DemoCell]) -> Path:
        """Write the comparison as JSON and the picture; the picture's path."""
        folder = self._plan.folder
        comparisons = [dataclasses.replace(cell.comparison, load=cell.load) for cell in cells]
        objects = [as_object(comparison) for comparison in comparisons]
        with writing(path := folder / "comparison.json"):
            path.write_bytes(
                msgspec.json.format(msgspec.json.encode(objects, enc_hook=float), indent=1)
            )
        return draw_picture(comparisons, folder / "observed-and-predicted.png")
