"""What tests share: parts of the system that may be missing, and what a missing one means."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest


def missing(what: str, remedy: str) -> NoReturn:
    """Skip the test; under CI=true tests/conftest.py makes a failure of it."""
    pytest.skip(f"{what} is missing; {remedy}")


def require_program(name: str) -> str:
    """The path of a program of the system, such as promtool or chromium."""
    return shutil.which(name) or missing(name, "`make setup-system` installs it")


def require_vllm() -> None:
    """Go on only where the real engine can be imported."""
    if importlib.util.find_spec("vllm") is None:
        missing("vllm", "`make setup` installs it where it exists for the platform")


def measured_data(name: str) -> Path:
    """A file of others' measurements, which the repository does not hold."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("KENDALL_TEST_DATA", beside)) / name
    if not path.is_file():
        missing(str(path), "KENDALL_TEST_DATA names the folder that has it")
    return path


def assert_flags_exist(command: str, arguments: list[str]) -> None:
    """Every flag that a manifest gives a command is one of its options."""
    from kendall import cli

    known = {flag for parameter in cli.command_of(command).params for flag in parameter.opts}
    asked = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
    assert asked <= known
