"""`kendall summary`: the report of a load run, from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kendall.loadgen.commands.flags import (
    SummaryCommand,
    lateness_budget_option,
    max_failed_option,
    metrics_option,
    option,
    percentiles_option,
)
from kendall.loadgen.measures.failures import ALLOWED
from kendall.queueing.commands.terminal import console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("summary", cls=SummaryCommand)
def summary_command(
    run_files: Annotated[
        list[Path],
        typer.Argument(
            help="Run files of `kendall load`, complete or interrupted, or result JSON of `vllm "
            "bench serve`.",
        ),
    ],
    *,
    goodput: Annotated[
        list[str] | None,
        option(
            "--goodput",
            "Report goodput under these limits, for example 'ttft:100ms e2el:1s'; a bare "
            "number is in milliseconds. Repeatable.",
        ),
    ] = None,
    percentile_metrics: Annotated[str | None, metrics_option()] = None,
    metric_percentiles: Annotated[str | None, percentiles_option()] = None,
    lateness_budget: Annotated[str | None, lateness_budget_option()] = None,
    max_failed_fraction: Annotated[float, max_failed_option()] = ALLOWED,
    assertions: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            help="Condition on the result, for example 'p99_ttft < 200ms'; exit status 3 if it "
            "does not hold. Repeatable.",
        ),
    ] = None,
    json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False,
) -> None:
    """Print the report of saved load runs as `kendall load` prints it; the report of a killed run
    covers what was recorded.

    The exit status is the run's: 3 if too many requests failed, the records are wrong or a
    condition does not hold, 1 if the run did not end.
    """
    from kendall.loadgen.report.files.saved_run import read_results  # noqa: PLC0415
    from kendall.loadgen.report.load_report import parse_wishes, report_on  # noqa: PLC0415 - numerics, which `--help` need not wait for

    wishes = parse_wishes(
        metrics=percentile_metrics,
        percentiles=metric_percentiles,
        goodput=goodput or [],
        assertions=assertions or [],
        budget=lateness_budget,
        max_failed=max_failed_fraction,
    )
    reports = [(name, report_on(result, wishes)) for name, result in read_results(run_files)]
    if json:
        objects = [{"run": name, **report.as_object()} for name, report in reports]
        typer.echo(msgspec.json.encode(objects[0] if len(objects) == 1 else {"runs": objects}))
    else:
        for place, (name, report) in enumerate(reports):
            if len(reports) > 1:
                typer.echo(f"{'' if place == 0 else chr(10)}{name}")
            report.print(console())
    raise typer.Exit(max(report.status for _, report in reports))
