"""Share and rate of requests that keep every limit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.loadgen.measures.goodput import Limit, goodput, parse_goodput
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Record
from tests.loadgen.answers import answered


def test_limits_are_written_as_for_vllm_in_milliseconds() -> None:
    assert parse_goodput(["ttft:100", "tpot:20.5", "e2el:500", "queue:50"]) == (
        Limit("ttft", 0.1),
        Limit("tpot", 0.0205),
        Limit("e2el", 0.5),
        Limit("queueing_delay", 0.05),
    )
    assert (
        parse_goodput(["ttft:100 e2el:500"])
        == parse_goodput(["ttft:100,e2el:500"])
        == (Limit("ttft", 0.1), Limit("e2el", 0.5))
    )


def test_limits_take_a_unit_and_a_bare_number_stays_milliseconds() -> None:
    assert parse_goodput(["ttft:100ms", "e2el:1m30s queue:500us", "tpot:20"]) == (
        Limit("ttft", 0.1),
        Limit("e2el", 90.0),
        Limit("queueing_delay", 0.0005),
        Limit("tpot", 0.02),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "ttft",
        "ttft:",
        "ttft:fast",
        "ttft:-1",
        "ttft:nan",
        "ttft:inf",
        "ttft:3 s",
        "ttft:3q",
        "itl:3",
        "speed:3",
        "ttft:1 ttft:2",
    ],
)
def test_what_is_no_limit_is_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"got .*; expected"):
        parse_goodput([wrong])


def test_every_limit_must_be_kept_and_the_bound_itself_is() -> None:
    records = [
        answered(0, 0.0),
        answered(1, 1.0, first=0.3),
        answered(2, 2.0, gap=0.2),
        answered(3, 3.0, queueing_delay=None),
    ]
    limits = parse_goodput(["ttft:100.0001", "tpot:50", "queue:50"])
    assert [all(limit.kept(record) for limit in limits) for record in records] == [
        True,
        False,
        False,
        False,
    ]
    assert goodput(records, limits).share == 0.25
    assert Limit("ttft", values_of_first := records[0].first_token_at or 0.0).kept(records[0])
    assert values_of_first == 0.1


@pytest.mark.parametrize("outcome", ["failed", "rejected", "abandoned", "cancelled"])
def test_what_was_not_completed_keeps_nothing(outcome: str) -> None:
    fast = [
        answered(i, float(i), outcome=outcome if i % 4 == 0 else "completed") for i in range(40)
    ]
    found = goodput(fast, parse_goodput(["e2el:1000"]))
    assert found.share == 0.75
    assert found.rate == pytest.approx(30 / (39 + 0.14))


def test_a_single_token_has_no_time_per_token_and_keeps_its_limit() -> None:
    assert (
        goodput(
            [answered(0, 0.0, tokens=1), answered(1, 1.0, tokens=1)], parse_goodput(["tpot:1"])
        ).share
        == 1.0
    )


def test_a_quantity_that_nobody_reports_is_unknown_not_broken() -> None:
    records = [answered(i, float(i), queueing_delay=None) for i in range(20)]
    assert math.isnan(goodput(records, parse_goodput(["queue:50"])).share)
    assert math.isnan(goodput([], parse_goodput(["ttft:50"])).share)
    lost = [Record(request_id="a", outcome="failed", intended_at=0.0)]
    assert goodput(lost, parse_goodput(["queue:50"])).share == 0.0


def test_all_kept_is_not_certain() -> None:
    found = goodput([answered(i, float(i)) for i in range(100)], parse_goodput(["e2el:1000"]))
    assert (found.share, found.high) == (1.0, pytest.approx(1.0))
    assert 0.94 < found.low < 0.97  # t(19)^2 / (n + t(19)^2)


@pytest.mark.left_out
def test_interval_covers_the_truth_where_neighbours_share_their_luck() -> None:
    """An indicator that follows a two-state chain: 95 % intervals cover 0.8 nine times in ten,
    taken as independent only six.
    """
    rng = np.random.default_rng(7)
    limits, covered, covered_if_independent, runs = parse_goodput(["e2el:300"]), 0, 0, 200
    fast, slow = ((answered(0, 0.0)), answered(0, 0.0, first=1.0))
    for _ in range(runs):
        kept = _chain(rng, 2000, stay_good=0.98, stay_bad=0.92)
        found = goodput([fast if good else slow for good in kept], limits)
        covered += found.low <= 0.8 <= found.high
        half = 1.96 * math.sqrt(found.share * (1 - found.share) / len(kept))
        covered_if_independent += abs(found.share - 0.8) <= half
    assert covered >= 0.88 * runs
    assert covered_if_independent <= 0.6 * runs


def _chain(rng: np.random.Generator, n: int, stay_good: float, stay_bad: float) -> list[bool]:
    good, kept, draws = bool(rng.random() < 0.8), [], rng.random(n)
    for draw in draws.tolist():
        kept.append(good)
        good = good if draw < (stay_good if good else stay_bad) else not good
    return kept


def test_a_run_that_was_good_in_one_half_only_counts_as_one_observation() -> None:
    fast, slow = answered(0, 0.0), answered(0, 0.0, first=1.0)
    found = goodput([fast] * 50 + [slow] * 50, parse_goodput(["e2el:300"]))
    assert (found.share, found.effective_n) == (0.5, pytest.approx(1.0, abs=0.02))
    assert (found.low, found.high) == (pytest.approx(0.05, abs=5e-3), pytest.approx(0.95, abs=5e-3))
