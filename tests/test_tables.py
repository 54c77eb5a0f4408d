"""Every command's tables, as they look at 80 columns, at 100 and without a terminal: nothing is
cut, every number stands whole.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from kendall import cli
from kendall.loadgen.commands.demo_report import DemoCell, print_report
from kendall.loadgen.compare.comparison import Comparison
from kendall.loadgen.report.report import show as show_comparisons
from kendall.loadgen.report.summary import LoadSummary, summarise_records
from kendall.loadgen.report.summary_text import load_table
from kendall.queueing.commands.terminal import NO_TERMINAL, console
from kendall.queueing.estimation.counters.fleet import FleetPrediction
from kendall.queueing.estimation.counters.step_law import StepLaw
from kendall.queueing.estimation.counters.track_record import Observed, RecordRow, TrackRecord
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.latency.law import parse_law
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.server.operations.advice_table import show as show_advice
from kendall.server.operations.calibrate import show as show_law
from kendall.server.watch.record_text import show as show_record
from tests.golden_files import is_as_kept

ROOT = Path(__file__).parents[1]
WIDTHS = {"80 columns": 80, "100 columns": 100, "no terminal": None}
QUEUE = ("--output-tokens", "uniform:low=8,high=24", "--latency", "reference")
COMMANDS = {
    "check-policy": ("check-policy", "capped:max_batch_size=8", "--states", "200"),
    "check-policy-list": ("check-policy",),
    "policies": ("policies",),
    "profiles": ("profiles",),
    "predict": ("predict", "--policy", "capped:max_batch_size=8", "--arrival-rate", "200", *QUEUE),
    "predict-unstable": ("predict", "--policy", "single", "--arrival-rate", "200", *QUEUE),
    "predict-renewal": (
        "predict",
        "--policy",
        "single",
        "--arrival-rate",
        "40",
        "--arrival-scv",
        "4",
        *QUEUE,
    ),
    "predict-tandem": (
        "predict",
        "--policy",
        "single",
        "--arrival-rate",
        "40",
        "--disaggregated",
        *QUEUE,
    ),
    "simulate": (
        "simulate",
        "--policy",
        "single",
        "--arrival-rate",
        "40",
        "--num-requests",
        "2000",
        *QUEUE,
    ),
    "optimize-policy": ("optimize", "--target", "policy", "--arrival-rate", "20", *QUEUE),
    "optimize-token-limit": (
        "optimize",
        "--target",
        "max-output-tokens",
        "--objective",
        "v2",
        "--patience",
        "2",
        "--arrival-rate",
        "20",
        *QUEUE,
    ),
    "optimize-batch-size": (
        "optimize",
        "--target",
        "batch-size",
        "--policy",
        "elastic",
        "--largest",
        "6",
        "--arrival-rate",
        "200",
        *QUEUE,
    ),
    "plan": (
        "plan",
        "--arrival-rate",
        "20",
        *QUEUE,
        "--slo",
        "mean_queueing_delay=100ms,mean_sojourn_time=3s",
        "--max-num-seqs",
        "2,8",
        "--max-output-tokens",
        "10,none",
    ),
    "optimize-servers": (
        "optimize",
        "--target",
        "servers",
        "--objective",
        "slo",
        "--slo",
        "p99_queueing_delay=2s",
        "--arrival-rate",
        "20",
        *QUEUE,
    ),
    "sweep-dry-run": (
        *(
            "sweep",
            "--dry-run",
            "--latency",
            "reference",
            "--max-output-tokens",
            "16,none",
            "--request-rates",
            "20,80",
            "--num-prompts",
            "300",
        ),
        *("--policies", "single", "continuous:max_batch_size=4", "fixed:batch_size=4,max_wait=0.5"),
    ),
    "reproduce": ("reproduce", "chapter-variability", "chapter-case"),
    "audit": ("audit", "poisson.jsonl", "regular.jsonl"),
    "summary": ("summary", "load.jsonl"),
}


@cache
def comparisons(name: str = "sweep") -> list[Comparison]:
    """The first twelve of a committed run on the real engine."""
    found = json.loads((ROOT / "bench/results" / name / "comparison.json").read_bytes())
    return [msgspec.convert(each, Comparison) for each in found[:12]]


@cache
def load_records() -> list[Record]:
    rng = np.random.default_rng(7)
    records, at = [], 0.0
    for index in range(2000):
        at += float(rng.exponential(0.1))
        first, gap = at + float(rng.gamma(2.0, 12.0)), float(rng.gamma(2.0, 0.0001))
        tokens = [first + gap * i for i in range(5)]
        records.append(
            Record(
                request_id=str(index),
                outcome="completed",
                intended_at=at,
                sent_at=at + 0.0002,
                first_byte_at=first - 0.001,
                first_token_at=first,
                last_token_at=tokens[-1],
                token_at=tokens,
                released_at=tokens[-1],
                queueing_delay=(first - at) / 2,
                prompt_tokens=10,
                output_tokens=5,
            )
        )
    return records


@cache
def summary() -> LoadSummary:
    return summarise_records(load_records(), percentiles=(50, 90, 95, 99))


def advice() -> list[dict[str, Any]]:
    def one(
        target: str, now: Any, best: Any, gain: tuple[float, float, float] | None
    ) -> dict[str, Any]:
        low, high = (None, None) if gain is None else gain[1:]
        says = (
            f"set {target} to what is printed above: mean queueing delay 12345.6 ms -> 8000.1 "
            "ms, 34 % less (95 %: 28 to 40 % less)"
        )
        found = {"value": None if gain is None else gain[0], "low": low, "high": high}
        now, best = (
            None if each is None else each | predicted
            for each, predicted in ((now, before), (best, after))
        )
        return {
            "target": target,
            "objective": "delay",
            "current": now,
            "best": best,
            "gain": found,
            "says": says,
            "change": target != "servers",
        }

    before = {
        "stable": True,
        "queueing_delay": {"mean": 12.3456},
        "sojourn_time": {"mean": 14.5678},
        "clipped_fraction": 0.0,
    }
    after = {
        "stable": True,
        "queueing_delay": {"mean": 0.00034},
        "sojourn_time": {"mean": 8.0001},
        "clipped_fraction": 0.0312,
    }

    fixed, running = (
        {"policy": "fixed:batch_size=16,max_wait=0.25"},
        {"policy": "continuous:max_batch_size=256"},
    )
    return [
        one("policy", fixed, running, (0.34, 0.28, 0.4)),
        one(
            "batch-size",
            fixed,
            {"policy": "fixed:batch_size=128,max_wait=0.25"},
            (0.123, 0.101, 0.15),
        ),
        one(
            "max-output-tokens",
            {"max_output_tokens": None},
            {"max_output_tokens": 131072},
            (0.01, -0.02, 0.04),
        ),
        one("servers", {"servers": 1}, None, None),
    ]


def balanced() -> dict[str, Any]:
    """Of two servers; one way of sending cannot be simulated."""

    def of(routing: str, delay: float, sojourn: float) -> dict[str, Any]:
        means = {"queueing_delay": {"mean": delay}, "sojourn_time": {"mean": sojourn}}
        more = {"queueing_delay": delay - 0.8, "sojourn_time": sojourn - 2.25}
        return {"routing": routing, **means, "more": more, "reason": None}

    return {
        "servers": 2,
        "central": {name: of("", 0.8, 2.25)[name] for name in ("queueing_delay", "sojourn_time")},
        "routings": [
            of("random", 1.913, 3.44),
            of("round_robin", 0.7953, 2.2451),
            {"routing": "least_requests", "reason": "a simulation takes too long"},
        ],
    }


def law() -> Profile:
    kept = json.loads((ROOT / "bench/results/sweep/profile.json").read_bytes())
    return msgspec.convert(kept, Profile)


def track_record() -> TrackRecord:
    """Four hours: the first without a prediction, one that was missed, one that was not watched."""
    seen: dict[str, Any] = {each.name: 1.0 for each in dataclasses.fields(Observed)}

    def row(hour: int, delay: float, predicted: tuple[float, float, float] | None) -> RecordRow:
        whole = {"queueing_delay": delay, "sojourn_time": delay + 12.3456}
        forecast = None
        if predicted is not None:
            value, low, high = predicted
            forecast = FleetPrediction(
                load=0.71,
                queueing_delay=Estimate(value, low, high, 20.0),
                sojourn_time=Estimate(value + 12.4, low + 12.2, high + 12.7, 20.0),
                method="approximation",
            )
        observed = Observed(**seen | whole | {"replicas": 2, "restarts": 0})
        return RecordRow(
            start=3600.0 * hour,
            end=3600.0 * (hour + 1),
            observed=observed,
            forecast=forecast,
            same_hour=forecast,
            step_seconds=0.02,
            cause="arrivals: 125% more than the row before" if hour == 2 else "",
        )

    rows = (
        row(0, 0.00123, None),
        row(1, 0.5, (0.4567, 0.0981, 1.234)),
        row(2, 23.4567, (0.5, 0.101, 1.5)),
        row(3, math.nan, (12.3456, 1.5, 123.4567)),
    )
    law = StepLaw(parse_law("k1=0.001,k2=0,k3=0.0019,k4=0.0204,kp=0.0001"), 1440)
    return TrackRecord(model="Qwen/Qwen3-8B", server="vLLM", rows=rows, law=law, slots=256)


SHOWN: dict[str, Callable[[Console], None]] = {
    "load": lambda to: to.print(load_table(summary())),
    "demo": lambda to: print_report(
        [DemoCell(each.policy, each.load or 0.0, each) for each in comparisons("demo")], to
    ),
    "compare": lambda to: show_comparisons(comparisons(), to),
    "advise": lambda to: show_advice(advice(), to),
    "advise-servers": lambda to: show_advice(advice()[-1:], to, balanced()),
    "watch": lambda to: show_record([track_record()], to),
    "calibrate": lambda to: show_law(law(), Path("profiles/tiny.json"), to),
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `audit` finds a Poisson run and one that is far from it."""
    gaps = {
        "poisson": np.random.default_rng(3).exponential(0.05, 600),
        "regular": np.full(600, 0.05),
    }
    for name, each in gaps.items():
        instants = (1e6 + np.cumsum(each)).tolist()
        records = [
            Record(request_id=f"{i}", outcome="completed", intended_at=at, sent_at=at + 0.0005)
            for i, at in enumerate(instants)
        ]
        write_run(
            tmp_path / f"{name}.jsonl",
            Header(writer="load", configuration={"arrivals": "poisson", "request_rate": 20.0}),
            records,
        )
    write_run(
        tmp_path / "load.jsonl",
        Header(writer="load", configuration={"arrivals": "poisson", "request_rate": 10.0}),
        load_records(),
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a command, or one of `SHOWN`, prints at a width."""

    def text(name: str, width: int | None, *more: str) -> str:
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(runs))  # no profiles of this user
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        if name in SHOWN:
            out = io.StringIO()
            SHOWN[name](console(out))
            return out.getvalue()
        with pytest.raises(SystemExit) as stop:
            cli.main([*COMMANDS[name], *more])
        assert stop.value.code == 0
        return capsys.readouterr().out

    return text


every_table = pytest.mark.parametrize("name", [*SHOWN, *COMMANDS])


def test_no_command_is_forgotten() -> None:
    names = (*SHOWN, *COMMANDS)
    shown = {*names, *(name.partition("-")[0] for name in names)}
    assert shown | {"serve"} >= set(cli.COMMANDS), (
        "serve prints no table; every other command has one here"
    )


@every_table
def test_it_looks_as_it_did_when_somebody_looked(name: str, printed: Callable[..., str]) -> None:
    text = "\n".join(f"== {title}\n{printed(name, width)}" for title, width in WIDTHS.items())
    assert is_as_kept(f"{name}.txt", text)


@pytest.mark.slow
@every_table
@pytest.mark.parametrize("width", [40, 80, 100])
def test_nothing_is_cut_and_lines_keep_to_the_width(
    name: str, width: int, printed: Callable[..., str]
) -> None:
    text = printed(name, width)
    assert not set("…─│") & set(text)
    too_long = [line for line in text.splitlines() if len(line) > width]
    assert not [
        line for line in too_long if max(map(len, line.split())) < width - 14
    ]  # a path or a law stays whole


@pytest.mark.slow
@every_table
def test_a_file_gets_80_columns(name: str, printed: Callable[..., str]) -> None:
    assert printed(name, None) == printed(name, NO_TERMINAL)


def numbers_in(text: str) -> list[tuple[float, int]]:
    """Each number that stands by itself, with its decimals."""
    found = re.findall(
        r"(?<![\w.…])[-+]?(\d+(?:\.(\d+))?(?:e[-+]?\d+)?)(?![\w…]|\.\d)",
        text.replace("!", " ").replace(",", ", "),
    )
    return [
        (float(whole), len(decimals) if "e" not in whole else math.inf) for whole, decimals in found
    ]  # type: ignore[misc]


def stands(
    value: float, tokens: Iterable[tuple[float, float]], units: tuple[float, ...], digits: int = 3
) -> bool:
    """Whether a token is the value in one of the units: the same, or rounded to its decimals
    with at least so many digits.
    """
    return any(
        _is(abs(value) / unit, token, decimals, digits)
        for token, decimals in tokens
        for unit in units
    )


def _is(shown: float, token: float, decimals: float, digits: int) -> bool:
    step = 10.0**-decimals if math.isfinite(decimals) else 2e-3 * shown
    near = abs(token - shown) <= 0.5001 * step
    return math.isclose(token, shown, rel_tol=1e-9) or (
        near and (token == 0 or step <= shown * 10.0 ** (1 - digits))
    )


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield float(value)


@pytest.mark.parametrize("width", [80, 100, None])
def test_every_number_of_a_prediction_stands_whole_in_its_text(
    printed: Callable[..., str], width: int | None
) -> None:
    for name in ("predict", "simulate"):
        answer = json.loads(printed(name, width, "--json"))
        tokens = numbers_in(printed(name, width))
        kept = (
            "load",
            "utilisation",
            "queueing_delay",
            "sojourn_time",
            "time_to_first_token",
            "inter_token_latency",
        )
        for value in leaves({key: answer[key] for key in kept}):
            assert stands(value, tokens, (1.0,), digits=3), value


IN_JSON_ALONE = ("queue_length", "number_in_system", "watts")


@pytest.mark.parametrize("width", [80, 100, None])
def test_every_number_of_an_optimum_stands_whole_in_its_text(
    printed: Callable[..., str], width: int | None
) -> None:
    for name in ("optimize-policy", "optimize-batch-size", "optimize-servers"):
        answer = json.loads(printed(name, width, "--json"))
        tokens = numbers_in(printed(name, width))
        for point in answer["curve"]:
            shown = {key: of for key, of in point.items() if key not in IN_JSON_ALONE}
            for value in leaves(shown):
                assert abs(value) < 1e-6 or stands(value, tokens, (1.0,), digits=3), value


@pytest.mark.parametrize("width", [80, 100, None])
def test_every_number_of_a_load_summary_stands_whole_in_its_table(
    printed: Callable[..., str], width: int | None
) -> None:
    tokens = numbers_in(printed("load", width))
    for name, found in summary().durations.items():
        for value in (found.mean, found.max, *found.quantiles.values()):
            assert stands(value, tokens, (1e-3,)), (name, value)
        assert stands(found.n, tokens, (1.0,)), name
        assert found.too_short or stands(found.half_width, tokens, (1e-3,), digits=1), name


@pytest.mark.parametrize("width", [80, 100, None])
def test_every_number_of_a_comparison_stands_whole_in_its_tables(
    printed: Callable[..., str], width: int | None
) -> None:
    tokens = numbers_in(printed("compare", width))
    for each in comparisons():
        quantity = each.quantity
        theories = (
            quantity.same_arrivals,
            quantity.predicted,
            quantity.a_priori,
            quantity.live,
        )
        seconds = [
            quantity.observed.mean,
            quantity.observed.half_width,
            *(theory.mean for theory in theories if theory is not None),
        ]
        seconds += [*(quantity.quantiles[level] for level in ("p50", "p90", "p99"))]
        for value in seconds:
            assert stands(value, tokens, (1e-3,), digits=1), (each.policy, value)
        assert stands(each.n, tokens, (1.0,))


def test_the_checks_above_see_a_number_that_is_cut() -> None:
    assert stands(0.04612, numbers_in("46.12"), (1e-3,))
    assert not stands(0.04612, numbers_in("46.…"), (1e-3,))
    assert not stands(1200.0, numbers_in("1…"), (1.0,))
    assert not stands(1200.0, numbers_in("12 00"), (1.0,))
    assert not stands(0.04612, numbers_in("4 6.12"), (1e-3,))
