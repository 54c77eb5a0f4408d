"""A user's own code is checked against Kendall's types, and they say something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
USER = """
import kendall


def slowest(policies: list[str], rate: float) -> kendall.Prediction | None:
    law = kendall.parse_latency("a=0.02,c=0.1")
    found: kendall.Prediction | None = None
    for text in policies:
        try:
            policy = kendall.parse_policy(text)
            answer = kendall.predict(policy, rate, "geometric:mean=64", law, max_output_tokens=256)
        except kendall.UnstableQueueError as error:
            print(text, error.load)
            continue
        delay = answer.queueing_delay.mean or 0.0
        if found is None or delay > (found.queueing_delay.mean or 0.0):
            found = answer
    return found


reveal_type(kendall.predict("single", 1, "deterministic:value=1", "a=1,c=0").load)
simulated = kendall.simulate("single", 1, "deterministic:value=1", "a=1,c=0", seed=1)
reveal_type(simulated.queueing_delay.p99)
reveal_type(kendall.__version__)
"""
MISTAKES = """
import kendall

kendall.predcit("single", 1, "deterministic:value=1", "a=1,c=0")
kendall.predict("single", "1", "deterministic:value=1", "a=1,c=0")
kendall.predict("single", 1, "deterministic:value=1", "a=1,c=0", max_tokens=3)
kendall.predict("single", 1, "deterministic:value=1", "a=1,c=0").load = 2
"""


def checked(script: Path) -> list[str]:
    """What `mypy --strict` says about a script that lies outside the repository."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        "",
        "--cache-dir",
        str(script.parent / "cache"),
        script.name,
    ]
    return subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, check=False
    ).stdout.splitlines()


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict_with_types_that_are_not_any(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    lines = checked(script)
    assert [line.partition("note: ")[2] for line in lines if "note: Revealed" in line] == [
        'Revealed type is "float"',
        'Revealed type is "float | None"',
        'Revealed type is "str"',
    ]
    assert lines[-1] == "Success: no issues found in 1 source file"
    script.write_text(MISTAKES)
    codes = [line.rpartition("[")[2].rstrip("]") for line in checked(script) if ": error:" in line]
    assert codes == ["attr-defined", "arg-type", "call-arg", "misc"], "each mistake is found"
