"""What an operator may say about overload: one frozen object. Two bounds hold by default: on the
queue, and on the size of one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kendall.policies.text import SpecError
from kendall.queueing.measurement.slo import PREDICTED, read_slo, split_slos
from kendall.queueing.result import Quantity
from kendall.server.runtime.field_marks import RELOADED

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
    max_num_queued_reqs: int | None = field(default=MAX_QUEUED, metadata=RELOADED)
    # prompts x n
    max_sequences_per_call: int = field(default=MAX_SEQUENCES, metadata=RELOADED)
    # prompt tokens that wait; at or above it nothing more is taken
    max_num_queued_tokens: int | None = field(default=None, metadata=RELOADED)
    # of queue_full, slo_unattainable and queue_timeout
    overload_status: int = field(default=429, metadata=RELOADED)
    # admit while the model says it holds, for example p99_queueing_delay=2s
    slo: str | None = field(default=None, metadata=RELOADED)
    queue_events: bool = False  # a stream's headers leave at once, and comments tell its place
    # seconds without a byte after which a stream gets a comment; 0: none
    sse_keep_alive_interval: float = 0.0
    adaptive_concurrency: bool = False
    # requests per second of one API key
    rate_limit: float | None = field(default=None, metadata=RELOADED)
    # prompt and output tokens per second of one API key
    rate_limit_tokens: float | None = field(default=None, metadata=RELOADED)
    # seconds of either rate that may come at once
    rate_limit_burst: float = field(default=10.0, metadata=RELOADED)
    # seconds of waiting that are worth one level; None: priorities are not looked at
    priority_aging: float | None = field(default=None, metadata=RELOADED)
    wait_estimates: bool = True  # place and predicted wait in headers, error bodies and metrics

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
    """Of one objective, or of several with commas: all of them are to be kept. Raises SpecError."""
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
