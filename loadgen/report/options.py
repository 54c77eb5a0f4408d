"""The options on what the report of a load run says, of `kendall load` and `kendall summary`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kendall.loadgen.measures.failures import ALLOWED
from kendall.loadgen.sending.options import GOALS, HOW, RESULTS
from kendall.options import option
from kendall.policies.text import CommaList
from kendall.queueing.measurement.paths import FileToWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The texts as given; `load_report.parse_wishes` reads them."""

    lateness_budget: str | None = option(
        HOW,
        (
            "Largest allowed lateness of sending; a run beyond it is INVALID, with exit status 3 "
            "if the option is given. Default: mean=1ms,p99=5ms."
        ),
        parser=CommaList(),
    )
    goodput: tuple[str, ...] = option(
        GOALS,
        (
            "Report goodput under these limits, for example 'ttft:100ms e2el:1s'; a bare number "
            "is in milliseconds. Repeatable."
        ),
        default=(),
    )
    slo: tuple[str, ...] = option(
        GOALS,
        (
            "Objective of the run, for example 'p99_ttft<=200ms, mean_queueing_delay<=50ms'; exit "
            "status 3 if it is missed. Repeatable."
        ),
        default=(),
    )
    html: Path | None = option(
        RESULTS,
        "Write a self-contained HTML report to this file.",
        parser=FileToWrite("load.html"),
    )
    csv: Path | None = option(
        RESULTS,
        "Write the table of durations to this file, in milliseconds.",
        parser=FileToWrite("load.csv"),
    )
    max_failed_fraction: float = option(
        HOW,
        (
            "Largest allowed fraction of failed requests, or of answers without a token; a run "
            "beyond it is INVALID, with exit status 3."
        ),
        default=ALLOWED,
    )
    percentile_metrics: str | None = option(
        RESULTS, "Durations to report, for example ttft,tpot,itl,e2el.", parser=CommaList()
    )
    metric_percentiles: str | None = option(
        RESULTS, "Percentiles to report. Default: 50,90,95,99.", parser=CommaList()
    )
    assertions: tuple[str, ...] = option(
        GOALS,
        (
            "Condition on the result, for example 'p99_ttft < 200ms'; exit status 3 if it does "
            "not hold. Repeatable."
        ),
        "--assert",
        default=(),
    )
