"""A sequence from its arrival to its one outcome; a batch: what one dispatch started."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kendall.policies import Fixed, Policy, Request, Running, Waiting
from kendall.queueing.measurement.record import Outcome, Record
from kendall.server.engines.base import EngineEnd, EngineRequest, FailureCode, Token, TokenStream
from kendall.server.queue.stop_detector import StopDetector

log = logging.getLogger("kendall")


class Consumer(Protocol):
    """Where a sequence's answer goes: an HTTP response, a calibration, a test. Called on the event
    loop; must not wait.
    """

    def on_dispatched(self) -> None:
        """Service began; not said again after a preemption."""

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """More of the answer: `tokens` of its own (never past its end) and the text they add."""

    def on_release(self) -> None:
        """The answer is whole and may leave; the consumer calls `released` when it has left."""

    def on_failed(self, outcome: Outcome, code: str, message: str) -> None:
        """No answer will come: failed, rejected or abandoned."""


Stint = tuple[float, float, int]  # in service: from, until, on which server


class SequenceTiming(Protocol):
    """Times the stages of one call."""

    def took(self, stage: str, since: float) -> None:
        """A stage has ended that began at `since`."""


class Instants(msgspec.Struct):
    """When things happened to a sequence, on the event loop's clock."""

    first_dispatched: float | None = None
    dispatched: float | None = None  # the last time, of a preempted one
    first_token: float | None = None
    last_token: float | None = None
    released: float | None = None
    server_free: float | None = None


def unheard(seconds: float) -> None:
    """Of a gap between two tokens."""
    del seconds


class Owner(Protocol):
    """Who moves a sequence on and hears of what happens to it: the batcher."""

    now: Callable[[], float]
    policy_text: str
    epoch: int
    max_output_tokens: int | None  # the gateway's token limit
    # hears of every token, where the policy in force is asked after each step or counts tokens
    on_made: Callable[[Running, int], None] | None

    def member_ended(self, sequence: SequenceState) -> None:
        """It met its own end."""

    def settle(self, sequence: SequenceState, outcome: Outcome) -> None:
        """It has left with its answer."""

    def fail(self, sequence: SequenceState, outcome: Outcome, code: str, message: str) -> None:
        """It cannot be answered."""

    def cancel(self, sequence: SequenceState) -> None:
        """Its client is gone."""

    def put_back(self, sequences: Sequence[SequenceState]) -> None:
        """The engine did not begin them: they wait again, first of all."""


