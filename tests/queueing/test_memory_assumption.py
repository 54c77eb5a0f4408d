"""Whether a window shows requests that wait for KV memory although a slot is free."""

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.assumptions.engine_assumptions import (
    NEGLIGIBLE,
    enough_memory,
    waits_beside_free_slots,
)
from kendall.queueing.estimation.window.snapshot import COLUMN, WIDTH, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.estimation_windows import snapshot_of_run

LAW = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=0.5e-3)
SLOTS = 16
FIELDS = tuple(Snapshot.__dataclass_fields__)
CONTINUOUS = f"continuous:max_batch_size={SLOTS}"


def window(memory: int | None, load: float, policy: str = CONTINUOUS, servers: int = 1) -> Snapshot:
    model = Queue.read(
        policy,
        parse_distribution("lognormal:mu=3,sigma=0.7", 128),
        LAW,
        prompt_tokens=parse_distribution("uniform:low=10,high=500"),
        servers=servers,
        max_context_tokens=memory,
    )
    run = simulate_run(model, load * model.largest_stable_rate, 4000, np.random.SeedSequence(1))
    found = snapshot_of_run(run, model)
    still = (run.dispatched_at <= found.now) & (run.released_at > found.now)
    in_service = tuple((at, 1) for at in run.dispatched_at[still].tolist())
    return changed(found, servers=servers, in_service=in_service)


def changed(seen: Snapshot, **values: object) -> Snapshot:
    return Snapshot(**{name: getattr(seen, name) for name in FIELDS} | values)


def judged(seen: Snapshot, slots: int | None = SLOTS) -> Assumption:
    return enough_memory(seen, parse_policy(seen.policy), slots)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("memory", [1500, 3000])
def test_it_fails_where_the_memory_is_what_requests_wait_for(memory: int, servers: int) -> None:
    found = judged(window(memory, 0.9, servers=servers))
    assert found.holds is False
    assert found.measure > 0.1
    assert "although a slot was free" in found.says


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("load", [0.3, 0.9, 1.1])
def test_it_holds_where_they_wait_for_slots(load: float, servers: int) -> None:
    found = judged(window(None, load, servers=servers))
    assert found.holds
    assert found.measure < NEGLIGIBLE / 4
    assert judged(window(SLOTS * 628, load, servers=servers)).holds


def test_it_holds_where_the_memory_is_tight_and_the_load_low() -> None:
    assert judged(window(3000, 0.2)).holds


def test_without_a_bound_on_the_slots_each_wait_is_one_for_memory() -> None:
    seen = window(3000, 0.9, policy="continuous")
    assert judged(seen, None).holds is False
    assert judged(seen, None).measure >= judged(seen, SLOTS).measure


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=4", "continuous:order=sprpt"])
def test_batches_and_preemption_are_not_judged(policy: str) -> None:
    assert judged(window(None, 0.5, policy=policy)).holds is None


def rows(*requests: tuple[float, float, float], epoch: int = 0) -> Snapshot:
    """Arrival, dispatch and end of each; the window is 0 to 10 s."""
    values = np.zeros((len(requests), WIDTH))
    for row, request in zip(values, requests, strict=True):
        row[[COLUMN[name] for name in ("arrived_at", "dispatched_at", "server_free_at")]] = request
    return Snapshot(
        policy="continuous:max_batch_size=2",
        epoch=epoch,
        epoch_at=0.0,
        start=0.0,
        now=10.0,
        arrivals=np.array([arrived for arrived, _, _ in requests]),
        rows=values,
    )


def test_the_share_by_hand() -> None:
    """b waits from 1 to 4 s beside a alone; d from 5 to 7 s, beside three until a ends at 6 s."""
    seen = rows((0, 0, 6), (1, 4, 7), (4.5, 4.5, 7), (5, 7, 9))
    taken = rows((0, 0, 6), (1, 4, 7))
    assert waits_beside_free_slots(taken, 2) == pytest.approx((3 - 0.002) / 10)
    assert waits_beside_free_slots(taken, 1) == pytest.approx(0.0)
    assert waits_beside_free_slots(seen, 2) == pytest.approx((3 - 0.002) / 10)
    assert waits_beside_free_slots(seen, 3) == pytest.approx((4 - 2 * 0.002) / 10)
    at_once = rows((0, 0, 6), (1, 4, 7), (2, 2, 3))
    assert waits_beside_free_slots(at_once, 3) == pytest.approx((3 - 0.002) / 10), "b alone waits"
    assert waits_beside_free_slots(rows((0, 0, 6), (1, 4, 7), epoch=1), 2) == 0
    for shortest, lag in ((0.0009, 0.002), (0.25, 0.5)):
        slow = changed(taken, shortest_delay=shortest)
        assert waits_beside_free_slots(slow, 2) == pytest.approx((3 - lag) / 10)


@pytest.mark.parametrize(("begun", "holds"), [(1.201, True), (1.203, False)])
def test_a_fiftieth_of_the_time_is_negligible(begun: float, holds: bool) -> None:
    """Of ten seconds, from two milliseconds after the arrival on."""
    assert judged(rows((0, 0, 6), (1, begun, 7)), 2).holds is holds


def test_those_still_in_service_take_their_slots() -> None:
    seen = rows((1, 4, 7))
    still = changed(seen, in_service=((0.5, 3), (0.6, 4)))
    assert waits_beside_free_slots(seen, 2) == pytest.approx((3 - 0.002) / 10)
    assert waits_beside_free_slots(still, 2) == 0


def test_an_empty_window_cannot_tell() -> None:
    seen = rows((1, 4, 7))
    assert judged(seen.having(seen.rows[:0])).holds is None


def test_an_assessment_names_it() -> None:
    """The sojourn is longer than the prediction without a bound, and that is why."""
    seen = window(3000, 0.9)
    found = assess(
        seen, LAW, QueueLimits(max_output_tokens=128, engine=EngineBounds(max_num_seqs=SLOTS))
    )
    assert found.compared.verdict == "disagree"
    assert "enough_memory" in found.compared.reasons
    plain = assess(
        window(None, 0.7),
        LAW,
        QueueLimits(max_output_tokens=128, engine=EngineBounds(max_num_seqs=SLOTS)),
    )
    assert next(each for each in plain.compared.assumptions if each.name == "enough_memory").holds
