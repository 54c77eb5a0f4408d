"""A mortal engine whose starts and stops hang, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.base import Capabilities
from tests.server.asgi import LAW
from tests.server.mortal import MortalEngine


class Stubborn(MortalEngine):
    """Its starts are numbered from 0. `hangs`: those that never return; `deaf`: nor end when
    they are cancelled, until `release`.
    """

    def __init__(
        self,
        *,
        hangs: Collection[int] = (),
        deaf: bool = False,
        first_takes: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(parse_law(LAW), **options)
        self.hangs, self.deaf, self.first_takes = hangs, deaf, first_takes
        self.starts = 0
        self.stop_hangs = False
        self.meanwhile: dict[int, Callable[[], None]] = {}  # called in the middle of a start
        self.release = asyncio.Event()

    async def start(self) -> Capabilities:
        number, self.starts = self.starts, self.starts + 1
        await asyncio.sleep(0.0 if number else self.first_takes)
        if number in self.hangs:
            await self._hang()
        found = await super().start()
        self.meanwhile.get(number, lambda: None)()
        return found

    async def stop(self) -> None:
        if self.stop_hangs:
            await self._hang()
        await super().stop()

    async def _hang(self) -> None:
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                if not self.deaf:
                    raise
