"""The files that a call goes through before it is admitted: `python -m tests.way_of_a_call`.

One call of each endpoint runs through the ASGI application above the emulated engine. Every
function of the product that it enters, from the application to `Overload.admit`, is followed.
A *stay* is an entry into a function of another file than its caller's; what one instruction of
the caller enters (the validators of a model) is one stay. A *return* is a stay in a file that was
entered before. Properties are read, not entered.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kendall.server.admission.control import Overload
from tests.server.asgi import call, completion, running

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "What is a queue?"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": completion(prompt="What is a queue?"),
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 8},
}


@dataclass
class Way:
    """The functions that a call enters: file, name, and whether they begin a stay."""

    entered: list[tuple[str, str, bool]] = field(default_factory=list)
    over: bool = False
    _frames: set[FrameType] = field(default_factory=set)
    _last: tuple[FrameType | None, int, str] | None = None

    @property
    def stays(self) -> list[str]:
        """The files, in the order in which they are entered from others."""
        return [file for file, _, stay in self.entered if stay]

    @property
    def returns(self) -> int:
        """Stays in files that were entered before."""
        return len(self.stays) - len(set(self.stays))

    def follow(self, frame: FrameType, event: str, _: object) -> None:
        """A function of `sys.setprofile`. A coroutine that is resumed is not entered again."""
        if event != "call" or self.over or frame in self._frames:
            return
        file = _file_of(frame)
        if file is None or not (self.entered or frame.f_code.co_name == "__call__"):
            return
        self._frames.add(frame)
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        if _is_property(frame) or (caller is not None and _is_property(caller)):
            return
        instruction = (caller, -1 if caller is None else caller.f_lasti, file)
        other = caller is None or _file_of(caller) != file
        self.entered.append((file, frame.f_code.co_name, other and instruction != self._last))
        self._last = instruction
        self.over = frame.f_code is Overload.admit.__code__


def _is_property(frame: FrameType) -> bool:
    owner = frame.f_locals.get("self")
    return isinstance(inspect.getattr_static(type(owner), frame.f_code.co_name, None), property)


def _file_of(frame: FrameType) -> str | None:
    """The file of a function of the product; None elsewhere."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    file = str(path.relative_to(ROOT)).removeprefix("kendall/")
    return file if file.startswith(("server/", "policies/", "queueing/")) else None


async def way_of(path: str) -> Way:
    """The way of a second call; the first one imports modules."""
    way = Way()
    async with running() as (app, _):
        await call(app, "POST", path, CALLS[path])
        sys.setprofile(way.follow)
        try:
            await call(app, "POST", path, CALLS[path])
        finally:
            sys.setprofile(None)
    return way


def main() -> None:
    """Print both ways and their numbers."""
    for path in CALLS:
        way = asyncio.run(way_of(path))
        sys.stdout.write(f"{path}\n")
        for file, name, stay in way.entered:
            sys.stdout.write(f"  {'> ' if stay else '  '}{file:44}{name}\n")
        sys.stdout.write(f"stays {len(way.stays)}, returns {way.returns}\n\n")


if __name__ == "__main__":
    main()
