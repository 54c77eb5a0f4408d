"""Headers that go on from one connection to another: which ones do not, and their values byte by
byte through a library that writes text.

aiohttp writes header values in UTF-8 and drops what is none. A byte that is none is a code point of
the last private use area here (0xE9: U+10FFE9), and `written` makes it the byte again in the head
that is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTES = range(0x80, 0x100)
_AREA = 0x10FF00
_MARKS = {0xDC00 + byte: _AREA + byte for byte in _BYTES}  # by what "surrogateescape" makes of it
# of the area itself, whose characters go on byte by byte too
_OWN = {
    _AREA + byte: "".join(chr(_AREA + part) for part in chr(_AREA + byte).encode())
    for byte in _BYTES
}
_MARKED = re.compile(rb"\xf4\x8f[\xbe\xbf][\x80-\xbf]")


def named_by(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Names of headers, in lower case, that the message's own `Connection` header names: they are
    for the next hop alone (RFC 9110, 7.6.1). `headers` has names in lower case.
    """
    return frozenset(
        token.strip().lower()
        for name, value in headers
        if name == "connection"
        for token in value.split(",")
    )


def text_of(value: bytes) -> str:
    """A header's value as text that `written` makes the same bytes of."""
    return value.decode(errors="surrogateescape").translate(_OWN).translate(_MARKS)


def written(head: bytes) -> bytes:
    """A head in UTF-8, with the bytes of values that are none."""
    return _MARKED.sub(lambda found: bytes([ord(found[0].decode()) - _AREA]), head)
