"""What answers look like, for the OpenAPI document: nothing is validated against these on the
way out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class Backlog(BaseModel):
    """Where the queue stood when a call was refused."""

    queue_length: int
    queue_position: int | None = None
    predicted_wait_ms: float | None = None


class ErrorDetail(BaseModel):
    """What went wrong; `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str
    kendall: Backlog | None = None  # of a rejection


class ErrorAnswer(BaseModel):
    """OpenAI's shape."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """What is wrong, in Anthropic's words and ours."""

    type: str
    message: str
    code: str | None
    param: str | None


class MessagesErrorAnswer(BaseModel):
    """Anthropic's shape."""

    type: Literal["error"]
    error: MessagesErrorDetail


class Timing(BaseModel):
    """Where the time of the call's slowest sequence went."""

    queueing_delay_ms: float
    service_ms: float
    batch_size: int | None


class Usage(BaseModel):
    """Tokens of all choices; `kendall` has the timing."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    kendall: Timing


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class _AnswerChoice(BaseModel):
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionChoice(_AnswerChoice):
    """One text."""

    text: str
    logprobs: CompletionLogprobs | None


class Logprob(BaseModel):
    """One candidate of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Logprob):
    """The token taken, and the likeliest ones."""

    top_logprobs: list[Logprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[TokenLogprobs]


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_AnswerChoice):
    """One message."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class CompletionAnswer(_Answer):
    """Of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatAnswer(_Answer):
    """Of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelEntry(BaseModel):
    """One name of the model, and what serves it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    root: str
    output_length_fields: list[
        str
    ]  # the request fields that set an answer's length; with ignore_eos it is max_tokens
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Every name."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(BaseModel):
    """Of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Of `/detokenize`."""

    prompt: str


Described = dict[int | str, dict[str, Any]]
"""What FastAPI takes as `responses`."""
