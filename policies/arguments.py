"""Numbers as a caller of the Python API gives them: of any type, and of any size."""

from __future__ import annotations

import math
from numbers import Integral, Real

from kendall.policies.text import SpecError

LARGEST_WHOLE = 2**128 - 1  # a seed as long as numpy draws them


def whole_number(name: str, value: int, least: int = 1) -> int:
    """`value` as an int. Raises SpecError unless it is a whole number that is large enough, and
    not beyond `LARGEST_WHOLE`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise SpecError(
            f"got {name}={short_repr(value)}; expected a whole number, at least {least}"
        )
    if value > LARGEST_WHOLE:
        raise SpecError(
            f"got {name}={short_repr(value)}; expected a whole number of at most "
            f"{len(str(LARGEST_WHOLE))} digits"
        )
    return int(value)


def positive(name: str, value: float, unit: str) -> float:
    """`value` as a float. Raises SpecError unless it is a finite number above 0."""
    number = real_number(name, value, f"{unit} > 0")
    if not 0 < number < math.inf:
        raise SpecError(
            f"got {name}={short_repr(value)}; expected {unit} > "
            f"0{', a finite number' if number > 0 else ''}"
        )
    return number


def real_number(name: str, value: float, expected: str = "a number") -> float:
    """`value` as a float, infinite where it is too large for one. Raises SpecError for what is
    no number.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise SpecError(f"got {name}={short_repr(value)}; expected {expected}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def short_repr(value: object) -> str:
    """For a message: Python writes no int of more than 4,300 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text:.80}..."
