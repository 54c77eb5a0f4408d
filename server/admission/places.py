"""Where waiting requests stand in the queue, for those who listen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.admission.host import Host
from server.admission.waits import Waits

EVERY = 1.0  # seconds between two looks at the queue
Listener = Callable[[int, float | None], None]  # its place, and the mean wait in seconds


class Places:
    """Tells those who listen where they stand: one walk through the queue a second, however many
    listen.
    """

    def __init__(self, gateway: Host, waits: Waits | None) -> None:
        self._gateway = gateway
        self._waits = waits
        self._listeners: dict[str, Listener] = {}
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, request_id: str, told: Listener) -> None:
        """From the next walk on."""
        self._listeners[request_id] = told
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._walk)

    def forget(self, request_id: str) -> None:
        """It does not wait any more."""
        self._listeners.pop(request_id, None)
        if not self._listeners and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _walk(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._walk)
        for place, waiting in enumerate(self._gateway.batcher.waiting):
            told = self._listeners.get(waiting.request.id)
            if told is not None:
                wait = None if self._waits is None else self._waits.wait(place, joining=0)
                told(place, None if wait is None else wait.mean)
