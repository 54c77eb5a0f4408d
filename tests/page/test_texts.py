"""What the page says in states that are rare: slow queues, short runs, long messages."""

from __future__ import annotations

import re

import pytest

from tests.page.site import Site
from tests.page.staged import Topics, slow_queue, staged

DURATIONS = (
    "[...document.querySelectorAll('main td, main dd, main h1, main .legend b')].map(e => "
    "e.innerText).join('\\n')"
)


def test_durations_that_are_set_beside_each_other_have_one_unit(site: Site) -> None:
    async def main() -> str:
        async with staged(site.browser, site.gateway.url, slow_queue) as page:
            await page.until("document.querySelector('table.whatif')")
            return str(await page.ask(DURATIONS))

    text = site.runner.run(main())
    assert len(re.findall(r"\d\u202fs\b", text)) > 20
    assert re.findall(r".*\d\u202fms\b.*", text) == []
    assert "0.0060\u202fs" in text, "small ones keep their digits"


CHECK = {
    "observed": 0.104,
    "modelled": 0.1,
    "difference": 0.004,
    "requests": 1204,
    "ratio": 1.04,
    "ratio_low": 1.01,
    "ratio_high": 1.07,
    "verdict": "agree",
    "causes": [],
}


@pytest.mark.parametrize(
    ("changed", "headline"),
    [
        ({}, "The model agrees with the requests that came"),
        ({"ratio_low": 0.7, "ratio_high": 1.38}, "The model agrees with the requests that came"),
        ({"verdict": "too_few"}, "Too early to judge"),
        (
            {"verdict": "disagree", "causes": ["the engine: its speed changed"]},
            "The model disagrees with the requests that came: ",
        ),
    ],
)
def test_the_headline_is_the_check(site: Site, changed: dict[str, object], headline: str) -> None:
    def early(topics: Topics) -> None:
        calm(topics)
        comparison = topics["look"]["prediction"]["comparison"]
        comparison["check"] = CHECK | changed

    async def main() -> tuple[str, str]:
        async with staged(site.browser, site.gateway.url, early) as page:
            await page.until(f"document.querySelector('h1').textContent.startsWith('{headline}')")
            return await page.text("#why"), await page.text("#pair")

    why, pair = site.runner.run(main())
    assert "Model, same requests" in pair
    assert ("The engine: its speed changed." in why) == ("causes" in changed)
    if not changed:
        assert "1,204 requests, 4.0\u202f% above the model of the same ones (95" in why
        assert "+1.0\u202f% to +7.0\u202f%)" in why


def calm(topics: Topics) -> None:
    """Whatever the gateway's clients did lately: a steady state whose conditions hold."""
    slow_queue(topics)
    prediction = topics["look"]["prediction"]
    prediction |= {"stable": True, "load": 0.5}
    for each in prediction["comparison"]["assumptions"].values():
        each["holds"] = True


def test_without_a_check_it_is_too_early_and_the_forecast_stands_alone(site: Site) -> None:
    def early(topics: Topics) -> None:
        calm(topics)
        topics["look"]["prediction"]["comparison"] |= {"check": None, "n": 12}

    async def main() -> tuple[str, str]:
        async with staged(site.browser, site.gateway.url, early) as page:
            await page.until("document.querySelector('h1').textContent === 'Too early to judge'")
            return await page.text("#why"), await page.text("#pair")

    why, pair = site.runner.run(main())
    assert "before more of them have ended" in why
    assert "In the long run:" in why
    assert "Model, same requests" not in pair


@pytest.mark.parametrize("name", ["poisson_arrivals", "law_shape"])
def test_a_condition_of_the_forecast_that_fails_is_said_beside_a_model_that_agrees(
    site: Site, name: str
) -> None:
    def bursts(topics: Topics) -> None:
        calm(topics)
        comparison = topics["look"]["prediction"]["comparison"]
        comparison["check"] = CHECK
        comparison["assumptions"][name] = {"holds": False, "says": f"{name} fails"}

    async def main() -> str:
        async with staged(site.browser, site.gateway.url, bursts) as page:
            await page.until(
                "document.querySelector('h1').textContent.startsWith('The model agrees')"
            )
            return await page.text("#why")

    why = site.runner.run(main())
    of_the_forecast = name == "poisson_arrivals"
    assert ("in the long run, does not hold: " in why) is of_the_forecast
    assert ("Poisson_arrivals fails." in why) is of_the_forecast
    assert ("In the long run: " in why) is not of_the_forecast


def test_calls_of_several_sequences_are_arrivals_of_one_call_each(site: Site) -> None:
    def calls(topics: Topics, sequences: float) -> None:
        row, columns = topics["now"]["row"], topics["hello"]["columns"]
        row[columns.index("arrival_rate")], row[columns.index("sequence_rate")] = 2.0, sequences
        topics["look"]["rate_seconds"] = 52.0

    async def main() -> list[str]:
        shown = []
        for sequences in (2.0, 8.0):
            async with staged(
                site.browser, site.gateway.url, lambda topics, rate=sequences: calls(topics, rate)
            ) as page:
                await page.until("document.querySelectorAll('#now dd').length === 6")
                shown.append(await page.text("#now"))
        return shown

    alone, grouped = site.runner.run(main())
    assert "sequences each" not in alone
    assert "calls over 52\u202fs, 4.00 sequences each" in grouped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "says"),
    [
        (2.4, "The arrival rate is 140\u202f% above the largest stable rate, and"),
        (1.034, "The arrival rate is 3.4\u202f% above the largest stable rate, and"),
        (1.0, "The arrival rate is not below the largest stable rate, and"),
        (0.97, "The load is 0.97 (0.90 to 1.04): the queue grows without bound."),
        (None, "The arrival rate is not below the largest stable rate, and"),
    ],
)
def test_an_overload_says_by_how_much(site: Site, load: float | None, says: str) -> None:
    def over(topics: Topics) -> None:
        prediction = topics["look"]["prediction"]
        prediction |= {"stable": False, "load": load}
        grows = "the load is 0.97 (0.90 to 1.04): the queue grows without bound"
        prediction["comparison"]["assumptions"]["stable_queue"] = {"holds": False, "says": grows}

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, over) as page:
            await page.until(
                "document.querySelector('h1').textContent.startsWith('No steady state')"
            )
            assert (await page.text("#why")).startswith(says)

    site.runner.run(main())


