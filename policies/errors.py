"""What is wrong with a text that a person wrote."""

from __future__ import annotations


class SpecError(ValueError):
    """A text that names no policy, distribution or law: what was got, what was expected, what to
    do.
    """
