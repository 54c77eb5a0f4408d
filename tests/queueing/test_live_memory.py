"""The live prediction of an engine whose KV memory is what requests wait for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.window.snapshot import COLUMN, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import draw_trace, replay
from tests.queueing.advised import advise, what_ifs
from tests.queueing.estimation_windows import snapshot_of_run

LAW = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, turnaround=0.5e-3)
LIMIT, SLOTS = 128, 16
MEMORY = 3000
COUNT = 180_000
WITHIN = 0.05


def queue(memory: int | None = MEMORY, reserved: int | None = None) -> Queue:
    return Queue.read(
        f"continuous:max_batch_size={SLOTS}",
        parse_distribution("lognormal:mu=3,sigma=0.7", LIMIT),
        LAW,
        prompt_tokens=parse_distribution("uniform:low=10,high=500"),
        max_context_tokens=memory,
        reserved_tokens=reserved,
    )


def window(model: Queue, load: float) -> Snapshot:
    rate = load * model.largest_stable_rate
    trace = draw_trace(model, rate, COUNT, np.random.SeedSequence(3))
    return snapshot_of_run(replay(model, trace), model, trace.prompt_tokens, LIMIT)


def assessed(
    seen: Snapshot, memory: int | None = MEMORY, reserved: int | None = None
) -> Assessment:
    limits = QueueLimits(
        max_output_tokens=LIMIT,
        engine=EngineBounds(
            max_num_seqs=SLOTS, max_context_tokens=memory, reserved_tokens=reserved
        ),
    )
    return assess(seen, LAW, limits)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "reserved"), [(0.5, None), (0.8, None), (0.8, 60)])
def test_it_is_predicted_where_the_memory_binds(load: float, reserved: int | None) -> None:
    seen = window(queue(reserved=reserved), load)
    assert mean_interval(seen.judged(sojourn=True)).relative < WITHIN / 2
    found = assessed(seen, reserved=reserved)
    assert abs(found.compared.error) <= WITHIN, found.compared
    assert found.model is not None
    assert found.model.engine.bounds.max_context_tokens == MEMORY
    assert found.load.value == pytest.approx(load, rel=0.03)
    assert found.prediction is not None
    assert found.prediction.load_bound == "memory"
    names = {each.name: each.holds for each in found.compared.assumptions}
    assert names["enough_memory"] is False


@pytest.mark.slow
def test_answers_that_never_reach_the_limit_hold_it_all_the_same() -> None:
    """Lengths that end at 60 under a limit of 128."""
    model = queue().but(
        output_tokens=parse_distribution("lognormal:mu=3,sigma=0.7", 60),
        max_output_tokens=LIMIT,
    )
    seen = window(model, 0.8)
    found = assessed(seen)
    assert abs(found.compared.error) <= WITHIN, found.compared
    assert found.model is not None
    assert (
        found.model.requests.output_tokens.longest,
        found.model.engine.bounds.max_context_tokens,
    ) == (60, MEMORY)
    assert found.load.value == pytest.approx(0.8, rel=0.03)


def test_without_the_memory_it_is_not() -> None:
    found = assessed(window(queue(), 0.8), memory=None)
    assert found.compared.error > 0.15
    assert "enough_memory" in found.compared.reasons


@pytest.mark.slow
def test_memory_that_cannot_bind_changes_nothing() -> None:
    seen = window(queue(memory=None), 0.6)
    plain, roomy = assessed(seen, None), assessed(seen, SLOTS * (500 + LIMIT))
    assert roomy.model is not None
    assert roomy.model.engine.bounds.max_context_tokens is None
    assert roomy.prediction == plain.prediction


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"max_output_tokens": math.nan}, "no limit is known"),
        ({"prompt_tokens": 0.0}, "no prompt is known"),
        ({"prompt_tokens": 5000.0}, "not even one request fits"),
    ],
)
def test_where_it_is_not_known_what_requests_hold_there_is_no_memory_in_the_model(
    changed: dict[str, float], reason: str
) -> None:
    seen = window(queue(memory=None), 0.5)
    rows = seen.rows.copy()
    for name, value in changed.items():
        rows[:, COLUMN[name]] = value
    found = assessed(seen.having(rows))
    assert found.model is not None
    assert found.model.engine.bounds.max_context_tokens is None, reason


@pytest.mark.slow
def test_what_is_held_is_kept_with_the_estimates() -> None:
    seen = window(queue(memory=None), 0.5)
    rows = seen.rows.copy()
    rows[::2, COLUMN["max_output_tokens"]] = 40
    rows[:, COLUMN["cached_tokens"]] = 16
    found = assessed(seen.having(rows), reserved=100).estimates
    assert found.held_tokens == pytest.approx((40 + 100) / 2 + 16, rel=0.01)
    again = Estimates.from_json(json_object(found.saved()))
    assert again.held_tokens == found.held_tokens
    older = json_object(found.saved())
    del older["held_tokens"]
    assert math.isnan(Estimates.from_json(older).held_tokens)
    unknown = dataclasses.replace(found, held_tokens=math.nan)
    assert json_object(unknown.saved())["held_tokens"] is None


@pytest.mark.slow
def test_advice_and_what_ifs_say_that_memory_cuts_batches() -> None:
    """No model has such batches: among the policies they are left out, and a what-if says so."""
    seen = window(queue(), 0.6)
    limits = QueueLimits(
        max_output_tokens=LIMIT, engine=EngineBounds(max_num_seqs=SLOTS, max_context_tokens=MEMORY)
    )
    found = assess(seen, LAW, limits).estimates
    setting = Setting(policy=f"continuous:max_batch_size={SLOTS}", max_output_tokens=LIMIT)
    (advice,) = advise(found, LAW, setting, limits, Objective(name="delay"), targets=["policy"])
    offered = {str(point["policy"]).partition(":")[0] for point in advice.curve}
    assert offered == {"single", "continuous"}
    assert "not compared, as KV memory may cut their batches: dynamic" in advice.says
    whole, alone = what_ifs(
        found, LAW, setting, limits, policies=["dynamic", "single"], token_limits=[], sizes=[]
    )
    cut = "batches that KV memory cuts are not modelled"
    assert (cut in whole.notes, cut in alone.notes) == (True, False)
