"""What other servers call the signals of `kendall.queueing.estimation.counters.samples`, and which
server it is whose metrics these are.

Sources: vLLM 0.32 and 0.33, SGLang 0.5.23 (`--enable-metrics`), TensorRT-LLM, TGI, llama.cpp
(`--metrics`). A histogram stands under its own name, without `_sum`, `_count` and `_bucket`. Of
several names of a signal the first that a server has counts: later ones are those of older
versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.estimation.counters.samples import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LENGTHS,
    Buckets,
    Samples,
)

NEEDED = ("finished", "sojourn", "queue_time")  # of one of them requests are counted
ONE_RANK = ("tp_rank", "pp_rank")  # labels whose values count the same requests again
MODEL = ("model_name", "model")
REPLICA = ("pod", "instance", "engine", "dp_rank")


@dataclass(frozen=True)
class Server:
    """A kind of server, and its names of signals."""

    name: str
    signals: Mapping[str, tuple[str, ...]]
    needs: str = ""  # what must be set for it to have metrics

    @property
    def names(self) -> frozenset[str]:
        """Every name of a series, as in an exposition."""
        return frozenset(
            series
            for signal, names in self.signals.items()
            for name in names
            for series in _series(signal, name)
        )

    def counts_requests(self, there: Collection[str]) -> bool:
        """Whether one of these series counts requests."""
        signals = {signal for signal, _ in self.used(there).values()}
        return not signals.isdisjoint(NEEDED)

    def used(self, there: Collection[str]) -> dict[str, tuple[str, str]]:
        """The series that are read, of those that are there: their signal, and which part of it."""
        found: dict[str, tuple[str, str]] = {}
        for signal, names in self.signals.items():
            for name in names:
                series = _series(signal, name)
                if any(each in there for each in series):
                    found |= {
                        each: (signal, each.removeprefix(name)) for each in series if each in there
                    }
                    break
        return found


def _series(signal: str, name: str) -> tuple[str, ...]:
    if signal not in HISTOGRAMS:
        return (name,)
    parts = ("_sum", "_count", "_bucket") if signal in LENGTHS else ("_sum", "_count")
    return tuple(name + part for part in parts)


VLLM = Server(
    "vLLM",
    {
        "finished": ("vllm:request_success_total",),
        "queue_time": ("vllm:request_queue_time_seconds",),
        "sojourn": ("vllm:e2e_request_latency_seconds",),
        "first_token": ("vllm:time_to_first_token_seconds",),
        "token_gap": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "prefill": ("vllm:request_prefill_time_seconds",),
        "service": ("vllm:request_inference_time_seconds",),
        "prompt_tokens": ("vllm:request_prompt_tokens",),
        "computed_tokens": ("vllm:request_prefill_kv_computed_tokens",),
        "output_tokens": ("vllm:request_generation_tokens",),
        "generated": ("vllm:generation_tokens_total",),
        "prompted": ("vllm:prompt_tokens_total",),
        "preempted": ("vllm:num_preemptions_total",),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "prefix_queries": (
            "vllm:prefix_cache_queries_total",
            "vllm:gpu_prefix_cache_queries_total",
        ),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
)
SGLANG = Server(
    "SGLang",
    {
        "finished": ("sglang:num_requests_total",),
        "queue_time": ("sglang:queue_time_seconds",),
        "sojourn": ("sglang:e2e_request_latency_seconds",),
        "first_token": ("sglang:time_to_first_token_seconds",),
        "token_gap": ("sglang:inter_token_latency_seconds",),
        "prompt_tokens": ("sglang:prompt_tokens_histogram",),
        "output_tokens": ("sglang:generation_tokens_histogram",),
        "generated": ("sglang:generation_tokens_total",),
        "prompted": ("sglang:prompt_tokens_total",),
        "preempted": ("sglang:num_retracted_requests_total",),
        "prefix_hits": ("sglang:cached_tokens_total",),
        "prefix_queries": ("sglang:prompt_tokens_total",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
    },
    needs="--enable-metrics",
)
TENSORRT_LLM = Server(
    "TensorRT-LLM",
    {
        "finished": ("trtllm_request_success_total",),
        "queue_time": ("trtllm_request_queue_time_seconds",),
        "sojourn": ("trtllm_e2e_request_latency_seconds",),
        "first_token": ("trtllm_time_to_first_token_seconds",),
        "prefill": ("trtllm_request_prefill_time_seconds",),
        "service": ("trtllm_request_inference_time_seconds",),
        "generated": ("trtllm_generation_tokens_total",),
        "prompted": ("trtllm_prompt_tokens_total",),
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "kv_usage": ("trtllm_kv_cache_utilization",),
    },
    needs="the path /prometheus/metrics",
)
TGI = Server(
    "TGI",
    {
        "finished": ("tgi_request_count",),
        "queue_time": ("tgi_request_queue_duration",),
        "sojourn": ("tgi_request_duration",),
        "service": ("tgi_request_inference_duration",),
        "prompt_tokens": ("tgi_request_input_length",),
        "output_tokens": ("tgi_request_generated_tokens",),
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
    },
)
LLAMA_CPP = Server(
    "llama.cpp",
    {
        "generated": ("llamacpp:tokens_predicted_total",),
        "prompted": ("llamacpp:prompt_tokens_total",),
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
    },
    needs="--metrics",
)
SERVERS = (VLLM, SGLANG, TENSORRT_LLM, TGI, LLAMA_CPP)
ALL_NAMES = frozenset(name for server in SERVERS for name in server.names)


def server_of(names: Collection[str], where: str) -> Server:
    """The kind of server that has series of these names. Raises SpecError: it is none of them, or
    it counts no requests.
    """
    there = set(names)
    server = max(SERVERS, key=lambda each: len(each.names & there))
    if not server.names & there:
        raise SpecError(
            f"got {where} without a metric of {', '.join(each.name for each in SERVERS)}; expected "
            "one of these servers: `kendall serve` predicts its own queue, and other servers go "
            "behind it with --engine http"
        )
    if not server.counts_requests(there):
        needed = sorted(name for signal in NEEDED for name in server.signals.get(signal, ()))
        expected = f"{' or '.join(needed)}" if needed else "a server that counts its requests"
        raise SpecError(
            f"got {where} of {server.name}, which does not count requests; expected {expected}: "
            "without it there is no arrival rate"
        )
    return server


@dataclass(frozen=True, eq=False)
class Series:
    """One series as it was scraped: instants in seconds, and values."""

    name: str
    labels: Mapping[str, str]
    at: Vector
    values: Vector


@dataclass
class _Replica:
    """The series of one replica, while they are gathered."""

    model: str
    columns: dict[tuple[str, str], list[Series]] = field(default_factory=dict)
    buckets: dict[tuple[str, float], list[Series]] = field(default_factory=dict)


def samples_of(server: Server, series: Iterable[Series], fallback: str = "") -> list[Samples]:
    """Of each model and replica, in the order of their names. Series of one replica that differ in
    other labels are added; `fallback`: the replica of series without a label that names one.
    """
    found = list(series)
    used = server.used({each.name for each in found})
    replicas: dict[tuple[str, str], _Replica] = {}
    for each in found:
        if each.name not in used or any(each.labels.get(r, "0") != "0" for r in ONE_RANK):
            continue
        signal, part = used[each.name]
        model, replica = model_of(each.labels), _replica_of(each.labels) or fallback
        own = replicas.setdefault((model, replica), _Replica(model))
        if part == "_bucket":
            upper = float(each.labels.get("le", "inf"))
            own.buckets.setdefault((signal, upper), []).append(each)
        else:
            own.columns.setdefault((signal, part), []).append(each)
    return [_samples(name, own) for (_, name), own in sorted(replicas.items())]


def model_of(labels: Mapping[str, str]) -> str:
    """The name of the model that a series is of; empty where it has none."""
    return next((labels[name] for name in MODEL if name in labels), "")


def _replica_of(labels: Mapping[str, str]) -> str:
    return "/".join(labels[name] for name in REPLICA if labels.get(name))


def _samples(replica: str, own: _Replica) -> Samples:
    instants = np.unique(np.concatenate([each.at for each in _all(own)]))
    counters, gauges = {}, {}
    for (signal, part), series in own.columns.items():
        column = _column(instants, series)
        if signal in GAUGES:
            gauges[signal] = column
        else:
            assert signal in (*COUNTERS, *HISTOGRAMS)
            counters[signal + part] = column
    buckets = {}
    for signal in LENGTHS:
        uppers = sorted(upper for name, upper in own.buckets if name == signal)
        if uppers:
            columns = [_column(instants, own.buckets[signal, upper]) for upper in uppers]
            buckets[signal] = Buckets(np.array(uppers), np.stack(columns, axis=1))
    # a scrape without the counters, as of gauges that are pushed, is none
    told = np.isfinite(np.array(list(counters.values()))).any(axis=0) if counters else []
    kept = np.asarray(told, dtype=bool)
    return Samples(
        replica=replica,
        model=own.model,
        at=instants[kept] if counters else instants,
        counters={name: values[kept] for name, values in counters.items()},
        gauges={name: values[kept] for name, values in gauges.items()} if counters else gauges,
        buckets={name: Buckets(b.uppers, b.counts[kept]) for name, b in buckets.items()},
    )


def _all(own: _Replica) -> Iterator[Series]:
    for several in (*own.columns.values(), *own.buckets.values()):
        yield from several


def _column(instants: Vector, series: Iterable[Series]) -> Vector:
    """Sums at the instants; not a number where no series has a value."""
    total = np.full(instants.size, np.nan)
    for each in series:
        place = np.searchsorted(instants, each.at)
        total[place] = np.nan_to_num(total[place]) + each.values
    return total
