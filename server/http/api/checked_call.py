"""Checks a call: from its bytes to the requests that may join the queue.

`check_call` takes its steps in the order in which a call meets them: body, JSON, number of
sequences, headers, endpoint, state of the gateway, model and fields, deadlines, prompts, token
limits, sampling, prompts known to kill the engine, size of the answer, admission. The functions
below it are those steps that are checked in this module, in the same order. The first step that
fails raises the answer (`ApiError`), and nothing is queued.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace
from pydantic_core import to_json
from starlette.types import Receive, Scope

from kendall.policies import Request
from kendall.policies.text import counted
from kendall.server.admission.rejections import EARLY
from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines import base
from kendall.server.engines.base import (
    BusyError,
    Capabilities,
    EngineRequest,
    InvalidPromptError,
    InvalidSamplingError,
    OverBudgetError,
    PromptReader,
    PromptTooLongError,
    Sampling,
    Structured,
    UnsupportedError,
)
from kendall.server.gateway import Gateway
from kendall.server.http.api.newer_endpoints import OWN, Call, NewerRequest, ResponsesRequest
from kendall.server.http.api.schema import (
    FORCED_FIELD,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generation,
    Templated,
)
from kendall.server.http.api.unserved import UNSERVED, check_unserved
from kendall.server.http.api.validation import check_extra, refuse_unknown, validate
from kendall.server.http.bodies import parsed, read_body
from kendall.server.http.client_connection import while_connected
from kendall.server.http.connection import RECEIVED_AT
from kendall.server.http.headers import FLOW, asked_id
from kendall.server.openai_tools.call import VllmCall
from kendall.server.openai_tools.endpoints import ApiEndpoint, Dialect
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.logs import log_prompt
from kendall.server.runtime.wording import brief
from kendall.server.security import guard
from kendall.server.settings import Settings
from kendall.server.supervision.deadlines import Timeouts, timeouts_of
from kendall.server.telemetry.cost.stages import StageTiming

if TYPE_CHECKING:
    from kendall.server.telemetry.tracing import CallTrace

# Every header that says how a call is to be served has a name with this prefix: the headers are
# filtered once, and each reader then looks at few.
READ = b"x-"
_FLOW = re.compile(rb"[!-~]{1,128}")  # flow ids that are kept as they are; others are hashed
RETRY_HEADER = b"x-stainless-retry-count"  # OpenAI's clients count their own retries in it
# tokens and log probabilities of an answer, 200 bytes each; a sequence of the model's whole context
# with the most of them fits in any case
MOST_ANSWER_VALUES, MOST_LOGPROBS = 1 << 20, 20
MOST_BAD_WORD_CHARACTERS = 1 << 16  # times the sequences of a call: vLLM tokenises for each
MOST_PROMPTS = 1024  # of one call, as vLLM has it
MOST_PARTS = 8192  # of a conversation
MOST_AT_ONCE = 1 << 16  # characters of prompts before others have their turn
TEXT_PART = {"type", "text"}
# hints where a prefix may be reused: accepted and ignored, as no answer depends on them
PART_HINTS = {"cache_control", "prompt_cache_breakpoint"}
OTHER_PARTS = (
    *("image_url", "input_image", "image_embeds", "input_audio", "audio_url", "video_url"),
    *("file", "refusal"),
)
# a call that leaves one of these at None gets the model's own default
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Arrival(msgspec.Struct, frozen=True):
    """A call as it arrived: its ids, its instants, who sent it and the headers that count."""

    call_id: str
    own_id: str | None  # the caller's name for it
    at: float  # when its body had been validated: time limits and delays count from here
    received_at: float  # when its last byte came
    retry: bool
    caller: str
    flow: str  # to whom its service is charged
    reserved_tokens: int  # tokens of each answer for which memory is kept free
    headers: Sequence[tuple[bytes, bytes]]  # those that say how it is to be served
    trace: CallTrace | None = None  # None where calls are not traced

    @classmethod
    def of(
        cls, gateway: Gateway, scope: Scope, prefix: str, path: str, own_id: str | None = None
    ) -> Arrival:
        """Note a call that arrives now. `prefix` begins its id; `own_id` is the caller's name for
        it where no header gives one.
        """
        at = gateway.now()
        headers = [header for header in scope["headers"] if header[0].startswith(READ)]
        caller, keys = scope.get(guard.CALLER, ""), len(gateway.settings.security.api_keys)
        call_id = gateway.call_ids.next(prefix)
        tracing = gateway.tracing
        return cls(
            call_id,
            asked_id(headers) or own_id,
            at,
            scope.get(RECEIVED_AT, at),
            is_retry(headers),
            caller,
            flow_of(headers, caller, keys),
            gateway.limits.reserved_tokens,
            headers,
            None if tracing is None else tracing.begin(scope["headers"], call_id, path, at),
        )

    @property
    def name(self) -> str:
        """The call's name in headers and logs: the caller's, else the gateway's."""
        return self.own_id or self.call_id

    def choices(
        self,
        call: Generation,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        n: int,
        first: int,
        asked: int,
        patience: float | None,
        **more: Any,
    ) -> list[EngineRequest]:
        """Make the requests for the `n` sequences of one prompt. `first` sequences of the call
        come before them; `asked` is their token limit without the gateway's own; `more` are further
        fields of `EngineRequest`.
        """
        deadline = math.inf if patience is None else self.at + patience
        requests, seed = [], sampling.seed
        for choice in range(n):
            request = Request(
                id=f"{self.call_id}-{first + choice}",
                arrived_at=self.at,
                prompt_tokens=len(prompt),
                max_output_tokens=sampling.max_tokens,
                predicted_output_tokens=call.predicted_output_tokens,
                priority=call.priority,
                deadline=deadline,
                flow=self.flow,
                reserved_tokens=self.reserved_tokens,
            )
            own = sampling if seed is None or not choice else replace(sampling, seed=seed + choice)
            requests.append(
                EngineRequest(
                    request,
                    prompt,
                    own,
                    call.kendall_forced_output_tokens,
                    (),
                    self.own_id,
                    self.received_at,
                    self.retry,
                    call.cache_salt,
                    self.caller,
                    trace=self.trace,
                    asked_output_tokens=asked,
                    **more,
                )
            )
        return requests

    def broke_off(self, gateway: Gateway, error: BaseException, sequences: int) -> None:
        """End the trace of a call that fails before it is queued. Where it fails for a reason of
        `EARLY`, its sequences are counted and recorded as rejected too.
        """
        if self.trace is not None:
            self.trace.refused(error, gateway.now())
        if isinstance(error, ApiError) and error.code in EARLY:
            gateway.overload.rejections.record_unserved(
                error,
                [f"{self.call_id}-{place}" for place in range(sequences)],
                self.own_id,
                arrived_at=self.at,
                received_at=self.received_at,
                retry=self.retry,
            )


