"""A sweep keeps off the engine's processor: not so the tests that run one in their own process."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest


@pytest.fixture(autouse=True)
def kept_processors(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The calls that would have moved this process to other processors."""
    calls: list[tuple[int, list[int]]] = []

    def set_affinity(pid: int, cpus: Iterable[int]) -> None:
        calls.append((pid, list(cpus)))

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity, raising=False)
    return calls
