"""The tiny model with a chat template that knows tools, and a gateway process that serves it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.queueing.measurement.record import Record, read_run
from kendall.server.engines.tiny import EOS, SPECIALS, VOCABULARY, make_tiny, tokenizer
from tests.eventually import eventually_here
from tests.server.counts import outcomes
from tests.server.processes import gateway
from tests.serving import started

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# logit bias: no spaces, which a random model writes between the parts of its JSON for ever
_TOKENS = tokenizer()
COMPACT = {
    str(number): -100.0
    for number in range(len(SPECIALS), VOCABULARY)
    if not _TOKENS.decode([number]).strip()
}
END = COMPACT | {str(EOS): 100.0}  # an answer ends as soon as its grammar allows
CITIES, DAYS = ["Paris", "Rome"], range(1, 8)
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "enum": list(DAYS)},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
USER: Any = [{"role": "user", "content": "What about the weather?"}]


def tooled(folder: Path) -> Path:
    """The model."""
    model = make_tiny(folder / "tooled")
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    path.write_text(json.dumps(config), encoding="utf-8")
    return model


class Served:
    """A running gateway."""

    def __init__(self, process: GatewayProcess, folder: Path, runner: asyncio.Runner) -> None:
        self.process, self.folder, self.runner = process, folder, runner

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.process.url + "/v1", api_key="none", max_retries=0, timeout=60
        )

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.process.url, api_key="none", max_retries=0, timeout=60
        )

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.process.url + path, json=body, timeout=60)

    def records(self) -> list[Record]:
        """All, once the file has those that the gateway has counted."""
        counted = outcomes(httpx.get(self.process.url + "/metrics", timeout=60).text).total()
        return list(
            eventually_here(
                lambda: (
                    len(found := read_run(self.folder / "records.jsonl")[1]) >= counted and found
                )
            )
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.runner.run(self.process.ask(method, path, body))

    @property
    def log(self) -> str:
        return (self.folder / "gateway.log").read_text(encoding="utf-8")


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """A gateway on the real engine, with hermes' parser of tool calls."""
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    names = ("--served-model-name", "tiny")
    process = gateway(folder, str(tooled(folder)), *parsers, *names, *arguments)
    with started(process) as runner:
        yield Served(process, folder, runner)
