"""The endpoints that vLLM's serving objects answer, and how each says that something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kendall.server.runtime.errors import ApiError
from kendall.server.security.routes import ANTHROPIC

Name = Literal["chat", "completions", "responses", "messages", "count_tokens"]
Dialect = Literal["openai", "responses", "anthropic"]
encode = msgspec.json.encode
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One of them. `prefix`: of its ids; `limit`: its field that bounds the answer."""

    name: Name
    path: str
    prefix: str
    limit: str
    dialect: Dialect = "openai"


CHAT = ApiEndpoint("chat", "/v1/chat/completions", "chatcmpl", "max_completion_tokens")
COMPLETIONS = ApiEndpoint("completions", "/v1/completions", "cmpl", "max_tokens")
RESPONSES = ApiEndpoint("responses", "/v1/responses", "resp", "max_output_tokens", "responses")
MESSAGES = ApiEndpoint("messages", "/v1/messages", "msg", "max_tokens", "anthropic")
COUNT_TOKENS = ApiEndpoint(
    "count_tokens", "/v1/messages/count_tokens", "count", "max_tokens", "anthropic"
)


def dialect_of(path: str) -> Dialect:
    """The words of an error that comes before, or instead of, the path's endpoint."""
    return "anthropic" if path in ANTHROPIC else "openai"


def error_body(dialect: Dialect, error: ApiError) -> dict[str, Any]:
    """The JSON of an answer that is an error."""
    if dialect != "anthropic":
        return error.body()
    others = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(error.status, others)
    said = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": said}


def error_event(dialect: Dialect, error: ApiError, number: int) -> bytes:
    """The last event of a stream that an error ends, `number` events after its first."""
    body = error_body(dialect, error)
    if dialect == "openai":
        return b"data: " + encode(body) + b"\n\ndata: [DONE]\n\n"
    if dialect == "responses":
        said = body["error"]
        body |= {key: said[key] for key in ("code", "message", "param")}
        body |= {"type": "error", "sequence_number": number}
    return b"event: error\ndata: " + encode(body) + b"\n\n"
