"""What stands beside the gateway's own metrics does not clash with them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter as Count

import pytest
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from kendall.server.live.gauges import STATS, LiveGauges
from kendall.server.telemetry.metrics import MAX_POLICIES, Metrics, exposition
from tests.server.asgi import Call, call, completion, running
from tests.server.made_answers import what_if
from tests.virtual_time import run_virtual


def families(text: bytes) -> Count[str]:
    return Count(family.name for family in text_string_to_metric_families(text.decode()))


def test_vllms_collectors_are_shown_and_a_library_of_the_same_process_is_not() -> None:
    theirs = Counter("vllm:tokens_of_this_test", "As vLLM names it", ["model_name"])
    other = Gauge("kendall_queue_length", "A library that takes our name in the default registry")
    try:
        theirs.labels("tiny").inc(7)
        text = exposition(Metrics())
    finally:
        for collector in (theirs, other):
            REGISTRY.unregister(collector)
    assert b'vllm:tokens_of_this_test_total{model_name="tiny"} 7.0' in text
    found = families(text)
    assert found["process_resident_memory_bytes"] == 1
    assert found["kendall_queueing_delay_seconds"] == 1
    assert "kendall_queue_length" not in found, (
        "ours comes from our registry, and no gateway has started"
    )
    assert set(found.values()) == {1}


def test_the_gauges_of_the_queue_are_the_batchers() -> None:
    """One call in service and two behind it."""
    names = (
        "queue_length",
        "in_service",
        "requests_in_system",
        "engine_up",
        "engine_restarts",
        "max_clipped_fraction",
    )

    async def main() -> list[float | None]:
        async with running("single") as (app, _):
            calls = [Call(app, "POST", "/v1/completions", completion()) for _ in range(3)]
            await asyncio.sleep(0.001)
            text = (await call(app, "GET", "/metrics")).body.decode()
            for each in calls:
                each.leave()
            await asyncio.gather(*(each.task for each in calls))
            values = {
                family.name: [sample.value for sample in family.samples]
                for family in text_string_to_metric_families(text)
            }
            return [value for name in names for value in values[f"kendall_{name}"]]

    assert run_virtual(main()) == [2, 1, 3, 1, 0, 0.05]


def test_a_second_gateway_in_the_process_is_no_clash() -> None:
    first, second = Metrics(), Metrics()
    first.load.arrival_rate.set(1)
    second.load.arrival_rate.set(2)
    assert b"kendall_arrival_rate 1.0" in exposition(first)
    assert b"kendall_arrival_rate 2.0" in exposition(second)


def test_an_engine_that_is_started_again_registers_its_collectors_again() -> None:
    """As vLLM does it: the old ones out, new ones of the same name in; what was read before
    stays readable.
    """
    old = Gauge("vllm:lives_of_this_test", "One life")
    with pytest.raises(ValueError, match="Duplicated"):
        Gauge("vllm:lives_of_this_test", "A clash, if the old one stayed")
    REGISTRY.unregister(old)
    new = Gauge("vllm:lives_of_this_test", "The next life")
    try:
        new.set(3)
        assert exposition(Metrics()).count(b"\nvllm:lives_of_this_test ") == 1
    finally:
        REGISTRY.unregister(new)


def test_forecasts_take_no_label_from_a_policy_in_force() -> None:
    metrics = Metrics()
    gauges = LiveGauges(metrics)
    for look in range(4):
        names = [
            f"capped:max_batch_size={look * 100 + size}" for size in range(1, MAX_POLICIES + 9)
        ]
        gauges.what_if([what_if(name) for name in names], None)
    metrics.switched("fixed:batch_size=7", None, 1, changed_policy=True)
    text = metrics.exposition().decode()
    assert (
        'kendall_policy_info{epoch="1",max_output_tokens="none",policy="fixed:batch_size=7"} 1.0'
        in text
    )
    for quantity, count in (
        ("queueing_delay", len(STATS)),
        ("sojourn_time", len(STATS)),
        ("time_to_first_token", 1),
    ):
        shown = {
            line
            for line in text.splitlines()
            if line.startswith(f"kendall_what_if_{quantity}_seconds{{")
        }
        assert len(shown) == MAX_POLICIES * count, "of the last look alone"
        assert not any("other" in line for line in shown)


DURATIONS = {  # of the four requests below, summed by hand, seconds
    "queueing_delay": 0.02 + 0.01 + 0.0 + 0.05,
    "batch_forming_delay": 0.02 + 0.01 + 0.0 + 0.05,
    "service_time": 3 * 0.01055 + 0.00965,
    "sojourn_time": (0.02 + 0.01 + 0.0 + 3 * 0.01055) + (0.05 + 0.00965),
    "time_to_first_token": (0.02 + 0.01 + 0.0 + 3 * 0.003725) + (0.05 + 0.003175),
    "inter_token_latency": 7 * (3 * 0.000975 + 0.000925),
}
GAPS = 4 * 7  # of four answers of 8 tokens
COUNTERS = (
    "requests",
    "requests_received",
    "clipped_requests",
    "policy_switches",
    "policy_faults",
    "dropped_records",
    "dropped_log_lines",
)
GAUGES = (
    "policy_info",
    "queue_length",
    "in_service",
    "load",
    "utilisation",
    "arrival_rate",
    "assumption_holds",
    "prediction_error_ratio",
)
PREDICTIONS = ("predicted_queueing_delay_seconds", "observed_queueing_delay_seconds")


def test_every_duration_is_in_its_histogram_and_every_name_of_the_contract_is_there() -> None:
    """Fixed batches of 3: three arrive 10 ms apart and leave together, the fourth waits in vain
    for its 50 ms.
    """

    async def main() -> bytes:
        async with running("fixed:batch_size=3,max_wait=0.05") as (app, gateway):
            calls = []
            for _ in range(4):
                calls.append(Call(app, "POST", "/v1/completions", completion()))
                await asyncio.sleep(0.01)
            for made in calls:
                await made.task
            return gateway.metrics.exposition()

    found = {
        family.name: family
        for family in text_string_to_metric_families(run_virtual(main()).decode())
    }
    totals = {
        sample.name: sample.value
        for family in found.values()
        for sample in family.samples
        if sample.name.endswith(("_sum", "_count"))
    }
    for name, seconds in DURATIONS.items():
        count = GAPS if name == "inter_token_latency" else 4
        assert totals[f"kendall_{name}_seconds_count"] == count, name
        assert totals[f"kendall_{name}_seconds_sum"] == pytest.approx(seconds, abs=1e-5), name
    assert (totals["kendall_batch_size_count"], totals["kendall_batch_size_sum"]) == (2, 3 + 1)
    assert (totals["kendall_output_tokens_count"], totals["kendall_output_tokens_sum"]) == (4, 32)
    assert {f"kendall_{name}" for name in (*COUNTERS, *GAUGES, *PREDICTIONS)} <= set(found)


def test_nothing_is_said_of_needed_replicas_before_it_is_known() -> None:
    """An autoscaler that follows the gauge would take a 0 for an order."""
    assert "\nkendall_replicas_needed NaN\n" in Metrics().exposition().decode()


IN_SECONDS = """
    0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.04 0.05 0.075 0.1 0.15 0.2 0.3 0.4
    0.5 0.75 1.0 1.5 2.0 3.0 5.0 7.5 10.0 15.0 30.0 60.0 120.0 300.0
"""
BUCKETS = dict.fromkeys((f"{name}_seconds" for name in DURATIONS), IN_SECONDS) | {
    "batch_size": "1 2 3 4 6 8 12 16 24 32 48 64 96 128 256 512",
    "output_tokens": "1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192 32768",
    "own_time_seconds": """
        1e-06 2e-06 3e-06 5e-06 7.5e-06 1e-05 1.5e-05 2e-05 3e-05 5e-05 7.5e-05
        1e-4 1.5e-4 2e-4 3e-4 5e-4 1e-3 2e-3 5e-3 1e-2 3e-2 0.1
    """,
}


def test_the_ends_of_the_buckets_are_those_that_stored_series_have() -> None:
    """Prometheus adds up series of one `le`: with another end quantiles over the past are wrong."""
    metrics = Metrics()
    metrics.switched("single", None, 1, changed_policy=False)
    found = {
        family.name.removeprefix("kendall_"): {
            float(sample.labels["le"])
            for sample in family.samples
            if sample.name.endswith("_bucket")
        }
        for family in metrics.registry.collect()
        if family.type == "histogram"
    }
    assert found == {name: {math.inf, *map(float, ends.split())} for name, ends in BUCKETS.items()}
