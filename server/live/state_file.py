"""What the live model knows, in a small file, so that a restart does not begin from nothing.

Law, estimates and what the autopilot remembers. It is of use to the same engine and model only;
another one's is renamed before a new one takes its place, and the log says so.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kendall.policies import SpecError
from kendall.queueing.json_form import fields_of
from kendall.queueing.measurement.paths import put_aside
from kendall.server.calibration.host import LiveHost
from kendall.server.live.pilot import NOTHING, Pilot, SavedPilot
from kendall.server.runtime.pools import in_a_thread

log = logging.getLogger("kendall.live")
SCHEMA_VERSION = 1
SAVED = 60.0  # seconds between two states on disk
LONGEST_SAVE = 10.0  # seconds that one may take
LAST_SAVE = 2.0  # seconds that a shutdown waits for it


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


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Of an engine: what the state is good for."""

    engine: str | None = None
    model: str | None = None
    max_num_seqs: int | None = None
    servers: int | None = None


class SavedState(SavedPilot, frozen=True, kw_only=True):
    """The file; its raw parts are read by those who wrote them."""

    schema_version: int | str = "unknown"
    saved_at: str | None = None
    engine: EngineKey | None = None
    law: str | None = None
    profile: msgspec.Raw = NOTHING
    estimates: msgspec.Raw = NOTHING


def load_state(path: Path, engine: EngineKey) -> SavedState | None:
    """What was saved for this engine; None where there is nothing that can be used: a file is
    renamed then, and a log line says why.
    """
    try:
        content = path.read_bytes()
        state = msgspec.json.decode(content, type=SavedState) if content else None
        why_not = state and _why_not(state, engine)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        state, why_not = None, str(error)
    if why_not is None:
        return state
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


def _why_not(state: SavedState, engine: EngineKey) -> str | None:
    if state.schema_version != SCHEMA_VERSION:
        return f"got schema {state.schema_version}, expected {SCHEMA_VERSION}"
    saved = fields_of(state.engine or EngineKey())
    other = [name for name, value in fields_of(engine).items() if saved[name] != value]
    if not other:
        return None
    return "of another engine: " + ", ".join(
        f"{name} {'unknown' if saved[name] is None else saved[name]}" for name in other
    )


def before_its_place(path: Path) -> Path:
    """The file that is written, and then renamed."""
    return path.with_name(path.name + ".new")


def save_state(path: Path, state: SavedState) -> None:
    """Whole or not at all."""
    new = before_its_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(msgspec.json.encode(state))
    os.replace(new, path)


class StateKeeper:
    """The state file of one gateway (`--state-file`)."""

    def __init__(self, gateway: LiveHost, pilot: Pilot) -> None:
        self._gateway, self._pilot = gateway, pilot
        self._due = gateway.now()
        self.estimates: msgspec.Raw | None = None  # as they would be saved

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
        self._gateway.latency.restore(msgspec.json.decode(state.profile), state.law)
        self.estimates = None if bytes(state.estimates) == b"null" else state.estimates
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
        log.info("loaded the live model saved at %s from %s", state.saved_at, path)

    async def keep(self, estimates: msgspec.Raw, at: float) -> None:
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
            profile = None if latency.profile is None else latency.profile.to_dict()
            pilot = self._pilot.saved()
            state = SavedState(
                schema_version=SCHEMA_VERSION,
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                engine=self._engine(),
                law=str(latency.law),
                profile=msgspec.Raw(msgspec.json.encode(profile)),
                estimates=NOTHING if self.estimates is None else self.estimates,
                autopilot=pilot.autopilot,
                clock=pilot.clock,
                knobs=pilot.knobs,
                followed=pilot.followed,
            )
            save_state(path, state)
        except OSError as error:
            log.warning("cannot write the state file %s: %s", path, error)

    def save_last(self) -> None:
        """At the end, when the event loop may wait for it."""
        saving = threading.Thread(target=self.save, daemon=True)
        saving.start()
        saving.join(LAST_SAVE)

    def _engine(self) -> EngineKey:
        known, model = self._gateway.batcher.capabilities, self._gateway.settings.served_model_name
        return EngineKey(known.engine, model, known.max_num_seqs, known.servers)
