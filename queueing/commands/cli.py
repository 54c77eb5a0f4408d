"""`kendall predict` and `kendall simulate`. Bad arguments raise SpecError, which the root
command turns into one line and exit status 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from kendall.options import flag_option, with_options
from kendall.policies.text import SpecError, short_number
from kendall.queueing.choosing.objective import Objective, Slo, levels_of, parse_slos
from kendall.queueing.commands.environment_variables import fitting, flags_first
from kendall.queueing.commands.queue_options import ANSWER, PANELS, QueueOptions, TrafficOptions
from kendall.queueing.commands.shared_options import ABOUT_JSON, PolicyModules, use_policies
from kendall.queueing.commands.terminal import Column, Table, console, say, working
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel, slow_law
from kendall.queueing.latency.profile import ProfileFile, load_law, poor_fit_of, profile_of
from kendall.queueing.prediction import unstable
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.result import Prediction, Quantiles
from kendall.queueing.simulation.experiment import NUM_REQUESTS
from kendall.queueing.simulation.simulated_means import RISING

app = typer.Typer(no_args_is_help=True, add_completion=False)
DASH = "-"  # in place of a number


Json = Annotated[bool, flag_option(ANSWER, ABOUT_JSON, "--json")]


@app.command()
@with_options(PANELS)
def predict(
    ctx: typer.Context,
    queue: QueueOptions,
    *,
    method: Annotated[
        str,
        flag_option(
            ANSWER,
            (
                "Method: auto (the best available) | exact | approximation | bound | paper | "
                "simulation."
            ),
            "--method",
        ),
    ] = "auto",
    model_text: Annotated[
        bool,
        flag_option(
            ANSWER,
            "Print the queue in Kendall's notation and, a line a part, in words; no prediction.",
            "--model-text",
        ),
    ] = False,
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """Predict the steady-state queueing delay of a policy."""
    query, slos = _query(ctx, queue, policy_module)
    if model_text:
        if as_json:
            raise SpecError("got --model-text and --json; expected one of the two")
        typer.echo(query.model_text)
        return
    try:
        with working("predicting"):
            answer = query.predict(method, [each.field for each in slos if each.level is not None])
    except UnstableQueueError as error:
        answer = unstable(query.model, error.load, method)
    _show(answer, slos, queue.law.latency, as_json)


@app.command()
@with_options(PANELS)
def simulate(
    ctx: typer.Context,
    queue: QueueOptions,
    *,
    num_requests: Annotated[
        int | None,
        flag_option(
            ANSWER,
            (
                "Requests per replication; the first tenth is discarded as warm-up, and where the "
                f"queue remembers longer more. Default: {NUM_REQUESTS}; of a trace all."
            ),
            "--num-requests",
        ),
    ] = None,
    seed: Annotated[
        int,
        flag_option(ANSWER, "Seed for arrivals, lengths and service times.", "--seed"),
    ] = 0,
    replications: Annotated[
        int,
        flag_option(ANSWER, "Number of independent replications.", "--replications"),
    ] = 1,
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """Simulate a policy on Poisson or other arrivals, event by event, and report means with
    standard errors.
    """
    query, slos = _query(ctx, queue, policy_module)
    try:
        with working("simulating"):
            answer = query.simulate(num_requests, seed=seed, replications=replications)
    except UnstableQueueError as error:
        answer = unstable(query.model, error.load, "simulation")
    _show(answer, slos, queue.law.latency, as_json)


def _query(
    ctx: typer.Context, queue: QueueOptions, policy_module: list[str] | None
) -> tuple[PredictionQuery, tuple[Slo, ...]]:
    """The query of a command, and the objectives that its answer is judged by."""
    use_policies(policy_module, queue.policy)
    slos = Objective(name="slo", **parse_slos(queue.slo)).slos if queue.slo is not None else ()
    given = {
        **queue.limits(),
        "quantiles": tuple(levels_of(slos)),
        **coming(ctx, queue.traffic),
    }
    law_of(queue.law.latency)  # for its warnings
    return read(queue.policy, queue.law.latency, **given), slos


def coming(ctx: typer.Context, traffic: TrafficOptions) -> dict[str, Any]:
    """What comes, by the names of `PredictionQuery.read`. A flag overrides a variable of the
    environment that says otherwise; beside a trace variables say no other lengths.
    """
    sources = {
        "arrival_rate": traffic.arrival_rate,
        "arrivals": traffic.process.arrivals,
        "trace": traffic.trace,
    }
    lengths = {
        "output_tokens": traffic.output_tokens,
        "prompt_tokens": traffic.process.prompt_tokens,
    }
    chosen = flags_first(ctx, sources, tuple(sources))
    fits = () if chosen["trace"] is not None else tuple(lengths)
    return chosen | dict.fromkeys(lengths) | fitting(ctx, lengths, fits)


def read(policy: str, latency: LatencyModel | str, **given: Any) -> PredictionQuery:
    """The query, with a warning on stderr where an order misses its predictions."""
    query = PredictionQuery.read(policy, latency, **given)
    if (warning := query.warning) is not None:
        typer.echo(f"kendall: warning: {warning}", err=True)
    return query


def law_of(text: str) -> LatencyModel:
    """The law of --latency, with a warning on stderr where it fits poorly, or was probably
    written in milliseconds.
    """
    law = load_law(text)
    for warning in filter(None, (poor_fit_of(text), slow_law(law))):
        typer.echo(f"kendall: warning: {warning}", err=True)
    return law


def show(
    answer: dict[str, Any], print_answer: Callable[[Console], None], latency: str, as_json: bool
) -> None:
    """Print one or the other, and which profile the law came from."""
    profile = profile_of(latency)
    if as_json:
        typer.echo(
            json.dumps(answer | {"latency_profile": None if profile is None else profile.to_dict()})
        )
        return
    to = console()
    print_answer(to)
    for line in _profile_lines(profile):
        say(to, line, hang=14)


def _profile_lines(profile: ProfileFile | None) -> list[str]:
    lines = [] if profile is None else profile.describe()
    return [f"{'' if number else 'latency':<14}{line}" for number, line in enumerate(lines)]


def _show(answer: Prediction, slos: Sequence[Slo], latency: str, as_json: bool) -> None:
    judged = [judgement(answer, slo) for slo in slos]
    plain = answer.as_dict() | ({"slos": judged} if judged else {})
    show(plain, lambda to: _print(answer, judged, to), latency, as_json)


def judgement(answer: Prediction, slo: Slo) -> dict[str, Any]:
    """As JSON: `kept` is null where the method does not give the value, or the queue grew."""
    value = slo.value(answer)
    if any(text.startswith(RISING) for text in answer.assumptions):
        return {"slo": slo.name, "seconds": slo.seconds, "value": value, "kept": None}
    kept = False if not answer.stable else None if value is None else value <= slo.seconds
    return {"slo": slo.name, "seconds": slo.seconds, "value": value, "kept": kept}


def _print(answer: Prediction, judged: Sequence[dict[str, Any]], to: Console) -> None:
    for line in _heads(answer):
        say(to, line, hang=14)
    if answer.stable:
        table = _table(answer)
        to.print(table)
        numbers = _numbers(answer)
        to.print(numbers)
        if any(DASH in row for row in [*table.rows, *numbers.rows]):
            say(to, f"{DASH}: the method does not give this value")
    for each in judged:
        unknown = "not given by the method" if each["value"] is None else "unknown, the queue grew"
        word = {True: "kept", False: "broken", None: unknown}[each["kept"]]
        asked = f"{each['slo']} <= {short_number(each['seconds'])} s"
        say(to, f"{asked}: {word} ({_number(each['value'])} s)", hang=14)
    for number, assumption in enumerate(
        each for each in answer.assumptions if each != answer.fallback
    ):  # which the first line says
        say(to, f"{'' if number else 'assumes':<14}{assumption}", hang=14)


def _heads(answer: Prediction) -> Iterator[str]:
    bound = (
        ""
        if answer.effective_max_batch_size is None
        else f", at most {answer.effective_max_batch_size} together"
    )
    yield f"{answer.policy}  {answer.model}{bound}  ({answer.fallback or answer.method})"
    counted = "" if answer.load_bound is None else f"  (bound by {answer.load_bound})"
    yield f"load          {short_number(answer.load)}{counted}" + (
        ""
        if answer.stable
        else "  UNSTABLE: the queue grows without bound; expected a lower rate or token limit, or "
        "larger batches"
    )
    if answer.stable:
        yield f"utilisation   {_number(answer.utilisation)}"
        yield f"batch size    {_number(answer.batch_size.mean)}"
        rejected = answer.rejected_fraction
        of_them = f"  (rejected {_number(rejected)})" if rejected else ""
        yield f"loss fraction {_number(answer.loss_fraction)}{of_them}"
    if answer.stable and answer.energy_use is not None:
        joules = answer.energy_per_request
        yield "energy        " + (
            f"{_number(joules)} J a request ({_number(1 / joules)} requests a joule), "
            f"{_number(answer.watts)} W"
            if joules
            else "not known, as the utilisation or the batch size that its law needs is not"
        )
    if "queueing_delay_upper" in answer.bounds:
        yield (
            f"upper bound   {_number(answer.bounds['queueing_delay_upper'])} s for the mean "
            "queueing delay"
        )
    if answer.stations:
        yield "servers       " + ", ".join(
            f"{station.name} at load {short_number(station.load)}" for station in answer.stations
        )


def _table(answer: Prediction) -> Table:
    durations = [("queueing delay", answer.queueing_delay), ("sojourn time", answer.sojourn_time)]
    if answer.served_queueing_delay.mean != answer.queueing_delay.mean:
        durations.insert(1, ("delay of the served", answer.served_queueing_delay))
    durations += [(f"{station.name} delay", station.queueing_delay) for station in answer.stations]
    durations += [(f"delay of {name}", delay) for name, delay in answer.flows.items()]
    names = list(answer.queueing_delay.numbers())
    rows = [row for label, value in durations for row in _rows(label, value, names, DASH)]
    for label, value in (
        ("time to first token", answer.time_to_first_token),
        ("inter-token latency", answer.inter_token_latency),
        ("service time", answer.service_time),
    ):
        given = any(value.value(name) is not None for name in names[1:])
        rows += _rows(label, value, names, DASH if given else "")
    return Table(
        (Column(heading="seconds", left=True), *(Column(heading=name) for name in names)), rows
    )


def _numbers(answer: Prediction) -> Table:
    """How many requests there are."""
    names, rows = list(answer.queueing_delay.numbers()), []
    for label, number in (
        ("queue length", answer.queue_length),
        ("number in system", answer.number_in_system),
    ):
        values = [number.value(name) for name in (*names[1:], "p_empty")]
        missing = "" if set(values[:-1]) == {None} else DASH
        cells = [missing if value is None else _number(value) for value in values]
        rows.append([label, _number(number.mean), *cells])
    columns = (Column(heading="requests", left=True), *(Column(heading=name) for name in names))
    return Table((*columns, Column(heading="P(none)")), rows)


def _rows(label: str, value: Quantiles, names: Sequence[str], missing: str) -> Iterator[list[str]]:
    """Mean and quantiles; a second row for the standard errors of a simulation."""
    found = [value.value(name) for name in names[1:]]
    quantiles = [missing if number is None else _number(number) for number in found]
    yield [label, _number(value.mean), *quantiles]
    errors = [value.standard_error, *map(value.errors.get, names[1:])]
    if any(error is not None for error in errors):
        yield ["  std. error", *("" if error is None else _number(error) for error in errors)]


def _number(value: float | None) -> str:
    return DASH if value is None else short_number(value)
