"""A page whose gateway says what a test wants it to say: the events of a real one, changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.page.browser import Browser, Page
from tests.page.site import READY, history_of, topics_of

Topics = dict[str, Any]
# the stream stays open, `tell` adds to it, and everything else goes to the gateway
STREAM = """{
  const real = window.fetch;
  const start = (stream) => {
    window.tell = (text) => stream.enqueue(new TextEncoder().encode(text));
    window.tell(%s);
  };
  const body = () => new ReadableStream({ start });
  const told = { "live/events": body, "live/history": () => %s };
  window.fetch = (url, ...more) =>
    String(url) in told ? Promise.resolve(new Response(told[url]())) : real(url, ...more);
}"""


@contextlib.asynccontextmanager
async def staged(
    browser: Browser,
    url: str,
    change: Callable[[Topics], None],
    *,
    width: int = 1280,
    height: int = 900,
) -> AsyncIterator[Page]:
    """The page of the gateway there, with its first events changed, no later ones, and a minute
    of its history.
    """
    history, topics = await history_of(url), await topics_of(url)
    history |= {"fine": [column[-60:] for column in history["fine"]], "coarse": []}
    topics["look"] |= {"stopped": False, "outdated": False}  # it was served lately
    change(topics)
    events = "".join(
        f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in topics.items()
    )
    async with browser.page(width, height) as page:
        await page.send(
            "Page.addScriptToEvaluateOnNewDocument",
            source=STREAM % (json.dumps(events), json.dumps(json.dumps(history))),
        )
        await page.open(url)
        await page.until(READY)
        yield page


def slow_queue(topics: Topics) -> None:
    """A mean of 1.2 s, with smaller and larger durations around it."""
    prediction = topics["look"]["prediction"]
    comparison = prediction["comparison"]
    comparison["verdict"], comparison["reasons"] = "agree", []
    if comparison["check"] is not None:
        comparison["check"] |= {"observed": 1.2, "modelled": 1.1, "verdict": "agree"}
    comparison["observed"] |= {"value": 1.2, "low": 0.9, "high": 1.5} | {
        name: _seconds(0.4) for name in ("p50", "p90", "p95", "p99")
    }
    comparison["predicted"] |= {"value": 1.1, "low": 0.98, "high": 1.3}
    prediction["queueing_delay"] |= {"mean": 1.1, "p50": 0.3, "p90": 2.0, "p95": 3.0, "p99": 4.0}
    delays = {"mean": 0.006, "p50": 0.002, "p90": 0.5, "p99": 12.0}
    forecast = {
        "load": 0.4,
        "stable": True,
        "queueing_delay": delays,
        "interval": {"low": 0.003, "high": 0.02},
        "clipped_fraction": 0.1,
    }
    forecast |= {
        "sojourn_time": {"mean": 0.4},
        "sojourn_interval": {"low": 0.3, "high": 0.5},
        "time_to_first_token": {"mean": 0.03},
    }
    topics["what_if"] = [
        forecast
        | {"policy": f"elastic:max_batch_size={size}", "max_output_tokens": None, "notes": []}
        for size in (2, 4)
    ]


def _seconds(seconds: float) -> dict[str, Any]:
    return {"value": seconds, "low": None, "high": None}
