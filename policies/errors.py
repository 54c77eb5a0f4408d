"""The error of a text that cannot be parsed."""

from __future__ import annotations


class SpecError(ValueError):
    """A text that names no policy, distribution or law; the message says what was got, what was
    expected and what to do.
    """
