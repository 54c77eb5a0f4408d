"""What the live model knows, in a small file, so that a restart does not begin from nothing.

Law, estimates and what the autopilot remembers. It is of use to the same engine and model only;
another one's is renamed before a new one takes its place, and the log says so.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kendall.policies import SpecError
from kendall.queueing.measurement.paths import put_aside
from kendall.server.calibration.host import LiveHost
from kendall.server.engines.base import describe_engine
from kendall.server.live.pilot import Pilot
from kendall.server.runtime.pools import in_a_thread

log = logging.getLogger("kendall.live")
SCHEMA_VERSION = 1
SAVED = 60.0  # seconds between two states on disk
LONGEST_SAVE = 10.0  # seconds that one may take
LAST_SAVE = 2.0  # seconds that a shutdown waits for it
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


class StateKeeper:
    """The state file of one gateway (`--state-file`)."""

    def __init__(self, gateway: LiveHost, pilot: Pilot) -> None:
        self._gateway, self._pilot = gateway, pilot
        self._due = gateway.now()
        self.estimates: dict[str, Any] | None = None  # as they would be saved

    @property
    def wanted(self) -> bool:
        """Whether there is a file."""
        return self._gateway.settings.state_file is not None

    @property
    def due(self) -> bool:
        """Whether the next assessment is to be saved."""
        return self.wanted and self._gateway.now() >= self._due

    def make_due(self) -> None:
        """The next assessment is the last one."""
        self._due = -math.inf

    def restore(self) -> None:
        """Take up law and estimates of an earlier life, if they are of this engine."""
        path = self._gateway.settings.state_file
        state = None if path is None else load_state(path, self._engine())
        if state is None:
            return
        self._gateway.latency.restore(state.get("profile"), state.get("law"))
        self.estimates = state.get("estimates")
        try:
            self._pilot.restore(state)
        except SpecError as error:
            log.warning(
                "cannot use what the autopilot remembers in --state-file %s (%s): it begins anew "
                "with policy %s; to keep its memory, start with that policy's package installed, "
                "or its --policy-module",
                path,
                error,
                self._gateway.settings.policy,
            )
        log.info("loaded the live model saved at %s from %s", state.get("saved_at"), path)

    async def keep(self, estimates: dict[str, Any], at: float) -> None:
        """Save these, in a thread."""
        self.estimates, self._due = estimates, at + SAVED
        try:
            await in_a_thread(self.save, LONGEST_SAVE)
        except TimeoutError:
            log.warning(
                "cannot write the state file %s: it took longer than %g s",
                self._gateway.settings.state_file,
                LONGEST_SAVE,
            )

    def save(self) -> None:
        """Law and estimates into the file. May run beside the event loop."""
        path, latency = self._gateway.settings.state_file, self._gateway.latency
        if path is None or latency.law is None:
            return
        try:
            state = {
                "engine": self._engine(),
                "law": str(latency.law),
                "profile": None if latency.profile is None else latency.profile.to_dict(),
                "estimates": self.estimates,
            }
            save_state(path, state | self._pilot.saved())
        except OSError as error:
            log.warning("cannot write the state file %s: %s", path, error)

    def save_last(self) -> None:
        """At the end, when the event loop may wait for it."""
        saving = threading.Thread(target=self.save, daemon=True)
        saving.start()
        saving.join(LAST_SAVE)

    def _engine(self) -> dict[str, Any]:
        """What the state is good for."""
        gateway = self._gateway
        return describe_engine(gateway.batcher.capabilities, gateway.settings.served_model_name)
