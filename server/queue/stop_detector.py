"""Where an answer ends: its limit, end-of-sequence, stop tokens and stop strings, found token by
token.

One rule for padded and unpadded service and for every engine, so that a padded member ends exactly
where it would have ended alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from kendall.server.engines.base import Sampling, Token


class StopDetector:
    """Feeds on tokens, gives back the text that may be shown and says when the answer is over."""

    __slots__ = (
        "_ends",
        "_held",
        "_sampling",
        "_stops",
        "finish_reason",
        "limit",
        "output_tokens",
        "stop_reason",
    )

    def __init__(self, sampling: Sampling, eos_token_ids: Collection[int]) -> None:
        self._sampling = sampling
        ends = () if sampling.ignore_eos else eos_token_ids
        self._ends = (
            frozenset((*ends, *sampling.stop_token_ids))
            if sampling.stop_token_ids
            else frozenset(ends)
        )
        self._stops = sampling.stop
        self._held = ""  # text that may turn out to be the beginning of a stop string
        self.limit = sampling.max_tokens
        self.output_tokens = 0
        self.finish_reason: str | None = None  # stop, length, or another server's own word
        self.stop_reason: str | int | None = None

    def feed(self, token: Token) -> str:
        """Count one token; returns the text to show now. Sets `finish_reason` where the answer
        is over.
        """
        self.output_tokens += 1
        if (token.ends or token.id in self._ends) and self._ends_at(token):
            self.finish_reason = "stop"
            return self._flush(
                token.text if token.ends or self._sampling.include_stop_str_in_output else ""
            )
        text = self._until_stop_string(token.text) if self._stops else token.text
        if self.finish_reason is None and self.output_tokens >= self.limit:
            self.finish_reason = "length"
            return text + self._flush("")
        return text

    def cut(self, reason: Literal["stop", "length"]) -> str:
        """The engine ended by itself; returns the text still held back."""
        self.finish_reason = reason
        return self._flush("")

    def _ends_at(self, token: Token) -> bool:
        if token.ends:
            return True
        if self.output_tokens < self._sampling.min_tokens:
            return False
        if token.id in self._sampling.stop_token_ids:
            self.stop_reason = token.id
        return True

    def _flush(self, text: str) -> str:
        held, self._held = self._held, ""
        return held + text

    def _until_stop_string(self, text: str) -> str:
        text = self._flush(text)
        if self.output_tokens >= self._sampling.min_tokens:
            found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                self.finish_reason, self.stop_reason = "stop", stop
                return (
                    text[: at + len(stop)]
                    if self._sampling.include_stop_str_in_output
                    else text[:at]
                )
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (
            size
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
