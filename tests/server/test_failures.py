"""A failure that comes again with every assessment is logged once and counted."""

from __future__ import annotations

import logging

import pytest

from kendall.server.live.failures import Failures

LOG = logging.getLogger("kendall.test")


def fail(failures: Failures, error: Exception) -> None:
    failures.failed(f"{type(error).__name__}: {error}", error)


def test_the_same_failure_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(LOG, "the live prediction")
    with caplog.at_level(logging.INFO):
        for number in range(60):
            fail(
                failures, ValueError(f"got {number * 1.5e-7} arrivals at {-number}; expected more")
            )
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert (
        "the live prediction failed and is repeated; the same failure is not logged again: "
        "ValueError: got 0.0"
    ) in caplog.text
    assert failures.as_dict() == {
        "count": 60,
        "in_a_row": 60,
        "last": "ValueError: got 8.85e-06 arrivals at -59; expected more",
    }


def test_another_failure_and_one_after_a_success_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = Failures(LOG, "the autopilot")
    with caplog.at_level(logging.INFO):
        fail(failures, ZeroDivisionError("float division by zero"))
        fail(failures, ValueError("another"))
        fail(failures, ZeroDivisionError("float division by zero"))
        failures.succeeded()
        failures.succeeded()
        fail(failures, ZeroDivisionError("float division by zero"))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO", "ERROR"]
    assert "the autopilot succeeded after 3 failures" in caplog.text
    assert (failures.count, failures.in_a_row) == (4, 1)


def test_of_a_traceback_the_last_line_tells_the_kind(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(LOG, "the autopilot")
    failures.failed("Traceback (most recent call last):\n  line 1\nValueError: one\n")
    failures.failed("Traceback (most recent call last):\n  line 2\nValueError: one\n")
    assert len(caplog.records) == 1
    assert failures.last == "ValueError: one"
