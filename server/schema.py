"""What clients may send: OpenAI's fields, vLLM's extras, and nothing silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
FORCED_FIELD = "kendall_forced_output_tokens"


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class Generation(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(extra="allow")  # what is left over is refused by name, with 501

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    priority: int = 0
    predicted_output_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # the caller's guess; policies may use it
    kendall_forced_output_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    def stops(self) -> tuple[str, ...]:
        """Stop strings, empty ones left out."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    def unsupported(self) -> list[str]:
        """Fields that were given and are not served."""
        extra: dict[str, Any] = self.model_extra or {}
        return sorted(key for key, value in extra.items() if key not in HARMLESS and value not in (None, False, [], {}))

    def client_limit(self) -> int | None:
        """The client's own limit on output tokens."""
        return self.max_tokens


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None

    def client_limit(self) -> int | None:
        """OpenAI's default of 16 where the client says nothing, as vLLM has it."""
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class ChatMessage(BaseModel):
    """One message of a conversation; parts other than text are refused."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    def client_limit(self) -> int | None:
        """`max_completion_tokens` before the older `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class PolicyChange(BaseModel):
    """`PUT /admin/policy`: what is named changes, all of it or nothing; null lifts a limit."""

    model_config = ConfigDict(extra="forbid")
    policy: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    patience: Annotated[float, Field(gt=0)] | None = None


class AutopilotChange(BaseModel):
    """`PUT /admin/autopilot`: what it may do from now on; its bounds are those of the start."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["off", "advise", "act"]


class CalibrationRequest(BaseModel):
    """`POST /admin/calibrate`."""

    model_config = ConfigDict(extra="forbid")
    speed_only: bool = False
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0  # of a speed_only measurement
    latency: str | None = None  # the law that a speed_only measurement is set against; without it the one measured here
    repeats: Annotated[int, Field(ge=2, le=100)] = 5
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=2)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    name: str | None = None
