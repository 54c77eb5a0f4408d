"""Reading result files of GuideLLM, AIPerf and inference-perf as the header and records of a run.

    GuideLLM 0.8          benchmarks.json (`--output kind=json`): one benchmark, its requests by
                          status
    AIPerf 0.13           profile_export.jsonl: one record a line; warm-up requests are left out
    inference-perf 0.7    per_request_lifecycle_metrics.json: a list (`--report.request_lifecycle.
                          per_request true`)

All say when a request was sent. When it was due: GuideLLM for constant, Poisson and replayed
schedules (`targeted_start`), AIPerf when its rate limiter let it go (`credit_issued_ns`),
inference-perf from 0.8 on (`scheduled_time`). Requests that these clients ended themselves, as
GuideLLM does at the end of a benchmark, are cancelled by the client. Only AIPerf sends the id that
it writes down, which joins its records to a gateway's. Nothing else that such a file does not know
is filled in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.measures.failures import HUNG_UP
from kendall.queueing.measurement.record import Header, Outcome, Record, shown

NANOSECONDS, MILLISECONDS = 1e-9, 1e-3  # seconds
_REFUSALS = {"429", "503"}
QUEUE_TIMEOUT = "queue_timeout"  # code of a gateway's answer where the patience ran out
_HTTPX_STATUS = re.compile(r" error '([45]\d\d) ")  # in the text of httpx's HTTPStatusError


def _failed(status: str | None, text: str) -> tuple[Outcome, str]:
    """Outcome and error of a request that failed, as our own client writes them."""
    error = text if status is None else f"{status} {text}"
    refused: Outcome = "abandoned" if QUEUE_TIMEOUT in text else "rejected"
    return (refused if status in _REFUSALS else "failed"), error


class _Timings(msgspec.Struct):
    targeted_start: float | None = None
    request_start: float | None = None
    first_token_iteration: float | None = None
    last_token_iteration: float | None = None
    request_end: float | None = None
    resolve_end: float | None = None


class _Info(msgspec.Struct):
    timings: _Timings
    turn_index: int = 0
    error: str | None = None


class _ForeignUsage(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponseTimes(msgspec.Struct):
    queue_time_ms: float | None = None  # of a vLLM with --enable-per-request-metrics


class _GuideRequest(msgspec.Struct):
    info: _Info
    response_metrics: _ResponseTimes | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    input_metrics: _ForeignUsage = msgspec.field(default_factory=_ForeignUsage)


class _Requests(msgspec.Struct):
    successful: list[_GuideRequest] | None = None
    incomplete: list[_GuideRequest] | None = None
    errored: list[_GuideRequest] | None = None


class _Strategy(msgspec.Struct):
    type_: str
    rate: float | None = None


class _GuideConfig(msgspec.Struct):
    strategy: _Strategy


class _Benchmark(msgspec.Struct):
    config: _GuideConfig
    requests: _Requests


class _GuideReport(msgspec.Struct):
    benchmarks: list[_Benchmark]


# of a GuideLLM strategy: what a header says of its arrivals, and whether they are due at an instant
_STRATEGIES: dict[str, tuple[dict[str, Any], bool]] = {
    "poisson": ({"arrivals": "poisson"}, True),
    "constant": ({"arrivals": "deterministic"}, True),
    "trace": ({"trace": True}, True),
    "throughput": ({"request_rate": "inf"}, False),
    "synchronous": ({"loop": "closed"}, False),
    "concurrent": ({"loop": "closed"}, False),
}


def _guidellm(data: bytes, name: str) -> tuple[dict[str, Any], list[Record]]:
    report = msgspec.json.decode(data, type=_GuideReport)
    if len(report.benchmarks) != 1:
        raise ValueError(
            f"got {len(report.benchmarks)} benchmarks; expected one: a file for each rate"
        )
    (benchmark,) = report.benchmarks
    strategy = benchmark.config.strategy
    arrivals, due = _STRATEGIES.get(strategy.type_, ({"arrivals": strategy.type_}, False))
    asked = arrivals if strategy.rate is None else arrivals | {"request_rate": strategy.rate}
    requests = benchmark.requests
    talks = any(one.info.turn_index for one in requests.successful or ())

    def record(request: _GuideRequest, outcome: Outcome) -> Record:
        info, at = request.info, request.info.timings
        done, error = outcome == "completed", None
        if outcome == "cancelled":
            error = HUNG_UP
        elif outcome == "failed":
            status = _HTTPX_STATUS.search(info.error or "")
            outcome, error = _failed(status and status[1], info.error or "no reason given")
        return Record(
            request_id=name,
            outcome=outcome,
            intended_at=at.targeted_start if due else None,
            sent_at=at.request_start,
            first_token_at=at.first_token_iteration,
            last_token_at=at.last_token_iteration,
            released_at=at.resolve_end if at.request_end is None else at.request_end,
            queueing_delay=None
            if request.response_metrics is None
            else _from_ms(request.response_metrics.queue_time_ms),
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.input_metrics.cached_tokens if done else None,
            output_tokens=request.output_tokens,
            turn=info.turn_index + 1 if talks else None,
            error=error,
        )

    groups: tuple[tuple[Outcome, list[_GuideRequest] | None], ...] = (
        ("completed", requests.successful),
        ("cancelled", requests.incomplete),
        ("failed", requests.errored),
    )
    records = [record(one, outcome) for outcome, group in groups for one in group or ()]
    return asked, records


def _from_ms(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * MILLISECONDS


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int
    x_request_id: str | None = None
    turn_index: int | None = None
    credit_issued_ns: int | None = None
    request_ack_ns: int | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: bool = False


class _Value(msgspec.Struct):
    value: Any = None


class _AiperfError(msgspec.Struct):
    message: str
    code: int | None = None
    type: str | None = None


class _AiperfRecord(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Value] = {}
    error: _AiperfError | None = None

    def metric(self, name: str) -> Any:
        value = self.metrics.get(name)
        return None if value is None else value.value


def _aiperf(data: bytes, name: str) -> tuple[dict[str, Any], list[Record]]:
    lines = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                lines.append(msgspec.json.decode(line, type=_AiperfRecord))
            except msgspec.MsgspecError as error:
                raise ValueError(
                    f"line {number}: got {shown(line)}; expected a record ({error})"
                ) from None
    profiled = [one for one in lines if one.metadata.benchmark_phase != "warmup"]
    talks = any(one.metadata.turn_index for one in profiled)
    return {}, [_aiperf_record(one, name, talks=talks) for one in profiled]


def _aiperf_record(one: _AiperfRecord, name: str, *, talks: bool) -> Record:
    about = one.metadata
    sent_at = about.request_start_ns * NANOSECONDS
    outcome: Outcome = "completed"
    error: str | None = None
    if about.was_cancelled:
        outcome, error = "cancelled", HUNG_UP
    elif one.error is not None:
        status = None if one.error.code is None else str(one.error.code)
        outcome, error = _failed(status, f"{one.error.type or 'error'}: {one.error.message}")
    first = one.metric("time_to_first_token")
    gaps = one.metric("inter_chunk_latency")
    token_at = None
    if first is not None:
        steps = gaps if isinstance(gaps, list) else []
        begun = sent_at + first * MILLISECONDS
        token_at = list(accumulate((gap * MILLISECONDS for gap in steps), initial=begun))
    return Record(
        request_id=name,
        client_request_id=about.x_request_id,
        outcome=outcome,
        intended_at=_seconds(about.credit_issued_ns),
        sent_at=sent_at,
        first_byte_at=_seconds(about.request_ack_ns),
        first_token_at=token_at[0] if token_at else None,
        last_token_at=token_at[-1] if token_at else None,
        token_at=token_at if gaps else None,
        released_at=about.request_end_ns * NANOSECONDS,
        prompt_tokens=one.metric("input_sequence_length"),
        output_tokens=one.metric("output_sequence_length"),
        turn=(about.turn_index or 0) + 1 if talks else None,
        error=error,
    )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds * NANOSECONDS


class _ForeignText(msgspec.Struct):
    input_tokens: int | None = None


class _RequestMetrics(msgspec.Struct):
    text: _ForeignText = msgspec.field(default_factory=_ForeignText)


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _GatewayTimes(msgspec.Struct):
    queueing_delay_ms: float | None = None
    service_ms: float | None = None


class _ServerUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    kendall: _GatewayTimes = msgspec.field(default_factory=_GatewayTimes)

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _ResponseMetrics(msgspec.Struct):
    output_tokens: int | None = None
    server_usage: _ServerUsage | None = None
    chunk_times: list[float] = []  # of those that bring text


class _InferenceInfo(msgspec.Struct):
    request_metrics: _RequestMetrics = msgspec.field(default_factory=_RequestMetrics)
    response_metrics: _ResponseMetrics | None = None


class _PerfError(msgspec.Struct):
    error_type: str
    error_msg: str


class _LifecycleEntry(msgspec.Struct):
    start_time: float
    end_time: float
    scheduled_time: float | None = None
    info: _InferenceInfo | None = None
    error: _PerfError | None = None


def _inference_perf(data: bytes, name: str) -> tuple[dict[str, Any], list[Record]]:
    entries = msgspec.json.decode(data, type=list[_LifecycleEntry])
    return {}, [_lifecycle_record(entry, name) for entry in entries]


def _lifecycle_record(entry: _LifecycleEntry, name: str) -> Record:
    info = entry.info or _InferenceInfo()
    response = info.response_metrics or _ResponseMetrics()
    usage = response.server_usage or _ServerUsage()
    outcome: Outcome = "completed"
    error: str | None = None
    if entry.error is not None:
        kind, _, status = entry.error.error_type.rpartition(" ")
        known = status if kind == "HTTP Error" else None
        outcome, error = _failed(known, f"{entry.error.error_type}: {entry.error.error_msg}")
    # its output_token_times repeat the instant of a chunk as often as its own tokenizer counts
    token_at = response.chunk_times
    return Record(
        request_id=name,
        outcome=outcome,
        intended_at=entry.scheduled_time,
        sent_at=entry.start_time,
        first_token_at=token_at[0] if token_at else None,
        last_token_at=token_at[-1] if token_at else None,
        token_at=token_at or None,
        released_at=entry.end_time,
        queueing_delay=_from_ms(usage.kendall.queueing_delay_ms),
        service_time=_from_ms(usage.kendall.service_ms),
        prompt_tokens=info.request_metrics.text.input_tokens
        if usage.prompt_tokens is None
        else usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=response.output_tokens
        if usage.completion_tokens is None
        else usage.completion_tokens,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A load generator's file: marks near its beginning, how it is read, its clock, and what makes
    it write one with requests in it.
    """

    tool: str
    begins: bytes
    marks: tuple[bytes, ...]
    read: Callable[[bytes, str], tuple[dict[str, Any], list[Record]]]
    clock: str
    advice: str


