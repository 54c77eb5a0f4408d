"""Which calls may join the queue: every bound in one place, asked before a body is read and again
when the call is known.

A call that is rejected is part of the offered arrivals (`/admin/state`, which audits the clients),
not of the live model's: the queue that is predicted is the one of the admitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kendall.policies import Policy, Request
from kendall.policies.ordered import order_of
from kendall.policies.orders.order import MOST_PRIORITY
from kendall.policies.text import counted
from kendall.policies.waiting_queues import WaitingQueue, queue_for
from kendall.queueing.measurement.record import Record
from kendall.server.admission.buckets import RateLimits
from kendall.server.admission.concurrency import AdaptiveLimit
from kendall.server.admission.host import AdmissionHost
from kendall.server.admission.objectives import AT_ONCE, AdmissionObjective
from kendall.server.admission.rejections import Rejections
from kendall.server.admission.request_deadlines import (
    NO_DEADLINES,
    RequestDeadlines,
    request_deadlines_of,
)
from kendall.server.admission.settings import DelayTarget, OverloadSettings, delay_targets
from kendall.server.admission.waits import Places, Waits
from kendall.server.engines.base import EngineRequest
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch
from kendall.server.runtime.errors import ApiError
from kendall.server.security.guard import CALLER

if TYPE_CHECKING:
    from starlette.types import Scope

    from kendall.server.queue.batcher import Batcher
    from kendall.server.queue.sequence import SequenceState

RATES = ("rate_limit", "rate_limit_tokens", "rate_limit_burst")
TTFT_LEVEL = 0.9  # at which a call's own budget is kept, as llm-d's predictor has it


class Overload(Observer):
    """The bounds of one gateway, and an observer of its batcher."""

    def __init__(self, gateway: AdmissionHost) -> None:
        settings: OverloadSettings = gateway.settings.overload
        self._gateway = gateway
        self.settings = settings
        self.bounded = settings.bounded
        self._targets = _targets(settings)
        self._level = first_token_level(self._targets)
        self._rates = _rate_limits(settings)
        self._adaptive: AdaptiveLimit | None = None
        self.waits = Waits(gateway) if settings.wait_estimates or self.bounded else None
        self.places: Places | None = None  # who listens to its place in the queue
        self.rejections = Rejections(gateway, settings, self.waits)

    # its place in the gateway

    def queue_for(self, policy: Policy) -> WaitingQueue:
        """An empty queue in the order that was asked for."""
        return queue_for(policy, self.settings.priority_aging)

    def observers(self) -> list[Observer]:
        """Itself. The engine is up; the batcher is not there yet."""
        gateway = self._gateway
        gateway.metrics.gauge_of(
            "queued_tokens",
            "Prompt tokens of the requests in the queue",
            lambda: gateway.batcher.waiting_tokens,
        )
        if self.settings.queue_events:
            self.places = Places(gateway, self.waits if self.settings.wait_estimates else None)
        if self.settings.adaptive_concurrency:
            adaptive = self._adaptive = AdaptiveLimit(
                lambda: adaptive_floor(gateway), gateway.now()
            )
            gateway.metrics.gauge_of(
                "concurrency_limit",
                (
                    "Largest number of sequences, waiting and in service, that "
                    "--adaptive-concurrency admits"
                ),
                lambda: adaptive.limit,
            )
        return [self]  # a rate may be limited later

    def on_arrival(self, sequence: SequenceState) -> None:
        """Count the sequence among those that wait, and estimate its wait."""
        if self.waits is not None:
            self.waits.joined(sequence.engine_request.request)
            if self.settings.wait_estimates:
                self.waits.on_arrival(sequence)

    def on_dispatch(self, batch: Batch) -> None:
        """Pass the delays of a batch to the wait estimates and to the adaptive limit."""
        if self.waits is not None:
            self.waits.on_dispatch(batch)
        if self._adaptive is not None:
            self._adaptive.on_dispatch(batch)

    def on_idle(self, server_id: int, at: float) -> None:
        """Tell the wait estimates that a server is free."""
        if self.waits is not None:
            self.waits.on_idle(server_id, at)

    def on_settle(self, sequence: SequenceState) -> None:
        """Count the generated tokens against the rate of the sequence's key."""
        if self._rates is not None:
            self._rates.answered(
                sequence.id, sequence.stop_detector.output_tokens, self._gateway.now()
            )

    def on_record(self, record: Record) -> None:
        """Pass a service time to the wait estimates and to the adaptive limit."""
        if record.outcome == "rejected":
            return
        if self.waits is not None:
            self.waits.on_record(record)
        if self._adaptive is not None:
            self._adaptive.on_record(record)

    def begin_epoch(self, epoch: int) -> None:
        """Another policy, limit, law or engine."""
        del epoch
        if self.waits is not None:
            self.waits.begin_epoch()

    def change(self, settings: OverloadSettings) -> None:
        """Other values of the fields marked `RELOADED`. Where a rate changed, every key begins
        with its burst.
        """
        before, self.settings = self.settings, settings
        self.rejections.change(settings)
        self.bounded = settings.bounded
        self._targets = _targets(settings)
        self._level = first_token_level(self._targets)
        if any(getattr(before, name) != getattr(settings, name) for name in RATES):
            self._rates = _rate_limits(settings)
        if before.priority_aging != settings.priority_aging and self._gateway.lifecycle.started:
            self._gateway.batcher.rank_again()

    # calls

    def precheck(self, scope: Scope) -> ApiError | None:
        """Why a call whose body has not been read is rejected; None where it may come in."""
        gateway = self._gateway
        lifecycle = gateway.lifecycle
        if not lifecycle.ready or lifecycle.draining:
            return None  # that has its own answer
        objectives: Sequence[AdmissionObjective] = ()
        ranked = self.settings.priority_aging is not None or order_of(gateway.limits.policy).ranked
        if self._targets and not ranked:  # else its place is in its body
            objectives = self._objectives()
        return self._rejection(1, scope, None, objectives)

    def admit_unqueued(self, scope: Scope) -> ApiError | None:
        """Why a call that is answered without the queue is rejected; None where it counts against
        its key's rate like a request. It is no arrival.
        """
        if self._rates is None:
            return None
        now, key = self._gateway.now(), caller_of(scope)
        seconds = self._rates.seconds_until(key, now)
        if seconds > 0:
            return _rate_exceeded(seconds)
        self._rates.spend(key, now)
        return None

    def deadlines_of(
        self, headers: Sequence[tuple[bytes, bytes]], patience: float | None, priority: int
    ) -> RequestDeadlines:
        """The patience of a call and its limit on the first token. Raises ApiError 400."""
        if abs(priority) > MOST_PRIORITY and self._reads_priorities():
            raise ApiError(
                400,
                "invalid_request",
                f"got priority {priority}; expected -{MOST_PRIORITY} to {MOST_PRIORITY}",
                param="priority",
            )
        return request_deadlines_of(headers, patience, self._gateway.limits.patience)

    def _reads_priorities(self) -> bool:
        order = order_of(self._gateway.limits.policy)
        return self.settings.priority_aging is not None or order.form.quantity == "priority"

    def admit(
        self,
        requests: Sequence[EngineRequest],
        scope: Scope,
        deadlines: RequestDeadlines = NO_DEADLINES,
    ) -> None:
        """All sequences of a call, or raise ApiError and record them as rejected. Nothing may be
        awaited before they are submitted.
        """
        if not self.bounded and deadlines.first_token is None:
            return
        objectives = self._objectives()
        if deadlines.first_token is not None:
            objectives = (*objectives, self._promise(deadlines.first_token))
        rejection = self._rejection(len(requests), scope, requests[0].request, objectives)
        if rejection is not None:
            self.rejections.record(rejection, requests)
            raise rejection
        if self.rejections.promised_places:
            self.rejections.admitted()
        if self._rates is not None:
            now, key = self._gateway.now(), caller_of(scope)
            for engine_request in requests:
                self._rates.admitted(
                    key, engine_request.request.id, engine_request.request.prompt_tokens, now
                )

    def state(self) -> dict[str, Any]:
        """For `/admin/state`: the settings, the bounds in force, the source of wait estimates."""
        batcher, live = self._gateway.batcher, self._gateway.live
        limit = None if self._adaptive is None else self._adaptive.limit
        source = "live model" if live is not None and live.ahead is not None else "services seen"
        return dataclasses.asdict(self.settings) | {
            "queued_tokens": batcher.waiting_tokens,
            "concurrency_limit": limit,
            "wait_source": None if self.waits is None else source,
        }

    # the bounds

    def _promise(self, first_token: float) -> AdmissionObjective:
        """The objective that a call sets for its own first token."""
        after = None if self.waits is None else self.waits.after("time_to_first_token")
        target = DelayTarget(first_token, self._level, "time_to_first_token")
        return AdmissionObjective(target, after or AT_ONCE, own=True)

    def _objectives(self) -> tuple[AdmissionObjective, ...]:
        """The objectives of `--slo` whose part behind the wait is known by now."""
        if self.waits is None:
            return ()
        known = [(target, self.waits.after(target.quantity)) for target in self._targets]
        return tuple(
            AdmissionObjective(target, after) for target, after in known if after is not None
        )

    def _rejection(
        self,
        sequences: int,
        scope: Scope,
        request: Request | None,
        objectives: Sequence[AdmissionObjective],
    ) -> ApiError | None:
        batcher = self._gateway.batcher
        too_fast = (
            None
            if self._rates is None
            else self._too_fast(sequences, self._rates, caller_of(scope))
        )
        rejection = too_fast or self._full(sequences, batcher)
        # an idle gateway admits one call whatever is predicted: only a service can correct a
        # prediction that is too long
        if rejection is not None or not objectives or self.waits is None or not batcher.unanswered:
            return rejection
        return self._too_late(sequences, request, objectives, self.waits)

    def _too_fast(self, sequences: int, rates: RateLimits, key: str) -> ApiError | None:
        seconds = rates.seconds_until(key, self._gateway.now(), sequences)
        if seconds <= 0:
            return None
        self.rejections.count("rate_limit", sequences)
        return _rate_exceeded(seconds)

    def _full(self, sequences: int, batcher: Batcher) -> ApiError | None:
        settings = self.settings
        if self._adaptive is not None:
            over = batcher.unanswered + sequences - self._adaptive.limit
            if over > 0 and batcher.unanswered:  # an idle gateway admits a call of any size
                self._adaptive.on_rejection()
                return self.rejections.queue_full(
                    "adaptive_concurrency",
                    sequences,
                    f"{counted(batcher.unanswered, 'request')} in the system",
                    self.rejections.until_gone(over),
                )
        if settings.max_num_queued_reqs is not None:
            over = batcher.unanswered + sequences - settings.max_num_queued_reqs
            if over > 0:
                return self.rejections.queue_full(
                    "max_num_queued_reqs",
                    sequences,
                    f"{counted(batcher.unanswered, 'request')} in the system",
                    self.rejections.until_gone(over),
                )
        if (
            settings.max_num_queued_tokens is not None
            and batcher.waiting_tokens >= settings.max_num_queued_tokens
        ):
            after = self.rejections.until_fewer_tokens(settings.max_num_queued_tokens)
            return self.rejections.queue_full(
                "max_num_queued_tokens",
                sequences,
                f"{counted(batcher.waiting_tokens, 'prompt token')} waiting",
                after,
            )
        return None

    def _too_late(
        self,
        sequences: int,
        request: Request | None,
        objectives: Sequence[AdmissionObjective],
        waits: Waits,
    ) -> ApiError | None:
        batcher = self._gateway.batcher
        place = batcher.queue_length if request is None else batcher.place_of(request)
        wait = waits.wait(place + sequences - 1, joining=sequences, request=request)
        if wait is None:
            return None  # nothing was served yet: nobody can say
        missed = next((objective for objective in objectives if not objective.kept(wait)), None)
        if missed is None:
            return None
        self.rejections.count("slo", sequences)
        idle = waits.until_idle()
        after = min(missed.seconds_until_kept(wait), math.inf if idle is None else idle)
        return self.rejections.error(
            "slo_unattainable",
            missed.rejection(wait),
            after,
            place=place,
            wait=wait.mean,
            param=missed.param,
        )


def _rate_exceeded(seconds: float) -> ApiError:
    return ApiError(
        429,
        "rate_limit_exceeded",
        "this API key exceeds its rate limit; retry later",
        retry_after=seconds,
    )


def adaptive_floor(gateway: AdmissionHost) -> int:
    """Sequences that the adaptive limit never goes below: two for each place in the engine."""
    batcher = gateway.batcher
    return 2 * batcher.effective_max_batch_size * batcher.capabilities.servers


def _rate_limits(settings: OverloadSettings) -> RateLimits | None:
    if settings.rate_limit is None and settings.rate_limit_tokens is None:
        return None
    return RateLimits(settings.rate_limit, settings.rate_limit_tokens, settings.rate_limit_burst)


def _targets(settings: OverloadSettings) -> tuple[DelayTarget, ...]:
    return () if settings.slo is None else delay_targets(settings.slo)


def first_token_level(targets: Sequence[DelayTarget]) -> float:
    return next((target.level for target in targets), None) or TTFT_LEVEL


def caller_of(scope: Scope) -> str:
    """The name of the API key of a call; without keys all callers are one client."""
    name: str = scope.get(CALLER, "")
    return name
