"""Several servers on the page: a row of each, what is said where none is there, how they are
changed; and settings that are advised.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kendall.server.page.state import COLUMNS
from tests.page.site import Site
from tests.page.staged import Topics, slow_queue, staged

ANSWERED = """{
  const told = window.fetch;
  window.sent = [];
  window.fetch = (url, options) => {
    if (!String(url).startsWith("admin/")) return told(url, options);
    window.sent.push([options.method, String(url), options.body ?? null]);
    const answer = %s[String(url)];
    return Promise.resolve(new Response(JSON.stringify(answer), { status: 200 }));
  };
} 1"""
ROWS = (
    "[...document.querySelectorAll('#server-rows tbody tr')].map(row => "
    "[...row.children].map(cell => cell.innerText))"
)
SENT = "window.sent"


def server(number: int, state: str, **changed: Any) -> dict[str, Any]:
    usual = {"in_service": 2, "utilisation": 0.61, "speed": 1.04}
    return {"id": number, "state": state} | usual | changed


def behind(topics: Topics, *states: str, life: str = "serving") -> None:
    """Servers behind, in these states."""
    topics["servers"] = [
        server(number, state) if state == "serving" else server(number, state, in_service=0)
        for number, state in enumerate(states)
    ]
    up = states.count("serving")
    gateway = {"engine": "http", "servers": len(states), "serving": up, "resizable": "urls"}
    topics["gateway"] |= gateway | {"state": life}


def test_a_gateway_with_one_engine_has_no_section_of_servers(site: Site) -> None:
    async def look(page: Any) -> None:
        assert await page.ask("document.querySelector('#servers').hidden")

    site.run(look)


@pytest.mark.slow
def test_each_server_has_a_row_with_its_state_its_load_and_its_speed(site: Site) -> None:
    def three(topics: Topics) -> None:
        behind(topics, "serving", "lost", "serving")
        topics["servers"][2]["speed"] = None

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, three) as page:
            await page.until("document.querySelectorAll('#server-rows tbody tr').length === 3")
            assert await page.ask(ROWS) == [
                ["Server 0", "serves", "2", "61\u202f%", "1.04"],
                ["Server 1", "does not answer", "0", "61\u202f%", "1.04"],
                ["Server 2", "serves", "2", "61\u202f%", "–"],
            ]
            about = await page.text("#about")
            assert "2 of 3 servers" in about
            assert "restart" not in about, "nothing restarts them from here"

    site.runner.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "headline"),
    [
        (("lost",), "The server behind does not answer"),
        (("lost", "lost"), "None of the servers behind answers"),
    ],
)
def test_without_a_server_behind_nothing_is_said_to_be_restarted_or_to_continue(
    site: Site, states: tuple[str, ...], headline: str
) -> None:
    async def main() -> tuple[str, str]:
        def dead(topics: Topics) -> None:
            slow_queue(topics)
            behind(topics, *states, life="restarting")

        async with staged(site.browser, site.gateway.url, dead) as page:
            await page.until(f"document.querySelector('h1').textContent === '{headline}'")
            assert "nothing serves now" in await page.text("#whatif-age")
            assert not await page.ask("!!document.querySelector('table.whatif button')")
            return await page.text("#why"), await page.text("#bar-verdict")

    why, bar = site.runner.run(main())
    assert "nothing restarts" in why
    assert "answer had begun have failed" in why
    assert "continue" not in why
    assert bar == "No server answers"


def test_servers_behind_are_changed_once_their_urls_are_shown(site: Site) -> None:
    known = {
        "replicas": 2,
        "servers": [
            {"id": 0, "url": "http://a:1", "state": "serving", "last_fault": None},
            {"id": 1, "url": "http://b:2", "state": "lost", "last_fault": "connection refused"},
        ],
    }

    async def main() -> None:
        def two(topics: Topics) -> None:
            behind(topics, "serving", "lost")

        async with staged(site.browser, site.gateway.url, two) as page:
            await page.until("document.querySelectorAll('#server-rows tbody tr').length === 2")
            assert "http" not in await page.text("#server-rows"), "addresses are the operator's"
            assert await page.ask("document.querySelector('#apply-servers').hidden")
            await page.ask(ANSWERED % json.dumps({"admin/servers": known}))
            await page.click("#show-urls")
            await page.until("!document.querySelector('#apply-servers').hidden")
            rows = await page.ask(ROWS)
            assert rows[0][0] == "Server 0 http://a:1"
            assert rows[1][1] == "does not answer connection refused"
            assert await page.ask("document.querySelector('#urls').value") == (
                "http://a:1\nhttp://b:2"
            )
            await page.ask(
                "{ const urls = document.querySelector('#urls'); urls.value = "
                "'http://a:1 http://c:3'; } 1"
            )
            await page.click("#apply-servers")
            await page.until("document.querySelector('#servers-outcome').textContent")
            sent = await page.ask(SENT)
            assert [each[:2] for each in sent] == [
                ["GET", "admin/servers"],
                ["PUT", "admin/servers"],
            ]
            assert json.loads(sent[1][2]) == {"urls": ["http://a:1", "http://c:3"]}

    site.runner.run(main())


def advice(
    target: str, current: dict[str, Any], best: dict[str, Any], *, change: bool = True
) -> dict[str, Any]:
    usual = {"policy": "single", "max_output_tokens": None, "servers": 2, "stable": True}
    return {
        "target": target,
        "gain": {"value": 0.4, "low": 0.3, "high": 0.5},
        "compared": "sojourn_time",
        "says": "something else",
        "change": change,
        "current": usual | current,
        "best": usual | best,
    }


@pytest.mark.slow
def test_what_is_advised_can_be_put_into_the_form_where_it_is_something_else(site: Site) -> None:
    asked = {
        "admin/advice": {
            "reason": None,
            "advice": [
                advice("policy", {}, {"policy": "capped:max_batch_size=4"}),
                advice("max-output-tokens", {}, {}, change=False),
                advice("servers", {}, {"servers": 3}),
                advice("batch-size", {}, {"stable": False, "policy": "dynamic"}),
            ],
        }
    }

    async def main() -> None:
        def replicas(topics: Topics) -> None:
            topics["servers"] = [server(number, "serving") for number in range(2)]
            topics["gateway"] |= {"servers": 2, "serving": 2, "resizable": "replicas"}

        async with staged(site.browser, site.gateway.url, replicas) as page:
            await page.until("document.querySelectorAll('#server-rows tbody tr').length === 2")
            await page.ask(ANSWERED % json.dumps(asked))
            await page.click("#ask-advice")
            await page.until("document.querySelectorAll('#advice li').length === 4")
            buttons = (
                "[...document.querySelectorAll('#advice li')].map(e => !!e.querySelector('button'))"
            )
            assert await page.ask(buttons) == [True, False, True, False]
            await page.click("#advice li:nth-child(1) button")
            assert await page.ask("document.querySelector('#policy-name').value") == "capped"
            assert await page.ask("document.querySelector('#size').value") == "4"
            assert "not in force yet" in await page.text("#outcome")
            await page.click("#advice li:nth-child(3) button")
            assert await page.ask("document.querySelector('#replicas').value") == "3"
            assert "not in force yet" in await page.text("#servers-outcome")
            assert [each[0] for each in await page.ask(SENT)] == ["GET"], "nothing is changed by it"

    site.runner.run(main())


@pytest.mark.slow
def test_an_advice_is_asked_for_at_another_rate_and_for_an_slo(site: Site) -> None:
    rate = {"says": ["12 requests/s, 1.5 times 8 requests/s observed", "the setting in force ends"]}
    query = "admin/advice?rate_factor=1.5&slo=p99_queueing_delay%3D2s"
    answer = {"reason": None, "advice": [advice("policy", {}, {}, change=False)]}
    asked = {query: answer | {"rate": rate}, "admin/advice": answer}

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, lambda _: None) as page:
            await page.ask(ANSWERED % json.dumps(asked))
            await page.click("#ask-advice")
            await page.until("document.querySelectorAll('#advice li').length === 1")
            await page.type("#advice-rate", "1.5")
            assert "1.5 times as many as now" in await page.text("#advice .asked")
            await page.type("#advice-slo", " p99_queueing_delay=2s")
            await page.click("#ask-advice")
            await page.until("document.querySelectorAll('#advice .note').length === 2")
            notes = "[...document.querySelectorAll('#advice .note')].map(each => each.innerText)"
            assert await page.ask(notes) == [
                "For 12 requests/s, 1.5 times 8 requests/s observed.",
                "The setting in force ends.",
            ]
            sent = [each[1] for each in await page.ask(SENT)]
            assert sent == ["admin/advice", query]

    site.runner.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outdated", "left", "uses", "says"),
    [
        (False, 0, True, "ago."),
        (False, 3, True, "3 of them are being computed."),
        (True, 0, False, "before the arrival rate or the engine’s speed changed."),
    ],
)
def test_what_ifs_have_an_age_and_are_not_to_be_used_once_the_rate_has_changed(
    site: Site, outdated: bool, left: int, uses: bool, says: str
) -> None:
    def old(topics: Topics) -> None:
        at = topics["now"]["row"][0] - 309
        topics["what_if_state"] = {"at": at, "left": left, "outdated": outdated}
        slow_queue(topics)
        policies = [f"elastic:max_batch_size={size}" for size in (2, 3, 4, 5)]
        topics["what_if"] = [topics["what_if"][0] | {"policy": each} for each in policies]
        for each in topics["what_if"][:left]:
            each |= {"pending": True, "stable": None, "queueing_delay": None, "load": 0.4}

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, old) as page:
            await page.until("document.querySelector('table.whatif')")
            age = await page.text("#whatif-age")
            assert age.startswith("As of ")
            assert "5\u202fmin ago" in age
            assert says in age
            assert await page.ask("!!document.querySelector('table.whatif button')") is uses
            grey = await page.ask(
                "document.querySelector('table.whatif').classList.contains('outdated')"
            )
            assert grey is outdated
            remarks = "[...document.querySelectorAll('table.whatif .remark')].map(e => e.innerText)"
            assert (await page.ask(remarks)).count("being computed") == left

    site.runner.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "headline"),
    [
        (0.5, "The arrival rate has changed"),
        (2.9, "The arrival rate has changed: requests arrive faster than capped can serve them"),
    ],
)
def test_a_headline_from_before_a_change_says_so_and_what_the_load_is_now(
    site: Site, load: float, headline: str
) -> None:
    def stale(topics: Topics) -> None:
        row = topics["now"]["row"]
        topics["look"] |= {"outdated": True, "at": row[0] - 130, "rate_seconds": 20.0}
        for name, value in {"load": load, "arrival_rate": 45.0}.items():
            row[COLUMNS.index(name)] = value

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, stale) as page:
            await page.until(f"document.querySelector('h1').textContent === '{headline}'")
            why = await page.text("#why")
            assert (
                f"45.0 requests per second came over the last 20\u202fs: a load of {load:.0%}"[:-1]
                in why
            )
            assert "from 2\u202fmin ago, before the change" in await page.text("#why")
            assert await page.ask("document.querySelector('#pair').classList.contains('outdated')")
            assert "until 2\u202fmin ago" in await page.text("#pair")
            assert await page.text("#assumptions-age") == "From before the arrival rate changed."

    site.runner.run(main())


def test_advice_from_before_a_change_is_grey_and_not_to_be_used(site: Site) -> None:
    asked = {
        "admin/advice": {
            "reason": None,
            "advice": [advice("policy", {}, {"policy": "capped:max_batch_size=4"})],
        }
    }
    looks: list[Any] = []

    def fresh(topics: Topics) -> None:
        looks.append(topics["look"])

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, fresh) as page:
            await page.ask(ANSWERED % json.dumps(asked))
            await page.click("#ask-advice")
            await page.until("document.querySelector('#advice li button')")
            event = f"event: look\ndata: {json.dumps(looks[0] | {'outdated': True})}\n\n"
            await page.ask(f"window.tell({json.dumps(event)}); 1")
            await page.until("document.querySelector('#advice .outdated')")
            assert "before the last change" in await page.text("#advice .outdated")
            assert not await page.ask("!!document.querySelector('#advice li button')")

    site.runner.run(main())
