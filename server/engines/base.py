"""What the gateway asks of an engine: the one seam where a fake may stand in.

`dispatch` and `cancel` return at once; tokens come back through `TokenStream.push` on the event
loop. The gateway finds where an answer ends (limit, end-of-sequence, stop strings), for padded and
unpadded service alike; an engine that stops by itself merely saves work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from kendall.policies import Request
from kendall.server.engines.capabilities import Capabilities as Capabilities  # noqa: PLC0414 - read from here
from kendall.server.engines.capabilities import FailureCode as FailureCode  # noqa: PLC0414 - read from here
from kendall.server.engines.proxied import ProxiedCall

NOT_RUNNING = "the engine is not running"
EngineEnd = Literal["stop", "length", "cancelled"]


class EngineStartError(RuntimeError):
    """The engine could not be started; the message is one line: got / expected / what to do."""


class EngineGoneError(EngineStartError):
    """The engine is lost for good: another start of it would not help."""


CALLER: ContextVar[str] = ContextVar("kendall.caller", default="")
"""Of whose call sampling is checked, as limits name it."""


class InvalidPromptError(ValueError):
    """A prompt that this engine cannot take; the message is for the client."""


class InvalidSamplingError(ValueError):
    """Sampling that contradicts itself or the model; the message is for the client, `param`
    names the field.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidPromptError):
    """A prompt beyond the model's context."""


class BusyError(RuntimeError):
    """Too much waits for the same thing already; the message is for the client."""


class OverBudgetError(RuntimeError):
    """The caller has used up its budget; the message is for the client."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class UnsupportedError(InvalidSamplingError):
    """Sampling that this engine does not offer at all."""


@dataclass(frozen=True, slots=True)
class Structured:
    """A form that the answer must take: kind, value and options with the names of vLLM's
    StructuredOutputsParams.
    """

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    value: Any
    options: Mapping[str, bool | str] = field(default_factory=dict)
    prepared: Any = field(
        default=None, compare=False, repr=False
    )  # the engine's own form of it, once it was checked


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, with vLLM's names; None leaves the engine's default."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: Structured | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    @property
    def needs_check(self) -> bool:
        """Whether the engine is asked before the request queues: these depend on the model."""
        return bool(
            self.structured
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.logit_bias
            or self.stop_token_ids
            or self.thinking_token_budget is not None
            or self.prompt_logprobs is not None
        )


class Traced(Protocol):
    """The trace of a call, as far as an engine is concerned."""

    def handed_on(self, request_id: str) -> Mapping[str, str]:
        """Headers that make what the engine records of a sequence a part of the trace."""


class EngineRequest(msgspec.Struct, frozen=True):
    """One sequence for the engine, or one `call` to pass on, whose prompt and sampling the other
    server reads. `forced_output_tokens` is the sealed field of an experiment:
    only an engine reads it.
    """

    request: Request
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    forced_output_tokens: int | None = None
    output_token_ids: Sequence[int] = ()  # already made, after a preemption: continue behind them
    client_request_id: str | None = None  # the caller's own name for its call
    received_at: float | None = None  # its call's last byte was with the kernel
    retry: bool = False  # the client's library says that it asks again
    cache_salt: str | None = None  # prompts share cached prefixes only under the same salt
    caller: str = ""  # name of the API key that it came with
    call: ProxiedCall | None = None
    # the prompt as the engine's renderer made it, where token ids are not all of it (images)
    rendered: Mapping[str, Any] | None = None
    # further arguments of the engine's own call: what its reasoning parser needs to know
    engine_arguments: Mapping[str, Any] | None = None
    trace: Traced | None = None  # where calls are traced
    # the client's own limit or what the context has left, without the gateway's; None: the
    # gateway's does not hold for it
    asked_output_tokens: int | None = None

    def under(self, limit: int | None, made: int = 0) -> EngineRequest:
        """The same request under another token limit of the gateway, never below the token after
        those `made` already.
        """
        most = self.asked_output_tokens
        if most is None:
            return self
        if limit is not None and limit < most:
            most = limit if limit > made else made + 1
        if most == self.request.max_output_tokens:
            return self
        return msgspec.structs.replace(
            self,
            request=self.request._replace(max_output_tokens=most),
            sampling=msgspec.structs.replace(self.sampling, max_tokens=most),
        )

    @property
    def ends_by_itself(self) -> bool:
        """Whether an end-of-sequence token ends it; under a forced length the engine marks the
        end instead.
        """
        return self.forced_output_tokens is None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate of a position."""

    token: str
    logprob: float
    rank: int | None


