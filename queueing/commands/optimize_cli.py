"""`kendall optimize`. Bad arguments raise SpecError (exit 2); no stable choice exits 3 with its
reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console

from kendall.options import option, with_options
from kendall.policies.arguments import whole_number
from kendall.policies.text import (
    SpecError,
    format_policy,
    policy_batch_size,
    short_form,
    short_number,
    suggest,
)
from kendall.queueing.arrivals.notation import Ending, asked_process
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.choosing.answer import Prices
from kendall.queueing.choosing.candidates import usual_policies
from kendall.queueing.choosing.choices import best_batch_size, best_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.search import Optimum, Point
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.choosing.words import (
    is_duration,
    judged_by_slo,
    legend,
    order_lines,
    result_line,
)
from kendall.queueing.commands.cli import Json, law_of, show
from kendall.queueing.commands.environment_variables import (
    by_flag,
    defaults_named,
    fitting,
    flags_first,
    from_environment,
)
from kendall.queueing.commands.queue_options import (
    ARRIVALS,
    PANELS,
    REQUESTS,
    LawOptions,
    ProcessOptions,
    SettingOptions,
    StationOptions,
    SystemOptions,
    WeightOptions,
)
from kendall.queueing.commands.shared_options import PolicyModules, use_policies
from kendall.queueing.commands.terminal import Column, Table, say, working
from kendall.queueing.distributions.token_distribution import SUPPORT_LIMIT, parse_distribution
from kendall.queueing.errors import NoStableChoiceError
from kendall.queueing.queue import Queue
from kendall.queueing.result import QUANTITY_WORDS

app = typer.Typer(no_args_is_help=True, add_completion=False)
TARGETS = ("max-output-tokens", "batch-size", "policy", "order", "servers", "arrival-rate")
# by simulation, with an arrival process
OF_PROCESSES = ("batch-size", "policy", "servers", "max-output-tokens")
MANY = ("batch-size", "max-output-tokens")  # of which dozens are predicted
SHOWN = 15  # rows of the table
LEAST = 1e-12  # what is smaller is rounding error, or happens to nobody
LEAST_SECONDS = 1e-6  # no gateway is quicker
_DURATIONS = {
    "queueing_delay": "queueing\ndelay (s)",
    "sojourn_time": "sojourn\ntime (s)",
    "time_to_first_token": "first\ntoken (s)",
    "inter_token_latency": "between\ntokens (s)",
    "service_time": "service\ntime (s)",
}
HEADINGS = {
    **_DURATIONS,
    "max_output_tokens": "max output\ntokens",
    "energy_per_request": "energy\n(J)",
    "delay_ratio": "of\nfcfs",
    "p99_delay_ratio": "of\nfcfs",
    "longest_sojourn_time": "longest\ntenth (s)",
    "longest_ratio": "of\nfcfs",
    "largest_sigma": "largest\nsigma",
}
TEXTS = ("policy", "order", "predictor")
NEVER = 1e-6  # limits that cut fewer requests than this are not listed
WEIGHS = {"theta": ("v1", "v2"), "loss_cost": ("v2",), "max_clipped_fraction": ("clipped",)}


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """What is chosen, by which objective, among which candidates."""

    target: str = option("", f"What to choose: {' | '.join(TARGETS)}.", required=True)
    objective: str | None = option(
        "",
        (
            "What to optimise: delay | throughput | v1 | v2 | clipped | slo. Default: delay, with "
            "--slo slo. Policies are compared by sojourn time."
        ),
    )
    arrival_rate: float | None = option(
        ARRIVALS,
        "Requests per second; --target arrival-rate and --objective throughput need none.",
        "--arrival-rate",
        "--request-rate",
    )
    output_tokens: str = option(
        REQUESTS,
        "Distribution of output lengths in tokens, for example lognormal:mu=5,sigma=0.7.",
        required=True,
    )
    policy: str = option("", "Policy whose limit is chosen.", default="single")
    candidates: tuple[str, ...] = option(
        "",
        (
            "With --target policy: a policy to choose from. With --target order: an order, for "
            "example trail:c=0.8. Repeatable."
        ),
        default=(),
    )
    predictor: tuple[str, ...] = option(
        "",
        (
            "With --target order: predictor of output lengths, for example lognormal:sigma=0.5. "
            "Repeatable. Default: exact and lognormal:sigma=0.5."
        ),
        default=(),
    )
    largest: int | None = option("", "Largest limit, batch size or number of servers to try.")
    weights: WeightOptions = field(default_factory=WeightOptions)
    max_clipped_fraction: float | None = option(
        "", "Largest allowed fraction of clipped answers. Default: 0.05."
    )
    slo: str | None = option(
        "",
        (
            "Service level objective of --objective slo, for example p99_queueing_delay=2s. "
            "Several with commas are all kept, and settings are compared by the first: "
            "p99_ttft<=500ms,p99_itl<=50ms."
        ),
    )


@app.command()
@with_options(PANELS)
def optimize(
    ctx: typer.Context,
    asked: ChoiceOptions,
    process: ProcessOptions,
    law: LawOptions,
    setting: SettingOptions,
    system: SystemOptions,
    stations: StationOptions,
    *,
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """Choose a token limit, batch size, policy, order of service, number of servers or arrival
    rate by its predicted effect.
    """
    use_policies(policy_module, asked.policy)
    target, max_output_tokens = asked.target, setting.max_output_tokens
    objective = asked.objective or ("slo" if by_flag(ctx, "slo") else "delay")
    with defaults_named(ctx, objective=objective, policy=asked.policy):
        read = {flag for flag, names in WEIGHS.items() if objective in names} | (
            {"slo"} if objective == "slo" else set()
        )
        weights = {
            **dataclasses.asdict(asked.weights),
            "max_clipped_fraction": asked.max_clipped_fraction,
            "slo": asked.slo,
        }
        goal = objective_of(objective, fitting(ctx, weights, read))
        if target != "order" and from_environment(ctx, "predictor"):
            asked = dataclasses.replace(asked, predictor=())
        _check_target(asked)
        _check_binding(target, goal)
        rates = {"arrival_rate": asked.arrival_rate, "arrivals": process.arrivals}
        coming = flags_first(ctx, rates, tuple(rates))
        arrivals, arrival_rate = coming["arrivals"], _rate(target, **coming)
        if max_output_tokens is not None:
            whole_number("max_output_tokens", max_output_tokens)
        sought = (
            target == "max-output-tokens"
            # then --max-output-tokens bounds the search: lengths cut there would count as whole
            # answers
        )
        lengths = parse_distribution(
            asked.output_tokens, SUPPORT_LIMIT if sought else max_output_tokens
        )
        if sought:
            limits = (asked.largest, max_output_tokens, lengths.quantile(1 - NEVER))
            largest = min(limit for limit in limits if limit is not None)
            asked = dataclasses.replace(asked, largest=largest)
        law_of(law.latency)  # for its warnings
        model = Queue.read(
            asked.policy,
            lengths,
            law.latency,
            arrivals=arrivals,
            prompt_tokens=process.prompt_tokens,
            **dataclasses.asdict(system),
            **dataclasses.asdict(stations),
            **dataclasses.asdict(dataclasses.replace(setting, max_output_tokens=None)),
        )
        try:
            with working(searching := f"predicting choices of {target}") as say_more:
                found = (
                    _order(
                        asked,
                        model,
                        arrival_rate,
                        goal,
                        lambda step: say_more(f"{searching}, {step}"),
                    )
                    if target == "order"
                    else _search(asked, model, arrival_rate, goal)
                )
        except NoStableChoiceError as error:
            typer.echo(f"kendall: {error}", err=True)
            raise typer.Exit(3) from None
    given = {
        "batch-size": policy_batch_size(model.policy),
        "servers": setting.servers,
        "max-output-tokens": max_output_tokens,
    }.get(target)
    show(found.to_dict(), lambda to: print_optimum(found, to, given), law.latency, as_json)


def objective_of(name: str, given: dict[str, Any]) -> Objective:
    """From the texts and numbers of the options. Raises SpecError."""
    slo = given.pop("slo", None)
    weights = {key: value for key, value in given.items() if value is not None}
    goal = Objective(name=name, **({} if slo is None else parse_slos(slo)), **weights)
    for key in weights:
        if name not in WEIGHS[key]:
            flag = "--" + key.replace("_", "-")
            raise SpecError(
                f"got {flag} with --objective {name}; expected --objective "
                f"{' or '.join(WEIGHS[key])}"
            )
    return goal


def _check_target(asked: ChoiceOptions) -> None:
    target, largest = asked.target, asked.largest
    if target not in TARGETS:
        raise SpecError(
            f"got --target {target!r}; expected one of "
            f"{', '.join(TARGETS)}{suggest(target, TARGETS)}"
        )
    if asked.candidates and target not in ("policy", "order"):
        raise SpecError(
            f"got --candidates with --target {target}; expected --target policy or order"
        )
    if asked.predictor and target != "order":
        raise SpecError(f"got --predictor with --target {target}; expected --target order")
    if largest is not None and target in ("policy", "order", "arrival-rate"):
        raise SpecError(
            f"got --largest with --target {target}; expected it for a limit, batch size or servers"
        )
    if largest is not None and largest < 1:
        raise SpecError(f"got --largest {largest}; expected at least 1")


def _rate(target: str, arrival_rate: float | None, arrivals: str | None) -> float | None:
    """The asked rate, or the mean rate of the arrival process."""
    process = asked_process(arrivals)
    if process is None:
        return arrival_rate
    if arrival_rate is not None:
        raise SpecError(
            f"got --arrival-rate {arrival_rate:g} and --arrivals {arrivals}; expected one of them: "
            "a process has its own mean rate"
        )
    if isinstance(process, Poisson):
        return process.mean_rate
    if target not in OF_PROCESSES or isinstance(process, Ending):
        what = "which end" if isinstance(process, Ending) else f"with --target {target}"
        raise SpecError(
            f"got --arrivals {arrivals}, {what}; expected gamma, deterministic or mmpp "
            f"with --target {', '.join(OF_PROCESSES[:-1])} or {OF_PROCESSES[-1]}"
        )
    return process.mean_rate


def _check_binding(target: str, goal: Objective) -> None:
    """Raises SpecError: without a value of long answers the shortest limit is always the best."""
    values_answers = goal.name in ("clipped", "slo") or (
        goal.name in ("v1", "v2") and goal.theta > 0
    )
    if target != "max-output-tokens" or values_answers:
        return
    why = "the throughput always rises" if goal.name == "throughput" else "the delay always falls"
    got = f"--objective {goal.name}{' with --theta 0' if goal.name in ('v1', 'v2') else ''}"
    raise SpecError(
        f"got {got} for max-output-tokens; expected an objective that values long answers, for "
        "example --objective clipped --max-clipped-fraction 0.05, --slo p99_queueing_delay=2s or "
        f"--objective v1 --theta 0.5: {why} with a lower limit"
    )


def _search(asked: ChoiceOptions, model: Queue, rate: float | None, goal: Objective) -> Optimum:
    target, largest = asked.target, asked.largest
    prices = Prices(goal.slos, many=target in MANY)
    by: dict[str, Any] = {"predict": prices.quick, "full": prices.full}
    if target == "arrival-rate":
        return largest_rate(model, goal, **by)
    if rate is not None and not rate > 0:
        raise SpecError(f"got --arrival-rate {rate:g}; expected requests per second > 0")
    limit = by if largest is None else by | {"largest": largest}
    if target == "max-output-tokens":
        return best_token_limit(model, _needed(rate), goal, **limit)
    rate = rate if goal.name == "throughput" else _needed(rate)
    if target == "batch-size":
        return best_batch_size(model, rate, goal, **limit)
    if target == "policy":
        in_force = Setting(policy=format_policy(model.policy))
        among = asked.candidates or usual_policies(in_force, model.engine.bounds.max_num_seqs)
        return best_policy(model, among, rate, goal, **by)
    return fewest_servers(model, _needed(rate), goal, **limit)


def _order(
    asked: ChoiceOptions,
    model: Queue,
    rate: float | None,
    goal: Objective,
    progress: Callable[[str], None],
) -> Optimum:
    from kendall.queueing.choosing.orders import best_order  # noqa: PLC0415 - scipy.optimize, which other targets need not wait for

    if goal.name == "slo":
        raise SpecError("got an SLO for order; expected none: leave --slo out")
    if goal.name != "delay":
        raise SpecError(f"got --objective {goal.name} for order; expected delay")
    candidates = asked.candidates or None
    return best_order(model, _needed(rate), candidates, asked.predictor, progress)


def _needed(rate: float | None) -> float:
    if rate is None:
        raise SpecError(
            "got no --arrival-rate; expected requests per second > 0: only --target arrival-rate, "
            "and --objective throughput for a batch size or a policy, need none"
        )
    return rate


def print_optimum(found: Optimum, to: Console, given: int | None = None) -> None:
    """The curve with its best point, which is marked, and the one that was given; and the result
    in a sentence.
    """
    by = "" if found.compared is None else f", by mean {QUANTITY_WORDS[found.compared]}"
    say(to, f"{found.target} for {found.objective}{by}")
    to.print(_table(found, given))
    say(to, result_line(found))
    for line in order_lines(found) if found.target == "order" else ():
        say(to, line)
    hidden = len(found.curve) - len(_around(found, given))
    if hidden:
        say(to, f"{len(found.curve)} choices were tried; --json has those that are not shown")
    say(to, legend(found))
    if found.note is not None:
        say(to, found.note)


def _table(found: Optimum, given: int | None) -> Table:
    rows = _around(found, given)
    best = rows.index(found.best)
    if found.target == "order":
        rows = [row | {"largest_sigma": _sigma(row)} for row in rows]
    names = _shown(found, rows)
    columns = [
        Column(
            heading=_heading(name),
            left=name in TEXTS,
            short=short_form,
        )
        for name in names
    ]
    least = {name: LEAST_SECONDS for name in names if is_duration(name)}
    if judged_by_slo(found):
        names.remove("score")
        columns = [
            *(column for column in columns if column.heading != "score"),
            Column(heading="SLO\nkept"),
        ]
    marked = [
        [
            ">" if place == best else "",
            *(cell(row.get(name), least.get(name, LEAST)) for name in names),
        ]
        for place, row in enumerate(rows)
    ]
    if judged_by_slo(found):
        marked = [
            [*cells, "no" if row.get("score") is None else "yes"]
            for cells, row in zip(marked, rows, strict=True)
        ]
    return Table([Column(heading=""), *columns], marked, keys=3 if found.target == "order" else 2)


def _heading(name: str) -> str:
    level, _, duration = name.partition("_")
    if is_duration(name) and duration in _DURATIONS:
        return f"{level} {_DURATIONS[duration]}"
    return HEADINGS.get(name, name.replace("_", "\n"))


def _shown(found: Optimum, rows: list[Point]) -> list[str]:
    """Names of the columns."""
    hidden = {"stable", "method", "queue_length", "number_in_system", "watts"}
    if not any(row.get("loss_fraction") for row in rows):
        hidden.add("loss_fraction")
    if found.target == "order":
        hidden |= {"score", "beats_fcfs"}
    return [
        name
        for name in max(rows, key=len)
        if name not in hidden and any(row.get(name) is not None for row in rows)
    ]


def _sigma(row: Point) -> float | str | None:
    """Up to which spread an order gains."""
    words = {"always": "any", "never": "none"}
    beats = row.get("beats_fcfs")
    return words[beats] if beats in words else row.get("largest_sigma")


def _around(found: Optimum, given: int | None) -> list[Point]:
    curve, key = found.curve or [found.best], found.target.replace("-", "_")
    if len(curve) <= SHOWN or found.target == "order":
        return curve
    every = max(1, len(curve) // SHOWN)
    named = [
        point
        for point in curve
        if point == found.best or (given is not None and point.get(key) == given)
    ]
    return [point for i, point in enumerate(curve) if i % every == 0 or point in named]


def cell(value: Any, least: float, digits: int = 5) -> str:
    """Of a table: what is smaller than `least` says so."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"< {least:g}" if 0 < abs(value) < least else short_number(value, digits)
