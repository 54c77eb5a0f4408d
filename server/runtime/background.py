"""Tasks that last as long as the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("kendall")
PAUSE = 1.0  # seconds until what failed is tried again


async def going_on(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """`work()` until it returns; where it fails by an exception that it does not handle, say so
    (with a traceback the first time) and begin it again.
    """
    said = ""
    while True:
        try:
            return await work()
        except Exception as error:
            first, said = repr(error) != said, repr(error)
            log.exception("%s failed; it is repeated", what, exc_info=first)
        await asyncio.sleep(PAUSE)
