"""The wait estimate that a request gets when it arrives, and how right it was.

The estimate is the law of what stands before it (`queueing.control.wait_ahead`; under an order of
service `server.admission.waits_in_order`): service times by the live model where it has looked at
this policy, by what was seen where not. It is written on the sequence at its arrival and compared
with the delay at its dispatch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import Counter

from kendall.policies import Fixed, Request, is_first_come
from kendall.queueing.control.wait_ahead import (
    BatchService,
    SlotService,
    Wait,
    WaitForFormation,
    WaitLaw,
    batch_formation,
)
from kendall.queueing.measurement.record import Record
from kendall.queueing.result import Quantity
from kendall.server.admission.host import AdmissionHost
from kendall.server.admission.objectives import AT_ONCE
from kendall.server.admission.service_seen import ServiceSeen
from kendall.server.admission.waits_in_order import WaitsInOrder
from kendall.server.queue.sequence import Batch
from kendall.server.telemetry.cost.instruments import Histogram

if TYPE_CHECKING:
    from kendall.server.queue.batcher import Batcher
    from kendall.server.queue.sequence import SequenceState

RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
SHORT = 0.001  # seconds: ratios of shorter waits say nothing
# seconds for which an answer is given again: under overload the same question comes thousands of
# times a second
FRESH = 0.001
WALKED = 100  # places that are told their waits then, under an order other than of arrival
EVERY = 1.0  # seconds between two looks at the queue, for those who listen to their place in it
Listener = Callable[[int, float | None], None]  # its place, and the mean wait in seconds


class Waits:
    """Estimates waits, and compares the estimates with the delays observed."""

    def __init__(self, gateway: AdmissionHost) -> None:
        self._gateway = gateway
        self._seen = ServiceSeen()
        self._in_order = WaitsInOrder(gateway)
        self.joined = self._in_order.on_arrival  # a request stands in the queue
        # question, instant, answer
        self._last: tuple[tuple[int, int, int], float, WaitLaw | None] | None = None
        registry = gateway.metrics.registry
        self._predicted = Counter(
            "kendall_wait_predicted_seconds",
            "Sum of the waits predicted at arrival, over dispatched requests",
            registry=registry,
        )
        self._observed = Counter(
            "kendall_wait_observed_seconds",
            "Sum of the queueing delays, over dispatched requests with a predicted wait",
            registry=registry,
        )
        help_text = (
            "Queueing delay divided by the wait predicted at arrival, where either exceeds 1 ms"
        )
        self._ratio = Histogram(
            "kendall_wait_observed_over_predicted",
            help_text,
            registry=registry,
            buckets=(*RATIOS, math.inf),
        )

    def begin_epoch(self) -> None:
        """Another policy, limit, law or engine."""
        self._last = None
        self._seen.begin_epoch()

    # estimates and observations

    def on_arrival(self, sequence: SequenceState) -> None:
        """Estimate its wait: it stands in the queue already."""
        request = sequence.engine_request.request
        place = self._gateway.batcher.place_of(request) - 1
        found = self.wait(place, joining=0, request=request)
        sequence.wait_estimate = (
            place,
            None if found is None or not math.isfinite(mean := found.mean) else mean,
        )

    def on_dispatch(self, batch: Batch) -> None:
        """Compare."""
        self._last = None
        self._seen.on_dispatch(batch)
        at = batch.dispatched_at
        for sequence in batch.sequences:
            if (
                sequence.wait_estimate is not None
                and not sequence.preemptions
                and (wait := sequence.wait_estimate[1]) is not None
            ):
                delay = at - sequence.engine_request.request.arrived_at
                if wait > SHORT or delay > SHORT:
                    self._predicted.inc(wait)
                    self._observed.inc(delay)
                    self._ratio.observe(delay / max(wait, SHORT))

    def on_idle(self, server_id: int, at: float) -> None:
        """A batch is over."""
        self._last = None
        self._seen.on_idle(server_id, at)

    def on_record(self, record: Record) -> None:
        """A service time."""
        gateway = self._gateway
        self._seen.on_record(record, gateway.now(), somebody_waits=gateway.batcher.queue_length > 0)
        self._in_order.on_record(record)

    # the estimate

    def service(self) -> BatchService | SlotService | None:
        """What is known of service under the policy in force; None before anything is."""
        gateway = self._gateway
        batcher = gateway.batcher
        if gateway.live is not None and gateway.live.ahead is not None:
            return gateway.live.ahead
        size, servers = gateway.batcher.effective_max_batch_size, batcher.capabilities.servers
        return (
            self._seen.slots(size * servers)
            if batcher.policy.joins_running
            else self._seen.batches(size, servers)
        )

    def wait(self, place: int, *, joining: int, request: Request | None = None) -> WaitLaw | None:
        """Of one with `place` requests before it; `joining`: how many more will stand in the
        queue than do now. Under another order than that of arrival its place alone does not tell:
        None without the request.
        """
        batcher, now = self._gateway.batcher, self._gateway.now()
        if not is_first_come(batcher.policy):
            service = self.service() if request is not None else None
            if request is None or service is None:
                return None
            return self._in_order.wait(request, place, service)
        question = place, joining, (in_service := batcher.in_service)
        if self._last is not None and self._last[0] == question and now - self._last[1] < FRESH:
            return self._last[2]
        if batcher.policy.joins_running and self._slot_is_free(batcher, place, in_service):
            return AT_ONCE  # nearly always below saturation
        service = self.service()
        if isinstance(service, SlotService):
            found: WaitLaw | None = service.wait(place, in_service)
        else:
            found = None if service is None else self._batch_wait(service, place, joining, now)
        self._last = question, now, found
        return found

    def _slot_is_free(self, batcher: Batcher, place: int, in_service: int) -> bool:
        """Whether a continuous engine takes it at once, though its law may be of fewer slots.
        False where nothing is known of service.
        """
        live = self._gateway.live
        if (live is None or live.ahead is None) and not self._seen.any_slot:
            return False
        slots = batcher.effective_max_batch_size * batcher.capabilities.servers
        return place < slots - in_service

    def _batch_wait(self, service: BatchService, place: int, joining: int, now: float) -> WaitLaw:
        batcher = self._gateway.batcher
        found = service.wait(place, self._seen.in_service(now))
        if not isinstance(batcher.policy, Fixed):
            return found
        left = math.inf
        if batcher.policy.max_wait < math.inf:
            first = place // service.largest * service.largest
            oldest = (
                batcher.waiting[first].request.arrived_at if first < batcher.queue_length else now
            )
            left = oldest + batcher.policy.max_wait - now
        rate = self._gateway.live_model().activity.sequence_rate()
        formation = batch_formation(
            place, batcher.queue_length + joining, service.largest, rate, left
        )
        return found if formation is None else WaitForFormation(found, formation)

    def until_gone(self, count: int) -> float | None:
        """Mean seconds until `count` of those in the system have left it."""
        service = self.service()
        if service is None:
            return None
        if isinstance(service, SlotService):
            return service.until_gone(count)
        return service.until_gone(count, self._seen.in_service(self._gateway.now()))

    def until_idle(self) -> float | None:
        """Mean seconds until everything that is in the system now has left it."""
        batcher, service = self._gateway.batcher, self.service()
        if isinstance(
            service, SlotService
        ):  # what waits leaves at the rate of full slots, the last one a slot time later
            return (batcher.queue_length + service.slots) / service.throughput
        return self.until_gone(batcher.unanswered)

    def after(self, quantity: Quantity) -> Wait | None:
        """Of a duration, what follows the wait; of one that does not begin with it, all. None
        before a request was served.
        """
        if quantity == "queueing_delay":
            return AT_ONCE
        if quantity == "time_to_first_token":
            return Wait(self.first_token())
        return self._seen.law(quantity)

    def first_token(self) -> float:
        """Mean seconds from the dispatch to the first token; 0 where that is not known.

        What was seen goes before the live model, which knows it for the largest batch only.
        """
        if (seen := self._seen.first_token) is not None:
            return seen
        service = self.service()
        return 0.0 if service is None else service.first_token


class Places:
    """Reports places in the queue to listeners: one walk through the queue a second, however many
    listen.
    """

    def __init__(self, gateway: AdmissionHost, waits: Waits | None) -> None:
        self._gateway = gateway
        self._waits = waits
        self._listeners: dict[str, Listener] = {}
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, request_id: str, listener: Listener) -> None:
        """From the next walk on."""
        self._listeners[request_id] = listener
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._walk)

    def forget(self, request_id: str) -> None:
        """It does not wait any more."""
        self._listeners.pop(request_id, None)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _walk(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._walk)
        for place, waiting in enumerate(self._gateway.batcher.waiting):
            listener = self._listeners.get(waiting.request.id)
            if listener is not None:
                wait = self._wait(place, waiting.request)
                listener(place, None if wait is None else wait.mean)

    def _wait(self, place: int, request: Request) -> WaitLaw | None:
        """Under an order of its own an estimate takes a good part of a millisecond: only of the
        first `WALKED`.
        """
        waits = self._waits
        if waits is None or (place >= WALKED and not is_first_come(self._gateway.batcher.policy)):
            return None
        return waits.wait(place, joining=0, request=request)
