"""How long each stage of a call takes the event loop, measured on one call in `EVERY`.

parse     body to validated call
prompt    call to sequences: tokenised, limits applied. Contains the wait for a tokeniser elsewhere
submit    sequences into the queue, the policy asked, the engine told where it says so
token     what the engine handed over at once (one token, or those of a few steps) to bytes
write     bytes to the transport. Contains the wait for a client that does not read

Everything but the two waits is one stretch of the event loop's thread. A call that is not measured
pays a subtraction; one that is pays some microseconds: over all calls, well under one.

`ProcessorTime` is what all of them take together: processor seconds of the gateway's own process.
The engine computes in processes of its own and is not in there; what its library does in this one
is. Over the requests and over the tokens of the same stretch this is what one of them costs:
`rate(kendall_gateway_cpu_seconds_total[5m])` divided by `sum(rate(kendall_requests_total[5m]))` or
by `sum(rate(kendall_generated_tokens_total[5m]))`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from starlette.types import Message, Send

from kendall.server.telemetry.cost.instruments import Histogram

EVERY = 64  # calls; the first is measured
STAGES = ("parse", "prompt", "submit", "token", "write")
BUCKETS = (
    *(1e-6, 2e-6, 3e-6, 5e-6, 7.5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5, 7.5e-5),
    *(1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 3e-2, 0.1),
)


class OwnTime:
    """The histogram, and who is measured."""

    def __init__(self, registry: CollectorRegistry, *, every: int = EVERY) -> None:
        what = f"Time the event loop spends on a stage of a call; one call in {every} is measured"
        histogram = Histogram(
            "kendall_own_time_seconds", what, ["stage"], registry=registry, buckets=BUCKETS
        )
        self._observe: dict[str, Callable[[float], Any]] = {
            stage: histogram.labels(stage).observe for stage in STAGES
        }
        self._every = every
        self._left = 1

    def begin(self, now: Callable[[], float]) -> StageTiming | None:
        """A call begins; None unless it is one to be measured."""
        self._left -= 1
        if self._left:
            return None
        self._left = self._every
        return StageTiming(self._observe, now)


class StageTiming:
    """One measured call. Its stages follow one another; tokens and writes come as they come."""

    __slots__ = ("_now", "_observe", "_since")

    def __init__(
        self, observe: dict[str, Callable[[float], Any]], now: Callable[[], float]
    ) -> None:
        self._observe = observe
        self._now = now
        self._since = now()

    def begin(self) -> None:
        """A stage begins here."""
        self._since = self._now()

    def end(self, stage: str) -> None:
        """A stage ends, and the next begins."""
        now = self._now()
        self._observe[stage](now - self._since)
        self._since = now

    def took(self, stage: str, since: float) -> None:
        """A stage that began at `since`, on the same clock."""
        self._observe[stage](self._now() - since)

    def writing(self, send: Send) -> Send:
        """`send`, measured."""

        async def measured(message: Message) -> None:
            since = self._now()
            await send(message)
            self.took("write", since)

        return measured


class ProcessorTime:
    """A collector of one counter."""

    def collect(self) -> Iterator[Any]:
        """All threads, user and system."""
        seconds = time.process_time()
        yield CounterMetricFamily(
            "kendall_gateway_cpu_seconds",
            "CPU time of the gateway process, all threads, user and system",
            value=seconds,
        )
