"""Senders are woken at once where the system permits it, and leave no trace of it."""

from __future__ import annotations

import os
import sys

import pytest

from loadgen.urgency import PRIORITY, urgency_permitted, urgent
from tests.support import missing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling is Linux's")


def scheduling() -> tuple[int, int]:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.sched_getparam(0).sched_priority


def test_a_thread_is_urgent_inside_and_as_it_was_outside() -> None:
    before = scheduling()
    if not urgency_permitted():
        missing("the permission for real-time scheduling", "root has it")
    with urgent() as permitted:
        assert permitted
        assert scheduling() == (os.SCHED_RR, PRIORITY)
    assert scheduling() == before
    with pytest.raises(KeyError), urgent():
        raise KeyError
    assert scheduling() == before


def test_its_children_are_not() -> None:
    with urgent():
        assert os.waitstatus_to_exitcode(os.waitpid(_fork(), 0)[1]) == 0


def _fork() -> int:
    child = os.fork()
    if child == 0:
        os._exit(0 if os.sched_getscheduler(0) == os.SCHED_OTHER else 1)
    return child


def test_where_it_is_not_permitted_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = scheduling()
    with urgent() as permitted:
        assert not permitted
        assert scheduling() == before
    assert not urgency_permitted()
