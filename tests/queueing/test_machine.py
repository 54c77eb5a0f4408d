"""What a run's header says of the machine, and the CPUs of gateway and engine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import pytest

from kendall.queueing.measurement.machine import cpu_model, hardware, split_cpus, versions


@pytest.mark.parametrize(
    ("cpus", "split"),
    [
        ({3}, (set(), None)),
        ({0, 1}, ({0}, "1")),
        ({2, 5, 11}, ({2, 5}, "11")),
        ({4, 3, 2, 1}, ({1, 2, 3}, "4")),
        ({0, 1, 2, 3, 4}, (set(), None)),
    ],
    ids=lambda each: f"{len(each)}",
)
def test_on_two_to_four_cpus_the_engine_has_the_last_one(
    monkeypatch: pytest.MonkeyPatch, cpus: set[int], split: tuple[set[int], str | None]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
    assert split_cpus() == split


def test_where_cpus_cannot_be_pinned_none_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert split_cpus() == (set(), None)


CPUINFO = "processor\t: 0\nmodel name\t: Some CPU: 2.1 GHz\n\nmodel name\t: another\n"


@pytest.mark.parametrize(
    ("text", "name"), [(CPUINFO, "Some CPU: 2.1 GHz"), ("Features: fp asimd\n", None), (None, None)]
)
def test_the_processor_is_named_as_linux_names_it_else_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch, text: str | None, name: str | None
) -> None:
    def read(path: Path, encoding: str) -> str:
        assert (str(path), encoding) == ("/proc/cpuinfo", "utf-8")
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert cpu_model() == (name or platform.machine())
    assert hardware() == {"cpu": cpu_model(), "cores": os.cpu_count()}


def test_versions_are_those_of_what_is_installed() -> None:
    assert versions(["numpy", "no-such-package"]) == {
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }
    assert list(versions())[:1] == ["python"]
    assert {"httptools", "numpy"} <= set(versions())