class CallOfVllm(Protocol):
    """A call that vLLM's serving objects answer: they make its requests, and later its answer."""

    endpoint: ApiEndpoint
    beyond: frozenset[str]  # fields that vLLM serves for this call and the gateway alone does not

    def requests(
        self, arrival: Arrival, patience: float | None
    ) -> Coroutine[Any, Any, list[EngineRequest]]:
        """Make one request for each of its sequences. Raises ApiError where vLLM or a limit refuses
        the call.
        """

    def for_answer(self) -> tuple[VllmCall, Dialect]:
        """vLLM's side of the call, which writes the answer, and the dialect of its errors."""

    def close(self) -> None:
        """End vLLM's side of the call: nothing more will be asked of it."""


class CheckedCall(msgspec.Struct, frozen=True):
    """A call whose requests are admitted and not yet submitted."""

    call: Call
    arrival: Arrival
    requests: list[EngineRequest]
    timeouts: Timeouts | None
    by_vllm: CallOfVllm | None
    timing: StageTiming | None  # only a sample of the calls is measured


async def check_call(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    model: type[Call],
    call_of_vllm: Callable[[Gateway, Call, bytes], CallOfVllm | None],
) -> CheckedCall:
    """Read, check and admit a call. The caller must submit it before it awaits anything.
    `call_of_vllm` returns vLLM's side of a call that vLLM's serving objects answer, else None; it
    is asked only where the engine has such objects. Raises ApiError, and ClientDisconnect where the
    client hangs up.
    """
    body = await read_body(receive, gateway.settings.security.max_body_bytes)
    timing = gateway.metrics.own_time.begin(gateway.now) if gateway.lifecycle.ready else None
    call = await parsed(body, partial(validate, model=model), gateway.context)
    sequences = check_size(gateway.settings.overload, call)
    if timing is not None:
        timing.end("parse")
    arrival = Arrival.of(gateway, scope, call.endpoint.prefix, scope["path"], call.request_id)
    if gateway.serving_objects is None and isinstance(call, NewerRequest):
        raise not_served(call.endpoint)
    by_vllm = None if gateway.serving_objects is None else call_of_vllm(gateway, call, body)
    try:
        batcher = gateway.admit()
        check_fields(gateway.settings, call, len(body), () if by_vllm is None else by_vllm.beyond)
        if gateway.settings.logs.prompts:
            log_prompt(arrival.name, call.prompt_to_log)
        deadlines = gateway.overload.deadlines_of(arrival.headers, call.patience, call.priority)
        timeouts = timeouts_of(arrival.headers, call, gateway.settings)
        if by_vllm is None:  # a call to one of the two endpoints that the gateway serves itself
            making = requests_of(gateway, call, arrival, deadlines.patience)  # type: ignore[arg-type]
        else:
            making = by_vllm.requests(arrival, deadlines.patience)
        waits = by_vllm is not None or not call.formless
        waiting = while_connected(scope, receive, making) if waits else making
        requests = await (waiting if timeouts is None else timeouts.bound(waiting, arrival.at))
        gateway.rejected_prompts.check(requests)
        check_answer_size(requests, batcher.capabilities.max_model_len)
        if timing is not None:
            timing.end("prompt")
        requests = await _with_lengths(gateway, requests)
        gateway.arrivals.saw(arrival.received_at, batcher.epoch, retry=arrival.retry)
        gateway.overload.admit(requests, scope, deadlines)
    except BaseException as error:
        if by_vllm is not None:
            by_vllm.close()
        arrival.broke_off(gateway, error, sequences)
        raise
    return CheckedCall(call, arrival, requests, timeouts, by_vllm, timing)


