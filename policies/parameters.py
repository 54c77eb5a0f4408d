"""The parameters of a policy's text: the fields of its class, read and written by their types.

A field is an int, a float, a bool or a str, or one of these or None. `max_batch_size` and
`batch_size` are sizes, `max_wait` is a duration, `order` is one of ORDERS and stands behind what is
not its parameter, `route` is one of ROUTES and comes last.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kendall.policies.durations import seconds_or_nan
from kendall.policies.errors import SpecError
from kendall.policies.ordered import KEYS, Ordered
from kendall.policies.orders import ORDERS, PARAMETERS
from kendall.policies.routes import ROUTES

LARGEST_BATCH = 1_000_000  # beyond any engine, and small enough for every model's arithmetic
LARGEST_WHOLE = 10**15
SIZES = ("max_batch_size", "batch_size")  # fields with the largest batch that a policy asks for
NONE = "none"
TRUTHS = {"true": True, "false": False}
Kind = Literal["integer", "number", "boolean", "text"]
KINDS: dict[Any, Kind] = {int: "integer", float: "number", bool: "boolean", str: "text"}
Value = int | float | str | None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field. `default` is `dataclasses.MISSING` where a text must give it."""

    name: str
    kind: Kind
    default: Any
    optional: bool  # may be None
    choices: tuple[str, ...] = ()  # of a text: the orders of service that the policy serves, routes

    @property
    def required(self) -> bool:
        """Whether a text must give it."""
        return self.default is dataclasses.MISSING

    def parse(self, policy: str, text: str) -> Value:
        """The value that a text gives. Raises SpecError."""
        if self.optional and text == NONE:
            return None
        # the policy itself says why it does not serve an order
        if self.choices and text not in (*self.choices, *(ORDERS if self.name == "order" else ())):
            raise SpecError(
                f"got {self.name}={text!r} for policy {policy}; expected one of "
                f"{', '.join(self.choices)}{suggest(text, self.choices)}"
            )
        read = _BY_NAME.get(self.name) or _BY_KIND[self.kind]
        return read(policy, self.name, text)

    def to_dict(self) -> dict[str, Any]:
        """For the page: a default that is no JSON number is its text."""
        default = None if self.required else self.default
        if isinstance(default, float) and not math.isfinite(default):
            default = None
        return {
            "name": self.name,
            "kind": self.kind,
            "required": self.required,
            "default": default,
            "size": self.name in SIZES,
            "choices": list(self.choices),
        }


@functools.cache
def parameters_of(cls: type) -> Mapping[str, Parameter]:
    """Those of a policy's class by name, in order. Raises SpecError for a field that no text can
    give.
    """
    hints = typing.get_type_hints(cls)
    return {field.name: _parameter(cls, field, hints[field.name]) for field in fields_of(cls)}


def fields_of(cls: type) -> list[dataclasses.Field[Any]]:
    """What a text gives, in the order of the canonical text: the class's own fields, then the order
    of service, its parameters and the route, which the built-in policies share.
    """
    fields = [field for field in dataclasses.fields(cls) if field.init]
    if not issubclass(cls, Ordered):
        return fields
    return sorted(fields, key=lambda field: (field.name == "route", field.name in KEYS))


def _parameter(cls: type, field: dataclasses.Field[Any], hint: Any) -> Parameter:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    of = set(typing.get_args(hint)) if union else {hint}
    kinds = of - {type(None)}
    kind = KINDS.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None:
        written = hint.__name__ if isinstance(hint, type) else str(hint)
        raise SpecError(
            f"got the field {field.name}: {written} of {cls.__name__}; expected int, float, bool "
            "or str, or one of these | None, which a policy's text can give"
        )
    if field.default_factory is not dataclasses.MISSING:
        raise SpecError(
            f"got a default_factory for the field {field.name} of {cls.__name__}; expected a value"
        )
    choices: tuple[str, ...] = field.metadata.get("choices", ())
    if field.name == "order":
        choices = cls.orders() if issubclass(cls, Ordered) else tuple(ORDERS)
    elif field.name == "route" and issubclass(cls, Ordered):
        choices = ROUTES
    return Parameter(field.name, kind, field.default, type(None) in of, choices)


def size_field(cls: type) -> str | None:
    """The field with the largest batch that a policy asks for; None where no field sets it."""
    names = {field.name for field in dataclasses.fields(cls)}
    return next((name for name in SIZES if name in names), None)


def format_value(value: Value) -> str:
    """As `Parameter.parse` reads it."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else format_number(value)


def parse_number(key: str, text: str, context: str) -> float:
    """A finite or infinite number. Raises SpecError for anything else, not-a-number included."""
    try:
        value = float(text)
    except ValueError:
        raise SpecError(f"got {key}={text!r} in {context!r}; expected a number") from None
    if math.isnan(value):
        raise SpecError(f"got {key}={text!r} in {context!r}; expected a number")
    return value


def format_number(value: float) -> str:
    """The shortest text that reads back as the same number; whole numbers without a point."""
    return (
        str(int(value)) if float(value).is_integer() and abs(value) < 1e16 else repr(float(value))
    )


def suggest(word: str, known: Mapping[str, Any] | tuple[str, ...]) -> str:
    """`"; did you mean X?"` if a known word is similar, else an empty text."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _whole(
    policy: str, key: str, text: str, least: int = -LARGEST_WHOLE, most: int = LARGEST_WHOLE
) -> int:
    try:
        number = parse_number(key, text, policy)
    except SpecError:
        number = math.nan
    bounded = least > -LARGEST_WHOLE or number.is_integer()  # else the bounds are beside the point
    if not number.is_integer() or not least <= number <= most:
        raise SpecError(
            f"got {key}={text} for policy {policy}; expected a whole number"
            + (f" from {least:,} to {most:,}" if bounded else "")
        )
    return int(number)


def _size(policy: str, key: str, text: str) -> int:
    return _whole(policy, key, text, 1, LARGEST_BATCH)


def _number(policy: str, key: str, text: str) -> float:
    """Also a duration with its unit: seconds."""
    seconds = seconds_or_nan(text)
    if not math.isnan(seconds):
        return seconds
    try:
        return parse_number(key, text, policy)
    except SpecError:
        duration = key not in PARAMETERS or PARAMETERS[key].metadata["seconds"]
        raise SpecError(
            f"got {key}={text!r} for policy {policy}; expected a number"
            + (", or a duration with its unit, such as 300ms" if duration else "")
        ) from None


def _truth(policy: str, key: str, text: str) -> bool:
    if text not in TRUTHS:
        raise SpecError(f"got {key}={text} for policy {policy}; expected true or false")
    return TRUTHS[text]


def _text(policy: str, key: str, text: str) -> str:
    del policy, key
    return text


def _max_wait(policy: str, key: str, text: str) -> float:
    seconds = seconds_or_nan(text)
    if not seconds > 0:
        raise SpecError(
            f"got {key}={text} for policy {policy}; expected seconds > 0, for example 0.5 or 500ms"
        )
    return seconds


_BY_NAME: dict[str, Callable[[str, str, str], Value]] = {
    "max_wait": _max_wait,
    **dict.fromkeys(SIZES, _size),
}
_BY_KIND: dict[Kind, Callable[[str, str, str], Value]] = {
    "integer": _whole,
    "number": _number,
    "boolean": _truth,
    "text": _text,
}
