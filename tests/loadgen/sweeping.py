"""`kendall sweep` as a process that tests may kill, on an emulated engine under a fast law."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kendall.loadgen.gateway.gateway_process import free_port
from kendall.loadgen.sweep.journal import read_journal

LAW = "k1=0.0003,k2=0.001,k3=0.00002,k4=0.001"
COMMON = (
    *("--engine", "emulated", "--latency", LAW, "--bracket", "0.2", "--repeat-noisy", "0"),
    *("--json", "--output-tokens", "uniform:low=2,high=10"),
)
Event = dict[str, Any]


def start(folder: Path, *arguments: str, own: bool = True) -> subprocess.Popen[bytes]:
    """The command, running."""
    common = (*COMMON, "--port", str(free_port(0))) if own else ()
    command = [
        sys.executable,
        "-m",
        "kendall",
        "sweep",
        *common,
        *arguments,
        "--result-dir",
        str(folder),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"KENDALL_DEBUG": "1"},
    )


def finish(process: subprocess.Popen[bytes], expected: int = 0) -> dict[str, Any]:
    """Its JSON object, when it has ended as expected."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == expected, err.decode()[-3000:]
    return dict(json.loads(out)) if out else {}


def events(folder: Path, kind: str | None = None) -> list[Event]:
    """What the journal says so far."""
    return [
        event for event in read_journal(folder / "journal.jsonl") if kind in (None, event["event"])
    ]


def wait_for(
    folder: Path,
    condition: Callable[[list[Event]], Any],
    process: subprocess.Popen[bytes],
    limit: float = 60.0,
) -> None:
    """Until the journal fulfils a condition."""
    deadline = time.perf_counter() + limit
    while not condition(events(folder)):
        assert process.poll() is None, process.communicate()[1].decode()[-3000:]
        assert time.perf_counter() < deadline, "the journal never said so"
        time.sleep(0.02)


def count(kind: str, number: int) -> Callable[[list[Event]], bool]:
    """That so many events of a kind are written."""
    return lambda found: sum(event["event"] == kind for event in found) >= number


def gateway_pid(folder: Path) -> int:
    """Of the gateway that the sweep started."""
    return int((folder / "gateway.pid").read_text())


def is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(listed) and not listed.startswith("Z")
