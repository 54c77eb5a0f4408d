"""Event-driven simulation: the same policy objects that drive the live gateway, on exact instants.

The driver's clock is the instant of the event. Events at one instant come in this order:
completions (by server), arrivals, cancellations, ends of patience, switches of policy, deaths of
the engine, restarts, other servers, the timer of the last `WaitUntil`. After each the policy is
asked, and again at once after every `Dispatch`. The sequences of one call (ids CALL-0, CALL-1, ...
at one instant) are one arrival. The queue stands in the order of the policy; a preempted request
goes back into it with its tokens. After a switch, a server that still holds work of the old policy
is not offered to the new one until it is empty. The queue closes with the last arrival. A record's
policy and epoch are those of its dispatch (of its end, where it never started). Chance enters
through the residuals only: one generator per server.

A death takes all servers until a restart is over. What was in service keeps its place and continues
behind its tokens, batch by batch, before the policy is asked again; a job that is not `resumable`
fails, once it has made a token. Not modelled: the gateway's search for a request that kills engines
(server.queue.poison), and answers that are made again from the start.

Servers that are added take work at once; those that are removed end what they have. Either begins
an epoch.

A call with which more sequences than `max_num_queued_reqs` would be waiting or in service is
rejected whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kendall.policies.core import (
    UNBOUNDED,
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Request,
    Server,
    Waiting,
)
from kendall.policies.decision import DecisionError, check_once, decide
from kendall.policies.ordered import counts, order_of, wants_steps
from kendall.policies.text import counted, format_policy
from kendall.policies.waiting_queues import moved, queue_for
from kendall.queueing.errors import PredictionError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import ServiceProcess
from kendall.queueing.latency.slots.token_gaps import GapCounter
from kendall.queueing.measurement.record import Outcome, Record, call_of
from kendall.queueing.simulation.driven_engine import DrivenEngine, remaining_member
from kendall.queueing.simulation.ledger import (
    NO_STINTS,
    ServedBatch,
    Started,
    Stints,
    ended,
    formed_at,
    lost,
    stopped,
)

MOST_WAKE_UPS = 10_000  # of a policy between two other events


@dataclass(frozen=True, slots=True)
class Job:
    """A request and what no policy may see: its true output length."""

    request: Request
    output_tokens: int
    resumable: bool = True  # can be continued exactly: may be preempted, and survives its engine


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The law that each server obeys, and the bounds on its batches.

    step_tokens that a continuous one computes in one step, at most
    speeds     of each server, how many times as long as the law's its times are (all 1)
    deaths     when all of them die: instants, and seconds until others serve
    in_use     which servers take work from an instant on; at 0 from the beginning, and all of them
               where nothing is said of that
    max_num_queued_reqs  sequences waiting or in service on all servers together
    gaps       what counts the gaps between tokens
    """

    law: LatencyModel
    max_batch_size: int = 2**31
    max_prompt_tokens: int = 2**31
    max_context_tokens: int = 2**62
    step_tokens: int = 2**62
    pad_prompts: bool = False
    speeds: Sequence[float] = ()
    deaths: Sequence[tuple[float, float]] = ()
    in_use: Sequence[tuple[float, Collection[int]]] = ()
    max_num_queued_reqs: int = UNBOUNDED
    gaps: GapCounter | None = None

    def driven(self, server_id: int, rng: np.random.Generator) -> DrivenEngine:
        """One server of them, which takes its residuals from `rng`."""
        bounds = (self.max_batch_size, self.max_prompt_tokens, self.max_context_tokens)
        pace = self.speeds[server_id] if self.speeds else 1.0
        law = self.law.at_speed(self.law.speed * pace)
        return DrivenEngine(
            Server(server_id, [], *bounds),
            partial(
                ServiceProcess,
                law,
                rng,
                pad_prompts=self.pad_prompts,
                step_tokens=self.step_tokens,
                gaps=self.gaps,
            ),
        )


