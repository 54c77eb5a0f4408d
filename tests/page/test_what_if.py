"""The what-if table: the forecasts of the gateway, in line, sorted by what compares them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.browser import Page
from tests.page.site import Site, at_rest
from tests.page.staged import Topics, slow_queue, staged
from tests.page.test_servers import ANSWERED

NL = "\n"

# of every row of the what-if table: the cells that are shown, each with its edges, the right edge
# of its text and its first baseline
CELLS = """[...document.querySelectorAll('#whatif tr:not(.group)')]
.map(row => [...row.cells].filter(e => e.offsetParent).map(cell => {
  const { left, right } = cell.getBoundingClientRect();
  const text = document.createRange();
  text.selectNodeContents(cell);
  const probe = document.createElement("span");
  // its lower edge is on the baseline
  probe.style.cssText = "display: inline-block; width: 0; height: 0";
  const end = text.getBoundingClientRect().right;
  (cell.querySelector("button") ?? cell).prepend(probe);
  const baseline = probe.getBoundingClientRect().bottom;
  probe.remove();
  const number = cell.classList.contains("n");
  return { left, right, baseline, end, number, text: cell.textContent };
}))"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 720, 1280])
def test_the_rows_of_the_what_if_table_are_in_line(site: Site, width: int) -> None:
    def forecasts(topics: Topics) -> None:
        slow_queue(topics)
        first = topics["what_if"][0]
        unstable = {
            "stable": False,
            "load": 1.4,
            "queueing_delay": None,
            "sojourn_time": None,
            "time_to_first_token": None,
        }
        topics["what_if"] += [
            first | unstable | {"policy": "single", "sojourn_interval": None},
            first
            | {
                "policy": "fixed:batch_size=8,max_wait=2.5",
                "load": 0.05,
                "queueing_delay": {"mean": 44.975, "p99": 45.0},
            },
            first
            | {
                "policy": "elastic:max_batch_size=2",
                "max_output_tokens": 48,
                "notes": ["the lengths are extrapolated"],
            },
        ]

    async def main() -> list[list[dict[str, Any]]]:
        async with staged(site.browser, site.gateway.url, forecasts, width=width) as page:
            await page.until("document.querySelector('table.whatif')")
            return list(await page.ask(CELLS))

    head, *rows = site.runner.run(main())
    assert len(rows) >= 5
    for row in rows:
        assert [(cell["left"], cell["right"]) for cell in row] == [
            (cell["left"], cell["right"]) for cell in head
        ], row[0]["text"]
        told = [
            cell["baseline"]
            for cell in row
            if (cell["text"] and cell["number"]) or cell is row[0] or cell["text"] == "Use"
        ]
        assert max(told) - min(told) < 1, row[0]["text"]
    for column in zip(*rows, strict=True):
        ends = [cell["end"] for cell in column if cell["number"]]
        assert not ends or max(ends) - min(ends) < 1, "numbers end at one edge"


def test_the_what_if_table_has_delay_and_sojourn_of_every_forecast_of_the_gateway(
    site: Site,
) -> None:
    async def forecasts() -> dict[str, Any]:
        return {
            name: value
            for name, value in (await site.gateway.ask("GET", "/admin/prediction")).items()
            if name.startswith("what_if")
        }

    async def look(page: Page) -> None:
        await site.gateway.ask("GET", "/admin/prediction?what_if=true")
        await at_rest(forecasts, lambda: page.ask(TABLE), _agree)

    site.run(look)


def _agree(found: dict[str, Any], table: list[list[str]]) -> None:
    """What the gateway forecasts, and the table."""
    head, *rows = table
    delay, sojourn = head.index("Delay"), head.index("Sojourn")
    by_setting = {(each["policy"], each["max_output_tokens"]): each for each in found["what_if"]}
    shown = {_use(row[-1]): row for row in rows if row[-1]}
    assert len(shown) >= 6
    assert shown.keys() <= by_setting.keys()
    for setting, row in shown.items():
        forecast = by_setting[setting]
        for name, place in (("queueing_delay", delay), ("sojourn_time", sojourn)):
            assert _seconds(row[place]) == (
                pytest.approx(forecast[name]["mean"], rel=6e-3, abs=1e-6)
                if forecast["stable"]
                else None
            )
    (in_force,) = (row for row in rows if "in force" in row[0])
    assert _seconds(in_force[delay]) == pytest.approx(
        found["what_if_in_force"]["queueing_delay"]["mean"], rel=6e-3
    )
    assert _seconds(in_force[sojourn]) == pytest.approx(
        found["what_if_in_force"]["sojourn_time"]["mean"], rel=6e-3
    )


