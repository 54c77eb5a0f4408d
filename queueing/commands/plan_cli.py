"""`kendall plan`. Bad arguments raise SpecError (exit 2); where no option keeps the SLOs the status
is 3 and every option has its reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kendall.options import option, with_options
from kendall.policies.arguments import whole_number
from kendall.policies.durations import Duration
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.arrivals.notation import Ending, asked_process
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.plan import (
    CUTS,
    CapacityPlan,
    Choices,
    Demand,
    Kind,
    check_costs,
    make_plan,
)
from kendall.queueing.choosing.reach import NOTHING
from kendall.queueing.choosing.search import Point
from kendall.queueing.commands.cli import Json, coming, law_of
from kendall.queueing.commands.optimize_cli import LEAST_SECONDS, cell
from kendall.queueing.commands.queue_options import PANELS, SystemOptions, TrafficOptions
from kendall.queueing.commands.terminal import Column, Table, console, say, working
from kendall.queueing.distributions.token_distribution import (
    SUPPORT_LIMIT,
    TokenDistribution,
    parse_distribution,
)
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import profile_of
from kendall.queueing.measurement.paths import check_writable
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.simulation.recorded import recorded_model

if TYPE_CHECKING:
    from kendall.queueing.choosing.slo_bill import SloBill

app = typer.Typer(no_args_is_help=True, add_completion=False)
NONE_KEEPS = 3  # exit status
LIMITS = "--max-output-tokens"
PICTURES = (".png", ".svg", ".pdf")
FLEET = "Fleet"


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Rules that set the number of servers while a trace is replayed."""

    start_up: float | None = option(
        FLEET,
        (
            "With --trace: seconds until a server that is ordered serves. The trace is replayed on "
            "servers of the best option whose number is set by a forecast, by a Kubernetes HPA and "
            "not at all, and what each attained is set beside what it cost."
        ),
        parser=Duration(),
    )
    hpa_waiting: str = option(
        FLEET,
        "With --start-up: waiting requests of a server that the HPAs have as targets.",
        default="1,5,16,250",
    )
    seed: int = option(
        FLEET,
        "With --start-up: seed of what the forecast draws.",
        default=0,
    )

    @property
    def targets(self) -> list[float]:
        """The targets of the HPAs. Raises SpecError."""
        found = [_number(each) for each in self.hpa_waiting.split(",")]
        if not all(0 < each < math.inf for each in found):
            raise SpecError(
                f"got --hpa-waiting {self.hpa_waiting}; expected numbers > 0 with commas, for "
                "example 1,5,16,250"
            )
        return list(dict.fromkeys(found))

    def check(self, trace: Path | None, routing: str, goal: Objective) -> None:
        """Raises SpecError."""
        if self.start_up is None:
            return
        from kendall.queueing.choosing.slo_bill import check_billed  # noqa: PLC0415 - loads numba

        if trace is None:
            raise SpecError(
                "got --start-up without --trace; expected a recorded trace, whose requests are "
                "replayed on the fleets"
            )
        if routing != "central":
            raise SpecError(
                f"got --start-up with --routing {routing}; expected central: the fleets have one "
                "queue"
            )
        if not 0 <= self.start_up < math.inf:
            raise SpecError(f"got --start-up {self.start_up:g}; expected finite seconds >= 0")
        whole_number("seed", self.seed, least=0)
        check_billed(goal)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@app.command()
