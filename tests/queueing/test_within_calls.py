"""How alike the lengths of a call are, estimated from windows of calls that were drawn so."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.interval import symmetric
from kendall.queueing.estimation.lengths.within_calls import (
    FEWEST,
    alike_within_calls,
    significant,
)
from kendall.queueing.estimation.summaries import WithinCalls
from kendall.queueing.estimation.window.snapshot import CENSORED, COLUMN, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import from_json, json_object
from kendall.queueing.latency.law import parse_law
from kendall.queueing.queue import Queue
from tests.queueing.estimation_windows import window_of

LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012")
LENGTHS = "uniform:low=1,high=31"


def window(
    correlation: float, count: int, seed: int, lengths: str = LENGTHS, calls: str = "4"
) -> Snapshot:
    text = calls if ":" in calls else f"deterministic:value={calls}"
    model = Queue.read(
        "capped:max_batch_size=8",
        parse_distribution(lengths),
        LAW,
        sequences=parse_distribution(text),
        intraclass_correlation=correlation,
    )
    return window_of(model, 0.5, count, seed)


def assessed(seen: Snapshot, limit: int = 31) -> Assessment:
    return assess(seen, LAW, QueueLimits(max_output_tokens=limit))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("calls", ["4", "uniform:low=1,high=8"])
@pytest.mark.parametrize("lengths", [LENGTHS, "lognormal:mu=3,sigma=0.8"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_both_components_are_the_correlation_that_was_drawn(
    correlation: float, lengths: str, calls: str
) -> None:
    found = alike_within_calls(window(correlation, 40_000, 1, lengths, calls))
    for each in (found.longest, found.total):
        assert each.value == pytest.approx(correlation, abs=0.04)
        assert 0 <= each.value <= 1


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_intervals_cover(correlation: float) -> None:
    """95 of 100 windows of 100 calls; by chance 87 at least."""
    hits = [
        [each.covers(correlation) for each in (found.longest, found.total)]
        for found in (alike_within_calls(window(correlation, 400, seed)) for seed in range(100))
    ]
    for component in np.array(hits).T:
        assert np.count_nonzero(component) >= 87


def test_lengths_that_are_independent_count_as_such() -> None:
    found = [significant(alike_within_calls(window(0.0, 2000, seed)).longest) for seed in range(20)]
    assert np.count_nonzero(found) <= 3


def test_calls_of_equal_lengths_leave_what_so_many_calls_can_hide() -> None:
    found = alike_within_calls(window(1.0, 400, 3)).longest
    assert found.value == found.high == 1
    assert found.low == pytest.approx(1 - 3 / found.effective_n)


@pytest.mark.parametrize(
    ("calls", "count", "lengths"),
    [("1", 2000, LENGTHS), ("4", 4 * FEWEST - 8, LENGTHS), ("4", 2000, "deterministic:value=9")],
)
def test_windows_that_cannot_tell_say_nothing(calls: str, count: int, lengths: str) -> None:
    found = alike_within_calls(window(0.0, count, 1, lengths, calls))
    assert not found.longest.known
    assert not found.total.known
    assert significant(found.longest) == 0


def test_answers_of_another_limit_are_cut_at_the_smaller_one() -> None:
    """Without that, the limit of an epoch would be what its calls have in common."""
    seen = window(0.0, 8000, 4)
    rows = seen.rows.copy()
    early = np.argsort(rows[:, COLUMN["arrived_at"]])[: len(rows) // 2]
    cut = early[rows[early, COLUMN["output_tokens"]] > 8]
    rows[cut, COLUMN["output_tokens"]] = 8
    rows[cut, COLUMN["ending"]] = CENSORED
    found = alike_within_calls(seen.having(rows))
    assert significant(found.longest) < 0.03
    assert found.longest.covers(0)


def test_answers_that_did_not_leave_whole_are_left_out() -> None:
    seen = window(1.0, 4000, 5)
    rows = seen.rows.copy()
    rows[::5, COLUMN["output_tokens"]] = 1
    rows[::5, COLUMN["ending"]] = CENSORED
    rows[::5, COLUMN["released_at"]] = math.nan
    assert alike_within_calls(seen.having(rows)).longest.value == 1


def test_a_restart_keeps_them() -> None:
    found = alike_within_calls(window(0.5, 4000, 6))
    assert from_json(json_object(found), WithinCalls) == found


def test_batches_go_by_the_longest_of_a_call_slots_and_single_requests_by_its_total() -> None:
    estimates = assessed(window(0.5, 4000, 7)).estimates
    within = estimates.within_calls
    assert within.longest != within.total
    for policy, bound, expected in (
        ("capped:max_batch_size=8", None, within.longest),
        ("elastic", 16, within.longest),
        ("fixed:batch_size=4", 16, within.longest),
        ("dynamic", 1, within.total),
        ("single", None, within.total),
        ("continuous:max_batch_size=4", 16, within.total),
    ):
        assert estimates.alike(parse_policy(policy), bound) is expected, policy


def test_the_interval_of_a_prediction_has_what_the_correlation_leaves_open() -> None:
    """40 calls: nobody knows yet how alike theirs are."""
    seen = window(0.5, 4000, 8)
    found = assessed(seen)
    known = found.estimates.within_calls
    settled = dataclasses.replace(known, longest=symmetric(known.longest.value, 0.0, 1e9))
    assert found.long_run is not None
    point, setting = found.long_run.point, found.long_run.setting
    sure = dataclasses.replace(
        point, estimates=dataclasses.replace(found.estimates, within_calls=settled)
    )
    assert sure.forecast(setting).mean.relative < point.forecast(setting).mean.relative


@pytest.mark.parametrize(
    ("correlation", "calls", "holds"), [(1.0, "4", False), (0.0, "4", True), (0.0, "1", None)]
)
def test_the_assumption_is_judged_of_calls_of_several_sequences(
    correlation: float, calls: str, holds: bool | None
) -> None:
    found = assessed(window(correlation, 20_000, 9, calls=calls))
    mine = [a for a in found.compared.assumptions if a.name == "independent_lengths"]
    assert [each.holds for each in mine] == [holds]
    if holds is False:
        assert mine[0].counted
        assert "the prediction draws lengths by call" in mine[0].says
        assert found.compared.verdict != "disagree"
