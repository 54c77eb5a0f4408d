"""Files that vllm bench serve wrote, and the options that ask for such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kendall.loadgen.measures.goodput import parse_goodput
from kendall.loadgen.report.files.bench_json import BenchOptions
from kendall.loadgen.report.files.bench_read import bench_run
from kendall.queueing.measurement.record import Header, Record

SAMPLES = Path(__file__).parent / "samples"
DETAILED = SAMPLES / "vllm_bench_detailed.json"  # 24 requests, one answered 429
OURS = {
    "request_ids",
    "outcomes",
    "intended_times",
    "send_lateness_s",
    "server_queue_times",
    "server_service_times",
    "batch_sizes",
}


def options(**more: Any) -> BenchOptions:
    """The flags of the detailed sample."""
    given: dict[str, Any] = {
        "model_id": "tiny",
        "tokenizer_id": "./tokenizer",
        "backend": "vllm",
        "metadata": {"purpose": "sample"},
        "request_rate": 40.0,
        "percentile_metrics": ("ttft", "tpot", "itl", "e2el"),
        "metric_percentiles": (50.0, 90.0, 99.9),
        "goodput": parse_goodput(["ttft:50", "e2el:200"]),
        "save_detailed": True,
    }
    return BenchOptions(**{**given, **more})


def from_bench_json(path: Path) -> tuple[Header, list[Record]]:
    """The one result of a file."""
    return bench_run(path.read_bytes(), path)
