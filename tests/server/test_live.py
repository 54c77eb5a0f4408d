"""The live prediction: beside the observation, in `/admin/prediction` and in the gauges."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.client import Target
from loadgen.gateway_process import GatewayProcess, free_port
from loadgen.run import run_load
from loadgen.timetable import draw
from queueing.distributions import parse_distribution


# near: a machine that holds the gateway back adds delay of its own
@pytest.mark.parametrize("near", [pytest.param(None, id="there"), pytest.param(0.5, id="near", marks=pytest.mark.slow)])
def test_a_serving_gateway_predicts_its_own_delay(tmp_path: Path, near: float | None) -> None:
    """After a few seconds of load the predicted mean is there beside the observed one, and a switch starts afresh."""

    async def main() -> None:
        arguments = ["tiny", "--engine", "emulated", "--policy", "capped:max_batch_size=4", "--prediction-interval", "1"]
        async with GatewayProcess([*arguments, "--allow-forced-lengths"], free_port(0), tmp_path / "log") as gateway:
            await gateway.ready()
            lengths, prompts = parse_distribution("uniform:low=4,high=20"), parse_distribution("deterministic:value=8")
            load = asyncio.create_task(run_load(Target(base_url=gateway.url, model="tiny"), draw(80.0, 1000, 3, prompts, lengths), seed=3))
            await answered(gateway, "/admin/prediction", "prediction")
            await load
            await asyncio.sleep(1.5)
            found = (await gateway.ask("GET", "/admin/prediction"))["prediction"]
            assert found["observed_mean"] > 0
            if near is not None:
                assert found["stable"]
                assert found["queueing_delay"]["mean"] == pytest.approx(found["observed_mean"], rel=near)
                assert 0.5 < found["speed"] < 3
            async with httpx.AsyncClient() as client:
                text = (await client.get(gateway.url + "/metrics")).text
            assert 'kendall_predicted_queueing_delay_seconds{method="exact",policy="capped:max_batch_size=4",stat="mean"}' in text
            assert 'kendall_prediction_error_ratio{policy="capped:max_batch_size=4"}' in text
            await gateway.ask("PUT", "/admin/policy", {"policy": "single"})
            await asyncio.sleep(1.2)
            assert (await gateway.ask("GET", "/admin/prediction"))["prediction"] is None

    asyncio.run(main())


async def answered(gateway: GatewayProcess, path: str, key: str) -> dict[str, Any]:
    """The first answer that has something there."""
    for _ in range(1000):  # the predicting process takes its time to start on a crowded machine
        if (found := await gateway.ask("GET", path))[key]:
            return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"{path} never had {key}")


@pytest.mark.slow
def test_what_is_known_survives_a_restart(tmp_path: Path) -> None:
    """Estimates and the autopilot's memory are in the state file; after a restart advice rests on them before a single request."""
    state = tmp_path / "state.json"
    arguments = ["tiny", "--engine", "emulated", "--policy", "dynamic", "--prediction-interval", "0.5", "--state-file", str(state)]
    arguments += ["--allow-forced-lengths", "--autopilot", "advise"]

    async def life(number: int, requests: int) -> tuple[dict[str, Any], dict[str, Any]]:
        async with GatewayProcess(arguments, free_port(0), tmp_path / f"log{number}") as gateway:
            await gateway.ready()
            if requests:
                lengths, prompts = parse_distribution("uniform:low=4,high=20"), parse_distribution("deterministic:value=8")
                await run_load(Target(base_url=gateway.url, model="tiny"), draw(100.0, requests, 3, prompts, lengths), seed=3)
            async with asyncio.timeout(60):
                advice = await answered(gateway, "/admin/advice?objective=delay&target=policy", "advice")
                return advice, await answered(gateway, "/admin/state", "estimates")

    asyncio.run(life(1, 600))
    assert state.exists()
    after, known = asyncio.run(life(2, 0))
    assert known["estimates"]["restored"]
    assert known["autopilot"]["mode"] == "advise"
    assert known["estimates"]["output_tokens"]["mean"]["value"] == pytest.approx(12, rel=0.05)
    assert after["advice"][0]["current"]["queueing_delay"]["mean"] > 0