def simulate_trace(
    policy: Policy,
    jobs: Sequence[Job],
    engine: SimulatedEngine,
    rngs: Sequence[np.random.Generator],
    *,
    cancellations: Mapping[str, float] | None = None,
    switches: Sequence[tuple[float, Policy]] = (),
) -> list[Record]:
    """Simulate the jobs (in order of arrival) on one server for each of `rngs`: a record per job,
    in the order in which they end.
    """
    engines = [engine.driven(i, rng) for i, rng in enumerate(rngs)]
    first = next((servers for at, servers in engine.in_use if at <= 0), None)
    most = engine.max_num_queued_reqs
    driver = Driver(policy, jobs, engines, in_use=first, max_num_queued_reqs=most)
    for at, seconds in engine.deaths:
        driver.plan(at, _DEATH, seconds)
    for at, servers in engine.in_use:
        if at > 0:
            driver.use(at, servers)
    for request_id, at in (cancellations or {}).items():
        driver.plan(at, _CANCELLATION, request_id)
    for at, successor in switches:
        driver.plan(at, _SWITCH, successor)
    return driver.run()


_CLOSE, _CANCELLATION, _PATIENCE, _SWITCH, _DEATH, _RESTART, _SERVERS = range(7)
_Planned = str | float | Policy | frozenset[int]


