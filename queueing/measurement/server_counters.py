"""The queue of a server as its own `/metrics` counts it, in Prometheus' text format.

    mean queueing delay = (sum after - sum before) / (count after - count before)

Sums and counts are of requests that ended; labels (models, engines of one server) are added up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


class CounterNames(NamedTuple):
    """Two gauges, and a histogram of seconds."""

    running: str
    waiting: str
    queue_time: str


NAMES = {
    "vLLM": CounterNames(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:request_queue_time_seconds",
    ),
    "SGLang": CounterNames(
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:queue_time_seconds"
    ),
    "TGI": CounterNames("tgi_batch_current_size", "tgi_queue_size", "tgi_request_queue_duration"),
}
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """One reading: requests running and waiting now; queueing delays since the server's start,
    their sum in seconds and their number. None where the server does not export it.
    """

    server: str  # a key of NAMES
    running: float
    waiting: float
    seconds: float | None = None
    requests: int | None = None

    @classmethod
    def read(cls, text: str) -> ServerCounters | None:
        """From the text of `/metrics`; None where no known server's queue is in it."""
        values: dict[str, float] = defaultdict(float)
        for name, value in _SAMPLE.findall(text):
            try:
                values[name] += float(value)
            except ValueError:  # no sample
                continue
        for server, names in NAMES.items():
            if names.running in values or f"{names.queue_time}_count" in values:
                number = values.get(f"{names.queue_time}_count")
                return cls(
                    server=server,
                    running=values.get(names.running, 0.0),
                    waiting=values.get(names.waiting, 0.0),
                    seconds=values.get(f"{names.queue_time}_sum"),
                    requests=None if number is None else int(number),
                )
        return None

    @property
    def unanswered(self) -> int:
        """Requests in the server now."""
        return int(self.running + self.waiting)
