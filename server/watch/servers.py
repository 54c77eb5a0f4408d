"""Watched servers in place of a gateway: what the live model reads of them, and the law, the slots
and the number of servers that follow from their spans.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from kendall.policies.core import UNBOUNDED
from kendall.policies.orders.order import Order
from kendall.queueing.estimation.routing import Routing
from kendall.queueing.estimation.served_times import ObservedLaw, ServedTimes
from kendall.queueing.latency.profile import load_law
from kendall.queueing.measurement.record import Record
from kendall.server.admission.limits_in_force import LimitsInForce
from kendall.server.admission.settings import OverloadSettings
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.engines.capabilities import UNKNOWN_TOKENS, Capabilities
from kendall.server.live.model import LiveModel
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from kendall.server.supervision.lifecycle import EngineState
from kendall.server.telemetry.metrics import Metrics
from kendall.server.watch.fleet import Fleet, ServedRequest
from kendall.server.watch.options import WatchedQueueOptions

log = logging.getLogger("kendall.watch")
FIRST_LAW = (
    120  # requests, after which a law is fitted; again each time that there are twice as many
)
MOST_SLOTS = 1024
WATCHED = "watched"  # in place of an engine and its model, which spans do not name
LARGER = 4  # times the slots that are there, which what-ifs and advice may try


@dataclass(slots=True)
class WatchedQueue:
    """The servers' queues, taken as one of `servers` servers. A request is known when it has ended:
    of those that wait or are in service nothing is.
    """

    capabilities: Capabilities
    policy_text: str
    servers: int = 1
    epoch: int = 0
    queue_length: ClassVar[int] = 0
    in_service: ClassVar[int] = 0
    unanswered: ClassVar[int] = 0
    failures: ClassVar[Mapping[str, int]] = {}

    @property
    def servers_in_use(self) -> range:
        """Their numbers."""
        return range(self.servers)

    def unanswered_sequences(self) -> Iterable[SequenceState]:
        """None."""
        return ()

    def running(self) -> Sequence[Sequence[object]]:
        """Of each server."""
        return [()] * self.servers

    def in_service_sequences(self) -> Sequence[Sequence[SequenceState]]:
        """Of each server."""
        return [()] * self.servers

    def rank_by(self, ranking: Order) -> None:
        """The order is the servers' own."""


class WatchedLimits(LimitsInForce):
    """Those of the servers, which nobody here can change."""

    def __init__(self, queue: WatchedQueue, metrics: Metrics) -> None:
        super().__init__(queue.policy_text, None, None, metrics)
        self._watched = queue
        self.policies = [each for each in self.policies if each["name"] == "continuous"]

    def state(self) -> dict[str, Any]:
        """Now."""
        queue = self._watched
        return {
            "policy": queue.policy_text,
            "effective_max_batch_size": int(queue.policy_text.rpartition("=")[2]),
            "padded": False,
            "max_output_tokens": None,
            "patience": None,
            "epoch": queue.epoch,
        }


@dataclass(slots=True)
class Lifetime:
    """Of the command."""

    started: bool = False  # spans have come
    leaving: bool = False
    reason: ClassVar[str | None] = None

    @property
    def ready(self) -> bool:
        """Whether there are servers that serve."""
        return self.started

    @property
    def draining(self) -> bool:
        """Whether nothing more is to be seen."""
        return self.leaving

    @property
    def state(self) -> EngineState:
        """As the page shows it."""
        return EngineState.SERVING if self.started else EngineState.STARTING


class Nothing:
    """Of what a gateway has and watched servers do not show: restarts and rejections."""

    restarts = 0

    @property
    def rejections(self) -> Nothing:
        """None."""
        return self

    def by_reason(self) -> Mapping[str, float]:
        """None."""
        return {}


