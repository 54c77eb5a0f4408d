"""A profile: a measured law with everything that says what it was measured on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from policies.text import SpecError
from queueing.latency import LatencyModel, parse_law

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "profiles"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The law, how well it fitted, and the run behind it."""

    name: str
    law: LatencyModel
    schema_version: int = SCHEMA_VERSION
    intervals: dict[str, tuple[float, float]] = {}  # 95 %, seconds
    r2: float | None = None
    mape: float | None = None  # mean absolute error of the cells' means, fraction
    engine: str | None = None
    model: str | None = None
    machine: dict[str, Any] = {}
    date: str | None = None
    versions: dict[str, str] = {}
    max_num_seqs: int | None = None
    prompt_tokens: int | None = None  # per sequence, in the measured cells
    max_output_tokens: int | None = None  # longest measured
    note: str | None = None
    cells: list[dict[str, Any]] = []  # the measurements themselves

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(msgspec.to_builtins(self))

    def to_json(self) -> str:
        """One JSON object."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Profile:
        """From plain values. Raises SpecError."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise SpecError(f"expected a profile: {error}") from None

    def save(self, path: Path) -> None:
        """Write it; the folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def profile_path(name: str) -> Path:
    """Where a profile of that name is kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kendall" / "profiles" / f"{name}.json"


def load_profile(name_or_path: str) -> Profile:
    """A profile by path, or by name: the user's own first, then those shipped. Raises SpecError."""
    places = [Path(name_or_path)] if "/" in name_or_path or name_or_path.endswith(".json") else []
    places += [profile_path(name_or_path), SHIPPED / f"{name_or_path}.json"]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.json")))
        raise SpecError(
            f"got latency {name_or_path!r}; expected k1=..,k2=..,k3=..,k4=.., a=..,c=.., a profile's file or its name (shipped: {shipped})"
        )
    try:
        return msgspec.json.decode(found.read_bytes(), type=Profile)
    except msgspec.MsgspecError as error:
        raise SpecError(f"got {found}; expected a profile ({error})") from None


def load_law(text: str) -> LatencyModel:
    """A law from its text, or from a profile's name or path. Raises SpecError."""
    return parse_law(text) if "=" in text and not Path(text).is_file() else load_profile(text).law
