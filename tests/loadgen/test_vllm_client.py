"""The real `vllm bench serve` against a gateway with an emulated engine: what each side wrote
down agrees.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.report.files.bench_json import bench_result
from kendall.queueing.measurement.record import Record, read_run
from kendall.server.engines.tiny import make_tiny
from tests.loadgen.bench_samples import DETAILED, OURS, from_bench_json, options

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLIENT = (
    "from vllm.benchmarks.serve import *; p = FlexibleArgumentParser(); add_cli_args(p); "
    "main(p.parse_args())"
)
FLAGS = (
    "--backend vllm --dataset-name random --random-input-len 16 --random-output-len 6 "
    "--random-range-ratio 0.5 --num-prompts 24 --request-rate 40 --goodput ttft:50 e2el:200 "
    "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99.9 --metadata "
    "purpose=sample --request-id-prefix real- --save-result --save-detailed --disable-tqdm"
)
SLACK = 0.2  # seconds that a busy machine may add on the way
TRAILER = 0.02  # the client's clock stops at the last choice, the gateway's behind usage and [DONE]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str | None, Record]]:
    """The client's result file, and the gateway's records by the client's name for the request."""
    folder = tmp_path_factory.mktemp("vllm")
    asyncio.run(_run(folder))
    return folder / "real.json", {
        record.client_request_id: record for record in read_run(folder / "gateway.jsonl")[1]
    }


async def _run(folder: Path) -> None:
    arguments = [
        "--engine",
        "emulated",
        "--latency",
        "k1=0.0003,k2=0.002,k3=0.00002,k4=0.002",
        "--policy",
        "single",
    ]
    arguments += ["--patience", "0.025", "--record-file", str(folder / "gateway.jsonl")]
    async with GatewayProcess(arguments, free_port(18790), folder / "gateway.log") as gateway:
        await gateway.ready()
        # no --model: the client asks the gateway for it
        command = [
            sys.executable,
            "-c",
            CLIENT,
            "--base-url",
            gateway.url,
            "--tokenizer",
            str(make_tiny()),
            *FLAGS.split(),
        ]
        command += ["--result-dir", str(folder), "--result-filename", "real.json"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        await asyncio.to_thread(
            subprocess.run, command, check=True, timeout=120, env=environment, capture_output=True
        )


def test_result_has_the_keys_of_the_sample_and_ours_has_the_same(
    both: tuple[Path, dict[str | None, Record]],
) -> None:
    keys = list(json.loads(both[0].read_text()))
    assert keys == list(json.loads(DETAILED.read_text()))
    assert [
        key for key in bench_result(from_bench_json(both[0])[1], options()) if key not in OURS
    ] == keys


def test_client_and_gateway_agree_on_every_request(
    both: tuple[Path, dict[str | None, Record]],
) -> None:
    _, seen_by_client = from_bench_json(both[0])
    seen_by_gateway = both[1]
    assert len(seen_by_client) == 24
    for index, sent in enumerate(seen_by_client):
        served = seen_by_gateway[f"real-{index}"]
        assert (sent.outcome == "completed") == (served.outcome == "completed")
        if sent.outcome == "completed":
            assert sent.output_tokens == served.output_tokens
            assert -TRAILER < (sent.sojourn_time or 0) - (served.sojourn_time or 0) < SLACK
        else:
            assert (sent.outcome, served.outcome) == ("rejected", "abandoned")
