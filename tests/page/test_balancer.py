"""The line of several servers: what a load balancer would cost, below the what-ifs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.page.site import LONGEST, Site, at_rest, becomes, loaded, serving
from tests.page.staged import Topics, slow_queue, staged

NUMBER = re.compile(r"([0-9.,]+)\u202f(ms|s)")
LINE = "document.querySelector('#balancer')"


def balanced(compared: str = "queueing_delay") -> dict[str, Any]:
    """Of a gateway with two servers."""

    def durations(delay: float, sojourn: float) -> dict[str, Any]:
        return {"queueing_delay": {"mean": delay}, "sojourn_time": {"mean": sojourn}}

    return {
        "servers": 2,
        "policy": "capped:max_batch_size=8",
        "compared": compared,
        "central": durations(0.8, 2.0),
        "routings": [
            {"routing": "random"} | durations(1.9, 3.1),
            {"routing": "round_robin"} | durations(1.4, 2.6),
            {"routing": "least_requests", "queueing_delay": None, "sojourn_time": None},
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize(
    ("compared", "says"),
    [
        (
            "queueing_delay",
            "Mean queueing delay behind a load balancer, with a queue at each of 2 servers: "
            "random 1.90 s, in turn 1.40 s; here, in one queue, 0.800 s.",
        ),
        (
            "sojourn_time",
            "Mean sojourn time behind a load balancer, with a queue at each of 2 servers: "
            "random 3.10 s, in turn 2.60 s; here, in one queue, 2.00 s.",
        ),
    ],
)
def test_several_servers_have_one_line_that_fits(
    site: Site, compared: str, says: str, width: int
) -> None:
    def several(topics: Topics) -> None:
        slow_queue(topics)
        topics["load_balancer"] = balanced(compared)

    async def main() -> None:
        async with staged(site.browser, site.gateway.url, several, width=width) as page:
            await page.until(f"{LINE}.offsetParent")
            assert (await page.text("#balancer")).replace("\u202f", " ") == says
            assert await page.ask(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            assert await page.ask(f"{LINE}.getBoundingClientRect().height") < 100
            assert page.complaints == []

    site.runner.run(main())


def test_one_server_has_no_such_line(site: Site) -> None:
    async def main() -> None:
        async with staged(site.browser, site.gateway.url, slow_queue) as page:
            await page.until("document.querySelector('table.whatif')")
            assert await page.ask(f"{LINE}.hidden")
            assert await page.text("#balancer") == ""

    site.runner.run(main())


@pytest.mark.slow
def test_the_line_of_a_gateway_with_two_servers_has_the_numbers_of_its_json(
    site: Site, tmp_path: Path
) -> None:
    async def main() -> None:
        async with serving(tmp_path, "--replicas", "2") as gateway:

            async def fact() -> dict[str, Any]:
                found = await gateway.ask("GET", "/admin/prediction")
                return dict(found["load_balancer"] or {})

            async def ready() -> bool:
                return bool(await fact())

            async with loaded(gateway, 40.0, LONGEST):
                await becomes(ready)
            async with site.browser.page() as page:
                await page.open(gateway.url)
                await page.until(f"{LINE}.offsetParent")
                await at_rest(fact, lambda: page.text("#balancer"), agree)

    site.runner.run(main())


def agree(found: dict[str, Any], says: str) -> None:
    """What the gateway predicts, and the line."""
    shown = [float(number) * scale(unit) for number, unit in NUMBER.findall(says)]
    told = [*found["routings"], found["central"]]
    assert [each["routing"] for each in told[:-1]] == ["random", "round_robin"]
    assert shown == pytest.approx([each["queueing_delay"]["mean"] for each in told], rel=6e-3)
    assert f"each of {found['servers']} servers" in says


def scale(unit: str) -> float:
    return {"ms": 1e-3, "s": 1.0}[unit]
