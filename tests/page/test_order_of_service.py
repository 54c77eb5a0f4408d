"""The order of service on the page: what the gateway lists for a policy, with its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.policies import parse_policy
from kendall.policies.orders import ORDERS
from kendall.policies.registry import POLICIES, every_policy
from kendall.policies.routes import ROUTES
from tests.page.browser import Browser, Page
from tests.page.site import in_force, serving

LISTED = "document.querySelector('#policy-name').value !== ''"
OUTCOME = "document.querySelector('#outcome').textContent"
NAMES = "[...document.querySelectorAll('#order option')].map(each => each.value)"
LABELS = (
    "[...document.querySelectorAll('#order-parameters label')]"
    ".map(each => each.firstChild.textContent.trim()).join(', ')"
)
VALUE = "document.querySelector('#%s').value"
HIDDEN = "document.querySelector('#order-field').hidden"


@asynccontextmanager
async def chosen(
    browser: Browser, folder: Path, policy: str
) -> AsyncIterator[tuple[GatewayProcess, Page]]:
    """The page of a gateway, with this policy's parameters shown."""
    async with serving(folder) as gateway, browser.page() as page:
        await page.open(gateway.url)
        await page.until(LISTED)
        await page.type("#policy-name", policy)
        yield gateway, page


def served(policy: str) -> list[str]:
    return [name for name, order in ORDERS.items() if POLICIES[policy].serves(order)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES)
def test_the_gateway_lists_the_orders_that_a_policy_serves_with_their_parameters(
    name: str,
) -> None:
    (listed,) = (each.to_dict() for each in every_policy() if each.name == name)
    assert [order["name"] for order in listed["orders"]] == served(name)
    needed = {"fixed": "batch_size=4,", "capped": "max_batch_size=4,"}.get(name, "")
    for order in listed["orders"]:
        cls = ORDERS[order["name"]]
        assert (order["predicts"], order["preemptive"]) == (cls.predicts, cls.preemptive)
        names = [parameter["name"] for parameter in order["parameters"]]
        assert ("max_preemptions" in names) == cls.preemptive
        values = [(each["choices"] or [2])[-1] for each in order["parameters"]]
        given = "".join(f",{key}={value}" for key, value in zip(names, values, strict=True))
        parse_policy(f"{name}:{needed}order={order['name']}{given}")
    assert name not in ("single", "continuous") or "sprpt" in served(name)


@pytest.mark.slow
def test_an_order_is_chosen_and_its_parameters_are_set(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with chosen(browser, tmp_path, "continuous") as (gateway, page):
            assert await page.ask(NAMES) == served("continuous")
            assert await page.ask(VALUE % "order") == "fcfs"
            assert await page.ask(LABELS) == ""
            await page.type("#order", "spjf")
            assert await page.ask(LABELS) == "aging, by, prompt weight"
            await page.type("#parameter-aging", "0.02")
            await page.type("#size", "4")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: continuous')")
            expected = "continuous:max_batch_size=4,order=spjf,aging=0.02"
            assert (await in_force(gateway))["policy"] == expected
            await page.open(gateway.url)
            await page.until("document.querySelector('#parameter-aging') !== null")
            assert await page.ask(VALUE % "order") == "spjf"
            assert await page.ask(VALUE % "parameter-aging") == "0.02"
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('Nothing to change')")
            await page.type("#order", "trail")
            assert await page.ask(LABELS) == "aging, by, prompt weight, c, max preemptions"
            assert await page.ask("document.querySelector('#parameter-c').placeholder") == "0.8"
            await page.type("#parameter-c", "0.5")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.includes('order=trail')")
            expected = "continuous:max_batch_size=4,order=trail,c=0.5"
            assert (await in_force(gateway))["policy"] == expected
            assert page.complaints == []

    runner.run(main())


@pytest.mark.slow
def test_another_policy_has_its_own_orders_and_begins_anew_where_it_has_not_the_one_chosen(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with chosen(browser, tmp_path, "single") as (gateway, page):
            await page.type("#order", "sprpt")
            await page.type("#policy-name", "dynamic")
            assert await page.ask(NAMES) == served("dynamic")
            assert "sprpt" not in served("dynamic")
            assert await page.ask(VALUE % "order") == "fcfs"
            await page.type("#order", "ljf")
            await page.type("#policy-name", "single")
            assert await page.ask(VALUE % "order") == "ljf", "which it serves too"
            await page.type("#order", "threshold")
            before = await in_force(gateway)
            await page.click("#apply")
            await page.until(f"{OUTCOME}.includes('the threshold is missing')")
            assert await in_force(gateway) == before
            await page.type("#parameter-threshold", "40")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: single')")
            assert (await in_force(gateway))["policy"] == "single:order=threshold,threshold=40"
            await page.type("#order", "fcfs")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: single,')")
            assert (await in_force(gateway))["policy"] == "single"
            assert not await page.ask(HIDDEN)
            assert page.complaints == []

    runner.run(main())


@pytest.mark.slow
def test_a_route_is_chosen_among_those_there_are_and_stays_with_another_order(
    browser: Browser, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def main() -> None:
        async with chosen(browser, tmp_path, "continuous") as (gateway, page):
            choices = "[...document.querySelectorAll('#parameter-route option')].map(e => e.value)"
            assert await page.ask(choices) == ["", *ROUTES]
            await page.type("#parameter-route", "prefix")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.startsWith('In force: continuous')")
            assert (await in_force(gateway))["policy"] == "continuous:max_batch_size=8,route=prefix"
            await page.type("#order", "ljf")
            await page.click("#apply")
            await page.until(f"{OUTCOME}.includes('order=ljf')")
            expected = "continuous:max_batch_size=8,order=ljf,route=prefix"
            assert (await in_force(gateway))["policy"] == expected
            assert page.complaints == []

    runner.run(main())
