"""A policy from outside on the page: it is listed, with a field for each of its parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.page.browser import Browser
from tests.page.site import in_force, serving
from tests.policies.outside import SHORTEST, module

WEIGHTED = SHORTEST.replace(
    "    max_batch_size: int = 8\n",
    "    weight: float\n    fair: bool = True\n    max_batch_size: int = 8\n",
)
LISTED = "document.querySelector('#policy-name').value !== ''"
OUTCOME = "document.querySelector('#outcome').textContent"
NAMES = "[...document.querySelectorAll('#policy-name option')].map(each => each.value).join(' ')"
LABELS = (
    "[...document.querySelectorAll('#parameters label')]"
    ".map(each => each.firstChild.textContent.trim()).join(', ')"
)


def test_it_is_chosen_and_its_parameters_are_set(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        path = module(tmp_path, WEIGHTED)
        async with serving(tmp_path, "--policy-module", path) as gateway, browser.page() as page:
            await page.open(gateway.url)
            await page.until(LISTED)
            assert await page.ask(NAMES) == (
                "single dynamic fixed capped elastic continuous shortest"
            )
            assert await page.ask(LABELS) == "route"
            before = await in_force(gateway)
            await page.type("#policy-name", "shortest")
            assert await page.ask(LABELS) == "weight, fair"
            assert await page.ask("document.querySelector('#size').placeholder") == "8"
            await page.type("#size", "")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.includes('the weight is missing')")
            assert await in_force(gateway) == before
            await page.type("#parameter-weight", "2.5")
            await page.type("#parameter-fair", "false")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: shortest')")
            assert (await in_force(gateway))["policy"] == "shortest:weight=2.5,fair=false"
            await page.open(gateway.url)
            await page.until("document.querySelector('#parameter-weight') !== null")
            value = "document.querySelector('#parameter-%s').value"
            assert await page.ask(value % "weight") == "2.5"
            assert await page.ask(value % "fair") == "false"
            await page.type("#policy-name", "dynamic")
            assert await page.ask(LABELS) == "route"
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: dynamic')")
            assert page.complaints == []

    runner.run(main())
