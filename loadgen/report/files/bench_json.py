"""The result file of `vllm bench serve` (vLLM 0.32, benchmarks/serve.py): the same keys in the same
order, each as it is computed there, so that whatever reads those files reads ours.

There every duration counts from the instant of SENDING; so it does here, under those keys. What a
sender that fell behind hides in this way stands beside them under keys of our own:
`intended_times`, `send_lateness_s`, and the whole summary from the intended instants (`kendall`).
`queue_times` is the wait in the client, sent - intended; the wait in the server's queue is
`server_queue_times`. Where nothing was completed the statistics are 0, as there; the gaps between
tokens are null where their instants were not recorded. Generated texts are not kept: each is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.measures.goodput import Limit, duration
from loadgen.measures.metrics import METRICS, between, gaps, lateness, percentile_name, values
from loadgen.report.files.bench_read import bench_runs, from_bench_json, is_bench_json
from policies.text import SpecError
from queueing.measurement.record import Record
from queueing.measurement.statistics import FloatArray

__all__ = [
    "BenchOptions",
    "bench_file_name",
    "bench_result",
    "bench_runs",
    "from_bench_json",
    "is_bench_json",
    "parse_bench_metrics",
    "write_bench_json",
]

CLIENT_QUEUE = "client_queue_time"
WITH_CLIENT_QUEUE = "e2el_including_client_queue"
BENCH_METRICS = ("ttft", "tpot", "itl", "e2el", CLIENT_QUEUE, WITH_CLIENT_QUEUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the file says of the run besides its records; the names are those of vLLM's flags."""

    model_id: str
    tokenizer_id: str | None = None
    backend: str = "openai"  # openai-chat for chat
    label: str | None = None
    num_prompts: int | None = None  # asked; None: as many as were sent
    metadata: Mapping[str, str] = field(default_factory=dict)
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    percentile_metrics: Sequence[str] = ("ttft", "tpot", "itl")
    metric_percentiles: Sequence[float] = (99.0,)
    goodput: Sequence[Limit] = ()
    save_detailed: bool = False


def parse_bench_metrics(text: str) -> tuple[str, ...]:
    """Names from `ttft,tpot,itl,e2el,client_queue_time`, as in vLLM's --percentile-metrics.
    Raises SpecError.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(BENCH_METRICS):
        raise SpecError(f"got metrics {text!r}; expected some of {', '.join(BENCH_METRICS)}")
    return names


def bench_result(
    records: Sequence[Record],
    options: BenchOptions,
    *,
    at: datetime | None = None,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The file's object, of records in the order of the timetable; `extras` are keys of our own.
    Raises SpecError on a clash of keys.
    """
    sent = [
        msgspec.structs.replace(record, intended_at=None) for record in records
    ]  # durations then count from sending
    first = _configuration(options, len(records), at or datetime.now().astimezone())
    rest = (
        _traffic(options)
        | _totals(sent, options, duration(records))
        | _details(records, sent, options.save_detailed)
    )
    rest |= dict(
        zip(("max_output_tokens_per_s", "max_concurrent_requests"), _peaks(sent), strict=True)
    ) | {"rtfx": 0.0}
    for name in options.percentile_metrics:
        rest |= _statistics(name, records, sent, options)
    ours = _ours(records, options.save_detailed) | dict(extras or {})
    if clash := (set(first) | set(rest)) & set(ours) | (set(first) | set(rest) | set(ours)) & set(
        options.metadata
    ):
        raise SpecError(
            f"got a key named {', '.join(sorted(clash))}; expected a name that the result file "
            "does not use itself"
        )
    return first | dict(options.metadata) | rest | ours


