"""The options that describe a queue, of `kendall predict`, `simulate`, `optimize` and `plan`: the
arguments of `Queue.read`, as they are written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kendall.options import option
from kendall.policies.durations import Duration

ARRIVALS, REQUESTS, ENGINE, ANSWER = PANELS = (
    "Arrivals",
    "Requests",
    "Policy and engine",
    "Answer",
)


@dataclass(frozen=True, kw_only=True)
class LawOptions:
    """How long service takes."""

    latency: str = option(
        ENGINE,
        (
            "Latency law, k1=..,k2=..,k3=..,k4=.. or a=..,c=.. in seconds, or the name or file of "
            "a profile."
        ),
        required=True,
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """What comes, by its laws."""

    arrivals: str | None = option(
        ARRIVALS,
        (
            "Arrival process instead of --arrival-rate, as in kendall load: "
            "mmpp:rates=1/5,durations=9/1, also gamma, deterministic, piecewise, ramp, poisson. "
            "All but poisson are simulated."
        ),
    )
    prompt_tokens: str | None = option(
        REQUESTS,
        (
            "Distribution of prompt lengths in tokens; needs kp in the latency law. Default: "
            "prompts cost no time."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Where requests come from: a rate, a process or a trace; and how long they are."""

    process: ProcessOptions = field(default_factory=ProcessOptions)
    arrival_rate: float | None = option(
        ARRIVALS,
        "Requests per second; arrivals are a Poisson process unless --arrival-scv is given.",
        "--arrival-rate",
        "--request-rate",
    )
    trace: Path | None = option(
        ARRIVALS,
        (
            "Replay the arrivals and lengths of a recorded trace (Azure, BurstGPT, Mooncake, "
            "Bailian, a run file), instead of --arrival-rate and --output-tokens."
        ),
    )
    output_tokens: str | None = option(
        REQUESTS,
        (
            "Distribution of output lengths in tokens, for example lognormal:mu=5,sigma=0.7; a "
            "trace has its own."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """What is given, whichever setting is chosen."""

    routing: str = option(
        ENGINE,
        (
            "How requests come to the engines: central (one queue) | random | round_robin | "
            "least_requests | power_of_two (each engine has a queue of its own, behind a load "
            "balancer)."
        ),
        default="central",
    )
    max_context_tokens: int | None = option(
        ENGINE,
        (
            "KV memory of each engine, in tokens: a request holds its prompt and the token limit "
            "(--max-output-tokens, or the longest output) while it is in service, and the first in "
            "the queue waits until it fits. Policy continuous. Default: it never binds."
        ),
    )
    reserved_tokens: int | None = option(
        ENGINE,
        (
            "With --max-context-tokens: tokens of an answer that a request holds in place of a "
            "larger token limit, as with this option of kendall serve. Default: the token limit."
        ),
    )
    step_tokens: int | None = option(
        ENGINE,
        (
            "Tokens that an engine computes in one step, at most (vLLM: max_num_batched_tokens). "
            "A batch computes all its prompts in one step and takes no more requests than fit. "
            "Policy continuous: one for each sequence that generates, the rest for prompts; longer "
            "prompts take several steps (chunked prefill). Default: it never binds."
        ),
    )
    prediction_cost: str | None = option(
        REQUESTS,
        (
            "Cost of a prediction, for a policy whose order reads predictions: 2ms (the request "
            "joins the queue so much later) | server=2ms (of the engine's time) | server=8tokens "
            "(the engine's time for as many tokens), each with ,bit=0.5ms where one bit costs "
            "less. Default: 0."
        ),
    )
    energy: str | None = option(
        ENGINE,
        (
            "Energy law: beta=0.044,c0=0.155 (joules per request and per batch), per_token "
            "(joules), busy, idle (watts of an engine); or a profile measured with its power. "
            "Default: that of the profile in --latency, where it has one."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """What an operator sets."""

    max_output_tokens: int | None = option(
        REQUESTS, "Token limit: longer answers are clipped. Default: no limit."
    )
    patience: float | None = option(
        REQUESTS,
        "Longest wait; a request that waits longer is lost. Default: no limit.",
        parser=Duration(),
    )
    servers: int = option(ENGINE, "Number of engines fed from one queue.", default=1)
    max_num_seqs: int | None = option(
        ENGINE, "The engine's limit on the batch size. Default: none."
    )
    pad_prompts: bool = option(
        ENGINE,
        (
            "Pad the prompts of a batch to its longest one: a batch of b costs kp b max(prompt), "
            "not kp sum(prompt)."
        ),
        "--pad-prompts",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class StationOptions:
    """Prefill and decode on servers of their own."""

    disaggregated: bool = option(
        ENGINE,
        (
            "Prefill on engines of their own, one prompt at a time, then decode under the policy "
            "on the engines of --servers."
        ),
        "--disaggregated",
        default=False,
    )
    prefill_servers: int = option(
        ENGINE,
        (
            "With --disaggregated: number of engines that prefill, fed from one queue. 0: those of "
            "--servers prefill and decode, and a request waits again behind its prefill."
        ),
        default=1,
    )
    kv_transfer: str | None = option(
        ENGINE,
        (
            "With --disaggregated: time in which the KV memory of a request reaches the engine "
            "that decodes, 2ms or setup=2ms,token=5us (for each prompt token). Default: 0."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """What the objectives v1 and v2 weigh against the delay."""

    theta: float | None = option(
        "", "Weight of the answer's utility relative to the delay in v1 and v2. Default: 0.5."
    )
    loss_cost: float | None = option("", "Cost of a lost request in v2. Default: 1.")


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """A whole queue, and the objectives that its answer is judged by."""

    policy: str = option(
        ENGINE,
        (
            "Batching policy: single | dynamic | capped:max_batch_size=8 | fixed:batch_size=8 | "
            "elastic | continuous:max_batch_size=32."
        ),
        required=True,
    )
    law: LawOptions
    traffic: TrafficOptions = field(default_factory=TrafficOptions)
    setting: SettingOptions = field(default_factory=SettingOptions)
    system: SystemOptions = field(default_factory=SystemOptions)
    stations: StationOptions = field(default_factory=StationOptions)
    max_num_queued_reqs: int | None = option(
        ENGINE,
        (
            "Largest number of sequences waiting or in service, as for kendall serve; a call with "
            "which there would be more is rejected. Default, and 0: no limit."
        ),
        none=0,
        min=0,
    )
    arrival_scv: float = option(
        ARRIVALS,
        (
            "Squared coefficient of variation of the gaps between arrivals (0: regular, 1: "
            "Poisson, above 1: bursty). Simulations draw gamma gaps."
        ),
        default=1.0,
    )
    sequences: str | None = option(
        REQUESTS,
        (
            "Distribution of the number of sequences per call (n, or several prompts). They arrive "
            "together; --arrival-rate counts calls. Default: one."
        ),
    )
    intraclass_correlation: float = option(
        REQUESTS,
        (
            "Correlation of the output lengths of one call's sequences, from 0 (independent) to 1 "
            "(equal, as often with one prompt and one token limit). With --sequences."
        ),
        default=0.0,
    )
    predictor: str = option(
        REQUESTS,
        (
            "Predictor of output lengths, for a policy whose order reads predictions: none | exact "
            "| exponential | lognormal:sigma=0.5 | uniform:low=0.5,high=1.5 | onebit:threshold=200 "
            "(tokens) | joint:path=FILE."
        ),
        default="none",
    )
    flows: str | None = option(
        REQUESTS,
        (
            "Flows of the requests with their weights, for order=vtc: heavy=9,light=1. Default: "
            "one flow."
        ),
    )
    kv: str | None = option(
        ENGINE,
        (
            "Requests hold KV memory for their prompt and the tokens made, and what is interrupted "
            "loses it: preempt=recompute | preempt=swap,setup=10ms,token=20us (seconds each way) | "
            "preempt=preserve (until others need it). Policy continuous, simulated. Default: "
            "memory is reserved (--max-context-tokens)."
        ),
    )
    tool_calls: str | None = option(
        REQUESTS,
        (
            "Share of the requests that pause for a call to a tool, its mean duration, and what "
            "becomes of their KV memory meanwhile: share=0.7,mean=2s,keep=preserve | discard (if "
            "not given) | swap | auto (least waste); mean=100ms/10s,weights=1/3 for several kinds, "
            "sigma=0.5 for predicted durations. Policy continuous, simulated. Default: none."
        ),
    )
    server_speeds: str | None = option(
        ENGINE,
        (
            "In place of --servers: of each engine, how many times as long as the law's its times "
            "are, for example 1,1.5. The first that is free takes the next request."
        ),
    )
    second_model: str | None = option(
        ENGINE,
        (
            "Second model beside that of --latency, its law last: "
            "threshold=30,latency=a=0.02,c=0.1. threshold: requests predicted up to so many tokens "
            "go to it (--predictor). share=0.3: so many of all do. switch=0.4: seconds to load a "
            "model where the server holds one. first=loaded: requests of that one go "
            "first. servers=1: it has so many of --servers to itself. Default: one model."
        ),
    )
    slo: str | None = option(
        ANSWER,
        (
            "Service level objectives to judge, for example p99_queueing_delay<=2s or, several, "
            "p99.9_sojourn_time=10s, mean_ttft=500ms."
        ),
    )

    def limits(self) -> dict[str, Any]:
        """The keyword arguments of `Queue.read` that are no traffic."""
        own = (
            *("arrival_scv", "sequences", "intraclass_correlation", "predictor", "flows"),
            *("server_speeds", "second_model", "max_num_queued_reqs", "kv", "tool_calls"),
        )
        return {
            **dataclasses.asdict(self.setting),
            **dataclasses.asdict(self.system),
            **dataclasses.asdict(self.stations),
            **{name: getattr(self, name) for name in own},
        }
