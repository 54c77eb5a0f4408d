"""Every trace format replays its sample: the recorded instants from the first arrival on, and
the recorded lengths.
"""

from __future__ import annotations

import csv
import json
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.arrivals.timetable import draw_timetable, save_timetable
from kendall.queueing.arrivals.trace_formats import nanoseconds
from kendall.queueing.arrivals.traces import load_trace, read_trace
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.prediction.query import PredictionQuery

SAMPLES = Path(__file__).parent / "samples"
KINDS = {
    "azure_2023.csv": ("azure", 40, 0),
    "azure_2024.csv": ("azure", 30, 0),
    "burstgpt_v1.csv": ("burstgpt", 32, 3),
    "burstgpt_v1_2.csv": ("burstgpt", 23, 2),
    "mooncake.jsonl": ("mooncake", 30, 0),
    "bailian.jsonl": ("bailian", 25, 0),
    "run.jsonl": ("run", 22, 2),
}
Rows = list[
    tuple[Decimal, int, int]
]  # seconds of the file's own clock, prompt tokens, output tokens


def _table(name: str) -> list[dict[str, str]]:
    with (SAMPLES / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _lines(name: str) -> list[dict[str, object]]:
    return [
        json.loads(line, parse_float=Decimal) for line in (SAMPLES / name).read_text().splitlines()
    ]


def _date(text: str) -> Decimal:
    whole, _, fraction = text.removesuffix("+00:00").partition(".")
    since = datetime.fromisoformat(whole) - datetime(2020, 1, 1)  # noqa: DTZ001
    return Decimal(int(since.total_seconds())) + Decimal(f"0.{fraction or 0}")


def _by_hand(name: str) -> Rows:
    """The sample read by other means, in decimal arithmetic."""
    if name.startswith("azure"):
        return [
            (_date(r["TIMESTAMP"]), int(r["ContextTokens"]), int(r["GeneratedTokens"]))
            for r in _table(name)
        ]
    if name.startswith("burstgpt"):
        return [
            (Decimal(r["Timestamp"]), int(r["Request tokens"]), int(r["Response tokens"]))
            for r in _table(name)
        ]
    if name.startswith(("mooncake", "bailian")):
        unit = 1000 if name.startswith("mooncake") else 1
        return [
            (
                Decimal(str(r["timestamp"])) / unit,
                int(str(r["input_length"])),
                int(str(r["output_length"])),
            )
            for r in _lines(name)
        ]
    return [
        (
            Decimal(str(r["intended_at"])),
            int(str(r["prompt_tokens"])),
            int(str(r["output_tokens"] or 0)),
        )
        for r in _lines(name)[1:]
    ]


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    seconds = (3, 1, 2, 5)
    rows = [f"2023-11-16 18:15:0{second}.0,10,{second}\n" for second in seconds]
    trace.write_text(AZURE + "".join(rows))
    found = load_trace(trace)
    assert found.out_of_order == 1
    assert found.timetable.intended_at.tolist() == [0, 1, 2, 4]
    assert found.timetable.output_tokens.tolist() == [1, 2, 3, 5]
    query = PredictionQuery.read("single", "tiny", trace=trace)
    assert "; 1 row out of order, sorted by their instants" in query.notes[0]
    trace.write_text(AZURE + "".join(sorted(rows)))
    assert load_trace(trace).out_of_order == 0
    assert "out of order" not in PredictionQuery.read("single", "tiny", trace=trace).notes[0]


@pytest.mark.parametrize("name", KINDS)
def test_the_sample_replays_from_its_first_arrival(name: str) -> None:
    kind, size, skipped = KINDS[name]
    trace = load_trace(SAMPLES / name)
    assert (trace.kind, len(trace.timetable), trace.skipped) == (kind, size, skipped)
    rows = sorted((row for row in _by_hand(name) if row[2]), key=lambda row: row[0])
    first = rows[0][0]
    assert trace.timetable.intended_at == pytest.approx(
        [float(at - first) for at, _, _ in rows], abs=1e-9
    )
    assert trace.timetable.prompt_tokens.tolist() == [prompt for _, prompt, _ in rows]
    assert trace.timetable.output_tokens.tolist() == [output for _, _, output in rows]


@pytest.mark.parametrize(
    "name", [name for name in KINDS if name not in {"run.jsonl", "bailian.jsonl"}]
)
def test_instants_are_exact(name: str) -> None:
    """The nearest float64 to the decimal difference: a date read as a float would be wrong by
    0.1 microseconds.
    """
    at = sorted(row[0] for row in _by_hand(name) if row[2])
    assert read_trace(SAMPLES / name).intended_at.tolist() == [
        float(instant - at[0]) for instant in at
    ]


def test_dates_with_and_without_zone_and_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a zone: UTC, wherever the reader sits (a day with a change of clocks would else be
    an hour off).
    """
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    base = nanoseconds("2024-05-10 00:00:00")
    monkeypatch.undo()
    time.tzset()
    assert nanoseconds("2024-05-10 00:00:00.0000001") - base == 100
    assert nanoseconds("2024-05-10T02:00:00.25+02:00") - base == 250_000_000
    assert nanoseconds("2024-05-10 00:00:00Z") == base
    assert base % 10**9 == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_time_scale_multiplies_the_instants(name: str) -> None:
    """0.5 is twice as fast."""
    plain, fast = read_trace(SAMPLES / name), read_trace(SAMPLES / name, time_scale=0.5)
    assert np.array_equal(fast.intended_at, plain.intended_at * 0.5)
    assert np.array_equal(fast.output_tokens, plain.output_tokens)
    assert fast.rate == pytest.approx(2 * plain.rate)


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_may_be_said_and_a_part_be_read(name: str) -> None:
    whole = read_trace(SAMPLES / name)
    part = load_trace(SAMPLES / name, KINDS[name][0], count=2)
    assert len(part.timetable) == 2
    assert set(part.timetable.output_tokens.tolist()) <= set(whole.output_tokens.tolist())


def test_predicted_lengths_of_a_run_come_along() -> None:
    table = read_trace(SAMPLES / "run.jsonl")
    rows = sorted(
        (row for row in _lines("run.jsonl")[1:] if row["output_tokens"]),
        key=lambda row: float(str(row["intended_at"])),
    )
    assert table.predicted_output_tokens is not None
    assert table.predicted_output_tokens.tolist() == [
        row["predicted_output_tokens"] for row in rows
    ]


def test_a_run_that_knows_only_arrivals_is_replayed_by_them(tmp_path: Path) -> None:
    lines = ['{"writer":"gateway"}']
    lines += [
        json.dumps(
            {
                "request_id": str(i),
                "outcome": "completed",
                "arrived_at": 50 + at,
                "prompt_tokens": 3,
                "output_tokens": 4,
            }
        )
        for i, at in enumerate((0.5, 0.0))
    ]
    path = tmp_path / "gateway.jsonl"
    path.write_text("\n".join(lines))
    table = read_trace(path)
    assert table.intended_at.tolist() == [0.0, 0.5]
    assert table.predicted_output_tokens is None


def test_a_saved_timetable_replays_its_very_instants(tmp_path: Path) -> None:
    lengths = parse_distribution("uniform:low=1,high=50")
    table = draw_timetable(
        Poisson(20.0), count=100, seed=4, prompt_tokens=lengths, output_tokens=lengths
    )
    path = tmp_path / "timetable.jsonl"
    save_timetable(path, table)
    trace = load_trace(path)
    assert trace.kind == "timetable"
    for name, column in table.columns().items():
        assert np.array_equal(getattr(trace.timetable, name), column)


@pytest.mark.parametrize(
    "name", ["azure_2023.csv", "mooncake.jsonl", "run.jsonl", "timetable.jsonl"]
)
def test_a_trace_may_begin_with_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    plain, marked = SAMPLES / name, tmp_path / "marked"
    if not plain.exists():
        plain = tmp_path / name
        lengths = parse_distribution("uniform:low=1,high=50")
        save_timetable(
            plain,
            draw_timetable(
                Poisson(20.0), count=9, seed=4, prompt_tokens=lengths, output_tokens=lengths
            ),
        )
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    for one, other in zip(
        read_trace(marked).columns().values(), read_trace(plain).columns().values(), strict=True
    ):
        assert np.array_equal(one, other)


def test_columns_are_found_by_name_in_any_order_behind_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(
        "\ufeffGeneratedTokens,Extra,TIMESTAMP,ContextTokens\r\n7,x,2023-11-16 18:15:46.1,9\r\n",
        encoding="utf-8",
    )
    table = read_trace(path)
    assert (table.prompt_tokens.tolist(), table.output_tokens.tolist()) == ([9], [7])


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            AZURE + "2023-11-16 18:15:46.1,5,6\n16/11/2023,5,6\n",
            r"line 3: got '16/11/2023,5,6'; expected TIMESTAMP.*is not a date",
        ),
        (AZURE + "2023-13-16 18:15:46.1,5,6\n", "line 2.*month"),
        (AZURE + "2023-11-16 18:15:46.1,5\n", "line 2: got '2023-11-16 18:15:46.1,5'"),
        (AZURE + "2023-11-16 18:15:46.1,five,6\n", "line 2.*'five' is not a number"),
        (AZURE + "2023-11-16 18:15:46.1,5,\n", "line 2.*'' is not a number"),
        (AZURE + "2023-11-16 18:15:46.1,5,-6\n", "line 2.*not a number of tokens"),
        (AZURE, "got no request with prompt and output tokens .0 without."),
        (
            BURST + "5,ChatGPT,472,0,472,Conversation log\n",
            "got no request with prompt and output tokens .1 without.",
        ),
        (BURST + "nan,ChatGPT,472,3,475,Conversation log\n", "line 2.*not a number of seconds"),
        (BURST + "soon,ChatGPT,472,3,475,Conversation log\n", "line 2.*not a number of seconds"),
        (
            BURST + "1e12,ChatGPT,472,3,475,Conversation log\n",
            "line 2.*beyond what nanoseconds can hold",
        ),
        (
            '{"timestamp":1,"input_length":2,"output_length":3}\n{"timestamp":1e999,"input_length":2,"output_length":3}',
            "line 2",
        ),
        (
            '{"timestamp":1,"input_length":2,"output_length":3}\n{"timestamp":1,"input_length":2}\n',
            "line 2.*expected an object with timestamp",
        ),
        ('{"timestamp":1,"input_length":2,"output_length":3}\n[1]\n', "line 2: got '.1.'"),
        ('{"timestamp":1,"input_length":2,"output_length":3}\n{oops\n', "line 2: got '{oops'"),
        ('{"writer":"load"}\n{"request_id":1}\n', "line 2.*expected a record"),
        (
            '{"writer":"load"}\n{"request_id":"a","outcome":"completed"}\n',
            "request a without an instant",
        ),
        (
            '{"writer":"timetable","schema_version":1}\n{"intended_at":"x"}\n',
            "line 2.*timetable's line",
        ),
        (
            "when,in,out\n1,2,3\n",
            "line 1: got 'when,in,out'; expected the first line of one of azure",
        ),
        ("", "line 1: got ''"),
        ('{"a":1}\n', "expected the first line of one of"),
        ("{\n", "expected the first line of one of"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    sample = SAMPLES / "azure_2023.csv"
    with pytest.raises(SpecError, match=r"time scale 0; expected a number > 0 .0.5: twice as fast"):
        read_trace(sample, time_scale=0)
    with pytest.raises(SpecError, match="did you mean 'azure'"):
        read_trace(sample, "azur")
    with pytest.raises(SpecError, match="got 0 prompts"):
        read_trace(sample, count=0)
    with pytest.raises(SpecError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(
        SpecError,
        match="got the columns TIMESTAMP, ContextTokens, GeneratedTokens; expected Timestamp too",
    ):
        read_trace(sample, "burstgpt")