# the head and every row of the what-if table as texts; of a button what it is for
TABLE = """[...document.querySelectorAll('#whatif tr:not(.group)')].map(row =>
[...row.cells].map(e => e.querySelector('button')?.getAttribute('aria-label') ?? e.textContent))"""


def _use(label: str) -> tuple[str, int | None]:
    """`Use elastic:max_batch_size=4, token limit 55`."""
    policy, _, limit = label.removeprefix("Use ").rpartition(", ")
    return policy, None if limit == "no token limit" else int(limit.removeprefix("token limit "))


def _half_a_digit(shown: str) -> float:
    """Of the last one that is shown, seconds."""
    number, _, unit = shown.partition("\u202f")
    digits = len(number.partition(".")[2])
    return 0.51 * 10**-digits * (1e-3 if unit == "ms" else 1.0)


def _seconds(shown: str) -> float | None:
    if shown == "–":
        return None
    number, unit = shown.split("\u202f")
    return float(number.replace(",", "")) * {"ms": 1e-3, "s": 1.0}[unit]


def test_policies_are_sorted_by_sojourn_time_and_settings_of_one_policy_by_delay(
    site: Site,
) -> None:
    """Where the two orders differ: a family whose answers take longer to make may let them wait
    less.
    """

    def forecasts(topics: Topics) -> None:
        slow_queue(topics)
        base = topics["what_if"][0]
        topics["gateway"]["in_force"] |= {
            "policy": "elastic:max_batch_size=8",
            "max_output_tokens": None,
        }
        topics["what_if_in_force"] = None

        def row(
            policy: str, limit: int | None, delay: float, sojourn: float, compared: str
        ) -> dict[str, Any]:
            own = {"policy": policy, "max_output_tokens": limit, "compared": compared}
            return (
                base
                | own
                | {"queueing_delay": {"mean": delay, "p99": 9.0}, "sojourn_time": {"mean": sojourn}}
            )

        topics["what_if"] = [
            row("dynamic", None, 0.1, 0.9, "queueing_delay"),
            row("capped:max_batch_size=8", None, 0.2, 0.8, "queueing_delay"),
            row("continuous:max_batch_size=8", None, 0.3, 0.7, "sojourn_time"),
            row("single", None, 0.01, 0.01, "queueing_delay") | {"stable": False, "load": 1.2},
            row("elastic:max_batch_size=8", 48, 0.2, 0.5, "queueing_delay"),
            row("elastic:max_batch_size=8", 32, 0.1, 0.6, "queueing_delay"),
        ]

    async def main() -> list[tuple[str, int | None]]:
        async with staged(site.browser, site.gateway.url, forecasts) as page:
            await page.until("document.querySelector('table.whatif')")
            return [_use(row[-1]) for row in (await page.ask(TABLE))[1:] if row[-1]]

    elastic = "elastic:max_batch_size=8"
    policies = [
        ("continuous:max_batch_size=8", None),
        ("capped:max_batch_size=8", None),
        ("dynamic", None),
        ("single", None),
    ]
    assert site.runner.run(main()) == [*policies, (elastic, 32), (elastic, 48)]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 720, 1280])
def test_the_what_if_table_and_the_bar_fit_with_long_durations_and_a_patience(
    site: Site, width: int
) -> None:
    def patient(topics: Topics) -> None:
        slow_queue(topics)
        topics["gateway"]["in_force"] |= {"patience": 45.0}
        topics["look"]["prediction"]["comparison"]["verdict"] = "not enough data"
        topics["what_if"][0]["queueing_delay"] |= {"mean": 44.975, "p99": 45.0}
        for each in topics["what_if"]:
            each |= {"gain": -99.9, "next_gain_low": -99.9, "next_gain_high": -0.42}

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, patient, width=width) as page:
            await page.until("document.querySelector('table.whatif')")
            box = "document.querySelector('#whatif .scroll')"
            assert await page.ask(f"{box}.scrollWidth <= {box}.clientWidth")
            assert (
                await page.ask("document.querySelector('.bar').getBoundingClientRect().height")
                <= 125
            )

    site.runner.run(main())


AGE = "document.querySelector('#whatif-age').textContent"
REST = "document.querySelector('#whatif-rate').dispatchEvent(new Event('change'))"


async def _move(page: Page, times: str) -> None:
    await page.type("#whatif-rate", times)
    await page.ask(REST)


