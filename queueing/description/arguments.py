"""The arguments that describe a queue, and the parts that they make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from kendall.policies.arguments import positive, real_number, short_repr, whole_number
from kendall.policies.core import Policy
from kendall.policies.registry import class_fault, is_built_in, usable_policies
from kendall.policies.text import (
    SpecError,
    counted,
    format_policy,
    parse_policy,
    short_number,
    suggest,
)
from kendall.queueing.arrivals.notation import process_and_scv
from kendall.queueing.arrivals.text import Process
from kendall.queueing.description.parts import Arrivals, Engine, Requests
from kendall.queueing.distributions.flows import Flows, parse_flows
from kendall.queueing.distributions.token_distribution import (
    SET_LIMIT,
    SHORTER,
    TokenDistribution,
    parse_distribution,
)
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.energy import EnergyLaw, energy_of_profile, parse_energy
from kendall.queueing.latency.kv_memory import KvMemory, ToolCalls, parse_kv, parse_tool_calls
from kendall.queueing.latency.kv_transfer import KvTransfer, parse_kv_transfer
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law
from kendall.queueing.measurement.slo import level_of
from kendall.queueing.predictors.prediction_cost import PredictionCost, parse_prediction_cost
from kendall.queueing.predictors.predictor_text import PredictorText, parse_predictor
from kendall.queueing.result import LEVELS, Levels
from kendall.queueing.second_model import SecondModel, parse_second_model

_T = TypeVar("_T")


class Limits(TypedDict, total=False):
    """Keyword arguments of `predict`, `simulate` and `largest_stable_rate`; in brackets, what
    leaving one out means.

    max_output_tokens   token limit: a longer output is cut there, and so much KV memory is reserved
                        for every request (no limit: the longest output)
    patience            seconds that a request waits before it leaves unserved (it waits for ever)
    servers             engines that serve one queue (1)
    server_speeds       of each of them, how many times as long as the law's its times are, in place
                        of `servers`: [1, 1.5] or "1,1.5" (equally fast)
    routing             "central", or how requests are sent to servers that have a queue each:
                        "random", "round_robin", "least_requests", "power_of_two" ("central")
    second_model        a second model beside that of `latency`, with the requests that it serves:
                        "threshold=30,switch=0.4,latency=a=0.005,c=0.05" (one model)
    max_num_seqs        largest batch that the engine takes (only the policy bounds the batch)
    max_num_queued_reqs largest number of sequences waiting or in service, as for `kendall serve`; a
                        call with which there would be more is rejected (no limit)
    prompt_tokens       distribution of the prompt lengths; matters where the law has a coefficient
                        kp (no prompts)
    sequences           distribution of the sequences in a call, which arrive together; the arrival
                        rate counts calls (1)
    intraclass_correlation
                        of the output lengths in a call, 0 where they are independent, 1 where those
                        of a call are equal (0)
    pad_prompts         the prompts of a batch are padded to its longest one (False)
    arrival_scv         squared coefficient of variation of the gaps between arrivals, 0 for
                        regular ones (1, Poisson)
    arrivals            arrival process as in `kendall load`: "mmpp:rates=5/50,durations=10/1"; its
                        mean rate is the arrival rate (Poisson)
    disaggregated       prefill on engines of their own, one prompt at a time, then decode under the
                        policy on `servers` engines behind them (False)
    prefill_servers     with disaggregated: engines that prefill, fed from one queue; 0: those of
                        `servers` do both, and a request waits again behind its prefill (1)
    kv_transfer         with disaggregated: what the KV memory of a request takes from one engine to
                        the other, "2ms" or "setup=2ms,token=5us" for each prompt token (no time)
    predictor           how output lengths are predicted, for a policy whose order reads predictions
                        ("none": every request counts as the longest)
    prediction_cost     what a prediction takes: "2ms" before the request joins the queue, or
                        "server=2ms" of the engine's time; with ",bit=0.5ms" that of one bit
                        (nothing)
    flows               whose the requests are, with weights, for a policy whose order counts the
                        service of each: "heavy=9,light=1" (all of one client)
    max_context_tokens  KV memory of an engine: prompts and token limits of those in service; policy
                        "continuous" (it never binds)
    reserved_tokens     of an answer, for which that memory is kept free in place of a larger token
                        limit (its limit)
    step_tokens         tokens that an engine computes in one step: of a batch all its prompts, so
                        that it takes no more requests than these allow; under "continuous" one for
                        each sequence that makes tokens, the rest for prompts, which take several
                        steps where they are longer (chunked prefill) (it never binds)
    quantiles           of every duration besides p50, p90, p95 and p99: "p75,p99.9" (no others)
    kv                  what becomes of the KV memory of an interrupted request, where requests take
                        memory token by token: "preempt=recompute", "preempt=preserve", or
                        "preempt=swap,setup=10ms,token=20us"; policy "continuous" (memory is
                        reserved, see max_context_tokens)
    tool_calls          calls to a tool within requests, and what becomes of the memory meanwhile:
                        "share=0.7,mean=2s,keep=preserve", "discard", "swap" or "auto"; policy
                        "continuous" (none)
    energy              energy law, "beta=0.044,c0=0.155" in joules, or the name of a profile that
                        was measured with its power (that of the latency's profile)
    """

    max_output_tokens: int | None
    patience: float | None
    servers: int
    server_speeds: Sequence[float] | str | None
    routing: str
    second_model: SecondModel | str | None
    max_num_seqs: int | None
    max_num_queued_reqs: int | None
    prompt_tokens: TokenDistribution | str | None
    sequences: TokenDistribution | str | None
    intraclass_correlation: float
    pad_prompts: bool
    arrival_scv: float
    arrivals: Process | str | None
    disaggregated: bool
    prefill_servers: int
    kv_transfer: KvTransfer | str | None
    predictor: PredictorText | str
    prediction_cost: PredictionCost | str | None
    flows: Flows | str | None
    max_context_tokens: int | None
    reserved_tokens: int | None
    step_tokens: int | None
    kv: KvMemory | str | None
    tool_calls: ToolCalls | str | None
    quantiles: Iterable[str] | str
    energy: EnergyLaw | str | None


def read_parts(
    policy: Policy | str,
    output_tokens: TokenDistribution | str,
    latency: LatencyModel | str,
    limits: Limits,
) -> dict[str, Any]:
    """The fields of a `Queue`. A text of lengths is clipped while it is read: a heavy tail needs
    no table then. Raises SpecError.
    """
    known = Limits.__annotations__
    for name in limits:
        if name not in known:
            raise TypeError(
                f"got the argument {name!r}; expected {', '.join(known)}{suggest(name, known)}"
            )
    tokens = _given(limits, "max_output_tokens").get("max_output_tokens")
    step = _given(limits, "step_tokens").get("step_tokens")
    scv = real_number("arrival_scv", limits.get("arrival_scv", 1.0))
    process, scv = process_and_scv(limits.get("arrivals"), scv)
    servers, parsed = whole_number("servers", limits.get("servers", 1)), _policy(policy)
    second, energy = _given(limits, "second_model"), limits.get("energy")
    lengths = _lengths("output_tokens", output_tokens, tokens, tail=True)
    requests = Requests(output_tokens=lengths, **_given(limits, *Requests.__annotations__))
    law = load_law(latency) if isinstance(latency, str) else latency
    expected = "a latency law, its text ('a=..,c=..'), or a profile's name or path"
    law = _checked("latency", law, LatencyModel, expected)
    engine = Engine(
        **_servers(law, servers, limits.get("server_speeds")),
        bounds=EngineBounds(batch_tokens=step, **_given(limits, *EngineBounds.__annotations__)),
        energy=_energy(energy, latency, parsed) if energy or not any(second.values()) else None,
        **_given(limits, *Engine.__annotations__),
    )
    return {
        "policy": parsed,
        "requests": requests,
        "engine": engine,
        "arrivals": Arrivals(scv=scv, process=process),
        "levels": read_levels(limits.get("quantiles", ())),
    }


def read_levels(given: Iterable[str] | str) -> Levels:
    """The usual ones and those that are named. Raises SpecError."""
    names = given.split(",") if isinstance(given, str) else given
    return {**LEVELS, **dict(map(level_of, names))}


def _servers(
    law: LatencyModel, servers: int, speeds: Sequence[float] | str | None
) -> dict[str, Any]:
    """The law, and the servers under it; equal speeds are one of the law. Raises SpecError."""
    if speeds is None:
        return {"law": law, "servers": servers}
    found = read_speeds(speeds)
    if servers not in (1, len(found)):
        raise SpecError(
            f"got servers={servers} and {counted(len(found), 'server speed')}; expected a speed "
            "for each server, or no number of servers"
        )
    if len(set(found)) == 1:
        return {"law": law.at_speed(law.speed * found[0]), "servers": len(found)}
    return {"law": law, "servers": len(found), "server_speeds": found}


def read_speeds(given: Sequence[float] | str) -> tuple[float, ...]:
    """Of servers. Raises SpecError."""
    parts: Sequence[Any] = given.split(",") if isinstance(given, str) else given
    try:
        found = tuple(float(each) for each in parts)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(0 < each < math.inf for each in found):
        raise SpecError(
            f"got server_speeds={short_repr(given)}; expected a number > 0 for each server, for "
            "example 1,1.5"
        )
    return found


def _lengths(
    name: str, given: TokenDistribution | str, limit: int | None = None, *, tail: bool = False
) -> TokenDistribution:
    if isinstance(given, str):
        return parse_distribution(
            given, limit, tail=tail, remedy=SET_LIMIT if name == "output_tokens" else SHORTER
        )
    expected = "a distribution or its text, for example 'deterministic:value=64'"
    checked = _checked(name, given, TokenDistribution, expected)
    return checked if limit is None else checked.clip(limit)


def _checked(name: str, given: object, kind: type[_T], expected: str) -> _T:
    if not isinstance(given, kind):
        raise SpecError(f"got {name}={short_repr(given)}; expected {expected}")
    return given


def _energy(
    given: EnergyLaw | str | None, latency: LatencyModel | str, policy: Policy
) -> EnergyLaw | None:
    """That of the latency's profile where none is given, for policies that have batches."""
    if given is None:
        if policy.joins_running or not isinstance(latency, str):
            return None
        return energy_of_profile(latency)
    expected = "an energy law or its text, for example beta=0.044,c0=0.155"
    law = parse_energy(given) if isinstance(given, str) else given
    law = _checked("energy", law, EnergyLaw, expected)
    if law.c0 and policy.joins_running:
        raise SpecError(
            f"got energy c0={short_number(law.c0)} for policy {format_policy(policy)}, which has "
            "no batches; expected joules of a request or a token (beta, per_token), or watts "
            "(busy, idle)"
        )
    return law


def _policy(given: Policy | str) -> Policy:
    if isinstance(given, str):
        return parse_policy(given)
    if fault := class_fault(type(given)) if not is_built_in(given) else None:
        raise SpecError(
            f"got policy={short_repr(given)}; expected one of {', '.join(usable_policies())}, as a "
            f"text or as parse_policy returns it, or an instance of a policy's class ({fault})"
        )
    return given


def _parsed(kind: type[object], parse: Callable[[Any], object]) -> Callable[[str, Any], Any]:
    """A reader of a text, which leaves what its parser returns as it is."""
    return lambda _, given: given if isinstance(given, kind) else parse(given)


# what makes an argument the field of the same name, in the order of their complaints
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "prompt_tokens": _lengths,
    "max_output_tokens": whole_number,
    "sequences": _lengths,
    "intraclass_correlation": real_number,
    "predictor": _parsed(PredictorText, parse_predictor),
    "prediction_cost": _parsed(PredictionCost, parse_prediction_cost),
    "flows": lambda _, given: parse_flows(given) if isinstance(given, str) else given,
    "patience": lambda name, given: positive(name, given, "seconds"),
    "tool_calls": _parsed(ToolCalls, parse_tool_calls),
    "routing": lambda _, given: given,
    "second_model": _parsed(SecondModel, parse_second_model),
    "max_num_queued_reqs": whole_number,
    "max_num_seqs": whole_number,
    "step_tokens": whole_number,
    "max_context_tokens": whole_number,
    "reserved_tokens": whole_number,
    "pad_prompts": lambda _, given: given,
    "disaggregated": lambda name, given: _checked(name, given, bool, "True or False"),
    "prefill_servers": lambda name, given: whole_number(name, given, 0),
    "kv_transfer": _parsed(KvTransfer, parse_kv_transfer),
    "kv": _parsed(KvMemory, parse_kv),
}
_NEVER_NONE = ("intraclass_correlation", "predictor", "routing", "disaggregated", "prefill_servers")


def _given(limits: Limits, *names: str) -> dict[str, Any]:
    """The fields of these names that are arguments; others keep the default of their part."""
    given: Mapping[str, Any] = limits
    return {
        name: read(name, given[name])
        for name, read in _READERS.items()
        if name in names and name in given and (name in _NEVER_NONE or given[name] is not None)
    }
