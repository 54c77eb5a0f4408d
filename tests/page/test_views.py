"""The charts over time: one cursor and one zoom for all, a link that shows the same again, a
file of their numbers, what was refused.
"""

from __future__ import annotations

import asyncio
import csv
import io
from typing import Any

import pytest

from tests.page.browser import Page
from tests.page.site import CHARTS, DRAWN, SPANS, TIMES, Site, history_of
from tests.page.staged import Topics, staged

WINDOW = "[...document.querySelectorAll('#range input:checked')].map(e => e.value).join()"
DRAWN_TEXTS = """{
  const real = CanvasRenderingContext2D.prototype.fillText;
  window.texts = new Set();
  CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    window.texts.add(text);
    real.call(this, text, ...more);
  };
}"""


async def drag(page: Page, selector: str, start: float, end: float) -> None:
    """The pointer from one part of a plot to another, as shares of its width, once the page has
    stopped growing above it.
    """
    box, before = await place(page, selector), None
    while box != before:
        await asyncio.sleep(0.2)
        box, before = await place(page, selector), box
    left, y = box[0], box[1] + box[3] / 2
    for kind, share, buttons in (
        ("mouseMoved", start, 0),
        ("mousePressed", start, 1),
        ("mouseMoved", end, 1),
        ("mouseReleased", end, 0),
    ):
        at = {"x": left + share * box[2], "y": y}
        await page.send(
            "Input.dispatchMouseEvent",
            type=kind,
            button="left",
            buttons=buttons,
            clickCount=1,
            **at,
        )


async def place(page: Page, selector: str) -> list[float]:
    """Left, top, width and height of a plot in the window."""
    found: list[float] = await page.ask(
        "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); return "
        f"[b.left, b.top, b.width, b.height]; }})(document.querySelector('{selector} .u-over'))"
    )
    return found