@pytest.mark.parametrize(("stable", "h1"), [(None, "The gateway refuses"), (True, "Too early")])
def test_a_gateway_that_refuses_calls_is_no_growing_queue_and_blames_no_client(
    site: Site, stable: bool | None, h1: str
) -> None:
    says = "41.2% of the calls were refused by limits of the gateway (slo 41.2%): the prediction is"

    def refusing(topics: Topics) -> None:
        prediction = topics["look"]["prediction"]
        prediction |= {"stable": stable, "load": 0.94 if stable else 1.02}
        comparison = prediction["comparison"]
        comparison |= {"verdict": "disagree", "reasons": ["all_admitted"], "check": None}
        if not stable:  # what is refused keeps the queue finite
            comparison["predicted"] = {"value": None, "low": None, "high": None}
        names = comparison["assumptions"]
        names["all_admitted"] = {"holds": False, "says": says}
        for name in ("no_retries", "open_loop", "constant_rate", "poisson_arrivals"):
            names[name] = {
                "holds": None,
                "says": "not judged: the gateway refuses calls",
                "applies": False,
            }

    async def main() -> tuple[str, str]:
        async with staged(site.browser, site.gateway.url, refusing) as page:
            await page.until(f"document.querySelector('h1').textContent.startsWith('{h1}')")
            return await page.text("h1"), await page.text("#why")

    headline, why = site.runner.run(main())
    assert "the gateway refuses a part of the calls" in (headline + why).lower()
    assert says.capitalize() in why.capitalize()
    for blamed in ("client", "burst", "Poisson", "grows", "No steady state"):
        assert blamed not in headline + why


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 720, 1280])
def test_no_option_is_broken_at_a_hyphen(site: Site, width: int) -> None:
    def off(topics: Topics) -> None:
        topics["gateway"]["looks"] = False
        topics["look"] = {"prediction": None, "reason": None}

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, off, width=width) as page:
            await page.until("document.querySelector('#why .flag')")
            assert await page.text("#why .flag") == "--prediction-interval"
            assert (
                await page.ask("document.querySelector('#why .flag').getClientRects().length") == 1
            )

    site.runner.run(main())


def test_the_command_of_the_empty_page_is_broken_between_options_only(site: Site) -> None:
    def empty(topics: Topics) -> None:
        topics["look"] = {"prediction": None, "reason": None}
        topics["now"]["row"][topics["hello"]["columns"].index("arrival_rate")] = 0

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, empty, width=320) as page:
            await page.until("document.querySelector('#action code')")
            command = await page.ask("document.querySelector('#action code').textContent")
            assert (
                command
                == f"kendall load --base-url {site.gateway.url} --request-rate 5 --num-prompts 500"
            )
            assert await page.ask(
                "[...document.querySelectorAll('#action .flag')].every(e => "
                "e.getClientRects().length === 1)"
            )
            assert await page.ask("document.documentElement.scrollWidth") <= 320

    site.runner.run(main())


NONE_ENDED = "0 requests of this epoch have ended in the last 300 s; 50 are needed"
BEFORE_THE_FIRST = (
    "no prediction yet: one is made every 5 s once 50 requests of this epoch have ended"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "switched", "says"),
    [
        (NONE_ENDED, False, "No requests yet"),
        (NONE_ENDED, True, "No requests in this epoch yet"),
        (BEFORE_THE_FIRST, False, "No requests yet"),
    ],
)
def test_no_requests_is_said_of_the_epoch_after_a_switch(
    site: Site, *, reason: str, switched: bool, says: str
) -> None:
    def empty(topics: Topics) -> None:
        topics["look"] = {"prediction": None, "reason": reason}
        topics["now"]["row"][topics["hello"]["columns"].index("arrival_rate")] = 0
        first = topics["switches"][0] | {"first": True}
        topics["switches"] = [first, first | {"first": False, "epoch": 3}] if switched else [first]

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, empty) as page:
            await page.until("document.querySelector('#action code')")
            assert await page.text("h1") == says

    site.runner.run(main())


def test_assumptions_that_hold_are_one_line_and_those_of_other_calls_none(site: Site) -> None:
    def judged(topics: Topics) -> None:
        found = topics["look"]["prediction"]["comparison"]["assumptions"]
        found.clear()
        found["no_retries"] = {"holds": True, "says": "nobody tried again"}
        found["stable_queue"] = {"holds": True, "says": "the load is 0.5"}
        found["law_shape"] = {"holds": False, "says": "the law misses"}
        found["constant_speed"] = {"holds": None, "says": "too few batches"}
        found["enough_memory"] = {
            "holds": None,
            "says": "not judged: batches, or preemption",
            "applies": False,
        }

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, judged) as page:
            await page.until("document.querySelectorAll('#assumptions > li').length === 3")
            shown = "[...document.querySelectorAll('#assumptions > li')].map(e => e.innerText)"
            speed, shape, rest = await page.ask(shown)
            assert "too few batches" in speed
            assert "the law misses" in shape
            assert rest == "The other 2 hold"
            await page.click("#assumptions summary")
            assert "the load is 0.5" in await page.text("#assumptions > li:last-child")

    site.runner.run(main())
