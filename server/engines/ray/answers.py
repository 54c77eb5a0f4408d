"""The answers that an actor makes, by the ids of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from server.engines.base import TokenStream
from server.engines.ray.messages import End, SequenceFailure, Tokens
from server.engines.vllm.reader import first_line


class Answers:
    """`cancel` lets go of requests whose listeners fail."""

    def __init__(self, cancel: Callable[[Sequence[str]], None]) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._cancel = cancel

    def expect(self, streams: Sequence[TokenStream]) -> None:
        """These were dispatched."""
        self._streams |= {stream.request_id: stream for stream in streams}

    def forget(self, request_ids: Sequence[str]) -> list[str]:
        """What comes of these is heard no more; which of them were known."""
        return [each for each in request_ids if self._streams.pop(each, None) is not None]

    def fail(self, reason: str) -> None:
        """All of them."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)

    def hear(self, message: Tokens | End | SequenceFailure) -> None:
        """Of one that was cancelled meanwhile nothing."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if isinstance(message, Tokens):
            self._hand_over(stream, message)
            return
        del self._streams[message.request_id]
        if isinstance(message, End):
            stream.end(message.end)
        else:
            stream.fail(message.message, message.code)

    def _hand_over(self, stream: TokenStream, message: Tokens) -> None:
        """A listener's fault stays its own."""
        if message.prompt_logprobs is not None:
            stream.prompt_logprobs = message.prompt_logprobs
        stream.cached_tokens = message.cached_tokens
        try:
            stream.push(message.tokens)
        except Exception as error:  # noqa: BLE001
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a token listener failed", "exception": error}
            )
            self._cancel([message.request_id])
            said = f"internal error while handling a token: {first_line(error)}"
            stream.fail(said, "internal_error")
