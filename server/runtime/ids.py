"""Random ids."""

from __future__ import annotations

import secrets

_DIGITS, _AT_ONCE = 24, 256  # of an id; ids that are made together


class RandomIds:
    """Hexadecimal digits from the system's random source, which is read for many ids at once:
    each read takes 3 us.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []

    def next(self) -> str:
        """A new id."""
        if not self._ids:
            digits = secrets.token_hex(_DIGITS // 2 * _AT_ONCE)
            self._ids = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        return self._ids.pop()