@with_options([*PANELS, FLEET])
def plan(
    ctx: typer.Context,
    traffic: TrafficOptions,
    system: SystemOptions,
    fleet: FleetOptions,
    *,
    slo: Annotated[
        str,
        typer.Option(
            help="Service level objectives, all of which are kept: p99_ttft<=500ms,p99_itl<=50ms."
        ),
    ],
    latency: Annotated[
        list[str],
        typer.Option(
            help="Latency law, or the name or file of a profile, of a kind of server. Repeatable: "
            "kinds are compared."
        ),
    ],
    cost: Annotated[
        list[float] | None,
        typer.Option(
            help="Cost of one server of each --latency, in the same order, in any unit. Default: "
            "1, so that costs are numbers of servers."
        ),
    ] = None,
    max_num_seqs: Annotated[
        str, typer.Option(help="Numbers of slots of a server to choose from.")
    ] = "16,32,64,128",
    max_output_tokens: Annotated[
        str | None,
        typer.Option(help="Token limits to choose from: 512,1024,none. Default: no limit."),
    ] = None,
    max_clipped_fraction: Annotated[
        float, typer.Option(help="Largest fraction of the answers that a token limit may cut.")
    ] = 0.05,
    largest: Annotated[int, typer.Option(help="Largest number of servers to try.")] = 64,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", "--picture", help="File for a picture of the options: .png, .svg or .pdf."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan capacity: the fewest servers of each kind that keep the SLOs with continuous batching,
    by number of slots and token limit, and what they cost.
    """
    if plot is not None:
        _check_picture(plot)
    choices = Choices(
        kinds=_kinds(latency, check_costs(latency, cost or [])),
        slots=_slots(max_num_seqs, system.step_tokens),
        limits=_limits(max_output_tokens),
        largest=whole_number("largest", largest),
    )
    goal = Objective(name="slo", max_clipped_fraction=max_clipped_fraction, **parse_slos(slo))
    given, limits = coming(ctx, traffic), dataclasses.asdict(system)
    fleet.check(given["trace"], system.routing, goal)
    targets = fleet.targets
    demand = _demand(given, limits, goal, choices)
    with working("planning") as tell:
        found = make_plan(demand, choices, tell)
        bill = None
        if fleet.start_up is not None and found.best is not None:
            bill = _bill(found, demand, choices, fleet, targets, tell)
    if plot is not None:
        from kendall.queueing.commands.plan_picture import draw_plan  # noqa: PLC0415 - loads matplotlib

        draw_plan(found, plot, bill)
    if as_json:
        billed = {} if bill is None else {"bill": bill.to_dict()}
        typer.echo(json.dumps(found.to_dict() | billed))
    else:
        print_plan(found, console())
        if bill is not None:
            print_bill(bill, console())
    if found.best is None:
        typer.echo(f"kendall: {_nothing(found)}", err=True)
        raise typer.Exit(NONE_KEEPS)


def _bill(
    found: CapacityPlan,
    demand: Demand,
    choices: Choices,
    fleet: FleetOptions,
    targets: list[float],
    tell: Callable[[str], None],
) -> SloBill:
    """Of the best option. Raises SpecError."""
    from kendall.queueing.choosing.slo_bill import Terms, make_bill  # noqa: PLC0415 - loads numba

    best = found.best
    assert best is not None
    assert fleet.start_up is not None
    law = next(kind.law for kind in choices.kinds if kind.name == best["latency"])
    query = demand.query(best["max_num_seqs"], law, best["max_output_tokens"])
    assert query.trace is not None
    terms = Terms(start_up=fleet.start_up, thresholds=targets, seed=fleet.seed)
    return make_bill(query.model, query.trace, found.goal, best["servers"], terms, tell=tell)


def _check_picture(plot: Path) -> None:
    if plot.suffix not in PICTURES:
        raise SpecError(f"got --plot {plot}; expected a name that ends in {', '.join(PICTURES)}")
    check_writable(plot, "--plot")


def _whole(flag: str, text: str) -> int:
    try:
        return whole_number(flag, int(text))
    except ValueError:
        without = " or none" if flag == LIMITS else ""
        raise SpecError(
            f"got {flag} with {text!r}; expected whole numbers of at least 1{without} with commas, "
            "for example 16,32,64"
        ) from None


def _limits(text: str | None) -> list[int | None]:
    texts = ["none"] if text is None else [each.strip() for each in text.split(",")]
    return list(dict.fromkeys(None if each == "none" else _whole(LIMITS, each) for each in texts))


def _kinds(latencies: list[str], costs: list[float]) -> list[Kind]:
    """Named by their profiles; laws by their numbers."""
    kinds = []
    for number, (text, cost) in enumerate(zip(latencies, costs, strict=True), start=1):
        profile = profile_of(text)
        name = f"law {number}" if profile is None else profile.profile.name
        kinds.append(Kind(name=name, law=law_of(text), cost=cost))
    return kinds


def _demand(
    given: dict[str, Any], limits: dict[str, Any], goal: Objective, choices: Choices
) -> Demand:
    if given["trace"] is None and given["output_tokens"] is None:
        raise SpecError(
            "got no lengths; expected --output-tokens, for example lognormal:mu=5,sigma=0.7"
        )
    if isinstance(asked_process(given["arrivals"]), Ending):
        raise SpecError(
            f"got --arrivals {given['arrivals']}, which end; expected gamma, deterministic or mmpp"
        )

    policies = {slots: f"continuous:max_batch_size={slots}" for slots in choices.slots}
    some, law, limit = policies[choices.slots[0]], choices.kinds[0].law, choices.limits[-1]
    first = PredictionQuery.read(some, law, max_output_tokens=limit, **limits, **given)

    def query(slots: int, law: LatencyModel, limit: int | None) -> PredictionQuery:
        if first.trace is None:
            return PredictionQuery.read(
                policies[slots], law, max_output_tokens=limit, **limits, **given
            )
        model = recorded_model(first.trace, policies[slots], law, max_output_tokens=limit, **limits)
        return dataclasses.replace(first, model=model)

    lengths = _lengths(first, given["output_tokens"])

    def clipped(limit: int | None) -> float:
        longest = lengths.longest
        return 0.0 if limit is None or limit >= longest else float(lengths.survival[limit])

    return Demand(query=query, clipped=clipped, goal=goal)


def _lengths(query: PredictionQuery, text: str | None) -> TokenDistribution:
    """The output lengths before any limit."""
    if query.trace is not None:
        return TokenDistribution.from_counts(query.trace.output_tokens)
    assert text is not None
    return parse_distribution(text, SUPPORT_LIMIT)


def _slots(given: str, step_tokens: int | None) -> list[int]:
    """Raises SpecError."""
    asked = list(dict.fromkeys(_whole("--max-num-seqs", each) for each in given.split(",")))
    kept = [slots for slots in asked if step_tokens is None or slots <= step_tokens]
    if not kept:
        raise SpecError(
            f"got --step-tokens {step_tokens} with --max-num-seqs {given}; expected at least as "
            "many tokens as slots, one for each"
        )
    if left := [str(slots) for slots in asked if slots not in kept]:
        say(
            console(sys.stderr),
            f"kendall: left out: {', '.join(left)} slots, more than the {step_tokens} tokens of a "
            "step",
        )
    return kept


def print_plan(found: CapacityPlan, to: Console) -> None:
    """The table of options, and the best in a sentence."""
    names = list(dict.fromkeys(slo.name for slo in found.goal.slos))
    headings = [name.replace("_", " ", 1).replace("_", "\n", 1) + " (s)" for name in names]
    possible = [each for each in found.options if each["servers"] is not None]
    limited = any(each["max_output_tokens"] is not None for each in found.options)
    cuts = ["token\nlimit", "cut"] if limited else []
    powered = ["watts"] if any(each.get("watts") is not None for each in found.options) else []
    columns = [
        "",
        "latency",
        "max num\nseqs",
        *cuts,
        "servers",
        "cost",
        "load",
        *headings,
        *powered,
    ]
    rows = [_row(each, found, [*names, *powered], limited=limited) for each in found.options]
    say(to, f"fewest servers that keep {found.goal.constraint}")
    to.print(
        Table(
            [Column(heading=each, left=place < 2) for place, each in enumerate(columns)],
            rows,
            keys=3 + len(cuts[:1]),
        )
    )
    if found.best is not None:
        say(to, _best(found, found.best))
    if possible:
        say(
            to,
            "> marks the best choice, * the others that no choice beats in cost, answers cut and "
            f"{names[0].replace('_', ' ')} at once",
        )
    for why in dict.fromkeys(each["why"] for each in found.options if each["why"]):
        which = [_name(each) for each in found.options if each["why"] == why]
        say(to, f"{', '.join(which)}: {why}")


def _name(option: Point) -> str:
    limit = option["max_output_tokens"]
    cut = "" if limit is None else f", limit {limit}"
    return f"{option['latency']} with {counted(option['max_num_seqs'], 'slot')}{cut}"


def _row(option: Point, found: CapacityPlan, names: list[str], *, limited: bool) -> list[str]:
    mark = ">" if option is found.best else "*" if option["frontier"] else ""
    limit = option["max_output_tokens"]
    cuts = ["none" if limit is None else str(limit), f"{option['clipped_fraction']:.2%}"]
    numbers = [option[name] for name in ("servers", "cost")]
    values = [option.get(name) for name in ("load", *names)]
    return [
        mark,
        option["latency"],
        str(option["max_num_seqs"]),
        *(cuts if limited else []),
        *("-" if each is None else f"{each:g}" for each in numbers),
        *(cell(value, LEAST_SECONDS, digits=4) for value in values),
    ]


def _best(found: CapacityPlan, best: Point) -> str:
    cost = f"a cost of {best['cost']:g}"
    servers = counted(best["servers"], "server")
    text = f"best: {servers} of {_name(best)}, {cost}, load {short_number(best['load'], 3)}"
    if found.largest_rate is None:
        return text
    return f"{text}; they keep the SLO up to {short_number(found.largest_rate, 4)} requests/s"


def print_bill(bill: SloBill, to: Console) -> None:
    """What each rule attained and cost, and the assumptions of the fleets."""
    say(to, f"the bill of {bill.slo} over {counted(bill.requests, 'request')}")
    headings = ["rule", "attained", "cost", "servers\nfewest", "mean", "most"]
    rows = [
        [
            line.rule,
            f"{line.attained:.2%}{'' if line.kept else ' !'}",
            f"{line.cost:.1%}",
            str(line.fewest),
            f"{line.mean:.2f}",
            str(line.most),
        ]
        for line in bill.lines
    ]
    columns = [Column(heading=each, left=place == 0) for place, each in enumerate(headings)]
    to.print(Table(columns, rows))
    say(
        to,
        "cost: server-seconds, from order to last answer, of the peak pool's; a server serves "
        f"{bill.terms.start_up:g} s after its order; every fleet begins with the peak pool's "
        f"servers and has no more; ! misses the SLO; seed {bill.terms.seed}",
    )


def _nothing(found: CapacityPlan) -> str:
    remedy = "raise --largest, relax the SLO, or lower the rate"
    if all(str(each["why"]).startswith(CUTS) for each in found.options):
        remedy = "raise --max-output-tokens or --max-clipped-fraction"
    elif all(str(each["why"]).startswith(NOTHING) for each in found.options):
        remedy = "relax the SLO, or take a faster engine: no server and no lower rate helps"
    return (
        f"none of {counted(len(found.options), 'option')} keeps {found.goal.constraint}; {remedy}"
    )
