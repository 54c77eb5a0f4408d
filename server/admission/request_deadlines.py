"""The deadlines in one call: how long it has patience, and when it wants its first token.

`x-llm-d-inference-ttl` is llm-d's (a Go duration such as `1500ms`; a plain number is seconds),
`x-llm-d-slo-ttft-ms` too. As there, a call may have less patience than the server's default, not
more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kendall.policies.durations import parse_duration
from kendall.policies.text import SpecError
from kendall.server.runtime.errors import ApiError

TTL = b"x-llm-d-inference-ttl"
TTFT = b"x-llm-d-slo-ttft-ms"
_NAMES = frozenset((TTL, TTFT))


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """Seconds; None where nothing is asked."""

    patience: float | None = None
    first_token: float | None = None


NO_DEADLINES = RequestDeadlines()


def request_deadlines_of(
    headers: Sequence[tuple[bytes, bytes]], patience: float | None, default: float | None
) -> RequestDeadlines:
    """By the headers, the body's `patience` and the server's `default`. Raises ApiError 400."""
    asked = patience
    first_token = None
    for name, value in headers:
        if name in _NAMES:
            if name == TTL:
                asked = _least(asked, _duration(value))
            else:
                first_token = _milliseconds(value)
    asked = _least(asked, default)
    return (
        NO_DEADLINES
        if asked is None and first_token is None
        else RequestDeadlines(asked, first_token)
    )


def _least(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _duration(value: bytes) -> float:
    text = value.decode("latin-1").strip()
    try:
        seconds = parse_duration(text)
    except SpecError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _refused(TTL, text, "a duration > 0 such as 1500ms or 2s")
    return seconds


def _milliseconds(value: bytes) -> float:
    text = value.decode("latin-1").strip()
    number = _number(text)
    if not 0 < number < math.inf:
        raise _refused(TTFT, text, "milliseconds > 0")
    return number * 1e-3


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _refused(header: bytes, text: str, expected: str) -> ApiError:
    name = header.decode()
    return ApiError(
        400, "invalid_request", f"got {name}: {text[:80]!r}; expected {expected}", param=name
    )
