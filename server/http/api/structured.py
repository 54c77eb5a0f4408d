"""Answers of a given form: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kendall.server.engines.base import Structured

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class JsonSchema(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # every schema is enforced, strict or not


class TextFormat(BaseModel):
    """No form at all."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["json_object"]


class JsonSchemaFormat(BaseModel):
    """JSON under a schema."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(BaseModel):
    """vLLM's: free text with parts under a grammar."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["structural_tag"]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of the kinds."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> StructuredOutputs:
        given = [kind for kind in KINDS if self.value(kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"got {', '.join(given) or 'no kind'}; expected exactly one of {', '.join(KINDS)}"
            )
        return self

    def value(self, kind: Kind) -> Any:
        """The value of a kind's field."""
        return getattr(self, "json_" if kind == "json" else kind)

    def structured(self) -> Structured:
        """The same as a `Structured`."""
        kind = next(kind for kind in KINDS if self.value(kind) is not None)
        options = {name: value for name in OPTIONS if (value := getattr(self, name))}
        return Structured(kind, self.value(kind), options)


def form_of(
    response_format: ResponseFormat | None,
    outputs: StructuredOutputs | None,
    guided: dict[Kind, Any],
) -> Structured | None:
    """The one form that is asked for. Raises ValueError where there are two."""
    forms = [Structured(kind, value) for kind, value in guided.items() if value is not None]
    if outputs is not None:
        forms.append(outputs.structured())
    match response_format:
        case JsonObjectFormat():
            forms.append(Structured("json_object", True))
        case JsonSchemaFormat(json_schema=asked):
            forms.append(Structured("json", asked.json_schema))
        case StructuralTagFormat():
            forms.append(Structured("structural_tag", json.dumps(response_format.model_dump())))
        case TextFormat() | None:
            pass
    if len(forms) > 1:
        raise ValueError(
            "got several of response_format, structured_outputs and guided_*; expected one"
        )
    return forms[0] if forms else None