FORMATS = (
    ForeignFormat(
        "GuideLLM", b"{", (b'"guidellm_version"',), _guidellm, "unix", "a file with its requests"
    ),
    ForeignFormat(
        "AIPerf",
        b"{",
        (b'"metadata"', b'"request_start_ns"'),
        _aiperf,
        "unix",
        "profile_export.jsonl",
    ),
    ForeignFormat(
        "inference-perf",
        b"[",
        (b'"start_time"', b'"end_time"'),
        _inference_perf,
        "perf_counter",
        "per_request_lifecycle_metrics.json",
    ),
)


def foreign_format(head: bytes) -> ForeignFormat | None:
    """The load generator that wrote a file that begins so; None where it is none of them."""
    return next(
        (
            each
            for each in FORMATS
            if head.startswith(each.begins) and all(mark in head for mark in each.marks)
        ),
        None,
    )


def foreign_run(data: bytes, path: Path, form: ForeignFormat) -> tuple[Header, list[Record]]:
    """Header and records of its file, in the order of sending. Raises ValueError with its name."""
    try:
        asked, records = form.read(data, path.stem)
    except ValueError as error:  # msgspec's are of this kind
        raise ValueError(f"{path}: {error}, as {form.tool} writes it") from None
    sent = [record for record in records if record.sent_at is not None]
    if not sent:
        raise ValueError(f"{path}: got no request; expected {form.advice} of {form.tool}")
    sent.sort(key=_began)
    return Header(
        writer="load", clock=form.clock, configuration={"tool": form.tool, **asked}
    ), _numbered(sent)


def _began(record: Record) -> float:
    return (record.sent_at if record.intended_at is None else record.intended_at) or 0.0


def _numbered(records: Sequence[Record]) -> list[Record]:
    """With ids that end in the number of the row, as those of our own files, and sojourn times."""
    return [
        msgspec.structs.replace(
            record,
            request_id=f"{record.request_id}-{row}",
            sojourn_time=record.released_at - _began(record)
            if record.outcome == "completed" and record.released_at is not None
            else None,
        )
        for row, record in enumerate(records)
    ]
