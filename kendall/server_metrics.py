"""One reading of a server's `/metrics`, with bounds: for whoever measures a server from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from kendall.queueing.measurement.server_signals import SERVERS, ServerCounters
from kendall.remote import SYSTEM, Trust, server_root, unanswered

ANSWER_LIMIT = 5.0  # seconds for one reading
LONGEST = 16 << 20  # bytes of one reading


class NoMetricsError(Exception):
    """There was no answer with metrics within the bounds; the message says why."""


async def read_counters(
    url: str, key: str | None = None, trust: Trust = SYSTEM, limit: float = ANSWER_LIMIT
) -> ServerCounters | str:
    """The server's counters; a sentence where there are none. Raises nothing."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        text = await metrics_of(url, headers, trust, limit)
    except NoMetricsError as error:
        return str(error)
    named = ", ".join(each.name for each in SERVERS)
    return ServerCounters.read(text) or f"{server_root(url)}/metrics has no queue of {named}"


async def metrics_of(
    url: str, headers: Mapping[str, str], trust: Trust, limit: float = ANSWER_LIMIT
) -> str:
    """The text of `/metrics`. Raises NoMetricsError."""
    url = server_root(url)
    body = bytearray()
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(
                verify=trust.verification(url), trust_env=False, timeout=limit
            ) as client,
            client.stream("GET", f"{url}/metrics", headers=dict(headers)) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise NoMetricsError(f"{url}/metrics answered {response.status_code}")
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LONGEST:
                    raise NoMetricsError(f"{url}/metrics answered more than {LONGEST >> 20} MiB")
    except TimeoutError:
        raise NoMetricsError(f"no answer from {url}/metrics within {limit:g} s") from None
    except httpx.HTTPError as error:
        why = unanswered(error, url)
        raise NoMetricsError(f"no answer from {url}/metrics: {why}") from None
    return body.decode(errors="replace")
