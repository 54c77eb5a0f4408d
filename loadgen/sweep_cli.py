"""`kendall sweep`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from loadgen.keys import Keys
from policies.text import SpecError
from queueing.remote import CACERT, INSECURE, Trust

if TYPE_CHECKING:
    from loadgen.sweep.plan import Plan

app = typer.Typer(add_completion=False)

PRESETS: dict[str, dict[str, Any]] = {
    "policies": {"loads": (0.3, 0.5, 0.7, 0.8)},
    "quick": {"loads": (0.3, 0.6), "duration": 10.0},
}


@app.command("sweep")
def sweep_command(
    more: Annotated[list[str] | None, typer.Argument(metavar="[POLICY]...", help="Policies, as after --policies.")] = None,
    policies: Annotated[list[str] | None, typer.Option("--policies", help="Policies; several after one flag, or repeated.")] = None,
    loads: Annotated[str | None, typer.Option(help="Fractions of each policy's largest stable rate, for example 0.3,0.5.")] = None,
    request_rates: Annotated[str | None, typer.Option(help="Requests per second, the same for every policy, for example 2,4.")] = None,
    max_output_tokens: Annotated[str | None, typer.Option(help="Token limits of the gateway, for example 16,32.")] = None,
    preset: Annotated[str, typer.Option(help="Defaults of what is not given: policies (six at four loads) | quick.")] = "policies",
    output_tokens: Annotated[str | None, typer.Option(help="Lengths of the answers before the limit.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Lengths of the prompts.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Requests of every cell.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of every cell.")] = None,
    precision: Annotated[float | None, typer.Option(help="Half width of the mean delay over the mean, by the advised length.")] = None,
    cell_limit: Annotated[float | None, typer.Option(help="Most seconds of a cell.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Sender processes, which share one timetable.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Arrivals, lengths and prompts, the same under every policy.")] = None,
    order: Annotated[str | None, typer.Option(help="listed | random: the order of the cells, from the seed.")] = None,
    allow_unstable: Annotated[bool, typer.Option("--allow-unstable", help="Run points of load >= 1 too, to their end.")] = False,
    find_saturation: Annotated[bool, typer.Option("--find-saturation", help="Search the largest rate that stays stable.")] = False,
    slo: Annotated[list[str] | None, typer.Option(help="Search the largest rate that keeps it: p99_queueing_delay=2s.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Of a search: stop when high / low - 1 is below.")] = None,
    bracket: Annotated[float | None, typer.Option(help="Seconds of a speed calibration around cells; 0: none.")] = None,
    repeat_noisy: Annotated[int | None, typer.Option(help="Repeats of a cell around which the speed changed by over 15 %.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of the gateway that is started.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto | vllm | emulated.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Measure a gateway that runs already.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --base-url: sent as a bearer token; never written to a file.")] = None,
    admin_key: Annotated[str | None, typer.Option(help="The same, for a gateway with --admin-key.")] = None,
    cacert: Annotated[Path | None, typer.Option(help=CACERT)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help=INSECURE)] = False,
    latency: Annotated[str | None, typer.Option(help="Law to go by instead of calibrating; the emulated engine obeys it.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most sequences in the engine that is started.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the gateway that is started; another where it is in use.")] = 8080,
    result_dir: Annotated[Path, typer.Option(help="Folder of everything; one that was begun is gone on with.")] = Path("runs/sweep"),
    resume: Annotated[Path | None, typer.Option(help="Go on with the sweep in this folder; nothing else need be given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells, their lengths and the whole time; measure nothing.")] = False,
    assertions: Annotated[list[str] | None, typer.Option("--assert", help="A condition on every cell; exit 3 where broken.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")] = False,
) -> None:
    """Measure policies x loads x token limits on the same requests, resumable, observed beside predicted.

    Without options: six policies at loads 0.3, 0.5, 0.7 and 0.8 on the tiny model, about half an hour.
    """
    given = {
        "policies": (*(policies or ()), *(more or ())) or None,
        "loads": _numbers("loads", loads),
        "request_rates": _numbers("request-rates", request_rates),
        "max_output_tokens": _limits(max_output_tokens),
        "slo": None if slo is None else tuple(slo),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "num_prompts": num_prompts,
        "duration": duration,
        "precision": precision,
        "cell_limit": cell_limit,
        "seed": seed,
        "order": order,
        "tolerance": tolerance,
        "bracket": bracket,
        "repeat_noisy": repeat_noisy,
        "processes": processes,
        "allow_unstable": allow_unstable or None,
        "find_saturation": find_saturation or None,
        "model": model,
        "engine": engine,
        "base_url": base_url,
        "latency": latency,
        "max_num_seqs": max_num_seqs,
    }
    given = {key: value for key, value in given.items() if value is not None}
    plan, folder = _plan(preset, given, resume, result_dir)
    if dry_run:
        _print_plan(plan, json)
        return
    raise typer.Exit(_measure(plan, folder, port, assertions or [], Keys(api_key, admin_key, Trust(cacert, insecure)), json=json))


def _plan(preset: str, given: dict[str, Any], resume: Path | None, folder: Path) -> tuple[Plan, Path]:
    from loadgen.sweep.plan import Plan, load_plan  # noqa: PLC0415 - numba and scipy, which --help need not wait for

    if preset not in PRESETS:
        raise SpecError(f"got preset {preset!r}; expected one of {', '.join(PRESETS)}")
    if resume is not None:
        old = load_plan(resume / "plan.json")
        return (msgspec.convert(msgspec.to_builtins(old) | given, Plan) if given else old), resume
    defaults = dict(PRESETS[preset])
    if any(key in given for key in ("loads", "request_rates", "find_saturation", "slo")):
        defaults.pop("loads", None)
    if any(key in given for key in ("num_prompts", "duration", "precision")):
        defaults.pop("duration", None)
    try:
        return msgspec.convert(defaults | given, Plan), folder
    except msgspec.ValidationError as error:
        raise SpecError(str(error)) from None


def _measure(plan: Plan, folder: Path, port: int, assertions: list[str], keys: Keys, *, json: bool) -> int:
    from loadgen.sweep.session import run_session  # noqa: PLC0415

    return asyncio.run(run_session(plan, folder, port, assertions, keys, json=json))


def _print_plan(plan: Plan, json: bool) -> None:
    from loadgen.sweep.dry_run import plan_as_object, print_plan  # noqa: PLC0415
    from queueing.terminal import console  # noqa: PLC0415

    if json:
        typer.echo(msgspec.json.encode(plan_as_object(plan)))
        return
    print_plan(plan, console())


def _numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"got --{flag} {text!r}; expected numbers with commas between them") from None


def _limits(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    try:
        limits = tuple(None if part == "none" else int(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"got --max-output-tokens {text!r}; expected whole numbers with commas between them, or none") from None
    if any(limit is not None and limit < 1 for limit in limits):
        raise SpecError(f"got --max-output-tokens {text!r}; expected numbers >= 1")
    return limits
