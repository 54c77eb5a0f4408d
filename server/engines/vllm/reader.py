"""One sequence's way back from vLLM: token ids become tokens with their own piece of text.
Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from kendall.server.engines.base import EngineRequest, FailureCode, Token, TokenLogprob, TokenStream

# prompt tokens that the decoder sees before the first piece: some tokenizers drop a text's leading
# space
CONTEXT = 16
HALF_A_CHARACTER = "\ufffd"
IMPOSSIBLE = -9999.0  # logarithm of no probability at all, as vLLM writes it: JSON has no infinity


class Detokenizer(Protocol):
    """Text, one token at a time."""

    def piece(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""


class FastDetokenizer:
    """The tokenizers library's own stream."""

    __slots__ = ("_skip", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(
            ids=_whole_characters(tokenizer, prompt), skip_special_tokens=skip_special_tokens
        )

    def piece(self, token_id: int) -> str:
        """See `Detokenizer`."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # noqa: BLE001  # the library raises bare Exception
            if not str(error).startswith("Invalid prefix"):
                return ""  # an id that the tokenizer does not know
            # broken UTF-8 can shorten the text behind the stream's back (vLLM issue 17448): begin
            # anew
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token_id) or ""


class SlowDetokenizer:
    """Decodes a short window with and without the new token, for tokenizers written in Python."""

    __slots__ = ("_decode", "_ids", "_read", "_start")

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT:])
        self._start = 0
        self._read = len(self._ids)

    def piece(self, token_id: int) -> str:
        """See `Detokenizer`."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(HALF_A_CHARACTER):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]


def _whole_characters(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The prompt's last tokens up to a whole character; a stream primed with half of one would
    repeat the prompt.
    """
    context = list(prompt[-CONTEXT:])
    while context and tokenizer.decode(context, skip_special_tokens=False).endswith(
        HALF_A_CHARACTER
    ):
        context.pop()
    return context


def detokenizer(tokenizer: Any, engine_request: EngineRequest) -> Detokenizer:
    """A detokenizer that stands behind the prompt and the output so far."""
    skip = engine_request.sampling.skip_special_tokens
    made: Detokenizer
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        made = FastDetokenizer(backend, engine_request.prompt_token_ids, skip)
    else:
        made = SlowDetokenizer(
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip)),
            engine_request.prompt_token_ids,
        )
    for token_id in engine_request.output_token_ids:
        made.piece(token_id)
    return made


class Reader:
    """Turns vLLM's outputs for one sequence into tokens on its stream, within vLLM's own output
    loop.

    `lost` is called with a reason when the engine fails the sequence or drops it unasked.
    """

    __slots__ = (
        "_decode",
        "_lost",
        "_pieces",
        "closed",
        "engine_request",
        "internal_id",
        "made",
        "stream",
    )

    def __init__(
        self,
        stream: TokenStream,
        engine_request: EngineRequest,
        tokenizer: Any,
        lost: Callable[[str], None],
    ) -> None:
        self.stream = stream
        self.engine_request = engine_request
        self.made = len(engine_request.output_token_ids)
        self.closed = False
        self.internal_id: str | None = None  # vLLM's, once it has the sequence
        self._pieces = detokenizer(tokenizer, engine_request)
        self._decode = tokenizer.decode
        self._lost = lost

    def receive(self, output: Any) -> None:
        """Take one output of vLLM, or the exception that ends all."""
        if self.closed:
            return
        if isinstance(output, Exception):
            self._lost(first_line(output))
            return
        completion = output.outputs[0]
        if (
            completion.finish_reason == "abort"
        ):  # a dying engine's: what it carries is made again elsewhere
            self._lost("the engine aborted a request that was not cancelled")
            return
        if completion.finish_reason == "error":
            self._fail_alone()
            return
        if self.made == len(self.engine_request.output_token_ids):
            self.stream.cached_tokens = output.num_cached_tokens or 0
        tokens = self._tokens(completion.token_ids, completion.logprobs)
        if tokens:
            self.stream.push(tokens)
        if completion.finish_reason and not self.closed:  # the listener may have cancelled
            self.closed = True
            self.stream.end("length" if completion.finish_reason == "length" else "stop")

    def _fail_alone(self) -> None:
        if self.engine_request.sampling.structured is not None:
            self.fail(
                (
                    "the engine could not produce an answer that satisfies the "
                    "structured-output definition; change or simplify it"
                ),
                "invalid_request",
            )
        else:
            self.fail(
                "the engine failed while serving this request; its log has the details",
                "engine_error",
            )

    def with_prompt(self, receive: Callable[[Any], None]) -> Callable[[Any], None]:
        """`receive`, which finds the log probabilities of the prompt on the stream."""

        def both(output: Any) -> None:
            if found := getattr(output, "prompt_logprobs", None):
                self.stream.prompt_logprobs = found
            receive(output)

        return both

    def prompt_ahead(self) -> int:
        """Prompt tokens that the engine still has to compute."""
        before = len(self.engine_request.output_token_ids)
        return 0 if self.made > before else len(self.engine_request.prompt_token_ids) + before

    def fail(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """Close it with a failure, once."""
        if not self.closed:
            self.closed = True
            self.stream.fail(message, code)

    def _tokens(
        self, ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None
    ) -> list[Token]:
        tokens = []
        for place, token_id in enumerate(ids):
            self.made += 1
            ends = self.made == self.engine_request.forced_output_tokens
            candidates = self._candidates(logprobs[place]) if logprobs else None
            tokens.append(Token(token_id, self._pieces.piece(token_id), ends, candidates))
        return tokens

    def _candidates(self, found: Mapping[int, Any]) -> dict[int, TokenLogprob]:
        return {
            number: TokenLogprob(
                str(self._decode([number])), max(entry.logprob, IMPOSSIBLE), entry.rank
            )
            for number, entry in found.items()
        }


def first_line(error: BaseException) -> str:
    """An error's first line."""
    said = str(error)
    if callable(
        details := getattr(error, "errors", None)
    ):  # pydantic's first line only counts them
        said = str(details()[0]["msg"])
    return (said or type(error).__name__).strip().splitlines()[0]