@dataclass(slots=True)
class WatchedServers:
    """The host of the live model. The clock is the end of the window."""

    asked: WatchedQueueOptions
    interval: float
    fleet: Fleet = field(default_factory=Fleet)
    metrics: Metrics = field(default_factory=Metrics)
    lifecycle: Lifetime = field(default_factory=Lifetime)
    law: ObservedLaw | None = None  # where it was fitted
    slots_from: str = "unknown"  # option | observed | unknown
    routing: Routing | None = None  # of several servers
    settings: Settings = field(init=False)
    latency: LatencyModelInForce = field(init=False)
    limits: WatchedLimits = field(init=False)
    batcher: WatchedQueue = field(init=False)
    live: LiveModel | None = None  # once the first spans are here
    supervisor: Nothing = field(default_factory=Nothing)
    overload: Nothing = field(default_factory=Nothing)
    length_predictor: ClassVar[None] = None
    servers: ClassVar[None] = None
    proxying: ClassVar[None] = None
    _clock: float = 0.0
    _epoch_from: float = 0.0
    _learnt: bool = False
    _law_at: int = FIRST_LAW  # requests

    def __post_init__(self) -> None:
        slots = self.asked.max_num_seqs
        self.slots_from = "unknown" if slots is None else "option"
        policy = _policy(slots or 1)
        self.settings = Settings(
            policy=policy,
            prediction_interval=self.interval,
            what_if_interval=max(30.0, self.interval),
            overload=OverloadSettings(slo=self.asked.slo),
        )
        given = self.asked.latency
        self.latency = LatencyModelInForce(None if given is None else load_law(given))
        self.batcher = WatchedQueue(_capabilities(slots or 1, 1), policy)
        self.limits = WatchedLimits(self.batcher, self.metrics)
        self.metrics.serves(self.batcher.capabilities.engine, WATCHED)
        self.metrics.switched(policy, None, self.batcher.epoch, changed_policy=False)

    @property
    def now(self) -> Callable[[], float]:
        """The end of the window, on the receiver's clock."""
        return lambda: self._clock

    def live_model(self) -> LiveModel:
        """Raises ApiError 503 before there are spans."""
        if self.live is None:
            raise ApiError(503, "no_spans", "no spans of requests have come yet", retry_after=10)
        return self.live

    @property
    def ready(self) -> bool:
        """Whether the law and the slots are known, and there is something to assess."""
        learnt = self.law is not None or (self.asked.latency is not None and self._learnt)
        known = self.asked.latency is not None and self.slots_from == "option"
        return self.live is not None and (learnt or known)

    @property
    def requests(self) -> int:
        """That arrived before the end of the window, so far."""
        return self.fleet.known

    async def advance(self, now: float, *, last: bool = False) -> None:
        """Take in what has come until now; fit the law where there is enough, or where this is the
        last time.
        """
        new, servers = self.fleet.advance(now)
        if not math.isfinite(self.fleet.end):
            return
        if self.live is None:
            self._clock = self._epoch_from = min(self.fleet.begin, self.fleet.end)
            self.live = LiveModel(self, self.batcher.capabilities)
            self.lifecycle.started = True
        for each in self._feed(new):
            self.metrics.on_watched(each)
        self._clock = max(self._clock, self.fleet.end)
        if servers != self.batcher.servers:
            self._begin_epoch(self._slots, servers, self._clock)
        if self.requests >= self._law_at or (last and not self.ready):
            self._law_at = max(2 * self.requests, FIRST_LAW)
            await self._learn(self.fleet.served_times())

    async def _learn(self, times: ServedTimes) -> None:
        self._learnt = True
        if self.slots_from != "option" and times.queued.size:
            known = times.slots()
            self.slots_from = "unknown" if known is None else "observed"
            slots = min(MOST_SLOTS, known or times.most_in_service())
            if slots != self._slots:
                self._begin_epoch(slots, self.batcher.servers, self._epoch_from)
        if len(self.fleet.replicas) > 1:
            here = [each.number for each in self.fleet.replicas.values() if not each.gone]
            seen = times.part(np.isin(times.server, here))
            self.routing = await self.live_model().ask("learn_routing", seen, self._slots)
            rule = self.routing.rule if self.routing is not None else "central"
            if rule != self.batcher.capabilities.routing:
                self._begin_epoch(self._slots, self.batcher.servers, self._epoch_from)
        if self.asked.latency is None:
            found: ObservedLaw | None = await self.live_model().ask("learn_law", times)
            if found is not None:
                self.law, self.latency = found, LatencyModelInForce(found.law)

    @property
    def _slots(self) -> int:
        return int(self.batcher.policy_text.rpartition("=")[2])

    def _begin_epoch(self, slots: int, servers: int, start: float) -> None:
        """With what arrived since then, under the setting that is known now."""
        end, self._clock, self._epoch_from = self._clock, start, start
        queue = self.batcher
        queue.policy_text, queue.servers = _policy(slots), servers
        queue.capabilities = _capabilities(
            slots, servers, "central" if self.routing is None else self.routing.rule
        )
        queue.epoch += 1
        self.metrics.switched(queue.policy_text, None, queue.epoch, changed_policy=False)
        self.live_model().begin_epoch(queue.epoch, carry_lengths=start == end)
        self._feed(self.fleet.since(start))
        self._clock = end
        log.info("epoch %d: policy %s, %d servers", queue.epoch, queue.policy_text, servers)

    def _feed(self, served: Sequence[ServedRequest]) -> list[Record]:
        """Returns their records under the setting in force."""
        live, queue = self.live_model(), self.batcher
        records = [
            msgspec.structs.replace(
                each.record, policy=queue.policy_text, epoch=queue.epoch, batch_size=number
            )
            for each, number in zip(served, self.fleet.in_service(served), strict=True)
        ]
        for record in records:
            live.on_watched(record)
        return records


def _policy(slots: int) -> str:
    return f"continuous:max_batch_size={slots}"


def _capabilities(slots: int, servers: int, routing: str = "central") -> Capabilities:
    return Capabilities(
        engine=WATCHED,
        model="",
        max_model_len=UNKNOWN_TOKENS,
        max_num_seqs=max(LARGER * slots, 64),
        max_num_batched_tokens=UNKNOWN_TOKENS,
        kv_cache_tokens=UNBOUNDED,
        eos_token_ids=frozenset(),
        vocab_size=0,
        pads=False,
        servers=servers,
        owns_queue=True,
        routing=routing,
    )
