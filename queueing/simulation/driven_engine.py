"""A server as the simulator's driver keeps it: what policies see of it, the process behind it, who
is in service. And its death: the process is gone, what was in service stays there, and another
process continues it behind its tokens, batch by batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from kendall.policies.core import Policy, Request, Server
from kendall.policies.flow_counters import FlowCounters
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.simulation.ledger import Started


class DrivenEngine:
    """`new_process` makes one that holds nothing; its chance goes on where that of the last one
    stood.
    """

    __slots__ = (
        "_new_process",
        "changes_at",
        "in_service",
        "policy",
        "process",
        "restarted_at",
        "view",
    )

    def __init__(self, view: Server, new_process: Callable[[], ServiceProcess]) -> None:
        self.view, self.process, self._new_process = view, new_process(), new_process
        self.in_service: list[Started] = view.in_service  # type: ignore[assignment]  # the view's own list, kept current
        self.policy: Policy | None = None
        self.changes_at, self.restarted_at = math.inf, -math.inf

    @property
    def over(self) -> bool:
        """Whether nothing is under way, nor waits for another process."""
        return self.process.idle and all(each.member.ended for each in self.in_service)

    def count_tokens(self, now: float, counters: FlowCounters | None) -> None:
        """How far those in service are, but for a step that ends an answer now."""
        if self.in_service:
            self.process.catch_up(now)
        for started in self.in_service:
            started.count_tokens(counters)

    def lose(self) -> Sequence[Started]:
        """It dies, its tokens counted; returns whom it had that had not ended."""
        held = [each for each in self.in_service if not each.member.ended]
        for started in self.in_service:
            if self._has(started):
                before = started.before
                started.before = dataclasses.replace(before, interruptions=before.interruptions + 1)
        self.process, self.changes_at = self._new_process(), math.inf
        return held

    def _has(self, started: Started) -> bool:
        """Whether it is with the process: padding too, if it ended after the last restart."""
        ended_at, padded = started.member.last_token_at, started.batch.policy.padded
        return ended_at is None or (padded and ended_at > self.restarted_at)

    def resume(self, now: float, lengths: dict[str, int]) -> None:
        """Another process serves: each batch whose answers have not all ended, under its own
        policy, in the order of their dispatch.
        """
        self.restarted_at = now
        batches = {each.batch.id: each.batch for each in self.in_service if not each.member.ended}
        for _, batch in sorted(batches.items()):
            members = [
                _continued(each, lengths[each.request.id])
                for each in self.in_service
                if each.batch is batch and not each.member.ended
            ]
            policy = batch.policy
            self.process.admit(now, members, padded=policy.padded, joining=policy.joins_running)
            self.process.next_step_at()  # one batch after the other, as the gateway hands them over


def _continued(started: Started, length: int) -> Member:
    """The rest of an answer, on another process."""
    made = started.output_tokens_so_far
    started.before = dataclasses.replace(
        started.before, first_token_at=started.first_token_at, output_tokens=made
    )
    started.member = member_behind(started.request, made, length)
    return started.member


def member_behind(
    request: Request, made: int, length: int, last_token_at: float | None = None
) -> Member:
    """The rest of an answer of `length` tokens: what was made, the last one at `last_token_at`, is
    a part of its prompt now.
    """
    member = Member(request.id, request.prompt_tokens + made, length - made, resumed=made > 0)
    member.left_off_at = last_token_at
    return member
