"""`kendall compare`: runs, or a whole sweep, beside theory; as a table, JSON, CSV, picture, HTML
report.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kendall.options import flag_option, option, with_options
from kendall.policies.arguments import positive
from kendall.policies.registry import use_modules
from kendall.policies.text import SpecError
from kendall.queueing.commands.shared_options import Json, PolicyModules
from kendall.queueing.measurement.paths import FileToWrite, check_distinct

if TYPE_CHECKING:
    from kendall.loadgen.report.html import ReportData

app = typer.Typer(add_completion=False)
SUFFIXES = {".html": "html", ".csv": "csv", ".png": "picture", ".svg": "picture", ".pdf": "picture"}


@dataclass(frozen=True, kw_only=True)
class TheoryOptions:
    """The fields of `TheoryInputs`, as texts; None: not given."""

    latency: str | None = option(
        "",
        (
            "Latency law or profile for predictions. Default: observed delays and measured service "
            "only."
        ),
    )
    output_tokens: str | None = option(
        "",
        ("Distribution of output lengths, for predictions. Default: the header's, else the run's."),
    )
    request_rate: float | None = option(
        "",
        (
            "Arrival rate in requests per second, for predictions. Default: the header's, else the "
            "run's."
        ),
        "--request-rate",
        "--arrival-rate",
    )
    max_num_seqs: int | None = option(
        "",
        (
            "Largest number of sequences in the engine at once, for predictions; needed for the "
            "run files of `kendall load` alone, against a server that is no gateway. Default: no "
            "limit."
        ),
    )
    predictor: str | None = option(
        "",
        (
            "Predictor of output lengths that was asked for, for predictions of orders that read "
            "predicted lengths. Default: the header's, else as good as the run's predictions were."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """The files that a comparison is written to."""

    output: tuple[Path, ...] = option(
        "",
        "File to write; its suffix sets the format: .html, .csv, .png, .svg, .pdf. Repeatable.",
        default=(),
        parser=FileToWrite("report.html"),
    )
    html: Path | None = option(
        "",
        "Write a self-contained HTML report to this file.",
        parser=FileToWrite("report.html"),
    )
    csv: Path | None = option(
        "", "Write the table to this file, in milliseconds.", parser=FileToWrite("report.csv")
    )
    picture: Path | None = option(
        "",
        "Write a plot of observed and predicted delays to this file: .png, .svg or .pdf.",
        "--picture",
        "--plot",
        parser=FileToWrite("report.png"),
    )

    def by_kind(self) -> list[tuple[str, Path]]:
        """Kind and path of each file; the suffix of --output gives its kind. Raises SpecError."""
        check_distinct({"--html": self.html, "--csv": self.csv, "--picture": self.picture})
        named = (("html", self.html), ("csv", self.csv), ("picture", self.picture))
        files = [(kind, path) for kind, path in named if path is not None]
        for path in self.output:
            if path.suffix not in SUFFIXES:
                raise SpecError(
                    f"got --output {path}; expected a file that ends in {', '.join(SUFFIXES)}"
                )
            files.append((SUFFIXES[path.suffix], path))
        return files


@app.command("compare")
@with_options()
def compare_command(
    run_files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run files of `kendall serve --record-file` or of a simulation; add those of "
            "`kendall load`, or of AIPerf, for the delays that clients see. Those of `kendall "
            "load` alone: a run against any server, with --max-num-seqs.",
        ),
    ] = None,
    *,
    sweep: Annotated[
        Path | None,
        flag_option("", "Folder of a sweep or demo to compare, instead of run files.", "--sweep"),
    ] = None,
    theory: TheoryOptions,
    report: ReportFiles,
    assertions: Annotated[
        list[str] | None,
        flag_option(
            "",
            "Condition on every cell, for example 'prediction_error < 0.15'; exit status 3 if it "
            "does not hold. Repeatable.",
            "--assert",
        ),
    ] = None,
    policy_module: PolicyModules = None,
    json: Json = False,
) -> None:
    """Compare the observed delay of each policy and epoch with predictions, and name the
    assumption that fails where they differ.
    """
    # compiled mathematics, which `--help` need not wait for
    from kendall.loadgen.compare.assertions import parse_assertions  # noqa: PLC0415
    from kendall.loadgen.compare.picture import draw_picture  # noqa: PLC0415
    from kendall.loadgen.report.conditions import broken  # noqa: PLC0415
    from kendall.loadgen.report.html import write_csv, write_report  # noqa: PLC0415

    use_modules(policy_module)
    files = report.by_kind()
    checks = parse_assertions(assertions or [])
    data = _data(run_files or [], sweep, theory)
    for kind, path in files:
        match kind:
            case "html":
                write_report(sweep, data, path)
            case "csv":
                write_csv(data.cells, path)
            case _:
                draw_picture([cell.shown for cell in data.cells], path)
    _print(data, json=json)
    if not data.cells:
        typer.echo(
            "kendall: got no completed request in these files; expected some to compare", err=True
        )
        raise typer.Exit(3 if checks else 1)
    lines = broken(checks, data)
    for line in lines:
        typer.echo(f"kendall: {line}", err=True)
    raise typer.Exit(3 if lines else 0)


def _data(run_files: list[Path], folder: Path | None, given: TheoryOptions) -> ReportData:
    from kendall.loadgen.compare.cells import TheoryInputs  # noqa: PLC0415 - compiled mathematics, which `--help` need not wait for
    from kendall.loadgen.report.files.saved_run import read_run_file  # noqa: PLC0415
    from kendall.loadgen.report.html import of_files, of_folder  # noqa: PLC0415
    from kendall.queueing.commands.cli import law_of  # noqa: PLC0415
    from kendall.queueing.distributions.token_distribution import SHORTER, parse_distribution  # noqa: PLC0415
    from kendall.queueing.predictors.predictor_text import parse_predictor  # noqa: PLC0415

    if bool(run_files) == (folder is not None):
        raise SpecError("got neither run files nor --sweep, or both; expected one of them")
    if folder is not None:
        if given != TheoryOptions():
            raise SpecError(
                "got a law or what was asked with --sweep; expected neither: its folder says both"
            )
        if (folder / "plan.json").is_file():
            from kendall.loadgen.sweep.report.report_data import of_sweep  # noqa: PLC0415

            return of_sweep(folder)
        return of_folder(folder)
    tokens, predictor, rate = given.output_tokens, given.predictor, given.request_rate
    asked = TheoryInputs(
        law=None if given.latency is None else law_of(given.latency),
        output_tokens=None if tokens is None else parse_distribution(tokens, remedy=SHORTER),
        rate=None if rate is None else positive("--request-rate", rate, "requests per second"),
        max_num_seqs=given.max_num_seqs,
        predictor=None if predictor is None else parse_predictor(predictor),
    )
    return of_files([read_run_file(path) for path in run_files], asked)


def _print(data: ReportData, *, json: bool) -> None:
    from kendall.loadgen.report.html.files import as_json  # noqa: PLC0415
    from kendall.loadgen.report.report import client_lines, show  # noqa: PLC0415
    from kendall.queueing.commands.terminal import console, say  # noqa: PLC0415

    if json:
        missing = [
            {
                "cell": m.name,
                "policy": m.policy,
                "load": m.load,
                "state": m.state,
                "reason": m.reason,
            }
            for m in data.missing
        ]
        typer.echo(
            msgspec.json.encode(
                {"comparisons": as_json(data.cells), "missing": missing, "events": data.events},
                enc_hook=float,
            )
        )
        return
    to = console()
    show([cell.shown for cell in data.cells], to)
    for side in (cell.client for cell in data.cells if cell.client is not None):
        for line in client_lines(side):
            say(to, line)
    for event in data.events:
        say(to, event)
    for cell in data.missing:
        say(to, f"MISSING: {cell.name}: {cell.state}: {cell.reason}")


def main() -> None:
    app(prog_name="kendall compare")


if __name__ == "__main__":
    main()
