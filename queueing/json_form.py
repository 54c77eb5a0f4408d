"""Values in the form that JSON has for them, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Kind = TypeVar("Kind")
_NAMES: dict[type, tuple[str, ...]] = {}  # of the fields of classes


def to_json(value: object) -> Json:
    """A dataclass by its fields without those that are UNSET; null where a number is none or
    infinite.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return json_object(value)


def json_object(value: object) -> dict[str, Json]:
    """The same of a mapping, of what has `as_dict` because it is not simply its fields, or of what
    has fields.
    """
    if isinstance(value, Mapping):
        members: Mapping[str, object] = value
    else:
        own = getattr(value, "as_dict", None)
        members = fields_of(value) if own is None else own()
    return {str(name): to_json(item) for name, item in members.items() if item is not msgspec.UNSET}


def fields_of(value: object) -> dict[str, object]:
    """The fields of a dataclass by their names."""
    names = _NAMES.get(type(value))
    if names is None:
        assert dataclasses.is_dataclass(value)
        names = _NAMES[type(value)] = tuple(each.name for each in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names}


def from_json(plain: object, kind: type[Kind]) -> Kind:
    """The dataclass whose fields these are; null is the default of a field. Raises ValueError."""
    return msgspec.convert(_without_nulls(plain), kind)


def _without_nulls(plain: object) -> object:
    if isinstance(plain, Mapping):
        return {name: _without_nulls(item) for name, item in plain.items() if item is not None}
    return [_without_nulls(item) for item in plain] if isinstance(plain, list) else plain
