"""Pictures of the live page: `python -m tests.page.screenshots [FOLDER]`, which is `make
screenshots`. Some six minutes.

light, overview (its upper part),     a gateway under load, after a switch of the policy
dark, phone, zoom (200 %)
continuous, advice                    its upper part under `continuous`, and what it forecasts and
                                      advises there
empty                                 one that has just started
error                                 one that went away while the page was open
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.page.browser import Browser, Page, PageError, chromium
from tests.page.site import loaded, serving

FOLDER = Path("docs/page")
WIDE, TALL, TALLER, PHONE, ZOOMED = (
    (1280, 900),
    (1280, 1600),
    (1280, 2000),
    (360, 2200),
    (720, 1800),
)
VIEWS = (
    ("light", "light", WIDE),
    ("overview", "light", TALL),
    ("dark", "dark", TALL),
    ("phone", "light", PHONE),
    ("zoom", "light", ZOOMED),
)
BEFORE, AFTER = 60.0, 85.0  # seconds of load before and after the switch
RATE = 23.0  # requests/s, load about 0.7
AGREES = "document.title.startsWith('Agree')"
DRAWN = "document.querySelectorAll('[data-drawn=true]').length"


async def main(folder: Path) -> None:
    """All of them."""
    with tempfile.TemporaryDirectory() as temporary:
        async with chromium() as browser:
            async with serving(Path(temporary)) as gateway:
                await empty(browser, gateway.url, folder)
            async with serving(Path(temporary)) as gateway, loaded(gateway, RATE, 1200):
                await asyncio.sleep(BEFORE)
                await gateway.ask("PUT", "/admin/policy", {"policy": "elastic:max_batch_size=8"})
                await asyncio.sleep(AFTER)
                await full(browser, gateway.url, folder)
                await gateway.ask("PUT", "/admin/policy", {"policy": "continuous:max_batch_size=8"})
                await asyncio.sleep(AFTER)
                await advised(browser, gateway.url, folder)
                async with browser.page(*WIDE) as page:
                    await page.open(gateway.url)
                    await page.until(f"{DRAWN} >= 5")
                    await asyncio.sleep(3.0)
                    os.kill(gateway.pid, signal.SIGKILL)
                    await page.until("document.body.dataset.link === 'lost'", 20)
                    await asyncio.sleep(1.0)
                    await page.picture(folder / "error.png", whole=False)


async def full(browser: Browser, url: str, folder: Path) -> None:
    """The page with everything on it."""
    for name, theme, size in VIEWS:
        async with browser.page(*size) as page:
            await page.resize(*size, scale=2 if size in (PHONE, ZOOMED) else 1)
            await page.open(f"{url}/?theme={theme}")
            await settled(page)
            await page.picture(folder / f"{name}.png", whole=size == WIDE)


async def advised(browser: Browser, url: str, folder: Path) -> None:
    """The upper part of the page; then its forecasts, its assumptions and the advice, which was
    asked for.
    """
    async with browser.page(*TALL) as page:
        await page.open(f"{url}/?theme=light")
        await page.until("document.querySelector('table.whatif')", 90)
        await settled(page)
        await page.picture(folder / "continuous.png", whole=False)
        await page.click("#ask-advice")
        await page.until("document.querySelector('#advice .advice li')", 90)
        await page.resize(*TALLER)
        await page.ask("document.querySelector('#whatif-title').scrollIntoView(); 1")
        await asyncio.sleep(1.5)
        await page.picture(folder / "advice.png", whole=False)


async def settled(page: Page) -> None:
    """Return once everything is drawn."""
    await page.until(f"{DRAWN} >= 5")
    await page.until("document.querySelector('#distribution .plot').dataset.drawn === 'true'", 60)
    with contextlib.suppress(
        PageError
    ):  # on a busy machine the engine stalls, and the page says so
        await page.until(AGREES, 40)
    await asyncio.sleep(1.5)


async def empty(browser: Browser, url: str, folder: Path) -> None:
    """Nothing has come yet."""
    async with browser.page(*WIDE) as page:
        await page.open(f"{url}/?theme=light")
        await page.until(
            "document.body.dataset.link === 'live' && document.querySelector('#action code')"
        )
        await asyncio.sleep(1.0)
        await page.picture(folder / "empty.png", whole=False)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
