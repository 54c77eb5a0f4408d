"""Numbers that a calculation once gave, in tests/golden/values, and how far it is from them now;
of a file's hash only that it is one.

`WRITE_GOLDEN=1 pytest FILE` writes them anew.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from tests.golden_files import FOLDER

Scalar = float | str | bool | None
RELATIVE, ABSOLUTE = 1e-8, 1e-11  # of another processor and another FFT; residuals are noise
SHOWN = 8  # numbers of a long array, beside their sum


def moved(name: str, calculations: Mapping[str, Callable[[], Any]]) -> list[str]:
    """What differs from tests/golden/values/NAME, one line each."""
    found = {case: dict(_flat(calculate())) for case, calculate in calculations.items()}
    path = FOLDER / "values" / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    return [
        f"{case} {key}: {kept.get(case, {}).get(key, 'nothing')} before, {now} now"
        for case, values in found.items()
        for key, now in values.items()
        if not _is_close(now, kept.get(case, {}).get(key, "nothing"))
    ] + [
        f"{case} {key}: missing"
        for case, values in kept.items()
        for key in values
        if key not in found.get(case, {})
    ]


def _is_close(now: Scalar, before: Scalar) -> bool:
    if isinstance(now, bool | str | None) or isinstance(before, bool | str | None):
        return now == before
    return math.isclose(now, before, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (
        math.isnan(now) and math.isnan(before)
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Scalar]]:
    """The numbers of a nested value by their place in it."""
    if isinstance(value, np.ndarray):
        yield from _of_array(value, name)
    elif isinstance(value, np.generic):
        yield name, value.item()
    elif isinstance(value, str):
        yield name, "a hash" if re.fullmatch(r"[0-9a-f]{64}", value) else value
    elif isinstance(value, bool | int | float | None):
        yield name, value
    else:
        for key, part in _parts(value):
            if "residual" not in key:
                yield from _flat(part, f"{name}.{key}" if name else key)


def _of_array(values: np.ndarray[Any, Any], name: str) -> Iterator[tuple[str, Scalar]]:
    flat = values.ravel()
    if np.iscomplexobj(flat):
        flat = np.column_stack([flat.real, flat.imag]).ravel()
    yield f"{name} shape", str(values.shape)
    yield f"{name} sum", float(flat.sum())
    for place in np.unique(np.linspace(0, len(flat) - 1, SHOWN).astype(int)) if len(flat) else ():
        yield f"{name}[{place}]", flat[place].item()


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if dataclasses.is_dataclass(value):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return [(each, getattr(value, each)) for each in value.__struct_fields__]
    return [(str(place), part) for place, part in enumerate(value)]
