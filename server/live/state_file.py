"""What the live model knows, in a small file, so that a restart does not begin from nothing.

Law, estimates and what the autopilot remembers. It is of use to the same engine and model only; another one's is left
alone, and the log says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("kendall.live")
SCHEMA_VERSION = 1
SAME = ("engine", "model", "max_num_seqs", "servers")  # of the engine's description


def load_state(path: Path, engine: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was saved for this engine; None, with a log line, where there is nothing that can be used."""
    try:
        state: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("cannot read --state-file %s (%s); starting without it", path, error)
        return None
    if (schema := state.get("schema_version", "unknown")) != SCHEMA_VERSION:
        log.warning("got a state file of schema %s, expected %d; starting without it", schema, SCHEMA_VERSION)
        return None
    saved = state.get("engine") or {}
    if other := [name for name in SAME if saved.get(name) != engine.get(name)]:
        theirs = ", ".join(f"{name} {'unknown' if saved.get(name) is None else saved[name]}" for name in other)
        log.warning("the state file belongs to another engine (%s); starting without it", theirs)
        return None
    return state


def before_its_place(path: Path) -> Path:
    """The file that is written, and then renamed."""
    return path.with_name(path.name + ".new")


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    stamped = {"schema_version": SCHEMA_VERSION, "saved_at": datetime.now(UTC).isoformat(timespec="seconds"), **state}
    new = before_its_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(msgspec.json.encode(stamped))
    os.replace(new, path)
