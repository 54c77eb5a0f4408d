"""Who may join the queue: every bound in one place, asked before a body is read and again when the
call is known.

What arrived and is refused is recorded (`rejected`), counted, and told how long the backlog needs.
It is part of the offered arrivals (`/admin/state`, which audits the clients), not of the live
model's: the queue that is predicted is the one of the admitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter

from policies import Request
from policies.text import counted
from queueing.measurement.record import Record
from queueing.simulation.waiting import WaitingQueue
from queueing.simulation.waiting_by_priority import MOST, PriorityQueue
from server.admission.buckets import RateLimits
from server.admission.concurrency import AdaptiveLimit
from server.admission.demand import NOTHING, Demand, demand_of
from server.admission.host import Host
from server.admission.limits import OverloadSettings, delay_target
from server.admission.objectives import Objective
from server.admission.places import Places
from server.admission.waits import Waits
from server.engines.base import Work
from server.errors import ApiError, loss_error
from server.queue import poison
from server.queue.observers import Observer
from server.queue.ticket import Batch
from server.security.guard import CALLER
from server.supervision import deadlines

if TYPE_CHECKING:
    from starlette.types import Scope

    from server.queue.batcher import Batcher
    from server.queue.ticket import Ticket

UNSERVED = (
    "shutting_down",
    "engine_unavailable",
)  # codes of the refusals of a gateway that serves nobody now; also their reasons
EARLY = (
    *UNSERVED,
    poison.CODE,
    deadlines.WHOLE,
    deadlines.FIRST_TOKEN,
)  # codes of refusals that are recorded before there are sequences
REASONS = (
    "rate_limit",
    "adaptive_concurrency",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "slo",
    *UNSERVED,
)  # of a refusal
RELOADED = (  # settings that can change while the gateway serves
    *(
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_sequences_per_call",
        "overload_status",
        "slo",
        "priority_aging",
    ),
    *("rate_limit", "rate_limit_tokens", "rate_limit_burst"),
)
RATES = ("rate_limit", "rate_limit_tokens", "rate_limit_burst")
TTFT_LEVEL = 0.9  # at which a call's own budget is kept, as llm-d's predictor has it


class Overload:
    """The bounds of one gateway, and an observer of its batcher."""

    def __init__(self, gateway: Host) -> None:
        settings: OverloadSettings = gateway.settings.overload
        self._gateway = gateway
        self.settings = settings
        self.guarded = settings.bounded
        self._objectives = _objectives(settings)
        self._level = _level(self._objectives)
        self._rates = _rate_limits(settings)
        self._adaptive: AdaptiveLimit | None = None
        self.waits = Waits(gateway) if settings.wait_estimates or self.guarded else None
        # refusals since the last admission: the places that are promised to them already
        self._turn = 0
        self.places: Places | None = None  # who listens to its place in the queue
        self._rejections = Counter(
            "kendall_rejections",
            "Rejected requests, by reason",
            ["reason"],
            registry=gateway.metrics.registry,
        )

    # its place in the gateway

    def queue(self) -> WaitingQueue:
        """The queue in the order that was asked for."""
        aging = self.settings.priority_aging
        return WaitingQueue() if aging is None else PriorityQueue(aging)

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
            self._adaptive = AdaptiveLimit(self._floor, gateway.now())
            gateway.metrics.gauge_of(
                "concurrency_limit",
                (
                    "Largest number of sequences, waiting and in service, that "
                    "--adaptive-concurrency admits"
                ),
                self._concurrency,
            )
        return [self]  # a rate may be limited later

    def on_arrival(self, ticket: Ticket) -> None:
        """It is told its place and wait."""
        if self.waits is not None and self.settings.wait_estimates:
            self.waits.on_arrival(ticket)

    def on_dispatch(self, batch: Batch) -> None:
        """Delays."""
        if self.waits is not None:
            self.waits.on_dispatch(batch)
        if self._adaptive is not None:
            self._adaptive.on_dispatch(batch)

    def on_idle(self, server_id: int, at: float) -> None:
        """A batch is over."""
        if self.waits is not None:
            self.waits.on_idle(server_id, at)

    def on_settle(self, ticket: Ticket) -> None:
        """What was made for it counts against its key's rate."""
        if self._rates is not None:
            self._rates.answered(ticket.id, ticket.ending.output_tokens, self._gateway.now())

    def on_record(self, record: Record) -> None:
        """Service times."""
        if record.outcome == "rejected":
            return
        if self.waits is not None:
            self.waits.on_record(record)
        if self._adaptive is not None:
            self._adaptive.on_record(record)

    def begin_epoch(self) -> None:
        """Another policy, limit, law or engine."""
        if self.waits is not None:
            self.waits.begin_epoch()

    def change(self, settings: OverloadSettings) -> None:
        """Other values of what is in `RELOADED`. Where a rate changed, every key begins with its
        burst.
        """
        before, self.settings = self.settings, settings
        self.guarded = settings.bounded
        self._objectives = _objectives(settings)
        self._level = _level(self._objectives)
        if any(getattr(before, name) != getattr(settings, name) for name in RATES):
            self._rates = _rate_limits(settings)
        if before.priority_aging != settings.priority_aging and self._gateway.started:
            self._gateway.batcher.requeue(self.queue())

    # calls

    def door(self, scope: Scope) -> ApiError | None:
        """Why a call whose body has not been read is rejected; None where it may come in."""
        gateway = self._gateway
        if not gateway.ready or gateway.draining:
            return None  # that has its own answer
        by_place = self.settings.priority_aging is None  # else its place is in its body
        return self._refused(1, scope, None, self._objectives if by_place else ())

    def rejected_at_door(
        self, error: ApiError, client_request_id: str | None, *, retry: bool
    ) -> str:
        """Record a call that `door` rejected; returns its id."""
        gateway, now = self._gateway, self._gateway.now()
        call_id = gateway.next_call_id("refused")
        gateway.arrivals.saw(now, gateway.batcher.epoch, retry=retry)
        self._record(
            error,
            Record(
                request_id=call_id,
                client_request_id=client_request_id,
                outcome="rejected",
                arrived_at=now,
            ),
        )
        return call_id

    def demand(
        self, headers: Sequence[tuple[bytes, bytes]], patience: float | None, priority: int
    ) -> Demand:
        """What the call asks of its wait. Raises ApiError 400."""
        if self.settings.priority_aging is not None and abs(priority) > MOST:
            raise ApiError(
                400,
                "invalid_request",
                f"got priority {priority}; expected -{MOST} to {MOST}",
                param="priority",
            )
        return demand_of(headers, patience, self._gateway.patience)

    def admit(self, works: Sequence[Work], scope: Scope, demand: Demand = NOTHING) -> None:
        """All sequences of a call, or raise ApiError and record them as rejected. Nothing may be
        awaited before they are submitted.
        """
        if not self.guarded and demand.first_token is None:
            return
        refused = self._refused(len(works), scope, works[0].request, self._objectives_of(demand))
        if refused is not None:
            for work in works:
                self._record(refused, _record_of(work))
            raise refused
        self._turn = 0
        if self._rates is not None:
            now, key = self._gateway.now(), caller_of(scope)
            for work in works:
                self._rates.admitted(key, work.request.id, work.request.prompt_tokens, now)

    def unserved(
        self,
        error: ApiError,
        ids: Sequence[str],
        client_request_id: str | None,
        *,
        arrived_at: float,
        received_at: float,
        retry: bool,
    ) -> None:
        """Count and record the sequences of a call that came while the gateway drains, or without
        an engine; before the first one serves there is no run file, and they are only counted.
        """
        gateway = self._gateway
        self._count(error.code, len(ids))
        if gateway.started:
            gateway.arrivals.saw(received_at, gateway.batcher.epoch, retry=retry)
        for request_id in ids:
            record = Record(
                request_id=request_id,
                client_request_id=client_request_id,
                outcome="rejected",
                received_at=received_at,
                arrived_at=arrived_at,
            )
            if gateway.started:
                self._record(error, record)
            else:
                gateway.metrics.on_record(
                    msgspec.structs.replace(record, policy=gateway.policy_text)
                )

    def state(self) -> dict[str, Any]:
        """For `/admin/state`: what is asked for, what holds now, where waits come from."""
        batcher, live = self._gateway.batcher, self._gateway.live
        limit = None if self._adaptive is None else self._adaptive.bound
        source = "live model" if live is not None and live.ahead is not None else "services seen"
        return dataclasses.asdict(self.settings) | {
            "queued_tokens": batcher.waiting_tokens,
            "concurrency_limit": limit,
            "wait_source": None if self.waits is None else source,
        }

    def loss(self, code: str, message: str) -> ApiError:
        """The error of one that had arrived and was lost."""
        if code != "queue_timeout":
            return loss_error(code, message)
        place = max(
            0, self._gateway.batcher.queue_length - 1
        )  # it is in the queue still, and would come back to one without it
        wait = None if self.waits is None else self.waits.wait(place, joining=0)
        return self._error(
            code,
            message,
            None if wait is None else wait.mean,
            wait=None if wait is None else wait.mean,
        )

    def rejections(self) -> dict[str, float]:
        """Requests refused since the start, by reason."""
        samples = (sample for metric in self._rejections.collect() for sample in metric.samples)
        return {sample.labels["reason"]: sample.value for sample in samples}

    # the bounds

    def _objectives_of(self, demand: Demand) -> Sequence[Objective]:
        if demand.first_token is None:
            return self._objectives
        service = 0.0 if self.waits is None else self.waits.first_token()
        return (
            *self._objectives,
            Objective.of_first_token(demand.first_token, service, self._level),
        )

    def _refused(
        self, sequences: int, scope: Scope, request: Request | None, objectives: Sequence[Objective]
    ) -> ApiError | None:
        batcher = self._gateway.batcher
        too_fast = (
            None
            if self._rates is None
            else self._too_fast(sequences, self._rates, caller_of(scope))
        )
        refused = too_fast or self._full(sequences, batcher)
        # an idle gateway admits one call whatever is predicted: only a service can correct a
        # prediction that is too long
        if refused is not None or not objectives or self.waits is None or not batcher.unanswered:
            return refused
        return self._too_late(sequences, request, objectives, self.waits)

    def _too_fast(self, sequences: int, rates: RateLimits, key: str) -> ApiError | None:
        seconds = rates.seconds_until(key, self._gateway.now(), sequences)
        if seconds <= 0:
            return None
        self._count("rate_limit", sequences)
        return ApiError(
            429,
            "rate_limit_exceeded",
            "this API key exceeds its rate limit; retry later",
            retry_after=seconds,
        )

    def _full(self, sequences: int, batcher: Batcher) -> ApiError | None:
        settings = self.settings
        if self._adaptive is not None:
            over = batcher.unanswered + sequences - self._adaptive.bound
            if over > 0 and batcher.unanswered:  # an idle gateway admits a call of any size
                self._adaptive.refused()
                return self._queue_full(
                    "adaptive_concurrency",
                    sequences,
                    f"{counted(batcher.unanswered, 'request')} in the system",
                    self._gone(over),
                )
        if settings.max_num_queued_reqs is not None:
            over = batcher.unanswered + sequences - settings.max_num_queued_reqs
            if over > 0:
                return self._queue_full(
                    "max_num_queued_reqs",
                    sequences,
                    f"{counted(batcher.unanswered, 'request')} in the system",
                    self._gone(over),
                )
        if (
            settings.max_num_queued_tokens is not None
            and batcher.waiting_tokens >= settings.max_num_queued_tokens
        ):
            after = self._until_fewer_tokens(settings.max_num_queued_tokens)
            return self._queue_full(
                "max_num_queued_tokens",
                sequences,
                f"{counted(batcher.waiting_tokens, 'prompt token')} waiting",
                after,
            )
        return None

    def _too_late(
        self, sequences: int, request: Request | None, objectives: Sequence[Objective], waits: Waits
    ) -> ApiError | None:
        batcher = self._gateway.batcher
        place = batcher.queue_length if request is None else batcher.place_of(request)
        wait = waits.wait(place + sequences - 1, joining=sequences)
        if wait is None:
            return None  # nothing was served yet: nobody can say
        missed = next((objective for objective in objectives if not objective.kept(wait)), None)
        if missed is None:
            return None
        self._count("slo", sequences)
        idle = waits.until_idle()
        after = min(missed.seconds_until_kept(wait), math.inf if idle is None else idle)
        return self._error(
            "slo_unattainable",
            missed.refusal(wait),
            after,
            place=place,
            wait=wait.mean,
            param=missed.param,
        )

    def _concurrency(self) -> float:
        return math.inf if self._adaptive is None else self._adaptive.bound

    def _floor(self) -> int:
        return (
            2
            * self._gateway.batcher.effective_max_batch_size
            * self._gateway.batcher.capabilities.servers
        )

    # what a refusal says

    def _queue_full(self, reason: str, sequences: int, why: str, after: float | None) -> ApiError:
        self._count(reason, sequences)
        batcher = self._gateway.batcher
        wait = None if self.waits is None else self.waits.wait(batcher.queue_length, joining=1)
        return self._error(
            "queue_full",
            f"{why}; the gateway accepts no more now",
            after,
            place=batcher.queue_length,
            wait=wait.mean if wait else None,
        )

    def _error(
        self,
        code: str,
        message: str,
        after: float | None,
        *,
        place: int | None = None,
        wait: float | None = None,
        param: str | None = None,
    ) -> ApiError:
        details: dict[str, Any] = {"queue_length": self._gateway.batcher.queue_length}
        if place is not None:
            details["queue_position"] = place
        if wait is not None and math.isfinite(wait) and self.settings.wait_estimates:
            details["predicted_wait_ms"] = round(wait * 1e3, 3)
        known = after if after is not None and math.isfinite(after) else None
        return ApiError(
            self.settings.overload_status,
            code,
            message,
            param=param,
            retry_after=known,
            details=details,
        )

    def _gone(self, count: float) -> float | None:
        """Until there is a place for this one beside those refused before it, or they would all
        come back at the same instant.

        The turn goes round the backlog: nobody is sent away for longer than what is here now takes.
        """
        turn, self._turn = self._turn, (self._turn + 1) % max(1, self._gateway.batcher.unanswered)
        return None if self.waits is None else self.waits.until_gone(math.ceil(count) + turn)

    def _until_fewer_tokens(self, bound: int) -> float | None:
        """Until the queue's prompts are below the bound, were they all of its mean length."""
        batcher = self._gateway.batcher
        leave = math.ceil(
            (batcher.waiting_tokens - bound + 1)
            / (batcher.waiting_tokens / max(1, batcher.queue_length))
        )
        wait = None if self.waits is None else self.waits.wait(max(0, leave - 1), joining=0)
        return None if wait is None else wait.mean

    def _count(self, reason: str, sequences: int) -> None:
        self._rejections.labels(reason).inc(sequences)
        self._gateway.metrics.received.count(sequences)

    def _record(self, error: ApiError, record: Record) -> None:
        batcher = self._gateway.batcher
        batcher.turn_away(
            msgspec.structs.replace(
                record, policy=batcher.policy_text, epoch=batcher.epoch, error=error.code
            )
        )


def _rate_limits(settings: OverloadSettings) -> RateLimits | None:
    if settings.rate_limit is None and settings.rate_limit_tokens is None:
        return None
    return RateLimits(settings.rate_limit, settings.rate_limit_tokens, settings.rate_limit_burst)


def _objectives(settings: OverloadSettings) -> tuple[Objective, ...]:
    return () if settings.slo is None else (Objective(delay_target(settings.slo)),)


def _level(objectives: Sequence[Objective]) -> float:
    return next((objective.delay.level for objective in objectives), None) or TTFT_LEVEL


def caller_of(scope: Scope) -> str:
    """Of whoever calls; without keys all are one client."""
    name: str = scope.get(CALLER, "")
    return name


def _record_of(work: Work) -> Record:
    request = work.request
    return Record(
        request_id=request.id,
        client_request_id=work.client_request_id,
        outcome="rejected",
        received_at=work.received_at,
        arrived_at=request.arrived_at,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        predicted_output_tokens=request.predicted_output_tokens,
    )
