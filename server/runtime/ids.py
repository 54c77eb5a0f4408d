"""Random ids of calls."""

from __future__ import annotations

import secrets

_DIGITS, _AT_ONCE = 24, 256  # of an id; ids that are made together


class CallIds:
    """Random, so that no restart and no replica repeats one, and none tells how many calls there
    were. The system's random source is read for many ids at once: each read takes 3 us.
    """

    def __init__(self) -> None:
        self._digits: list[str] = []

    def next(self, prefix: str) -> str:
        """`prefix`, a hyphen and hexadecimal digits."""
        if not self._digits:
            digits = secrets.token_hex(_DIGITS // 2 * _AT_ONCE)
            self._digits = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        return f"{prefix}-{self._digits.pop()}"