# the number of sequences


def check_size(settings: OverloadSettings, call: Generation) -> int:
    """Count the sequences of a call. Raises ApiError 400, before anything is built for them, where
    they are more than are ever admitted or have too much text in `bad_words`.
    """
    prompts = len(call.prompts) or 1 if isinstance(call, CompletionRequest) else 1
    sequences = prompts * call.n
    check_sequences(settings, sequences, "prompt" if prompts > call.n else "n")
    if call.bad_words and sequences * sum(map(len, call.bad_words)) > MOST_BAD_WORD_CHARACTERS:
        message = (
            f"got bad_words for {sequences} sequences; expected at most "
            f"{MOST_BAD_WORD_CHARACTERS} characters over all of them"
        )
        raise ApiError(400, "invalid_request", message, param="bad_words")
    return sequences


def check_sequences(settings: OverloadSettings, sequences: int, param: str) -> None:
    """Raises ApiError 400 for a call of more sequences than are ever admitted; not 429, as a later
    attempt would be useless.
    """
    most, option = settings.max_sequences_per_call, "--max-sequences-per-call"
    if settings.max_num_queued_reqs is not None and settings.max_num_queued_reqs < most:
        most, option = settings.max_num_queued_reqs, "--max-num-queued-reqs"
    if sequences > most:
        message = (
            f"got a call of {sequences} sequences (prompts x n); expected at most {most} "
            f"({option} of this gateway): split the call"
        )
        raise ApiError(400, "too_many_sequences", message, param=param)


