"""The driver of a policy on a live engine: keeps the queue, asks the policy and carries out what it
decides.

While requests wait, it asks on every arrival, end, cancellation and expiry, on a change of policy,
and at the instant of the last `WaitUntil`; after a `Dispatch` it asks again at once, and after
every engine step where the policy wants that. Everything happens synchronously on the event loop's
clock, so that on virtual time the instants equal the simulator's. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from kendall.policies import (
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Running,
    Server,
    WaitUntil,
    format_policy,
    policy_batch_size,
    served_as,
)
from kendall.policies.decision import check_once
from kendall.policies.flow_counters import FlowCounters
from kendall.policies.ordered import counts, order_of, wants_steps
from kendall.policies.registry import is_built_in, may_preempt
from kendall.policies.waiting_queues import WaitingQueue, moved, queue_for
from kendall.queueing.measurement.record import Outcome, Record
from kendall.server.engines.base import Capabilities, Engine, EngineRequest
from kendall.server.queue.decision_loop import DecisionLoop, decided
from kendall.server.queue.ledger import Ledger
from kendall.server.queue.observers import Observer, Observers
from kendall.server.queue.prefixes import PrefixMatches, matches_for
from kendall.server.queue.proxied import ReturnedCalls, sequence_of
from kendall.server.queue.recovery import Recovery
from kendall.server.queue.sequence import Batch, Consumer, SequenceState, forming_until
from kendall.server.queue.service import Lease, Service
from kendall.server.queue.view import QueueView
from kendall.server.runtime.clock import clock_of

log = logging.getLogger("kendall.batcher")
OnMade = Callable[[Running, int], None]


class Batcher(QueueView):
    """Queue + policy + engine. One instance per engine; every method is called on the event
    loop.
    """

    _wants_predictions: bool  # of those that are submitted, until it was said that one has none
    on_made: OnMade | None  # where the policy in force heeds every token
    _prefixes: PrefixMatches | None = None  # under route=prefix

    def __init__(
        self,
        engine: Engine,
        capabilities: Capabilities,
        policy: Policy,
        observers: Sequence[Observer] = (),
        queue_for: Callable[[Policy], WaitingQueue] = queue_for,
        *,
        suspect_after: int = 2,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = clock_of(self._loop)
        self.epoch = 0
        self.max_output_tokens: int | None = None  # in force; `limit_tokens` changes it
        self.failures: Counter[str] = Counter()  # failed requests, by the code of the error
        self.observers = Observers(observers)
        self.decisions = DecisionLoop(self._step, lambda: self.policy_text)
        self.lease = Lease()
        self._ledger = Ledger(self.now, self.observers)
        ask = self.decisions.ask
        self._service = Service(engine, capabilities, self._ledger, ask, self.fail)

        def requeue(sequences: Sequence[SequenceState]) -> None:  # to be dispatched once more
            for sequence in sequences:
                self.decisions.put_back(sequence.id)
                sequence.limit_tokens()
            self._returned.add(sequences, self.now())
            self._queue.put_back([sequence.waiting() for sequence in sequences])

        self._service.requeue, self._returned = requeue, ReturnedCalls()
        self.member_ended, self.put_back = self._service.member_ended, self._service.put_back
        self.withhold, self.use_only = self._service.withhold, self._service.use_only
        self.serve_within, self.emptied = self._service.serve_within, self._service.emptied
        self.trust = self._service.trust
        self.recovery = Recovery(self._service, self.lease, ask, self.fail, suspect_after)
        self._queue, self._queue_for = WaitingQueue(), queue_for
        self.counters: FlowCounters | None = None  # of the flows, under an order that counts
        self._govern(policy)
        self._batch_ids = itertools.count()
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    # what comes in

    def submit(
        self,
        requests: Sequence[EngineRequest],
        consumers: Sequence[Consumer],
    ) -> list[SequenceState]:
        """Put sequences into the queue, all of one call together, and ask the policy. Raises
        ValueError where an id is in use.
        """
        if self._wants_predictions and not all(map(_has_prediction, requests)):
            self._wants_predictions = False
            log.warning(
                "policy %s orders by predicted lengths, and a request has no "
                "predicted_output_tokens: its token limit counts instead (said once)",
                self.policy_text,
            )
        eos = self._service.capabilities.eos_token_ids
        sequences = [
            sequence_of(self, engine_request, eos, consumer)
            for engine_request, consumer in zip(requests, consumers, strict=True)
        ]
        self._ledger.add(sequences)
        for sequence in sequences:
            sequence.limit_tokens()
            self._queue.append(sequence.waiting())
            deadline = sequence.engine_request.request.deadline
            if deadline < math.inf:
                self._expiries[sequence.id] = self._loop.call_at(deadline, self._expire, sequence)
            self.observers.on_arrival(sequence)
        self.lease.revoke()
        self.decisions.ask()
        return sequences

    def turn_away(self, record: Record) -> None:
        """Record and count a request that arrived and was refused; it is never queued."""
        self.observers.on_record(record)

    def switch(self, policy: Policy | None = None) -> int:
        """Put another policy in force (None: only a limit changed); returns the new epoch.

        What is in service finishes under the old policy, what waits is served under the new one.
        """
        self.epoch += 1
        if policy is not None:
            self._govern(policy)
        self.ask()
        return self.epoch

    def limit_tokens(self, limit: int | None) -> None:
        """The gateway's token limit, for those who wait too; what is in service keeps its own. The
        policy is not asked: an epoch begins.
        """
        self.max_output_tokens = limit
        unsettled = self._ledger.unsettled
        for sequence in unsettled.values():
            if sequence.batch is None:
                sequence.limit_tokens()
        self._queue.renew(lambda waiting: unsettled[waiting.request.id].waiting())

    def _govern(self, policy: Policy) -> None:
        self.policy = served_as(policy, pads=self.capabilities.pads)
        built_in = is_built_in(self.policy)
        self._decide = self.policy.decide if built_in else partial(decided, self.policy, self.now)
        self.policy_text = format_policy(policy)  # as asked, however it is served
        self.policy_batch_size = policy_batch_size(policy)
        self.wants_steps = wants_steps(policy)
        self._wants_predictions = order_of(policy).predicts
        self._service.preempts = may_preempt(policy)
        later = self.wants_steps or counts(policy)  # not before all have their tokens of a step
        self._service.ask = self.decisions.ask_soon if later else self.decisions.ask
        self._queue = moved(self._queue, self._queue_for(policy))
        self.counters = self._queue.counters
        self._prefixes = matches_for(self.policy, self._prefixes, self._ledger.unsettled)
        self.on_made = _heeding(self.counters, self.decisions, self.wants_steps) if later else None

    def rank_again(self) -> None:
        """Those waiting, after priorities began to age or ceased to."""
        if self.counters is None:
            self._queue = moved(self._queue, self._queue_for(self.policy))
        self.ask()

    def close(self) -> None:
        """Nothing more will arrive: a partial batch is dispatched rather than kept waiting."""
        self.closing = True
        self.lease.revoke()
        self.ask()

    def reopen(self) -> None:
        """Cancel the wait for the last request: new ones are admitted again."""
        self.closing = False
        self._ledger.notify()
        self.ask()

    def pause_dispatch(self, paused: bool) -> None:
        """Stop dispatching (what waits keeps its place), or dispatch again."""
        self.lease.pause(paused)
        self._ledger.moved_at = self.now()
        self.ask()

    # what ends

    def cancel(self, sequence: SequenceState) -> None:
        """The client is gone: out of the queue or out of the engine. No effect on a sequence with
        an outcome.
        """
        self._drop(sequence, "cancelled")

    def fail(self, sequence: SequenceState, outcome: Outcome, code: str, message: str) -> None:
        """No answer for this sequence; its consumer is told."""
        if sequence.outcome is None:
            sequence.failed_because(message)
            if outcome == "failed":
                self.failures[code] += 1
            try:
                sequence.consumer.on_failed(outcome, code, message)
            except Exception:
                log.exception("internal error while telling a client that its request failed")
            self._drop(sequence, outcome)

    def fail_all(self, code: str, message: str) -> None:
        """The engine is gone or the gateway stops: every unanswered sequence fails, once."""
        self.lease.pause(True)  # nothing may be dispatched in between
        self.recovery.stop()
        for sequence in list(self.unanswered_sequences()):
            self.fail(sequence, "failed", code, message)

    def settle(self, sequence: SequenceState, outcome: Outcome) -> None:
        """Give a sequence its one outcome; its record leaves once its server's end is known too."""
        self._ledger.settle(sequence, outcome)
        self.recovery.settled(sequence)

    def _expire(self, sequence: SequenceState) -> None:
        if sequence.batch is None:
            message = "the request's patience ran out while it waited"
            self.fail(sequence, "abandoned", "queue_timeout", message)

    def _drop(self, sequence: SequenceState, outcome: Outcome) -> None:
        if sequence.outcome is not None:
            return
        if sequence.batch is None:
            self._queue.remove(sequence.id)
            _stop(self._expiries.pop(sequence.id, None))
            self.settle(sequence, outcome)
            self.ask()
            return
        self.settle(sequence, outcome)
        self._service.drop(sequence)

    # asking the policy and carrying out

    def ask(self) -> None:
        """Ask the policy, also where nothing happened: what was due and missed happens now."""
        self.decisions.ask()

    def _step(self) -> float | None:
        """One decision; the instant at which to ask again, or None: at once."""
        if not self._queue or self.lease.blocks or self.recovery.blocks:
            return math.inf  # nothing can start, whatever the policy
        now, deadline = self.now(), math.inf
        for state, again in self._returned.views(self._state(), lambda: self.servers_in_use, now):
            decision = self._decide(state, now)
            if isinstance(decision, WaitUntil):
                deadline = min(deadline, decision.deadline, again)
                continue
            if isinstance(decision, Preempt):
                self._preempt(decision, now)
            else:
                self._dispatch(decision)
            return None
        return deadline

    def _state(self) -> QueueState:
        bounds = self._service.capabilities
        servers = [
            Server(
                slot.id,
                tuple(slot.running.values()),
                min(bounds.max_num_seqs, slot.room),
                bounds.max_num_batched_tokens,
                bounds.kv_cache_tokens,
                (slot.sequences, slot.context_tokens),
            )
            for slot in self._service.slots
            if slot.up and (not slot.running or slot.policy is self.policy)
        ]
        counters, prefixes = self.counters, self._prefixes
        virtual_tokens = {} if counters is None else counters.virtual_tokens
        matches = {} if prefixes is None else prefixes
        return QueueState(self._queue, servers, {}, self.closing, virtual_tokens, matches)

    def _dispatch(self, decision: Dispatch) -> None:
        now, policy = self.now(), self.policy
        check_once(self.policy_text, decision, self.decisions.dispatched)
        unsettled = self._ledger.unsettled
        taken = self._queue.take(decision.request_ids)
        sequences = [unsettled[waiting.request.id] for waiting in taken]
        formed = forming_until(policy, sequences, self._service.capabilities.max_num_seqs, now)
        batch = Batch(
            next(self._batch_ids),
            decision.server_id,
            policy,
            self.policy_text,
            now,
            formed,
            sequences,
            {sequence.id for sequence in sequences},
        )
        if self._expiries:
            for sequence in sequences:
                _stop(self._expiries.pop(sequence.id, None))
        if self._prefixes is not None:
            self._prefixes.serve(decision.server_id, sequences)
        self._service.begin(batch, self.epoch)
        self.observers.on_dispatch(batch)
        for sequence in self._service.start(batch, sequences):
            if not sequence.preemptions:
                self._service.call(sequence, sequence.consumer.on_dispatched)

    def _preempt(self, decision: Preempt, now: float) -> None:
        """Back into the queue, with the tokens made so far."""
        sequences = [self._ledger.unsettled[request_id] for request_id in decision.request_ids]
        for sequence in sequences:
            self._service.preempt(sequence, now)
            sequence.limit_tokens()
        self._queue.put_back([sequence.waiting() for sequence in sequences])


def _heeding(counters: FlowCounters | None, decisions: DecisionLoop, steps: bool) -> OnMade:
    """Counts the tokens of each flow, and asks after each step, where the policy wants it."""

    def on_made(running: Running, tokens: int) -> None:
        if counters is not None:
            counters.made(running.request.flow, tokens)
        if steps:
            decisions.ask_soon()

    return on_made


def _has_prediction(engine_request: EngineRequest) -> bool:
    return engine_request.request.predicted_output_tokens is not None


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
