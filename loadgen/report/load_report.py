"""The report of `kendall load` on a run: the summary, whether it was the run that was asked for,
which conditions broke.

Exit status: 3 where more requests failed than --max-failed-fraction allows, the records contradict
Little's law, or a condition or a lateness budget that was asked for is broken; 1 where the run was
interrupted, nothing was completed or a sender died; else 0. A run whose sender was late or sent
other arrivals than asked is INVALID, and says so, with status 0 unless --lateness-budget was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kendall.loadgen.compare.assertions import (
    Assertion,
    Broken,
    check,
    parse_assertions,
    parse_objectives,
    percentiles_of,
    require_known,
)
from kendall.loadgen.measures.failures import ALLOWED, parse_share
from kendall.loadgen.measures.goodput import Limit, parse_goodput
from kendall.loadgen.measures.metrics import ITL, ORDER, parse_percentiles
from kendall.loadgen.report.audit import asked
from kendall.loadgen.report.files.bench_json import (
    BENCH_METRICS,
    BenchOptions,
    bench_result,
    write_bench_json,
)
from kendall.loadgen.report.files.result_files import ResultFiles
from kendall.loadgen.report.html.load_page import LoadPage, write_load_csv, write_load_page
from kendall.loadgen.report.load_verdict import BUDGET, LoadVerdict, judge, parse_budget
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.report.summary import PERCENTILES, LoadSummary, summarise_load
from kendall.loadgen.report.summary_text import (
    histogram_table,
    load_lines,
    load_notes,
    load_table,
    part_tables,
    status_table,
)
from kendall.loadgen.report.summary_values import flat, names
from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import LoadPlan
from kendall.loadgen.sending.run import LoadResult
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.spec_text import listed
from kendall.queueing.commands.terminal import say
from kendall.queueing.measurement.arrival_audit import Budget
from kendall.queueing.measurement.paths import check_distinct

METRIC_NAMES = tuple(dict.fromkeys((*ORDER, *BENCH_METRICS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The metrics that the user asks for, and the conditions that must hold."""

    metrics: tuple[str, ...] = ORDER
    percentiles: tuple[float, ...] = PERCENTILES
    limits: tuple[Limit, ...] = ()
    assertions: tuple[Assertion, ...] = ()
    budget: Budget = BUDGET
    budget_asked: bool = False
    max_failed: float = ALLOWED

    @property
    def computed(self) -> tuple[float, ...]:
        """Percentiles that are shown or that conditions ask for."""
        return tuple(sorted({*self.percentiles, *percentiles_of(self.assertions)}))

    @property
    def token_times(self) -> bool:
        """True where gaps between tokens were asked for by name: then every token's instant is
        recorded.
        """
        return (ITL in self.metrics and self.metrics != ORDER) or any(
            one.name.endswith(f"_{ITL}") for one in self.assertions
        )


