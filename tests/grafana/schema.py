"""A dashboard's JSON against the Foundation SDK's own types, which are Grafana's schema in Python:
types, enumerations, unknown keys.

The SDK reads JSON without looking at what it reads. Here every value is held against the annotation
of its place, and what the SDK writes again must be what it read: a key that it does not know would
be lost.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

PLAIN = (str, int, float, bool)


def faults(data: dict[str, Any]) -> list[str]:
    """Why this is no dashboard of the SDK's schema version; empty if it is one."""
    register_default_plugins()
    version = Dashboard().schema_version
    if data.get("schemaVersion") != version:
        return [f"schemaVersion {data.get('schemaVersion')}; the SDK's is {version}"]
    read = Dashboard.from_json(data)
    again = json.loads(json.dumps(read, cls=JSONEncoder))
    return [*_wrong(read, Dashboard, "dashboard"), *_differences(data, again, "dashboard")]


def _wrong(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Values that their place's type does not allow."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if hasattr(value, "to_json"):  # a model: by its own annotations, whatever the place is called
        for name, annotation in typing.get_type_hints(type(value)).items():
            yield from _wrong(getattr(value, name, None), annotation, f"{where}.{name}")
    elif isinstance(value, dict) and hasattr(
        kind, "from_json"
    ):  # the SDK leaves some places as it found them
        read = kind.from_json(value)
        yield from _wrong(read, kind, where)
        yield from _differences(value, json.loads(json.dumps(read, cls=JSONEncoder)), where)
    elif origin in {list, dict} and isinstance(value, origin):
        places = enumerate(value) if origin is list else value.items()
        for place, each in places:
            yield from _wrong(each, arguments[-1], f"{where}[{place!r}]")
    elif origin in {typing.Union, types.UnionType}:
        yield from _none_of(value, arguments, where)
    elif not _is(value, kind, origin, arguments):
        yield f"{where}: {value!r} is no {kind}"


def _none_of(value: Any, options: tuple[Any, ...], where: str) -> Iterator[str]:
    """What is wrong under the option that fits best."""
    kinds = [option for option in options if option is not type(None)]
    if value is None and len(kinds) < len(options):
        return
    yield from min((list(_wrong(value, option, where)) for option in kinds), key=len)


def _is(value: Any, kind: Any, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if kind in {Any, object}:
        return True
    if kind is type(None):
        return value is None
    if origin is typing.Literal:
        return value in arguments
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return value in {member.value for member in kind}
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return (
        kind in PLAIN and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    )


def _differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """What reading and writing again changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            if key not in after or key not in before:
                yield f"{where}.{key}: {'unknown' if key in before else 'missing'}"
            else:
                yield from _differences(before[key], after[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"
