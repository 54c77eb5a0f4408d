"""The answer to a call: its tokens as chunks on the way out, or whole at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from msgspec import Raw
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kendall.queueing.measurement.record import Outcome
from kendall.server.engines.base import EngineRequest, Token
from kendall.server.http.formats import DONE, AnswerFormat, encode, usage_of, with_usage
from kendall.server.http.headers import delay_headers, early_headers
from kendall.server.http.submitted import STREAM_HEADERS, AnswerOptions, Submitted
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState

# of log probabilities that are encoded before others have their turn: 10 ms with 20 candidates
TOKENS_AT_ONCE = 256


class Choice:
    """The consumer of one sequence: one choice of the answer."""

    __slots__ = ("_call", "_offset", "done", "index", "sequence", "text", "tokens")

    def __init__(self, call: GeneratedAnswer, index: int) -> None:
        self._call = call
        self._offset = 0
        self.index = index
        self.sequence: SequenceState | None = None
        self.text: list[str] = []
        self.tokens: list[Token] = []
        self.done = False

    def on_dispatched(self) -> None:
        """One sequence less to wait for."""
        call = self._call
        call.undispatched -= 1
        if call.stream and not call.undispatched:  # a whole answer has nothing to write yet
            call.wake()

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """Build the chunk once; the writer sends what has gathered."""
        call = self._call
        if call.stream:
            every_token = call.format.every_token
            if text or every_token:
                chunk = call.format.text(self.index, text, tokens, self._offset)
                if call.continuous_usage:
                    chunk = call.with_usage_of(self, chunk)
                call.chunks.append(chunk)
                if (
                    every_token
                ):  # of the tokens' text: some of it may be held back for a stop string
                    self._offset += sum(len(token.text) for token in tokens)
                if call.sleeping is not None:
                    call.wake()
        else:
            self.text.append(text)
            self.tokens += tokens

    def on_release(self) -> None:
        """The answer is whole."""
        self.done = True
        self._call.finished.append(self)
        self._call.wake()

    def on_failed(self, outcome: Outcome, code: str, message: str) -> None:
        """Nothing more will come."""
        del outcome
        self._call.error = self._call.error or self._call.failure(code, message)
        self._call.wake()


class GeneratedAnswer(Submitted):
    """Written token by token, or whole."""

    def __init__(
        self,
        batcher: Batcher,
        requests: list[EngineRequest],
        answer_format: AnswerFormat,
        options: AnswerOptions,
    ) -> None:
        super().__init__(batcher, requests, options)
        self.format = answer_format
        self.stream = options.stream
        self.continuous_usage = options.continuous_usage
        self.undispatched = len(requests)
        self.chunks: list[bytes] = []
        self.finished: list[Choice] = []  # whole, not yet sent
        self._parts = self._choices = [Choice(self, index) for index in range(len(requests))]

    def with_usage_of(self, choice: Choice, chunk: bytes) -> bytes:
        """The chunk with the choice's usage so far."""
        sequence = choice.sequence
        if sequence is None:
            return chunk
        prompt, output = (
            sequence.engine_request.request.prompt_tokens,
            sequence.stop_detector.output_tokens,
        )
        return with_usage(
            chunk,
            {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
        )

    def _let_go(self) -> None:
        super()._let_go()
        self._choices, self.finished = [], []

    def _may_begin(self) -> bool:
        return not self.undispatched if self.stream else len(self.finished) == len(self._choices)

    def _has_more(self) -> object:
        return self.chunks or self.finished

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._until(self._may_begin)
        if self._gone:
            return
        if self.error:
            await self._write_error(scope, receive, send)
        elif self.stream:
            with contextlib.suppress(ConnectionError):
                await self._write_stream(send)
        else:
            await self._write_whole(send)

    async def _write_whole(self, send: Send) -> None:
        choices, sequences = [], []
        for choice in self._choices:
            assert choice.sequence is not None
            sequences.append(choice.sequence)
            choices.append(await self._encoded(choice))
            if self._gone:
                return
        delays = self._delays()
        body = self.format.whole(choices, usage_of(sequences, self._options.n, delays))
        headers = [
            *delay_headers(*delays),
            *early_headers(self._options.request_id, self._choices[-1].sequence),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if not self._gone:
            self._release()

    async def _encoded(self, choice: Choice) -> bytes:
        """It lets go of its tokens."""
        assert choice.sequence is not None
        detector = choice.sequence.stop_detector
        assert detector.finish_reason is not None
        tokens, choice.tokens = choice.tokens, []
        logprobs = (
            None
            if self.format.top_logprobs is None
            else await encoded_logprobs(self.format, tokens)
        )
        text, reason = "".join(choice.text), detector.finish_reason
        whole = self.format.choice(choice.index, text, logprobs, reason, detector.stop_reason)
        if self.format.token_ids:
            whole = self.format.with_ids(whole, tokens, self._prompt(choice))
        return encode(whole)

    async def _write_stream(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    *delay_headers(self._delays()[0]),
                    *early_headers(self._options.request_id, self._choices[-1].sequence),
                    *STREAM_HEADERS,
                ],
            }
        )
        await self._write_events(send)

    async def _write_events(self, send: Send) -> None:
        self.chunks[:0] = [
            self.format.first(choice.index, self._prompt(choice)) for choice in self._choices
        ]
        left = len(self._choices)
        while left:
            await self._until(self._has_more)
            if self._gone:
                return
            left -= len(self.finished)
            for choice in self.finished:
                chunk = self._finish(choice)
                self.chunks.append(
                    self.with_usage_of(choice, chunk) if self.continuous_usage else chunk
                )
            if self.error:
                self.chunks.append(b"data: " + JSONResponse(self.error.body()).body + b"\n\n")
                left = 0
            if not left:
                self.chunks.append(self._tail())
            body, self.chunks = b"".join(self.chunks), []
            sent, self.finished = self.finished, []
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})
            if self._gone:
                return  # it left while this waited for it to read: none of it went out
            self._release(sent)

    def _prompt(self, choice: Choice) -> Sequence[int] | None:
        """The prompt's ids, where they are to be returned."""
        return (
            choice.sequence.engine_request.prompt_token_ids
            if self.format.token_ids and choice.sequence is not None
            else None
        )

    def _finish(self, choice: Choice) -> bytes:
        assert choice.sequence is not None
        detector = choice.sequence.stop_detector
        assert detector.finish_reason is not None
        return self.format.finish(choice.index, detector.finish_reason, detector.stop_reason)

    def _tail(self) -> bytes:
        if self._options.include_usage and not self.error:
            sequences = [choice.sequence for choice in self._choices if choice.sequence is not None]
            usage = usage_of(sequences, self._options.n, self._delays())
            return self.format.usage(usage) + DONE
        return DONE

    def _release(self, choices: Sequence[Choice] | None = None) -> None:
        for choice in self._choices if choices is None else choices:
            if choice.sequence is not None:
                choice.sequence.released()


async def encoded_logprobs(form: AnswerFormat, tokens: Sequence[Token]) -> Raw | None:
    """Encode the log probabilities of a whole choice; other tasks run in between."""
    lists: dict[str, list[bytes]] = {}
    offset = 0
    for at in range(0, len(tokens), TOKENS_AT_ONCE):
        some = tokens[at : at + TOKENS_AT_ONCE]
        found = form.logprobs(some, offset)
        if found is None:
            return None
        for name, values in found.items():
            lists.setdefault(name, []).append(encode(values)[1:-1])
        offset += sum(len(token.text) for token in some)
        if len(some) == TOKENS_AT_ONCE:
            await asyncio.sleep(0)
    if not lists:
        return None
    fields = (b'"%b":[%b]' % (name.encode(), b",".join(lists[name])) for name in lists)
    return Raw(b"{" + b",".join(fields) + b"}")
