"""One grammar of durations, wherever one is written."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies.durations import UNITS, Duration, parse_duration, rounded_duration
from kendall.policies.text import SpecError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("100ms", 0.1),
        ("500us", 0.0005),
        ("500µs", 0.0005),
        ("10ns", 1e-8),
        ("1.5min", 90.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("7d", 604_800.0),
        ("1m30s", 90.0),
        ("1h 5min 2s", 3902.0),
        (" 2 s ", 2.0),
        (".5s", 0.5),
        ("1e3ms", 1.0),
        ("0", 0.0),
        ("0.25", 0.25),
        ("1e-3", 0.001),
        ("inf", math.inf),
    ],
)
def test_it_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        "2 parsecs",
        "2S",
        "-1s",
        "-1",
        "nan",
        "1.2.3s",
        "2s3",
        "100 msec",
        "1mins",
        "5w",
        "2s,3s",
        "1e999999h",
        "1e99999999999999999s",
    ],
)
def test_anything_else_is_refused_with_the_forms_that_are_not(text: str) -> None:
    with pytest.raises(SpecError, match="expected a duration: 2s, 100ms, 500us"):
        parse_duration(text)


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_a_whole_number_of_a_unit_is_rounded_once(number: int, unit: str) -> None:
    """100 ms are the double that 0.1 is: not 100 * 0.001 with an error of its own."""
    per_second = round(1 / float(UNITS[unit])) if float(UNITS[unit]) < 1 else None
    expected = number / per_second if per_second else number * float(UNITS[unit])
    assert parse_duration(f"{number}{unit}") == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2.0 h"),
        (8101, "2.3 h"),
        (172_799, "48.0 h"),
        (172_800, "2 days"),
        (1e9, "11,574 days"),
        (8.64e9, "100,000 days"),
    ],
)
def test_a_rounded_duration_is_one_to_plan_by(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text


def test_an_option_may_set_a_least_value() -> None:
    assert Duration(0.001)("1ms") == 0.001
    assert Duration()(5.0) == 5.0
    for value in ("500us", 0.0, math.nan):
        with pytest.raises(SpecError, match=r"at least 0\.001 s"):
            Duration(0.001)(value)


def test_every_grammar_that_holds_a_duration_reads_the_same_one() -> None:
    """A policy's max_wait, objectives, the lateness budget and a header: each had a parser of
    its own.
    """
    from kendall.loadgen.report.load_verdict import parse_budget
    from kendall.loadgen.sweep.slo import parse_slo as sweep_slo
    from kendall.policies.text import format_policy, parse_policy
    from kendall.queueing.choosing.objective import parse_slo
    from kendall.server.admission.request_deadlines import request_deadlines_of
    from kendall.server.admission.settings import delay_target

    for text, seconds in (
        ("500us", 0.0005),
        ("1.5min", 90.0),
        ("250 ms", 0.25),
        ("2", 2.0),
        ("1h", 3600.0),
    ):
        assert parse_slo(f"p99_queueing_delay={text}").seconds == seconds
        assert sweep_slo(f"p99_queueing_delay={text}").bound == seconds
        assert delay_target(f"p99_queueing_delay={text}").seconds == seconds
        assert parse_budget(f"mean={text}").mean == seconds
        assert (
            request_deadlines_of([(b"x-llm-d-inference-ttl", text.encode())], None, None).patience
            == seconds
        )
        assert parse_policy(f"fixed:batch_size=8,max_wait={text}").max_wait == seconds  # type: ignore[attr-defined]
    assert (
        format_policy(parse_policy("fixed:batch_size=8,max_wait=100ms"))
        == "fixed:batch_size=8,max_wait=0.1"
    )
    for text in ("soon", "2 parsecs", "-1s"):
        for parse in (parse_slo, sweep_slo, delay_target):
            with pytest.raises(SpecError):
                parse(f"p99_queueing_delay={text}")


def test_flags_variables_and_files_take_it_and_show_config_prints_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kendall import cli

    file = tmp_path / "kendall.toml"
    file.write_text("patience = '1.5min'\nstuck-timeout = 30\n")
    monkeypatch.setenv("KENDALL_SHUTDOWN_TIMEOUT", "500ms")
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--config", str(file), "--prediction-interval", "2s", "--show-config"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for line in (
        "patience = 90.0",
        "stuck-timeout = 30.0",
        "shutdown-timeout = 0.5",
        "prediction-interval = 2.0",
    ):
        assert f"\n{line}  # " in shown


def test_every_option_that_takes_seconds_takes_a_duration() -> None:
    """A plain number of seconds anywhere would be a second grammar."""
    from kendall import cli

    for name in cli.COMMANDS:
        for parameter in cli.command_of(name).params:
            if re.search(
                r"\b(seconds|[Tt]ime (that|between|during)|[Ll]ongest wait|[Dd]uration of)\b",
                parameter.help,
            ):
                taken = parameter.type_descriptor.parameter_info.parser
                assert (
                    isinstance(taken, Duration) or parameter.type_descriptor.annotation is not float
                ), (name, parameter.name)
