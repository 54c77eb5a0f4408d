"""An order of service inside an unmodified vLLM (tested with 0.32):

    KENDALL_POLICY=continuous:order=sprpt vllm serve MODEL --scheduler-cls kendall.inside.Scheduler

vLLM's own queue of priorities is kept by the order's rank, and its own method preempts. A client
sends the predicted length of its answer along, in tokens, as "vllm_xargs":
{"predicted_output_tokens": 120}; without it `max_tokens` counts. `order=fcfs` changes nothing.
"""

from __future__ import annotations

import math
import os
import time
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from kendall.policies import Preempt, QueueState, Request, Running, Server, SpecError, Waiting
from kendall.policies.immediate import Continuous
from kendall.policies.ordered import preempted
from kendall.policies.text import parse_policy

VARIABLE, READY = "KENDALL_POLICY", (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def policy_of(text: str) -> Continuous:
    """Raises SpecError: a policy or an order that vLLM's queue cannot have."""
    policy = parse_policy(text)
    if not isinstance(policy, Continuous):
        raise SpecError(f"got {VARIABLE}={text}; expected continuous[:order=...], as vLLM batches")
    order, why = policy.ranking, ""
    if order.learns:
        why = "ranks follow from answers or a law that only the gateway keeps (kendall serve)"
    elif not order.is_formal() or order.form.ratio or order.form.quantity == "deadline":
        why = f"order {order.name} is no fixed rank of a request"
    if why:
        expected = "expected an order by arrival, priority, predicted length or tokens made"
        raise SpecError(f"got {VARIABLE}={text}, whose {why}; {expected}")
    return policy


class Ordered(SyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with the order of `KENDALL_POLICY`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._policy = policy_of(os.environ.get(VARIABLE) or "continuous")
        self._order = self._policy.ranking
        self._asked = WeakKeyDictionary[EngineRequest, Request]()
        if self._order.ranked:
            vllm_config.scheduler_config.policy = "priority"
        super().__init__(vllm_config, *args, **kwargs)
        size = self._policy.max_batch_size or math.inf
        for bound in ("max_num_running_reqs", "max_num_active_reqs"):
            setattr(self, bound, min(size, getattr(self, bound, size)))

    def add_request(self, request: EngineRequest) -> None:
        """Into the queue at its rank."""
        if self._order.ranked:
            self._asked[request] = _asked(request)
            self._rank(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the engine, after those in service that are outranked were preempted."""
        if self._order.preemptive:
            for request in self.running:  # the rank at which one that is preempted waits
                self._rank(request)
            if self.waiting and len(self.running) >= self.max_num_running_reqs:
                self._preempt_outranked()
        return super().schedule(*args, **kwargs)

    def _preempt_outranked(self) -> None:
        """For each of those that wait, in their order, until one of them outranks nobody."""
        in_service = [
            Running(self._asked[each], 0, each.num_output_tokens, True, each.num_preemptions)
            for each in self.running
        ]
        for request in islice(self.waiting, len(in_service)):
            first = Waiting(self._asked[request], request.num_output_tokens)
            server = Server(0, in_service, max_batch_size=self.max_num_running_reqs)
            decision = preempted(self._policy, QueueState([first], [server]), None)
            if request.status not in READY or not isinstance(decision, Preempt):
                return
            for name in decision.request_ids:
                self.running.remove(self.requests[name])
                self._preempt_request(self.requests[name], time.monotonic())  # noqa: TID251 - the clock of vLLM's events
            self.prev_step_scheduled_req_ids.difference_update(decision.request_ids)
            stay = [each for each in in_service if each.request.id not in decision.request_ids]
            in_service = [*stay, Running(first.request, 0, preemptible=False)]

    def _rank(self, request: EngineRequest) -> None:
        """vLLM's queue compares priorities, and of equal ones instants of arrival."""
        request.priority = self._order.rank(self._asked[request], request.num_output_tokens)


class AsyncOrdered(Ordered, AsyncScheduler):  # type: ignore[misc]
    """The same, for steps that are scheduled before the one before is over."""


def Scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Ordered:  # noqa: N802 - vLLM asks for a class
    """What `--scheduler-cls` names."""
    kind = AsyncOrdered if vllm_config.scheduler_config.async_scheduling else Ordered
    return kind(vllm_config, *args, **kwargs)


def _asked(request: EngineRequest) -> Request:
    """As policies see it; a prediction that is no length is none."""
    given = getattr(request.sampling_params, "extra_args", None) or {}
    told = given.get("predicted_output_tokens")
    known = float(told) if isinstance(told, int | float) and 0 < told < math.inf else None
    sizes = request.num_prompt_tokens, request.max_tokens
    return Request(request.request_id, request.arrival_time, *sizes, known, request.priority)
