"""Calls that are passed on whole: what the gateway asks of an engine that has other servers behind
it, and what it hears of an answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from kendall.policies.core import Request
from kendall.policies.text import SpecError
from kendall.server.engines.capabilities import Capabilities, FailureCode, ServerSummary

_NAME = re.compile(r"(?!-)[\w-]{1,63}(?<!-)(\.(?!-)[\w-]{1,63}(?<!-))*\.?")
PROMPT_START = 16_384  # bytes: what prompts are compared by
SENDER = "x-kendall-gateway"  # whose probe it is
TRACE_HEADERS = ("traceparent", "tracestate")


class ProxiedCall(msgspec.Struct, frozen=True):
    """A call that is passed on as it came to another server."""

    path: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()  # of the client, without those of its connection
    prompt_bytes: int = 0  # of the values that make the prompt
    prompt_start: bytes = b""  # the first PROMPT_START of them
    most_tokens: int | None = None  # of the whole answer, where the call has a limit
    # body and most_tokens under a token limit of the gateway: those that are sent, once it is
    # dispatched
    under: Callable[[int | None], tuple[bytes, int | None]] | None = None
    model: str = ""  # that it asks for
    streams: bool = False  # it asks for events
    returned_by: tuple[int, ...] = ()  # servers that gave no answer, or one of no use
    failed_by: tuple[int, ...] = ()  # those of them that did not say that they were busy


def in_trace(call: ProxiedCall, trace: Mapping[str, str]) -> ProxiedCall:
    """The call with these trace headers in place of the client's own, where there are any."""
    if not trace:
        return call
    others = [header for header in call.headers if header[0] not in TRACE_HEADERS]
    return msgspec.structs.replace(call, headers=(*others, *trace.items()))


Cause = Literal["failed", "busy", "gone"]
"""Why a server returned a call.

failed  it may be its own fault: another server will tell
busy    it asked for time
gone    it is not there; it may have the call when it is back
"""


class Answered(msgspec.Struct, frozen=True):
    """How a passed call ended, as far as the other server said so."""

    finish_reason: str = "stop"  # the other server's; "length" where a token limit ended it
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt, that the other server had computed before


class Refused(msgspec.Struct, frozen=True):
    """The other server's answer with an error status, as it came."""

    status: int
    headers: Sequence[tuple[str, str]]  # bytes as Latin-1 has them
    body: bytes
    fault: str = ""  # what is wrong with one whose status is 200


class ProxiedListener(Protocol):
    """The receiver of the answer to a passed call: the gateway's sequence."""

    def on_head(self, headers: Sequence[tuple[str, str]], *, streamed: bool) -> None:
        """The answer begins; its status is 200. `streamed`: as events."""

    def on_bytes(self, data: bytes, tokens: int) -> Awaitable[None] | None:
        """More of the answer, and how many tokens these bytes hold. Returns what to wait for before
        more is read, where the client has enough to take.
        """

    def on_answered(self, end: Answered) -> None:
        """The answer is whole."""

    def on_refused(self, answer: Refused) -> None:
        """An answer with an error status, whole."""

    def on_returned(
        self,
        reason: str,
        answer: Refused | None = None,
        code: FailureCode = "engine_unavailable",
        *,
        cause: Cause = "failed",
    ) -> None:
        """No answer came, or one that another server may better: the call may be dispatched
        again, elsewhere. Where it was before, `answer` is the client's, or it fails with this
        code.
        """


class Silence(Protocol):
    """How long nothing may come of a call."""

    least: float
    """Seconds: of every call."""

    def seconds(
        self, request: Request, beside: int, *, limited: bool, streams: bool, flows: bool
    ) -> float:
        """Of one in service with so many on its server, itself counted. `limited`: it has a token
        limit; `streams`: it is answered by events; `flows`: one came.
        """

    def learn(self, seconds: float, tokens: int) -> None:
        """An answer of so many tokens took so long."""


@runtime_checkable
class ProxyingEngine(Protocol):
    """An engine that passes whole calls on to other servers."""

    async def relay(self, call: ProxiedCall) -> Refused:
        """The answer to a call that needs no engine, whatever its status. Raises OSError."""

    sender: str
    """What its probes have in the header `SENDER`: whoever receives it is itself."""

    on_servers: Callable[[frozenset[int]], None] | None
    """Called with the servers that take work, each time that they change."""

    on_room: Callable[[int, int | None], None] | None
    """Called with a server and how many sequences it gets at once; None: as many as it serves."""

    silence_of: Silence | None
    """None: without end."""

    def capabilities(self) -> Capabilities:
        """The least capabilities of the servers that are to serve, and how many there are."""

    def servers(self) -> list[ServerSummary]:
        """With URL and last fault."""

    def serve_on(self, urls: Sequence[str]) -> None:
        """The servers at these URLs are to serve, and no others: new ones get work once they
        answer, removed ones end what they have. Raises ValueError where none would get work.
        """

    def known_prompt_tokens(self, fields: Mapping[str, msgspec.Raw], prompt: bytes) -> int | None:
        """The same as `prompt_tokens`, at once; None where a server or a tokenizer must count."""

    async def prompt_tokens(
        self, path: str, fields: Mapping[str, msgspec.Raw], prompt: bytes
    ) -> int:
        """Count, or estimate, the tokens of a call's prompt."""


def server_urls(urls: Sequence[str], name: str = "--engine-url") -> list[str]:
    """The roots of several servers, each once. Raises SpecError."""
    return each_once([server_url(url, name) for url in urls], name)


def each_once(roots: Sequence[str], name: str) -> list[str]:
    """The roots of several servers. Raises SpecError where two are one."""
    places = [root.replace("//localhost", "//127.0.0.1", 1) for root in roots]
    counts = Counter(places)
    if repeated := next(
        (root for root, place in zip(roots, places, strict=True) if counts[place] > 1), None
    ):
        raise SpecError(f"got {name} {repeated} twice; expected each server once")
    return list(roots)


def server_url(url: str, name: str = "--engine-url") -> str:
    """The server's root. `name`: the option that gave it. Raises SpecError."""
    shown = url.rpartition("@")[2]  # without a password
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not _is_host(host) or port == 0 or parts.scheme not in ("http", "https"):
        raise SpecError(
            f"got {name} {shown!r}; expected http:// or https://, a host and a port, "
            f"for example {name} http://localhost:8000"
        )
    if parts.username is not None:
        raise SpecError(
            f"got {name} {shown!r} with a user name before it; expected a key by --engine-api-key"
        )
    if parts.query or parts.fragment or any(map(str.isspace, url)):
        raise SpecError(
            f"got {name} {shown!r}; expected no query, no fragment and no blanks: the root of a "
            f"server, for example {name} http://localhost:8000"
        )
    root = parts._replace(scheme=parts.scheme.lower(), netloc=parts.netloc.lower())
    return root.geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def _is_host(host: str) -> bool:
    """An address in its usual form, or a name."""
    try:
        return bool(ip_address(host.partition("%")[0]))
    except ValueError:
        last = host.rstrip(".").rpartition(".")[2]
        return len(host) < 256 and bool(_NAME.fullmatch(host)) and not last.isdecimal()
