"""What the gateway reads of a call that it passes on, route by route, and what it changes: the
token limit, where `--max-output-tokens` is below the client's, and the spelling of numbers.

Every value keeps its bytes; what is not read may be anything. Of a name that is there twice the
last value counts, and alone goes on; names that are spelled with escapes are spelled out. A number
that limits a call (`n`, a token limit) is read as vLLM's models read it, which take `"64"`, `64.0`
and `true` for whole numbers: such a spelling is replaced by the number, so that every server reads
what was read here, and what is none is refused. Other names of such a number, which some servers
heed first, are replaced by its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import excerpt

Fields = Mapping[str, msgspec.Raw]
LONGEST_NUMBER = 64  # bytes; what is longer is none
# what llama.cpp reads before `max_tokens` and `n`, and what belongs to another route
OTHER_LIMITS, OTHER_CHOICES = ("n_predict", "max_completion_tokens"), ("n_cmpl",)
OTHER_NAMES = frozenset((*OTHER_LIMITS, *OTHER_CHOICES))
_PLAIN = re.compile(rb"-?(0|[1-9][0-9]{0,17})|null")
_whole_number = TypeAdapter(int | None)
_yes_or_no = TypeAdapter(bool | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedEndpoint:
    """A route of the server behind."""

    path: str
    prompt: tuple[str, ...]  # fields that make the prompt
    # fields that may hold several prompts: of each group the one with most counts
    several: tuple[tuple[str, ...], ...] = ()
    choices: tuple[str, ...] = ()  # fields of the number of choices: the largest counts
    limits: tuple[str, ...] = ()  # fields of the token limit, the one that counts most first
    default: int | None = None  # OpenAI's limit where the client gives none

    @property
    def numbers(self) -> tuple[str, ...]:
        """Fields that limit a call."""
        return (*self.limits, *self.choices)

    def parts(self, body: bytes) -> tuple[bytes, Fields, int, bytes]:
        """Of a body: itself with plain numbers, its fields, its sequences, its prompt. Raises
        ApiError 400.
        """
        body, fields = self.plain(body, parse(body))
        return body, fields, self.sequences(fields), self.prompt_of(fields)

    def sequences(self, fields: Fields) -> int:
        """How many a call asks for: n of each prompt."""
        prompts = sum(
            max(_prompts(fields[name]) if name in fields else 0 for name in names)
            for names in self.several
        )
        choices = (whole(fields, name) or 1 for name in self.choices)
        return max(1, prompts) * max(1, *choices) if self.choices else max(1, prompts)

    def prompt_of(self, fields: Fields) -> bytes:
        """The values that make the prompt, as JSON."""
        return b",".join(bytes(fields[name]) for name in self.prompt if name in fields)

    def own_limit(self, fields: Fields) -> int | None:
        """The client's own limit on the tokens of a sequence; None where it gave none, null, or
        less than 0, which some servers take for that.
        """
        for name in self.limits:
            if (limit := whole(fields, name)) is not None:
                return limit if limit >= 0 else None
        return None if any(name in fields for name in self.limits) else self.default

    def clipped(self, body: bytes, fields: Fields, limit: int | None) -> bytes:
        """The body with `limit` in each field that has more, or where there is none, and there
        OpenAI's own where that is less: the default of the server may be another. The same bytes
        where nothing changes.
        """
        if limit is None or not self.limits:
            return body
        given = {name: whole(fields, name) for name in self.limits}
        high = [name for name, own in given.items() if own is not None and not 0 <= own <= limit]
        if not high and any(own is not None for own in given.values()):
            return body
        own = None if high else self.own_limit(fields)
        value = msgspec.Raw(str(limit if own is None else min(own, limit)).encode())
        return msgspec.json.encode({**fields, **dict.fromkeys(high or self.limits[-1:], value)})

    def plain(self, body: bytes, fields: Fields) -> tuple[bytes, Fields]:
        """The call with its numbers under their own names alone and in the plain spelling, each
        name once; the same bytes where they are. Raises ApiError 400.
        """
        given, fields = fields, self._under_own_names(fields)
        other = {
            name: msgspec.Raw(json.dumps(_number(name, bytes(fields[name]))).encode())
            for name in self.numbers
            if name in fields and not _PLAIN.fullmatch(bytes(fields[name]))
        }
        changed = {**fields, **other}
        once = msgspec.json.encode(changed)
        same = not other and fields.keys() == given.keys() and _bare(once) == _bare(body)
        return body if same else once, changed

    def _under_own_names(self, fields: Fields) -> Fields:
        """The fields without other names of the same numbers, which a server might heed first. The
        value moves to the number's own name where the call lacks that.
        """
        if OTHER_NAMES.isdisjoint(fields):
            return fields
        found = dict(fields)
        for others, own in ((OTHER_LIMITS, self.limits), (OTHER_CHOICES, self.choices)):
            for other in others if own else ():
                if other in found and other not in own:
                    value = found.pop(other)
                    if not found.keys() & set(own):
                        found[own[-1]] = value
        return found


CHOICES = ("best_of", "n")  # also where the API has none, for servers that read them all the same
PAIRS = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
ENDPOINTS = {
    each.path: each
    for each in (
        ProxiedEndpoint(
            path="/v1/chat/completions",
            prompt=("messages", "tools"),
            choices=CHOICES,
            limits=("max_completion_tokens", "max_tokens"),
        ),
        ProxiedEndpoint(
            path="/v1/completions",
            prompt=("prompt",),
            several=(("prompt",), ("prompt_embeds",)),
            choices=CHOICES,
            limits=("max_tokens",),
            default=16,
        ),
        ProxiedEndpoint(
            path="/v1/responses",
            prompt=("instructions", "input", "tools"),
            choices=CHOICES,
            limits=("max_output_tokens",),
        ),
        ProxiedEndpoint(
            path="/v1/messages",
            prompt=("system", "messages", "tools"),
            choices=CHOICES,
            limits=("max_tokens",),
        ),
        ProxiedEndpoint(
            path="/v1/embeddings", prompt=("input", "messages"), several=(("input", "messages"),)
        ),
        ProxiedEndpoint(
            path="/v1/rerank", prompt=("query", "documents"), several=(("documents",),)
        ),
        ProxiedEndpoint(path="/v1/score", prompt=PAIRS, several=(PAIRS,)),
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


def _bare(body: bytes) -> int:
    """Bytes without white space: more of them than there are of its fields where a name is there
    twice.
    """
    return len(body.translate(None, b" \t\r\n"))


def _number(name: str, raw: bytes) -> int | None:
    """The number as vLLM's models read it. Raises ApiError 400."""
    try:
        given = json.loads(raw if len(raw) <= LONGEST_NUMBER else b"[]")  # no number
        return _whole_number.validate_python(given)
    except (ValidationError, ValueError):
        got = excerpt(raw[: 2 * LONGEST_NUMBER].decode(errors="replace"))
        raise ApiError(
            400,
            "invalid_request",
            f"{name}: got {got}; expected a whole number, or null",
            param=name,
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


def streams(fields: Fields) -> bool:
    """Whether the answer is asked for as events."""
    try:
        return bool(_yes_or_no.validate_python(_value(fields, "stream")))
    except ValidationError:
        return False


def model_of(fields: Fields) -> str:
    """That is asked for; empty where it is no text."""
    value = _value(fields, "model", longest=1024)
    return value if isinstance(value, str) else ""


def _value(fields: Fields, name: str, longest: int = LONGEST_NUMBER) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    given = bytes(raw)
    try:
        return msgspec.json.decode(given) if len(given) <= longest else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # beyond what can be read: 1e400


def _prompts(value: msgspec.Raw) -> int:
    """How many prompts a value holds: a list of token ids is one."""
    given = bytes(value)
    if not given.startswith(b"["):
        return 0 if given == b"null" else 1
    parts = msgspec.json.decode(value, type=list[msgspec.Raw])
    if not parts or bytes(parts[0])[:1].isdigit():
        return 1
    return len(parts)
