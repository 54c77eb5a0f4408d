"""What is said of a run's records: lines, table, notes and numbers, as kept."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from kendall.loadgen.measures.failures import count_failures, is_failure, outcome_of, percent
from kendall.loadgen.measures.goodput import goodput, parse_goodput
from kendall.loadgen.measures.little_check import little_check
from kendall.loadgen.measures.metrics import METRICS, values
from kendall.loadgen.measures.missing import incomplete, missing_records
from kendall.loadgen.measures.stability import growth
from kendall.loadgen.report.numbers import decimals, load_text, mean_and_half, ms, typeset
from kendall.loadgen.report.numbers import percent as signed_percent
from kendall.loadgen.report.summary import summarise_records
from kendall.loadgen.report.summary_text import (
    histogram_table,
    load_lines,
    load_notes,
    load_table,
    status_table,
)
from kendall.loadgen.report.summary_values import flat
from kendall.queueing.measurement.record import Header, Record
from tests.golden_files import is_as_kept
from tests.kept_values import moved


def run(count: int, *, rate: float = 20.0, slow: float = 0.0, late: float = 1e-4) -> list[Record]:
    """One server, first come first served; answers take longer and longer where it is `slow`."""
    rng = np.random.default_rng(count)
    free, at, records = 0.0, 100.0, []
    for number in range(count):
        at += float(rng.exponential(1 / rate))
        tokens = int(rng.integers(1, 20))
        begin = max(free, at + late)
        free = begin + tokens * 0.003 * (1 + slow * number)
        records.append(
            Record(
                request_id=f"r-{number}",
                outcome="completed",
                intended_at=at,
                sent_at=at + late,
                first_byte_at=begin + 0.001,
                first_token_at=begin + 0.002,
                released_at=free,
                queueing_delay=begin - at,
                service_time=free - begin,
                sojourn_time=free - at,
                prompt_tokens=32,
                output_tokens=tokens,
            )
        )
    return records


def changed(records: list[Record], every: int, **about: Any) -> list[Record]:
    """Each `every`th of them is another one."""
    return [
        msgspec.structs.replace(each, **about) if place % every == 2 else each
        for place, each in enumerate(records)
    ]


WHOLE = run(600)
NOTHING: dict[str, Any] = {
    "first_byte_at": None,
    "first_token_at": None,
    "queueing_delay": None,
    "service_time": None,
    "sojourn_time": None,
    "output_tokens": None,
}
RUNS: dict[str, list[Record]] = {
    "whole": WHOLE,
    "short": run(30),
    "one": run(1),
    "none": [],
    "overloaded": run(500, rate=60.0),
    "slower and slower": run(400, slow=0.01),
    "late": run(300, late=0.02),
    "failed": changed(WHOLE, 7, outcome="failed", error="500 engine died", **NOTHING),
    "rejected": changed(WHOLE, 5, outcome="rejected", error="429 queue_full: no", **NOTHING),
    "unavailable": changed(WHOLE, 9, outcome="rejected", error="503 shutting_down", **NOTHING),
    "abandoned": changed(WHOLE, 11, outcome="abandoned", error="queue_timeout", **NOTHING),
    "cut": changed(WHOLE, 50, outcome="cancelled", error="the run ended", **NOTHING),
    "empty answers": changed(WHOLE, 30, output_tokens=0),
    "without tokens": changed(WHOLE, 1, output_tokens=None),
    "of another server": [
        msgspec.structs.replace(each, queueing_delay=None, service_time=None) for each in WHOLE
    ],
    "never sent": changed(WHOLE, 3, outcome="cancelled", sent_at=None, released_at=None, **NOTHING),
    "wrong": changed(WHOLE, 4, sojourn_time=9.0),
}
LIMITS = parse_goodput(["ttft:100ms e2el:150ms"])


def summary(name: str, **about: Any) -> Any:
    return summarise_records(RUNS[name], asked_rate=20.0, limits=LIMITS, **about)


def test_what_is_printed_is_as_kept() -> None:
    to = io.StringIO()
    console = Console(file=to, width=100)
    for name in RUNS:
        for interrupted in (False, True) if name in ("cut", "whole", "never sent") else (False,):
            found = summary(name, interrupted=interrupted)
            to.write(f"== {name}{', interrupted' * interrupted}\n")
            to.writelines(f"{line}\n" for line in load_lines(found))
            tables = (load_table(found), histogram_table(found), status_table(found))
            for table in filter(None, tables):
                console.print(table)
            to.writelines(f"{line}\n" for line in load_notes(found))
            console.print(load_table(found, ("e2el",)))
            to.writelines(f"{line}\n" for line in load_notes(found, ("e2el",)))
    assert is_as_kept("summaries.txt", to.getvalue())


def test_their_numbers_are_as_kept() -> None:
    cases: dict[str, Callable[[], Any]] = {}
    for name, records in RUNS.items():
        cases[name] = lambda name=name, records=records: {  # type: ignore[misc]
            "flat": flat(summary(name)),
            "at other percentiles": flat(summary(name, percentiles=(10.0, 99.9))),
            "goodput": goodput(records, LIMITS),
            "little": little_check(records),
            "little of the rest": little_check(records, 7),
            "values": {
                metric: values(metric, records) for metric in (*METRICS, "itl", "send_lateness")
            },
        }
    assert moved("summaries.json", cases) == []


def test_failures_are_as_kept() -> None:
    def told(name: str, *, cut_short: bool, allowed: float) -> Any:
        found = count_failures(RUNS[name], cut_short=cut_short, allowed=allowed)
        return [
            found.lines(),
            found.text(),
            found.as_object(),
            found.too_many,
            found.too_many_empty,
        ]

    cases: dict[str, Callable[[], Any]] = {
        f"{name} {cut_short} {allowed}": lambda name=name, cut_short=cut_short, allowed=allowed: (
            told(  # type: ignore[misc]
                name, cut_short=cut_short, allowed=allowed
            )
        )
        for name in RUNS
        for cut_short in (False, True)
        for allowed in (0.0, 0.05)
    }
    cases["outcomes"] = lambda: [
        [is_failure(RUNS[name][2]), outcome_of(RUNS[name][2])]
        for name in RUNS
        if len(RUNS[name]) > 2
    ]
    cases["percent"] = lambda: [percent(share) for share in (0.0, 0.01234, 0.5, 1.0)]
    assert moved("failures.json", cases) == []


def test_what_is_missing_is_as_kept() -> None:
    records = RUNS["never sent"][:9]
    headers = {
        "killed": {"num_prompts": 20},
        "ended": {"num_prompts": 20, "recorded": 9, "interrupted": False},
        "one too few": {"num_prompts": 20, "recorded": 10, "interrupted": False},
        "interrupted": {"num_prompts": 20, "recorded": 9, "interrupted": True},
        "interrupted and cut": {"num_prompts": 20, "recorded": 12, "interrupted": True},
        "told": {"num_prompts": 20, "interrupted": False, "missing": ["a sender was lost"]},
        "nothing said": {},
    }
    cases: dict[str, Callable[[], Any]] = {
        f"{name} {writer} {cut}": lambda configuration=configuration, writer=writer, cut=cut: [  # type: ignore[misc]
            list(function(Header(writer=writer, configuration=configuration), given, cut=cut))
            for function in (missing_records, incomplete)
            for given in (records, [*records, records[0]])
        ]
        for name, configuration in headers.items()
        for writer in ("load", "gateway")
        for cut in (False, True)
    }
    assert moved("missing-records.json", cases) == []


def test_growth_is_as_kept() -> None:
    at: Any = np.arange(0.0, 30.0, 0.1)
    noise = np.random.default_rng(3).integers(0, 4, at.size)
    cases: dict[str, Callable[[], Any]] = {
        name: lambda number=number: [  # type: ignore[misc]
            (found := growth(at, number, 20.0)),
            found.unstable,
            str(found),
        ]
        for name, number in {
            "steady": noise.astype(float),
            "growing": noise + 2 * at,
            "falling": noise + 60 - 2 * at,
            "growing slowly": noise + 0.7 * at,
            "one jump": np.where(at > 15, 40.0, 2.0),
            "constant": np.full(at.size, 5.0),
        }.items()
    }
    cases["from a later instant"] = lambda: growth(at + 7, noise + 2 * at, 20.0)
    cases["no rate"] = lambda: growth(at, 0 * at, 0.0)
    assert moved("growth.json", cases) == []


def test_numbers_of_the_report_are_as_kept() -> None:
    seconds = (0.0, 5e-5, 1.5e-4, 9.99e-4, 1e-3, -0.5, 0.0123, 1234.5, math.nan, math.inf)
    cases: dict[str, Callable[[], Any]] = {
        "ms": lambda: [ms(each) for each in (*seconds, None)],
        "decimals": lambda: [decimals(each) for each in seconds[:-2]],
        "halves": lambda: [mean_and_half(each, 0.00123) for each in seconds[:-2]],
        "open half": lambda: mean_and_half(0.5, math.inf),
        "percent": lambda: [signed_percent(x) for x in (0.0, -1e-4, 0.123, -12.5, None, math.nan)],
        "load": lambda: [load_text(x) for x in (None, 0.3, 0.0, 0.45, 1.0, 0.999)],
        "typeset": lambda: typeset("<b> 5 % & 6%"),
    }
    assert moved("report-numbers.json", cases) == []
