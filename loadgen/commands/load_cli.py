"""The command `kendall load`: its flags. What they mean: loadgen/sending/options.py; what is said
of a run: loadgen/report/load_report.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from typing import Annotated

import msgspec
import typer

from kendall.loadgen.commands.flags import LoadCommand
from kendall.loadgen.commands.progress import for_stderr
from kendall.loadgen.report.files.result_files import (
    ResultFiles,
    ResultOptions,
    parse_metadata,
    result_files,
    save_plan,
)
from kendall.loadgen.report.load_report import (
    Report,
    Wishes,
    parse_wishes,
    report_on,
    save_bench,
    with_pages,
)
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.sending.operating_system import cancelled_by
from kendall.loadgen.sending.options import PANELS, RESULTS, WHERE, LoadOptions
from kendall.loadgen.sending.plan import LoadPlan, plan_load
from kendall.loadgen.sending.run import LoadResult
from kendall.options import flag_option, with_options
from kendall.queueing.commands.environment_variables import flags_first, from_environment
from kendall.queueing.commands.shared_options import ABOUT_JSON
from kendall.queueing.commands.terminal import console
from kendall.queueing.measurement.paths import (
    cannot_write,
)
from kendall.remote import host_url

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# of arrivals: one of them
SOURCES = (
    "request_rate",
    "arrivals",
    "ramp_up_strategy",
    "trace",
    "timetable",
)


@app.command("load", cls=LoadCommand)
@with_options(PANELS)
def load(
    ctx: typer.Context,
    options: LoadOptions,
    report: ReportOptions,
    results: ResultOptions,
    *,
    base_url: Annotated[
        str | None,
        flag_option(WHERE, "URL of the server. Default: http://HOST:PORT.", "--base-url"),
    ] = None,
    host: Annotated[str, flag_option(WHERE, "Host of the server.", "--host")] = "127.0.0.1",
    port: Annotated[int, flag_option(WHERE, "Port of the server.", "--port")] = 8080,
    metadata: Annotated[
        list[str] | None,
        flag_option(RESULTS, "KEY=VALUE pairs to store in vLLM's JSON.", "--metadata"),
    ] = None,
    json: Annotated[bool, flag_option(RESULTS, ABOUT_JSON, "--json")] = False,
) -> None:
    """Send requests at instants drawn in advance and report delays measured from those instants.

    With --output-tokens (or a trace, a timetable, a dataset with lengths) every answer has its
    drawn length, set by a request field that `kendall serve --allow-forced-lengths` accepts,
    otherwise by ignore_eos and max_tokens. Ctrl-C or SIGTERM ends the run; the results so far are
    printed and saved.
    """
    given = flags_first(ctx, {name: getattr(options, name) for name in SOURCES}, SOURCES)
    if given["request_rate"] is None and from_environment(ctx, "burstiness"):
        given["burstiness"] = 1.0
    wishes = parse_wishes(report)
    options = dataclasses.replace(
        options,
        **given,
        base_url=host_url(host, port) if base_url is None else base_url,
        token_times=options.token_times or results.save_detailed or wishes.token_times,
    )
    results = dataclasses.replace(results, metadata=parse_metadata(metadata or []))
    plan = plan_load(options)
    files = result_files(results, plan.seed)
    of_run = _run(options, plan, wishes, files, report)
    if json:
        typer.echo(msgspec.json.encode(of_run.as_object()))
    else:
        of_run.print(console())
    raise typer.Exit(of_run.status)


def _run(
    options: LoadOptions,
    plan: LoadPlan,
    wishes: Wishes,
    files: ResultFiles,
    pages: ReportOptions,
) -> Report:
    plan, note = asyncio.run(plan.for_server())
    for line in filter(None, (note, plan.announced)):
        typer.echo(f"kendall: {line}", err=True)
    files = files.reserved()
    saved = save_plan(files, plan)

    async def sent() -> LoadResult:
        with cancelled_by(signal.SIGTERM):  # as Ctrl-C does
            return await plan.run(for_stderr(), files.run, saved)

    result = asyncio.run(sent())
    report = report_on(result, wishes)
    try:
        save_bench(files, plan, options, result, report)
    except OSError as error:
        missing = (*result.missing, cannot_write(files.bench or "", error))
        report = report_on(dataclasses.replace(result, missing=missing), wishes)
    report = dataclasses.replace(report, files=tuple(files.written()))
    return with_pages(report, result, pages)


if __name__ == "__main__":
    app()
