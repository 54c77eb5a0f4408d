"""A page whose gateway says what a test wants it to say: the events of a real one, changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tests.page.browser import Browser, Page
from tests.page.site import READY

Topics = dict[str, Any]
# the stream stays open, and everything else goes to the gateway
STREAM = """{
  const real = window.fetch;
  const body = () => new ReadableStream({ start: (stream) => stream.enqueue(new TextEncoder().encode(%s)) });
  window.fetch = (url, ...more) => (String(url) === "live/events" ? Promise.resolve(new Response(body())) : real(url, ...more));
}"""


async def topics_of(url: str) -> Topics:
    """What a gateway sends first."""
    async with httpx.AsyncClient() as client, client.stream("GET", f"{url}/live/events") as answer:
        async for chunk in answer.aiter_text():
            events = [dict(line.split(": ", 1) for line in block.splitlines()) for block in chunk.split("\n\n")]
            return {event["event"]: json.loads(event["data"]) for event in events if "event" in event}
    raise AssertionError("the stream ended before it began")


@contextlib.asynccontextmanager
async def staged(
    browser: Browser, url: str, change: Callable[[Topics], None], *, width: int = 1280, height: int = 900
) -> AsyncIterator[Page]:
    """The page of the gateway there, with its first events changed and no later ones."""
    topics = await topics_of(url)
    change(topics)
    events = "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in topics.items())
    async with browser.page(width, height) as page:
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=STREAM % json.dumps(events))
        await page.open(url)
        await page.until(READY)
        yield page
