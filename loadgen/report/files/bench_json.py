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

from kendall.loadgen.measures.goodput import Limit, duration
from kendall.loadgen.measures.metrics import (
    METRICS,
    between,
    gaps,
    lateness,
    percentile_name,
    values,
)
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Record

CLIENT_QUEUE = "client_queue_time"
WITH_CLIENT_QUEUE = "e2el_including_client_queue"
BENCH_METRICS = ("ttft", "tpot", "itl", "e2el", CLIENT_QUEUE, WITH_CLIENT_QUEUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The flags of vLLM that the file repeats, under their names."""

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


def bench_result(
    records: Sequence[Record],
    options: BenchOptions,
    *,
    at: datetime | None = None,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the file's object of records in the order of the timetable; `extras` are keys of our
    own. Raises SpecError on a clash of keys.
    """
    sent = [
        msgspec.structs.replace(record, intended_at=None) for record in records
    ]  # durations then count from sending
    num_prompts = len(records) if options.num_prompts is None else options.num_prompts
    first = {
        "date": (at or datetime.now().astimezone()).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": options.model_id,
        "tokenizer_id": options.tokenizer_id,
        "num_prompts": num_prompts,
    }
    rate = options.request_rate
    rest = {
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **_totals(sent, options, duration(records)),
        **_details(records, sent, options.save_detailed),
        **_peaks(sent),
        "rtfx": 0.0,
    }
    for name in options.percentile_metrics:
        rest |= _statistics(name, records, sent, options)
    ours = dict(extras or {})
    if options.save_detailed:  # what vLLM's file has no key for, in the order of the requests
        ours = {
            "request_ids": [record.request_id for record in records],
            "outcomes": [record.outcome for record in records],
            "intended_times": [record.intended_at for record in records],
            "send_lateness_s": [lateness(record) for record in records],
            "server_queue_times": [record.queueing_delay for record in records],
            "server_service_times": [record.service_time for record in records],
            "batch_sizes": [record.batch_size for record in records],
        } | ours
    theirs = set(first) | set(rest)
    if clash := theirs & set(ours) | (theirs | set(ours)) & set(options.metadata):
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


def _totals(sent: Sequence[Record], options: BenchOptions, span: float) -> dict[str, Any]:
    def per_second(count: float) -> float:
        return count / span if span > 0 else 0.0

    done = [record for record in sent if record.outcome == "completed"]
    prompts = sum(record.prompt_tokens or 0 for record in done)
    answers = sum(record.output_tokens or 0 for record in done)
    good = sum(all(limit.kept(record) for limit in options.goodput) for record in done)
    return {
        "duration": span if span > 0 else 0.0,
        "completed": len(done),
        "failed": len(sent) - len(done),
        "total_input_tokens": prompts,
        "total_output_tokens": answers,
        "request_throughput": per_second(len(done)),
        "request_goodput": per_second(good) if options.goodput else None,
        "output_throughput": per_second(answers),
        "total_token_throughput": per_second(prompts + answers),
    }


def _details(
    records: Sequence[Record], sent: Sequence[Record], detailed: bool
) -> dict[str, list[Any]]:
    """Arrays in the order of the requests, seconds; two of them are in every file."""
    done = [record.outcome == "completed" for record in sent]
    ttfts, latencies = (
        [
            (METRICS[name].of(record) or 0.0) if whole else 0.0
            for record, whole in zip(sent, done, strict=True)
        ]
        for name in ("ttft", "e2el")
    )
    arrays: dict[str, list[Any]] = {
        "input_lens": [record.prompt_tokens or 0 for record in sent],
        "output_lens": [
            (record.output_tokens or 0) if whole else 0
            for record, whole in zip(sent, done, strict=True)
        ],
        "ttfts": ttfts,
        "itls": [gaps(record) for record in sent],
        "latencies": latencies,
        "start_times": [record.sent_at or 0.0 for record in sent],
        "queue_times": [between(record.intended_at, record.sent_at) or 0.0 for record in records],
        "generated_texts": [""] * len(sent),
        "errors": [
            "" if whole else record.error or record.outcome
            for record, whole in zip(sent, done, strict=True)
        ],
    }
    if detailed:
        return arrays
    return {name: arrays[name] for name in ("latencies", "queue_times")}


def _statistics(
    name: str, records: Sequence[Record], sent: Sequence[Record], options: BenchOptions
) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of one metric of completed requests, in
    milliseconds: 0 where there are none; nothing of what vLLM leaves out without a bound on
    concurrency.
    """
    levels = {percentile_name(level): level for level in options.metric_percentiles}
    in_client = name in {CLIENT_QUEUE, WITH_CLIENT_QUEUE}
    at_once = name == WITH_CLIENT_QUEUE and math.isinf(options.request_rate)
    if in_client and (options.max_concurrency is None or at_once):
        return {}
    unknown = not any(record.token_at for record in sent)
    if name == "itl" and unknown and any((record.output_tokens or 0) > 1 for record in sent):
        return dict.fromkeys(f"{word}_{name}_ms" for word in ("mean", "median", "std", *levels))
    done = [record for record in (records if in_client else sent) if record.outcome == "completed"]
    if name == CLIENT_QUEUE:  # for a place among the requests at once, and the sender's lateness
        waits = (between(record.intended_at, record.sent_at) for record in done)
        seconds = np.array([wait for wait in waits if wait is not None], dtype=np.float64)
    else:
        seconds = values("e2el" if name == WITH_CLIENT_QUEUE else name, done)
    milliseconds = (seconds if seconds.size else np.zeros(1)) * 1e3
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
        **{
            f"{word}_{name}_ms": float(np.percentile(milliseconds, level))
            for word, level in levels.items()
        },
    }


def _peaks(sent: Sequence[Record]) -> dict[str, float | None]:
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
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    origin = min(begin for _, begin, _ in done)
    seconds = int(np.ceil(max(end for _, _, end in done) - origin)) + 1
    requests = np.zeros(seconds, dtype=np.int64)
    for _, begin, end in done:
        requests[int(begin - origin) : int(end - origin) + 1] += 1
    instants = np.array([at for record, _, _ in done for at in record.token_at or ()])
    most = None
    if instants.size:
        tokens = np.bincount((instants - origin).astype(np.int64), minlength=seconds)
        most = float(tokens[:seconds].max())
    return {"max_output_tokens_per_s": most, "max_concurrent_requests": int(requests.max())}
