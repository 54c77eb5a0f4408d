"""Processor seconds of the gateway's own process, read when scraped.

The engine computes in processes of its own and is not in here; what its library does in this one
is. Over the requests and over the tokens of the same stretch this is what one of them costs:
`rate(kendall_gateway_cpu_seconds_total[5m])` divided by `sum(rate(kendall_requests_total[5m]))` or
by `sum(rate(kendall_generated_tokens_total[5m]))`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily


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