@pytest.mark.slow
def test_what_if_more_requests_came(site: Site) -> None:
    """The slider asks the gateway, and goes back to what the page follows."""

    async def look(page: Page) -> None:
        await site.gateway.ask("GET", "/admin/prediction?what_if=true")
        await page.until("document.querySelector('table.whatif .in-force')")
        await _move(page, "0.5")
        assert "0.5 times as many as now" in await page.text("#whatif-rate-of")
        await page.until(f"{AGE}.startsWith('For 0.5 times as many requests as at ')", 60)
        table = await page.ask(TABLE)
        assert "in force" in table[1][0]
        assert {row[table[0].index("Gain")] for row in table[1:]} == {"–"}
        await _move(page, "1")
        await page.until(f"{AGE}.startsWith('As of')")

    site.run(look)


def test_what_was_asked_at_another_rate_is_grey_after_a_change_and_a_failure_is_told(
    site: Site,
) -> None:
    async def main() -> None:
        kept: list[Topics] = []
        found = await site.gateway.ask("GET", "/admin/prediction?what_if=true")
        async with staged(site.browser, site.gateway.url, kept.append) as page:
            rows = [found["what_if"][0] | {"load": 0.4321}]
            asked = {"what_if": rows, "what_if_in_force": None, "reason": None}
            answers = {"admin/prediction?rate_factor=2": asked}
            await page.ask(ANSWERED % json.dumps(answers))
            await _move(page, "2")
            await page.until(f"{AGE}.startsWith('For 2 times')")
            assert "43\u202f%" in {cell for row in await page.ask(TABLE) for cell in row}
            assert await page.ask("!!document.querySelector('#whatif button')")
            gateway = kept[0]["gateway"]
            moved = gateway | {"in_force": gateway["in_force"] | {"epoch": 99}}
            event = f"event: gateway{NL}data: {json.dumps(moved)}{NL * 2}"
            await page.ask(f"tell({json.dumps(event)})")
            await page.until(f"{AGE}.includes('before the last change')")
            assert not await page.ask("document.querySelector('#whatif button')")
            await _move(page, "3")  # of which the gateway has no answer
            await page.until(f"{AGE}.startsWith('No forecast: ')")

    site.runner.run(main())


def test_without_forecasts_the_page_says_how_often_they_come(site: Site) -> None:
    def none_yet(topics: Topics) -> None:
        topics["what_if"], topics["what_if_in_force"] = [], None

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, none_yet) as page:
            await page.until("document.querySelector('#whatif p')")
            said = await page.text("#whatif")
            assert said == (
                "No forecasts yet: once there is a prediction, they are computed every 15\u202fs."
            )

    site.runner.run(main())


def test_a_forecast_that_is_the_setting_in_force_by_another_text_is_left_out(site: Site) -> None:
    def forecasts(topics: Topics) -> None:
        slow_queue(topics)
        base = topics["what_if"][0]
        topics["gateway"]["in_force"] |= {
            "policy": "elastic:max_batch_size=64",
            "max_output_tokens": None,
            "effective_max_batch_size": 16,
        }

        def row(
            policy: str, size: int | None, limit: int | None = None, cut: float | None = 0.0
        ) -> dict[str, Any]:
            return base | {
                "policy": policy,
                "effective_max_batch_size": size,
                "max_output_tokens": limit,
                "clipped_fraction": cut,
            }

        topics["what_if_in_force"] = row("elastic:max_batch_size=64", 16)
        topics["what_if"] = [
            *(
                row("elastic:max_batch_size=64", 16, 64),
                row("elastic:max_batch_size=32", 16),
                row("elastic", 16),
            ),  # the same
            *(
                row("elastic:max_batch_size=8", 8),
                row("elastic:order=spf", 16),
                row("continuous:max_batch_size=16", 16),
                row("fixed", None),
            ),
            *(
                row("elastic:max_batch_size=64", 16, 54, 0.0004),
                row("elastic:max_batch_size=64", 16, 32, None),
            ),
        ]

    async def main() -> list[str]:
        async with staged(site.browser, site.gateway.url, forecasts) as page:
            await page.until("document.querySelector('table.whatif')")
            return list(
                await page.ask(
                    "[...document.querySelectorAll('#whatif button')].map(e => "
                    "e.getAttribute('aria-label'))"
                )
            )

    assert sorted(site.runner.run(main())) == [
        "Use continuous:max_batch_size=16, no token limit",
        "Use elastic:max_batch_size=64, token limit 32",
        "Use elastic:max_batch_size=64, token limit 54",
        "Use elastic:max_batch_size=8, no token limit",
        "Use elastic:order=spf, no token limit",
        "Use fixed, no token limit",
    ]
