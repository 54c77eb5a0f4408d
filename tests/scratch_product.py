"""A copy of the product that a test may change, and programs that run with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "queueing", "server", "loadgen")


def scratch_product(root: Path, copied: Sequence[str] = FOLDERS) -> None:
    """These folders of the product as copies in `root`, the rest as links."""
    (product := root / "kendall").mkdir()
    for path in (ROOT / "kendall").iterdir():
        if path.name not in copied:
            (product / path.name).symlink_to(path.resolve())
    for name in copied:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
        (product / name).symlink_to(root / name)
    (root / "tests").symlink_to(ROOT / "tests")


def run_in(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in that folder and with its product."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(root)} | variables,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,  # a replay of ranks that never change has no end
    )
