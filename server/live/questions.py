"""Questions of people to the predicting process: the same one is asked once, one at a time, and not
for askers that have left.

An advice takes seconds of the process that also makes the live prediction. Questions queue before a
lock of their own, so that an assessment waits for one question at most, however many were asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect

from kendall.server.live.prediction_client import PredictorLostError
from kendall.server.runtime.errors import ApiError

Watch = Callable[[Callable[[], None]], Callable[[], object]]
"""Calls what it is given once the asker's client has gone; what it returns ends the watch."""


@dataclass(eq=False)
class _Open:
    """A question without an answer yet."""

    answer: asyncio.Task[Any]
    askers: int = 0


class Questions:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Open] = {}
        self._one = asyncio.Lock()

    async def ask(self, key: Hashable, work: Callable[[], Awaitable[Any]], watch: Watch) -> Any:
        """The answer of `work`, begun for the first of those who ask the same. Raises what it
        raises; ClientDisconnect where the client of this asker leaves before; ApiError 504 where
        the process was lost over it.
        """
        question = self._open.get(key)
        if question is None:
            question = self._open[key] = _Open(asyncio.create_task(self._answered(key, work)))
            question.answer.add_done_callback(_look_at)
        question.askers += 1
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def leave() -> None:
            if not gone.done():
                gone.set_result(None)

        unwatch = watch(leave)
        try:
            await asyncio.wait((question.answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            question.askers -= 1
            unwatch()
        if not question.answer.done():
            raise ClientDisconnect
        try:
            return question.answer.result()
        except PredictorLostError as error:
            raise ApiError(
                504,
                "prediction_timeout",
                f"{error}; ask again when the gateway has predictions, of an advice for one target",
            ) from None

    async def _answered(self, key: Hashable, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with self._one:
                if not self._open[key].askers:
                    return None  # all of them left while it waited
                return await work()
        finally:
            del self._open[key]


def _look_at(answer: asyncio.Task[Any]) -> None:
    """Its error has been seen, though every asker may have left."""
    if not answer.cancelled():
        answer.exception()
