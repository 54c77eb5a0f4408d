"""Engine: vLLM's own metrics beside the gateway's."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.frame import Section, dashboard
from grafana.panels import (
    ATTENTION,
    BYTES,
    COUNT,
    FRACTION,
    PER_SECOND,
    SECONDS,
    STATE,
    TOKENS_PER_SECOND,
    Series,
    lines,
    number,
)
from grafana.queries import gauge, mean, quantile, rate

INSTANCE = ("instance",)


def build() -> Dashboard:
    """What both count, side by side; then what only vLLM knows."""
    says = (
        "vLLM's metrics (vllm:...) next to the gateway's, from the same scrape. An emulated "
        "engine has no vLLM metrics."
    )
    return dashboard(
        "kendall-engine",
        "Kendall / Engine",
        says,
        [_life(), _queues(), _times(), _tokens(), _process()],
    )


def _life() -> Section:
    return "Engine", [
        number(
            "Engine",
            "Engine, model and version of Kendall.",
            STATE,
            Series(gauge("kendall_engine_info"), "{{engine}} {{model}} (Kendall {{version}})"),
            width=8,
        ),
        number(
            "Engine up",
            "1: the engine serves. 0: it is restarting or has failed for good.",
            COUNT,
            Series(gauge("kendall_engine_up"), "{{instance}}"),
        ),
        number(
            "Restarts",
            "Restarts of a failed engine since the gateway started.",
            COUNT,
            Series(gauge("kendall_engine_restarts"), "{{instance}}"),
            limits=[(1.0, "orange"), (3.0, "red")],
        ),
        number(
            "KV cache",
            "Fraction of vLLM's KV cache in use.",
            FRACTION,
            Series(gauge("vllm:kv_cache_usage_perc"), "{{instance}}"),
            limits=[(0.8, "orange"), (0.95, "red")],
        ),
        number(
            "Speed",
            (
                "Measured service time divided by that of the calibrated law. Above 1 the engine "
                "is slower than at its calibration."
            ),
            FRACTION,
            Series(gauge("kendall_engine_speed_ratio", known="> 0"), "{{instance}}"),
            limits=[(1.15, "orange"), (1.5, "red")],
        ),
    ]


def _queues() -> Section:
    return "Queues", [
        lines(
            "In service and running",
            "Sequences in service, counted by the gateway and by vLLM. The gateway's count is "
            "larger between a dispatch and the engine's next step.",
            COUNT,
            _beside(gauge("kendall_in_service"), gauge("vllm:num_requests_running")),
        ),
        lines(
            "Waiting",
            (
                "Requests in the gateway's queue and in the engine's. The engine's queue stays "
                "empty: all requests wait in the gateway."
            ),
            COUNT,
            _beside(gauge("kendall_queue_length"), gauge("vllm:num_requests_waiting")),
        ),
        lines(
            "Queueing delay, mean",
            "Mean time in the gateway's queue and in the engine's.",
            SECONDS,
            _beside(
                mean("kendall_queueing_delay_seconds", by=INSTANCE),
                mean("vllm:request_queue_time_seconds", by=INSTANCE),
            ),
            limits=ATTENTION,
        ),
        lines(
            "Preemptions",
            (
                "Sequences per second that vLLM preempted because the KV cache was full. Above 0: "
                "lower max_num_seqs or the batch size."
            ),
            PER_SECOND,
            [Series(rate("vllm:num_preemptions_total", by=INSTANCE), "{{instance}}")],
            limits=[(0.01, "red")],
        ),
    ]


def _times() -> Section:
    return "Times", [
        lines(
            "Time to first token, p95",
            "Kendall: from arrival, queueing included. vLLM: from the dispatch to the engine.",
            SECONDS,
            _beside(
                quantile("kendall_time_to_first_token_seconds", 0.95, by=INSTANCE),
                quantile("vllm:time_to_first_token_seconds", 0.95, by=INSTANCE),
            ),
            limits=ATTENTION,
        ),
        lines(
            "Between tokens, mean",
            "Mean of the gaps between tokens: as they reach Kendall, and as vLLM counts them.",
            SECONDS,
            _beside(
                mean("kendall_inter_token_latency_seconds", by=INSTANCE),
                mean("vllm:inter_token_latency_seconds", by=INSTANCE),
            ),
        ),
        lines(
            "Service, mean",
            (
                "Kendall: from dispatch until the server is free again. vLLM: from scheduling to "
                "the last token of a request."
            ),
            SECONDS,
            _beside(
                mean("kendall_service_time_seconds", by=INSTANCE),
                mean("vllm:request_inference_time_seconds", by=INSTANCE),
            ),
        ),
        lines(
            "Batch size",
            "Kendall: mean number of sequences per dispatch. vLLM: mean number of tokens per "
            "engine step (one per sequence while decoding).",
            COUNT,
            _beside(
                mean("kendall_batch_size", by=INSTANCE),
                mean("vllm:iteration_tokens_total", by=INSTANCE),
            ),
        ),
    ]


def _tokens() -> Section:
    return "Tokens", [
        lines(
            "Output tokens",
            (
                "vLLM: tokens generated, padding of static batches included. Kendall: tokens of "
                "completed answers."
            ),
            TOKENS_PER_SECOND,
            [
                Series(
                    rate("vllm:generation_tokens_total", by=INSTANCE),
                    "generated by vLLM {{instance}}",
                ),
                Series(
                    rate("kendall_output_tokens_sum", by=INSTANCE),
                    "completed by Kendall {{instance}}",
                ),
            ],
        ),
        lines(
            "Prompt tokens",
            (
                "Prompt tokens computed by vLLM. Those still in the gateway's queue are "
                "`kendall_queued_tokens`."
            ),
            TOKENS_PER_SECOND,
            [Series(rate("vllm:prompt_tokens_total", by=INSTANCE), "{{instance}}")],
        ),
    ]


def _process() -> Section:
    return "The gateway's process", [
        lines(
            "Processor",
            (
                "Processor time of the gateway process, as a fraction of one core; the engine "
                "runs in its own process."
            ),
            FRACTION,
            [Series(rate("process_cpu_seconds_total", by=INSTANCE), "{{instance}}")],
            limits=[(0.7, "orange"), (0.9, "red")],
            width=8,
        ),
        lines(
            "Own time of a call, by stage",
            "Mean time of the event loop per stage; one call in 64 is measured. `prompt` includes "
            "the wait for the tokeniser, `write` the wait for the client.",
            SECONDS,
            [Series(mean("kendall_own_time_seconds", by=("stage",), window="5m"), "{{stage}}")],
            width=8,
        ),
        lines(
            "Memory",
            "Resident memory of the gateway process.",
            BYTES,
            [Series(gauge("process_resident_memory_bytes"), "{{instance}}")],
            width=8,
        ),
    ]


def _beside(kendall: str, vllm: str) -> list[Series]:
    """The gateway's and the engine's own view of one quantity."""
    return [Series(kendall, "Kendall {{instance}}"), Series(vllm, "vLLM {{instance}}")]
