"""How long a call may take: to its first token, and as a whole. Past either limit it fails with
504, waiting or in service.

Both count from its arrival (its body has been read), through tokenising, the queue, restarts of the
engine and calibrations, until the answer is whole; what a slow client takes to read it is
`--slow-reader-timeout`'s. Each of header, body and server may ask; the shortest limit holds.

    header                            unit  limit
    x-envoy-upstream-rq-timeout-ms    ms    whole call, as a client asks Envoy (0: none)
    x-envoy-expected-rq-timeout-ms    ms    whole call, as Envoy tells those behind it
    x-kendall-first-token-timeout-ms  ms    first token
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from kendall.server.runtime.errors import ApiError

if TYPE_CHECKING:
    from kendall.server.queue.batcher import Batcher
    from kendall.server.queue.sequence import SequenceState

WHOLE, FIRST_TOKEN = "deadline_exceeded", "first_token_timeout"  # codes of the errors
ENVOY, ENVOY_EXPECTED = b"x-envoy-upstream-rq-timeout-ms", b"x-envoy-expected-rq-timeout-ms"
FIRST_TOKEN_HEADER = b"x-kendall-first-token-timeout-ms"
_CODES = {ENVOY: WHOLE, ENVOY_EXPECTED: WHOLE, FIRST_TOKEN_HEADER: FIRST_TOKEN}
_WORDS = {
    WHOLE: (
        "the answer was not complete within {seconds:g} s, the limit of this request or of "
        "--request-timeout"
    ),
    FIRST_TOKEN: (
        "there was no token within {seconds:g} s, the limit of this request or of "
        "--first-token-timeout"
    ),
}
_T = TypeVar("_T")


class Asks(Protocol):
    """A request body, or the server's settings."""

    @property
    def request_timeout(self) -> float | None:
        """Seconds to the end of the answer."""

    @property
    def first_token_timeout(self) -> float | None:
        """Seconds to the first token."""


class Pending(Protocol):
    """One choice of an answer: `done` once it is whole."""

    sequence: SequenceState | None
    done: bool


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds from the arrival of a call; infinite where there is no limit."""

    whole: float = math.inf
    first_token: float = math.inf

    def limits(self) -> list[tuple[float, str]]:
        """Those that there are, with the codes of their errors, the shortest first."""
        return sorted(
            (seconds, code)
            for seconds, code in ((self.whole, WHOLE), (self.first_token, FIRST_TOKEN))
            if seconds < math.inf
        )

    async def bound(self, call: Awaitable[_T], arrived_at: float) -> _T:
        """What `call` gives, if that is within the shorter limit. Raises ApiError 504."""
        seconds, code = self.limits()[0]
        try:
            async with asyncio.timeout_at(arrived_at + seconds) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise ApiError(504, code, _WORDS[code].format(seconds=seconds)) from None


def timeouts_of(
    headers: Sequence[tuple[bytes, bytes]], call: Asks, server: Asks
) -> Timeouts | None:
    """The limits of one call; None without any. Raises ApiError 400 for a header that is no
    number of milliseconds.
    """
    asked = [(_CODES[name], _seconds(name, value)) for name, value in headers if name in _CODES]
    for asking in (call, server):
        if asking.request_timeout is not None:
            asked.append((WHOLE, asking.request_timeout))
        if asking.first_token_timeout is not None:
            asked.append((FIRST_TOKEN, asking.first_token_timeout))
    if not asked:
        return None
    whole, first = (
        min((seconds for code, seconds in asked if code == which), default=math.inf)
        for which in (WHOLE, FIRST_TOKEN)
    )
    return Timeouts(whole, first) if min(whole, first) < math.inf else None


def _seconds(name: bytes, value: bytes) -> float:
    text = value.decode("latin-1").strip()
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        header = name.decode()
        raise ApiError(
            400,
            "invalid_request",
            f"got {header}: {text[:80]!r}; expected milliseconds (0: no limit)",
            param=header,
        )
    return milliseconds * 1e-3 or math.inf


class Deadlines:
    """The timers of one call in the queue and in service; `close` ends them."""

    def __init__(
        self, batcher: Batcher, timeouts: Timeouts, choices: Sequence[Pending], arrived_at: float
    ) -> None:
        self._batcher = batcher
        self._choices = choices
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_at(arrived_at + seconds, self._expire, code, seconds)
            for seconds, code in timeouts.limits()
        ]

    def close(self) -> None:
        """Nothing expires any more."""
        for timer in self._timers:
            timer.cancel()
        self._choices = ()

    def _expire(self, code: str, seconds: float) -> None:
        for choice in self._choices:
            sequence = choice.sequence
            if (
                sequence is None
                or choice.done
                or (code == FIRST_TOKEN and sequence.at.first_token is not None)
            ):
                continue
            self._batcher.fail(sequence, "failed", code, _WORDS[code].format(seconds=seconds))