def parse_wishes(options: ReportOptions) -> Wishes:
    """A condition on an unknown name is refused before the run. Raises SpecError."""
    check_distinct({"--html": options.html, "--csv": options.csv})
    metrics, percentiles, budget = (
        options.percentile_metrics,
        options.metric_percentiles,
        options.lateness_budget,
    )
    shown = ORDER if metrics is None else tuple(name for name in listed(metrics) if name)
    if not shown or not set(shown) <= set(METRIC_NAMES):
        raise SpecError(f"got metrics {metrics!r}; expected some of {', '.join(METRIC_NAMES)}")
    wishes = Wishes(
        metrics=shown,
        percentiles=PERCENTILES if percentiles is None else parse_percentiles(percentiles),
        limits=parse_goodput(options.goodput) if options.goodput else (),
        assertions=(*parse_assertions(options.assertions), *parse_objectives(options.slo)),
        budget=BUDGET if budget is None else parse_budget(budget),
        budget_asked=budget is not None,
        max_failed=parse_share("--max-failed-fraction", options.max_failed_fraction),
    )
    require_known(wishes.assertions, names(wishes.computed))
    return wishes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The summary of a run, its verdict, and the conditions that it broke."""

    wishes: Wishes
    summary: LoadSummary
    verdict: LoadVerdict
    broken: tuple[Broken, ...]
    files: tuple[Path, ...] = ()

    @property
    def status(self) -> int:
        """The exit status of the command."""
        asked = ("lateness",) if self.wishes.budget_asked else ()
        if self.broken or self.verdict.invalid_for("failures", "wrong", *asked):
            return 3
        return (
            1
            if self.summary.interrupted or not self.summary.completed or self.verdict.missing
            else 0
        )

    def as_object(self) -> dict[str, Any]:
        """The object of `--json`."""
        broken = [str(one) for one in self.broken]
        return {
            **self.summary.as_object(),
            **self.verdict.as_object(),
            "broken": broken,
            "files": [str(path) for path in self.files],
        }

    def print(self, console: Console) -> None:
        """Print it for people."""
        for line in (*load_lines(self.summary), *self.verdict.lines()):
            say(console, line, hang=14)
        metrics = [name for name in self.wishes.metrics if name in ORDER]
        ascii_only = console.options.ascii_only
        tables = (
            load_table(self.summary, metrics),
            histogram_table(self.summary, metrics, ascii_only=ascii_only),
            *part_tables(self.summary),
            status_table(self.summary),
        )
        say(console, "")
        for table in filter(None, tables):
            console.print(table)
            say(console, "")
        for line in (*load_notes(self.summary), *(f"written: {path}" for path in self.files)):
            say(console, line)
        for line in (*self.verdict.why_invalid(), *(f"broken: {one}" for one in self.broken)):
            say(console, line, style="bold red")


def report_on(result: LoadResult, wishes: Wishes, files: Sequence[Path] = ()) -> Report:
    """Summarise and judge a run, one that has just ended or one from its file."""
    _, asked_rate = asked(result.header.configuration)
    summary = summarise_load(result, asked_rate, percentiles=wishes.computed, limits=wishes.limits)
    verdict = judge(
        result, budget=wishes.budget, max_failed=wishes.max_failed, little=summary.little
    )
    return Report(
        wishes=wishes,
        summary=summary,
        verdict=verdict,
        broken=tuple(
            check(wishes.assertions, flat(summary) | {"failed": float(verdict.failures.failed)})
        ),
        files=tuple(files),
    )


def with_pages(report: Report, result: LoadResult, options: ReportOptions) -> Report:
    """Write the HTML report and the CSV table that were asked for. Raises CommandError."""
    files = list(report.files)
    if options.html is not None:
        broken = [str(one) for one in report.broken]
        page = LoadPage(result, report.summary, report.verdict, broken)
        files.append(write_load_page(page, options.html))
    if options.csv is not None:
        files.append(write_load_csv(report.summary, options.csv))
    return replace(report, files=tuple(files))


def save_bench(
    files: ResultFiles, plan: LoadPlan, options: LoadOptions, result: LoadResult, report: Report
) -> None:
    """The file that readers of `vllm bench serve` understand; the report stands under a key of its
    own.
    """
    if files.bench is None:
        return
    wishes, asked_for = report.wishes, files.options
    shown = BenchOptions(
        model_id=str(result.header.configuration.get("model")),
        backend="openai-chat" if options.chat else "openai",
        label=asked_for.label,
        num_prompts=len(plan.timetable),
        metadata=asked_for.metadata,
        request_rate=plan.asked_rate or math.inf,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        percentile_metrics=tuple(name for name in wishes.metrics if name in BENCH_METRICS),
        metric_percentiles=wishes.percentiles,
        goodput=wishes.limits,
        save_detailed=asked_for.save_detailed,
    )
    write_bench_json(
        files.bench,
        bench_result(result.records, shown, extras={"kendall": report.as_object()}),
        append=asked_for.append_result,
    )
