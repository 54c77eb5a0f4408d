"""`/metrics`: the gateway's own metrics, then those of its process and of vLLM, which counts in a
registry of its own.

vLLM registers its collectors, all named `vllm:...`, in prometheus_client's default registry and
takes the old ones out when an engine is started again; the gateway's, all named `kendall_...`,
stand in one registry per gateway. The two are read one after the other: no name can be in both, and
neither can take the other's away.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics_core import Metric

from server.telemetry.metrics import Metrics

NEIGHBOURS = (
    "vllm:",
    "process_",
)  # of the default registry; whatever else a library registers there stays there


class _Neighbours:
    """The part of the default registry that is shown."""

    def collect(self) -> Iterator[Metric]:
        """Families as they stand now."""
        return (family for family in REGISTRY.collect() if family.name.startswith(NEIGHBOURS))


def exposition(metrics: Metrics) -> bytes:
    """The text that Prometheus scrapes: every family once."""
    return metrics.exposition() + bytes(generate_latest(_Neighbours()))
