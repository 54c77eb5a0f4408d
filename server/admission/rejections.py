"""Calls that are rejected: counted, recorded (`rejected`), and answered with when to come back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import Counter

from kendall.queueing.measurement.record import Record
from kendall.server.admission.host import AdmissionHost
from kendall.server.admission.settings import OverloadSettings
from kendall.server.admission.waits import Waits
from kendall.server.engines.base import EngineRequest
from kendall.server.queue import poison
from kendall.server.runtime.errors import ApiError, failure_error
from kendall.server.supervision import deadlines

# codes of the rejections of a gateway that serves nobody now; also their reasons
UNSERVED = ("shutting_down", "engine_unavailable")
# codes of rejections that are recorded before there are sequences
EARLY = (*UNSERVED, poison.CODE, deadlines.WHOLE, deadlines.FIRST_TOKEN)
# reasons of the others: limits of the gateway
LIMITS = (
    *("rate_limit", "adaptive_concurrency", "max_num_queued_reqs", "max_num_queued_tokens", "slo"),
)
REASONS = (*LIMITS, *UNSERVED)


class Rejections:
    """The rejections of one gateway: their answers, counts and records."""

    def __init__(
        self, gateway: AdmissionHost, settings: OverloadSettings, waits: Waits | None
    ) -> None:
        self._gateway = gateway
        self._settings = settings
        self._waits = waits
        # to calls that were rejected since the last admission: they will come back for them
        self.promised_places = 0
        self._counter = Counter(
            "kendall_rejections",
            "Rejected requests, by reason",
            ["reason"],
            registry=gateway.metrics.registry,
        )

    def change(self, settings: OverloadSettings) -> None:
        """Other values of what can change while the gateway serves."""
        self._settings = settings

    def admitted(self) -> None:
        """A call was: no place is promised any more."""
        self.promised_places = 0

    # the account

    def by_reason(self) -> dict[str, float]:
        """Requests rejected since the start, by reason."""
        samples = (sample for metric in self._counter.collect() for sample in metric.samples)
        return {sample.labels["reason"]: sample.value for sample in samples}

    def count(self, reason: str, sequences: int) -> None:
        """So many sequences are rejected."""
        self._counter.labels(reason).inc(sequences)
        live = self._gateway.live
        if live is not None and reason in LIMITS:
            live.on_refused(reason)
        self._gateway.metrics.calls.received.count(sequences)

    def record(self, error: ApiError, requests: Sequence[EngineRequest]) -> None:
        """The sequences of a call that is rejected."""
        for engine_request in requests:
            self._record(error, _record_of(engine_request))

    def _record(self, error: ApiError, record: Record) -> None:
        batcher = self._gateway.batcher
        batcher.turn_away(
            msgspec.structs.replace(
                record, policy=batcher.policy_text, epoch=batcher.epoch, error=error.code
            )
        )

    def record_at_precheck(
        self, error: ApiError, client_request_id: str | None, *, retry: bool
    ) -> str:
        """Record a call that is rejected before its body is read; returns its id."""
        gateway, now = self._gateway, self._gateway.now()
        call_id = gateway.call_ids.next("refused")
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

    def record_unserved(
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
        self.count(error.code, len(ids))
        if gateway.lifecycle.started:
            gateway.arrivals.saw(received_at, gateway.batcher.epoch, retry=retry)
        for request_id in ids:
            record = Record(
                request_id=request_id,
                client_request_id=client_request_id,
                outcome="rejected",
                received_at=received_at,
                arrived_at=arrived_at,
            )
            if gateway.lifecycle.started:
                self._record(error, record)
            else:
                gateway.metrics.on_record(
                    msgspec.structs.replace(record, policy=gateway.limits.policy_text)
                )

    # what a rejection says

    def failure(self, code: str, message: str) -> ApiError:
        """The error of one that had arrived and failed."""
        if code != "queue_timeout":
            return failure_error(code, message)
        place = max(
            0, self._gateway.batcher.queue_length - 1
        )  # it is in the queue still, and would come back to one without it
        wait = None if self._waits is None else self._waits.wait(place, joining=0)
        return self.error(
            code,
            message,
            None if wait is None else wait.mean,
            wait=None if wait is None else wait.mean,
        )

    def queue_full(self, reason: str, sequences: int, why: str, after: float | None) -> ApiError:
        """`why` the queue takes no more; `after` so many seconds it may."""
        self.count(reason, sequences)
        batcher = self._gateway.batcher
        wait = None if self._waits is None else self._waits.wait(batcher.queue_length, joining=1)
        return self.error(
            "queue_full",
            f"{why}; the gateway accepts no more now",
            after,
            place=batcher.queue_length,
            wait=wait.mean if wait else None,
        )

    def error(
        self,
        code: str,
        message: str,
        after: float | None,
        *,
        place: int | None = None,
        wait: float | None = None,
        param: str | None = None,
    ) -> ApiError:
        """With place and wait, where they are known; `after`: seconds to the next attempt."""
        details: dict[str, Any] = {"queue_length": self._gateway.batcher.queue_length}
        if place is not None:
            details["queue_position"] = place
        if wait is not None and math.isfinite(wait) and self._settings.wait_estimates:
            details["predicted_wait_ms"] = round(wait * 1e3, 3)
        known = after if after is not None and math.isfinite(after) else None
        return ApiError(
            self._settings.overload_status,
            code,
            message,
            param=param,
            retry_after=known,
            details=details,
        )

    def until_gone(self, count: float) -> float | None:
        """Until there is a place for this one beside those rejected before it, or they would all
        come back at the same instant.

        The turn goes round the backlog: nobody is sent away for longer than what is here now takes.
        """
        turn = self.promised_places
        self.promised_places = (turn + 1) % max(1, self._gateway.batcher.unanswered)
        return None if self._waits is None else self._waits.until_gone(math.ceil(count) + turn)

    def until_fewer_tokens(self, bound: int) -> float | None:
        """Until the queue's prompts are below the bound, were they all of its mean length."""
        batcher = self._gateway.batcher
        leave = math.ceil(
            (batcher.waiting_tokens - bound + 1)
            / (batcher.waiting_tokens / max(1, batcher.queue_length))
        )
        wait = None if self._waits is None else self._waits.wait(max(0, leave - 1), joining=0)
        return None if wait is None else wait.mean


def _record_of(engine_request: EngineRequest) -> Record:
    request = engine_request.request
    return Record(
        request_id=request.id,
        client_request_id=engine_request.client_request_id,
        outcome="rejected",
        received_at=engine_request.received_at,
        arrived_at=request.arrived_at,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        predicted_output_tokens=request.predicted_output_tokens,
        flow=request.flow or None,
    )
