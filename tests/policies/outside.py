"""Policies from outside for a test: modules as files, packages as entry points; gone afterwards."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kendall.policies import registry

SHORTEST = '''
"""The requests with the lowest limits first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kendall.policies import Decision, Dispatch, Policy, QueueState, WaitUntil, fitting_ids


@dataclass(frozen=True, kw_only=True)
class Shortest(Policy):
    max_batch_size: int = 8
    name: ClassVar[str] = "shortest"

    def decide(self, state: QueueState, now: float) -> Decision:
        server = state.empty_server()
        if server is None or not state.waiting:
            return WaitUntil(float("inf"))
        ordered = sorted(state.waiting, key=lambda waiting: waiting.request.max_output_tokens)
        return Dispatch(fitting_ids(ordered, self.max_batch_size, server), server.id)
'''


@contextmanager
def nothing_known() -> Iterator[pytest.MonkeyPatch]:
    """No modules and no packages are known, and what becomes known is forgotten at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(registry.VARIABLE, raising=False)
        patch.setattr(registry, "_modules", {})
        registry._packages.cache_clear()
        registry._of_package.cache_clear()
        yield patch
    registry._packages.cache_clear()
    registry._of_package.cache_clear()


def module(folder: Path, text: str, name: str = "mine.py") -> str:
    """A file with that text; its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def installed(folder: Path, packages: Mapping[str, Mapping[str, str]]) -> None:
    """Metadata of packages with these entry points, in a folder of `sys.path`."""
    for package, points in packages.items():
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{registry.GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()
