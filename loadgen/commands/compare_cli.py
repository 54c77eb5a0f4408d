"""`kendall compare`: runs, or a whole sweep, beside theory; as a table, JSON, CSV, picture, HTML
report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kendall.options import flag_option
from kendall.policies.registry import use_modules
from kendall.policies.text import SpecError
from kendall.queueing.commands.policy_option import PolicyModules
from kendall.queueing.measurement.paths import FileToWrite

if TYPE_CHECKING:
    from kendall.loadgen.report.html import ReportData

app = typer.Typer(add_completion=False)
SUFFIXES = {".html": "html", ".csv": "csv", ".png": "picture", ".svg": "picture", ".pdf": "picture"}


@app.command("compare")
def compare_command(
    run_files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run files of `kendall serve --record-file` or of a simulation; add those of "
            "`kendall load` for the delays that clients see.",
        ),
    ] = None,
    *,
    sweep: Annotated[
        Path | None,
        flag_option("", "Folder of a sweep or demo to compare, instead of run files.", "--sweep"),
    ] = None,
    latency: Annotated[
        str | None,
        flag_option(
            "",
            (
                "Latency law or profile for predictions. Default: observed delays and measured "
                "service only."
            ),
            "--latency",
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        flag_option(
            "",
            (
                "Distribution of output lengths, for predictions. Default: the header's, else the "
                "run's."
            ),
            "--output-tokens",
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        flag_option(
            "",
            (
                "Arrival rate in requests per second, for predictions. Default: the header's, "
                "else the run's."
            ),
            "--request-rate",
            "--arrival-rate",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        flag_option(
            "",
            (
                "Largest number of sequences in the engine at once, for predictions. Default: no "
                "limit."
            ),
            "--max-num-seqs",
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        flag_option(
            "",
            (
                "Predictor of output lengths that was asked for, for predictions of orders that "
                "read predicted lengths. Default: the header's, else as good as the run's "
                "predictions were."
            ),
            "--predictor",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        flag_option(
            "",
            "File to write; its suffix sets the format: .html, .csv, .png, .svg, .pdf. Repeatable.",
            "--output",
            parser=FileToWrite("report.html"),
        ),
    ] = None,
    html: Annotated[
        Path | None,
        flag_option(
            "",
            "Write a self-contained HTML report to this file.",
            "--html",
            parser=FileToWrite("report.html"),
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        flag_option(
            "",
            "Write the table to this file, in milliseconds.",
            "--csv",
            parser=FileToWrite("report.csv"),
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        flag_option(
            "",
            "Write a plot of observed and predicted delays to this file: .png, .svg or .pdf.",
            "--picture",
            "--plot",
            parser=FileToWrite("report.png"),
        ),
    ] = None,
    assertions: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            help="Condition on every cell, for example 'prediction_error < 0.15'; exit status 3 "
            "if it does not hold. Repeatable.",
        ),
    ] = None,
    policy_module: PolicyModules = None,
    json: Annotated[
        bool, flag_option("", "Print one JSON object and nothing else.", "--json")
    ] = False,
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
    given = latency, output_tokens, request_rate, max_num_seqs, predictor
    files = _files(output or [], html=html, csv=csv, picture=picture)
    checks = parse_assertions(assertions or [])
    data = _data(run_files or [], sweep, given)
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


def _data(run_files: list[Path], folder: Path | None, given: tuple[Any, ...]) -> ReportData:
    from kendall.loadgen.compare.cells import RunFile, TheoryInputs  # noqa: PLC0415 - compiled mathematics, which `--help` need not wait for
    from kendall.loadgen.report.html import of_files, of_folder  # noqa: PLC0415
    from kendall.queueing.commands.cli import law_of  # noqa: PLC0415
    from kendall.queueing.distributions.token_distribution import SHORTER, parse_distribution  # noqa: PLC0415
    from kendall.queueing.predictors.predictor_text import parse_predictor  # noqa: PLC0415

    if bool(run_files) == (folder is not None):
        raise SpecError("got neither run files nor --sweep, or both; expected one of them")
    if folder is not None:
        if any(value is not None for value in given):
            raise SpecError(
                "got a law or what was asked with --sweep; expected neither: its folder says both"
            )
        if (folder / "plan.json").is_file():
            from kendall.loadgen.sweep.report.report_data import of_sweep  # noqa: PLC0415

            return of_sweep(folder)
        return of_folder(folder)
    latency, output_tokens, rate, bound, predictor = given
    asked = TheoryInputs(
        None if latency is None else law_of(latency),
        None if output_tokens is None else parse_distribution(output_tokens, remedy=SHORTER),
        rate,
        bound,
        None if predictor is None else parse_predictor(predictor),
    )
    return of_files([RunFile.read(path) for path in run_files], asked)


def _files(output: list[Path], **by_kind: Path | None) -> list[tuple[str, Path]]:
    """Kind and path of each file to write; the suffix of --output gives its kind."""
    files = [(kind, path) for kind, path in by_kind.items() if path is not None]
    for path in output:
        if path.suffix not in SUFFIXES:
            raise SpecError(
                f"got --output {path}; expected a file that ends in {', '.join(SUFFIXES)}"
            )
        files.append((SUFFIXES[path.suffix], path))
    return files


def _print(data: ReportData, *, json: bool) -> None:
    from kendall.loadgen.report.html.files import as_json  # noqa: PLC0415
    from kendall.loadgen.report.report import show  # noqa: PLC0415
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
    for event in data.events:
        say(to, event)
    for cell in data.missing:
        say(to, f"MISSING: {cell.name}: {cell.state}: {cell.reason}")


def main() -> None:
    app(prog_name="kendall compare")


if __name__ == "__main__":
    main()
