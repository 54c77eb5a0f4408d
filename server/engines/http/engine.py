"""Servers with OpenAI's API as one engine: each is one server of the queue. Calls are passed on as
they came; nothing is padded, and no answer that began is continued elsewhere.

A server that fails gets no work until it answers a probe again; its calls without an answer go back
to the queue, the others fail. With none left the engine is lost, and starting it again is waiting
for one. One that fails calls and answers probes is put aside (`standing`). A call of which nothing
comes for too long is given up, once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    Sampling,
    Step,
    TokenStream,
    UnsupportedError,
)
from kendall.server.engines.capabilities import ServerSummary
from kendall.server.engines.http.answers import UpstreamAnswer
from kendall.server.engines.http.exchange import BESIDE, UpstreamExchange, kept
from kendall.server.engines.http.own_calls import OwnForm
from kendall.server.engines.http.pool import HttpOptions, UpstreamPool, say_once
from kendall.server.engines.http.prompts import PromptCounter, load_tokenizer
from kendall.server.engines.http.stream import CountedStream, PassedStream
from kendall.server.engines.http.upstream import (
    LOST,
    Connect,
    Upstream,
    bounded,
    connector,
    status_of,
)
from kendall.server.engines.proxied import ProxiedCall, Refused, Silence, in_trace
from kendall.server.runtime.background import going_on

log = logging.getLogger("kendall.engine")
LOOK_EVERY = 1.0  # seconds between two looks at what is in service
# statuses of 400 to 499 that may be a server's own: its key, its models, its load
OF_THE_SERVER = (401, 403, 404, 405, 407, 408, 421, 425)
REFUSALS = 1  # other ones in a row, without a good answer, after which another server is asked too
RELAYED = 30.0  # seconds for the answer to a call that needs no engine
PER_BYTE = 32  # bytes of such an answer for each of the call: token ids and their texts
NO_TOKENS = "the http engine reads no prompts; the servers behind it do"


def _own_fault(status: int) -> bool:
    """Whether another server may answer with another status."""
    return status in OF_THE_SERVER or not (status == 200 or 400 <= status < 500)


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

    tells_of_its_start = True  # for which server it waits

    def __init__(self, options: HttpOptions, connect: Connect = connector) -> None:
        self.on_step: Callable[[Step], None] | None = None  # never called: steps are not seen
        self.on_death: Callable[[str], None] | None = None
        self.on_servers: Callable[[frozenset[int]], None] | None = None
        self.on_room: Callable[[int, int | None], None] | None = None
        self.silence_of: Silence | None = None
        self.held = 0
        tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        self._prompts = PromptCounter(tokenizer)
        self._own_form = OwnForm()
        self._pool = UpstreamPool(options, self._changed, self._tell_room, connect)
        self.sender = self._pool.sender
        self._exchanges: dict[str, UpstreamExchange] = {}
        self._said: set[str] = set()  # what is said once
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> Capabilities:
        """Wait until a server serves; see `UpstreamPool.open`."""
        self._drop()
        capabilities = await self._pool.open()
        self._tell_servers()
        for upstream in self._pool.upstreams.values():
            self._tell_room(upstream)
        if self._looking is None:
            looking = going_on("the check for silent calls", self._look)
            self._looking = asyncio.create_task(looking, name="silent-calls")
        return capabilities

    async def stop(self) -> None:
        """Drop everything."""
        self._drop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None
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
        """See ProxyingEngine."""
        return self._prompts.known(fields, prompt, asks=self._pool.tokenizes)

    async def prompt_tokens(
        self, path: str, fields: Mapping[str, msgspec.Raw], prompt: bytes
    ) -> int:
        """See ProxyingEngine."""
        return await self._prompts.tokens(self._pool.tokenizing(), path, fields, prompt)

    async def relay(self, call: ProxiedCall) -> Refused:
        """See ProxyingEngine."""
        last: Refused | OSError = ConnectionError("no server takes work")
        for server_id in sorted(self._pool.serving)[:2]:
            try:
                last = await self._relayed(self._pool.upstreams[server_id], call)
            except LOST as error:
                last = ConnectionError(str(error))
            else:
                if not _own_fault(last.status):
                    return last
        if isinstance(last, OSError):
            raise last
        return last

    async def _relayed(self, upstream: Upstream, call: ProxiedCall) -> Refused:
        """Raises LOST."""
        most = BESIDE + PER_BYTE * len(call.body)
        async with (
            asyncio.timeout(RELAYED),
            upstream.post(call.path, call.body, call.headers) as response,
        ):
            body = await bounded(response, most)
            return Refused(status_of(response), kept(response.raw_headers), body)

    # exchanges

    def elsewhere(self, upstream: Upstream) -> bool:
        """See ExchangeCallbacks."""
        return bool(self._pool.serving - {upstream.id})

    @property
    def context(self) -> int:
        """See ExchangeCallbacks."""
        return self._pool.context

    def refused(self, upstream: Upstream, status: int) -> bool:
        """See ExchangeCallbacks. What most servers would answer is the client's at once."""
        if 400 <= status < 500:
            upstream.standing.refusals += 1
        own = _own_fault(status) or upstream.standing.refusals > REFUSALS
        return own and self.elsewhere(upstream)

    def breaks_off(self, upstream: Upstream) -> bool:
        """See ExchangeCallbacks."""
        return upstream.standing.breaks_off and self.elsewhere(upstream)

    def failed(self, upstream: Upstream) -> None:
        """See ExchangeCallbacks."""
        self._pool.failed(upstream)

    def too_long(self, exchange: UpstreamExchange, silent: float) -> bool:
        """See ExchangeCallbacks."""
        limits = self.silence_of
        if limits is None or silent <= limits.least:
            return False
        return silent > limits.seconds(
            exchange.request,
            sum(each.upstream is exchange.upstream for each in self._exchanges.values()),
            limited=exchange.call.most_tokens is not None,
            streams=exchange.streams,
            flows=exchange.flows,
        )

    def heard(
        self, call: ProxiedCall, answer: UpstreamAnswer, upstream: Upstream, seconds: float
    ) -> None:
        """See ExchangeCallbacks: learn from it, and say once what is wrong with it."""
        end = answer.end
        self._pool.served(upstream, call.failed_by)
        if end.prompt_tokens is not None:
            self._prompts.ratio.learn(call.prompt_bytes, end.prompt_tokens)
        made = answer.tokens if end.output_tokens is None else end.output_tokens
        if self.silence_of is not None:
            self.silence_of.learn(seconds, made)
        if not answer.has_usage and not answer.tokens and answer.unbelieved is None:
            say_once(
                self._said,
                "usage",
                f"got an answer of {upstream.url}{call.path} without usage; expected "
                "usage.completion_tokens: its tokens count as 0 (said once)",
            )
        if answer.unbelieved is not None:
            say_once(
                self._said,
                "unbelieved",
                f"got {answer.unbelieved!r:.40} tokens in the usage of an answer of {answer.size} "
                f"bytes of {upstream.url}{call.path}; expected a count that can be true: the "
                "limit, or what was counted, is taken (said once)",
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
        over, request = partial(self._over, name), engine_request.request
        self._exchanges[name] = UpstreamExchange(
            self, upstream, call, request, back=stream, on_over=over
        )
        return stream

    def _over(self, name: str, exchange: UpstreamExchange) -> None:
        if self._exchanges.get(name) is exchange:
            del self._exchanges[name]
        if exchange.upstream.leaving:
            self._remove_idle()

    async def _look(self) -> None:
        """At each call in service, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self._look_at_each()

    def _look_at_each(self) -> None:  # a function: the task holds none of them meanwhile
        for exchange in list(self._exchanges.values()):
            exchange.look()

    def _drop(self) -> None:
        exchanges, self._exchanges = list(self._exchanges.values()), {}
        for exchange in exchanges:
            exchange.cancel()

    # servers

    def capabilities(self) -> Capabilities:
        """See ProxyingEngine."""
        return self._pool.capabilities()

    def servers(self) -> list[ServerSummary]:
        """See ProxyingEngine."""
        return [
            ServerSummary(
                id=each.id,
                url=each.url,
                state=self._pool.state_of(each),
                last_fault=each.last_fault,
            )
            for each in sorted(self._pool.upstreams.values(), key=lambda each: each.id)
        ]

    def serve_on(self, urls: Sequence[str]) -> None:
        """See ProxyingEngine."""
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
        words = {"serving": "serves", "put aside": "is put aside", "busy": "is busy"}
        word = words.get(self._pool.state_of(upstream), "serves" if state.closed else "is lost")
        log.warning("%s (%s) %s: %s", upstream.name, upstream.url, word, reason)
        self._tell_room(upstream)
        self._tell_servers()
        self._pool.recall()
        if state.lost:
            for exchange in list(self._exchanges.values()):
                if exchange.upstream is upstream:
                    exchange.lose(f"{upstream.name} was lost ({reason})")
            if self._pool.lost and self.on_death is not None:
                self.on_death(f"no server is left; {upstream.name}: {reason}")

    def _tell_room(self, upstream: Upstream) -> None:
        if self.on_room is not None:
            self.on_room(upstream.id, upstream.standing.room)

    def _tell_servers(self) -> None:
        if self.on_servers is not None:
            self.on_servers(self._pool.serving)
