"""`kendall predict` and `kendall simulate`. Bad arguments raise SpecError, which the root
command turns into one line and exit status 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kendall.policies.durations import Duration
from kendall.policies.text import short_number
from kendall.queueing.choosing.objective import Objective, Slo, levels_of, parse_slos
from kendall.queueing.commands.environment_variables import fitting, flags_first
from kendall.queueing.commands.policy_option import PolicyModules, use_policies
from kendall.queueing.commands.terminal import Column, Table, console, say, working
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel, slow_law
from kendall.queueing.latency.profile import ProfileFile, load_law, poor_fit_of, profile_of
from kendall.queueing.prediction import unstable
from kendall.queueing.prediction.asked import Asked
from kendall.queueing.result import Prediction, Quantiles
from kendall.queueing.simulation.experiment import NUM_REQUESTS

app = typer.Typer(no_args_is_help=True, add_completion=False)
DASH = "-"  # in place of a number


def _option(flag: str, about: str, **settings: Any) -> Any:
    return typer.Option(flag, help=about, **settings)


PolicyText = Annotated[
    str,
    _option(
        "--policy",
        (
            "Batching policy: single | dynamic | capped:max_batch_size=8 | fixed:batch_size=8 | "
            "elastic | continuous:max_batch_size=32."
        ),
    ),
]
ArrivalRate = Annotated[
    float | None,
    _option(
        "--arrival-rate",
        "Requests per second; arrivals are a Poisson process unless --arrival-scv is given.",
    ),
]
ArrivalsOption = Annotated[
    str | None,
    _option(
        "--arrivals",
        (
            "Arrival process instead of --arrival-rate, as in kendall load: "
            "mmpp:rates=1/5,durations=9/1, also gamma, deterministic, piecewise, ramp, poisson. "
            "All but poisson are simulated."
        ),
    ),
]
TraceOption = Annotated[
    Path | None,
    _option(
        "--trace",
        (
            "Replay the arrivals and lengths of a recorded trace (Azure, BurstGPT, Mooncake, "
            "Bailian, a run file), instead of --arrival-rate and --output-tokens."
        ),
    ),
]
OutputTokens = Annotated[
    str,
    _option(
        "--output-tokens",
        "Distribution of output lengths in tokens, for example lognormal:mu=5,sigma=0.7.",
    ),
]
LengthsOption = Annotated[
    str | None,
    _option(
        "--output-tokens",
        (
            "Distribution of output lengths in tokens, for example lognormal:mu=5,sigma=0.7; a "
            "trace has its own."
        ),
    ),
]
Latency = Annotated[
    str,
    _option(
        "--latency",
        (
            "Latency law, k1=..,k2=..,k3=..,k4=.. or a=..,c=.. in seconds, or the name or file of "
            "a profile."
        ),
    ),
]
TokenLimit = Annotated[
    int | None,
    _option("--max-output-tokens", "Token limit: longer answers are clipped. Default: no limit."),
]
Patience = Annotated[
    float | None,
    _option(
        "--patience",
        "Longest wait; a request that waits longer is lost. Default: no limit.",
        parser=Duration(),
    ),
]
Servers = Annotated[int, _option("--servers", "Number of engines fed from one queue.")]
ServerSpeeds = Annotated[
    str | None,
    _option(
        "--server-speeds",
        (
            "In place of --servers: of each engine, how many times as long as the law's its times "
            "are, for example 1,1.5. The first that is free takes the next request."
        ),
    ),
]
Routing = Annotated[
    str,
    _option(
        "--routing",
        (
            "How requests come to the engines: central (one queue) | random | round_robin | "
            "least_requests (each engine has a queue of its own, behind a load balancer)."
        ),
    ),
]
EngineBound = Annotated[
    int | None, _option("--max-num-seqs", "The engine's limit on the batch size. Default: none.")
]
PromptTokens = Annotated[
    str | None,
    _option(
        "--prompt-tokens",
        (
            "Distribution of prompt lengths in tokens; needs kp in the latency law. Default: "
            "prompts cost no time."
        ),
    ),
]
Sequences = Annotated[
    str | None,
    _option(
        "--sequences",
        (
            "Distribution of the number of sequences per call (n, or several prompts). They "
            "arrive together; --arrival-rate counts calls. Default: one."
        ),
    ),
]
IntraclassCorrelation = Annotated[
    float,
    _option(
        "--intraclass-correlation",
        (
            "Correlation of the output lengths of one call's sequences, from 0 (independent) to 1 "
            "(equal, as often with one prompt and one token limit). With --sequences."
        ),
    ),
]
PadPrompts = Annotated[
    bool,
    _option(
        "--pad-prompts",
        (
            "Pad the prompts of a batch to its longest one: a batch of b costs kp b max(prompt), "
            "not kp sum(prompt)."
        ),
    ),
]
ArrivalScv = Annotated[
    float,
    _option(
        "--arrival-scv",
        (
            "Squared coefficient of variation of the gaps between arrivals (0: regular, 1: "
            "Poisson, above 1: bursty). Simulations draw gamma gaps."
        ),
    ),
]
Disaggregated = Annotated[
    bool,
    _option(
        "--disaggregated",
        (
            "Prefill on one engine, then decode on a second one, each one request at a time "
            "(policy single)."
        ),
    ),
]
PredictorOption = Annotated[
    str,
    _option(
        "--predictor",
        (
            "Predictor of output lengths, for a policy whose order reads predictions: none | exact "
            "| exponential | lognormal:sigma=0.5 | onebit:threshold=200 (tokens)."
        ),
    ),
]
FlowsOption = Annotated[
    str | None,
    _option(
        "--flows",
        (
            "Flows of the requests with their weights, for order=vtc: heavy=9,light=1. Default: "
            "one flow."
        ),
    ),
]
StepTokens = Annotated[
    int | None,
    _option(
        "--step-tokens",
        (
            "Tokens that an engine computes in one step, at most (vLLM: max_num_batched_tokens). "
            "A batch computes all its prompts in one step and takes no more requests than fit. "
            "Policy continuous: one for each sequence that generates, the rest for prompts; longer "
            "prompts take several steps (chunked prefill). Default: it never binds."
        ),
    ),
]
MaxContextTokens = Annotated[
    int | None,
    _option(
        "--max-context-tokens",
        (
            "KV memory of each engine, in tokens: a request holds its prompt and the token limit "
            "(--max-output-tokens, or the longest output) while it is in service, and the first in "
            "the queue waits until it fits. Policy continuous. Default: it never binds."
        ),
    ),
]
ReservedTokens = Annotated[
    int | None,
    _option(
        "--reserved-tokens",
        (
            "With --max-context-tokens: tokens of an answer that a request holds in place of a "
            "larger token limit, as with this option of kendall serve. Default: the token limit."
        ),
    ),
]
SloOption = Annotated[
    str | None,
    _option(
        "--slo",
        (
            "Service level objectives to judge, for example p99_queueing_delay<=2s or, several, "
            "p99.9_sojourn_time=10s, mean_ttft=500ms."
        ),
    ),
]
Json = Annotated[bool, _option("--json", "Print one JSON object and nothing else.")]


@app.command()
def predict(
    ctx: typer.Context,
    *,
    policy: PolicyText,
    latency: Latency,
    arrival_rate: ArrivalRate = None,
    arrivals: ArrivalsOption = None,
    trace: TraceOption = None,
    output_tokens: LengthsOption = None,
    max_output_tokens: TokenLimit = None,
    patience: Patience = None,
    servers: Servers = 1,
    server_speeds: ServerSpeeds = None,
    routing: Routing = "central",
    max_num_seqs: EngineBound = None,
    prompt_tokens: PromptTokens = None,
    sequences: Sequences = None,
    intraclass_correlation: IntraclassCorrelation = 0.0,
    pad_prompts: PadPrompts = False,
    arrival_scv: ArrivalScv = 1.0,
    disaggregated: Disaggregated = False,
    predictor: PredictorOption = "none",
    flows: FlowsOption = None,
    max_context_tokens: MaxContextTokens = None,
    reserved_tokens: ReservedTokens = None,
    step_tokens: StepTokens = None,
    slo: SloOption = None,
    method: Annotated[
        str,
        _option(
            "--method",
            (
                "Method: auto (the best available) | exact | approximation | bound | paper | "
                "simulation."
            ),
        ),
    ] = "auto",
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """Predict the steady-state queueing delay of a policy."""
    use_policies(policy_module, policy)
    bounds: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "servers": servers,
        "server_speeds": server_speeds,
        "patience": patience,
    }
    slos = Objective(name="slo", **parse_slos(slo)).slos if slo is not None else ()
    bounds |= {
        "quantiles": tuple(levels_of(slos)),
        "sequences": sequences,
        "intraclass_correlation": intraclass_correlation,
        "pad_prompts": pad_prompts,
        "arrival_scv": arrival_scv,
        "disaggregated": disaggregated,
        "predictor": predictor,
        "flows": flows,
        "routing": routing,
        "max_context_tokens": max_context_tokens,
        "reserved_tokens": reserved_tokens,
        "step_tokens": step_tokens,
    }
    sources = {"arrival_rate": arrival_rate, "arrivals": arrivals, "trace": trace}
    given = coming(ctx, sources, {"output_tokens": output_tokens, "prompt_tokens": prompt_tokens})
    asked = read(policy, law_of(latency), max_output_tokens=max_output_tokens, **given, **bounds)
    try:
        with working("predicting"):
            answer = asked.predict(method, [each.field for each in slos if each.level is not None])
    except UnstableQueueError as error:
        answer = unstable(asked.model, error.load, method)
    _show(answer, slos, latency, as_json)


@app.command()
def simulate(
    ctx: typer.Context,
    *,
    policy: PolicyText,
    latency: Latency,
    arrival_rate: ArrivalRate = None,
    arrivals: ArrivalsOption = None,
    trace: TraceOption = None,
    output_tokens: LengthsOption = None,
    max_output_tokens: TokenLimit = None,
    patience: Patience = None,
    servers: Servers = 1,
    server_speeds: ServerSpeeds = None,
    routing: Routing = "central",
    max_num_seqs: EngineBound = None,
    prompt_tokens: PromptTokens = None,
    sequences: Sequences = None,
    intraclass_correlation: IntraclassCorrelation = 0.0,
    pad_prompts: PadPrompts = False,
    arrival_scv: ArrivalScv = 1.0,
    disaggregated: Disaggregated = False,
    predictor: PredictorOption = "none",
    flows: FlowsOption = None,
    max_context_tokens: MaxContextTokens = None,
    reserved_tokens: ReservedTokens = None,
    step_tokens: StepTokens = None,
    slo: SloOption = None,
    num_requests: Annotated[
        int | None,
        _option(
            "--num-requests",
            (
                "Requests per replication; the first tenth is discarded as warm-up, and where the "
                f"queue remembers longer more. Default: {NUM_REQUESTS}; of a trace all."
            ),
        ),
    ] = None,
    seed: Annotated[int, _option("--seed", "Seed for arrivals, lengths and service times.")] = 0,
    replications: Annotated[
        int, _option("--replications", "Number of independent replications.")
    ] = 1,
    policy_module: PolicyModules = None,
    as_json: Json = False,
) -> None:
    """Simulate a policy on Poisson or other arrivals, event by event, and report means with
    standard errors.
    """
    use_policies(policy_module, policy)
    bounds: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "servers": servers,
        "server_speeds": server_speeds,
        "patience": patience,
    }
    slos = Objective(name="slo", **parse_slos(slo)).slos if slo is not None else ()
    bounds |= {
        "quantiles": tuple(levels_of(slos)),
        "sequences": sequences,
        "intraclass_correlation": intraclass_correlation,
        "pad_prompts": pad_prompts,
        "arrival_scv": arrival_scv,
        "disaggregated": disaggregated,
        "predictor": predictor,
        "flows": flows,
        "routing": routing,
        "max_context_tokens": max_context_tokens,
        "reserved_tokens": reserved_tokens,
        "step_tokens": step_tokens,
    }
    sources = {"arrival_rate": arrival_rate, "arrivals": arrivals, "trace": trace}
    given = coming(ctx, sources, {"output_tokens": output_tokens, "prompt_tokens": prompt_tokens})
    asked = read(policy, law_of(latency), max_output_tokens=max_output_tokens, **given, **bounds)
    try:
        with working("simulating"):
            answer = asked.simulate(num_requests, seed=seed, replications=replications)
    except UnstableQueueError as error:
        answer = unstable(asked.model, error.load, "simulation")
    _show(answer, slos, latency, as_json)


def coming(
    ctx: typer.Context, sources: dict[str, Any], lengths: dict[str, str | None]
) -> dict[str, Any]:
    """What comes, by the names of `Asked.read`. A flag overrides a variable of the environment
    that says otherwise; beside a trace variables say no other lengths.
    """
    chosen = flags_first(ctx, sources, tuple(sources))
    return chosen | fitting(ctx, lengths, () if chosen["trace"] is not None else tuple(lengths))


def read(policy: str, law: LatencyModel, **given: Any) -> Asked:
    """What is asked, with a warning on stderr where an order misses its predictions."""
    asked = Asked.read(policy, law, **given)
    if (warning := asked.warning) is not None:
        typer.echo(f"kendall: warning: {warning}", err=True)
    return asked


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
    """As JSON: `kept` is null where the method does not give the value."""
    value = slo.value(answer)
    kept = False if not answer.stable else None if value is None else value <= slo.seconds
    return {"slo": slo.name, "seconds": slo.seconds, "value": value, "kept": kept}


def _print(answer: Prediction, judged: Sequence[dict[str, Any]], to: Console) -> None:
    for line in _heads(answer):
        say(to, line, hang=14)
    if answer.stable:
        table = _table(answer)
        to.print(table)
        if any(DASH in row for row in table.rows):
            say(to, f"{DASH}: the method does not give this value")
    for each in judged:
        word = {True: "kept", False: "broken", None: "not given by the method"}[each["kept"]]
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
        yield f"loss fraction {_number(answer.loss_fraction)}"
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


if __name__ == "__main__":
    app()
