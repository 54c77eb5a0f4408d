"""What a chaos test counts: outcomes by `/metrics`, resident memory; and its line of JSON on
standard output, which `pytest -rP` shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def tell(what: str, **counts: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"chaos": what, **counts}, default=str) + "\n")


def outcomes(metrics: str) -> Counter[str]:
    """Requests that have ended, by outcome, over all policies; none that is 0."""
    ended = Counter[str]()
    for outcome, value in re.findall(
        r'^kendall_requests_total\{outcome="(\w+)",policy="[^"]*"\} (\S+)$', metrics, re.MULTILINE
    ):
        ended[outcome] += int(float(value))
    return +ended


def open_files() -> set[tuple[str, str]]:
    """Of this process: each number and what it is. Other threads may close theirs meanwhile:
    what is left open is a difference of sets.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def resident(pid: int) -> int:
    """Bytes of a process."""
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024
