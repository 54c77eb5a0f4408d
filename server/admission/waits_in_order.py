"""Wait estimates under an order of service: what ranks before the request now, and what arrived of
late stands for what will overtake it (`queueing.control.wait_in_order`).

Under `single` and `continuous`, for orders that keep the queue sorted and interrupt nobody. Else
there is no estimate: how long a request waits that may be interrupted again depends on what comes
after its start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np

from kendall.policies import Policy, Request, Running, Waiting
from kendall.policies.ordered import order_of
from kendall.policies.orders.order import Order, predicted_tokens
from kendall.queueing.control.predicted_lengths import PredictedLengths
from kendall.queueing.control.wait_ahead import BatchService, Pace, SlotService, Wait
from kendall.queueing.control.wait_in_order import (
    MANY,
    OvertakingArrivals,
    PlaceInOrder,
    RandomDraws,
    SampledWait,
)
from kendall.queueing.measurement.record import Record
from kendall.server.admission.host import AdmissionHost

SAMPLED = 4096  # arrivals of late: the load of those who overtake enters as 1 / (1 - load)
SEED = 0
SAMPLED_AHEAD = 32  # of many that rank before


class WaitsInOrder:
    """Learns from arrivals and records; asked for one request at a time."""

    def __init__(self, gateway: AdmissionHost) -> None:
        self._gateway = gateway
        self._numbers = RandomDraws(np.random.default_rng(SEED))
        self._lengths = PredictedLengths()
        self._arrived: deque[Request] = deque()
        # of them: rank of one that arrives now, and its tokens, as they may be
        self._sampled: list[tuple[float, float]] = []
        self._in_order: deque[tuple[float, float]] = deque()  # the same, in order of arrival
        self._policy: Policy | None = None  # whose ranks these are
        self._in_force: Policy | None = None  # when last looked at, and whether it is estimated
        self._estimated = False

    def on_arrival(self, request: Request) -> None:
        """One of those who overtake others, where any do."""
        policy = self._gateway.batcher.policy
        if not (self._estimated if policy is self._in_force else self._is_estimated(policy)):
            if self._arrived:
                self._forget()
            return
        if len(self._arrived) == SAMPLED:
            self._arrived.popleft()
        self._arrived.append(request)
        if not self._current():
            return
        if len(self._in_order) == SAMPLED:
            del self._sampled[bisect_left(self._sampled, self._in_order.popleft())]
        self._in_order.append(ranked := self._ranked(request))
        insort(self._sampled, ranked)

    def _is_estimated(self, policy: Policy) -> bool:
        if policy is not self._in_force:
            self._in_force, self._estimated = policy, is_estimated(policy)
        return self._estimated

    def _forget(self) -> None:
        self._arrived.clear()
        self._in_order.clear()
        self._sampled.clear()
        self._policy = None

    def on_record(self, record: Record) -> None:
        """How its prediction came true."""
        limit, tokens = record.max_output_tokens, record.output_tokens
        if record.outcome == "completed" and limit and tokens:
            predicted = record.predicted_output_tokens
            self._lengths.add(limit if predicted is None else min(predicted, limit), tokens)

    def wait(
        self, request: Request, place: int, service: BatchService | SlotService
    ) -> Wait | SampledWait | None:
        """Of one with `place` requests before it; None: not under this policy, or the pace of
        service is not known.
        """
        batcher, pace = self._gateway.batcher, service.pace
        order, slots = order_of(batcher.policy), _slots(self._gateway)
        if not self._is_estimated(batcher.policy) or pace is None:
            return None
        self._rank_anew()
        in_service = [each for server in batcher.running() for each in server]
        if len(in_service) + place < slots:
            return Wait(0.0)
        shift = _moves(order) * self._gateway.now()
        before, ahead = self._ahead(place, pace, order, slots)
        in_order = PlaceInOrder(
            rank=order.rank(request, 0) - shift,
            slots=slots,
            left=[self._left(each, pace) for each in in_service[:slots]],
            ahead=[(rank - shift, seconds) for rank, seconds in ahead],
            before=before,
        )
        rate = self._gateway.live_model().activity.sequence_rate()
        arrivals = OvertakingArrivals(
            rate=rate, sampled=self._sampled, pace=pace, moves=_moves(order)
        )
        return in_order.wait(arrivals, self._numbers)

    # what stands before it

    def _left(self, running: Running, pace: Pace) -> Sequence[float]:
        """Half of a step is over on average."""
        made = running.output_tokens_so_far
        tokens = self._lengths.left(predicted_tokens(running.request), made)
        if made:
            return [pace.step * max(0.0, left - 0.5) for left in tokens]
        setup = max(0.0, pace.setup - (self._gateway.now() - running.started_at))
        return [setup + pace.step * left for left in tokens]

    def _ahead(
        self, place: int, pace: Pace, order: Order, slots: int
    ) -> tuple[float, list[tuple[float, Sequence[float]]]]:
        """Of many, the work that each slot has to do before the last of them, from some."""
        waiting, first = self._gateway.batcher.waiting, 0
        before = 0.0
        if place > MANY:
            first = place - SAMPLED_AHEAD
            some = waiting[: first : 1 + first // SAMPLED_AHEAD]
            seconds = [self._service(each, pace) for each in some]
            mean = sum(sum(each) / len(each) for each in seconds) / len(seconds)
            before = mean * first / slots
        ahead = [
            (order.rank(each.request, each.output_tokens_so_far), self._service(each, pace))
            for each in waiting[first:place]
        ]
        return before, ahead

    def _service(self, waiting: Waiting, pace: Pace) -> Sequence[float]:
        predicted, made = predicted_tokens(waiting.request), waiting.output_tokens_so_far
        return [pace.seconds(left) for left in self._lengths.left(predicted, made)]

    # what arrived of late, in the order of the policy in force

    def _current(self) -> bool:
        policy = self._gateway.batcher.policy
        return self._policy is policy and self._is_estimated(policy)

    def _rank_anew(self) -> None:
        if not self._current():
            self._policy = self._gateway.batcher.policy
            self._in_order = deque(map(self._ranked, self._arrived))
            self._sampled = sorted(self._in_order)

    def _ranked(self, request: Request) -> tuple[float, float]:
        order = order_of(self._gateway.batcher.policy)
        tokens = self._numbers.one_of(self._lengths.left(predicted_tokens(request)))
        return order.rank(request, 0) - _moves(order) * request.arrived_at, tokens


def is_estimated(policy: Policy) -> bool:
    """Whether waits are estimated under the policy's order."""
    order = order_of(policy)
    return bool(getattr(policy, "interrupts", False) and order.ranked and not order.preemptive)


def _moves(order: Order) -> float:
    """1 where who arrives later ranks later by as many seconds."""
    return float(order.rises)


def _slots(gateway: AdmissionHost) -> int:
    return gateway.batcher.effective_max_batch_size * gateway.batcher.capabilities.servers
