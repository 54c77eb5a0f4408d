"""The engine's process on CPUs of its own, and the gateway's threads on the others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kendall.server.engines.vllm.process import CpuSplit


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_every_thread_is_bound_until_it_is_undone(other: subprocess.Popen[bytes]) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU alone cannot be split")
    engine, rest = frozenset(list(before)[:1]), before - set(list(before)[:1])
    asked, found = threading.Event(), []

    def thread() -> None:
        asked.wait(10)
        found.append(os.sched_getaffinity(0))

    running = threading.Thread(target=thread)
    running.start()
    split = CpuSplit()
    try:
        split.make(other.pid, engine)
        asked.set()
        running.join()
        assert os.sched_getaffinity(other.pid) == engine
        assert found == [rest], "a thread that ran before"
        assert os.sched_getaffinity(0) == rest
    finally:
        split.undo()
    assert os.sched_getaffinity(0) == before


def test_without_another_cpu_the_gateway_stays_where_it_is(other: subprocess.Popen[bytes]) -> None:
    before = os.sched_getaffinity(0)
    split = CpuSplit()
    split.make(other.pid, frozenset(before))
    assert os.sched_getaffinity(0) == before
    split.undo()
    assert os.sched_getaffinity(0) == before