def test_a_part_that_is_marked_on_one_chart_is_shown_on_all_and_is_in_the_link(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        assert await page.ask(f"{TIMES}.length") == CHARTS
        await drag(page, "#queue", 0.4, 0.8)
        await page.until("location.hash.includes('zoom=')")
        start, end = (
            int(each)
            for each in str(
                await page.ask("new URLSearchParams(location.hash.slice(1)).get('zoom')")
            ).split("-")
        )
        assert end - start >= 5
        await page.until(f"{SPANS}.every(each => each === '{start}-{end}')")
        await page.until("!document.querySelector('#unzoom').hidden")
        link = await page.ask("location.href")
        await page.open("about:blank")
        await page.open(link)
        await page.until(
            f"{TIMES}.length === {CHARTS} && {SPANS}.every(each => each === '{start}-{end}')"
        )
        await page.click("#unzoom")
        await page.until(f"location.hash === '' && {SPANS}.every(each => each !== '{start}-{end}')")
        await page.ask(f"location.hash = 'zoom={start}-{end}'; 1")
        await page.until(f"{SPANS}.every(each => each === '{start}-{end}')")
        await page.ask(
            "document.querySelector('#rate .u-over').dispatchEvent(new MouseEvent('dblclick', "
            "{bubbles: true})); 1"
        )
        await page.until("location.hash === ''")
        assert page.complaints == []

    site.run(look)


def test_one_cursor_reads_every_chart(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        await drag(page, "#queue", 0.5, 0.5)
        shown = (
            "[...document.querySelectorAll('.legend time')].filter(e => e.offsetParent).map(e "
            "=> e.textContent)"
        )
        beside = 3  # mean, p95 and p99 have no room for it
        await page.until(
            f"new Set({shown}).size === 1 && {shown}.length === {CHARTS - beside} && "
            f"{shown}[0].includes(':')"
        )

    site.run(look)


def test_the_window_comes_from_the_link_and_what_is_wrong_in_it_is_left_out(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        assert await page.ask(WINDOW) == "900"
        await page.click("#range input[value='7200']")
        assert await page.ask("location.hash") == "#window=7200"
        await page.ask("location.hash = '#window=7&zoom=9-3'; 1")
        await page.until(f"{WINDOW} === '300'")
        noticed = (
            "new Promise(done => addEventListener('hashchange', () => setTimeout(done), { "
            "once: true }))"
        )
        await page.ask(f"(noticed => {{ location.hash = '#verdict'; return noticed; }})({noticed})")
        assert await page.ask(WINDOW) == "300", "a place of the page"

    site.run(look, path="/#window=900")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "verdict",
        "controls",
        "%",
        "%E0%A4%A",
        "zoom=0-9e99",
        "zoom=0-Infinity",
        "zoom=1-1e15&window=x",
        "stat=p95",
    ],
)
def test_any_other_fragment_shows_the_page_as_at_the_start(site: Site, place: str) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        assert "the last 2\u202fmin at most" in await page.text("#delays-note")
        assert (await page.text("#delays-note")).startswith("By the second")
        assert await page.ask("document.querySelector('#unzoom').hidden"), (
            "a zoom is not longer than the longest window"
        )
        assert await page.ask(WINDOW) == "300"
        assert page.complaints == []

    site.run(look, path=f"/#{place}")


def test_the_skip_link_leaves_the_view_as_it_is(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        await page.click(".skip")
        await page.until("location.hash === '#verdict'")
        assert await page.ask(WINDOW) == "900"

    site.run(look, path="/#window=900")


def test_a_chart_is_also_a_file(site: Site) -> None:
    async def look(page: Page) -> None:
        await page.until(f"{DRAWN} >= {CHARTS} - 1")
        await page.ask("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }; 1")
        await page.ask(
            "HTMLAnchorElement.prototype.click = function () { window.name_ = this.download; }; 1"
        )
        await page.ask("document.querySelector('#rate details').open = true; 1")
        await page.until(
            "document.querySelectorAll('#rate tbody tr').length > 10"
        )  # the gateway's history has come
        await page.click("#rate details button")
        rows = list(csv.DictReader(io.StringIO(await page.ask("window.saved.text()"))))
        assert list(rows[0]) == ["time", "unix_time", "sequence_rate", "completed_rate"]
        assert len(rows) > 10
        assert await same_as_the_gateway(site, rows) >= len(rows) / 2
        assert rows[0]["time"].endswith("Z")
        assert (await page.ask("window.name_")).startswith("kendall-requests-per-second-")

    site.run(look)


async def same_as_the_gateway(site: Site, rows: list[dict[str, str]]) -> int:
    """Of how many rows the gateway remembers the rate of that instant, which was not always 0."""
    history = await history_of(site.gateway.url)
    fine = dict(zip(history["columns"], history["fine"], strict=True))
    remembered = dict(zip(fine["at"], fine["sequence_rate"], strict=True))
    mine = {
        float(row["unix_time"]): float(row["sequence_rate"]) for row in rows if row["sequence_rate"]
    }
    both = sorted(mine.keys() & remembered.keys())
    assert [mine[at] for at in both] == pytest.approx(
        [remembered[at] for at in both], rel=1e-3
    )  # it keeps four digits
    assert max(mine[at] for at in both) > 0
    return len(both)


def test_what_was_refused_is_shown_by_reason_and_only_those_that_occurred(site: Site) -> None:
    def refusing(topics: Topics) -> None:
        columns = topics["hello"]["columns"]
        for name, rate in (
            ("refused_max_num_queued_reqs_rate", 2.5),
            ("failed_engine_error_rate", 0.25),
        ):
            topics["now"]["row"][columns.index(name)] = rate
        topics["now"]["row"][0] += 30  # after whatever the gateway's own history has

    async def main() -> list[Any]:
        async with staged(site.browser, site.gateway.url, refusing) as page:
            legend = (
                "[...document.querySelectorAll('#lost .legend > span')].filter(e => "
                "e.offsetParent).map(e => e.innerText)"
            )
            await page.until(f"{legend}.length >= 2")
            return list(await page.ask(legend))

    found = [" ".join(each.split()) for each in site.runner.run(main())]
    mine = [
        each for each in found if "Cancelled" not in each
    ]  # the load of this site's own is broken off at its end
    assert mine == ["Refused: queue full 2.50/s", "Failed: engine error 0.250/s"]


# the colour and the dash of every curve that is drawn, and of every swatch of a legend; `paint`
# draws anew
CURVES = """{
  window.curves = new Set();
  // length of a stroke of the dashes
  const on = (pixels) => (pixels ? Math.round(pixels) : "solid");
  const real = CanvasRenderingContext2D.prototype.stroke;
  CanvasRenderingContext2D.prototype.stroke = function (...path) {
    if (path.length && this.canvas.closest("#lost"))
      curves.add(`${this.strokeStyle} ${on(this.getLineDash()[0] / devicePixelRatio)}`);
    return real.apply(this, path);
  };
  const byte = (each) => Number(each).toString(16).padStart(2, "0");
  const hex = (rgb) => "#" + rgb.match(/\\d+/g).slice(0, 3).map(byte).join("");
  const shown = "#lost .legend > span:not([hidden]) .swatch";
  window.swatches = () => [...document.querySelectorAll(shown)].map((each) => {
    const { backgroundImage, backgroundColor } = getComputedStyle(each);
    const dashed = backgroundImage !== "none";
    const colour = dashed ? backgroundImage.match(/rgb\\([^)]*\\)/)[0] : backgroundColor;
    return `${hex(colour)} ${on(dashed && parseFloat(backgroundImage.match(/[\\d.]+px/g)[1]))}`;
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_swatch_looks_like_its_line(site: Site, theme: str) -> None:
    def losing(topics: Topics) -> None:
        columns = topics["hello"]["columns"]
        for place, name in enumerate(columns):
            if name.startswith(("refused_", "failed_", "abandoned", "cancelled")):
                topics["now"]["row"][place] = 1.0
        topics["now"]["row"][0] += 30

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, losing) as page:
            await page.until(
                "document.querySelectorAll('#lost .legend > span:not([hidden])').length === 17"
            )
            await page.ask(CURVES)
            switch = f"document.documentElement.dataset.theme = '{theme}'; curves.clear()"
            await page.ask(f"{switch}; dispatchEvent(new Event('themechange')); 1")
            await page.until("curves.size >= 17")
            swatches = await page.ask("swatches()")
            assert len(set(swatches)) == 17
            assert sorted(swatches) == sorted(await page.ask("[...curves]"))

    site.runner.run(main())


def test_engine_restarts_uptime_and_version_are_shown(site: Site) -> None:
    def long_up(topics: Topics) -> None:
        topics["hello"] |= {
            "born": topics["now"]["row"][0] - 3 * 86400 - 4 * 3600,
            "version": "7.8.9",
        }
        topics["gateway"] |= {"restarts": 2, "engine": "vllm", "versions": {"vllm": "1.2.3"}}
        first = topics["switches"][0]
        topics["switches"].append(
            first
            | {"at": topics["now"]["row"][0] - 2, "first": False, "restarted": True, "epoch": 9}
        )

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, long_up) as page:
            await page.until("document.querySelector('#about').textContent")
            said = (await page.text("#about")).replace("\u202f", " ")
            assert (
                said
                == "Model tiny · vllm engine 1.2.3 · up 3 d 4 h · 2 engine restarts · Kendall 7.8.9"
            )
            await page.until("document.querySelector('#queue .plot').dataset.marks === '1'")

    site.runner.run(main())


def test_a_mark_says_what_a_switch_changed(site: Site) -> None:
    def patient(topics: Topics) -> None:
        first = topics["switches"][0] | {"patience": None}
        topics["switches"] = [
            first,
            first
            | {"at": topics["now"]["row"][0] - 3, "first": False, "patience": 45.0, "epoch": 9},
        ]

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, patient) as page:
            await page.until(f"{DRAWN} >= {CHARTS} - 1")
            await page.ask(DRAWN_TEXTS)
            await page.ask("dispatchEvent(new Event('themechange'))")
            await page.until("window.texts.has('patience 45\u202fs')")

    site.runner.run(main())


# where the labels of the marks are drawn, and where their lines are, in pixels of the canvas
DRAWN_MARKS = """{
  const context = CanvasRenderingContext2D.prototype;
  const { clearRect, fillText, lineTo } = context;
  context.clearRect = function (...area) {
    if (this.canvas.closest("#delays .main")) window.drawn = { labels: [], lines: [] };
    clearRect.apply(this, area);
  };
  context.fillText = function (text, x, y) {
    if (text.includes("patience") && window.drawn)
      drawn.labels.push([text, x, x + this.measureText(text).width]);
    fillText.call(this, text, x, y);
  };
  context.lineTo = function (x, y) {
    if (this.getLineDash().length && this.canvas.closest("#delays .main") && window.drawn)
      drawn.lines.push(x);
    lineTo.call(this, x, y);
  };
}"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize(
    "ago", [(40, 39, 38, 3), (50, 30, 26, 25, 24, 23, 22, 21, 3, 2, 1), (45, 44), (2, 1)]
)
def test_a_label_stands_at_its_own_line_and_at_no_other(
    site: Site, ago: tuple[int, ...], width: int
) -> None:
    def hasty(topics: Topics) -> None:
        end, first = topics["now"]["row"][0], topics["switches"][0] | {"patience": None}
        marks = [
            first
            | {"at": end - each, "first": False, "patience": 100.0 + place, "epoch": place + 1}
            for place, each in enumerate(ago)
        ]
        topics["switches"] = [first, *marks]

    async def main() -> dict[str, Any]:
        async with staged(site.browser, site.gateway.url, hasty, width=width) as page:
            await page.until(f"{DRAWN} >= {CHARTS} - 1")
            await page.ask(DRAWN_MARKS)
            await page.ask("dispatchEvent(new Event('themechange'))")
            # a narrow page may have room for none
            some = "&& drawn.labels.length" if width > 1000 else ""
            await page.until(f"window.drawn && drawn.lines.length >= {len(ago)} {some}")
            return dict(await page.ask("drawn"))

    drawn = site.runner.run(main())
    lines = drawn["lines"][: len(ago)]
    assert lines == sorted(lines)
    for text, start, end in drawn["labels"]:
        own = int(text.split()[1].rstrip("s").strip()) - 100
        assert [place for place, x in enumerate(lines) if start - 1 <= x <= end + 1] == [own], text
    ends = [end for _, _, end in drawn["labels"]]
    assert all(
        start > end for (_, start, _), end in zip(drawn["labels"][1:], ends, strict=False)
    ), "they do not overlap"


def test_the_words_of_a_mark_are_those_of_what_changed(site: Site) -> None:
    """Changes that were undone within a second, and a calibration, begin an epoch under the same
    setting.
    """
    before = "{policy: 'capped:max_batch_size=8', max_output_tokens: 64, patience: 45}"
    expected = {
        f"changes({{...{before}, patience: 30}}, {before})": "patience 30\u202fs",
        f"changes({{...{before}, patience: null}}, {before})": "no patience limit",
        f"changes({{...{before}, max_output_tokens: null}}, {before})": "no token limit",
        f"changes({{...{before}, policy: 'elastic', max_output_tokens: 32}}, {before})": (
            "elastic, token limit 32"
        ),
        f"changes({before}, {before})": "new epoch",
        f"changes({{...{before}, calibrated: true}}, {before})": "calibration",
        f"changes({{...{before}, patience: 30, calibrated: true}}, {before})": (
            "patience 30\u202fs, calibration"
        ),
        f"changes({before})": "capped up to 8, token limit 64, patience 45\u202fs",
    }

    async def look(page: Page) -> None:
        module = "document.querySelector('link[rel=modulepreload][href$=\"words.js\"]').href"
        assert await page.ask(
            f"import({module}).then(({{changes}}) => [{', '.join(expected)}])"
        ) == list(expected.values())

    site.run(look)