class Token(
    msgspec.Struct, frozen=True, gc=False
):  # made by the ten thousand, and no part of a cycle
    """One output token. `ends` marks the forced end of an experiment: the model would have
    stopped here.
    """

    id: int
    text: str
    ends: bool = False
    logprobs: Mapping[int, TokenLogprob] | None = None


class TokenListener(Protocol):
    """The receiver of a stream: the gateway's sequence."""

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """More tokens, in order."""

    def on_end(self, end: EngineEnd) -> None:
        """The engine will send no more and has let the sequence go."""

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """The engine lost the sequence, or fails over it."""


class TokenStream:
    """The way back of one dispatched request; the gateway sets `listener` before the loop runs
    on.
    """

    __slots__ = ("cached_tokens", "listener", "prompt_logprobs", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.listener: TokenListener | None = None
        # by position of the prompt, in the engine's own form: there before the first token
        self.prompt_logprobs: Sequence[Any] | None = None
        # of the prompt, that the engine had computed before: there before the first token
        self.cached_tokens = 0

    def push(self, tokens: Sequence[Token]) -> None:
        """Hand tokens to the listener."""
        if self.listener is not None:
            self.listener.on_tokens(tokens)

    def end(self, end: EngineEnd) -> None:
        """Say that the engine has let the sequence go."""
        if self.listener is not None:
            self.listener.on_end(end)

    def fail(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        """Say that the sequence failed, and whether by its own fault."""
        if self.listener is not None:
            self.listener.on_failure(message, code)


def stillborn(engine_request: EngineRequest) -> TokenStream:
    """The stream of an engine that does not run: it fails as soon as its listener is there."""
    stream = TokenStream(engine_request.request.id)
    asyncio.get_running_loop().call_soon(stream.fail, NOT_RUNNING)
    return stream


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: its end on the loop's clock, sequences that computed a token, and how
    many of them began in it.
    """

    at: float
    running: int
    admitted: int
    prompt_tokens: int = 0
    server_id: int = 0


def describe_engine(capabilities: Capabilities, served_model_name: str) -> dict[str, Any]:
    """What serves, for `/v1/models`, the run file and the state file: what a law is good for."""
    described: dict[str, Any] = {
        "engine": capabilities.engine,
        "emulated": capabilities.engine == "emulated",
        "model": served_model_name,
        "max_model_len": capabilities.max_model_len,
        "max_num_seqs": capabilities.max_num_seqs,
        "max_num_batched_tokens": capabilities.max_num_batched_tokens,
        "kv_cache_tokens": capabilities.kv_cache_tokens,
        "servers": capabilities.servers,
    }
    if not capabilities.pads:
        described["pads"] = False
    if capabilities.step_tokens is not None:
        described["step_tokens"] = capabilities.step_tokens
    return described


class PromptReader(Protocol):
    """Tokenizer and checks that are needed before a request queues."""

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model wants around it, or
        without.
        """

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a conversation under the model's chat template.

        Raises InvalidPromptError.
        """

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """Look at what depends on the model; returns it as the engine is to have it.

        Raises InvalidSamplingError, or UnsupportedError where this engine has no such thing, or
        BusyError.
        """


@runtime_checkable
class ServingEngine(Protocol):
    """An engine whose library has an API server of its own above it: `server.openai_tools` uses
    that for what the gateway has not itself.
    """

    def client(self) -> Any:
        """The library's client of the engine that serves now. Raises RuntimeError between two."""


@runtime_checkable
class TellsOfItsStart(Protocol):
    """An engine that says in the log itself what its start waits for."""

    tells_of_its_start: bool


class Engine(PromptReader, Protocol):
    """One or more servers that turn prompts into tokens."""

    on_step: Callable[[Step], None] | None
    on_death: Callable[[str], None] | None
    """Called once if the engine is lost, before its streams fail: who will go on with them
    elsewhere takes their listeners away first.
    """

    async def start(self) -> Capabilities:
        """Bring it up, anew after a death or in place of one that is up. Raises EngineStartError.

        It may be cancelled at any time, and ends then within seconds: an engine that does not is
        given up.
        """

    async def stop(self) -> None:
        """Let it go, whatever it holds or does, within seconds; leaves no process behind."""

    async def healthy(self) -> bool:
        """Whether it answers."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        """Start these together (in one engine step unless `joining` a running server). Does not
        wait.

        Padded: the engine goes on with every member until it is cancelled or the largest limit of
        the batch is met; it stops at no end-of-sequence and no stop string.
        """

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Let these sequences go; no `end` is sent for them. Unknown ids are no error."""
