"""What the live model knows, in a small file, so that a restart does not begin from nothing.

Law, estimates and what the autopilot remembers. It is of use to the same engine and model only;
another one's is renamed before a new one takes its place, and the log says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from policies import SpecError
from queueing.measurement.paths import put_aside

log = logging.getLogger("kendall.live")
SCHEMA_VERSION = 1
SAME = ("engine", "model", "max_num_seqs", "servers")  # of the engine's description


def check_state_file(path: Path) -> None:
    """Raises SpecError for a file that no gateway wrote as its state: it would be replaced."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        known = "schema_version" in msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        known = False
    if not known:
        raise SpecError(
            f"got --state-file {path}, which is not a state file; expected a state file of "
            "`kendall serve`, or a new name"
        )


def load_state(path: Path, engine: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was saved for this engine; None where there is nothing that can be used: a file is
    renamed then, and a log line says why.
    """
    try:
        state: dict[str, Any] = msgspec.json.decode(path.read_bytes() or b"{}", type=dict)
        why_not = _why_not(state, engine) if state else None
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        state, why_not = {}, str(error)
    if why_not is None:
        return state or None
    try:
        log.warning(
            "cannot use --state-file %s (%s): starting without it; renamed to %s",
            path,
            why_not,
            put_aside(path),
        )
    except OSError as error:
        log.warning(
            "cannot use --state-file %s (%s): starting without it; cannot rename it: %s",
            path,
            why_not,
            error,
        )
    return None


def _why_not(state: Mapping[str, Any], engine: Mapping[str, Any]) -> str | None:
    if (schema := state.get("schema_version", "unknown")) != SCHEMA_VERSION:
        return f"got schema {schema}, expected {SCHEMA_VERSION}"
    saved = state.get("engine") or {}
    other = [name for name in SAME if saved.get(name) != engine.get(name)]
    if not other:
        return None
    return "of another engine: " + ", ".join(
        f"{name} {'unknown' if saved.get(name) is None else saved[name]}" for name in other
    )


def before_its_place(path: Path) -> Path:
    """The file that is written, and then renamed."""
    return path.with_name(path.name + ".new")


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    stamped = {
        "schema_version": SCHEMA_VERSION,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **state,
    }
    new = before_its_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(msgspec.json.encode(stamped))
    os.replace(new, path)
