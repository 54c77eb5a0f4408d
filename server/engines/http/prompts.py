"""How many tokens the prompt of a call has: asked of a server that tokenises, else counted with
`--tokenizer`, else estimated from the bytes of prompts whose tokens the servers counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from kendall.policies import SpecError
from kendall.server.engines.http.upstream import LOST, Upstream

log = logging.getLogger("kendall.engine")
TOKENIZE = "/tokenize"
LIMIT = 2.0  # seconds for an answer of it
MOST_ADDED = 65_536  # tokens that a template and images may add to the bytes of a prompt
UNASKED = 30.0  # seconds for which a server that did not count is not asked
BYTES_PER_TOKEN = 4.0  # before anything was counted
OLDER = 0.98  # weight of what was counted before, against the newest
AT_ONCE = 1 << 14  # bytes of text that are tokenised on the event loop
FORWARDED = (  # of a chat: what the template makes a prompt of
    *("messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)


class _Counted(msgspec.Struct):
    """The count in an answer of TOKENIZE; its ids are not kept."""

    count: int


_counted = msgspec.json.Decoder(_Counted)


class BytesPerToken:
    """Bytes per token of the recent prompts."""

    def __init__(self) -> None:
        self._bytes, self._tokens = BYTES_PER_TOKEN, 1.0

    def learn(self, size: int, tokens: int) -> None:
        """So many bytes had so many tokens."""
        if size > 0 and tokens > 0:
            self._bytes = OLDER * self._bytes + (1 - OLDER) * size
            self._tokens = OLDER * self._tokens + (1 - OLDER) * tokens

    def tokens(self, size: int) -> int:
        """About as many tokens as so many bytes have, at least one."""
        return max(1, round(size * self._tokens / self._bytes))


def load_tokenizer(name: str) -> Tokenizer:
    """A file tokenizer.json, a folder that has one, or a model on the Hugging Face Hub. Raises
    SpecError.
    """
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - of the library, whatever it is
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecError(
            f"got --tokenizer {name!r}, which cannot be read ({first}); expected a tokenizer.json, "
            "a folder with one, or a model name on the Hugging Face Hub"
        ) from None


class PromptCounter:
    """Counts for one engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.ratio = BytesPerToken()

    def known(self, fields: Mapping[str, msgspec.Raw], prompt: bytes, *, asks: bool) -> int | None:
        """At once; None where a server (`asks`: there is one) or the tokenizer is to say it."""
        given = _token_ids(fields)
        if given is not None or asks or self._tokenizer is not None:
            return given
        return self.ratio.tokens(len(prompt))

    async def tokens(
        self,
        asked: Upstream | None,
        path: str,
        fields: Mapping[str, msgspec.Raw],
        prompt: bytes,
    ) -> int:
        """`asked`: a server that tokenises; `prompt`: the values that make the prompt, as JSON."""
        if (known := self.known(fields, prompt, asks=asked is not None)) is not None:
            return known
        counted = None if asked is None else await _asked(asked, path, fields, len(prompt))
        if counted is not None:
            return counted
        if self._tokenizer is not None:
            return await self._encoded(self._tokenizer, prompt)
        return self.ratio.tokens(len(prompt))

    async def _encoded(self, tokenizer: Tokenizer, prompt: bytes) -> int:
        if len(prompt) <= AT_ONCE:
            return _count(tokenizer, prompt)
        return await asyncio.to_thread(_count, tokenizer, prompt)


async def _asked(
    upstream: Upstream, path: str, fields: Mapping[str, msgspec.Raw], size: int
) -> int | None:
    """What a server counts in a prompt of so many bytes; one that fails to, or counts more than
    they can be, is not asked for a while.
    """
    prompt = bytes(fields.get("prompt") or b"")
    if path == "/v1/chat/completions" and "messages" in fields:
        names = [name for name in ("model", *FORWARDED) if name in fields]
    elif path == "/v1/completions" and prompt.startswith(b'"'):
        names = ["model", "prompt"]
    else:  # what TOKENIZE does not take
        return None
    question = msgspec.json.encode({name: fields.get(name) for name in names})
    try:
        status, body = await upstream.ask(TOKENIZE, question, LIMIT)
    except LOST:
        upstream.leave_unasked(UNASKED)
        return None
    counted = counted_tokens(status, body)
    if counted is not None and counted > size + MOST_ADDED:
        upstream.leave_unasked(UNASKED)
        return None
    return counted


def _count(tokenizer: Tokenizer, prompt: bytes) -> int:
    """Tokens of the texts in a prompt."""
    text = " ".join(_texts(msgspec.json.decode(b"[" + prompt + b"]")))
    return max(1, len(tokenizer.encode(text).ids))


def counted_tokens(status: int, body: bytes) -> int | None:
    """The count that `/tokenize` answered; None where it did not count."""
    try:
        count = _counted.decode(body).count if status == 200 else 0
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return count if count > 0 else None


def _token_ids(fields: Mapping[str, msgspec.Raw]) -> int | None:
    """How many token ids a prompt gives, in one list or several; None where it is text."""
    given = bytes(fields.get("prompt") or fields.get("input") or b"")
    if not given.startswith(b"["):
        return None
    try:
        return len(msgspec.json.decode(given, type=list[int]))
    except msgspec.MsgspecError:
        pass
    try:
        return sum(map(len, msgspec.json.decode(given, type=list[list[int]])))
    except msgspec.MsgspecError:
        return None


def _texts(value: Any) -> list[str]:
    """Every text in it; keys are none."""
    texts, left = [], [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, dict):
            left += reversed(each.values())
        elif isinstance(each, list):
            left += reversed(each)
    return texts
