"""`kendall summary`: the report of a load run, from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kendall.loadgen.commands.flags import SummaryCommand
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.sending.options import PANELS
from kendall.options import with_options
from kendall.policies.text import SpecError
from kendall.queueing.commands.shared_options import Json
from kendall.queueing.commands.terminal import console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("summary", cls=SummaryCommand)
@with_options(PANELS)
def summary_command(
    run_files: Annotated[
        list[Path],
        typer.Argument(
            help="Run files of `kendall load`, complete or interrupted, or result JSON of `vllm "
            "bench serve`.",
        ),
    ],
    report: ReportOptions,
    *,
    json: Json = False,
) -> None:
    """Print the report of saved load runs as `kendall load` prints it; the report of a killed run
    covers what was recorded.

    The exit status is the run's: 3 if too many requests failed, the records are wrong or a
    condition does not hold, 1 if the run did not end.
    """
    from kendall.loadgen.report.files.saved_run import read_results  # noqa: PLC0415
    from kendall.loadgen.report.load_report import parse_wishes, report_on, with_pages  # noqa: PLC0415 - numerics, which `--help` need not wait for

    wishes = parse_wishes(report)
    results = read_results(run_files)
    if len(results) > 1 and (report.html or report.csv):
        flag = "--html" if report.html else "--csv"
        raise SpecError(f"got {flag} with {len(results)} runs; expected one run for one file")
    reports = [
        (name, with_pages(report_on(result, wishes), result, report)) for name, result in results
    ]
    if json:
        objects = [{"run": name, **report.as_object()} for name, report in reports]
        typer.echo(msgspec.json.encode(objects[0] if len(objects) == 1 else {"runs": objects}))
    else:
        for place, (name, of_run) in enumerate(reports):
            if len(reports) > 1:
                typer.echo(f"{'' if place == 0 else chr(10)}{name}")
            of_run.print(console())
    raise typer.Exit(max(report.status for _, report in reports))