def write_bench_json(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write one result, or add it as a line of its own as --append-result does; the folder is
    made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab" if append else "wb") as file:
        file.write((b"\n" if append and file.tell() else b"") + msgspec.json.encode(result))


def bench_file_name(options: BenchOptions, at: datetime) -> str:
    """The name that vLLM gives such a file where none was asked for."""
    concurrency = (
        "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    )
    model = options.model_id.rsplit("/", maxsplit=1)[-1]
    return (
        f"{options.label or options.backend}-{options.request_rate}qps"
        f"{concurrency}-{model}-{_date(at)}.json"
    )


def _configuration(options: BenchOptions, sent: int, at: datetime) -> dict[str, Any]:
    return {
        "date": _date(at),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": options.model_id,
        "tokenizer_id": options.tokenizer_id,
        "num_prompts": sent if options.num_prompts is None else options.num_prompts,
    }


def _traffic(options: BenchOptions) -> dict[str, Any]:
    return {
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _totals(sent: Sequence[Record], options: BenchOptions, span: float) -> dict[str, Any]:
    done = [record for record in sent if record.outcome == "completed"]
    prompts, answers = (
        sum(getattr(record, name) or 0 for record in done)
        for name in ("prompt_tokens", "output_tokens")
    )
    good = sum(all(limit.kept(record) for limit in options.goodput) for record in done)
    return {
        "duration": span if span > 0 else 0.0,
        "completed": len(done),
        "failed": len(sent) - len(done),
        "total_input_tokens": prompts,
        "total_output_tokens": answers,
        "request_throughput": _per(len(done), span),
        "request_goodput": _per(good, span) if options.goodput else None,
        "output_throughput": _per(answers, span),
        "total_token_throughput": _per(prompts + answers, span),
    }


def _details(
    records: Sequence[Record], sent: Sequence[Record], detailed: bool
) -> dict[str, list[Any]]:
    """Arrays in the order of the requests, seconds; two of them are in every file."""
    always: dict[str, list[Any]] = {
        "latencies": [_one("e2el", record) for record in sent],
        "queue_times": [between(record.intended_at, record.sent_at) or 0.0 for record in records],
    }
    if not detailed:
        return always
    return {
        "input_lens": [record.prompt_tokens or 0 for record in sent],
        "output_lens": [
            (record.output_tokens or 0) if record.outcome == "completed" else 0 for record in sent
        ],
        "ttfts": [_one("ttft", record) for record in sent],
        "itls": [gaps(record) for record in sent],
        "latencies": always["latencies"],
        "start_times": [record.sent_at or 0.0 for record in sent],
        "queue_times": always["queue_times"],
        "generated_texts": [""] * len(sent),
        "errors": [
            "" if record.outcome == "completed" else record.error or record.outcome
            for record in sent
        ],
    }


def _one(name: str, record: Record) -> float:
    if record.outcome != "completed":
        return 0.0
    return METRICS[name].of(record) or 0.0


def _statistics(
    name: str, records: Sequence[Record], sent: Sequence[Record], options: BenchOptions
) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of one metric, in milliseconds."""
    found = _values(name, records, sent, options)
    if found is None:
        return {}
    milliseconds, levels = (
        found * 1e3,
        {percentile_name(level): level for level in options.metric_percentiles},
    )
    if (
        name == "itl"
        and not any(record.token_at for record in sent)
        and any((record.output_tokens or 0) > 1 for record in sent)
    ):
        return dict.fromkeys(
            (
                f"mean_{name}_ms",
                f"median_{name}_ms",
                f"std_{name}_ms",
                *(f"{word}_{name}_ms" for word in levels),
            )
        )
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
        **{
            f"{word}_{name}_ms": float(np.percentile(milliseconds, level))
            for word, level in levels.items()
        },
    }


def _values(
    name: str, records: Sequence[Record], sent: Sequence[Record], options: BenchOptions
) -> FloatArray | None:
    """Of completed requests, a single 0 where there are none; None for what vLLM leaves out
    without a bound on concurrency.
    """
    if name in {CLIENT_QUEUE, WITH_CLIENT_QUEUE}:
        if options.max_concurrency is None or (
            name == WITH_CLIENT_QUEUE and math.isinf(options.request_rate)
        ):
            return None
        done = [record for record in records if record.outcome == "completed"]
        found = _client_queue(done) if name == CLIENT_QUEUE else values("e2el", done)
    else:
        found = values(name, [record for record in sent if record.outcome == "completed"])
    return found if found.size else np.zeros(1)


def _client_queue(records: Sequence[Record]) -> FloatArray:
    """Waiting for a place among the requests at once, and the sender's own lateness."""
    waits = (between(record.intended_at, record.sent_at) for record in records)
    return np.array([wait for wait in waits if wait is not None], dtype=np.float64)


def _ours(records: Sequence[Record], detailed: bool) -> dict[str, Any]:
    """What vLLM's file has no key for, in the order of the requests."""
    if not detailed:
        return {}
    return {
        "request_ids": [record.request_id for record in records],
        "outcomes": [record.outcome for record in records],
        "intended_times": [record.intended_at for record in records],
        "send_lateness_s": [lateness(record) for record in records],
        "server_queue_times": [record.queueing_delay for record in records],
        "server_service_times": [record.service_time for record in records],
        "batch_sizes": [record.batch_size for record in records],
    }


def _date(at: datetime) -> str:
    return at.strftime("%Y%m%d-%H%M%S")


def _per(count: float, span: float) -> float:
    return count / span if span > 0 else 0.0


def _peaks(sent: Sequence[Record]) -> tuple[float | None, int]:
    """Tokens in, and requests at work during, the busiest whole second, counted from the first
    sending; completed requests only.

    A request counts in every second that it touches, so the second number is above the greatest
    number at one time. The first is None where the instants of the tokens were not recorded.
    """
    done = [
        (r, r.sent_at, r.released_at)
        for r in sent
        if r.outcome == "completed" and r.sent_at is not None and r.released_at is not None
    ]
    if not done:
        return 0.0, 0
    origin = min(begin for _, begin, _ in done)
    seconds = int(np.ceil(max(end for _, _, end in done) - origin)) + 1
    requests = np.zeros(seconds, dtype=np.int64)
    for _, begin, end in done:
        requests[int(begin - origin) : int(end - origin) + 1] += 1
    instants = np.array([at for record, _, _ in done for at in record.token_at or ()])
    if not instants.size:
        return None, int(requests.max())
    tokens = np.bincount((instants - origin).astype(np.int64), minlength=seconds)
    return float(tokens[:seconds].max()), int(requests.max())