class SequenceState:
    """One waiting or running sequence. Its batcher moves it on; it listens to its own token
    stream.
    """

    __slots__ = (
        "_failure",
        "_newest_token",
        "_owner",
        "at",
        "batch",
        "batch_size",
        "cached_tokens",
        "consumer",
        "continued",
        "deaths",
        "engine_request",
        "epoch",
        "id",
        "interruptions",
        "on_gap",
        "outcome",
        "output_token_ids",
        "preemptions",
        "prefix_keys",
        "running",
        "served",
        "stints",
        "stop_detector",
        "stream",
        "timing",
        "wait_estimate",
    )

    def __init__(
        self,
        owner: Owner,
        engine_request: EngineRequest,
        stop_detector: StopDetector,
        consumer: Consumer,
    ) -> None:
        self._owner = owner
        self.engine_request = engine_request
        self.id = engine_request.request.id
        self.stop_detector = stop_detector
        self.consumer = consumer
        self.batch: Batch | None = None
        self.batch_size: int | None = None
        self.running: Running | None = None
        self.cached_tokens = 0  # of its prompt, when it was computed first
        self.epoch = owner.epoch
        self.at = Instants()
        self.timing: SequenceTiming | None = None  # of the few calls that are measured
        self.output_token_ids: list[int] = []
        self.outcome: Outcome | None = None
        self.preemptions = 0
        self.prefix_keys: tuple[int, ...] | None = None  # of its prompt, where they are asked for
        self.served = 0.0  # seconds in service before its last preemption
        self.stints: tuple[Stint, ...] = ()  # that ended with one
        self.interruptions = 0  # engines that were lost while it was in service
        self.deaths: tuple[int, ...] = ()  # those of them whose cause is not known
        self.continued = False  # the engine made no token for it once, and got it again
        self.stream: TokenStream | None = None
        self.on_gap: Callable[[float], None] = unheard  # its batch's
        # at its arrival: how many waited before it, and seconds to wait
        self.wait_estimate: tuple[int, float | None] | None = None
        self._failure: str | None = None
        self._newest_token: float | None = None

    def waiting(self) -> Waiting:
        """Itself as policies see it in the queue."""
        return Waiting(self.engine_request.request, len(self.engine_request.output_token_ids))

    @property
    def clipped(self) -> bool:
        """Whether the gateway's limit ended it where the client's own was larger or absent."""
        asked, detector = self.engine_request.asked_output_tokens, self.stop_detector
        return detector.finish_reason == "length" and asked is not None and asked > detector.limit

    def limit_tokens(self) -> None:
        """It waits: the gateway's token limit holds, whatever it was when it arrived."""
        detector, limit = self.stop_detector, self._owner.max_output_tokens
        self.engine_request = self.engine_request.under(limit, detector.output_tokens)
        detector.limit = self.engine_request.sampling.max_tokens

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """Tokens from the engine; those behind the own end (padding) are dropped."""
        if self.stop_detector.finish_reason is not None or self.outcome is not None:
            return
        detector, owner, running = self.stop_detector, self._owner, self.running
        now, newest = owner.now(), self._newest_token
        if newest is None:
            self.at.first_token = now
            self.cached_tokens = 0 if self.stream is None else self.stream.cached_tokens
        else:
            self.on_gap(now - newest)  # it lasts through an interruption
        self._newest_token = now
        if len(tokens) == 1:  # nearly always
            text = detector.feed(tokens[0])
            self.output_token_ids.append(tokens[0].id)
        else:
            text, tokens = self._take(tokens)
        assert running is not None
        running.output_tokens_so_far = detector.output_tokens
        if owner.on_made is not None:
            owner.on_made(running, len(tokens))
        try:
            self.consumer.on_text(text, tokens)
        except Exception:
            log.exception("internal error while handling a token of an answer")
            message = "internal error of the gateway; its log has the details"
            owner.fail(self, "failed", "internal_error", message)
            return
        if self.timing is not None:
            self.timing.took("token", now)
        if detector.finish_reason is not None:
            self.at.last_token = now
            owner.member_ended(self)

    def _take(self, tokens: Sequence[Token]) -> tuple[str, Sequence[Token]]:
        """Those up to the own end, and the text they add."""
        detector, text, taken = self.stop_detector, "", 0
        for token in tokens:
            text += detector.feed(token)
            self.output_token_ids.append(token.id)
            taken += 1
            if detector.finish_reason is not None:
                break
        return text, tokens[:taken]

    def on_end(self, end: EngineEnd) -> None:
        """The engine stopped by itself before we saw an end: at the edge of its context, or
        cancelled it.
        """
        if self.stop_detector.finish_reason is not None or self.outcome is not None:
            return
        if end == "cancelled":
            self.on_failure("the engine dropped the request")
            return
        text = self.stop_detector.cut(end)
        if text:
            self.consumer.on_text(text, ())
        self.at.last_token = self._owner.now()
        self._owner.member_ended(self)

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """The engine lost it, or fails over it."""
        self._owner.fail(self, "failed", code, message)

    def released(self) -> None:
        """The consumer's last byte has left: the sojourn ends here."""
        if self.outcome is None:
            self.at.released = self._owner.now()
            self._owner.settle(self, "completed")

    def cancel(self) -> None:
        """The client is gone: out of the queue, or out of the engine."""
        self._owner.cancel(self)

    def record(self) -> Record:
        """What happened, as the run file has it."""
        request, at, batch = self.engine_request.request, self.at, self.batch
        return Record(
            request_id=request.id,
            client_request_id=self.engine_request.client_request_id,
            outcome=self.outcome or "failed",
            policy=batch.policy_text if batch else self._owner.policy_text,
            epoch=self.epoch if batch else self._owner.epoch,
            server_id=batch.server_id if batch else None,
            batch_id=batch.id if batch else None,
            batch_size=self.batch_size if batch else None,
            received_at=self.engine_request.received_at,
            arrived_at=request.arrived_at,
            first_dispatched_at=at.first_dispatched,
            dispatched_at=at.dispatched,
            first_token_at=at.first_token,
            last_token_at=at.last_token,
            released_at=at.released,
            server_free_at=at.server_free,
            queueing_delay=self.queueing_delay(),
            batch_forming_delay=batch.forming_delay(request) if batch else None,
            service_time=self._service_time(),
            sojourn_time=None if at.released is None else at.released - request.arrived_at,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=self.cached_tokens or None,
            output_tokens=self.stop_detector.output_tokens,
            max_output_tokens=request.max_output_tokens,
            predicted_output_tokens=request.predicted_output_tokens,
            finish_reason=self.stop_detector.finish_reason,
            clipped=self.clipped,
            flow=request.flow or None,
            preemptions=self.preemptions,
            interruptions=self.interruptions,
            error=self._failure,
        )

    def queueing_delay(self) -> float:
        """Seconds of all its waits; of the last one until now, where it waits or ended so."""
        at = self.at
        if self.batch is not None and at.dispatched is not None:
            until = at.dispatched
        else:
            until = self._owner.now() if at.released is None else at.released
        return until - self.engine_request.request.arrived_at - self.served

    def _service_time(self) -> float | None:
        """Of all its stints; None where the last one has not ended."""
        at = self.at
        if self.batch is None:
            return self.served if self.preemptions else None
        if at.dispatched is None or at.server_free is None:
            return None
        return self.served + (at.server_free - at.dispatched)

    def begin_service(self, batch: Batch, epoch: int) -> None:
        """It was dispatched."""
        self.batch, self.epoch, self.at.dispatched = batch, epoch, batch.dispatched_at
        if self.at.first_dispatched is None:
            self.at.first_dispatched = batch.dispatched_at

    def end_stint(self, at: float) -> None:
        """It was preempted: what it has so far stays, and its next service continues behind
        that.
        """
        assert self.at.dispatched is not None
        assert self.batch is not None
        if self.stream is not None:
            self.stream.listener, self.stream = None, None
        self.stints = (*self.stints, (self.at.dispatched, at, self.batch.server_id))
        self.batch = self.running = None
        self.preemptions += 1
        self.served += at - self.at.dispatched
        self.engine_request = msgspec.structs.replace(
            self.engine_request, output_token_ids=tuple(self.output_token_ids)
        )

    def failed_because(self, message: str) -> None:
        """Keep the reason for the record."""
        self._failure = message


class Batch(msgspec.Struct, eq=False):
    """What one Dispatch started, under the policy then in force."""

    id: int
    server_id: int
    policy: Policy
    policy_text: str
    dispatched_at: float
    forming_until: float  # instant its last member arrived, or max_wait passed (fixed)
    sequences: list[SequenceState]
    open: set[str]  # ids whose own end has not come
    on_gap: Callable[[float], None] = unheard  # hears the seconds between tokens

    def forming_delay(self, request: Request) -> float:
        """Seconds this request waited for others to fill its batch."""
        delay = self.forming_until - request.arrived_at
        return delay if delay > 0 else 0.0


def forming_until(
    policy: Policy, sequences: Sequence[SequenceState], max_num_seqs: int, now: float
) -> float:
    """The instant until which a batch was being formed: when its last member arrived, or
    `max_wait` ran out. Only fixed batching makes requests wait for others.
    """
    if not isinstance(policy, Fixed):
        return -math.inf
    requests = [sequence.engine_request.request for sequence in sequences]
    arrivals = [request.arrived_at for request in requests]
    together = sum(request.sequences for request in requests)
    if together >= min(policy.batch_size, max_num_seqs):
        return max(arrivals)
    return min(now, min(arrivals) + policy.max_wait)
