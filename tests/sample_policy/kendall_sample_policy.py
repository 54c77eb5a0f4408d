"""The request with the shortest answer first, as far as that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies import Decision, Dispatch, Policy, QueueState, Waiting, WaitUntil, fitting_ids


@dataclass(frozen=True, kw_only=True)
class Shortest(Policy):
    """At most `max_batch_size` together, shortest first by the predicted length or the token
    limit; a request that has waited `max_wait` goes before all others.
    """

    max_batch_size: int = 4
    max_wait: float = math.inf  # seconds
    name: ClassVar[str] = "shortest"

    def decide(self, state: QueueState, now: float) -> Decision:
        """Dispatch to an empty server at once."""
        server = state.empty_server()
        if server is None or not state.waiting:
            return WaitUntil(math.inf)

        def order(waiting: Waiting) -> tuple[bool, float]:
            request = waiting.request
            in_time = now - request.arrived_at < self.max_wait
            return in_time, request.predicted_output_tokens or request.max_output_tokens

        ordered = sorted(state.waiting, key=order)
        return Dispatch(fitting_ids(ordered, self.max_batch_size, server), server.id)
