"""What does a client library cost? aiohttp, httpx, httpcore, and what Kendall has instead
(httptools, loadgen/sending/client/wire.py).

All read the same answers of the same server (a child that writes server-sent events by hand) in one
run, in turn, eight streams at a time, connections kept open. Two lengths of answers give two
numbers:

    per token    (time with LONG tokens - time with one) / (LONG - 1)
    per request  time with one token

in microseconds of the client's processor time, median of the rounds. Every token comes in a write
of its own, as a gateway sends them. A third number is the closest that one sender can bring two
requests: the time from the decision to send one until the loop is free for the next, with the bytes
of the first handed to the kernel. The libraries' answers are only read; Kendall's row also parses
the events and makes the record.

    .venv/bin/python bench/client_library.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpcore
import httpx

from loadgen.gateway.gateway_process import free_port
from loadgen.sending.client.client import LoadExchange
from loadgen.sending.client.pool import ConnectionPool
from loadgen.sending.client.wire import Address
from loadgen.sending.operating_system import real_time_scheduling
from queueing.measurement.machine import hardware, versions

LONG = 51
STREAMS = 8
TOKEN = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
)
END = (
    TOKEN.replace(b"null}", b'"length"}')
    + b'data: {"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Post = Callable[[bytes], Awaitable[None]]
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
BODY = {
    "model": "m",
    "stream": True,
    "prompt": list(range(10, 42)),
    "stream_options": {"include_usage": True},
}


def framed(data: bytes) -> bytes:
    """One chunk of a chunked answer."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every request of a connection with as many tokens as its body's `max_tokens` says."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            tokens = json.loads(await reader.readexactly(size))["max_tokens"]
            writer.write(HEAD)
            for _ in range(tokens - 1):
                writer.write(framed(TOKEN))
                await asyncio.sleep(0.0005)  # a write of its own
            writer.write(framed(END) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def server(port: int) -> None:
    """The child."""
    async with await asyncio.start_server(serve_one, "127.0.0.1", port) as listening:
        await listening.serve_forever()


@asynccontextmanager
async def with_aiohttp(url: str) -> AsyncIterator[Post]:
    """Without limits or timeouts, cookies or decompression."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=HEADERS,
        read_bufsize=1 << 18,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:

        async def post(body: bytes) -> None:
            async with session.post(url, data=body, headers={"x-request-id": "a"}) as response:
                async for _ in response.content.iter_any():
                    pass

        yield post


@asynccontextmanager
async def with_wire(url: str) -> AsyncIterator[Post]:
    """The load generator's own request, its answer read and recorded."""
    loop = asyncio.get_running_loop()
    async with ConnectionPool(Address(url, HEADERS)) as pool:

        async def post(body: bytes) -> None:
            over = loop.create_future()
            exchange = LoadExchange(
                request_id="a",
                intended_at=0.0,
                message=pool.address.message(body, "a"),
                prompt_tokens=1,
                max_output_tokens=1,
                ended=over.set_result,
            )
            connection = pool.take() or await pool.connect()
            exchange.begin(loop.time())
            exchange.send(connection)
            record = (await over).record()
            assert record.outcome == "completed", record.error

        yield post


@asynccontextmanager
async def with_httpx(url: str) -> AsyncIterator[Post]:
    """Without limits or timeouts."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, headers=HEADERS) as client:

        async def post(body: bytes) -> None:
            async with client.stream(
                "POST", url, content=body, headers={"x-request-id": "a"}
            ) as response:
                async for _ in response.aiter_raw():
                    pass

        yield post


@asynccontextmanager
async def with_httpcore(url: str) -> AsyncIterator[Post]:
    """The layer below httpx."""
    async with httpcore.AsyncConnectionPool(
        max_connections=None, max_keepalive_connections=None
    ) as pool:

        async def post(body: bytes) -> None:
            headers = [*HEADERS.items(), ("x-request-id", "a")]
            async with pool.stream("POST", url, content=body, headers=headers) as response:
                async for _ in response.aiter_stream():
                    pass

        yield post


LIBRARIES = {
    "aiohttp": with_aiohttp,
    "httpcore": with_httpcore,
    "httpx": with_httpx,
    "httptools, as Kendall": with_wire,
}


def processor_time() -> float:
    """Seconds of this process so far, in user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def cost(post: Post, tokens: int, requests: int) -> float:
    """Processor seconds per request."""
    body = json.dumps({**BODY, "max_tokens": tokens}).encode()

    async def stream(count: int) -> None:
        for _ in range(count):
            await post(body)

    await asyncio.gather(*(stream(2) for _ in range(STREAMS)))  # connections are open
    before = processor_time()
    await asyncio.gather(*(stream(requests // STREAMS) for _ in range(STREAMS)))
    return (processor_time() - before) / (requests // STREAMS * STREAMS)


async def closest(post: Post, pairs: int = 200) -> float:
    """Seconds between the first steps of two requests that are sent together."""
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    now, gaps = asyncio.get_running_loop().time, []

    async def timed(begins: list[float]) -> None:
        begins.append(now())
        await post(body)

    # as senders are; else the server that is woken by the first may take the processor from the
    # second
    with real_time_scheduling():
        for _ in range(pairs):
            begins: list[float] = []
            await asyncio.gather(timed(begins), timed(begins))
            gaps.append(begins[1] - begins[0])
    return statistics.median(gaps)


async def measure(url: str, rounds: int, requests: int) -> dict[str, tuple[float, ...]]:
    """Microseconds per request, per token and between two requests, by library."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in LIBRARIES}
    for _ in range(rounds):
        for name, opened in LIBRARIES.items():
            async with opened(url) as post:
                one, many = (
                    await cost(post, 1, requests),
                    await cost(post, LONG, max(requests // 8, STREAMS)),
                )
                found[name].append(
                    (one * 1e6, (many - one) / (LONG - 1) * 1e6, await closest(post) * 1e6)
                )
    return {
        name: tuple(map(statistics.median, zip(*rounds_, strict=True)))
        for name, rounds_ in found.items()
    }


async def ready(port: int) -> None:
    """Return once the child listens."""
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.05)
    raise TimeoutError("the server did not start")


async def run(arguments: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """Start the child, measure, end it."""
    port = free_port(0)
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", str(port))
    try:
        await ready(port)
        return await measure(
            f"http://127.0.0.1:{port}/v1/completions", arguments.rounds, arguments.requests
        )
    finally:
        child.terminate()
        await child.wait()


def main() -> None:
    """Print the table; JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(server(arguments.serve))
        return
    found = asyncio.run(run(arguments))
    request, token, _ = found["aiohttp"]
    print(
        f"{'':24}{'us/request':>11}{'of aiohttp':>11}"
        f"{'us/token':>10}{'of aiohttp':>11}{'us apart':>10}"
    )
    for name, (per_request, per_token, apart) in found.items():
        print(
            f"{name:24}{per_request:11.0f}{per_request / request:10.2f}x"
            f"{per_token:10.1f}{per_token / token:10.2f}x{apart:10.0f}"
        )
    if arguments.json:
        names = {
            "aiohttp": aiohttp.__version__,
            "httpx": httpx.__version__,
            "httpcore": httpcore.__version__,
        }
        arguments.json.write_text(
            json.dumps(
                {"found": found, "versions": versions() | names, "hardware": hardware()}, indent=1
            )
        )


if __name__ == "__main__":
    main()
