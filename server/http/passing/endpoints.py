"""What the gateway reads of a call that it passes on, route by route, and the one thing that it
changes: the token limit, where `--max-output-tokens` is below the client's.

Every value keeps its bytes; what is not read may be anything. A field that the gateway knows and
cannot read is left to the server behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from server.runtime.errors import ApiError

Fields = Mapping[str, msgspec.Raw]
MOST_COUNT = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A route of the server behind."""

    path: str
    prompt: tuple[str, ...]  # fields that make the prompt
    several: str | None = None  # the one of them that may be a list of prompts
    limits: tuple[str, ...] = ()  # fields of the token limit, the one that counts most first
    default: int | None = None  # OpenAI's limit where the client gives none


ENDPOINTS = {
    each.path: each
    for each in (
        Endpoint(
            path="/v1/chat/completions",
            prompt=("messages", "tools"),
            limits=("max_completion_tokens", "max_tokens"),
        ),
        Endpoint(
            path="/v1/completions",
            prompt=("prompt",),
            several="prompt",
            limits=("max_tokens",),
            default=16,
        ),
        Endpoint(
            path="/v1/responses",
            prompt=("instructions", "input", "tools"),
            limits=("max_output_tokens",),
        ),
        Endpoint(
            path="/v1/messages", prompt=("system", "messages", "tools"), limits=("max_tokens",)
        ),
        Endpoint(path="/v1/embeddings", prompt=("input",), several="input"),
        Endpoint(path="/v1/rerank", prompt=("query", "documents"), several="documents"),
        Endpoint(path="/v1/score", prompt=("text_1", "text_2"), several="text_2"),
    )
}
RELAYED = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # not queued: no engine works


def parse(body: bytes) -> Fields:
    """The body's fields. Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, "invalid_json", f"got a body that cannot be read ({error}); expected a JSON object"
        ) from None


def number(fields: Fields, name: str) -> float | None:
    """A number above 0; None for anything else."""
    value = _value(fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def whole(fields: Fields, name: str) -> int | None:
    """A whole number; None for anything else."""
    value = _value(fields, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def count(fields: Fields, name: str) -> int | None:
    """A whole number from 1 on; None for anything else."""
    value = whole(fields, name)
    return value if value is not None and 1 <= value < MOST_COUNT else None


def sequences(endpoint: Endpoint, fields: Fields) -> int:
    """How many a call asks for: n of each prompt."""
    prompts = 1 if endpoint.several is None else _prompts(fields.get(endpoint.several))
    return prompts * ((count(fields, "n") or 1) if endpoint.limits else 1)


def prompt_of(endpoint: Endpoint, fields: Fields) -> bytes:
    """The values that make the prompt, as JSON."""
    return b",".join(bytes(fields[name]) for name in endpoint.prompt if name in fields)


def own_limit(endpoint: Endpoint, fields: Fields) -> int | None:
    """The client's own limit on the tokens of a sequence; None where there is none."""
    given = (count(fields, name) for name in endpoint.limits)
    return next((limit for limit in given if limit is not None), endpoint.default)


def clipped(body: bytes, endpoint: Endpoint, fields: Fields, limit: int | None) -> bytes:
    """The body with `limit` where the client's own is larger or absent; the same bytes where
    nothing changes.
    """
    own = own_limit(endpoint, fields)
    if limit is None or not endpoint.limits or (own is not None and own <= limit):
        return body
    given = [name for name in endpoint.limits if count(fields, name) is not None]
    absent = [name for name in endpoint.limits if _value(fields, name) is None]
    if not given and len(absent) < len(endpoint.limits):
        return body  # no limit that can be read: the server behind refuses it
    names = given or absent[-1:]
    value = msgspec.Raw(str(limit).encode())
    lowered = {name: value for name in names if (count(fields, name) or MOST_COUNT) > limit}
    return msgspec.json.encode({**fields, **lowered})


def _value(fields: Fields, name: str) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return math.nan  # there, and beyond what can be read: 1e400


def _prompts(value: msgspec.Raw | None) -> int:
    """How many prompts a value holds: a list of token ids is one."""
    if value is None or not bytes(value).startswith(b"["):
        return 1
    parts = msgspec.json.decode(value, type=list[msgspec.Raw])
    if not parts or bytes(parts[0])[:1].isdigit():
        return 1
    return len(parts)
