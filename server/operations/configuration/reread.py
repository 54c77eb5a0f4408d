"""The settings as a new start of the same command would have them: arguments and environment as
they were, files as they are now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from kendall.server.settings import Settings

# key of a context: where `kendall serve` puts its settings instead of serving
_WANTED = "kendall.settings-only"


def reader_of(ctx: typer.Context) -> Callable[[], Settings] | None:
    """What reads them again; None where the command does not know its own arguments."""
    if not isinstance(ctx.obj, tuple):
        return None

    def read() -> Settings:
        found: list[Settings] = []
        command: Any = ctx.command
        with command.make_context(ctx.info_name, list(ctx.obj), obj=ctx.obj) as again:
            again.meta[_WANTED] = found
            again.command.invoke(again)
        return found[0]

    return read


def is_read_again(ctx: typer.Context, settings: Settings) -> bool:
    """Hand the settings over and tell whether that is all that is wanted."""
    wanted: list[Settings] | None = ctx.meta.get(_WANTED)
    if wanted is None:
        return False
    wanted.append(settings)
    return True
