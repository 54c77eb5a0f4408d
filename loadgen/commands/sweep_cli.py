"""`kendall sweep`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kendall.loadgen.commands.flags import SweepCommand
from kendall.loadgen.sending.client.target import Keys
from kendall.options import flag_option
from kendall.policies.durations import Duration
from kendall.policies.text import CommaList, SpecError, split_orders
from kendall.queueing.arrivals.spec_text import listed
from kendall.queueing.commands.policy_option import ABOUT_MODULE, use_policies
from kendall.queueing.measurement.paths import folder_to_write
from kendall.queueing.measurement.slo import split_slos
from kendall.remote import CACERT, INSECURE, Trust

if TYPE_CHECKING:
    from kendall.loadgen.sweep.plan import SweepPlan

app = typer.Typer(add_completion=False)
GRID, REQUESTS, SEARCH = "Cells", "Requests of a cell", "Search for a rate"
GATEWAY, RESULT = "Gateway", "Results"

PRESETS: dict[str, dict[str, Any]] = {
    "policies": {"loads": (0.3, 0.5, 0.7, 0.8)},
    "quick": {"loads": (0.3, 0.6), "duration": 10.0},
}


@app.command("sweep", cls=SweepCommand)
def sweep_command(
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="POLICY", help="Further policies, in addition to --policies."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        flag_option(
            GRID, "Policies to measure; several after one flag, or repeated.", "--policies"
        ),
    ] = None,
    policy_module: Annotated[
        list[str] | None, flag_option(GRID, ABOUT_MODULE, "--policy-module")
    ] = None,
    orders: Annotated[
        str | None,
        flag_option(
            GRID,
            "Orders of service, under each of which every policy is measured, for example "
            "fcfs,spjf:aging=0.02,trail:c=0.8. Default: those that the policies name.",
            parser=CommaList(),
        ),
    ] = None,
    loads: Annotated[
        str | None,
        flag_option(
            GRID,
            "Loads as fractions of each policy's largest stable rate, for example 0.3,0.5.",
            parser=CommaList(),
        ),
    ] = None,
    request_rates: Annotated[
        str | None,
        flag_option(
            GRID,
            "Arrival rates in requests per second, the same for every policy, for example 2,4.",
            parser=CommaList(),
        ),
    ] = None,
    max_output_tokens: Annotated[
        str | None,
        flag_option(
            GRID, "Token limits of the gateway, for example 16,32,none.", parser=CommaList()
        ),
    ] = None,
    preset: Annotated[
        str,
        flag_option(
            GRID,
            ("Defaults for the options not given: policies (six policies at four loads) | quick."),
        ),
    ] = "policies",
    cell_order: Annotated[  # not `order`: errors of policies name a key so
        str | None,
        flag_option(
            GRID,
            "Order in which cells are measured: listed | random (drawn from the seed).",
            "--order",
        ),
    ] = None,
    allow_unstable: Annotated[
        bool, flag_option(GRID, "Measure cells with load >= 1 too.", "--allow-unstable")
    ] = False,
    output_tokens: Annotated[
        str | None,
        flag_option(REQUESTS, "Distribution of output lengths in tokens, before the token limit."),
    ] = None,
    prompt_tokens: Annotated[
        str | None, flag_option(REQUESTS, "Distribution of prompt lengths in tokens.")
    ] = None,
    predictor: Annotated[
        str | None,
        flag_option(
            REQUESTS,
            "Send a predicted length with each request: none | exact | exponential | "
            "lognormal:sigma=0.5 | onebit:threshold=200 (tokens).",
        ),
    ] = None,
    num_prompts: Annotated[int | None, flag_option(REQUESTS, "Requests per cell.", min=1)] = None,
    duration: Annotated[
        float | None,
        flag_option(REQUESTS, "Time during which requests are sent, per cell.", parser=Duration()),
    ] = None,
    precision: Annotated[
        float | None,
        flag_option(
            REQUESTS,
            "Choose the run length of a cell for this relative half width of the mean delay, "
            "for example 0.1.",
        ),
    ] = None,
    cell_limit: Annotated[
        float | None, flag_option(REQUESTS, "Longest time for one cell.", parser=Duration())
    ] = None,
    processes: Annotated[
        int | None, flag_option(REQUESTS, "Sender processes, which share one timetable.", min=1)
    ] = None,
    seed: Annotated[
        int | None,
        flag_option(
            REQUESTS,
            "Seed for arrivals, lengths, predicted lengths and prompts, which are the same under "
            "every policy and order.",
            min=0,
        ),
    ] = None,
    find_saturation: Annotated[
        bool,
        flag_option(SEARCH, "Search for the largest stable arrival rate.", "--find-saturation"),
    ] = False,
    slo: Annotated[
        list[str] | None,
        flag_option(
            SEARCH,
            "Search for the largest arrival rate that meets an objective, for example "
            "p99_queueing_delay=2s.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        flag_option(SEARCH, "Stop a search when high / low - 1 falls below this number."),
    ] = None,
    model: Annotated[
        str | None, flag_option(GATEWAY, "Model of the gateway that the sweep starts.")
    ] = None,
    engine: Annotated[
        str | None,
        flag_option(
            GATEWAY, "Engine of the gateway that the sweep starts: auto | vllm | emulated."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        flag_option(
            GATEWAY, "Largest number of sequences in the engine that the sweep starts.", min=1
        ),
    ] = None,
    latency: Annotated[
        str | None,
        flag_option(
            GATEWAY,
            "Latency law or profile to use instead of a calibration; the emulated engine "
            "follows it.",
        ),
    ] = None,
    port: Annotated[
        int,
        flag_option(
            GATEWAY,
            "Port of the gateway that the sweep starts; another one if it is in use.",
            min=1,
            max=65535,
        ),
    ] = 8080,
    base_url: Annotated[
        str | None,
        flag_option(GATEWAY, "URL of a running gateway to measure instead of starting one."),
    ] = None,
    api_key: Annotated[
        str | None,
        flag_option(
            GATEWAY, "With --base-url: key sent as a bearer token; never written to a file."
        ),
    ] = None,
    admin_key: Annotated[
        str | None, flag_option(GATEWAY, "With --base-url: key for a gateway with --admin-key.")
    ] = None,
    cacert: Annotated[Path | None, flag_option(GATEWAY, CACERT)] = None,
    insecure: Annotated[bool, flag_option(GATEWAY, INSECURE, "--insecure")] = False,
    bracket: Annotated[
        float | None,
        flag_option(
            GATEWAY,
            "Duration of a speed calibration before and after each cell (0: none).",
            parser=Duration(),
        ),
    ] = None,
    repeat_noisy: Annotated[
        int | None,
        flag_option(
            GATEWAY,
            "Repeat a cell at most this many times if the speed changed by more than 15 % "
            "around it.",
        ),
    ] = None,
    result_dir: Annotated[
        Path,
        flag_option(
            RESULT,
            "Folder for all results; an interrupted sweep in it is continued.",
            "--output",
            "--result-dir",
            parser=folder_to_write,
        ),
    ] = Path("runs/sweep"),
    resume: Annotated[
        Path | None,
        flag_option(RESULT, "Continue the sweep in this folder with its saved options."),
    ] = None,
    dry_run: Annotated[
        bool,
        flag_option(
            RESULT,
            "Print the cells, the searches and their expected duration; measure nothing.",
            "--dry-run",
        ),
    ] = False,
    assertions: Annotated[
        list[str] | None,
        flag_option(
            RESULT,
            "Condition on every cell; exit status 3 if it does not hold. Repeatable.",
            "--assert",
        ),
    ] = None,
    json: Annotated[
        bool, flag_option(RESULT, "Print one JSON object on stdout and nothing else.", "--json")
    ] = False,
) -> None:
    """Measure policies x orders x loads x token limits on the same requests and compare observed
    with predicted delays. Resumable.

    Without options: six policies at loads 0.3, 0.5, 0.7 and 0.8 on the tiny model, 24 cells, about
    17 min in all, without the engine's start, its calibration and repeated cells. --dry-run prints
    the duration for other options.
    """
    use_policies(policy_module, *(policies or ()), *(more or ()))
    given = {
        "policies": (*(policies or ()), *(more or ())) or None,
        "orders": None if orders is None else split_orders(orders),
        "loads": _numbers("loads", loads),
        "request_rates": _numbers("request-rates", request_rates),
        "max_output_tokens": _limits(max_output_tokens),
        "slo": None if slo is None else tuple(split_slos(" ".join(slo))),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "predictor": predictor,
        "num_prompts": num_prompts,
        "duration": duration,
        "precision": precision,
        "cell_limit": cell_limit,
        "seed": seed,
        "order": cell_order,
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
    keys = Keys(api_key, admin_key, Trust(cacert, insecure))
    plan, folder = _plan(preset, given, resume, result_dir)
    if (warning := plan.reads_no_prediction) is not None:
        typer.echo(f"kendall: warning: {warning}", err=True)
    if not dry_run:
        from kendall.loadgen.sweep.session import run_session  # noqa: PLC0415

        session = run_session(plan, folder, port, assertions or [], keys, json=json)
        raise typer.Exit(asyncio.run(session))
    from kendall.loadgen.sweep.dry_run import plan_as_object, print_plan  # noqa: PLC0415
    from kendall.queueing.commands.terminal import console  # noqa: PLC0415

    if json:
        typer.echo(msgspec.json.encode(plan_as_object(plan)))
    else:
        print_plan(plan, console())


def _plan(
    preset: str, given: dict[str, Any], resume: Path | None, folder: Path
) -> tuple[SweepPlan, Path]:
    from kendall.loadgen.sweep.plan import SweepPlan, load_plan  # noqa: PLC0415 - numba and scipy, which --help need not wait for

    if preset not in PRESETS:
        raise SpecError(f"got preset {preset!r}; expected one of {', '.join(PRESETS)}")
    if resume is not None:
        old = load_plan(resume / "plan.json")
        return (
            msgspec.convert(msgspec.to_builtins(old) | given, SweepPlan) if given else old
        ), resume
    defaults = dict(PRESETS[preset])
    if any(key in given for key in ("loads", "request_rates", "find_saturation", "slo")):
        defaults.pop("loads", None)
    if any(key in given for key in ("num_prompts", "duration", "precision")):
        defaults.pop("duration", None)
    try:
        return msgspec.convert(defaults | given, SweepPlan), folder
    except msgspec.ValidationError as error:
        raise SpecError(str(error)) from None


def _numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in listed(text))
    except ValueError:
        raise SpecError(
            f"got --{flag} {text!r}; expected numbers with commas between them"
        ) from None


def _limits(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    try:
        limits = tuple(None if part == "none" else int(part) for part in listed(text))
    except ValueError:
        raise SpecError(
            f"got --max-output-tokens {text!r}; expected whole numbers with commas between them, "
            "or none"
        ) from None
    if any(limit is not None and limit < 1 for limit in limits):
        raise SpecError(f"got --max-output-tokens {text!r}; expected numbers >= 1")
    return limits
