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


OF_THE_FORECAST = {
    *("all_admitted", "no_retries", "open_loop", "settled", "constant_rate", "poisson_arrivals"),
}


def word_of(comparison: dict[str, Any]) -> str:
    """The model of the same requests speaks where the forecast cannot, or lacks its conditions."""
    found, reasons = comparison["verdict"], set(comparison["reasons"])
    check = comparison["check"]
    fits = check and check["verdict"] == "agree" and check["ratio_high"] - check["ratio"] <= 0.25
    if fits and found == "disagree" and reasons and reasons <= OF_THE_FORECAST:
        return "Agree"
    if fits and found == "not enough data":
        return "Agree"
    words = {"agree": "Agree", "disagree": "Disagree", "not enough data": "Too early to judge"}
    return words[str(found)]


def test_the_bar_shows_the_verdict_of_the_prediction(site: Site) -> None:
    async def verdict() -> str:
        found = await site.gateway.ask("GET", "/admin/prediction")
        return word_of(found["prediction"]["comparison"])

    def agree(found: str, shown: str) -> None:
        assert shown == found

    async def look(page: Page) -> None:
        await at_rest(verdict, lambda: page.text("#bar-verdict"), agree)

    site.run(look)


VERDICTS = [
    ({"verdict": "agree"}, True, "Agree", False),
    ({"verdict": "disagree", "reasons": []}, True, "Disagree", True),
    (
        {"verdict": "not enough data", "check": None, "requests_missing": 640},
        True,
        "Too early to judge",
        False,
    ),
    ({"verdict": "agree"}, False, "Overloaded", True),
]


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
