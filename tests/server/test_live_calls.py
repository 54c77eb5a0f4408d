"""Calls with `n` and lists of prompts at a serving gateway: the live model counts each call as
one arrival, and goes on predicting.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from tests.server.live_harness import answered

CALLS, RATE = 300, 60.0
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "a", "n": 4},
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": ["a", "b", "c", "d"]},
)


@pytest.mark.slow
def test_calls_of_four_sequences_are_predicted(tmp_path: Path) -> None:
    async def main() -> None:
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--policy",
            "capped:max_batch_size=8",
            "--prediction-interval",
            "1",
        ]
        async with GatewayProcess(arguments, free_port(0), tmp_path / "log") as gateway:
            await gateway.ready()
            async with httpx.AsyncClient(
                timeout=60, limits=httpx.Limits(max_connections=None)
            ) as client:
                await asyncio.gather(
                    *(call(client, gateway.url, index, at) for index, at in enumerate(poisson(3)))
                )
            found = await answered(gateway, "/admin/prediction", "prediction")
            state = await answered(gateway, "/admin/state", "estimates")
            assert "Traceback" not in (tmp_path / "log").read_text()
        assert found["prediction"]["model"].startswith("M^X")
        assert state["estimates"]["sequences"]["mean"]["value"] == 4
        assert state["arrivals"]["count"] == CALLS
        assert (
            found["prediction"]["comparison"]["assumptions"]["poisson_arrivals"]["holds"]
            is not False
        )
        assert state["failures"]["prediction"] == {"count": 0, "in_a_row": 0, "last": None}
        assert all(check["holds"] for check in state["self_checks"])

    asyncio.run(main())


def poisson(seed: int) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / RATE, CALLS)).tolist()


async def call(client: httpx.AsyncClient, url: str, index: int, at: float) -> None:
    await asyncio.sleep(at)
    answer = await client.post(
        f"{url}/v1/completions",
        json={"model": "tiny", "max_tokens": 6, **BODIES[index % len(BODIES)]},
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 4
