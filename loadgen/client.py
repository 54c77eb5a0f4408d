"""One request over HTTP: sent, streamed, and written down as one record with one outcome.

aiohttp, because it takes the least processor time of the kept libraries (bench/client_library.py measures them side by
side). Nothing is retried, nothing times out by itself, and the number of connections has no limit: whatever the client
held back would be missing from the delay.
"""

from __future__ import annotations

import asyncio
import errno
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from loadgen.stream import Answer, StreamError, read_error
from loadgen.target import LoadError, Target, prompt_text
from queueing.record import Outcome, Record

__all__ = ["Exchange", "LoadError", "Target", "open_session", "prompt_text", "run_prefix", "served_model", "timing"]

READ_BUFFER_BYTES = 1 << 18
# seconds; servers close idle connections after 5 s (uvicorn's default) or more: a request sent into a closing one is lost
KEEPALIVE = 4.0


@asynccontextmanager
async def open_session(api_key: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that holds nothing back and gives up nothing by itself."""
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
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
    predicted_output_tokens: float | None = None
    sender_id: int | None = None
    token_times: bool = False
    sent_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float | None = None
    queueing_delay: float | None = None
    service_time: float | None = None
    outcome: Outcome = "cancelled"  # until something else is known
    error: str | None = "the run ended before it was sent"

    async def run(self, session: aiohttp.ClientSession, url: str) -> Record:
        """Send it, read the answer to its end; always a record, whatever happens. A cancellation is an outcome."""
        now = asyncio.get_running_loop().time
        answer = Answer(token_times=self.token_times)
        self.error = None
        self.sent_at = now()
        try:
            async with session.post(url, data=self.body, headers={"x-request-id": self.request_id}) as response:
                self.first_byte_at = now()
                self.queueing_delay = timing(response.headers, "queue")
                self.service_time = timing(response.headers, "service")
                await self._read(response, answer)
            self.ended_at = now()
        except asyncio.CancelledError:
            self.outcome, self.error = "cancelled", "the run ended before the answer did"
        except (aiohttp.ClientError, StreamError, OSError) as error:
            self.ended_at = now()
            self.outcome, self.error = "failed", _reason(error)
        return self.record(answer)

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

    def record(self, answer: Answer | None = None) -> Record:
        """What is known now; without an answer, of a request that was never sent."""
        answer = answer or Answer()
        done = self.outcome == "completed"
        counted = answer.output_tokens if answer.output_tokens is not None else answer.token_chunks
        return Record(
            request_id=self.request_id,
            outcome=self.outcome,
            batch_size=answer.batch_size,
            intended_at=self.intended_at,
            sent_at=self.sent_at,
            first_byte_at=self.first_byte_at,
            first_token_at=answer.first_token_at,
            last_token_at=answer.last_token_at,
            token_at=answer.token_at,
            released_at=self.ended_at,
            queueing_delay=self.queueing_delay if answer.queueing_delay is None else answer.queueing_delay,
            service_time=self.service_time if answer.service_time is None else answer.service_time,
            sojourn_time=self.ended_at - self.intended_at if done and self.ended_at is not None else None,
            prompt_tokens=self.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=counted,
            max_output_tokens=self.max_output_tokens,
            predicted_output_tokens=self.predicted_output_tokens,
            sender_id=self.sender_id,
            finish_reason=answer.finish_reason,
            error=self.error,
        )


_SERVER_TIMING = {part: re.compile(rf"(?:^|,)\s*{part}\s*;[^,]*dur=([0-9.eE+-]+)") for part in ("queue", "service")}


def timing(headers: Mapping[str, str], part: str) -> float | None:
    """Seconds that the server says it took for a part, queue or service; None where it says nothing."""
    text = headers.get("x-kendall-queueing-delay-ms") if part == "queue" else None
    if text is None and (match := _SERVER_TIMING[part].search(headers.get("server-timing", ""))):
        text = match[1]
    try:
        return None if text is None else float(text) / 1e3
    except ValueError:
        return None


def run_prefix() -> str:
    """A name for a run that no other has: two runs of one seed must not share request ids."""
    return f"load-{uuid.uuid4().hex[:8]}"


def _reason(error: BaseException) -> str:
    if getattr(error, "errno", None) == errno.EMFILE:
        return "no file descriptor left for another stream: raise `ulimit -n` or use --processes"
    return str(error) or type(error).__name__