class Driver:
    """One queue and its servers. `open_ended`: more jobs are added while it runs, until `close`."""

    def __init__(
        self,
        policy: Policy,
        jobs: Sequence[Job],
        engines: list[DrivenEngine],
        *,
        open_ended: bool = False,
        in_use: Collection[int] | None = None,
        max_num_queued_reqs: int = UNBOUNDED,
    ) -> None:
        self.jobs, self.engines, self.open_ended = list(jobs), engines, open_ended
        self.max_num_queued_reqs = max_num_queued_reqs
        self.queue = queue_for(policy)
        self._govern(policy)
        self.down = False  # a dead engine is being started again
        self.records: list[Record] = []
        self.epoch = self.batches = self.arrived = 0
        self.timer = math.inf
        self.wake_ups, self.last_event = 0, (0, 0, 0)
        self.agenda: list[tuple[float, int, int, _Planned]] = []
        self.lengths = {job.request.id: job.output_tokens for job in jobs}
        self.fragile = {job.request.id for job in jobs if not job.resumable}
        self.running: dict[str, tuple[DrivenEngine, Started]] = {}
        self.stints: dict[str, Stints] = {}  # of those that were preempted
        every = (engine.view.id for engine in engines)
        self.in_use = frozenset(every if in_use is None else in_use)
        self._show()

    def plan(self, at: float, kind: int, what: _Planned) -> None:
        """Put an event on the agenda."""
        heapq.heappush(self.agenda, (at, kind, len(self.agenda), what))

    def close(self, at: float) -> None:
        """An open-ended one gets no more jobs after those that arrive at that instant."""
        self.plan(at, _CLOSE, "")

    def use(self, at: float, servers: Collection[int]) -> None:
        """From that instant on these servers take work, and no others."""
        self.plan(at, _SERVERS, frozenset(servers))

    def run(self) -> list[Record]:
        """Every event until nothing is left to happen."""
        self.advance(math.inf)
        if self.queue:
            raise PredictionError(
                f"got {counted(len(self.queue), 'request')} that policy {self.text} never "
                "dispatched; expected each to be dispatched: kendall check-policy finds the cause"
            )
        return self.records

    def advance(self, until: float) -> None:
        """Every event before that instant."""
        jobs, engines, agenda = self.jobs, self.engines, self.agenda
        while True:
            engine = engines[0] if len(engines) == 1 else min(engines, key=_changes_at)
            arrival = (
                jobs[self.arrived].request.arrived_at if self.arrived < len(jobs) else math.inf
            )
            planned = agenda[0][0] if agenda else math.inf
            now = min(engine.changes_at, arrival, planned, self.timer)
            if now >= until:
                return
            if engine.changes_at == now:
                self._complete(engine, now)
            elif arrival == now:
                self._arrive(now)
            elif planned == now:
                self._carry_out(now)
            else:
                self._wake_up(now)
            self._ask(now)

    def _wake_up(self, now: float) -> None:
        """The instant that the policy named has come. Raises PredictionError where it names
        instants without end.
        """
        event = self.arrived, len(self.records), self.batches
        self.wake_ups = self.wake_ups + 1 if event == self.last_event else 1
        self.last_event = event
        if self.wake_ups > MOST_WAKE_UPS:
            raise PredictionError(
                f"policy {self.text} asked {MOST_WAKE_UPS:,} times to be woken, until {now:g} s, "
                "and nothing happened in between; expected a dispatch, or WaitUntil(math.inf)"
            )

    def _arrive(self, now: float) -> None:
        if self.queue.counters is not None:  # a flow that joins is lifted to a counter
            self._count_tokens(now)
        call = self._next_call()
        self.arrived += len(call)
        admitted = self._has_room_for(len(call))
        for request in call:
            if not admitted:
                self.records.append(lost(request, "rejected", now, self.text, self.epoch))
                continue
            self.queue.append(Waiting(request))
            if request.deadline < math.inf:
                self.plan(request.deadline, _PATIENCE, request.id)
        if self.arrived == len(self.jobs) and not self.open_ended:
            self._show()

    def _next_call(self) -> list[Request]:
        """The next request to arrive, with those of the same call."""
        first, behind = self.jobs[self.arrived].request, self.arrived + 1
        while behind < len(self.jobs) and of_one_call(first, self.jobs[behind].request):
            behind += 1
        return [job.request for job in self.jobs[self.arrived : behind]]

    def _has_room_for(self, sequences: int) -> bool:
        if self.max_num_queued_reqs == UNBOUNDED:
            return True
        in_service = sum(not started.has_left for _, started in self.running.values())
        return len(self.queue) + in_service + sequences <= self.max_num_queued_reqs

    def _show(self) -> None:
        """Renew what the policy sees: the views in it are live, only the offer of servers and
        `closing` change.
        """
        offered = [
            engine.view
            for engine in self.engines
            if engine.view.id in self.in_use
            and (not engine.in_service or engine.policy is self.policy)
        ]
        self.withheld = len(offered) < len(self.in_use)
        counters = self.queue.counters
        virtual_tokens = {} if counters is None else counters.virtual_tokens
        closing = self.arrived == len(self.jobs) and not self.open_ended
        self.state = QueueState(self.queue, offered, {}, closing, virtual_tokens)

    def _ask(self, now: float) -> None:
        if self.down:
            self.timer = math.inf
            return
        dispatched: set[str] = set()
        while True:
            if self.looks_at_tokens:
                self._count_tokens(now)
            try:
                decision = decide(self.policy, self.state, now)
                if isinstance(decision, Dispatch):
                    check_once(self.text, decision, dispatched)
            except DecisionError as error:
                raise PredictionError(str(error)) from error
            if isinstance(decision, Dispatch):
                self._dispatch(decision, now)
            elif isinstance(decision, Preempt):
                self._preempt(decision, now)
            else:
                self.timer = decision.deadline
                return

    def _dispatch(self, decision: Dispatch, now: float) -> None:
        policy, engine = self.policy, self.engines[decision.server_id]
        taken = self.queue.take(decision.request_ids)
        size = len(taken) + (len(engine.in_service) if policy.joins_running else 0)
        formed = formed_at(policy, taken, engine.view.max_batch_size, now)
        batch = ServedBatch(
            id=self.batches,
            size=size,
            server_id=engine.view.id,
            at=now,
            policy=policy,
            policy_text=self.text,
            epoch=self.epoch,
            formed_at=formed,
        )
        self.batches += 1
        members = []
        for waiting in taken:
            request = waiting.request
            made = waiting.output_tokens_so_far
            before = self.stints.pop(request.id, NO_STINTS)
            length, last = self.lengths[request.id], before.last_token_at
            member = remaining_member(request, made, length, last)
            started = Started(
                request,
                now,
                made,
                preemptible=request.id not in self.fragile,
                preemptions=before.preemptions,
                member=member,
                batch=batch,
                before=before,
            )
            members.append(member)
            engine.in_service.append(started)
            self.running[request.id] = engine, started
        engine.policy = policy
        engine.process.admit(now, members, padded=policy.padded, joining=policy.joins_running)
        engine.changes_at = self._next_change(engine)

    def _preempt(self, decision: Preempt, now: float) -> None:
        """Out of their engines, and back into the queue with what they have."""
        back = []
        for request_id in decision.request_ids:
            engine, started = self.running.pop(request_id)
            engine.process.remove(request_id, now)
            started.count_tokens(self.queue.counters)
            engine.in_service.remove(started)
            engine.changes_at = self._next_change(engine)
            self.stints[request_id] = stints = stopped(started, now)
            back.append(Waiting(started.request, stints.output_tokens))
        self.queue.put_back(back)

    def _count_tokens(self, now: float) -> None:
        """How far those in service are, for an order that ranks by it or counts what is made."""
        for engine in self.engines:
            engine.count_tokens(now, self.queue.counters)

    def _next_change(self, engine: DrivenEngine) -> float:
        process = engine.process
        if process.idle:
            return math.inf
        return process.next_step_at() if self.wants_steps else process.next_change_at()

    def _complete(self, engine: DrivenEngine, now: float) -> None:
        if self.wants_steps and engine.process.next_step_at() > now:
            self._settle(engine, now)  # its tokens were counted with a step of another server
            return
        for member in engine.process.advance(to_change=not self.wants_steps):
            started = self.running[member.id][1]
            started.ended_at = now
            if started.batch.policy.joins_running:
                self._leave(engine, started, now, now)
                if not self.asked_later:  # else once, when all have their tokens of this step
                    self._ask(now)
        self._settle(engine, now)

    def _settle(self, engine: DrivenEngine, now: float) -> None:
        """Close the batch when the engine is empty; in any case learn when it changes next."""
        if engine.finished:
            engine.changes_at = math.inf
            for started in tuple(engine.in_service):
                together = started.batch.policy.release == "batch" or started.ended_at is None
                self._leave(engine, started, now if together else started.ended_at, now)
            if self.withheld:
                self._show()
            return
        engine.changes_at = self._next_change(engine)
        if self.wants_steps:
            for started in engine.in_service:
                started.count_tokens(self.queue.counters)

    def _leave(
        self,
        engine: DrivenEngine,
        started: Started,
        released_at: float | None,
        free_at: float | None,
        outcome: Outcome = "completed",
    ) -> None:
        started.count_tokens(self.queue.counters)
        engine.in_service.remove(started)
        del self.running[started.request.id]
        self.records.append(ended(started, outcome, released_at, free_at))

    def _carry_out(self, now: float) -> None:
        _, kind, _, what = heapq.heappop(self.agenda)
        if kind == _CLOSE:
            self.open_ended = False
            self._show()
        elif isinstance(what, str):
            self._drop(what, now, "cancelled" if kind == _CANCELLATION else "abandoned")
        elif kind == _RESTART:
            self.down = False
            for engine in self.engines:
                engine.resume(now, self.lengths)
                engine.changes_at = self._next_change(engine)
        elif isinstance(what, float | int):
            self._lose_engines(now, what)
        elif isinstance(what, frozenset):
            self.in_use, self.epoch = what, self.epoch + 1
            self._show()
        else:
            self._switch(what, now)

    def _switch(self, policy: Policy, now: float) -> None:
        self._count_tokens(now)  # the next step is asked for, not one that is over
        self._govern(policy)
        self.epoch += 1
        self.queue = moved(self.queue, queue_for(policy))
        for engine in self.engines:
            engine.changes_at = self._next_change(engine)
        self._show()

    def _govern(self, policy: Policy) -> None:
        self.policy, self.text = policy, format_policy(policy)
        self.wants_steps = wants_steps(policy)
        preemptive = order_of(policy).preemptive
        # one that frees too little memory must not have another preempted that ends in its step
        bounded = any(engine.view.max_context_tokens < UNBOUNDED for engine in self.engines)
        self.asked_later = self.wants_steps or counts(policy) or (preemptive and bounded)
        self.looks_at_tokens = preemptive or counts(policy)

    def _lose_engines(self, now: float, seconds: float) -> None:
        """All servers at once; one that is being started again is not lost a second time."""
        if self.down:
            return
        self.down = True
        self._count_tokens(now)
        for engine in self.engines:
            for started in engine.die():
                if started.request.id in self.fragile and started.output_tokens_so_far:
                    self._leave(engine, started, None, None, "failed")
            self._settle(engine, now)
        self.plan(now + seconds, _RESTART, seconds)

    def _drop(self, request_id: str, now: float, outcome: Outcome) -> None:
        """Patience is for the wait before service: it does not run out after a preemption."""
        if outcome == "abandoned" and request_id in self.stints:
            return
        waiting = self.queue.remove(request_id)
        if waiting is not None:
            stints = self.stints.pop(request_id, NO_STINTS)
            self.records.append(
                lost(waiting.request, outcome, now, self.text, self.epoch, stints=stints)
            )
        elif outcome == "cancelled" and request_id in self.running:
            engine, started = self.running[request_id]
            if started.has_left:
                return
            engine.process.remove(request_id, now)
            self._leave(engine, started, now, None, outcome)
            self._settle(engine, now)


def of_one_call(request: Request, following: Request) -> bool:
    """Whether both are sequences of one call, which arrive together."""
    return (
        following.arrived_at == request.arrived_at
        and call_of(request.id) == call_of(following.id) is not None
    )


def _changes_at(engine: DrivenEngine) -> float:
    return engine.changes_at
