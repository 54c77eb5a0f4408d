"""The signals of a server that its metrics have, what each kind of server calls them, and which
server it is whose metrics these are.

Sources: vLLM 0.32 and 0.33, SGLang 0.5.23 (`--enable-metrics`), TensorRT-LLM, TGI, llama.cpp
(`--metrics`). A histogram stands under its own name, without `_sum`, `_count` and `_bucket`. Of
several names of a signal the first that a server has counts: later ones are those of older
versions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kendall.policies.text import SpecError

HISTOGRAMS = (
    "queue_time",  # seconds from the arrival at the engine to the first step, of the finished
    "sojourn",  # seconds from the arrival at the server to the end
    "first_token",  # seconds from the arrival at the server to the first token
    "token_gap",  # seconds from one token of an answer to its next, as they come
    "prefill",  # seconds from the first step to the first token, of the finished
    "service",  # seconds from the first step to the end
    "prompt_tokens",
    "computed_tokens",  # those of the prompt that no prefix cache held
    "output_tokens",
)
LENGTHS = ("prompt_tokens", "computed_tokens", "output_tokens")
COUNTERS = ("finished", "generated", "prompted", "preempted", "prefix_hits", "prefix_queries")
GAUGES = ("running", "waiting", "kv_usage")
_QUEUE = (("running", ""), ("waiting", ""), ("queue_time", "_sum"), ("queue_time", "_count"))
NEEDED = ("finished", "sojourn", "queue_time")  # of one of them requests are counted


@dataclass(frozen=True)
class ServerKind:
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


VLLM = ServerKind(
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
SGLANG = ServerKind(
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
TENSORRT_LLM = ServerKind(
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
TGI = ServerKind(
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
LLAMA_CPP = ServerKind(
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


def server_of(names: Collection[str], where: str) -> ServerKind:
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


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """One reading of a server's own queue, over all models and engines in it: requests running and
    waiting now; queueing delays of those that ended since its start, their sum in seconds and their
    number. None where the server does not export it.
    """

    server: ServerKind
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
        for server in SERVERS:
            used = {part: name for name, part in server.used(values).items()}
            found = {part: values[used[part]] for part in _QUEUE if part in used}
            if ("running", "") not in found and ("queue_time", "_count") not in found:
                continue
            number = found.get(("queue_time", "_count"))
            return cls(
                server=server,
                running=found.get(("running", ""), 0.0),
                waiting=found.get(("waiting", ""), 0.0),
                seconds=found.get(("queue_time", "_sum")),
                requests=None if number is None else int(number),
            )
        return None

    @property
    def unanswered(self) -> int:
        """Requests in the server now."""
        return int(self.running + self.waiting)
