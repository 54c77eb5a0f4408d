"""The bar at the top: always in sight, with the policy, the verdict and the way to the controls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import Page
from tests.page.site import Site, at_rest
from tests.page.staged import Topics, staged

BOX = "document.querySelector('%s').getBoundingClientRect()"
# whether the middle of an element is inside the window, and nothing lies over it
ON_TOP = """(e => {
  const { left, right, top, bottom } = e.getBoundingClientRect();
  const above = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return e.textContent !== "" && e.contains(above);
})(document.querySelector("%s"))"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 720, 1280])
def test_the_controls_are_one_press_away_from_every_part_of_the_page(
    site: Site, width: int
) -> None:
    async def look(page: Page) -> None:
        await page.until("!document.querySelector('#to-controls').disabled")
        for place in ("0", "document.body.scrollHeight / 2", "document.body.scrollHeight"):
            await page.ask(f"scrollTo(0, {place}); 1")
            assert await page.ask(ON_TOP % "#bar-policy"), (
                f"the policy is covered or out of sight, scrolled to {place}"
            )
            assert await page.ask(ON_TOP % "#bar-verdict"), (
                f"the verdict is covered or out of sight, scrolled to {place}"
            )
            assert await page.ask(ON_TOP % "#to-controls"), (
                f"the button is covered or out of sight, scrolled to {place}"
            )
        assert await page.ask("scrollY") > 1000
        found = await site.gateway.ask("GET", "/admin/policy")
        limit = found["max_output_tokens"]
        assert f"{found['policy'].partition(':')[0]} " in await page.text("#bar-policy")
        assert ("no token limit" if limit is None else f"token limit {limit}") in await page.text(
            "#bar-policy"
        )
        await page.click("#to-controls")
        await page.until(f"{BOX % '#controls'}.top < innerHeight / 2")
        assert await page.ask("document.activeElement.id") == "policy-name"
        await page.until(
            f"{BOX % '.bar'}.bottom <= {BOX % '#controls'}.top"
        )  # the bar covers nothing of it
        assert await page.ask(ON_TOP % "#to-controls")

    site.run(look, width=width)


WORDS = {"agree": "Agree", "disagree": "Disagree", "not enough data": "Too early to judge"}


def test_the_bar_shows_the_verdict_of_the_prediction(site: Site) -> None:
    async def verdict() -> str:
        found = await site.gateway.ask("GET", "/admin/prediction")
        return WORDS[found["prediction"]["comparison"]["verdict"]]

    def agree(found: str, shown: str) -> None:
        assert shown == found

    async def look(page: Page) -> None:
        await at_rest(verdict, lambda: page.text("#bar-verdict"), agree)

    site.run(look)


CHECK = {
    "observed": 0.104,
    "modelled": 0.1,
    "requests": 1204,
    "ratio": 1.04,
    "ratio_low": 1.01,
    "ratio_high": 1.07,
    "verdict": "agree",
    "causes": ["the engine: its speed changed"],
}
VERDICTS = [
    ({"check": CHECK}, True, "Agree", False),
    ({"check": CHECK | {"verdict": "disagree"}}, True, "Disagree", True),
    ({"check": None}, True, "Too early to judge", False),
    ({"check": CHECK}, False, "Overloaded", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comparison", "stable", "says", "alarms"), VERDICTS, ids=[each[2] for each in VERDICTS]
)
def test_the_bar_has_every_verdict(
    site: Site, comparison: dict[str, Any], says: str, *, stable: bool, alarms: bool
) -> None:
    def judged(topics: Topics) -> None:
        topics["look"]["prediction"] |= {"stable": stable}
        topics["look"]["prediction"]["comparison"] |= comparison

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, judged) as page:
            assert await page.text("#bar-verdict") == says
            assert (
                await page.ask("document.querySelector('#bar-verdict').classList.contains('alarm')")
                is alarms
            )

    site.runner.run(main())
