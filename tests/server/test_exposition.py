"""What stands beside the gateway's own metrics does not clash with them."""

from __future__ import annotations

from collections import Counter as Count

import pytest
from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from server.exposition import exposition
from server.live.gauges import STATS, LiveGauges
from server.metrics import MAX_POLICIES, Metrics


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
    assert "kendall_queue_length" not in found, "ours comes from our registry, and no gateway has started"
    assert set(found.values()) == {1}


def test_a_second_gateway_in_the_process_is_no_clash() -> None:
    first, second = Metrics(), Metrics()
    first.arrival_rate.set(1)
    second.arrival_rate.set(2)
    assert b"kendall_arrival_rate 1.0" in exposition(first)
    assert b"kendall_arrival_rate 2.0" in exposition(second)


def test_an_engine_that_is_started_again_registers_its_collectors_again() -> None:
    """As vLLM does it: the old ones out, new ones of the same name in; what was read before stays readable."""
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
        names = [f"capped:max_batch_size={look * 100 + size}" for size in range(1, MAX_POLICIES + 9)]
        durations = {name: dict.fromkeys(STATS, 0.1) for name in ("queueing_delay", "sojourn_time", "time_to_first_token")}
        gauges.what_if([{"policy": name, "max_output_tokens": None} | durations for name in names], None)
    metrics.switched("fixed:batch_size=7", None, 1, changed_policy=True)
    text = metrics.exposition().decode()
    assert 'kendall_policy_info{epoch="1",max_output_tokens="none",policy="fixed:batch_size=7"} 1.0' in text
    for quantity, count in (("queueing_delay", len(STATS)), ("sojourn_time", len(STATS)), ("time_to_first_token", 1)):
        shown = {line for line in text.splitlines() if line.startswith(f"kendall_what_if_{quantity}_seconds{{")}
        assert len(shown) == MAX_POLICIES * count, "of the last look alone"
        assert not any("other" in line for line in shown)
