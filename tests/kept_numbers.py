"""The numbers and truth values among the constants and defaults of a package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def numbers_of(*packages: str) -> str:
    """A line each, sorted by name, not by module: a move changes nothing."""
    names = [
        each.name
        for package in packages
        for each in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    ]
    found = {line for name in names for line in _numbers(importlib.import_module(name))}
    return "".join(f"{line}\n" for line in sorted(found))


def _numbers(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if name.isupper() and name != "TYPE_CHECKING" and _has_number(value):
            yield f"{name} = {_text(value)}"
        elif getattr(value, "__module__", None) == module.__name__:
            if inspect.isfunction(value):
                yield from _defaults(name, value)
            elif inspect.isclass(value):
                yield from _of_class(name, value)


def _of_class(name: str, value: type) -> Iterator[str]:
    if "__init__" in vars(value) or hasattr(value, "__struct_fields__"):
        yield from _defaults(name, value)
    for method, function in vars(value).items():
        if inspect.isfunction(function) and not method.startswith("__"):
            yield from _defaults(f"{name}.{method}", function)


def _defaults(name: str, function: Any) -> Iterator[str]:
    for each in inspect.signature(function).parameters.values():
        if each.default is not each.empty and _has_number(each.default):
            yield f"{name}({each.name}={_text(each.default)})"


def _has_number(value: Any) -> bool:
    if isinstance(value, tuple | list | frozenset | set):
        return any(map(_has_number, value))
    if isinstance(value, dict):
        return _has_number([*value, *value.values()])
    return isinstance(value, bool | int | float)


def _text(value: Any) -> str:
    """The same in every process: sets have no order."""
    return repr(sorted(value, key=repr)) if isinstance(value, frozenset | set) else repr(value)
