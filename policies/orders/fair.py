"""By the service that each client had, not interrupted."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Server, Waiting, fitting_ids
from kendall.policies.errors import SpecError
from kendall.policies.flow_counters import TokenWeights
from kendall.policies.orders.order import Order, parameter


@dataclass(frozen=True, kw_only=True)
class VirtualTokens(Order):
    """VTC: the flow with the fewest virtual tokens (`policies.flow_counters`), its oldest request
    first. `prompt_weight` for each token of a prompt when it is dispatched, `output_weight` for
    each token made.
    """

    prompt_weight: float = parameter("a number >= 0", lambda weight: 0 <= weight < math.inf, 1.0)
    output_weight: float = parameter("a number >= 0", lambda weight: 0 <= weight < math.inf, 2.0)
    name: ClassVar[str] = "vtc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt_weight + self.output_weight > 0:
            raise SpecError(
                "got prompt_weight=0 and output_weight=0; expected one of them > 0: else no "
                "service counts"
            )

    @property
    def weights(self) -> TokenWeights:
        return TokenWeights(self.prompt_weight, self.output_weight)

    def first(
        self,
        waiting: Sequence[Waiting],
        size: int,
        server: Server,
        now: float,
        virtual_tokens: Mapping[str, float],
    ) -> tuple[str, ...]:
        """As if dispatched one by one, each charged with its prompt; of equal flows the request
        that came first.
        """
        del now
        size = min(size, server.max_batch_size)
        if size <= 0:
            return ()
        places = heapq.nsmallest(size, self._ranked(waiting, virtual_tokens))
        return fitting_ids([waiting[place] for _, place in places], size, server)

    def _ranked(
        self, waiting: Sequence[Waiting], virtual_tokens: Mapping[str, float]
    ) -> Iterator[tuple[float, int]]:
        """The counter of its flow when each is at the head of it, and its place: of one flow they
        never fall.
        """
        counters: dict[str, float] = {}
        for place, each in enumerate(waiting):
            flow = each.request.flow
            counter = counters.get(flow)
            if counter is None:
                counter = virtual_tokens.get(flow, 0.0)
            yield counter, place
            counters[flow] = counter + self.prompt_weight * each.request.prompt_tokens
