"""Limits on one call that need more than its head: what this gateway does not serve, or not at
once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic_core import to_json

from policies.text import counted
from server.admission.limits import OverloadSettings, check_sequences
from server.engines.base import EngineRequest
from server.http.api.models import check_model
from server.http.api.schema import FORCED_FIELD, ChatRequest, CompletionRequest, Generation
from server.http.api.validation import check_extra
from server.runtime.errors import ApiError
from server.settings import Settings

# tokens and log probabilities of an answer, 200 bytes each; a sequence of the model's whole context
# with the most of them fits in any case
MOST_ANSWER_VALUES, MOST_LOGPROBS = 1 << 20, 20
MOST_BAD_WORD_CHARACTERS = 1 << 16  # of all sequences of a call: vLLM tokenises them for each


def check_prompt(prompt_tokens: int, most: int | None) -> None:
    """Raises ApiError 400: the operator's own limit, below the model's context."""
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


def check_form_size(call: Generation, most: int) -> None:
    """Raises ApiError 400: what the answer's form takes to compile grows with its size, often
    faster.
    """
    form = call.form()
    size = 0 if form is None else len(to_json(form.value))
    if size > most:
        raise form_too_large(size, most, call.form_field())


def form_too_large(size: int, most: int, param: str | None) -> ApiError:
    """Of a form of `size` bytes."""
    message = (
        f"got a structured-output definition of {size} bytes; expected at most {most}, this "
        "gateway's limit: simplify it"
    )
    return ApiError(400, "form_too_large", message, param=param)


def check_fields(
    settings: Settings,
    call: CompletionRequest | ChatRequest,
    body_bytes: int,
    served: Collection[str] = (),
) -> None:
    """Raises ApiError for a field that this gateway does not serve; `served`: by vLLM, of this
    call.
    """
    check_model(settings, call.model)
    if body_bytes > settings.security.max_form_bytes and not call.formless:
        check_form_size(call, settings.security.max_form_bytes)
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


def check_forced(settings: Settings, call: Generation) -> None:
    """Raises ApiError 400."""
    if call.kendall_forced_output_tokens is not None and not settings.allow_forced_lengths:
        raise ApiError(
            400,
            "forced_lengths_not_allowed",
            "forced lengths need `kendall serve --allow-forced-lengths`",
            param=FORCED_FIELD,
        )


def check_answer_size(requests: Sequence[EngineRequest], context: int) -> None:
    """Raises ApiError 400 where the answer could be larger than this gateway holds: a value is an
    output token, or one of its log probabilities, or of the prompt's.
    """
    values = 0
    for each in requests:
        sampling, request = each.sampling, each.request
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


def check_size(settings: OverloadSettings, call: Generation) -> int:
    """The number of sequences. Raises ApiError 400 before anything is built of them: more than
    are ever admitted.
    """
    prompts = len(call.prompts()) or 1 if isinstance(call, CompletionRequest) else 1
    sequences = prompts * call.n
    check_sequences(settings, sequences, "prompt" if prompts > call.n else "n")
    if call.bad_words and sequences * sum(map(len, call.bad_words)) > MOST_BAD_WORD_CHARACTERS:
        message = (
            f"got bad_words for {sequences} sequences; expected at most "
            f"{MOST_BAD_WORD_CHARACTERS} characters over all of them"
        )
        raise ApiError(400, "invalid_request", message, param="bad_words")
    return sequences
