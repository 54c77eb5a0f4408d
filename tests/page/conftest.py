"""One browser and one gateway for all tests of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser, chromium
from tests.page.site import Site, served_for_a_while, serving


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def browser(runner: asyncio.Runner) -> Iterator[Browser]:
    context = chromium()
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="package")
def site(runner: asyncio.Runner, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway that has served for a while."""
    place = serving(tmp_path_factory.mktemp("page"))
    gateway = runner.run(place.__aenter__())
    try:
        runner.run(served_for_a_while(gateway))
        yield Site(browser, gateway, runner)
    finally:
        runner.run(place.__aexit__(None, None, None))


@pytest.fixture
def operated(site: Site) -> Site:
    """The same, for tests that change its setting: they run last."""
    return site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that change the gateway's setting come after those that look at it."""
    mine = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[place] for place in mine), key=lambda item: "operated" in getattr(item, "fixturenames", ()))
    for place, item in zip(mine, ordered, strict=True):
        items[place] = item
