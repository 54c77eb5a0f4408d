"""Headers and queries that routes read by themselves, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from kendall.server.admission.request_deadlines import TTFT, TTL
from kendall.server.http.headers import FLOW
from kendall.server.supervision.deadlines import ENVOY, ENVOY_EXPECTED, FIRST_TOKEN_HEADER

OBJECTIVES = ("delay", "throughput", "v1", "v2", "clipped", "slo")
TARGETS = ("batch-size", "max-output-tokens", "policy", "servers", "order")
ROUTINGS = ("random", "round_robin", "least_requests")


def _parameter(place: str, name: str, says: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": False, "description": says, "schema": schema}


CALL_HEADERS = [
    _parameter(
        "header",
        "x-request-id",
        "The caller's identifier for this call, returned in the response.",
        type="string",
    ),
    _parameter(
        "header",
        TTL.decode(),
        "Longest time in the queue, in seconds or as a duration such as 1500ms.",
        type="string",
    ),
    _parameter(
        "header",
        TTFT.decode(),
        "Reject the request unless its first token is predicted within this many ms.",
        type="number",
        exclusiveMinimum=0,
    ),
    _parameter(
        "header",
        FLOW.decode(),
        "Whom the call's service counts to under order=vtc, unless the gateway has several API "
        "keys: then each key is a flow.",
        type="string",
    ),
    _parameter(
        "header",
        ENVOY.decode(),
        "Longest time to the end of the answer, in ms (0: no limit).",
        type="number",
        minimum=0,
    ),
    _parameter(
        "header",
        ENVOY_EXPECTED.decode(),
        "The same limit, as Envoy sends it to upstream servers.",
        type="number",
        minimum=0,
    ),
    _parameter(
        "header",
        FIRST_TOKEN_HEADER.decode(),
        "Longest time to the first token, in ms (0: no limit).",
        type="number",
        minimum=0,
    ),
]
ADVICE_QUERY = [
    _parameter(
        "query",
        "objective",
        "Quantity to optimise. Default: delay, or slo with an slo.",
        type="string",
        enum=list(OBJECTIVES),
    ),
    _parameter(
        "query",
        "slo",
        "For example p99_queueing_delay=2s; several with commas are all kept.",
        type="string",
    ),
    _parameter(
        "query",
        "theta",
        "Weight of the answer's utility relative to the delay in v1 and v2.",
        type="number",
    ),
    _parameter("query", "loss_cost", "Cost of a lost request in v2.", type="number"),
    _parameter(
        "query",
        "max_clipped_fraction",
        "Largest fraction of answers that a token limit may clip. Default: 0.05.",
        type="number",
    ),
    _parameter(
        "query",
        "family",
        (
            "Distribution family for output lengths beyond the token limits in force, for example "
            "lognormal."
        ),
        type="string",
    ),
    _parameter(
        "query",
        "target",
        "Compute one target only. Default: all but order.",
        type="string",
        enum=list(TARGETS),
    ),
    _parameter(
        "query",
        "routing",
        (
            "Of several servers: how a load balancer with a queue at each would send the requests. "
            "Default: random and round_robin."
        ),
        type="string",
        enum=list(ROUTINGS),
    ),
    _parameter(
        "query",
        "rate_factor",
        "At so many times as many requests per second as come now. Default: 1.",
        type="number",
    ),
]
