"""What-ifs and advice of a window with stalls: they include the queue behind a stall, or say
what leaves it out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kendall.policies import parse_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.stall_backlog import stall_backlog, utilisation_of
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from tests.queueing.advised import POLICY, advise, capacity, forecast, what_ifs
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve

LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))
NOTE = "queueing delay, quantiles and time to first token leave out the queue behind a stall"
CONTINUOUS, WHOLE = "continuous:max_batch_size=8", "elastic:max_batch_size=8"
NOTHING_ELSE: dict[str, Any] = {"token_limits": [], "sizes": []}


@cache
def window(every: int) -> Estimates:
    """Each `every`-th batch takes half a second longer; none for 0."""
    engine = Engine(
        most=8, stall=lambda batch: 0.5 if every and batch % every == every - 1 else 0.0
    )
    records = serve(poisson(0.4 * capacity(), 4000, 1), engine, 1)
    return estimate(seen(records, POLICY), parse_policy(POLICY), LAW)


@pytest.mark.parametrize("policy", [WHOLE, "capped:max_batch_size=4"])
def test_a_what_if_of_whole_batches_beside_a_continuous_engine_says_what_it_leaves_out(
    policy: str,
) -> None:
    """Its stalls are known as slots saw them, and the law that what-ifs of batches read has
    none.
    """
    by_batches = window(80)
    estimates = replace(by_batches, policy=CONTINUOUS)
    assert (by_batches.law(LAW).stall_share > 0, estimates.law(LAW).stall_share) == (True, False)
    expected = (
        "leaves out the queue behind a stall (stalls hold "
        f"{estimates.stalls.time_share:.1%} of the busy time)"
    )
    for seen_by, notes in ((by_batches, []), (estimates, [expected])):
        (found,) = what_ifs(
            seen_by, LAW, Setting(policy=seen_by.policy), LIMITS, policies=[policy], **NOTHING_ELSE
        )
        assert json.loads(json.dumps(json_object(found)))["notes"] == notes


def test_a_what_if_of_a_continuous_engine_holds_the_queue_behind_a_stall() -> None:
    estimates, setting = window(80), Setting(policy=CONTINUOUS)
    assert estimates.stalls.count > 5
    stalling = OperatingPoint(estimates=estimates, shape=LAW, limits=LIMITS)
    calm = OperatingPoint(
        estimates=replace(estimates, stalls=Stalls(0, 0.0, 0.0, None)),
        shape=stalling.law,
        limits=LIMITS,
    )
    model = stalling.model(setting)
    busy = utilisation_of(model, stalling.rate)
    backlog = stall_backlog(estimates.stalls, model, model.load(stalling.rate), utilisation=busy)
    assert model.load(stalling.rate) < busy < 1
    means = [each.predicted(setting).sojourn_time.mean or 0.0 for each in (stalling, calm)]
    assert backlog > 0.01
    assert means[0] - means[1] == pytest.approx(backlog, rel=0.05)
    (found,) = what_ifs(
        estimates, LAW, Setting(policy=POLICY), LIMITS, policies=[CONTINUOUS], **NOTHING_ELSE
    )
    (note,) = json.loads(json.dumps(json_object(found)))["notes"]
    assert note == f"{NOTE} ({1000 * backlog:.3g} ms of the mean sojourn)"


@pytest.mark.parametrize(("share", "named"), [(0.0099, False), (0.0101, True)])
def test_the_queue_behind_a_stall_is_named_from_a_hundredth_of_the_sojourn_on(
    share: float, named: bool
) -> None:
    setting, calm = Setting(policy=CONTINUOUS), replace(window(0), policy=CONTINUOUS)
    operating_point = OperatingPoint(estimates=calm, shape=LAW, limits=LIMITS)
    load, sojourn = (
        operating_point.model(setting).load(operating_point.rate),
        operating_point.predicted(setting).sojourn_time.mean or 0.0,
    )
    # of stalls that hold a thousandth of the time
    size = share / (1 - share) * sojourn * 2 * (1 - load) / load / 0.001
    stalling = replace(calm, stalls=Stalls(1, 0.001, size, None, size))
    backlog = stall_backlog(stalling.stalls, operating_point.model(setting), load)
    assert backlog == pytest.approx(share / (1 - share) * sojourn)
    (found,) = what_ifs(
        stalling, LAW, Setting(policy=POLICY), LIMITS, policies=[CONTINUOUS], **NOTHING_ELSE
    )
    assert any(note.startswith(NOTE) for note in found.notes) == named


@pytest.mark.parametrize("current", [POLICY, CONTINUOUS])
def test_advice_chooses_by_the_number_that_it_reports(current: str) -> None:
    """The curve and the setting's own forecast, for continuous: by the same approximation and
    the same stalls.
    """
    (advice,) = advise(
        replace(window(80), policy=current),
        LAW,
        Setting(policy=current),
        LIMITS,
        Objective(name="delay"),
        targets=["policy"],
    )
    (point,) = (each for each in advice.curve if each["policy"] == CONTINUOUS)
    operating_point = OperatingPoint(
        estimates=replace(window(80), policy=current), shape=LAW, limits=LIMITS
    )
    assert (
        point["score"]
        == point["sojourn_time"]
        == pytest.approx(
            operating_point.predicted(Setting(policy=CONTINUOUS)).sojourn_time.mean, rel=1e-9
        )
    )


def test_without_stalls_nothing_is_said() -> None:
    (found,) = what_ifs(
        window(0), LAW, Setting(policy=POLICY), LIMITS, policies=[CONTINUOUS], **NOTHING_ELSE
    )
    assert found.notes == ()


@pytest.mark.parametrize("in_force", [POLICY, CONTINUOUS])
def test_few_stalls_widen_the_interval_of_a_continuous_engine_too(in_force: str) -> None:
    """What two stalls add to its sojourn is known within 1 / sqrt 2 only, whoever met them."""
    estimates = replace(window(80), policy=in_force)
    few, many = (
        replace(estimates, stalls=replace(estimates.stalls, count=count)) for count in (2, 2000)
    )
    found = [
        forecast(each, LAW, Setting(policy=CONTINUOUS), LIMITS).sojourn for each in (few, many)
    ]
    assert found[0].value == found[1].value
    assert found[0].relative > 1.5 * found[1].relative


@pytest.mark.parametrize(
    ("load", "patience", "added"),
    [(0.5, None, 0.01), (0.5, 1.0, 0.01), (0.999, 1.0, 1.0), (1.001, 1.0, 1.0), (1.001, None, 0.0)],
)
def test_behind_a_stall_nobody_waits_longer_than_their_patience(
    load: float, patience: float | None, added: float
) -> None:
    """On both sides of load 1 alike."""
    stalls = Stalls(count=3, time_share=0.04, longest=0.5, last_at=None, size=0.5)
    impatient = (
        OperatingPoint(estimates=window(0), shape=LAW, limits=LIMITS)
        .model(Setting(policy=CONTINUOUS))
        .but(
            patience=patience,
        )
    )
    assert stall_backlog(stalls, impatient, load) == pytest.approx(added)
