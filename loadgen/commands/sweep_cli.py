"""`kendall sweep`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from kendall.loadgen.commands.flags import SweepCommand
from kendall.loadgen.sending.client.target import GATEWAY, Keys
from kendall.options import option, with_options
from kendall.policies.durations import Duration
from kendall.policies.text import CommaList, SpecError, split_orders
from kendall.queueing.arrivals.spec_text import listed
from kendall.queueing.commands.shared_options import ABOUT_MODULE, use_policies
from kendall.queueing.measurement.paths import folder_to_write
from kendall.queueing.measurement.slo import split_slos

if TYPE_CHECKING:
    from kendall.loadgen.sweep.plan import SweepPlan

app = typer.Typer(add_completion=False)
GRID, REQUESTS, SEARCH = "Cells", "Requests of a cell", "Search for a rate"
RESULT = "Results"

PRESETS: dict[str, dict[str, Any]] = {
    "policies": {"loads": (0.3, 0.5, 0.7, 0.8)},
    "quick": {"loads": (0.3, 0.6), "duration": 10.0},
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The fields of a `SweepPlan`, by the same names; lists as texts. None: not given."""

    policies: tuple[str, ...] = option(
        GRID, "Policies to measure; several after one flag, or repeated.", default=()
    )
    orders: str | None = option(
        GRID,
        (
            "Orders of service, under each of which every policy is measured, for example "
            "fcfs,spjf:aging=0.02,trail:c=0.8. Default: those that the policies name."
        ),
        parser=CommaList(),
    )
    loads: str | None = option(
        GRID,
        "Loads as fractions of each policy's largest stable rate, for example 0.3,0.5.",
        parser=CommaList(),
    )
    request_rates: str | None = option(
        GRID,
        "Arrival rates in requests per second, the same for every policy, for example 2,4.",
        parser=CommaList(),
    )
    max_output_tokens: str | None = option(
        GRID, "Token limits of the gateway, for example 16,32,none.", parser=CommaList()
    )
    order: Literal["listed", "random"] | None = option(
        GRID, "Order in which cells are measured: listed | random (drawn from the seed)."
    )
    allow_unstable: bool = option(
        GRID, "Measure cells with load >= 1 too.", "--allow-unstable", default=False
    )
    output_tokens: str | None = option(
        REQUESTS, "Distribution of output lengths in tokens, before the token limit."
    )
    prompt_tokens: str | None = option(REQUESTS, "Distribution of prompt lengths in tokens.")
    predictor: str | None = option(
        REQUESTS,
        (
            "Send a predicted length with each request: none | exact | exponential | "
            "lognormal:sigma=0.5 | uniform:low=0.5,high=1.5 | onebit:threshold=200 (tokens) | "
            "joint:path=FILE."
        ),
    )
    num_prompts: int | None = option(REQUESTS, "Requests per cell.", min=1)
    duration: float | None = option(
        REQUESTS, "Time during which requests are sent, per cell.", parser=Duration()
    )
    precision: float | None = option(
        REQUESTS,
        (
            "Choose the run length of a cell for this relative half width of the mean delay, for "
            "example 0.1."
        ),
    )
    cell_limit: float | None = option(REQUESTS, "Longest time for one cell.", parser=Duration())
    processes: int | None = option(REQUESTS, "Sender processes, which share one timetable.", min=1)
    seed: int | None = option(
        REQUESTS,
        (
            "Seed for arrivals, lengths, predicted lengths and prompts, which are the same under "
            "every policy and order."
        ),
        min=0,
    )
    find_saturation: bool = option(
        SEARCH, "Search for the largest stable arrival rate.", "--find-saturation", default=False
    )
    slo: tuple[str, ...] = option(
        SEARCH,
        (
            "Search for the largest arrival rate that meets an objective, for example "
            "p99_queueing_delay=2s."
        ),
        default=(),
    )
    tolerance: float | None = option(
        SEARCH, "Stop a search when high / low - 1 falls below this number."
    )
    model: str | None = option(GATEWAY, "Model of the gateway that the sweep starts.")
    engine: str | None = option(
        GATEWAY, "Engine of the gateway that the sweep starts: auto | vllm | emulated."
    )
    max_num_seqs: int | None = option(
        GATEWAY, "Largest number of sequences in the engine that the sweep starts.", min=1
    )
    latency: str | None = option(
        GATEWAY,
        ("Latency law or profile to use instead of a calibration; the emulated engine follows it."),
    )
    base_url: str | None = option(
        GATEWAY,
        (
            "URL of a running gateway to measure instead of starting one, or of any server with "
            "OpenAI's API: its own policy is measured, with --max-num-seqs and --latency."
        ),
    )
    bracket: float | None = option(
        GATEWAY,
        "Duration of a speed calibration before and after each cell (0: none).",
        parser=Duration(),
    )
    repeat_noisy: int | None = option(
        GATEWAY,
        ("Repeat a cell at most this many times if the speed changed by more than 15 % around it."),
    )

    def given(self, more_policies: Sequence[str]) -> dict[str, Any]:
        """The fields that are given, by name. Raises SpecError for a list that cannot be read."""
        read = dataclasses.asdict(self) | {
            "policies": (*self.policies, *more_policies) or None,
            "orders": None if self.orders is None else split_orders(self.orders),
            "loads": _numbers("loads", self.loads),
            "request_rates": _numbers("request-rates", self.request_rates),
            "max_output_tokens": _limits(self.max_output_tokens),
            "slo": tuple(split_slos(" ".join(self.slo))) if self.slo else None,
            "allow_unstable": self.allow_unstable or None,
            "find_saturation": self.find_saturation or None,
        }
        return {name: value for name, value in read.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Where and how a plan is measured, which may differ when the sweep is continued."""

    policy_module: tuple[str, ...] = option(GRID, ABOUT_MODULE, default=())
    preset: str = option(
        GRID,
        "Defaults for the options not given: policies (six policies at four loads) | quick.",
        default="policies",
    )
    port: int = option(
        GATEWAY,
        "Port of the gateway that the sweep starts; another one if it is in use.",
        default=8080,
        min=1,
        max=65535,
    )
    output: Path = option(
        RESULT,
        "Folder for all results; an interrupted sweep in it is continued.",
        "--output",
        "--result-dir",
        default=Path("runs/sweep"),
        parser=folder_to_write,
    )
    resume: Path | None = option(
        RESULT, "Continue the sweep in this folder with its saved options."
    )
    dry_run: bool = option(
        RESULT,
        "Print the cells, the searches and their expected duration; measure nothing.",
        "--dry-run",
        default=False,
    )
    assertions: tuple[str, ...] = option(
        RESULT,
        "Condition on every cell; exit status 3 if it does not hold. Repeatable.",
        "--assert",
        default=(),
    )
    json: bool = option(
        RESULT, "Print one JSON object on stdout and nothing else.", "--json", default=False
    )


@app.command("sweep", cls=SweepCommand)
@with_options((GRID, REQUESTS, SEARCH, GATEWAY, RESULT))
def sweep_command(
    asked: PlanOptions,
    keys: Keys,
    options: SweepOptions,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="POLICY", help="Further policies, in addition to --policies."),
    ] = None,
) -> None:
    """Measure policies x orders x loads x token limits on the same requests and compare observed
    with predicted delays. Resumable.

    Without options: six policies at loads 0.3, 0.5, 0.7 and 0.8 on the tiny model, 24 cells, about
    17 min in all, without the engine's start, its calibration and repeated cells. --dry-run prints
    the duration for other options.
    """
    use_policies(options.policy_module, *asked.policies, *(more or ()))
    given = asked.given(more or ())
    if options.resume is None and given.get("base_url"):
        given = _for_server(given, keys)
    plan, folder = _plan(options.preset, given, options.resume, options.output)
    if (warning := plan.reads_no_prediction) is not None:
        typer.echo(f"kendall: warning: {warning}", err=True)
    if not options.dry_run:
        from kendall.loadgen.sweep.session import run_session  # noqa: PLC0415

        session = run_session(
            plan, folder, options.port, options.assertions, keys, json=options.json
        )
        raise typer.Exit(asyncio.run(session))
    from kendall.loadgen.report.conditions import parse_conditions  # noqa: PLC0415
    from kendall.loadgen.sweep.dry_run import plan_as_object, print_plan  # noqa: PLC0415
    from kendall.queueing.commands.terminal import console  # noqa: PLC0415

    parse_conditions(options.assertions)  # as the sweep would refuse them
    if options.json:
        typer.echo(msgspec.json.encode(plan_as_object(plan)))
    else:
        print_plan(plan, console())


def _for_server(given: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """What was given, completed for a server that is no gateway. Raises SpecError, LoadError."""
    from kendall.loadgen.sending.client.target import LoadError  # noqa: PLC0415 - as below
    from kendall.loadgen.sending.options import check_base_url  # noqa: PLC0415
    from kendall.loadgen.sweep.plain_server import is_plain, with_own_policy  # noqa: PLC0415

    check_base_url(given["base_url"])
    try:
        plain = asyncio.run(is_plain(given["base_url"], keys))
    except LoadError:  # the sweep says what it expected
        return given
    return with_own_policy(given) if plain else given


def _plan(
    preset: str, given: dict[str, Any], resume: Path | None, folder: Path
) -> tuple[SweepPlan, Path]:
    from kendall.loadgen.sweep.plan import load_plan  # noqa: PLC0415 - numba and scipy, which --help need not wait for

    if preset not in PRESETS:
        raise SpecError(f"got preset {preset!r}; expected one of {', '.join(PRESETS)}")
    if resume is not None:
        old = load_plan(resume / "plan.json")
        return _made(msgspec.to_builtins(old) | given) if given else old, resume
    defaults = dict(PRESETS[preset])
    if any(key in given for key in ("loads", "request_rates", "find_saturation", "slo")):
        defaults.pop("loads", None)
    if any(key in given for key in ("num_prompts", "duration", "precision")):
        defaults.pop("duration", None)
    return _made(defaults | given), folder


def _made(values: dict[str, Any]) -> SweepPlan:
    from kendall.loadgen.sweep.plan import SweepPlan  # noqa: PLC0415 - as above

    try:
        return msgspec.convert(values, SweepPlan)
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
