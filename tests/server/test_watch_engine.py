"""`kendall watch URL --once` beside a plain `vllm serve` under load: what it says of the engine is
what the clients saw, and what the model has for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.gateway_cost.servers import small_vllm
from kendall.queueing.measurement.record import read_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
SLOTS, TOKENS, RATE, SECONDS = 4, 48, 12.0, 150
WATCHED = 120


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kendall", *arguments]


def test_a_plain_vllm_is_watched(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    with small_vllm(tmp_path, SLOTS) as server:
        url = f"http://127.0.0.1:{server.port}"
        load = ["load", "--base-url", url, "--model", "tiny", "--request-rate", str(RATE)]
        load += ["--duration", f"{SECONDS}s", "--output-tokens", f"geometric:mean={TOKENS}"]
        load += ["--prompt-tokens", "uniform:low=16,high=128", "--max-tokens", "400"]
        load += ["--ignore-eos", "--max-failed-fraction", "1", "--output", str(run)]
        with subprocess.Popen(command(*load), stdout=subprocess.DEVNULL) as client:
            watching = command("watch", url, "--once", "--for", f"{WATCHED}s", "--json")
            found = subprocess.run(watching, capture_output=True, text=True, check=True)
            client.wait(300)
    (watched,) = json.loads(found.stdout)["models"]
    observed, forecast = watched["observed"], watched["forecast"]
    sojourn = [record.sojourn_time for record in read_run(run)[1]]
    clients = np.mean([each for each in sojourn if each is not None])
    assert watched["server"] == "vLLM"
    assert watched["slots"] == SLOTS
    assert observed["output_tokens"] == pytest.approx(TOKENS, rel=0.15)
    assert observed["sojourn_time"] == pytest.approx(clients, rel=0.2)
    if watched["slowed"]:  # by what else runs here: the prediction is at one speed
        return
    for name in ("queueing_delay", "sojourn_time"):
        half = (forecast[name]["high"] - forecast[name]["low"]) / 2
        off = abs(forecast[name]["value"] - observed[name])
        assert off <= max(0.15 * observed[name], half), (name, watched)
