"""Exports of spans as a vLLM sends them: of a simulated run, or of made requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.simulation.fast import SimulatedRun, Trace

BASE_NS = 1_790_000_000_000_000_000  # of Unix time, when a run begins
EXPORT = 5.0  # seconds between two exports of OpenTelemetry's batches
GIVEN = {
    "gen_ai.latency.time_in_queue": 0.1,
    "gen_ai.latency.time_in_model_prefill": 0.02,
    "gen_ai.latency.time_in_model_decode": 0.3,
    "gen_ai.latency.time_to_first_token": 0.13,
    "gen_ai.latency.e2e": 0.45,
    "gen_ai.usage.prompt_tokens": 12,
    "gen_ai.usage.completion_tokens": 7,
    "gen_ai.request.max_tokens": 16,
    "gen_ai.request.n": 1,
    "gen_ai.request.id": "cmpl-1",
}


def export(
    spans: Sequence[tuple[str, int, Mapping[str, Any]]], replica: str | None = "replica-a"
) -> bytes:
    """One request of the protocol: name, start in nanoseconds and attributes of each span."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    if replica is not None:
        _set(resource.resource.attributes, {"service.instance.id": replica})
    scope = resource.scope_spans.add()
    for name, start, attributes in spans:
        span = scope.spans.add(name=name, start_time_unix_nano=start, span_id=b"12345678")
        _set(span.attributes, attributes)
    return request.SerializeToString()


def _set(attributes: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        field = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(attributes.add(key=key).value, field, value)


def exports_of(
    run: SimulatedRun,
    trace: Trace,
    law: LatencyModel,
    *,
    server: int = 0,
    replica: str = "replica-a",
    offset: float = 0.0,
    lost: float = 0.0,
    until: float = math.inf,
    phase: float = 0.0,
    unseen: float = 0.0,
    cached: int = 0,
    every: float = EXPORT,
    rng: np.random.Generator | None = None,
) -> Iterator[tuple[float, bytes]]:
    """What one server of a run sends, and when it comes; `offset`: seconds that its clock is ahead,
    `lost`: share of the spans, `until`: it is gone then, `phase`: seconds by which its exports are
    later than those of others, `unseen`: seconds, at most, until its scheduler sees a request,
    `cached`: tokens, at most, that a prompt has beside those that are computed, `every`: seconds
    between two exports.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    due: dict[int, list[tuple[str, int, Mapping[str, Any]]]] = {}
    for i in np.argsort(run.released_at, kind="stable"):
        if run.server_id[i] != server or run.released_at[i] > until or rng.random() < lost:
            continue
        arrived, dispatched = float(run.arrived_at[i]), float(run.dispatched_at[i])
        first, ended = float(run.first_token_at[i]), float(run.released_at[i])
        prompt = int(trace.prompt_tokens[i])
        step = law.step(float(run.batch_size[i])) + law.admission(1, prompt)
        seen = rng.uniform(0.0, unseen) if unseen else 0.0
        attributes = {
            "gen_ai.latency.time_in_queue": max(0.0, dispatched - arrived - seen),
            # who waited for a slot is scheduled as it takes it, others at the next step
            "gen_ai.latency.time_in_model_prefill": first - dispatched
            if dispatched > arrived
            else min(step, first - dispatched),
            "gen_ai.latency.time_in_model_decode": ended - first,
            "gen_ai.latency.time_to_first_token": first - arrived,
            "gen_ai.latency.e2e": ended - arrived,
            "gen_ai.usage.prompt_tokens": prompt + int(rng.integers(0, cached + 1)),
            "gen_ai.usage.completion_tokens": int(run.output_tokens[i]),
            "gen_ai.request.max_tokens": 4096,
            "gen_ai.request.n": 1,
            "gen_ai.request.id": f"cmpl-{i}",
        }
        start = BASE_NS + round((arrived + offset) * 1e9)
        due.setdefault(math.ceil((ended - phase) / every), []).append(
            ("llm_request", start, attributes)
        )
    for number, spans in due.items():
        yield number * every + phase + 0.01, export(spans, replica)
