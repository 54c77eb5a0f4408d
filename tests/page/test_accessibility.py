"""The live page has no violation of axe-core's rules, in four views and five states, and none of
them scrolls sideways.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.page.axe import violations
from tests.page.browser import Browser, Page
from tests.page.site import DRAWN, LONGEST, READY, Site, loaded, serving


@dataclass(frozen=True)
class View:
    """A window, in CSS pixels."""

    name: str
    width: int = 1280
    height: int = 900
    theme: str = "light"
    scale: float = 1.0


VIEWS = (
    View("light"),
    View("dark", theme="dark"),
    View("phone", 390, 844, scale=2.0),
    View("200 %", 720, 450, scale=2.0),
)


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, view: View) -> AsyncIterator[Page]:
    async with browser.page(view.width, view.height) as page:
        await page.resize(view.width, view.height, scale=view.scale)
        await page.open(f"{url}/?theme={view.theme}")
        await page.until(READY)
        yield page


async def faults(page: Page, view: View, state: str) -> list[str]:
    """What axe says, and how far the page is too wide, once nothing fades or grows any more."""
    await page.until("document.getAnimations().length === 0")
    found = await violations(page)
    width = await page.ask("document.documentElement.scrollWidth")
    if width > view.width:
        found.append(f"the page is {width} px wide: {await page.ask(WIDE % view.width)}")
    return [f"{state}, {view.name}: {each}" for each in found]


# elements that reach beyond the window and are not inside a box that scrolls by itself
WIDE = """[...document.querySelectorAll('body *')]
.filter(e => e.getBoundingClientRect().right > %d + 1 && !e.closest('.scroll'))
.map(e => e.tagName + '.' + e.className + '#' + e.id).slice(0, 8).join(' ')"""


def test_a_violation_and_a_page_that_is_too_wide_are_found(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.ask(
            "document.body.insertAdjacentHTML('beforeend', '<main><img src=live/x><p "
            "id=pale>pale</p></main>')"
        )
        await page.ask(
            "Object.assign(document.querySelector('#pale').style, {color: '#999', width: "
            "'2000px'}); 1"
        )
        found = await faults(page, VIEWS[0], "spoilt")
        assert any("image-alt" in each for each in found)
        assert any("color-contrast" in each and "#pale" in each for each in found)
        assert any("px wide" in each for each in found)

    site.run(look)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_gateway_under_load(site: Site, view: View) -> None:
    async def main() -> None:
        async with (
            loaded(site.gateway, 20.0, LONGEST),
            opened(site.browser, site.gateway.url, view) as page,
        ):
            await page.until(f"{DRAWN} >= 9 && document.querySelector('table.whatif')")
            assert await faults(page, view, "serving") == []
            await page.ask(
                "document.querySelectorAll('details').forEach(each => { each.open = true; })"
            )
            await page.until("document.querySelector('#queue tbody tr')")
            assert await faults(page, view, "tables open") == []

    site.runner.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_an_operator_at_work(site: Site, view: View) -> None:
    """Advice is answered; a forecast is in the form, a size is refused, and a mode of the
    autopilot waits for its button.
    """

    async def main() -> None:
        async with opened(site.browser, site.gateway.url, view) as page:
            await page.until(
                "document.querySelector('#whatif button') && "
                "!document.querySelector('#apply').disabled"
            )
            await page.click("#ask-advice")
            await page.until(
                "document.querySelector('#advice .advice li') && "
                "!document.querySelector('#ask-advice').disabled"
            )
            await page.click("#whatif button")
            await page.until(
                "document.querySelector('#outcome').textContent.endsWith('not in force yet.')"
            )
            await page.click("#autopilot input[value=act]")
            await page.until(
                "!document.querySelector('#steer').hidden && "
                "!document.querySelector('#reset').hidden"
            )
            assert await faults(page, view, "a setting that is not in force yet") == []
            await page.type("#limit", "0")
            await page.click("#apply")
            await page.until("document.querySelector('#outcome').classList.contains('bad')")
            assert await faults(page, view, "a setting that is refused") == []

    site.runner.run(main())


@pytest.mark.slow
def test_a_gateway_without_a_request_and_one_that_is_gone(site: Site, tmp_path: Path) -> None:
    async def main() -> list[str]:
        found = []
        async with serving(tmp_path) as gateway, contextlib.AsyncExitStack() as stack:
            pages = [
                (view, await stack.enter_async_context(opened(site.browser, gateway.url, view)))
                for view in VIEWS
            ]
            for view, page in pages:
                await page.until("document.querySelector('#action code')")
                assert await page.text("#lost .nothing") == "No request was refused or failed"
                found += await faults(page, view, "empty")
            os.kill(gateway.pid, signal.SIGKILL)
            for view, page in pages:
                await page.until("document.body.dataset.link === 'lost'")
                found += await faults(page, view, "gone")
        return found

    assert site.runner.run(main()) == []


@pytest.mark.slow
def test_the_question_for_the_key(site: Site, tmp_path: Path) -> None:
    async def main() -> list[str]:
        found = []
        async with serving(tmp_path, "--admin-key", "an-admin-key-of-the-test") as gateway:
            for view in VIEWS:
                async with opened(site.browser, gateway.url, view) as page:
                    await page.until("!document.querySelector('#apply').disabled")
                    await page.click("#apply")
                    await page.until("document.querySelector('#key').open")
                    found += await faults(page, view, "key")
        return found

    assert site.runner.run(main()) == []
