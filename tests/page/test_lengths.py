"""How good predicted output lengths are: three lines below the self-checks."""

from __future__ import annotations

import pytest

from tests.page.site import Site
from tests.page.staged import Topics, slow_queue, staged

GOOD = {
    "predictor": "learned",
    "version": 3,
    "answers": 500,
    "rank_correlation": 0.52,
    "interval_coverage": 0.91,
    "bias_ratio": 1.07,
    "over_fraction": 0.12,
    "under_fraction": 0.08,
}
FEW = dict.fromkeys(GOOD) | {"predictor": "history", "version": 0, "answers": 4}


@pytest.mark.parametrize(
    ("quality", "note", "rows"),
    [
        (
            GOOD,
            "By learned, version 3; judged on the last 500 answers that no limit cut.",
            [
                "Rank correlation|holds|0.520 of predicted and actual lengths; 0 is chance",
                "90 % interval|holds|91 % of the lengths within it, expected 86 % to 94 %",
                "Size|holds|1.07 times the length in the geometric mean; 12 % above twice of it, "
                "8 % below half",
            ],
        ),
        (
            GOOD | {"rank_correlation": -0.2, "interval_coverage": 0.6, "bias_ratio": 0.5},
            "By learned, version 3; judged on the last 500 answers that no limit cut.",
            ["Rank correlation|fails|", "90 % interval|fails|", "Size|fails|"],
        ),
        (
            FEW,
            "By history; judged on the last 4 answers that no limit cut.",
            ["Rank correlation|cannot tell|too few answers, or all alike"],
        ),
    ],
)
def test_their_quality_is_said_in_words_and_fits_a_phone(
    site: Site, quality: dict[str, object], note: str, rows: list[str]
) -> None:
    def predicted(topics: Topics) -> None:
        slow_queue(topics)
        topics["length_predictor"] = quality

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, predicted, width=360) as page:
            await page.until("document.querySelector('#lengths').offsetParent")
            assert (await page.text("#lengths-note")).replace("\u202f", " ") == note
            shown = await page.ask(
                "[...document.querySelectorAll('#lengths-quality li')].map((row) => "
                "['what', 'state', 'detail'].map((part) => row.querySelector('.' + part)"
                ".textContent).join('|'))"
            )
            assert len(shown) == len(rows)
            for line, expected in zip(shown, rows, strict=True):
                assert line.replace("\u202f", " ").startswith(expected)
            assert await page.ask(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            assert page.complaints == []

    site.runner.run(main())


def test_a_gateway_that_predicts_none_has_no_such_part(site: Site) -> None:
    async def main() -> None:
        async with staged(site.browser, site.gateway.url, slow_queue) as page:
            await page.until("document.querySelector('table.whatif')")
            assert not await page.ask("document.querySelector('#lengths').offsetParent")

    site.runner.run(main())
