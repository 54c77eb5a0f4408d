"""Servers with OpenAI's API as one engine: each is one server of the queue. Calls are passed on as
they came; nothing is padded, and no answer that began is continued elsewhere.

A server that fails gets no work until it answers a probe again; its calls without an answer go back
to the queue, the others fail. With none left the engine is lost, and starting it again is waiting
for one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from server.engines.base import (
    Capabilities,
    EngineRequest,
    Sampling,
    Step,
    TokenStream,
    UnsupportedError,
)
from server.engines.http.answers import Answer
from server.engines.http.exchange import Exchange, kept
from server.engines.http.own_calls import OwnForm
from server.engines.http.pool import HttpOptions, Pool, say_once
from server.engines.http.prompts import Prompts, load_tokenizer
from server.engines.http.stream import CountedStream, PassedStream
from server.engines.http.upstream import Connect, Upstream, connector, status_of
from server.engines.passing import PassedCall, Refused, in_trace

log = logging.getLogger("kendall.engine")
NO_TOKENS = "the http engine reads no prompts; the servers behind it do"


class _WithoutTokens:
    """What an engine with a tokenizer can."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises UnsupportedError."""
        del token_ids
        raise UnsupportedError(NO_TOKENS)

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Raises UnsupportedError."""
        del text, special_tokens
        raise UnsupportedError(NO_TOKENS)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """Raises UnsupportedError."""
        del messages, template_arguments
        raise UnsupportedError(NO_TOKENS)

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """The servers check it."""
        return sampling


class HttpEngine(_WithoutTokens):
    """See the module. `connect` makes the connections to a URL."""

    def __init__(self, options: HttpOptions, connect: Connect = connector) -> None:
        self.on_step: Callable[[Step], None] | None = None  # never called: steps are not seen
        self.on_death: Callable[[str], None] | None = None
        self.on_servers: Callable[[frozenset[int]], None] | None = None
        tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        self._prompts = Prompts(tokenizer)
        self._own_form = OwnForm()
        self._pool = Pool(options, self._changed, connect)
        self.sender = self._pool.sender
        self._exchanges: dict[str, Exchange] = {}
        self._said: set[str] = set()  # what is said once

    async def start(self) -> Capabilities:
        """Wait until a server serves; see `Pool.open`."""
        self._drop()
        capabilities = await self._pool.open()
        self._tell_servers()
        return capabilities

    async def stop(self) -> None:
        """Drop everything."""
        self._drop()
        await self._pool.close()

    async def healthy(self) -> bool:
        """Whether a server takes work."""
        return bool(self._pool.serving)

    # requests

    def dispatch(
        self, server_id: int, requests: Sequence[EngineRequest], *, padded: bool, joining: bool
    ) -> list[TokenStream]:
        """Send each to that server, now. Raises ValueError where it was asked to pad."""
        del joining
        if padded:
            raise ValueError("got a padded batch; expected an unpadded one: the http engine")
        return [self._begin(self._pool.upstreams[server_id], each) for each in requests]

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Their connections are closed: the servers stop at once."""
        for request_id in request_ids:
            exchange = self._exchanges.pop(request_id, None)
            if exchange is not None:
                exchange.cancel()

    def known_prompt_tokens(self, fields: Mapping[str, msgspec.Raw], prompt: bytes) -> int | None:
        """See PassingEngine."""
        return self._prompts.known(fields, prompt, asks=self._pool.tokenizes)

    async def prompt_tokens(
        self, path: str, fields: Mapping[str, msgspec.Raw], prompt: bytes
    ) -> int:
        """See PassingEngine."""
        return await self._prompts.tokens(self._pool.tokenizing(), path, fields, prompt)

    async def relay(self, call: PassedCall) -> Refused:
        """See PassingEngine."""
        upstream = self._pool.first
        if upstream is None:
            raise ConnectionError("no server takes work")
        async with upstream.post(call.path, call.body, dict(call.headers)) as response:
            return Refused(status_of(response), kept(response.headers), await response.read())

    # exchanges

    def elsewhere(self, upstream: Upstream) -> bool:
        """See Around."""
        return bool(self._pool.serving - {upstream.id})

    def heard(self, call: PassedCall, answer: Answer, upstream: Upstream) -> None:
        """See Around: learn from it, and say once what is wrong with it."""
        end = answer.end
        if end.prompt_tokens is not None:
            self._prompts.ratio.learn(call.prompt_bytes, end.prompt_tokens)
        made = answer.tokens if end.output_tokens is None else end.output_tokens
        if not answer.has_usage and not answer.tokens:
            say_once(
                self._said,
                "usage",
                f"got an answer of {upstream.url}{call.path} without usage; expected "
                "usage.completion_tokens: its tokens count as 0 (said once)",
            )
        if call.most_tokens is not None and made > call.most_tokens:
            say_once(
                self._said,
                "limit",
                f"got {made} tokens of {upstream.url}{call.path}; expected at most "
                f"{call.most_tokens}, the limit that was sent: this server ignores it, and "
                "--max-output-tokens does not hold (said once)",
            )

    def _begin(
        self, upstream: Upstream, engine_request: EngineRequest, again: CountedStream | None = None
    ) -> TokenStream:
        """`again`: the stream of a request of the gateway's own that is sent in another form."""
        name, call = engine_request.request.id, engine_request.call
        stream: PassedStream | CountedStream
        if call is None:
            form, resend = self._own_form, partial(self._begin, upstream, engine_request)
            own = form.call(self._pool.names[0], engine_request, in_words=again is not None)
            stream = CountedStream(name, form, resend) if again is None else again
            stream.sent(own)
            call = own.passed
        else:
            stream = PassedStream(name)
        if engine_request.trace is not None:
            call = in_trace(call, engine_request.trace.handed_on(name))
        over = partial(self._over, name)
        self._exchanges[name] = Exchange(self, upstream, call, stream, over)
        return stream

    def _over(self, name: str, exchange: Exchange) -> None:
        if self._exchanges.get(name) is exchange:
            del self._exchanges[name]
        if exchange.upstream.leaving:
            self._remove_idle()

    def _drop(self) -> None:
        exchanges, self._exchanges = list(self._exchanges.values()), {}
        for exchange in exchanges:
            exchange.cancel()

    # servers

    def capabilities(self) -> Capabilities:
        """See PassingEngine."""
        return self._pool.capabilities()

    def servers(self) -> list[dict[str, Any]]:
        """See PassingEngine."""
        return [
            {
                "id": each.id,
                "url": each.url,
                "state": self._pool.state_of(each),
                "last_fault": each.last_fault,
            }
            for each in sorted(self._pool.upstreams.values(), key=lambda each: each.id)
        ]

    def serve_on(self, urls: Sequence[str]) -> None:
        """See PassingEngine."""
        self._pool.change(urls)
        self._tell_servers()
        self._remove_idle()

    def _remove_idle(self) -> None:
        """Servers that leave and have nothing in service."""
        used = {exchange.upstream.id for exchange in self._exchanges.values()}
        for upstream in list(self._pool.upstreams.values()):
            if upstream.leaving and upstream.id not in used:
                self._pool.remove(upstream)

    def _changed(self, upstream: Upstream, reason: str) -> None:
        """No work for it from here on, or again; what it had goes back or fails."""
        state = upstream.breaker
        word = "serves" if state.closed else "is busy" if state.busy else "is lost"
        log.warning("%s (%s) %s: %s", upstream.name, upstream.url, word, reason)
        self._tell_servers()
        if state.lost:
            for exchange in list(self._exchanges.values()):
                if exchange.upstream is upstream:
                    exchange.lose(f"{upstream.name} was lost ({reason})")
            if self._pool.lost and self.on_death is not None:
                self.on_death(f"no server is left; {upstream.name}: {reason}")

    def _tell_servers(self) -> None:
        if self.on_servers is not None:
            self.on_servers(self._pool.serving)
