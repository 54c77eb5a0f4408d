"""Replicas that make no token: each is watched as a single engine is, and replaced alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from kendall.policies import Running
from kendall.queueing.latency.law import LatencyModel
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.clock import clock_of
from kendall.server.supervision.progress import EVERY, StuckWatch, on_still
from kendall.server.supervision.replicas.pool import Replicas

log = logging.getLogger("kendall.supervision")


class OneServer:
    """What a `StuckWatch` reads of a queue, of one server alone."""

    def __init__(self, batcher: Batcher, server_id: int) -> None:
        self._batcher, self._server_id = batcher, server_id
        self.policy_failures, self.ask = batcher.policy_failures, batcher.ask

    @property
    def resting(self) -> bool:
        """Whether what it has waits for its engine, or it makes the gateway's own request."""
        trials = self._batcher.recovery.servers.get(self._server_id)
        return self._batcher.recovery.down or (trials is not None and trials.proving)

    @property
    def queue_length(self) -> int:
        """Requests waiting, for any server."""
        return self._batcher.queue_length

    @property
    def in_service(self) -> int:
        """What its engine has."""
        return sum(sequence.stream is not None for sequence in self._sequences())

    def running(self) -> list[list[Running]]:
        """See `Batcher`."""
        return self._batcher.running()[self._server_id : self._server_id + 1]

    def in_service_sequences(self) -> list[list[SequenceState]]:
        """See `Batcher`."""
        return [self._sequences()]

    def _sequences(self) -> list[SequenceState]:
        own = self._batcher.in_service_sequences()[self._server_id : self._server_id + 1]
        return own[0] if own else []


class StuckReplicas:
    """See `StuckWatch` for the times."""

    def __init__(
        self,
        pool: Replicas,
        batcher: Batcher,
        timeout: float,
        law: Callable[[], LatencyModel | None],
        form_time: float,
    ) -> None:
        self._pool, self._batcher = pool, batcher
        self._timeout, self._law, self._form_time = timeout, law, form_time
        self._watches: dict[int, StuckWatch] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        now = clock_of(asyncio.get_running_loop())
        while True:
            await asyncio.sleep(EVERY)
            for server_id in list(self._pool.replicas):
                try:
                    self._watch(server_id).look(now())
                except Exception:
                    log.exception("the check for a stuck engine failed; it is repeated")

    def _watch(self, server_id: int) -> StuckWatch:
        if server_id not in self._watches:
            self._watches[server_id] = StuckWatch(
                OneServer(self._batcher, server_id),
                self._timeout,
                self._law,
                partial(self._replace, server_id),
                partial(on_still, self._batcher),
                form_time=self._form_time,
            )
        return self._watches[server_id]

    def _replace(self, server_id: int, reason: str) -> None:
        replica = self._pool.replicas[server_id]
        if replica.serves:
            replica.supervisor.lost(reason)
