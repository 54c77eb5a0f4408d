"""One request over HTTP: sent, streamed, and written down as one record with one outcome.

aiohttp, because a streamed token costs it 40 us where httpx takes 119-213. Nothing is retried, nothing times out by
itself, and the number of connections has no limit: whatever the client held back would be missing from the delay.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from loadgen.stream import Answer, StreamError, read_error
from loadgen.timetable import IntArray
from queueing.record import Outcome, Record

READ_BUFFER_BYTES = 1 << 18
_QUEUE_TIMING = re.compile(r"(?:^|,)\s*queue\s*;[^,]*dur=([0-9.eE+-]+)")


class LoadError(RuntimeError):
    """The run cannot begin; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the load goes and in what form."""

    base_url: str
    model: str
    max_tokens: int | None = None  # the same for all; None: the largest drawn length
    chat: bool = False
    ignore_eos: bool = False  # for servers without the sealed field: max_tokens is the drawn length
    api_key: str | None = None

    @property
    def url(self) -> str:
        """The endpoint."""
        return self.base_url.rstrip("/") + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, prompt: IntArray, output_tokens: int, max_tokens: int, seed: int) -> bytes:
        """JSON of one request; only the sealed field tells two lengths apart."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": seed,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt_text(prompt)}]
        else:
            body["prompt"] = prompt.tolist()
        if self.ignore_eos:
            body["max_tokens"], body["ignore_eos"] = output_tokens, True
        else:
            body["max_tokens"], body["kendall_forced_output_tokens"] = max_tokens, output_tokens
        return msgspec.json.encode(body)


def prompt_text(prompt: IntArray) -> str:
    """Text of about as many tokens for a chat: single letters, one to a token in most vocabularies."""
    return " ".join(np.array(list("abcdefghijklmnopqrstuvwxyz"))[prompt % 26].tolist())


@asynccontextmanager
async def open_session(api_key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that holds nothing back and gives up nothing by itself."""
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        read_bufsize=READ_BUFFER_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield session


async def served_model(base_url: str, api_key: str | None = None) -> str:
    """The first model that the server names. Raises LoadError where nobody answers."""
    url = base_url.rstrip("/") + "/v1/models"
    try:
        async with open_session(api_key) as session, session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            body = await response.read()
            if response.status != 200:
                raise LoadError(f"{url} answered {response.status}: {read_error(body)[1]}")
            return str(msgspec.json.decode(body)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(f"no answer from {url} ({_reason(error)}); is the server up, is --base-url right?") from None
    except (msgspec.MsgspecError, LookupError, TypeError):
        raise LoadError(f"{url} names no model; give --model") from None


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request on its way: what is known of it before, during and after."""

    request_id: str
    intended_at: float
    body: bytes
    prompt_tokens: int
    max_output_tokens: int
    sent_at: float | None = None
    ended_at: float | None = None
    queueing_delay: float | None = None
    outcome: Outcome = "cancelled"  # until something else is known
    error: str | None = None

    async def run(self, session: aiohttp.ClientSession, url: str) -> Record:
        """Send it, read the answer to its end; always a record, whatever happens. A cancellation is an outcome."""
        now = asyncio.get_running_loop().time
        answer = Answer()
        self.sent_at = now()
        try:
            async with session.post(url, data=self.body, headers={"x-request-id": self.request_id}) as response:
                self.request_id = response.headers.get("x-request-id", self.request_id)
                self.queueing_delay = queueing_delay(response.headers)
                await self._read(response, answer)
            self.ended_at = now()
        except asyncio.CancelledError:
            self.outcome, self.error = "cancelled", "the run ended before the answer did"
        except (aiohttp.ClientError, StreamError, OSError) as error:
            self.ended_at = now()
            self.outcome, self.error = "failed", _reason(error)
        return self._record(answer)

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        if response.status != 200:
            code, self.error = read_error(await response.read())
            self.outcome = "failed"
            if response.status in (429, 503):
                self.outcome = "abandoned" if code == "queue_timeout" else "rejected"
            self.error = f"{response.status} {self.error}"
            return
        now = asyncio.get_running_loop().time
        async for data in response.content.iter_any():
            answer.feed(data, now())
        if not answer.complete:
            raise StreamError("the stream broke off before its end")
        if answer.finish_reason in ("abort", "error"):
            raise StreamError(f"the server ended the answer with finish_reason {answer.finish_reason!r}")
        self.outcome = "completed"

    def _record(self, answer: Answer) -> Record:
        done = self.outcome == "completed"
        counted = answer.output_tokens if answer.output_tokens is not None else answer.token_chunks
        return Record(
            request_id=self.request_id,
            outcome=self.outcome,
            batch_size=answer.batch_size,
            intended_at=self.intended_at,
            sent_at=self.sent_at,
            first_token_at=answer.first_token_at,
            last_token_at=answer.last_token_at,
            released_at=self.ended_at,
            queueing_delay=self.queueing_delay,
            service_time=answer.service_time,
            sojourn_time=self.ended_at - self.intended_at if done and self.ended_at is not None else None,
            prompt_tokens=self.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=counted,
            max_output_tokens=self.max_output_tokens,
            finish_reason=answer.finish_reason,
            error=self.error,
        )


def queueing_delay(headers: Mapping[str, str]) -> float | None:
    """Seconds that the gateway says this request waited; None where it says nothing."""
    text = headers.get("x-kendall-queueing-delay-ms")
    if text is None and (match := _QUEUE_TIMING.search(headers.get("server-timing", ""))):
        text = match[1]
    try:
        return None if text is None else float(text) / 1e3
    except ValueError:
        return None


def run_prefix() -> str:
    """A name for a run that no other has: two runs of one seed must not share request ids."""
    return f"load-{uuid.uuid4().hex[:8]}"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
