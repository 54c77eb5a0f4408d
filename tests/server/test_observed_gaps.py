"""The gateway observes the gaps between tokens that theory predicts: single ones, not the means of
answers.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kendall.policies import Request, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.simulation.fast import Trace, draw_trace
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch
from kendall.server.telemetry.cost.instruments import GATHERED, Histogram
from kendall.server.telemetry.metrics import Metrics
from tests.queueing.test_token_gaps import LAW, model, walked
from tests.server.harness import replay
from tests.virtual_time import run_virtual


class Gaps(Observer):
    """Seconds of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_dispatch(self, batch: Batch) -> None:
        batch.on_gap = self.seconds.append


def jobs_of(trace: Trace) -> list[tuple[Request, int]]:
    columns = (trace.arrived_at, trace.prompt_tokens, trace.output_tokens)
    return [
        (Request(f"r{i}", float(at), int(prompt), int(tokens)), int(tokens))
        for i, (at, prompt, tokens) in enumerate(zip(*columns, strict=True))
    ]


def bounds_of(step_tokens: int | None) -> dict[str, int]:
    if step_tokens is None:
        return {"max_num_seqs": 8}
    chunked = {"max_num_batched_tokens": step_tokens, "enable_chunked_prefill": 1}
    return {"max_num_seqs": 8} | chunked


@pytest.mark.parametrize("step_tokens", [None, 16, 128])
def test_they_are_those_of_a_walk_token_by_token(step_tokens: int | None) -> None:
    queue = model("continuous:max_batch_size=8", step_tokens=step_tokens)
    rate = 0.8 * queue.largest_stable_rate
    trace = draw_trace(queue, rate, 300, np.random.SeedSequence(5))
    gaps = Gaps()
    run_virtual(
        replay(
            parse_policy("continuous:max_batch_size=8"),
            jobs_of(trace),
            LAW,
            observers=[gaps],
            **bounds_of(step_tokens),
        )
    )
    expected = sorted(chain.from_iterable(walked(queue, trace).values()))
    assert sorted(gaps.seconds) == pytest.approx(expected, abs=1e-9)


def test_a_gap_lasts_through_a_lost_engine_and_is_of_the_policy_that_dispatched() -> None:
    """One answer of 3 tokens, a step of 1 s; lost behind the first token for 10 s."""
    text, gaps = "", Gaps()
    for observer in (metrics := Metrics(), gaps):
        run_virtual(
            replay(
                parse_policy("single"),
                [(Request("a", 1.0, 1, 3), 3)],
                LatencyModel(k4=1.0),
                deaths=[(2.5, 10.0)],
                switches=[(5.0, parse_policy("elastic"))],
                observers=[observer],
            )
        )
        text = metrics.exposition().decode()
    assert gaps.seconds == pytest.approx([11.5, 1.0])
    assert 'kendall_inter_token_latency_seconds_count{policy="single"} 2.0' in text
    assert 'kendall_inter_token_latency_seconds_sum{policy="single"} 12.5' in text


def test_gathered_values_are_counted_as_observed_ones_and_do_not_pile_up() -> None:
    bounds = (0.1, 1.0, math.inf)
    one, other = (
        Histogram(name, "h", registry=CollectorRegistry(), buckets=bounds) for name in "ab"
    )
    for value in (0.0, 0.05, 0.1, 0.11, 1.0, 1.5, 99.0):
        one.observe(value)
        other.gather(value)
    assert other.totals() == (pytest.approx(one.totals()[0]), one.totals()[1])
    assert other.totals()[1] == [3, 2, 2]
    for count in (GATHERED - 1, 1):
        for _ in range(count):
            other.gather(0.5)
        other.settle()
        assert len(other._gathered) == (0 if count == 1 else count)
    assert other.totals()[1] == [3, 2 + GATHERED, 2]
