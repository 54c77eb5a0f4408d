"""Calls that are passed on, without a server behind: an engine whose answers a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kendall.policies import Policy, Request, parse_policy
from kendall.server.engines.base import Capabilities, EngineRequest, Sampling, Step, TokenStream
from kendall.server.engines.proxied import Answered, ProxiedCall, ProxiedListener, Refused
from kendall.server.queue.batcher import Batcher
from tests.server.harness import Collector, Immediate

LIMIT = 100


class Scripted:
    """It does nothing by itself; `answer(id)` hears what a test says of that call."""

    def __init__(self, servers: int = 1, max_num_seqs: int = 8) -> None:
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self.on_servers: Callable[[frozenset[int]], None] | None = None
        self.dispatched: list[tuple[int, list[str], bool]] = []  # server, calls, padded
        self.cancelled: list[str] = []
        self.streams: dict[str, TokenStream] = {}
        self.capabilities = Capabilities(
            engine="http",
            model="m",
            max_model_len=4096,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2**31,
            kv_cache_tokens=2**62,
            eos_token_ids=frozenset(),
            vocab_size=256,
            pads=False,
            servers=servers,
            model_names=("m",),
        )

    async def start(self) -> Capabilities:
        return self.capabilities

    async def stop(self) -> None: ...
    async def healthy(self) -> bool:
        return True

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        raise NotImplementedError

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        return sampling

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def dispatch(
        self, server_id: int, requests: Sequence[EngineRequest], *, padded: bool, joining: bool
    ) -> list[TokenStream]:
        ids = [each.request.id for each in requests]
        self.dispatched.append((server_id, ids, padded))
        self.streams |= {name: TokenStream(name) for name in ids}
        return [self.streams[name] for name in ids]

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids

    def answer(self, name: str) -> ProxiedListener:
        return cast("ProxiedListener", self.streams[name].listener)


class Client(Immediate):
    """Keeps what comes; its last byte leaves at once."""

    def __init__(self) -> None:
        super().__init__()
        self.head: tuple[list[tuple[str, str]], bool] | None = None
        self.data = b""
        self.refused: Refused | None = None
        self.dispatches = 0

    def on_dispatched(self) -> None:
        self.dispatches += 1

    def on_head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        self.head = list(headers), streamed

    def on_bytes(self, data: bytes) -> None:
        self.data += data

    def on_refused(self, answer: Refused) -> None:
        self.refused = answer


def passed(
    name: str,
    *,
    at: float = 0.0,
    sequences: int = 1,
    limit: int = LIMIT,
    limited: bool = True,
    asked: int | None = None,
) -> EngineRequest:
    """A call as the HTTP layer hands it over; `limited`: its body has the limit."""
    request = Request(
        id=name, arrived_at=at, prompt_tokens=10, max_output_tokens=limit, sequences=sequences
    )
    return EngineRequest(
        request,
        (),
        Sampling(max_tokens=limit),
        call=ProxiedCall(
            "/v1/completions", b"{}", most_tokens=limit * sequences if limited else None
        ),
        asked_output_tokens=asked,
    )


class Desk:
    """A batcher on such an engine, its clients and its records."""

    def __init__(
        self,
        policy: Policy | str,
        engine: Any = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.engine = engine or Scripted()
        self.collector = Collector()
        policy = parse_policy(policy) if isinstance(policy, str) else policy
        self.batcher = Batcher(
            self.engine, capabilities or self.engine.capabilities, policy, [self.collector]
        )
        self.clients: dict[str, Client] = {}
        self.deaths: list[str] = []

    def submit(self, *names: str, sequences: int = 1, asked: int | None = None) -> None:
        now = asyncio.get_running_loop().time()
        for name in names:
            self.take(passed(name, at=now, sequences=sequences, asked=asked))

    def take(self, call: EngineRequest) -> None:
        client = self.clients[call.request.id] = Client()
        (client.sequence,) = self.batcher.submit([call], [client])

    def answer(self, name: str, tokens: int = 3, **end: Any) -> None:
        """The whole answer, a token in each piece."""
        listener = self.engine.answer(name)
        listener.on_head([("content-type", "text/event-stream")], streamed=True)
        for _ in range(tokens):
            listener.on_bytes(b"x", 1)
        listener.on_answered(Answered(**end))

    @property
    def records(self) -> dict[str, Any]:
        return {record.request_id: record for record in self.collector.records}
