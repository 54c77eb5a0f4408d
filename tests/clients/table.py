"""What each client library makes of the gateway's answers, as test_libraries.py holds it to, and
the section of docs/why/conformance.md that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
STATUSES = ("400", "401", "404", "429")


@dataclass(frozen=True)
class Library:
    """`package`: the one that is pinned; `errors`: the exception's class for each status."""

    title: str
    package: str
    errors: Mapping[str, str]
    remark: str = ""


def _named(module: str, *names: str) -> dict[str, str]:
    """One class for each status, or one for all of them."""
    classes = names if len(names) == len(STATUSES) else names * len(STATUSES)
    return {status: f"{module}.{name}" for status, name in zip(STATUSES, classes, strict=True)}


_CLASSES = ("BadRequestError", "AuthenticationError", "NotFoundError", "RateLimitError")
OPENAI = _named("openai", *_CLASSES)
LIBRARIES = {
    "openai": Library("OpenAI for Python", "openai", OPENAI),
    "openai-node": Library("OpenAI for Node.js", "openai", OPENAI),
    "anthropic": Library(
        "Anthropic", "anthropic", _named("anthropic", *_CLASSES), "`/v1/messages`"
    ),
    "langchain": Library(
        "LangChain",
        "langchain-openai",
        _named(
            "langchain_openai",
            "OpenAIInvalidRequestError",
            "OpenAIAuthenticationError",
            "OpenAIModelNotFoundError",
            "OpenAIRateLimitError",
        ),
        "`ChatOpenAI`; the tool call is streamed",
    ),
    "litellm": Library("LiteLLM", "litellm", _named("litellm", *_CLASSES), "`openai/MODEL`"),
    "llama-index": Library(
        "LlamaIndex",
        "llama-index-llms-openai-like",
        OPENAI,
        "`OpenAILike`, in an environment of its own: it needs openai 2",
    ),
    "pydantic-ai": Library(
        "Pydantic AI",
        "pydantic-ai-slim",
        _named("pydantic_ai", "ModelHTTPError"),
        "one class, with `status_code`; the tool call is a typed output",
    ),
    "openai-agents": Library(
        "OpenAI Agents",
        "openai-agents",
        OPENAI,
        "`/v1/responses`; an answer that its token limit ends is a `ModelBehaviorError` to it",
    ),
    "instructor": Library(
        "Instructor", "instructor", OPENAI, "`from_openai`; the tool call is a typed answer"
    ),
    "dspy": Library(
        "DSPy",
        "dspy",
        _named(
            "dspy",
            "LMInvalidRequestError",
            "LMAuthError",
            "LMUnsupportedModelError",
            "LMRateLimitError",
        ),
        "`dspy.LM`; streamed by `dspy.streamify`",
    ),
    "aisuite": Library(
        "aisuite",
        "aisuite",
        _named("aisuite", "LLMError"),
        "one class, without the status: it is in the text alone",
    ),
}


def version(name: str) -> str:
    """Of a library, as it is pinned."""
    package = LIBRARIES[name].package
    if name == "openai-node":
        pinned = json.loads((HERE / "node" / "package.json").read_text(encoding="utf-8"))
        return str(pinned["dependencies"][package])
    file = "llama-index.txt" if name == "llama-index" else "requirements.txt"
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines)[package]


def section() -> str:
    """Of the page."""
    lines = [
        "## Client libraries",
        "",
        "Each as its users call it, against `kendall serve` on the real engine: a whole answer, a",
        "stream, a tool call, the exception for each status, and a call that is refused with 429,",
        "which the library sends again once, after the time that `Retry-After` asks for. All of",
        "them do (`tests/clients/test_libraries.py`, in `make test-all`; `make setup-clients`).",
        "",
        f"| library | version | {' | '.join(STATUSES)} | remark |",
        f"|---|---|{'---|' * len(STATUSES)}---|",
    ]
    for name, library in LIBRARIES.items():
        classes = (f"`{library.errors[status]}`" for status in STATUSES)
        row = (library.title, version(name), *classes, library.remark)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
