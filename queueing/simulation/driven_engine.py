"""A server as the simulator's driver keeps it: what policies see of it, the engine process behind
it, and the requests in service.

A server can die. Its process is gone then, and what it had in service stays. After the restart a
new process continues each answer behind the tokens that it has, batch by batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from kendall.policies.core import Policy, Request, Server
from kendall.policies.flow_counters import FlowCounters
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.simulation.ledger import Started


class DrivenEngine:
    """One server. `new_process` makes an idle engine process; all that it makes draw from one
    stream of random numbers, so that a restart does not repeat any.
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
        self.view = view
        self._new_process = new_process
        self.process = new_process()
        self.in_service: list[Started] = view.in_service  # type: ignore[assignment]  # the view's own list, kept current
        self.policy: Policy | None = None  # of the last dispatch
        self.changes_at = math.inf  # when `process` must be advanced next
        self.restarted_at = -math.inf

    @property
    def finished(self) -> bool:
        """Whether the process is idle and no answer waits for another process."""
        return self.process.idle and all(started.member.ended for started in self.in_service)

    def count_tokens(self, now: float, counters: FlowCounters | None) -> None:
        """Bring the token counts of the requests in service up to `now`. A step that ends an
        answer at `now` is not counted yet.
        """
        if self.in_service:
            self.process.catch_up(now)
        for started in self.in_service:
            started.count_tokens(counters)

    def die(self) -> list[Started]:
        """Lose the process, and count an interruption of each request that it held. Returns the
        requests whose answers have not ended. Tokens must have been counted before.
        """
        for started in self.in_service:
            if self._holds(started):
                before = started.before
                started.before = dataclasses.replace(before, interruptions=before.interruptions + 1)
        self.process, self.changes_at = self._new_process(), math.inf
        return self._unended()

    def _holds(self, started: Started) -> bool:
        """Whether a request in service is in the process: until its answer ends, and a padded
        request to the end of its batch. A restart does not continue padding.
        """
        ended_at, padded = started.member.last_token_at, started.batch.policy.padded
        return ended_at is None or (padded and ended_at > self.restarted_at)

    def resume(self, now: float, lengths: dict[str, int]) -> None:
        """Continue the answers that have not ended on the new process: each batch under its own
        policy, in the order of their dispatch. `lengths` are those of whole answers.
        """
        self.restarted_at = now
        unended = self._unended()
        batches = {started.batch.id: started.batch for started in unended}
        for batch_id in sorted(batches):
            batch = batches[batch_id]
            members = [
                _continued(started, lengths[started.request.id])
                for started in unended
                if started.batch is batch
            ]
            policy = batch.policy
            self.process.admit(now, members, padded=policy.padded, joining=policy.joins_running)
            # this begins a step: the next batch enters behind it, as from the gateway, which hands
            # over one batch after the other
            self.process.next_step_at()

    def _unended(self) -> list[Started]:
        return [started for started in self.in_service if not started.member.ended]


def _continued(started: Started, length: int) -> Member:
    """The member of another process that makes the rest of an answer."""
    produced = started.output_tokens_so_far
    started.before = dataclasses.replace(
        started.before, first_token_at=started.first_token_at, output_tokens=produced
    )
    started.member = remaining_member(started.request, produced, length)
    return started.member


def remaining_member(
    request: Request, produced: int, length: int, last_token_at: float | None = None
) -> Member:
    """A member of an engine that makes the rest of an answer of `length` tokens. Tokens that were
    produced before, the last one at `last_token_at`, are a part of its prompt.
    """
    return Member(
        request.id,
        request.prompt_tokens + produced,
        length - produced,
        resumed=produced > 0,
        left_off_at=last_token_at,
    )
