"""Counters of the service that each flow had, for orders that share it fairly: `prompt` virtual
tokens for each token of a prompt when it is dispatched, `output` for each token made.

A flow whose queue was empty is lifted, when a request of it arrives, to the lowest counter of the
flows that wait (where none does, to that of the flow that was the last to wait): it keeps what it
had too much, and no credit for the time in which it asked for nothing. So the counter of no flow is
more than U above the lowest of those that wait, and two flows that wait all the time between two
instants differ in the service that they get in between by 2 U at most. U: what a flow can be
charged from one dispatch of it to the end of all that it has in service then; where a prompt token
weighs no more than one that is made, `output` x the prompts and limits that are in service together
at most. Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kendall.policies.core import Request

MOST_IDLE = 4096  # flows that are remembered while nothing of them waits


class TokenWeights(NamedTuple):
    """Virtual tokens for each token of a prompt, and for each of an output."""

    prompt: float
    output: float


class FlowCounters:
    """The counters of the flows, which a driver keeps: it tells of what joins and leaves its queue
    and of the tokens that are made.

    A flow of which nothing waits and whose counter is no higher than what it would be lifted to is
    forgotten without a difference; beyond MOST_IDLE others, the lowest are.
    """

    def __init__(self, weights: TokenWeights) -> None:
        self.virtual_tokens: dict[str, float] = {}  # for QueueState; always this object
        self._weights = weights
        self._waiting: dict[str, int] = {}  # requests, of the flows that have any
        self._last: str | None = None  # of those that had: the one that was the last to wait
        self._most = MOST_IDLE  # flows, after which some are forgotten

    def join(self, flow: str) -> None:
        """A request of it joins the queue."""
        if flow in self._waiting:
            self._waiting[flow] += 1
            return
        floor = self._floor()
        self.virtual_tokens[flow] = max(self.virtual_tokens.get(flow, floor), floor)
        self._waiting[flow] = 1
        if len(self.virtual_tokens) > self._most:
            self._forget()

    def leave(self, flow: str) -> None:
        """A request of it leaves the queue."""
        self._waiting[flow] -= 1
        if not self._waiting[flow]:
            del self._waiting[flow]
            self._last = flow

    def dispatch(self, request: Request) -> None:
        """It leaves the queue, and its prompt is computed."""
        self._charge(request.flow, self._weights.prompt * request.prompt_tokens)
        self.leave(request.flow)

    def made(self, flow: str, tokens: int) -> None:
        """So many more tokens of answers."""
        self._charge(flow, self._weights.output * tokens)

    def _charge(self, flow: str, virtual_tokens: float) -> None:
        """One that was forgotten while it was in service counts from where it would be lifted
        to.
        """
        before = self.virtual_tokens.get(flow)
        if before is None:
            before = self._floor()
        self.virtual_tokens[flow] = before + virtual_tokens

    def _floor(self) -> float:
        """What a flow is lifted to. It never falls."""
        if self._waiting:
            return min(map(self.virtual_tokens.__getitem__, self._waiting))
        return 0.0 if self._last is None else self.virtual_tokens[self._last]

    def _forget(self) -> None:
        counters, floor = self.virtual_tokens, self._floor()
        idle = [flow for flow in counters if flow not in self._waiting and flow != self._last]
        above = heapq.nlargest(
            MOST_IDLE, [flow for flow in idle if counters[flow] > floor], key=counters.__getitem__
        )
        for flow in set(idle).difference(above):
            del counters[flow]
        self._most = max(MOST_IDLE, 2 * len(counters))
