"""`kendall audit`: are the arrivals of a run what they are said to be?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kendall.options import option, with_options
from kendall.policies.text import CommaList, SpecError, short_number, suggest
from kendall.queueing.commands.shared_options import Json

if TYPE_CHECKING:
    from kendall.loadgen.report.audit import Stream
    from kendall.queueing.measurement.arrival_audit import Audit

app = typer.Typer(add_completion=False)
REQUIREMENTS = ("poisson", "timetable")


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the arrivals are tested for."""

    asked_rate: float | None = option(
        "", "Requested arrival rate in requests per second. Default: the header's."
    )
    process: str | None = option(
        "", "Requested arrival process; only poisson is tested. Default: the header's."
    )
    significance: float = option(
        "",
        "Significance level: the fraction of true Poisson streams that fail.",
        default=0.01,
    )
    lateness_budget: str | None = option(
        "",
        "Largest allowed lateness against the timetable. Default: mean=1ms,p99=5ms.",
        parser=CommaList(),
    )
    require: tuple[str, ...] = option(
        "",
        "poisson | timetable: exit status 3 if the run fails this test. Repeatable.",
        default=(),
    )

    def check(self) -> None:
        """Raises SpecError."""
        from kendall.loadgen.report.audit import PROCESSES  # noqa: PLC0415 - numerics

        process, rate = self.process, self.asked_rate
        if process is not None and process not in PROCESSES:
            raise SpecError(
                f"got --process {process}; expected one of "
                f"{', '.join(PROCESSES)}{suggest(process, PROCESSES)}"
            )
        if rate is not None and not 0 < rate < float("inf"):
            raise SpecError(f"got --asked-rate {rate}; expected requests per second > 0")
        if not 0 < self.significance < 1:
            raise SpecError(
                f"got --significance {self.significance}; expected a share between 0 and 1"
            )
        for wanted in self.require:
            if wanted not in REQUIREMENTS:
                raise SpecError(f"got --require {wanted}; expected {' or '.join(REQUIREMENTS)}")


@app.command("audit")
@with_options()
def audit_command(
    run_files: Annotated[
        list[Path],
        typer.Argument(
            help="Run files of a load generator, a gateway or a simulation, or result files of "
            "`vllm bench serve`, GuideLLM, AIPerf or inference-perf.",
        ),
    ],
    options: AuditOptions,
    *,
    json: Json = False,
) -> None:
    """Test whether the arrivals of a run are a Poisson process and kept to their timetable, and
    name each deviation.

    Each test reports its statistic and p-value; together they reject a true Poisson stream in at
    most --significance of all audits.
    """
    from kendall.loadgen.report.load_verdict import parse_budget  # noqa: PLC0415 - numerics

    options.check()
    streams = _streams(run_files, options)
    budget = options.lateness_budget
    limits = None if budget is None else parse_budget(budget)
    audits = [(stream, stream.audit(options.significance, limits)) for stream in streams]
    exact = _spans(audits)
    if json:
        objects = [
            {"name": stream.name, "instants": stream.what, "incomplete": stream.incomplete}
            | dataclasses.asdict(audit)
            | {"good": audit.good}
            for stream, audit in audits
        ]
        typer.echo(msgspec.json.encode({"audits": objects, "spans_too_exact_p_value": exact}))
    else:
        _print(audits, exact)
    if not (
        all(audit.poisson is True for _, audit in audits if "poisson" in options.require)
        and all(audit.valid is True for _, audit in audits if "timetable" in options.require)
    ):
        raise typer.Exit(3)


def _streams(paths: list[Path], asked: AuditOptions) -> list[Stream]:
    from kendall.loadgen.report.audit import streams_of  # noqa: PLC0415 - numerics
    from kendall.loadgen.report.files.bench_read import read_either  # noqa: PLC0415

    runs = []
    try:
        for path in paths:
            try:
                runs.append((path, *read_either(path)))
            except OSError as error:
                raise SpecError(f"got {path}: {error.strerror}; expected a run file") from None
        streams = streams_of(runs)
    except ValueError as error:
        raise SpecError(str(error)) from None
    return [
        dataclasses.replace(
            stream,
            asked_rate=stream.asked_rate if asked.asked_rate is None else asked.asked_rate,
            process=stream.process if asked.process is None else asked.process,
        )
        for stream in streams
    ]


def _spans(audits: list[tuple[Stream, Audit]]) -> float | None:
    """The p-value of spans as near to n / rate as those of the Poisson runs whose rate was
    requested; None for fewer than two.
    """
    from kendall.queueing.measurement.arrival_tests import too_exact  # noqa: PLC0415

    runs = [a for _, a in audits if a.process == "poisson" and a.asked_rate is not None and a.tests]
    if len(runs) < 2:
        return None
    return too_exact([(a.n - 1, a.span * (a.asked_rate or 1.0)) for a in runs], 1.0).p_value


def _print(audits: list[tuple[Stream, Audit]], exact: float | None) -> None:
    from kendall.queueing.commands.terminal import Column, Table, console, say  # noqa: PLC0415

    columns = (
        Column(heading="test", left=True),
        Column(heading="p-value"),
        Column(heading=""),
        Column(heading="finding", sentence=True),
    )
    to = console()
    for stream, audit in audits:
        for line in _lines(stream, audit):
            say(to, line)
        if audit.tests:
            rows = [
                (test.name, f"{test.p_value:.3g}", "FAILS" * (not test.holds), test.says)
                for test in audit.tests
            ]
            to.print(Table(columns, rows, keys=2))
        say(to, "")
    if exact is not None:
        said = "closer than chance: rescaled schedules" if exact < 0.01 else "within chance"
        say(to, f"lengths of the runs against n / rate: {said} (p = {exact:.2g})")


def _lines(stream: Stream, audit: Audit) -> list[str]:
    lines = [f"{stream.name}: {audit.verdict}"]
    if audit.tests:
        asked = "" if audit.asked_rate is None else f", asked {short_number(audit.asked_rate, 6)}"
        rate = (
            f"{short_number(audit.rate)} per second (95 %: {short_number(audit.rate_low)} to "
            f"{short_number(audit.rate_high)}{asked})"
        )
        lines.append(f"{audit.n} {stream.what} in {short_number(audit.span)} s, {rate}")
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
