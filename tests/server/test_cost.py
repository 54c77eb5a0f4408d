"""What the gateway says of its own cost, and what keeps it small."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import weakref

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kendall.queueing.measurement.record import Record
from kendall.server.runtime.garbage import collect_everything, settle
from kendall.server.telemetry.cost.instruments import Histogram
from kendall.server.telemetry.cost.stages import EVERY, STAGES, OwnTime
from kendall.server.telemetry.metrics import MAX_POLICIES, Metrics
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual


def series(exposition: bytes) -> dict[str, float]:
    found = re.findall(r"^(kendall_[^ ]+) ([0-9.e+-]+)$", exposition.decode(), flags=re.MULTILINE)
    return {name: float(value) for name, value in found}


def stage_counts(found: dict[str, float]) -> dict[str, float]:
    return {stage: found[f'kendall_own_time_seconds_count{{stage="{stage}"}}'] for stage in STAGES}


def test_one_call_in_64_tells_the_time_of_its_stages() -> None:
    async def main() -> None:
        async with running() as (app, _):
            for _ in range(EVERY):  # the first of them is measured
                await call(app, "POST", "/v1/completions", completion(max_tokens=5, stream=True))
            first = stage_counts(series((await call(app, "GET", "/metrics")).body))
            assert {stage: first[stage] for stage in ("parse", "prompt", "submit", "token")} == {
                "parse": 1,
                "prompt": 1,
                "submit": 1,
                "token": 5,
            }
            assert first["write"] >= 6  # the head, and each of the tokens
            await call(app, "POST", "/v1/completions", completion(max_tokens=5))
            second = stage_counts(series((await call(app, "GET", "/metrics")).body))
            assert (second["parse"], second["token"]) == (2, 10)

    run_virtual(main())


def test_a_refused_call_is_measured_as_far_as_it_comes() -> None:
    async def main() -> None:
        async with running() as (app, _):
            assert (await call(app, "POST", "/v1/completions", completion(prompt=[]))).status == 400
            found = stage_counts(series((await call(app, "GET", "/metrics")).body))
            assert found == {"parse": 1, "prompt": 0, "submit": 0, "token": 0, "write": 0}

    run_virtual(main())


def test_timing_takes_the_callers_clock() -> None:
    registry = CollectorRegistry()
    own_time = OwnTime(registry, every=2)
    instants = iter([10.0, 10.001, 10.004])
    timing = own_time.begin(lambda: next(instants))
    assert timing is not None
    timing.end("parse")
    timing.end("prompt")
    assert own_time.begin(lambda: 0.0) is None
    assert own_time.begin(lambda: 0.0) is not None
    sums = {
        stage: registry.get_sample_value("kendall_own_time_seconds_sum", {"stage": stage})
        for stage in ("parse", "prompt")
    }
    assert sums["parse"] is not None
    assert sums["prompt"] is not None
    assert abs(sums["parse"] - 0.001) < 1e-9
    assert abs(sums["prompt"] - 0.003) < 1e-9


def test_processor_time_and_tokens_are_counted_whatever_became_of_the_request() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            await call(app, "POST", "/v1/completions", completion())
            before = series((await call(app, "GET", "/metrics")).body)
            left = Call(app, "POST", "/v1/completions", completion(max_tokens=200))
            await asyncio.sleep(0.02)
            left.leave()
            await left.task
            made = gateway.batcher.unanswered
            after = series((await call(app, "GET", "/metrics")).body)
            tokens = 'kendall_generated_tokens_total{policy="continuous:max_batch_size=4"}'
            assert made == 0
            assert before[tokens] == 8
            assert 5 < after[tokens] - before[tokens] < 200
            assert (
                after["kendall_gateway_cpu_seconds_total"]
                > before["kendall_gateway_cpu_seconds_total"]
                > 0
            )

    run_virtual(main())


def test_policies_beyond_the_bound_share_one_label() -> None:
    metrics = Metrics()
    for number in range(MAX_POLICIES + 10):
        metrics.on_record(
            Record(request_id="1", outcome="failed", policy=f"capped:max_batch_size={number + 1}")
        )
    counts = {
        sample.labels["policy"]: sample.value
        for metric in metrics.requests.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] == "failed"
    }
    assert len(counts) == MAX_POLICIES + 1
    assert counts["other"] == 10
    assert sum(counts.values()) == MAX_POLICIES + 10


class Node:
    """One that knows itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_what_was_set_aside_is_collected_once_the_engine_is_let_go() -> None:
    thresholds = gc.get_threshold()
    node = Node()
    lost = weakref.ref(node)
    try:
        settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() > thresholds
        del node
        gc.collect()
        assert lost() is not None, "frozen"
        collect_everything()
        assert lost() is None
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_the_histogram_counts_as_the_librarys_does() -> None:
    """Bounds themselves, what lies below and above all of them, negative numbers, and what is no
    number.
    """
    bounds = (0.1, 0.2, 0.5, 1.0)
    amounts = [*bounds, -1.0, 0.0, 0.15, 0.3, 7.0, math.inf, math.nan]
    texts = []
    for kind in (Histogram, prometheus_client.Histogram):
        registry = CollectorRegistry()
        series = kind("waits", "Of a test", ["policy"], registry=registry, buckets=bounds).labels(
            "single"
        )
        for amount in amounts:
            series.observe(amount)
        texts.append(generate_latest(registry))
    assert texts[0] == texts[1]
