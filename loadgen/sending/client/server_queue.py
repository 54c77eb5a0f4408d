"""The mean queueing delay of a run as the server's own `/metrics` tells it: one reading before the
run and one after it. A client sees no single delay of a server that reports none with its answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from kendall.loadgen.sending.client.target import Target
from kendall.policies.text import counted
from kendall.queueing.measurement.server_signals import ServerCounters
from kendall.server_metrics import read_counters

SETTLE, PERIOD = 2.0, 0.1  # seconds that counters may lag behind the last answer; between readings


class ServerQueue(msgspec.Struct, frozen=True, kw_only=True):
    """`mean` is in seconds, over `requests` that ended during the run; None where the server does
    not tell, and `lacks` says what is missing.
    """

    mean: float | None = None
    requests: int | None = None
    lacks: str | None = None
    unanswered_before: int | None = None  # requests of others, in the server when the run began

    @property
    def in_words(self) -> str:
        """One line for a terminal."""
        if self.mean is None or self.requests is None:
            return f"queueing delay not known: {self.lacks}"
        lines = [
            f"mean queueing delay {self.mean * 1e3:.4g} ms of {counted(self.requests, 'request')}, "
            "by its /metrics",
            self.lacks,
            f"{self.unanswered_before} of others were in it when the run began"
            if self.unanswered_before
            else None,
        ]
        return "; ".join(filter(None, lines))


@dataclass(frozen=True, slots=True)
class QueueWatch:
    """The reading before a run."""

    target: Target
    before: ServerCounters | str

    @classmethod
    async def begin(cls, target: Target) -> QueueWatch:
        return cls(target, await _counters(target))

    async def at_end(self, completed: int) -> dict[str, Any]:
        """`ended` for the header of a run file."""
        return {"server_queue": msgspec.to_builtins(await self.ended(completed))}

    async def ended(self, completed: int) -> ServerQueue:
        """Read again after a run with so many completed requests, which may take `SETTLE` seconds
        to be counted.
        """
        if isinstance(self.before, str):
            return ServerQueue(lacks=self.before)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE
        while True:
            found = _between(self.before, await _counters(self.target), completed)
            settled = found.requests is None or found.requests >= completed
            if settled or loop.time() > deadline:
                return found
            await asyncio.sleep(PERIOD)


async def _counters(target: Target) -> ServerCounters | str:
    return await read_counters(target.base_url, target.api_key, target.trust)


def _between(before: ServerCounters, after: ServerCounters | str, completed: int) -> ServerQueue:
    if isinstance(after, str):
        return ServerQueue(lacks=after)
    if after.seconds is None or after.requests is None:
        names = after.server.signals.get("queue_time", ("queueing delay",))
        return ServerQueue(lacks=f"its /metrics has no {names[0]}_sum")
    # a histogram without observations may be absent from the first reading
    seconds = after.seconds - (before.seconds or 0.0)
    requests = after.requests - (before.requests or 0)
    if requests < 0 or seconds < 0:
        return ServerQueue(lacks="its counters began anew: the server restarted during the run")
    if requests == 0:
        return ServerQueue(lacks="its /metrics counted no request during the run")
    return ServerQueue(
        mean=seconds / requests,
        requests=requests,
        lacks=None if requests == completed else f"{completed:,} of the run completed",
        unanswered_before=before.unanswered,
    )
