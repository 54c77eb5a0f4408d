"""What clients may send: OpenAI's fields, vLLM's extras, and nothing silently ignored
(`server/http/api/unserved.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from kendall.server.admission.limits_in_force import Tokens
from kendall.server.engines.base import Structured
from kendall.server.http.api.structured import (
    Choices,
    Kind,
    ResponseFormat,
    StructuredOutputs,
    form_of,
)
from kendall.server.http.headers import REQUEST_ID
from kendall.server.openai_tools.endpoints import CHAT, COMPLETIONS, ApiEndpoint

FORCED_FIELD = "kendall_forced_output_tokens"
FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
MOST_STOPS, MOST_STOP_CHARACTERS = 16, 1024  # together; each is looked for at every token
MOST_BAD_WORDS, MOST_BAD_CHARACTERS = (
    128,
    4096,
)  # as many as vLLM takes; it tokenises them on the event loop, 2 us a character
MOST_STOP_TOKENS = 1024
MOST_BIASES = 4096
MOST_MESSAGES = 4096  # each is a model, 4 us
MOST_PARTS = 1024  # of a message


def _check_length(field: str, texts: Iterable[str], most: int) -> None:
    """Raises ValueError: so many characters would hold everybody up."""
    length = sum(map(len, texts))
    if length > most:
        raise ValueError(f"got {field} of {length} characters; expected at most {most} in total")


def _null_is(default: object, documented: Any) -> BeforeValidator:
    """OpenAI lets clients write null for the default."""
    return BeforeValidator(
        lambda value: default if value is None else value, json_schema_input_type=documented
    )


Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count: TypeAlias = Annotated[
    int, Field(ge=1, le=128), _null_is(1, Annotated[int | None, Field(ge=1, le=128)])
]
Flag: TypeAlias = Annotated[bool, _null_is(False, bool | None)]
Penalty: TypeAlias = Annotated[
    float, Field(ge=-2, le=2), _null_is(0.0, Annotated[float | None, Field(ge=-2, le=2)])
]


class First(FailFast):
    """Stops at the first wrong item: else a list of the wrong kind is an error an item."""

    __hash__ = object.__hash__  # a union of annotated types wants it


_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}
# texts and lists are looked at by the gateway: a schema that walks through every token id costs
# more than it is worth
Prompt: TypeAlias = Annotated[
    str
    | Annotated[list[int], First()]
    | Annotated[list[str], First()]
    | Annotated[list[Annotated[list[int], First()]], First()],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                *(
                    {"type": "array", "items": one, "minItems": 1}
                    for one in ({"type": "string"}, _IDS)
                ),
            ]
        }
    ),
]
LogitBias: TypeAlias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MOST_BIASES),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MOST_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
_LIMIT = WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 2**31 - 1})
Part: TypeAlias = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
            "additionalProperties": False,
        }
    ),
]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's: usage so far in every chunk
    include_obfuscation: SkipJsonSchema[Flag] = False  # true is refused


class Generation(BaseModel):
    """What both endpoints share."""

    # what is left over is refused by name
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    endpoint: ClassVar[ApiEndpoint]
    # values that ask for nothing, where they depend on the endpoint
    harmless: ClassVar[Mapping[str, Any]] = {}

    model: str
    max_tokens: Tokens | None = None
    n: Count = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS), First()] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS), First()] | None = (
        None
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1), First()] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_BAD_WORDS), First()
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    # -1: to what the context leaves
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[Int64, _null_is(0, Int64 | None)] = 0  # lower is earlier, as vLLM has it
    patience: Annotated[float, Field(gt=0)] | None = None  # seconds in the queue, then 429
    # seconds to the end of the answer, then 504
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    # seconds to the first token, then 504
    first_token_timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID}$")] | None = None
    return_token_ids: Flag = False
    # the caller's guess; policies may use it
    predicted_output_tokens: Annotated[float, Field(gt=0)] | None = None
    # of experiments, under a flag
    kendall_forced_output_tokens: SkipJsonSchema[Annotated[int, Field(ge=1)] | None] = None

    @model_validator(mode="after")
    def _agree(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        limit = self.client_limit
        if limit == 0:
            self._check_nothing_wanted()
        elif limit is not None and self.min_tokens > limit:
            raise ValueError(
                f"got min_tokens={self.min_tokens}; expected at most the limit on output tokens, "
                f"{limit}"
            )
        if self.stop:
            _check_length("stop", self.stops(), MOST_STOP_CHARACTERS)
        if self.bad_words:
            _check_length("bad_words", self.bad_words, MOST_BAD_CHARACTERS)
        if not self.formless:
            self.form()
        return self

    def _check_nothing_wanted(self) -> None:
        """Raises ValueError unless the prompt itself is."""
        raise ValueError("got max_tokens=0; expected at least 1")

    @property
    def formless(self) -> bool:
        """Whether no form is asked for, as nearly always."""
        return self.__pydantic_fields_set__.isdisjoint(FORM_FIELDS) or self.form_field() is None

    def form_field(self) -> str | None:
        """The field that asks for a form."""
        return next((name for name in FORM_FIELDS if getattr(self, name) is not None), None)

    def form(self) -> Structured | None:
        """The form that the answer must take. Raises ValueError where there are two."""
        if self.formless:
            return None
        guided: dict[Kind, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return form_of(self.response_format, self.structured_outputs, guided)

    def stops(self) -> tuple[str, ...]:
        """Stop strings, empty ones left out."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def client_limit(self) -> int | None:
        """The client's own limit on output tokens."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many candidates a position, None for none at all."""
        raise NotImplementedError

    @property
    def prompt_to_log(self) -> object:
        """Under --log-prompts."""
        return self.model_extra


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    endpoint: ClassVar[ApiEndpoint] = COMPLETIONS
    harmless: ClassVar[Mapping[str, Any]] = {"add_special_tokens": True}
    prompt: Prompt
    # 0 with `echo`: evaluation harnesses want the prompt's log probabilities
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), _LIMIT] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def client_limit(self) -> int | None:
        """OpenAI's default of 16 where the client says nothing, as vLLM has it."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """As it says."""
        return self.logprobs

    def _check_nothing_wanted(self) -> None:
        if not (self.model_extra or {}).get("echo"):
            raise ValueError(
                "got max_tokens=0; expected at least 1, or echo=true for the prompt alone"
            )

    @property
    def prompt_to_log(self) -> object:
        """As it was sent."""
        return self.prompt

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class ChatMessage(BaseModel):
    """One message of a conversation; parts other than text are refused."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | Annotated[list[Part], Field(max_length=MOST_PARTS), First()] | None = None
    # the model's template reads them
    tool_calls: SkipJsonSchema[list[dict[str, Any]] | None] = None


class Templated(BaseModel):
    """What decides, beside the messages, what the model's chat template makes of them."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _agree_about_the_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        return self


class ChatRequest(Templated, Generation):
    """`POST /v1/chat/completions`."""

    endpoint: ClassVar[ApiEndpoint] = CHAT
    harmless: ClassVar[Mapping[str, Any]] = {"add_special_tokens": False}
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), First()]
    max_completion_tokens: Tokens | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _agree_in_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def client_limit(self) -> int | None:
        """`max_completion_tokens` before the older `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Its own at least, if any are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_to_log(self) -> object:
        """The conversation."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class AutopilotChange(BaseModel):
    """`PUT /admin/autopilot`: what it may do from now on; its bounds stay."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["off", "advise", "act"]
