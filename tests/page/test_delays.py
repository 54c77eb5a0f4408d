"""The charts of the delays: the requests that came beside the model of the same ones, and mean, p95
and p99 beside them, readable where they are narrow.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.page.browser import Page
from tests.page.site import CHARTS, DRAWN, SPANS, Site
from tests.page.staged import Topics, staged

# what each panel of the delays says and has drawn
PANELS = """[...document.querySelectorAll('#delays h3')].filter(e => e.offsetParent).map(e => ({
  title: e.textContent,
  drawn: e.nextElementSibling.querySelector('.plot').dataset.drawn,
  values: [...e.nextElementSibling.querySelectorAll('.legend b')].map(b => b.textContent),
}))"""


@pytest.mark.parametrize(
    ("quantity", "short"), [("queueing_delay", "delay"), ("sojourn_time", "sojourn")]
)
def test_mean_p95_and_p99_are_drawn_beside_each_other_observed_and_predicted(
    site: Site, quantity: str, short: str
) -> None:
    def known(topics: Topics) -> None:
        topics["look"]["prediction"]["compared"] = quantity
        # its unit is that of the others
        topics["look"]["prediction"]["comparison"]["observed"]["value"] = 0.111
        row, columns = topics["now"]["row"], topics["hello"]["columns"]
        row[0] += 30  # after whatever the gateway's own history has
        for place, name in enumerate(
            f"{side}_{short}{end}"
            for end in ("", "_p95", "_p99")
            for side in ("observed", "predicted")
        ):
            row[columns.index(name)] = 0.111 * (1 + place)
        seconds = [row[0] - 2 + each for each in range(3)]  # in the row's own tenth: no tie
        topics["pairs"] = {
            "at": seconds,
            "n": [4, 5, 6],
            "compared": quantity,
            "epoch": 0,
            "observed": [0.1, 0.2, 0.777],
            "modelled": [0.1, 0.2, 0.888],
            "low": [0.1, 0.1, 0.8],
            "high": [0.2, 0.3, 0.9],
        }

    async def main() -> list[dict[str, Any]]:
        async with staged(site.browser, site.gateway.url, known) as page:
            await page.until(f"{PANELS}.length === 4 && {PANELS}.every(e => e.drawn === 'true')")
            await page.until(f"{PANELS}[3].values[1] === '666\u202fms'")
            return list(await page.ask(PANELS))

    found = site.runner.run(main())
    assert [each["title"] for each in found] == [
        "The requests that came",
        "Mean with its 95\u202f% interval",
        "95th percentile",
        "99th percentile",
    ]
    values = [[value.replace("\u202f", " ") for value in each["values"]] for each in found]
    assert values[0] == ["777 ms", "888 ms"]
    assert values[1:] == [["111 ms", "222 ms"], ["333 ms", "444 ms"], ["555 ms", "666 ms"]]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "beside"), [(1280, True), (720, False), (390, False)])
def test_the_window_is_beside_its_requests_where_there_is_room_and_below_them_elsewhere(
    site: Site, width: int, *, beside: bool
) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        plots = (
            "[...document.querySelectorAll('#delays .plot')].map(e => e.getBoundingClientRect())"
        )
        same, *window = await page.ask(f"{plots}.map(b => [b.left, b.right, b.top, b.bottom])")
        assert len(window) == 3
        assert (window[0][0] > same[1]) is beside
        assert (window[0][2] > same[3]) is not beside
        for above, below in itertools.pairwise(window):
            assert above[:2] == below[:2]
            assert below[2] > above[3]
        assert min(right - left for left, right, *_ in (same, *window)) > 300
        assert max(same[1], window[0][1]) <= width

    site.run(look, width=width)


# the instants that the axis of a narrow chart is labelled with
INSTANTS = """{
  const real = CanvasRenderingContext2D.prototype.fillText;
  window.instants = new Set();
  CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    if (/^\\d\\d:\\d\\d/.test(text) && this.canvas.closest("#delays .beside")) instants.add(text);
    real.call(this, text, ...more);
  };
}"""


@pytest.mark.parametrize(
    ("seconds", "least", "letters"), [(290, 4, len("17:59")), (60, 2, len("17:59:30"))]
)
def test_a_narrow_chart_has_several_instants_on_its_axis(
    site: Site, seconds: int, least: int, letters: int
) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        await page.ask(INSTANTS)
        await page.ask(
            f"(now => {{ location.hash = `zoom=${{now - {seconds}}}-${{now}}`; "
            f"}})(Math.floor(Date.now() / 1e3)); 1"
        )
        await page.until(f"{SPANS}.every(each => each === location.hash.split('=')[1])")
        await page.ask("instants.clear(); dispatchEvent(new Event('themechange'))")
        await page.until(f"instants.size >= {least}")
        assert {len(each) for each in await page.ask("[...instants]")} == {letters}

    site.run(look)
