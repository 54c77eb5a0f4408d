"""What a stall of one of several continuous servers costs: simulated slot by slot, and told from
the records alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.stall_backlog import stall_backlog, work_left
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from tests.queueing.estimation_runs import poisson, seen
from tests.queueing.stalling_slots import StallingSlots, serve

LAW = LatencyModel(k3=2e-4, k4=1.5e-3)
SLOTS, REQUESTS = 8, 20_000
POLICY = f"continuous:max_batch_size={SLOTS}"
TOKENS = parse_distribution("uniform:low=1,high=63")


def run(engine: StallingSlots, load: float) -> tuple[list[Record], Assessment]:
    """`load`: of the time in which it does not stall."""
    most = engine.servers * SLOTS / (TOKENS.mean * LAW.step(SLOTS))
    arrivals = poisson(load * (1 - engine.share) * most, REQUESTS, 1)
    records = serve(engine, arrivals, TOKENS.sample(np.random.default_rng(2), REQUESTS), 3)
    limits = QueueLimits(servers=engine.servers, engine=EngineBounds(max_num_seqs=SLOTS))
    return records, assess(seen(records, POLICY, engine.servers), LAW, limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "share", "others", "pace"),
    [
        (1, 0.06, 1.0, (1.0, 1.0)),
        (2, 0.15, 1.0, (0.9, 1.2)),  # each for itself
        (4, 0.15, 1.0, (0.9, 1.2)),
        (2, 0.15, 1.5, (1.2, 1.8)),  # the others have its processors meanwhile
        (2, 0.15, 0.5, (0.4, 0.75)),
        (2, 0.075, 0.0, (0.0, 0.3)),  # the whole machine stalls
    ],
)
@pytest.mark.parametrize("load", [0.5, 0.7])
def test_the_mean_sojourn_behind_stalls_is_told_from_the_records(
    servers: int, share: float, others: float, pace: tuple[float, float], load: float
) -> None:
    engine = StallingSlots(
        law=LAW, slots=SLOTS, servers=servers, share=share, size=0.15, others=others
    )
    records, found = run(engine, load)
    observed = np.mean([(each.released_at or 0) - (each.arrived_at or 0) for each in records])
    assert found.prediction is not None
    assert found.prediction.sojourn_time.mean == pytest.approx(observed, rel=0.08)
    assert pace[0] <= found.estimates.stalls.others <= pace[1]


@pytest.mark.slow
def test_what_the_others_do_meanwhile_decides_what_a_stall_costs() -> None:
    """Without it the mean is 10 % and more off, in both directions."""
    for others, sign in ((1.5, 1), (0.0, -1)):
        engine = StallingSlots(
            law=LAW, slots=SLOTS, servers=2, share=0.12, size=0.15, others=others
        )
        records, found = run(engine, 0.7)
        observed = np.mean([(each.released_at or 0) - (each.arrived_at or 0) for each in records])
        assert found.prediction is not None
        assert found.model is not None
        stalls, load = found.estimates.stalls, found.load.value
        told, alike = (
            stall_backlog(each, found.model, load) for each in (stalls, replace(stalls, others=1.0))
        )
        mean = (found.prediction.sojourn_time.mean or 0.0) - told + alike
        assert sign * (mean / observed - 1) > 0.08


def test_held_all_at_once_they_are_one_server() -> None:
    engine = StallingSlots(law=LAW, slots=SLOTS, servers=2, share=0.1, size=0.15)
    _, found = run(engine, 0.5)
    assert found.model is not None
    alone = found.model.but(servers=1)
    for load in (0.3, 0.8):
        assert work_left(alone, load) == pytest.approx(load / (1 - load))
        assert work_left(found.model, load, 0.0) == pytest.approx(load / (1 - load), rel=0.01)
        assert work_left(found.model, load, 2.0) == pytest.approx(0.0, abs=1e-9)
        assert work_left(found.model, load) < 0.8 * work_left(alone, load)
