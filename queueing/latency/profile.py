"""A profile: a measured law with everything that says what it was measured on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from kendall.policies.text import SpecError, check_text
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.paths import writing

SCHEMA_VERSION = 1
# quiet runs gave 0.940 to 0.998: vLLM 0.32.0 on 2 virtual cores, 2026-11 (bench/results:
# sweep, demo, live-validation, batch-law)
LEAST_R2 = 0.9
LAW_EXAMPLE = "k1=0.001,k2=0.01,k3=0.0001,k4=0.005"
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
        return dict(msgspec.to_builtins(self)) | {"law": self.law.as_dict()}

    def to_json(self) -> str:
        """One JSON object."""
        return msgspec.json.encode(self.to_dict()).decode()

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Profile:
        """From plain values. Raises SpecError."""
        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise SpecError(f"expected a profile: {error}") from None

    @property
    def poor_fit(self) -> str | None:
        """A sentence where the law explains too little of what was measured; None elsewhere."""
        if self.r2 is None or self.r2 >= LEAST_R2:
            return None
        advice = "stop other work on the machine and calibrate again with more --repeats"
        return (
            f"the law fits poorly: R2 {self.r2:.2f}, where a quiet machine gives at least "
            f"{LEAST_R2:g}; {advice}"
        )

    def save(self, path: Path) -> None:
        """Write it; the folder is made. Raises CommandError."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                msgspec.json.format(msgspec.json.encode(self.to_dict()), indent=1) + b"\n"
            )


def profile_path(name: str) -> Path:
    """Where a profile of that name is kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kendall" / "profiles" / f"{name}.json"


Source = Literal["file", "cache", "shipped"]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A profile and the file it was read from."""

    profile: Profile
    path: Path
    source: Source  # "cache": the user's own, measured by `kendall calibrate`

    def describe(self) -> list[str]:
        """Which profile this is and what it was measured on, for a person."""
        name = self.profile.name
        where = (
            f"shipped with Kendall{self._measures_yours()}"
            if self.source == "shipped"
            else str(self.path)
        )
        return [f"profile {name}, {where}", *filter(None, [self._measured_on()])]

    def _measures_yours(self) -> str:
        """The command that measures this law here, where the profile bears the name of a model
        that `kendall serve` takes.
        """
        name = self.profile.name
        return f"; `kendall calibrate {name}` measures yours" if name == self.profile.model else ""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        run = {
            name: getattr(self.profile, name)
            for name in ("engine", "model", "machine", "date", "versions", "r2")
        }
        return {"name": self.profile.name, "source": self.source, "path": str(self.path), **run}

    def _measured_on(self) -> str:
        profile, machine = self.profile, self.profile.machine
        engine = " ".join(
            filter(None, [profile.engine, profile.versions.get(profile.engine or "")])
        )
        cores = f"{machine['cores']} cores" if "cores" in machine else None
        parts = [
            engine,
            profile.model,
            machine.get("device"),
            machine.get("cpu"),
            cores,
            (profile.date or "")[:10],
        ]
        run = ", ".join(str(part) for part in parts if part)
        return f"measured: {run}" if run else ""


def find_profile(name_or_path: str) -> ProfileFile:
    """A profile by path, or by name: the user's own first, then those shipped. Raises SpecError."""
    if not name_or_path.strip():
        raise SpecError(f"got an empty latency law; expected {_expected()}")
    is_path = "/" in name_or_path or name_or_path.endswith(".json")
    places: list[tuple[Source, Path]] = [("file", Path(name_or_path))] if is_path else []
    places += [("cache", profile_path(name_or_path)), ("shipped", SHIPPED / f"{name_or_path}.json")]
    if not is_path:
        places.append(("file", Path(name_or_path)))
    for source, path in places:
        if path.is_file():
            try:
                profile = msgspec.json.decode(path.read_bytes(), type=Profile)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise SpecError(
                    f"got latency {path}, a file that is not a profile ({error}); `kendall "
                    "calibrate MODEL` writes one"
                ) from None
            return ProfileFile(profile, path, source)
    if Path(name_or_path).is_dir():
        raise SpecError(
            f"got latency {name_or_path!r}, a folder; expected the file of a profile, which "
            "`kendall calibrate MODEL` writes"
        )
    if is_path:
        raise SpecError(
            f"got latency {name_or_path!r}: no such file; expected a profile, which `kendall "
            "calibrate MODEL` writes"
        )
    raise SpecError(f"got latency {name_or_path!r}; expected {_expected()}")


def profile_names() -> list[str]:
    """That a latency text can name: the user's own, and those shipped."""
    folders = (profile_path("any").parent, SHIPPED)
    return sorted({path.stem for folder in folders for path in folder.glob("*.json")})


def _expected() -> str:
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.json")))
    kinds = "k1=..,k2=..,k3=..,k4=.. or a=..,c=.. in seconds, or the name or file of a profile"
    return (
        f"{kinds} (shipped: {shipped}; `kendall profiles` lists all, `kendall "
        "calibrate MODEL` makes one)"
    )


def load_profile(name_or_path: str) -> Profile:
    """As find_profile, without its file."""
    return find_profile(name_or_path).profile


def profile_of(latency: str) -> ProfileFile | None:
    """The profile that a latency text names; None where it is the law itself. Raises SpecError."""
    check_text("latency", latency, LAW_EXAMPLE)
    return None if "=" in latency and not Path(latency).is_file() else find_profile(latency)


def poor_fit_of(latency: str) -> str | None:
    """What `kendall calibrate` said of the profile that a latency text names; None where its law
    fits, or the text is the law itself.
    """
    found = profile_of(latency)
    return (
        None
        if found is None or found.profile.poor_fit is None
        else f"profile {found.profile.name}: {found.profile.poor_fit}"
    )


def load_law(text: str) -> LatencyModel:
    """A law from its text, or from a profile's name or path. Raises SpecError."""
    found = profile_of(text)
    return parse_law(text) if found is None else found.profile.law
