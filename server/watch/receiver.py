"""The port to which servers send their spans: OpenTelemetry's protocol over HTTP (protobuf at `POST
/v1/traces`, gzip or not) and over gRPC, told apart by the first bytes of a connection.

Whoever reaches the port may send anything: a body is refused at LARGEST_BODY bytes, compressed or
not, and read for SLOWEST seconds at most; all that are read at once share MOST_BYTES; what is
refused is counted by its reason. Messages over gRPC must come uncompressed, which is how vLLM sends
them: the library would decompress one whole.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.server.watch.spans import MalformedExportError, RequestSpan, parser, requests_of

log = logging.getLogger("kendall.watch")
LARGEST_BODY = 8 << 20  # bytes of an export
MOST_BYTES = 4 * LARGEST_BODY  # of all exports that are read at once
MOST_CONNECTIONS = 256
SLOWEST = 10.0  # seconds in which a body comes
PIECE = 1 << 16  # bytes that are decompressed at once
PATH = "/v1/traces"
PROTOBUF = "application/x-protobuf"
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PREFACE = b"PRI * HTTP/2.0"  # a connection that begins so speaks gRPC
STOPPED = 2.0  # seconds that open connections have at the end
REFUSED = {
    "not_found": (404, "a path or method other than POST /v1/traces"),
    "not_protobuf": (415, "a body that is not application/x-protobuf, or not of gzip"),
    "too_large": (413, f"a body of more than {LARGEST_BODY} bytes, compressed or not"),
    "too_many": (503, "more bodies at once than there is room for"),
    "too_slow": (408, f"a body that took longer than {SLOWEST:g} s"),
    "malformed": (400, "a body that is no export of spans"),
}


class _RefusedError(Exception):
    """`args[0]`: a reason of REFUSED."""


@dataclass(slots=True)
class Received:
    """What came so far: requests, spans that are none by reason, and exports refused by reason."""

    requests: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


OnRequest = Callable[[RequestSpan], str | None]
"""Takes one request; returns the reason why it cannot be used, or None."""


class SpanReceiver:
    """An ASGI application, and what both protocols share."""

    def __init__(self, on_request: OnRequest) -> None:
        self._on_request = on_request
        self.received = Received()
        self._held = 0  # bytes
        parser()  # raises where it is not installed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HTTP."""
        if scope["type"] != "http":
            return
        status = 200
        try:
            body = await asyncio.wait_for(self._body(scope, receive), SLOWEST)
            self.take(body, (scope.get("client") or ("unknown", 0))[0])
        except (_RefusedError, TimeoutError) as error:
            reason = "too_slow" if isinstance(error, TimeoutError) else error.args[0]
            self.received.refused[reason] += 1
            status = REFUSED[reason][0]
        except ClientDisconnect:
            self.received.refused["malformed"] += 1
            return
        # what is left of a refused body is not read
        headers = {"content-type": PROTOBUF} | ({} if status == 200 else {"connection": "close"})
        await Response(status_code=status, headers=headers)(scope, receive, send)

    def take(self, body: bytes, peer: str) -> None:
        """One export. Raises _RefusedError, after the spans before its fault."""
        try:
            for found in requests_of(body, peer):
                reason = found if isinstance(found, str) else self._on_request(found)
                if reason is None:
                    self.received.requests += 1
                else:
                    self.received.ignored[reason] += 1
        except MalformedExportError as error:
            log.debug("an export of %s cannot be read: %s", peer, error)
            raise _RefusedError("malformed") from None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Whole, decompressed."""
        if (scope["method"], scope["path"]) != ("POST", PATH):
            raise _RefusedError("not_found")
        headers = {name.lower(): value for name, value in scope["headers"]}
        encoding = headers.get(b"content-encoding", b"identity")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip()
        if kind != PROTOBUF.encode() or encoding not in (b"identity", b"gzip"):
            raise _RefusedError("not_protobuf")
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > LARGEST_BODY:
            raise _RefusedError("too_large")
        held = 0
        try:
            body, more = bytearray(), True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                held = self._hold(len(body), held)
            return decompressed(body) if encoding == b"gzip" else bytes(body)
        finally:
            self._held -= held

    def _hold(self, size: int, held: int) -> int:
        if size > LARGEST_BODY:
            raise _RefusedError("too_large")
        if self._held - held + size > MOST_BYTES:
            raise _RefusedError("too_many")
        self._held += size - held
        return size


def decompressed(body: bytes | bytearray) -> bytes:
    """What was gzipped, if it is no longer than a body may be. Raises _RefusedError."""
    unzip, whole = zlib.decompressobj(wbits=31), bytearray()
    rest: bytes | bytearray = body
    try:
        while rest and not unzip.eof:
            whole += unzip.decompress(rest, PIECE)
            rest = unzip.unconsumed_tail
            if len(whole) > LARGEST_BODY:
                raise _RefusedError("too_large")
        whole += unzip.flush(PIECE)
    except zlib.error:
        raise _RefusedError("malformed") from None
    if not unzip.eof or len(whole) > LARGEST_BODY:
        raise _RefusedError("malformed")
    return bytes(whole)


class _Tunnel(asyncio.Protocol):
    """One end of a connection, whose bytes are handed on to the other end."""

    def __init__(
        self,
        other: asyncio.Transport,
        on_lost: Callable[[Exception | None], None] | None = None,
    ) -> None:
        self._other, self._on_lost = other, on_lost

    def data_received(self, data: bytes) -> None:
        """From this end."""
        self._other.write(data)

    def pause_writing(self) -> None:
        """This end is slow."""
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        if not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """So is the other end."""
        self._other.close()
        if self._on_lost is not None:
            self._on_lost(error)


class OtlpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which hands a connection that begins as gRPC's do on to a socket."""

    grpc_socket: Path | None = None
    _first: bytes | None = b""

    def data_received(self, data: bytes) -> None:
        """Of either; the first bytes tell."""
        if self._first is None or self.grpc_socket is None:
            super().data_received(data)
            return
        self._first += data
        if len(self._first) < len(PREFACE) and PREFACE.startswith(self._first):
            return
        first, self._first = self._first, None
        if not first.startswith(PREFACE):
            super().data_received(first)
            return
        self.transport.pause_reading()
        task = self.loop.create_task(self._hand_on(first, self.grpc_socket))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _hand_on(self, first: bytes, path: Path) -> None:
        outside = self.transport
        try:
            inside, _ = await self.loop.create_unix_connection(lambda: _Tunnel(outside), str(path))
        except OSError:
            outside.close()
            return
        outside.set_protocol(_Tunnel(inside, self.connection_lost))
        inside.write(first)
        if not outside.is_closing():
            outside.resume_reading()


