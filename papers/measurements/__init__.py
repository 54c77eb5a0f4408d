"""The documents' measurements, as printed, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from kendall.policies.text import SpecError, suggest

FOLDER = Path(__file__).parent


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A printed table: named columns, one row per measured point."""

    name: str
    source: str
    device: str
    model: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]

    def column(self, name: str) -> list[float]:
        """One column, in the order of the rows. Raises SpecError."""
        if name not in self.columns:
            raise SpecError(
                f"got column {name!r} of {self.name}; expected one of "
                f"{', '.join(self.columns)}{suggest(name, self.columns)}"
            )
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def cells(self) -> list[dict[str, float]]:
        """The rows by column name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def measurement_names() -> list[str]:
    """The tables that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load_measurement(name: str) -> Measurement:
    """A table that ships. Raises SpecError: no such name."""
    names = measurement_names()
    if name not in names:
        raise SpecError(
            f"got measurement {name!r}; expected one of "
            f"{', '.join(names)}{suggest(name, tuple(names))}"
        )
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Measurement)
