"""What an error may tell a client: nothing of this machine (paths, addresses in memory), and
little of what it sent.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

MAX_ECHO = 80  # characters of a client's own text
MAX_MESSAGE = 600
API_PATHS = ("/v1/", "/admin/")  # not of the file system
_CONSIDERED = 4096  # characters: the expressions below see no more
_QUOTED = re.compile(r"(?<!\w)(b?(['\"]))((?:(?!\2)[^\\]|\\.)*)(\2|\\?$)", re.DOTALL)
_LONG = re.compile(r"\S{81,}")
_PATH = re.compile(r"(?<![\w/:.])(?:/[\w.+@~-]+){2,}/?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")


def public(message: str) -> str:
    """The message as a client may read it: bounded, quotations cut at 80 characters, no path of
    this machine, no address in memory.

    >>> public("cannot open /opt/models/llama/config.json: <File object at 0x7f3a2b1c4d5e>")
    'cannot open (path): <File object at (address)>'
    """
    text = _PATH.sub(_path, message[:_CONSIDERED])
    text = _ADDRESS.sub("(address)", text)
    text = _QUOTED.sub(lambda found: found[1] + brief(found[3]) + found[4], text)
    text = _LONG.sub(lambda found: brief(found[0]), text)
    return brief(text, MAX_MESSAGE)


def brief(text: str, most: int = MAX_ECHO) -> str:
    """The text, or its beginning with an ellipsis.

    >>> brief("abcdef", 5)
    'ab...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


class _Excerpt(reprlib.Repr):
    """Looks at the beginning of a value only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MAX_ECHO
        self.maxlist = self.maxdict = self.maxlevel = 4

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In its own order: the library sorts all keys."""
        few = dict(islice(x.items(), self.maxdict))
        return (
            super().repr_dict(few, level)
            if len(few) == len(x)
            else super().repr_dict(few, level)[:-1] + ", ...}"
        )


_excerpt = _Excerpt()


def excerpt(value: object) -> str:
    """At most 80 characters of a value that a client sent, however large it is.

    >>> excerpt({"a": [1, 2], "b": None})
    "{'a': [1, 2], 'b': None}"
    """
    return _excerpt.repr(value)[:MAX_ECHO]


def place_of(location: Sequence[int | str], value: Any, *, missing: bool) -> str:
    """Where an error of pydantic's is in the body `value`, in the client's words; pydantic names
    members of unions along the way.

    >>> place_of(("messages", 0, "str", "content"), {"messages": [{"content": 1}]}, missing=False)
    'messages[0].content'
    """
    path = ""
    for part in location:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            path, value = f"{path}.{part}", value[part]
    return (f"{path}.{location[-1]}" if missing else path).removeprefix(".")


def _path(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith(API_PATHS) else "(path)"