def address(text: str) -> tuple[str, int]:
    """Of HOST:PORT or :PORT, which is every address of the machine. Raises SpecError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not int(port) < 1 << 16:
        raise SpecError(f"got --otlp {text}; expected HOST:PORT or :PORT, for example :4318")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)


class Listener:
    """The port, open from `start` to `stop`."""

    def __init__(self, receiver: SpanReceiver, where: str) -> None:
        self._receiver = receiver
        self._where = where
        self._host, self._port = address(where)
        self._folder = tempfile.TemporaryDirectory(prefix="kendall-otlp-")
        self._grpc: Any = None
        self._serving: asyncio.Task[None] | None = None
        self.without_grpc: str | None = None  # why gRPC is not served

    @property
    def port(self) -> int:
        """In use."""
        return self._port

    async def start(self) -> None:
        """Raises CommandError where the address cannot be had."""
        path = Path(self._folder.name) / "grpc"
        try:
            self._grpc = await _grpc_server(self._receiver, path)
        except ImportError:
            self.without_grpc = (
                "got no package grpcio: only http/protobuf is received; start vLLM with "
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, or pip install grpcio"
            )
        config = uvicorn.Config(
            self._receiver,
            http=type(
                "OtlpProtocol",
                (OtlpProtocol,),
                {"grpc_socket": None if self._grpc is None else path},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=int(STOPPED),
        )
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self._host, self._port))
        except OSError as error:
            listening.close()
            await self.stop()
            raise CommandError(
                f"got --otlp {self._where}, which cannot be listened on "
                f"({error.strerror or error}); expected a free port of this machine"
            ) from None
        self._port = listening.getsockname()[1]
        self._server = QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def stop(self) -> None:
        """Within seconds."""
        if self._serving is not None:
            self._server.should_exit = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._serving, 2 * STOPPED)
        if self._grpc is not None:
            await self._grpc.stop(STOPPED)
        self._folder.cleanup()


def set_by_signal() -> asyncio.Event:
    """Once the process is asked to end. Its signals stay as they are where they cannot be had."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
            loop.add_signal_handler(number, ended.set)
    return ended


class QuietServer(uvicorn.Server):
    """Signals are the command's."""

    def capture_signals(self) -> Any:
        """None."""
        return nullcontext()


async def _grpc_server(receiver: SpanReceiver, path: Path) -> Any:
    """Raises ImportError."""
    import grpc  # noqa: PLC0415 - comes with vLLM

    async def export(body: bytes, context: Any) -> bytes:
        try:
            receiver.take(body, _peer(context))
        except _RefusedError as error:
            receiver.received.refused[error.args[0]] += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, REFUSED[error.args[0]][1])
        return b""

    class Exports(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            if details.method != METHOD:
                receiver.received.refused["not_found"] += 1
                return None
            return grpc.unary_unary_rpc_method_handler(export)

    server = grpc.aio.server(
        maximum_concurrent_rpcs=MOST_BYTES // LARGEST_BODY,
        options=[
            ("grpc.max_receive_message_length", LARGEST_BODY),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none
        ],
    )
    server.add_generic_rpc_handlers((Exports(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


def _peer(context: Any) -> str:
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith("ipv") else "grpc"


def reasons(counts: Mapping[str, int], words: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each reason, the most frequent first."""
    for reason, count in sorted(counts.items(), key=lambda each: -each[1]):
        yield f"{count} {words.get(reason, reason)}"
