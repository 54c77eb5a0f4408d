"""`kendall calibrate`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from kendall.options import option, with_options, within
from kendall.queueing.measurement.paths import FileToWrite
from kendall.remote import AdminAccess

app = typer.Typer(add_completion=False)
MEASUREMENT, ACCESS, RESULT = "Measurement", "Access", "Result"


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """The fields of a `CalibrationRequest`, by the same names."""

    speed_only: bool = option(
        MEASUREMENT,
        "Measure only the speed factor relative to the law in force; takes about 5 seconds.",
        default=False,
    )
    resume_cost: bool = option(
        MEASUREMENT,
        (
            "Also measure kr, the seconds that resuming a preempted request takes. Default: only "
            "if the policy in force preempts requests."
        ),
        "--resume-cost",
        default=False,
    )
    max_batch_size: int | None = option(
        MEASUREMENT, "Largest batch size to measure. Default: the engine's limit.", min=1
    )
    max_output_tokens: int | None = option(
        MEASUREMENT,
        "Longest answer to measure, in tokens. Default: the gateway's limit, or 64.",
        min=2,
    )
    prompt_tokens: int | None = option(
        MEASUREMENT, "Length of every prompt, in tokens. Default: 32.", min=1
    )
    repeats: int = option(
        MEASUREMENT,
        "Number of measurements of each batch size and length.",
        default=5,
        min=2,
        max=100,
    )
    seed: int = option(MEASUREMENT, "Seed for the order of the measurements.", default=0)
    name: str | None = option(RESULT, "Name of the profile. Default: the model's name.")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What is measured, through which gateway, and where the law goes."""

    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    api_key: str | None = option(
        ACCESS, "Key sent to a running server as a bearer token.", secret=True
    )
    access: AdminAccess = within(ACCESS, AdminAccess)
    share: bool = option(
        MEASUREMENT,
        "Measure a server that is no gateway also while it serves requests of others.",
        "--share",
        default=False,
    )
    output: Path | None = option(
        RESULT,
        (
            "File to write. Default: a file in the user's cache; none for an emulated engine or "
            "--speed-only."
        ),
        parser=FileToWrite("law.json"),
    )
    json: bool = option(
        RESULT, "Print the profile as one JSON object and nothing else.", "--json", default=False
    )


@app.command("calibrate")
@with_options((MEASUREMENT, ACCESS, RESULT))
def calibrate_command(
    options: CalibrateOptions,
    target: Annotated[
        str,
        typer.Argument(
            help="URL of a running gateway or of any server with OpenAI's API, or a model to start "
            "an engine for."
        ),
    ] = "tiny",
) -> None:
    """Measure the latency law of an engine through the gateway's dispatch path, or of any server
    through its API, and save it as a profile.
    """
    from kendall.server.operations.calibrate import calibrate  # noqa: PLC0415 - heavy

    calibrate(
        target,
        dataclasses.asdict(options.measurement),
        options.output,
        key=options.access.key(target, options.api_key),
        api_key=options.api_key,
        share=options.share,
        trust=options.access.trust,
        json_output=options.json,
    )
