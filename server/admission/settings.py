"""The operator's settings for overload: one frozen object. Two bounds hold by default: on the
queue, and on the size of one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kendall.options import option
from kendall.policies.durations import Duration
from kendall.policies.text import CommaList, SpecError
from kendall.queueing.measurement.slo import PREDICTED, read_slo, split_slos
from kendall.queueing.result import Quantity
from kendall.server.runtime.option_panels import Panel

# sequences: a waiting call holds 17 KiB (measured flat to 8,000 calls), so that the queue stays
# below 150 MiB
MAX_QUEUED = 8192
# of one call: n is at most 128, and building a sequence takes some 10 us of the event loop
MAX_SEQUENCES = 256
_POSITIVE = (
    *("max_num_queued_reqs", "max_num_queued_tokens", "max_sequences_per_call"),
    *("rate_limit", "rate_limit_tokens", "rate_limit_burst", "priority_aging"),
)


@dataclass(frozen=True, slots=True)
class DelayTarget:
    """P(duration <= seconds) >= level; a `level` of None bounds the mean instead."""

    seconds: float
    level: float | None
    quantity: Quantity = "queueing_delay"


@dataclass(frozen=True, kw_only=True)
class OverloadSettings:
    """Flags of `kendall serve`; seconds, requests and tokens. Raises SpecError."""

    # sequences without an answer, waiting or in service, as vLLM counts them; None: no bound
    max_num_queued_reqs: int | None = option(
        Panel.OVERLOAD,
        (
            "Largest number of sequences waiting or in service (vLLM's name); a request with n "
            "answers counts n times (0: no limit)."
        ),
        default=MAX_QUEUED,
        reloaded=True,
        none=0,
        min=0,
    )
    # prompts x n
    max_sequences_per_call: int = option(
        Panel.OVERLOAD,
        "Largest number of sequences in one call, prompts times n; larger calls get 400.",
        default=MAX_SEQUENCES,
        reloaded=True,
        min=1,
    )
    # prompt tokens that wait; at or above it nothing more is taken
    max_num_queued_tokens: int | None = option(
        Panel.OVERLOAD,
        "Reject requests while this many prompt tokens wait (vLLM's name). Default: no limit.",
        reloaded=True,
        min=1,
    )
    # of queue_full, slo_unattainable and queue_timeout
    overload_status: int = option(
        Panel.OVERLOAD,
        "HTTP status for rejected requests and for requests whose patience ran out: 429 or 503.",
        default=429,
        reloaded=True,
    )
    # admit while the model says it holds, for example p99_queueing_delay=2s
    slo: str | None = option(
        Panel.OVERLOAD,
        (
            "Reject requests predicted to miss this objective, for example p99_queueing_delay=2s "
            "or p95_sojourn_time=10s."
        ),
        reloaded=True,
        parser=CommaList(),
    )
    queue_events: bool = option(
        Panel.STREAMS,
        "Send a stream's headers at once and its place in the queue as SSE comments.",
        "--queue-events",
        default=False,
    )
    # seconds without a byte after which a stream gets a comment; 0: none
    sse_keep_alive_interval: float = option(
        Panel.STREAMS,
        "Send an SSE comment after this long without a byte (0: never).",
        default=0.0,
        parser=Duration(),
    )
    adaptive_concurrency: bool = option(
        Panel.OVERLOAD,
        "Adapt the limit on sequences in the system to the observed queueing delay (AIMD).",
        "--adaptive-concurrency",
        default=False,
    )
    # requests per second of one API key
    rate_limit: float | None = option(
        Panel.OVERLOAD, "Requests per second allowed per API key. Default: no limit.", reloaded=True
    )
    # prompt and output tokens per second of one API key
    rate_limit_tokens: float | None = option(
        Panel.OVERLOAD,
        "Prompt and output tokens per second allowed per API key. Default: no limit.",
        reloaded=True,
    )
    # seconds of either rate that may come at once
    rate_limit_burst: float = option(
        Panel.OVERLOAD,
        "Burst that the rate limits allow, as the time in which they admit that much.",
        default=10.0,
        reloaded=True,
        parser=Duration(),
    )
    # seconds of waiting that are worth one level; None: priorities are not looked at
    priority_aging: float | None = option(
        Panel.QUEUE,
        (
            "Order the queue by the `priority` of requests (lower first); a request gains one "
            "level each time it has waited this long. Default: priorities are ignored."
        ),
        reloaded=True,
        parser=Duration(),
    )
    wait_estimates: bool = option(
        Panel.STREAMS,
        (
            "Report each request's place in the queue and predicted wait in response headers and "
            "error bodies."
        ),
        default=True,
    )

    def __post_init__(self) -> None:
        if self.overload_status not in (429, 503):
            raise SpecError(f"got --overload-status {self.overload_status}; expected 429 or 503")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(
                    f"got --{name.replace('_', '-')} {value}; expected a number > 0, or leave it "
                    "out"
                )
        if not 0 <= self.sse_keep_alive_interval < math.inf:
            raise SpecError(
                f"got --sse-keep-alive-interval {self.sse_keep_alive_interval}; expected seconds "
                ">= 0, 0 for none"
            )
        if self.rate_limit is not None and self.rate_limit * self.rate_limit_burst < 1:
            raise SpecError(
                f"got a burst of {self.rate_limit * self.rate_limit_burst:g} requests; expected "
                "--rate-limit-burst of at least one"
            )
        if self.slo is not None:
            delay_targets(self.slo)

    @property
    def bounded(self) -> bool:
        """Whether anything here can reject a request."""
        bounds = (
            self.max_num_queued_reqs,
            self.max_num_queued_tokens,
            self.slo,
            self.rate_limit,
            self.rate_limit_tokens,
        )
        return self.adaptive_concurrency or any(bound is not None for bound in bounds)


def delay_targets(text: str) -> tuple[DelayTarget, ...]:
    """Read one objective, or several with commas, all of which are to be kept. Raises SpecError."""
    return tuple(delay_target(each) for each in split_slos(text))


def delay_target(text: str) -> DelayTarget:
    """`p99_queueing_delay=2s`, or the mean. Raises SpecError."""
    read = read_slo(text)
    for quantity in PREDICTED:
        if quantity == read.quantity:
            return DelayTarget(read.seconds, read.level, quantity)
    raise SpecError(
        f"got --slo {text!r}; expected one of {', '.join(PREDICTED)}: admission predicts no "
        f"{read.quantity}"
    )
