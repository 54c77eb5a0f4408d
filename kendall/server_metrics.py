"""One reading of a server's `/metrics`, with bounds: for whoever measures a server from outside."""

from __future__ import annotations

import asyncio

import httpx

from kendall.queueing.measurement.server_signals import SERVERS, ServerCounters
from kendall.remote import SYSTEM, Trust, server_root, unanswered

ANSWER_LIMIT = 5.0  # seconds for one reading
LONGEST = 16 << 20  # bytes of one reading


async def read_counters(
    url: str, key: str | None = None, trust: Trust = SYSTEM, limit: float = ANSWER_LIMIT
) -> ServerCounters | str:
    """The server's counters; a sentence where there are none. Raises nothing."""
    url = server_root(url)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = bytearray()
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(
                verify=trust.verification(url), trust_env=False, timeout=limit
            ) as client,
            client.stream("GET", f"{url}/metrics", headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                return f"{url}/metrics answered {response.status_code}"
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LONGEST:
                    return f"{url}/metrics answered more than {LONGEST >> 20} MiB"
    except TimeoutError:
        return f"no answer from {url}/metrics within {limit:g} s"
    except httpx.HTTPError as error:
        return f"no answer from {url}/metrics: {unanswered(error, url)}"
    counters = ServerCounters.read(body.decode(errors="replace"))
    return counters or f"{url}/metrics has no queue of {', '.join(each.name for each in SERVERS)}"
