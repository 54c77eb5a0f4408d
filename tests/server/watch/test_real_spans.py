"""A plain `vllm serve` that sends its spans to `kendall watch`, over each of the two protocols."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.gateway_cost.servers import small_vllm
from bench.watch import Asked, closed, send, workload
from kendall.loadgen.gateway.gateway_process import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
SLOTS, SECONDS, CLOSED = 4, 60.0, 10.0  # seconds
LENGTHS = "geometric"
LATER = 15.0  # seconds after which the server's exporter has tried again
WATCH = "from kendall.server.watch.cli import app; app()"


def watched(port: int, url: str, seconds: float) -> subprocess.Popen[str]:
    """Once it listens, and the server has found that out."""
    command = [sys.executable, "-c", WATCH, url, "--otlp", f"127.0.0.1:{port}", "--once"]
    process = subprocess.Popen(
        [*command, "--for", f"{seconds + LATER:g}s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "waiting for spans" in process.stderr.readline()
    time.sleep(LATER)
    return process


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_check_of_a_vllm_that_nobody_changed(tmp_path: Path, protocol: str) -> None:
    """Every request has its span, the slots are found, and model and observation agree."""
    port = free_port(0)
    endpoint = f"http://127.0.0.1:{port}{'/v1/traces' if protocol != 'grpc' else ''}"
    with small_vllm(
        tmp_path,
        SLOTS,
        arguments=["--otlp-traces-endpoint", endpoint],
        environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol},
    ) as server:
        rate = 0.6 * asyncio.run(closed(server.url, LENGTHS, SLOTS, CLOSED))
        asked = Asked(slots=SLOTS, lengths=LENGTHS, load=0.6, rate=rate, seconds=SECONDS)
        watching = watched(port, server.url, SECONDS + 15)
        try:
            sent = asyncio.run(send(server.url, asked))
            out, _ = watching.communicate(timeout=240)
        finally:
            watching.kill()
    found: dict[str, Any] = json.loads(out)
    (tmp_path / "watch.json").write_text(out)
    assert watching.returncode == 0
    spans = found["spans"]
    before = rate / 0.6 * CLOSED + 2 * SLOTS  # the closed loop's, of which some spans come late
    assert 0 <= spans["received"] - len(sent) <= before
    assert spans["lost"] == 0, spans
    assert found["setting"]["policy"] == f"continuous:max_batch_size={SLOTS}"
    assert found["check"]["verdict"] == "agree", found["check"]
    _, outputs, *_ = workload(asked)
    told = found["estimates"]["output_tokens"]["mean"]["value"]
    assert told == pytest.approx(outputs.mean(), rel=0.1)
