"""A browser and a gateway for the tests of the page, new ones for each module: their tests change what it has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.page.browser import chromium
from tests.page.site import Site, served_for_a_while, serving


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with asyncio.Runner() as runner:
        context = chromium()
        browser = runner.run(context.__aenter__())
        place = serving(tmp_path_factory.mktemp("page"))
        try:
            gateway = runner.run(place.__aenter__())
            try:
                runner.run(served_for_a_while(gateway))
                yield Site(browser, gateway, runner)
            finally:
                runner.run(place.__aexit__(None, None, None))
        finally:
            runner.run(context.__aexit__(None, None, None))
