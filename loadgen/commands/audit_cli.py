"""`kendall audit`: are the arrivals of a run what they are said to be?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loadgen.commands.flags import option
from policies.text import CommaList, SpecError, short_number, suggest

if TYPE_CHECKING:
    from loadgen.report.audit import Stream
    from queueing.commands.terminal import Table
    from queueing.measurement.arrival_audit import Audit, Budget
    from queueing.measurement.record import Header, Record

app = typer.Typer(add_completion=False)
REQUIREMENTS = ("poisson", "timetable")


@app.command("audit")
def audit_command(
    run_files: Annotated[
        list[Path],
        typer.Argument(
            help=(
                "Run files of a load generator, a gateway or a simulation, or result JSON of "
                "`vllm bench serve`."
            )
        ),
    ],
    *,
    asked_rate: Annotated[
        float | None,
        option(
            "--asked-rate",
            "Requested arrival rate in requests per second. Default: the header's.",
        ),
    ] = None,
    process: Annotated[
        str | None,
        option(
            "--process",
            "Requested arrival process; only poisson is tested. Default: the header's.",
        ),
    ] = None,
    significance: Annotated[
        float,
        option(
            "--significance", "Significance level: the fraction of true Poisson streams that fail."
        ),
    ] = 0.01,
    lateness_budget: Annotated[
        str | None,
        option(
            "--lateness-budget",
            "Largest allowed lateness against the timetable. Default: mean=1ms,p99=5ms.",
            parser=CommaList(),
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        option(
            "--require",
            "poisson | timetable: exit status 3 if the run fails this test. Repeatable.",
        ),
    ] = None,
    json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False,
) -> None:
    """Test whether the arrivals of a run are a Poisson process and kept to their timetable, and
    name each deviation.

    Each test reports its statistic and p-value; together they reject a true Poisson stream in at
    most --significance of all audits.
    """
    _check(asked_rate, process, significance, require or [])
    streams = _streams(run_files, asked_rate, process)
    audits = [(stream, stream.audit(significance, _budget(lateness_budget))) for stream in streams]
    exact = _spans(audits)
    if json:
        objects = [
            {"name": s.name, "instants": s.what, "incomplete": s.incomplete, **_object(audit)}
            for s, audit in audits
        ]
        typer.echo(msgspec.json.encode({"audits": objects, "spans_too_exact_p_value": exact}))
    else:
        _print(audits, exact)
    if not all(_meets(audit, wanted) for _, audit in audits for wanted in require or []):
        raise typer.Exit(3)


def _check(
    asked_rate: float | None, process: str | None, significance: float, require: list[str]
) -> None:
    from loadgen.report.audit import PROCESSES  # noqa: PLC0415 - numerics

    if process is not None and process not in PROCESSES:
        raise SpecError(
            f"got --process {process}; expected one of "
            f"{', '.join(PROCESSES)}{suggest(process, PROCESSES)}"
        )
    if asked_rate is not None and not 0 < asked_rate < float("inf"):
        raise SpecError(f"got --asked-rate {asked_rate}; expected requests per second > 0")
    if not 0 < significance < 1:
        raise SpecError(f"got --significance {significance}; expected a share between 0 and 1")
    for wanted in require:
        if wanted not in REQUIREMENTS:
            raise SpecError(f"got --require {wanted}; expected {' or '.join(REQUIREMENTS)}")


def _budget(text: str | None) -> Budget | None:
    from loadgen.report.load_verdict import parse_budget  # noqa: PLC0415 - numerics

    return None if text is None else parse_budget(text)


def _streams(paths: list[Path], asked_rate: float | None, process: str | None) -> list[Stream]:
    from loadgen.report.audit import streams_of  # noqa: PLC0415 - numerics

    try:
        found = streams_of([(path, *_read(path)) for path in paths])
    except ValueError as error:
        raise SpecError(str(error)) from None
    return [
        dataclasses.replace(
            stream,
            asked_rate=stream.asked_rate if asked_rate is None else asked_rate,
            process=stream.process if process is None else process,
        )
        for stream in found
    ]


def _read(path: Path) -> tuple[Header, list[Record], bool]:
    from loadgen.report.files.bench_read import read_either  # noqa: PLC0415

    try:
        return read_either(path)
    except OSError as error:
        raise SpecError(f"got {path}: {error.strerror}; expected a run file") from None


def _spans(audits: list[tuple[Stream, Audit]]) -> float | None:
    """Of several Poisson runs with a rate asked: the p-value of spans as near to n / rate as
    theirs; None for fewer.
    """
    from queueing.measurement.arrival_tests import too_exact  # noqa: PLC0415

    runs = [a for _, a in audits if a.process == "poisson" and a.asked_rate is not None and a.tests]
    if len(runs) < 2:
        return None
    return too_exact([(a.n - 1, a.span * (a.asked_rate or 1.0)) for a in runs], 1.0).p_value


def _object(audit: Audit) -> dict[str, Any]:
    return dataclasses.asdict(audit) | {"good": audit.good}


def _meets(audit: Audit, wanted: str) -> bool:
    return audit.poisson is True if wanted == "poisson" else audit.valid is True


def _print(audits: list[tuple[Stream, Audit]], exact: float | None) -> None:
    from queueing.commands.terminal import console, say  # noqa: PLC0415

    to = console()
    for stream, audit in audits:
        for line in _lines(stream, audit):
            say(to, line)
        if audit.tests:
            to.print(_table(audit))
        say(to, "")
    if exact is not None:
        said = "closer than chance: rescaled schedules" if exact < 0.01 else "within chance"
        say(to, f"lengths of the runs against n / rate: {said} (p = {exact:.2g})")


def _lines(stream: Stream, audit: Audit) -> list[str]:
    lines = [f"{stream.name}: {audit.verdict}"]
    if audit.tests:
        asked = "" if audit.asked_rate is None else f", asked {short_number(audit.asked_rate, 6)}"
        found = (
            f"{short_number(audit.rate)} per second (95 %: {short_number(audit.rate_low)} to "
            f"{short_number(audit.rate_high)}{asked})"
        )
        lines.append(f"{audit.n} {stream.what} in {short_number(audit.span)} s, {found}")
    if (late := audit.lateness) is not None:
        kept = "within its budget" if late.within else "INVALID: beyond its budget"
        budget = f"mean {late.budget.mean * 1e3:g} ms, p99 {late.budget.p99 * 1e3:g} ms"
        mean, p99 = short_number(late.mean * 1e3, 3), short_number(late.p99 * 1e3, 3)
        lines.append(f"late by {mean} ms on average, p99 {p99} ms: {kept} ({budget})")
    lines += stream.incomplete
    if audit.tests and audit.process != "poisson":
        lines.append(
            "the tests below are for a Poisson process; their results do not enter the verdict"
        )
    return lines


def _table(audit: Audit) -> Table:
    from queueing.commands.terminal import Column, Table  # noqa: PLC0415

    columns = (
        Column(heading="test", left=True),
        Column(heading="p-value"),
        Column(heading=""),
        Column(heading="finding", sentence=True),
    )
    rows = [
        (test.name, f"{test.p_value:.3g}", "FAILS" * (not test.holds), test.says)
        for test in audit.tests
    ]
    return Table(columns, rows, keys=2)
