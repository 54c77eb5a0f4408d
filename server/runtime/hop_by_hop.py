"""Headers that a message's own `Connection` header names: they are for the next hop alone (RFC
9110, 7.6.1).
"""

from __future__ import annotations

from collections.abc import Iterable


def named_by(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Their names, in lower case; `headers` has names in lower case."""
    return frozenset(
        token.strip().lower()
        for name, value in headers
        if name == "connection"
        for token in value.split(",")
    )
