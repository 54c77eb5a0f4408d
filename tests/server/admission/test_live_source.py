"""Waits by the live model: told before they happen, right in the mean, on a serving gateway."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=4", "continuous:max_batch_size=4"])
def test_a_gateway_that_knows_its_law_tells_waits_that_come_true(
    tmp_path: Path, policy: str
) -> None:
    """Poisson arrivals at a load of about 0.8; predicted over observed seconds within 20 %."""

    async def main() -> None:
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--policy",
            policy,
            "--prediction-interval",
            "0.5",
            "--allow-forced-lengths",
        ]
        async with GatewayProcess(arguments, free_port(0), tmp_path / "log") as gateway:
            await gateway.ready()
            lengths, prompts = (
                parse_distribution("uniform:low=4,high=20"),
                parse_distribution("deterministic:value=8"),
            )
            await run_load(
                Target(base_url=gateway.url, model="tiny"),
                draw(180.0, 3000, 3, prompts, lengths),
                seed=3,
            )
            assert (await gateway.ask("GET", "/admin/state"))["overload"][
                "wait_source"
            ] == "live model"
            async with httpx.AsyncClient() as client:
                text = (await client.get(gateway.url + "/metrics")).text
            predicted, observed = (
                float(
                    re.findall(rf"^kendall_wait_{name}_seconds_total (\S+)$", text, re.MULTILINE)[0]
                )
                for name in ("predicted", "observed")
            )
            assert observed > 1
            assert predicted == pytest.approx(observed, rel=0.2)

    asyncio.run(main())
