"""What an operator does on the page: setting, autopilot, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.page.browser import Browser, Page
from tests.page.site import (
    CAPPED,
    CHARTS,
    DRAWN,
    READY,
    Site,
    in_force,
    served_lately,
    serving,
    text_of,
)

MARKED = "document.querySelectorAll('.plot[data-marks=\"1\"]').length"


@pytest.mark.slow
def test_a_switch_from_the_page_takes_effect_and_is_marked_on_every_chart(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as gateway, browser.page() as page:
            await served_lately(gateway)
            await page.open(gateway.url)
            await page.until(f"{DRAWN} >= {CHARTS} && !document.querySelector('#apply').disabled")
            before = await in_force(gateway)
            assert before["policy"] == CAPPED
            assert await page.ask(MARKED) == 0
            await page.type("#policy-name", "elastic")
            await page.type("#size", "4")
            await page.type("#limit", "48")
            await page.click("#apply")
            await page.until(
                "document.querySelector('#outcome').textContent.startsWith('In force: "
                "elastic:max_batch_size=4')"
            )
            found = await in_force(gateway)
            assert found["policy"] == "elastic:max_batch_size=4"
            assert found["max_output_tokens"] == 48
            assert found["epoch"] == before["epoch"] + 1
            await page.until(f"{MARKED} === {CHARTS}")
            assert "elastic" in await page.text("#now")
            await page.type("#size", "")
            await page.type("#limit", "")
            await page.click("#apply")
            await page.until(
                "document.querySelector('#outcome').textContent.startsWith('In force: elastic,')"
            )
            assert (await in_force(gateway))["max_output_tokens"] is None
            assert page.complaints == []

    runner.run(main())


def test_the_patience_is_shown_and_the_same_setting_again_begins_no_epoch(operated: Site) -> None:
    async def look(page: Page) -> None:
        await page.until("!document.querySelector('#apply').disabled")
        await page.type("#patience", "45")
        await page.click("#apply")
        await page.until(
            "document.querySelector('#outcome').textContent.includes('patience 45\u202fs. Epoch')"
        )
        await page.until(
            "document.querySelector('#bar-policy').textContent.includes('patience 45')"
        )
        assert "patience 45" in await page.text("#now")
        before = await operated.gateway.ask("GET", "/admin/policy")
        await page.click("#apply")
        await page.until(
            "document.querySelector('#outcome').textContent.startsWith('Nothing to change')"
        )
        assert await operated.gateway.ask("GET", "/admin/policy") == before
        await page.type("#limit", "9")
        await page.click("#reset")
        assert await page.text("#outcome") == ""
        assert await page.ask("document.activeElement.id") == "policy-name"

    operated.run(look)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 720])
def test_the_unit_of_a_field_is_inside_its_box(operated: Site, width: int) -> None:
    async def look(page: Page) -> None:
        await page.until("!document.querySelector('#apply').disabled")
        await page.type("#policy-name", "fixed")
        right = "e.querySelector('%s').getBoundingClientRect().right"
        fits = f"e => {right % 'i'} <= {right % 'input'}"
        assert await page.ask(f"[...document.querySelectorAll('.with-unit')].every({fits})")

    operated.run(look, width=width)


def test_what_the_gateway_refuses_is_said_and_changes_nothing(operated: Site) -> None:
    async def look(page: Page) -> None:
        before = await operated.gateway.ask("GET", "/admin/policy")
        await page.until("!document.querySelector('#apply').disabled")
        await page.type("#patience", "0")
        await page.click("#apply")
        await page.until("document.querySelector('#outcome').classList.contains('bad')")
        assert "got a patience of 0; expected a number of seconds above 0" in await page.text(
            "#outcome"
        )
        assert await operated.gateway.ask("GET", "/admin/policy") == before

    operated.run(look)


@pytest.mark.slow
def test_a_batch_size_that_the_engine_cannot_hold_is_refused_by_the_page(operated: Site) -> None:
    async def look(page: Page) -> None:
        await page.until("!document.querySelector('#apply').disabled")
        before = await operated.gateway.ask("GET", "/admin/policy")
        for size, says in (
            ("99999", "got a batch size of 99999; this engine holds at most 16 requests at once"),
            ("2.5", "got a batch size of 2.5"),
        ):
            await page.type("#policy-name", "capped")
            await page.type("#size", size)
            await page.click("#apply")
            await page.until("document.querySelector('#outcome').classList.contains('bad')")
            assert says in await page.text("#outcome")
            assert (
                await page.ask(
                    "document.activeElement.id + "
                    "document.activeElement.getAttribute('aria-invalid')"
                )
                == "sizetrue"
            )
        await page.type("#size", "")
        await page.click("#apply")
        await page.until("document.querySelector('#outcome').textContent.includes('is missing')")
        assert await operated.gateway.ask("GET", "/admin/policy") == before
        assert [url for url in page.urls if "/admin/" in url] == [], "the gateway was not asked"

    operated.run(look)


@pytest.mark.slow
def test_a_policy_in_force_that_asks_for_more_than_the_engine_holds_does_not_block_the_form(
    operated: Site,
) -> None:
    async def look(page: Page) -> None:
        await operated.gateway.ask(
            "PUT", "/admin/policy", {"policy": "continuous:max_batch_size=64"}
        )
        await page.until(
            "document.querySelector('#size').value === '64' && "
            "!document.querySelector('#apply').disabled"
        )
        await page.type("#patience", "45")
        await page.click("#apply")
        await page.until(
            "document.querySelector('#outcome').textContent.startsWith('In force: "
            "continuous:max_batch_size=64')"
        )
        await page.type("#size", "65")
        await page.click("#apply")
        await page.until(
            "document.querySelector('#outcome').textContent.includes('got a batch size of 65; "
            "this engine holds at most 16')"
        )

    operated.run(look)


@pytest.mark.slow
def test_the_autopilot_is_steered_from_the_page_by_the_same_button_as_a_policy(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path) as gateway,
            browser.page() as page,
        ):  # without a request there is nothing to act on
            await page.open(gateway.url)
            await page.until(
                f"{READY} && document.querySelector('#autopilot input:checked')?.value === 'off'"
            )
            assert await page.text("#apply") == "Put in force"
            before = "off"
            for mode in ("advise", "act", "off"):
                await page.click(f"#autopilot input[value={mode}]")
                await page.until("!document.querySelector('#steer').hidden")
                assert await page.text("#steer") == "Put in force"
                shown = await page.text("#as-of")
                await page.until(
                    f"document.querySelector('#as-of').textContent !== '{shown}'"
                )  # the next event
                assert (
                    await page.ask("document.querySelector('#autopilot input:checked').value")
                    == mode
                ), "the choice stays"
                assert (await gateway.ask("GET", "/admin/state"))["autopilot"]["mode"] == before, (
                    "not before the button"
                )
                await page.click("#steer")
                await page.until(
                    f"document.querySelector('#outcome').textContent === 'Autopilot: {mode}.'"
                )
                assert (await gateway.ask("GET", "/admin/state"))["autopilot"]["mode"] == mode
                assert await page.ask("document.querySelector('#steer').hidden")
                before = mode

    runner.run(main())


@pytest.mark.slow
def test_the_operators_calls_need_the_admin_key_which_the_page_asks_for_and_keeps_for_the_tab(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path, "--admin-key", "an-admin-key-of-the-test") as gateway,
            browser.page() as page,
        ):
            await page.open(gateway.url)
            await page.until(f"{READY} && !document.querySelector('#apply').disabled")
            await page.type("#size", "4")
            await page.click("#apply")
            await page.until("document.querySelector('#key').open")
            await offer(page, "a-wrong-key")
            await page.until("document.querySelector('#outcome').classList.contains('bad')")
            assert CAPPED in await text_of(gateway)
            await page.click("#apply")
            await page.until("document.querySelector('#key').open")
            await offer(page, "an-admin-key-of-the-test")
            await page.until(
                "document.querySelector('#outcome').textContent.startsWith('In force: "
                "capped:max_batch_size=4')"
            )
            assert "capped:max_batch_size=4" in await text_of(gateway)
            await page.type("#size", "5")
            await page.click("#apply")
            await page.until("document.querySelector('#outcome').textContent.includes('Epoch 2')")
            assert (
                await page.ask(
                    "Object.keys(localStorage).filter(k => k.includes('key')).length + "
                    "document.cookie.length"
                )
                == 0
            )
            assert [url for url in page.urls if "an-admin-key" in url] == []
            await page.click("#forget")  # loads the page anew
            reloaded = "performance.getEntriesByType('navigation')[0].type === 'reload'"
            await page.until(f"{reloaded} && {READY} && !document.querySelector('#apply').disabled")
            await page.click("#apply")
            await page.until("document.querySelector('#key').open")

    runner.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "says"),
    [
        (
            "an-admin-€key",
            (
                "Got “€” (U+20AC) as character 10 of the key; expected printable ASCII characters "
                "without spaces."
            ),
        ),
        (
            "an-admin-\u200bkey-of-the-test",
            "Got U+200B as character 10 of the key; expected printable ASCII",
        ),
        ("an admin key", "Got U+0020 as character 3 of the key; expected printable ASCII"),
        (" \u200b", "Got an empty key; expected printable ASCII characters."),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_in_the_dialog(
    operated: Site, key: str, says: str
) -> None:
    async def look(page: Page) -> None:
        await page.until("!document.querySelector('#apply').disabled")
        asked = (
            "import(document.querySelector('link[rel=modulepreload][href$=\"admin.js\"]').href)"
            ".then(m => m.askForKey('Why'))"
        )
        await page.ask(f"window.key_ = null; {asked}.then(key => {{ window.key_ = key; }}); 1")
        await page.until("document.querySelector('#key').open")
        await offer(page, key)
        assert (await page.text("#key-why")).startswith(says)
        assert await page.ask("document.querySelector('#key').open"), "it asks again"
        assert (
            await page.ask(
                "document.activeElement.id + document.activeElement.getAttribute('aria-invalid')"
            )
            == "key-valuetrue"
        )
        assert await page.ask("sessionStorage.length") == 0
        await offer(page, "\ufeff a-key\u200b\u00a0")  # what copying brings along is taken away
        await page.until("window.key_ === 'a-key'")

    operated.run(look)


def test_a_stored_key_that_no_header_can_carry_does_not_lock_the_page(operated: Site) -> None:
    async def look(page: Page) -> None:
        await page.ask(
            "sessionStorage.setItem('kendall-admin-key', 'an-\u200badmin-key'); "
            "location.reload(); 1"
        )
        await page.until(
            f"performance.getEntriesByType('navigation')[0].type === 'reload' && {READY}"
        )

    operated.run(look)


async def offer(page: Page, key: str) -> None:
    await page.type("#key-value", key)
    await page.click("#key button[value=ok]")


# `leave()` ends the stream of events and refuses every other connection until `back()`
AWAY = """{
  const real = window.fetch;
  let away = false;
  window.back = () => { away = false; };
  window.fetch = async (url, ...more) => {
    if (away) throw new TypeError("away");
    const answer = await real(url, ...more);
    if (url !== "live/events") return answer;
    const leave = (stream) => { away = true; stream.error(new TypeError("away")); };
    const cut = { start(stream) { window.leave = () => leave(stream); } };
    return new Response(answer.body.pipeThrough(new TransformStream(cut)));
  };
}"""


def without_its_gateway(
    site: Site, before: Callable[[Page], Awaitable[None]], after: Callable[[Page], Awaitable[None]]
) -> None:
    """The page loses its connection: `before` it reconnects, and `after`."""

    async def look(page: Page) -> None:
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=AWAY)
        await page.open(site.gateway.url + "/")
        await page.until(f"window.leave && {READY} && !document.querySelector('#apply').disabled")
        await page.ask("window.leave(); 1")
        await page.until("document.body.dataset.link === 'lost'")
        await before(page)
        await page.ask("window.back(); 1")
        await page.until("document.body.dataset.link === 'live'")
        await after(page)

    site.run(look)


@pytest.mark.slow
def test_that_the_gateway_does_not_answer_is_said_until_it_answers_again(operated: Site) -> None:
    async def before(page: Page) -> None:
        await page.click("#apply")
        await page.until(
            "document.querySelector('#outcome').textContent === 'Not changed: the gateway does "
            "not answer'"
        )

    async def after(page: Page) -> None:
        await page.until("document.querySelector('#outcome').textContent === ''")

    without_its_gateway(operated, before, after)


@pytest.mark.slow
def test_another_note_outlasts_a_reconnection(operated: Site) -> None:
    async def before(page: Page) -> None:
        await page.type("#patience", "0")
        await page.click("#apply")

    async def after(page: Page) -> None:
        assert "got a patience of 0" in await page.text("#outcome")

    without_its_gateway(operated, before, after)


@pytest.mark.slow
def test_escape_closes_the_question_for_the_key_and_the_focus_returns_to_the_button(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path, "--admin-key", "an-admin-key-of-the-test") as gateway,
            browser.page() as page,
        ):
            await page.open(gateway.url)
            await page.until(f"{READY} && !document.querySelector('#apply').disabled")
            await page.type("#size", "4")
            await page.ask("document.querySelector('#apply').focus(); 1")
            await page.click("#apply")
            await page.until("document.querySelector('#key').open")
            assert await page.ask("document.activeElement.id") == "key-value"
            await page.until(
                "document.querySelector('#apply').disabled"
            )  # so that the browser cannot return the focus by itself
            await page.press("Escape")
            await page.until(
                "!document.querySelector('#key').open && "
                "document.querySelector('#outcome').textContent.startsWith('Not changed')"
            )
            assert await page.ask("document.activeElement.id") == "apply"
            assert CAPPED in await text_of(gateway)

    runner.run(main())


@pytest.mark.slow
def test_forget_key_ends_the_stream_that_was_opened_with_it(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Where the page itself needs a key: without it there is no stream, and the page asks again."""

    async def main() -> None:
        flags = ("--api-key", "an-api-key-of-the-test", "--metrics-need-key")
        async with serving(tmp_path, *flags) as gateway, browser.page() as page:
            await page.open(gateway.url)
            await page.until("document.querySelector('#key').open")
            assert await page.ask("document.querySelector('#forget').hidden")
            await offer(page, "an-api-key-of-the-test")
            await page.until(READY)
            assert not await page.ask("document.querySelector('#forget').hidden")
            await page.until("document.querySelector('#action code')")
            command = await page.ask("document.querySelector('#action code').textContent")
            assert command.endswith("--num-prompts 500 --api-key KEY")
            await page.click("#forget")
            await page.until(
                "document.querySelector('#key').open && document.body.dataset.link !== 'live'"
            )
            assert await page.ask("sessionStorage.length") == 0
            assert await page.ask("document.querySelector('#forget').hidden")
            await page.press("Escape")
            await page.until("document.querySelector('h1').textContent === 'This page needs a key'")
            assert "–" in await page.text("#now")

    runner.run(main())
