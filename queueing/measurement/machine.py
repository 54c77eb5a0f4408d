"""The machine and the software under a run: what its header says of them, and the CPUs that
gateway and engine have for themselves.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("kendall", "httptools", "numpy")
PINNED_CPUS = range(2, 5)  # with this many, engine and gateway get CPUs of their own


def hardware() -> dict[str, Any]:
    """Processor and cores."""
    return {"cpu": cpu_model(), "cores": os.cpu_count()}


def cpu_model() -> str:
    """The processor's name as Linux has it; elsewhere its architecture."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of Python and of those packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def split_cpus() -> tuple[set[int], str | None]:
    """CPUs for the gateway and for the engine on a small machine; nothing is pinned on a large
    one.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) not in PINNED_CPUS:
        return set(), None
    return set(cpus[:-1]), str(cpus[-1])
