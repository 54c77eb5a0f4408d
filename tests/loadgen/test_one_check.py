"""`kendall compare` and the live page have one check: of the same requests the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.loadgen.compare.compare import compare
from kendall.loadgen.compare.theory import theory_of
from kendall.policies import parse_policy
from kendall.queueing.control.assess import assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.measurement.check import Check
from kendall.queueing.measurement.record import Record
from tests.loadgen.driver import LAW, drive

BOUND = 16
SCATTERED = dataclasses.replace(LAW, cv=0.15)
POLICIES = {
    "single": 13.0,  # more than it can serve
    "dynamic": 20.0,
    "fixed:batch_size=4": 14.0,
    "fixed:batch_size=4,max_wait=0.3": 8.0,
    "capped:max_batch_size=4": 14.0,
    "elastic:max_batch_size=4": 14.0,
    "continuous:max_batch_size=4": 20.0,
}


def window_of(records: Sequence[Record], policy: str) -> Snapshot:
    """As the gateway's own window collects them."""
    window = Window(epoch_at=0.0)
    for record in sorted(records, key=lambda each: each.arrived_at or 0.0):
        assert record.arrived_at is not None
        window.on_arrival(record.arrived_at)
    for record in sorted(records, key=lambda each: each.released_at or 0.0):
        window.on_record(record)
    return window.snapshot(policy, max(each.released_at or 0.0 for each in records))


def same(one: Check, other: Check) -> None:
    for name in ("observed", "modelled", "half_width", "requests"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), name


@pytest.mark.thinned(14)
@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("speed", [1.0, 1.3])
def test_a_run_has_the_check_of_its_window(text: str, speed: float) -> None:
    law = SCATTERED.at_speed(speed)
    records = drive(parse_policy(text), POLICIES[text] / speed, n=600, law=law, max_num_seqs=BOUND)
    (comparison,) = compare(records, theory_of(LAW, bounds=EngineBounds(max_num_seqs=BOUND)))
    limits = QueueLimits(max_output_tokens=None, engine=EngineBounds(max_num_seqs=BOUND))
    live = assess(window_of(records, text), LAW, limits).compared.check
    assert comparison.check is not None
    assert live is not None
    same(comparison.check, live)
    assert abs(live.difference) <= max(live.half_width, 0.05 * live.modelled) * 2
    assert np.isfinite(live.half_width)
