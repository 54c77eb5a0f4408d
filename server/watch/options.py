"""Options of `kendall watch`; light to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kendall.options import option
from kendall.policies.durations import Duration
from kendall.queueing.measurement.paths import FileToWrite
from kendall.remote import Trust

SOURCES, QUEUE, REPORT, ACCESS = "Sources", "Queue", "Report", "Access"
PANELS = (SOURCES, QUEUE, REPORT, ACCESS)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where the observations come from."""

    otlp: str | None = option(
        SOURCES,
        "Address on which to receive the servers' OpenTelemetry spans, HOST:PORT or :PORT "
        "(http/protobuf, and gRPC): `vllm serve --otlp-traces-endpoint`.",
    )
    prometheus: str | None = option(
        SOURCES,
        "URL of a Prometheus that scrapes the servers: the track record of what it holds.",
    )
    since: float = option(
        SOURCES,
        "With --prometheus: how far back the track record goes.",
        default=24 * 3600.0,
        parser=Duration(60.0, endless=False),
    )
    every: float | None = option(
        SOURCES,
        "The time that a row of the track record covers. Default: with --prometheus an hour, or a "
        "sixth of --since where that is less than two; with URLs 5 minutes.",
        parser=Duration(60.0, endless=False),
    )
    match: str = option(
        SOURCES,
        "With --prometheus: label selector of the servers, for example 'job=\"vllm\"'.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class WatchedQueueOptions:
    """What the servers do not tell."""

    max_num_seqs: int | None = option(
        QUEUE,
        "Slots of a server. Default: the most that it ran while something waited.",
        min=1,
    )
    latency: str | None = option(
        QUEUE, "Latency law or name of a profile. Default: fitted to what is observed."
    )
    slo: str | None = option(
        QUEUE, "Service level objective to advise for, for example p99_queueing_delay=2s."
    )


@dataclass(frozen=True, kw_only=True)
class WatchReportOptions:
    """What is shown, and how long it watches."""

    host: str = option(REPORT, "Address of the page and the metrics.", default="127.0.0.1")
    port: int = option(
        REPORT,
        "Port of the page and the metrics (0: any free port).",
        default=8081,
        min=0,
        max=65535,
    )
    once: bool = option(
        REPORT, "Watch for the time of --for, print what was seen and end.", default=False
    )
    seconds: float = option(
        REPORT,
        "With --once: how long to watch.",
        "--for",
        default=60.0,
        parser=Duration(1.0, endless=False),
    )
    output: Path | None = option(
        REPORT,
        "With --prometheus: also write the track record as one HTML page.",
        parser=FileToWrite("track-record.html"),
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Flags of `kendall watch`; seconds and tokens."""

    source: SourceOptions = field(default_factory=SourceOptions)
    queue: WatchedQueueOptions = field(default_factory=WatchedQueueOptions)
    report: WatchReportOptions = field(default_factory=WatchReportOptions)
    api_key: str | None = option(
        ACCESS, "Key sent to the servers or the Prometheus as a bearer token.", secret=True
    )
    header: tuple[str, ...] = option(
        ACCESS,
        "Header sent to the servers or the Prometheus, NAME:VALUE; repeatable.",
        default=(),
    )
    trust: Trust = field(default_factory=Trust)
