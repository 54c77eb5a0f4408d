"""Senders are woken at once where the system permits it, and leave no trace of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kendall.loadgen.sending.operating_system import (
    PRIORITY,
    real_time_permitted,
    real_time_scheduling,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling is Linux's")


def scheduling() -> tuple[int, int]:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(0).sched_priority


def permitted_by_a_pretended_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"policy": os.SCHED_OTHER, "parameter": os.sched_param(0)}

    def change(_: int, policy: int, parameter: os.sched_param) -> None:
        state.update(policy=policy, parameter=parameter)

    monkeypatch.setattr(os, "sched_setscheduler", change)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: state["policy"])
    monkeypatch.setattr(os, "sched_getparam", lambda _: state["parameter"])


def test_a_thread_is_urgent_inside_and_as_it_was_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel itself where this user has the permission, as root has."""
    before = scheduling()
    if not real_time_permitted():
        permitted_by_a_pretended_kernel(monkeypatch)
        before = scheduling()
    with real_time_scheduling() as permitted:
        assert permitted
        assert scheduling() == (os.SCHED_RR, PRIORITY)
    assert scheduling() == before
    with pytest.raises(KeyError), real_time_scheduling():
        raise KeyError
    assert scheduling() == before


def test_its_children_are_not() -> None:
    program = "import os; print(os.sched_getscheduler(0))"
    with real_time_scheduling():
        said = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        ).stdout
    assert int(said) == os.SCHED_OTHER


def test_where_it_is_not_permitted_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = scheduling()
    with real_time_scheduling() as permitted:
        assert not permitted
        assert scheduling() == before
    assert not real_time_permitted()
