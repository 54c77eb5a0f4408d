"""A gateway on an emulated engine, with serving objects in place of vLLM's: they ask for sequences
as those do, and write what they get as JSON.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from fastapi import FastAPI

from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.gateway import Gateway
from kendall.server.openai_tools.call import CURRENT, AskedSequence, SequencePart
from kendall.server.openai_tools.endpoints import ApiEndpoint
from kendall.server.openai_tools.serving_objects import ServingObjects
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from tests.server.asgi import LAW
from tests.server.mortal import MortalEngine, faulty

DELTA, FINAL = SimpleNamespace(name="DELTA"), SimpleNamespace(name="FINAL_ONLY")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


class Params(msgspec.Struct, kw_only=True):
    """The fields of vLLM's SamplingParams that the gateway reads, and some that it does not."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    max_tokens: int = 16
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    n: int = 1
    output_kind: Any = FINAL
    detokenize: bool = True
    skip_clone: bool = False
    watermarking: bool | None = None
    repetition_detection: Any = None
    stream_interval: int | None = None
    extra_args: dict[str, Any] | None = None
    _eos_token_id: int | None = None


class FakeServing:
    """`fault` is raised by `create`, `break_after` outputs of a call by its generator."""

    def __init__(self) -> None:
        self.plain = Params()
        self.fault: Exception | None = None
        self.break_after: int | None = None
        self.stop_after: int | None = None
        self.prompt_type = "token"
        self.form: Any = None
        self.arguments: dict[str, Any] = {}  # of vLLM's own call
        self.bodies: list[Mapping[str, Any]] = []
        self.taken: list[Any] = []
        self.ended = 0  # calls that vLLM is asked for no more
        self.lives: list[int] = []  # of the engine, for which it was built

    def request(self, endpoint: ApiEndpoint, body: Mapping[str, Any]) -> Any:
        self.bodies.append(body)
        return body

    async def create(self, endpoint: ApiEndpoint, request: Any) -> bytes | AsyncIterator[str]:
        if self.fault is not None:
            raise self.fault
        if endpoint.name == "count_tokens":
            return b'{"input_tokens": 3}'
        stream = bool(request.get("stream"))
        limit = request.get(endpoint.limit) or request.get("max_tokens") or 16
        params = Params(
            max_tokens=limit,
            n=request.get("n", 1),
            ignore_eos=True,
            output_kind=DELTA if stream else FINAL,
            presence_penalty=request.get("presence_penalty", 0.0),
            temperature=request.get("temperature", 1.0),
            seed=request.get("seed"),
            structured_outputs=self.form,
        )
        prompt = {"type": self.prompt_type, "prompt_token_ids": [7] * 4}
        generators = [
            CURRENT.get().ask(prompt, params, "id", self.arguments)
            for _ in range(request.get("prompts", 1))
        ]
        read = self._read(generators)
        if stream:
            return self._events(read)
        return json.dumps([each async for each in read]).encode()

    async def _read(self, generators: Sequence[AsyncGenerator[Any, None]]) -> AsyncIterator[Any]:
        try:
            count = 0
            for generator in generators:
                async for output in generator:
                    if count == self.break_after:
                        raise RuntimeError("a parser fails")
                    if count == self.stop_after:
                        return
                    count += 1
                    self.taken.append(output)
                    yield output
        finally:
            self.ended += 1

    async def _events(self, read: AsyncIterator[Any]) -> AsyncIterator[str]:
        yield 'data: "begun"\n\n'  # as Responses do, before they ask for anything
        async for output in read:
            yield f"data: {json.dumps(output)}\n\n"

    def output(self, asked: AskedSequence, parts: Sequence[SequencePart]) -> Any:
        return [
            {"index": part.index, "text": part.text, "tokens": len(part.tokens)}
            | ({"end": part.finish_reason} if part.finish_reason else {})
            | ({"prompt": list(part.prompt_logprobs)} if part.prompt_logprobs else {})
            for part in parts
        ]

    def refusal(self, error: Exception, *, early: bool) -> ApiError:
        if isinstance(error, ApiError):
            return error
        status = 400 if early else 500
        code = "invalid_request" if early else "internal_error"
        return ApiError(status, code, str(error))


class Client:
    """A library's client of one life of the engine."""

    def __init__(self, life: int) -> None:
        self.life = life


class ServedEngine(MortalEngine):
    """Whose library has an API server. `client` is another one in each life."""

    def __init__(self, **options: Any) -> None:
        super().__init__(parse_law(LAW), **options)
        self._client: Any = None

    def client(self) -> Any:
        if not self.alive:
            raise RuntimeError("the engine is not running")
        if self._client is None or self._client.life != self.life:
            self._client = Client(self.life)
        return self._client


@asynccontextmanager
async def fronted(
    policy: str = "continuous:max_batch_size=4",
    engine: ServedEngine | None = None,
    serving: FakeServing | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[FastAPI, Gateway, FakeServing, list[Record]]]:
    """The gateway, started, and the records it writes; `gateway.engine` is mortal."""
    serving = serving or FakeServing()

    async def build(client: Any) -> FakeServing:
        serving.lives.append(client.life)
        return serving

    def desk_of(engine: Any, settings: Settings) -> ServingObjects:
        return ServingObjects(engine, settings, build)

    engine = engine or ServedEngine()
    with mock.patch("kendall.server.gateway.serving_objects_of", desk_of):
        async with faulty(policy, engine, **settings) as (app, gateway, _, records):
            yield app, gateway, serving, records