# headers and endpoint


def is_retry(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether the client's library says that it has asked before."""
    for name, value in headers:  # noqa: SIM110 - a generator takes twice as long, for every request
        if name == RETRY_HEADER and value != b"0":
            return True
    return False


def flow_of(headers: Sequence[tuple[bytes, bytes]], caller: str, keys: int) -> str:
    """To whom the service of a call is charged, in a gateway with `keys` API keys. With several
    keys it is `caller`: if a header decided, a client could be a new flow with each call. Else it
    is the id in the header (hashed if it is long or unprintable), or without one `caller`.
    """
    if keys > 1:
        return caller
    for name, value in headers:
        if name == FLOW and value:
            fit = _FLOW.fullmatch(value)
            return value.decode() if fit else sha256(value).hexdigest()[:16]
    return caller


def not_served(endpoint: ApiEndpoint) -> ApiError:
    """The error for an endpoint that vLLM's serving objects answer, where the engine has none."""
    return ApiError(
        501,
        "unsupported",
        f"got {endpoint.path}, which the emulated engine does not serve; expected --engine vllm",
    )


# model and fields


def check_fields(
    settings: Settings, call: Call, body_bytes: int, served: Collection[str] = ()
) -> None:
    """Raises ApiError for a model or a field that this gateway does not serve, and for a
    structured-output definition that is too large. `served` are further fields that vLLM serves for
    this call.
    """
    if isinstance(call, NewerRequest):
        check_newer(settings, call)
        return
    check_model(settings, call.model)
    if body_bytes > settings.security.max_form_bytes and not call.formless:
        check_form_size(call.form(), settings.security.max_form_bytes, call.form_field())
    if call.model_extra:
        check_extra(settings, call, {"best_of": call.n, **call.harmless}, served)
    if call.stream_options is not None and call.stream_options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise ApiError(
            501,
            "unsupported",
            f"got {field}, which this gateway does not support; leave it out",
            param=field,
        )
    check_forced(settings, call)


def check_newer(settings: Settings, call: NewerRequest) -> None:
    """Check the model and fields of a call to one of the newer endpoints. Raises ApiError, also
    for a field that vLLM's endpoint would ignore.
    """
    check_model(settings, call.model)
    check_forced(settings, call)
    given = {name: getattr(call, name) for name in call.model_fields_set}
    others = {name: given[name] for name in given.keys() - call.served - OWN}
    unknown = check_unserved(others, {}, {**UNSERVED, **call.unserved})
    why = f"which {call.endpoint.path} does not have"
    refuse_unknown(settings, unknown, call.served | OWN, why)
    if isinstance(call, ResponsesRequest) and call.previous_response_id is not None:
        raise ApiError(
            404,
            "not_found",
            "got previous_response_id, and this gateway keeps no responses; send the conversation "
            "in input",
            param="previous_response_id",
        )


def check_model(settings: Settings, asked: str) -> None:
    """Raises ApiError 404 for a model that this gateway does not serve."""
    if not settings.serves(asked):
        if asked.startswith("/"):  # error messages must not repeat paths
            asked = f".../{asked.rstrip('/').rsplit('/', 1)[-1]}"
        served = ", ".join(map(repr, (settings.served_model_name, *settings.served_model_aliases)))
        raise ApiError(
            404,
            "model_not_found",
            f"got model {brief(asked)!r}; this gateway serves {served}",
            param="model",
        )


def check_forced(settings: Settings, call: Generation) -> None:
    """Raises ApiError 400 for a forced answer length where the operator did not allow them."""
    if call.kendall_forced_output_tokens is not None and not settings.allow_forced_lengths:
        raise ApiError(
            400,
            "forced_lengths_not_allowed",
            "forced lengths need `kendall serve --allow-forced-lengths`",
            param=FORCED_FIELD,
        )


def check_form_size(form: Structured | None, most: int, param: str | None) -> None:
    """Raises ApiError 400 for a structured-output definition of more than `most` bytes: the time to
    compile it grows at least as fast as its size.
    """
    size = 0 if form is None else len(to_json(form.value))
    if size > most:
        message = (
            f"got a structured-output definition of {size} bytes; expected at most {most}, this "
            "gateway's limit: simplify it"
        )
        raise ApiError(400, "form_too_large", message, param=param)


# prompts and token limits


async def requests_of(
    gateway: Gateway,
    call: CompletionRequest | ChatRequest,
    arrival: Arrival,
    patience: float | None,
) -> list[EngineRequest]:
    """Make one request for each prompt and choice. A token limit above the gateway's is lowered to
    it. Raises ApiError for a prompt or a limit that does not fit the model's context, and for
    sampling that the engine refuses.
    """
    bounds = gateway.batcher.capabilities
    prompts = await prompts_of(gateway.tokenizer, bounds, call)
    own, most = call.client_limit, gateway.limits.max_output_tokens
    requests: list[EngineRequest] = []
    # one object for all sequences: its lists may be long, and several prompts have one limit
    shared: Sampling | None = None
    for prompt in prompts:
        room = room_of(gateway, bounds, len(prompt))
        if own is not None and own > room:
            raise ApiError(
                400,
                "context_length_exceeded",
                f"got max_tokens={own} with a prompt of {len(prompt)} tokens; "
                f"expected at most {room}, the model's context is "
                f"{bounds.max_model_len}",
                param="max_tokens",
            )
        asked = room if own is None else own
        limit = asked if most is None or most > asked else most
        if shared is None:
            shared = sampling_of(call, limit, bounds.sampling)
        requests += arrival.choices(
            call, prompt, shared, n=call.n, first=len(requests), asked=asked, patience=patience
        )
    return await with_sampling_checked(gateway, requests, call, arrival, patience)


async def prompts_of(
    engine: PromptReader, bounds: Capabilities, call: CompletionRequest | ChatRequest
) -> Sequence[Sequence[int]]:
    """The token ids of each prompt. Where truncation is asked for, the last tokens are kept, or the
    first ones with `truncation_side` "right". Raises ApiError 400, or 501 for what is not served,
    such as parts that are not text.
    """
    prompts: Sequence[Sequence[int]]
    try:
        if isinstance(call, ChatRequest):
            prompts = [await chat_tokens(engine, call.messages, call)]
        else:
            prompts = await completion_tokens(engine, call.prompts, bounds.vocab_size)
    except InvalidPromptError as error:
        raise refused_prompt(
            error, "messages" if isinstance(call, ChatRequest) else "prompt"
        ) from None
    most = call.truncate_prompt_tokens
    if most is None:
        return prompts
    if most < 0:
        most = bounds.max_model_len - (call.client_limit or 1)
    if most < 1:
        raise ApiError(
            400,
            "invalid_prompt",
            "truncate_prompt_tokens leaves nothing of the prompt; expected -1 or more than 0",
            param="prompt",
        )
    right = call.truncation_side == "right"
    return [prompt[:most] if right else prompt[-most:] for prompt in prompts]


async def _with_lengths(gateway: Gateway, requests: list[EngineRequest]) -> list[EngineRequest]:
    """The same requests with the lengths that are predicted of them, where any are."""
    predictor = gateway.length_predictor
    return requests if predictor is None else await predictor.predicted(requests)


def refused_prompt(error: InvalidPromptError, param: str) -> ApiError:
    """The client's error for a prompt that the engine refuses."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_prompt"
    return ApiError(400, code, str(error), param=param)


async def completion_tokens(
    engine: PromptReader, prompts: Sequence[str | list[int]], vocabulary: int
) -> list[list[int]]:
    """The token ids of each prompt. Between long stretches of text it yields to other tasks, as an
    engine may tokenise short texts on the event loop. Raises ApiError 400, InvalidPromptError.
    """
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise ApiError(
            400,
            "invalid_prompt",
            f"got a list of {len(prompts)} prompts; expected 1 to {MOST_PROMPTS}",
            param="prompt",
        )
    encoded, characters = [], 0
    for prompt in prompts:
        encoded.append(prompt if isinstance(prompt, list) else await engine.encode(prompt))
        characters += len(prompt) if isinstance(prompt, str) else 0
        if characters > MOST_AT_ONCE:
            characters = 0
            await asyncio.sleep(0)
    for tokens in encoded:
        if not tokens:
            raise ApiError(
                400,
                "invalid_prompt",
                "got an empty prompt; expected at least one token",
                param="prompt",
            )
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            raise ApiError(
                400,
                "invalid_prompt",
                f"got a token id outside the vocabulary; expected 0 to {vocabulary - 1}",
                param="prompt",
            )
    return encoded


async def chat_tokens(
    engine: PromptReader, messages: Sequence[ChatMessage], call: Templated
) -> list[int]:
    """The token ids of a conversation. Raises ApiError, InvalidPromptError."""
    given = call.chat_template_kwargs or {}
    if "chat_template" in given:  # a program by the client, which would run here
        raise ApiError(
            501,
            "unsupported",
            "got chat_template, which this gateway does not support; leave it out",
            param="chat_template_kwargs",
        )
    arguments = {"add_generation_prompt": call.add_generation_prompt} | given
    if call.continue_final_message:
        arguments["continue_final_message"] = True
    return await engine.encode_chat(conversation(messages), arguments)


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them. Raises ApiError for parts that are not text, or
    too many.
    """
    count = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if count > MOST_PARTS:
        raise ApiError(
            400,
            "invalid_request",
            f"got messages of {count} parts; expected at most {MOST_PARTS} in all",
            param="messages",
        )
    for place, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        for number, part in enumerate(parts):
            where = f"messages[{place}].content[{number}]"
            if part.get("type") in OTHER_PARTS:
                raise ApiError(
                    501,
                    "unsupported",
                    f"{where}: only parts of type text are supported",
                    param=where,
                )
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(
                    400, "invalid_request", f"{where}: expected type text and a text", param=where
                )
            if other := sorted(part.keys() - TEXT_PART - PART_HINTS):
                raise ApiError(
                    400,
                    "unknown_field",
                    f"{where}: got {brief(repr(other[0]))}; expected type and text alone",
                    param=where,
                )
    return [message.model_dump(exclude_none=True) for message in messages]


def room_of(gateway: Gateway, bounds: Capabilities, prompt_tokens: int) -> int:
    """How many tokens the model's context has left after a prompt. Raises ApiError 400 for a prompt
    that is too long.
    """
    if prompt_tokens > (longest := bounds.longest_prompt):
        raise ApiError(
            400,
            "context_length_exceeded",
            (f"got a prompt of {prompt_tokens} tokens; expected at most {longest}: shorten it"),
            param="prompt",
        )
    check_prompt(prompt_tokens, gateway.settings.security.max_prompt_tokens)
    return bounds.largest_context - prompt_tokens


def check_prompt(prompt_tokens: int, most: int | None) -> None:
    """Raises ApiError 400 for a prompt above `most`, the operator's limit; None: there is none."""
    if most is not None and prompt_tokens > most:
        raise ApiError(
            400,
            "context_length_exceeded",
            (
                f"got a prompt of {prompt_tokens} tokens; expected at most {most}, this gateway's "
                "limit: shorten it"
            ),
            param="prompt",
        )


# sampling


def sampling_of(call: Generation, limit: int, own: Mapping[str, float]) -> Sampling:
    """The sampling of a sequence of at most `limit` output tokens; `own`: the model's defaults."""
    fields = call.__dict__  # attribute access on a pydantic model takes ten times as long
    given: dict[str, Any] = {
        name: value
        for name in SAMPLING_FIELDS
        if (value := fields[name]) is not None or (value := own.get(name)) is not None
    }
    allowed = fields["allowed_token_ids"]
    return Sampling(
        max_tokens=limit,
        min_tokens=fields["min_tokens"],
        presence_penalty=fields["presence_penalty"],
        frequency_penalty=fields["frequency_penalty"],
        seed=fields["seed"],
        logit_bias=fields["logit_bias"],
        logprobs=call.wanted_logprobs,
        stop=call.stops() if fields["stop"] else (),
        stop_token_ids=tuple(fields["stop_token_ids"] or ()),
        ignore_eos=fields["ignore_eos"],
        include_stop_str_in_output=fields["include_stop_str_in_output"],
        skip_special_tokens=fields["skip_special_tokens"],
        structured=None if call.formless else call.form(),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(fields["bad_words"] or ()),
        **given,
    )


async def with_sampling_checked(
    gateway: Gateway,
    requests: list[EngineRequest],
    call: Generation,
    arrival: Arrival,
    patience: float | None,
) -> list[EngineRequest]:
    """Have the engine check the sampling of the requests, where it depends on the model; one check
    does for all, as they differ in token limit and seed only. Requests whose structured output had
    to be compiled arrive when that is done: it is a part of their validation, not of their wait.
    Raises ApiError 400, 429, 501 or 503.
    """
    sampling = requests[0].sampling
    if not sampling.needs_check:
        return requests
    base.CALLER.set(arrival.caller)
    try:
        checked = await gateway.tokenizer.check_sampling(sampling)
    except UnsupportedError as error:
        raise ApiError(501, "unsupported", str(error), param=error.param) from None
    except InvalidSamplingError as error:
        raise ApiError(
            400, "invalid_request", str(error), param=error.param or call.form_field()
        ) from None
    except BusyError as error:
        raise ApiError(503, "engine_unavailable", str(error)) from None
    except OverBudgetError as error:
        raise ApiError(
            429, "form_budget_exceeded", str(error), retry_after=error.retry_after
        ) from None
    if checked is sampling:
        return requests
    now = gateway.now()
    deadline = math.inf if patience is None else now + patience
    return [
        replace(
            engine_request,
            request=engine_request.request._replace(arrived_at=now, deadline=deadline),
            sampling=replace(engine_request.sampling, structured=checked.structured),
        )
        for engine_request in requests
    ]


# the size of the answer


def check_answer_size(requests: Sequence[EngineRequest], context: int) -> None:
    """Raises ApiError 400 where the answer could have more values than this gateway holds. Values
    are the output tokens, their log probabilities and those of the prompt's tokens.
    """
    values = 0
    for engine_request in requests:
        sampling, request = engine_request.sampling, engine_request.request
        values += sampling.max_tokens * (1 + (sampling.logprobs or 0))
        values += request.prompt_tokens * (sampling.prompt_logprobs or 0)
    most = max(MOST_ANSWER_VALUES, (1 + MOST_LOGPROBS) * context)
    if values > most:
        message = (
            f"got {counted(len(requests), 'sequence')} of {requests[0].sampling.max_tokens} tokens "
            f"with {requests[0].sampling.logprobs or 0} log probabilities each, {values} values; "
            f"expected at most {most} in one answer: lower n, max_tokens or logprobs"
        )
        raise ApiError(400, "answer_too_large", message, param="max_tokens")
