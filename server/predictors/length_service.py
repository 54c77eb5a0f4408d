"""A service that predicts output lengths (`--length-predictor http:url=...`).

    POST url    {"quantile": 0.5, "requests": [{"prompt": text or token ids,
                 "prompt_tokens": n, "max_output_tokens": n}, ...]}
    200         {"predicted_output_tokens": [n or null, ...]}    one of each request, in order

A request waits for it until the deadline and no longer. After FAILURES in a row (no answer in time,
another status, an answer of another shape, a number that is no length) it is asked again only
after PAUSE seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from kendall.server.engines.base import EngineRequest

log = logging.getLogger("kendall")
FAILURES, PAUSE = 5, 10.0  # seconds
MOST_AT_ONCE = 64  # questions under way: beyond them none is asked
LONGEST_ANSWER = 1 << 20  # bytes
TRANSPORT: httpx.AsyncBaseTransport | None = None  # tests put theirs here


class LengthService:
    """Its predictions, or none; never an error."""

    def __init__(
        self, url: str, deadline: float, quantile: float, now: Callable[[], float]
    ) -> None:
        self.url, self.deadline, self._quantile, self._now = url, deadline, quantile, now
        limits = httpx.Limits(max_connections=MOST_AT_ONCE)
        self._client = httpx.AsyncClient(
            timeout=deadline, limits=limits, transport=TRANSPORT, trust_env=False
        )
        self._asked = 0
        self._in_a_row = 0
        self._again = -math.inf
        self.failures = 0  # questions without a usable answer

    async def predictions(
        self, requests: Sequence[EngineRequest], prompts: Sequence[str | Sequence[int]]
    ) -> Sequence[float | None]:
        """Tokens of each request; None where the service says nothing."""
        nothing = [None] * len(requests)
        if self._asked >= MOST_AT_ONCE or self._now() < self._again:
            return nothing
        self._asked += 1
        try:
            async with asyncio.timeout(self.deadline):
                found = _lengths(await self._post(requests, prompts), len(requests))
        except TimeoutError:
            self._failed(f"no answer within {self.deadline:g} s")
            return nothing
        except Exception as error:  # noqa: BLE001 - whatever it does harms no request
            self._failed(str(error) or type(error).__name__)
            return nothing
        finally:
            self._asked -= 1
        if self._in_a_row >= FAILURES:
            log.info("length predictor: %s answers again", self.url)
        self._in_a_row = 0
        return found

    async def _post(
        self, requests: Sequence[EngineRequest], prompts: Sequence[str | Sequence[int]]
    ) -> bytes:
        asked = [
            {
                "prompt": prompt if isinstance(prompt, str) else list(prompt),
                "prompt_tokens": each.request.prompt_tokens,
                "max_output_tokens": each.request.max_output_tokens,
            }
            for each, prompt in zip(requests, prompts, strict=True)
        ]
        body = msgspec.json.encode({"quantile": self._quantile, "requests": asked})
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self.url, content=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise ValueError(f"got status {answer.status_code}, expected 200")
            content = bytearray()
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > LONGEST_ANSWER:
                    raise ValueError(f"got more than {LONGEST_ANSWER:,} bytes")
            return bytes(content)

    def _failed(self, why: str) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row >= FAILURES:
            self._again = self._now() + PAUSE
        if self._in_a_row == FAILURES:
            log.warning(
                "length predictor: %s failed %d times in a row (%s); it is asked every %g s, and "
                "lengths are predicted from history until it answers",
                self.url,
                FAILURES,
                why[:200],
                PAUSE,
            )

    async def close(self) -> None:
        """Give its connections up."""
        await self._client.aclose()


def _lengths(content: bytes, count: int) -> list[float | None]:
    """Raises ValueError or msgspec's errors for anything but one length of each request."""
    answer: Any = msgspec.json.decode(content)
    found = answer.get("predicted_output_tokens") if isinstance(answer, dict) else None
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"expected predicted_output_tokens, a list of {count}")
    for each in found:
        number = isinstance(each, int | float) and not isinstance(each, bool)
        if each is not None and not (number and 0 < each < math.inf):
            raise ValueError(f"got {str(each)[:40]}, expected a number of tokens > 0 or null")
    return [None if each is None else float(each) for each in found]
