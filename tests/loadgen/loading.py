"""A load planned from options and sent to a server in the test's own process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kendall.loadgen.sending.options import LoadOptions
from kendall.loadgen.sending.plan import LoadPlan, plan_load
from kendall.loadgen.sending.run import LoadResult
from tests.loadgen.fake_server import FakeServer, Handler, answer, serving


def planned(**options: Any) -> LoadPlan:
    """A plan for no server in particular."""
    given = {"base_url": "http://127.0.0.1:9", "request_rate": 500.0, "num_prompts": 20}
    return plan_load(LoadOptions(**given | options))


def loaded(
    handler: Handler = answer, path: Path | None = None, **options: Any
) -> tuple[LoadResult, FakeServer]:
    """The result of a run, and the server that had it."""

    async def main() -> tuple[LoadResult, FakeServer]:
        async with serving(handler) as server:
            plan, _ = await planned(base_url=server.url, **options).for_server()
            return await plan.run(path=path), server

    return asyncio.run(main())
