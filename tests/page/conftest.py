"""One browser for all tests of the page, and two gateways: one to look at, and one whose setting
may be changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser, chromium
from tests.page.site import Site, in_force, put_in_force, served_lately, serving

LONGEST = 900  # seconds of a test: several waits of `tests.page.browser.PATIENCE`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this folder's tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def browser(runner: asyncio.Runner) -> Iterator[Browser]:
    context = chromium()
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


@contextlib.contextmanager
def a_site(runner: asyncio.Runner, browser: Browser, folder: Path) -> Iterator[Site]:
    place = serving(folder)
    gateway = runner.run(place.__aenter__())
    try:
        yield Site(browser, gateway, runner)
    finally:
        runner.run(place.__aexit__(None, None, None))


@pytest.fixture(scope="package")
def looked_at(
    runner: asyncio.Runner, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with a_site(runner, browser, tmp_path_factory.mktemp("looked_at")) as site:
        yield site


@pytest.fixture(scope="package")
def changed(
    runner: asyncio.Runner, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with a_site(runner, browser, tmp_path_factory.mktemp("changed")) as site:
        yield site


@pytest.fixture
def site(looked_at: Site) -> Iterator[Site]:
    """A gateway that has served within the last minute. No test changes its setting: that would
    take the prediction from the others.
    """
    looked_at.runner.run(served_lately(looked_at.gateway))
    before = looked_at.runner.run(in_force(looked_at.gateway))
    yield looked_at
    assert looked_at.runner.run(in_force(looked_at.gateway)) == before, (
        "a test that changes the setting takes `operated`"
    )


@pytest.fixture
def operated(changed: Site) -> Site:
    """A gateway without a request, whose setting a test may change: each begins with that of
    FLAGS.
    """
    changed.runner.run(put_in_force(changed.gateway))
    return changed
