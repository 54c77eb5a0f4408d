"""Fixed batching: the only policy under which requests wait for a batch to form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import (
    IDLE,
    Decision,
    Dispatch,
    QueueState,
    Release,
    Server,
    WaitUntil,
    sequences_of,
)
from kendall.policies.ordered import Ordered
from kendall.policies.routes import PREFIX, warmest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Ordered):
    """Exactly `batch_size` together, as one padded batch; fewer only once the oldest has waited
    `max_wait` or at the end.
    """

    batch_size: int
    max_wait: float = math.inf  # seconds since the oldest waiting request arrived
    name: ClassVar[str] = "fixed"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch a full batch, or all waiting requests at the deadline or when the queue is
        closing.
        """
        server = state.empty_server()
        if server is None or not state.waiting:
            return IDLE
        order, size = self.ranking, min(self.batch_size, server.max_batch_size)
        served = state.virtual_tokens
        for group in order.groups(state.waiting):
            ids = order.first(group, size, server, now, served)
            # full, or nothing else has room in it
            if len(ids) < len(group) or sequences_of(group) >= size:
                return self._dispatch(state, ids, server)
        # the first, unless an order or priorities arrange the queue
        oldest = min([waiting.request.arrived_at for waiting in state.waiting])
        deadline = oldest + self.max_wait
        if now >= deadline or state.closing:
            ids = order.first(state.waiting, size, server, now, served)
            return self._dispatch(state, ids, server)
        return WaitUntil(deadline)

    def _dispatch(self, state: QueueState, ids: tuple[str, ...], server: Server) -> Dispatch:
        chosen = warmest(state, ids, server) if self.route == PREFIX else server
        return Dispatch(ids, chosen.id)
