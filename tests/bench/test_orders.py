"""The rules by which orders on a real engine are judged, and the speed at which they are
predicted.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.ordering import design, predicted, report
from bench.ordering.judgement import (
    RANKED,
    REVERSED,
    UNCLEAR,
    Compared,
    Pair,
    Run,
    as_predicted,
    compared,
    gains_nothing,
    pairs,
    ratio,
)
from bench.ordering.observed import COLUMNS, Figures, columns_of, figures_of, quietness
from bench.ordering.predicted import Predicted, own_speed, predicted_of
from bench.orders import parser, parts_of
from queueing.latency.law import parse_law
from queueing.measurement.record import Record
from queueing.simulation.experiment import draw_jobs
from queueing.simulation.reference import SimulatedEngine, simulate_trace

LAW = "k1=0.0003,k2=0.001,k3=0.00002,k4=0.0012,turnaround=0.0015"
FIRST_COME, SHORTEST = "continuous:max_batch_size=4", "continuous:max_batch_size=4,order=spjf"
RNG = np.random.default_rng(3)
DELAYS = RNG.exponential(1.0, 400)


def cell_of(records: list[Record], policy: str = FIRST_COME, **known: Any) -> dict[str, Any]:
    columns = columns_of(records)
    return {
        "round": 1,
        "policy": policy,
        "slots": 4,
        "rate": 50.0,
        "seed": 1001,
        "counted": len(records) - 30,
        "first": 20,
        "law": LAW,
        "max_num_seqs": 8,
        "estimated_speed": 1.0,
        "noise": 0.5,
        "lateness": {"mean": 0.0, "p99": 0.001},
        "versions": {"python": "3"},
        "hardware": {"cores": 2},
        "date": "2026-01-01T00:00:00+00:00",
        "columns": columns,
    } | known


def simulated(policy: str, speed: float, count: int = 300) -> list[Record]:
    model = predicted.model_of({"policy": policy, "law": LAW, "max_num_seqs": 8}, speed)
    jobs, rngs = draw_jobs(model, 40.0, count, np.random.SeedSequence(5))
    return simulate_trace(model.policy, jobs, SimulatedEngine(model.law, 8), rngs)


def run_of(delays: Any, policy: str, said: float, sojourn: float = 2.0) -> Run:
    """A cell with these delays, all of them counted; what the law says of delay and sojourn."""
    columns = {name: [0.0] * len(delays) for name in COLUMNS}
    columns |= {"queueing_delay": list(delays), "sojourn_time": list(delays + 1)}
    cell = {"first": 0, "counted": len(delays), "columns": columns, "policy": policy}
    figures = Figures(said, said, sojourn, sojourn, sojourn)
    said_of_it = Predicted(
        speed=1.0,
        load=0.8,
        predicted=figures,
        same_arrivals=figures,
        formula=None,
        doubt=None,
    )
    return Run(cell, said_of_it)


def test_the_ratio_of_delays_that_are_half_of_the_others_is_known_exactly() -> None:
    found, half = ratio([DELAYS / 2, DELAYS], [DELAYS, 2 * DELAYS])
    assert found == pytest.approx(0.5)
    assert half == pytest.approx(0, abs=1e-12)


def test_the_interval_of_a_ratio_is_that_of_the_paired_residuals() -> None:
    other = RNG.exponential(1.0, 400)
    found, half = ratio([other], [DELAYS])
    expected = 1.96 * np.std(other - found * DELAYS) / DELAYS.mean() / 20
    assert half == pytest.approx(expected, rel=0.5)
    assert ratio([other] * 4, [DELAYS] * 4)[1] == pytest.approx(half / 2)


@pytest.mark.parametrize(
    ("observed", "half_width", "holds"),
    [
        (0.574, 0.0, True),
        (0.576, 0.0, False),
        (0.426, 0.0, True),
        (0.424, 0.0, False),
        (0.599, 0.1, True),
        (0.601, 0.1, False),
    ],
)
def test_a_ratio_holds_within_its_share_or_its_interval(
    observed: float, half_width: float, *, holds: bool
) -> None:
    assert Compared("spjf", observed, half_width, 0.5).within(0.15) is holds


def test_a_deviation_is_observed_over_predicted() -> None:
    assert Compared("spjf", 0.6, 0.0, 0.5).deviation == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("difference", "says"), [(1.1, RANKED), (1.0, UNCLEAR), (-1.0, UNCLEAR), (-1.1, REVERSED)]
)
def test_a_pair_is_told_apart_beyond_its_interval(difference: float, says: str) -> None:
    assert Pair("a", "b", difference, 1.0).says == says


def test_orders_are_compared_over_all_rounds_with_what_the_law_says_of_each() -> None:
    runs = {
        FIRST_COME: [run_of(DELAYS, FIRST_COME, 1.0), run_of(2 * DELAYS, FIRST_COME, 3.0)],
        SHORTEST: [run_of(DELAYS / 2, SHORTEST, 0.5), run_of(DELAYS, SHORTEST, 1.5)],
    }
    (found,) = compared(runs, FIRST_COME)
    assert (found.policy, found.predicted) == (SHORTEST, 0.5)
    assert found.observed == pytest.approx(0.5)
    (pair,) = pairs(runs)
    assert (pair.first, pair.second, pair.says) == (SHORTEST, FIRST_COME, RANKED)
    assert pair.difference == pytest.approx(0.75 * DELAYS.mean())
    assert as_predicted(runs, FIRST_COME)
    runs[SHORTEST] = [run_of(DELAYS / 2, SHORTEST, said) for said in (1.5, 3.5)]
    assert pairs(runs)[0].says == REVERSED
    assert not as_predicted(runs, FIRST_COME)


@pytest.mark.parametrize(
    ("delay", "said", "sojourn", "holds"),
    [
        (0.01, 0.01, 1.0, True),
        (0.1, 0.01, 1.0, False),
        (0.01, 0.1, 1.0, False),
        (0.01, 0.01, 1.1, False),
    ],
)
def test_many_slots_gain_nothing(delay: float, said: float, sojourn: float, *, holds: bool) -> None:
    alike = np.full(100, delay)
    runs = {
        FIRST_COME: [run_of(alike, FIRST_COME, said, 1.0)],
        SHORTEST: [run_of(alike, SHORTEST, said, sojourn)],
    }
    assert gains_nothing(runs, FIRST_COME) is holds


def test_figures_are_of_the_counted_requests() -> None:
    tokens = np.arange(1.0, 21)
    found = figures_of(tokens / 10, tokens, tokens)
    assert found.delay == pytest.approx(1.05)
    assert found.sojourn == pytest.approx(10.5)
    assert found.longest_tenth == pytest.approx(19.5)
    assert found.delay_p99 == pytest.approx(np.quantile(tokens / 10, 0.99))
    run = run_of(DELAYS, FIRST_COME, 1.0)
    run.cell["columns"]["output_tokens"] = list(range(400))
    part = dataclasses.replace(run, cell={**run.cell, "first": 10, "counted": 50})
    assert part.column("output_tokens").tolist() == list(range(10, 60))


def test_columns_are_in_the_order_of_arrival_and_leave_out_who_failed() -> None:
    records = [
        Record(request_id="b", outcome="completed", arrived_at=7.5, queueing_delay=0.25),
        Record(request_id="a", outcome="completed", arrived_at=5.0, preemptions=2),
        Record(request_id="c", outcome="failed", arrived_at=6.0),
    ]
    found = columns_of(records)
    assert found["arrived_at"] == [0.0, 2.5]
    assert found["queueing_delay"] == [0.0, 0.25]
    assert found["preemptions"] == [2, 0]


@pytest.mark.parametrize("order", ["", ",order=sprpt"])
def test_the_speed_is_that_at_which_the_requests_were_served(order: str) -> None:
    policy = FIRST_COME + order
    cell = cell_of(simulated(policy, 1.2), policy)
    speed, records = own_speed(cell)
    assert speed == pytest.approx(1.2, rel=2e-3)
    assert [record.request_id for record in records] == [str(i) for i in range(300)]


def test_quietness_is_the_speed_and_those_of_its_blocks() -> None:
    speed, blocks = quietness(simulated(FIRST_COME, 1.2, 1500), FIRST_COME, parse_law(LAW), 1.0)
    assert speed == pytest.approx(1.2, rel=0.02)
    assert len(blocks) > 2
    assert blocks == pytest.approx([1.2] * len(blocks), rel=0.05)


def test_what_the_law_says_of_a_cell() -> None:
    policy = FIRST_COME + ",order=sprpt"
    found = predicted_of(cell_of(simulated(policy, 1.0), policy), 600)
    assert found.load == pytest.approx(0.64, abs=0.05)
    assert (found.formula, found.doubt) == (None, None), "interruptions in slots are simulated"
    assert 0 < found.predicted.delay < found.predicted.sojourn
    assert 0 < found.same_arrivals.delay < found.same_arrivals.sojourn
    policy = FIRST_COME + ",order=spjf"
    assert predicted_of(cell_of(simulated(policy, 1.0), policy), 600).formula is not None


def test_the_page_is_written_of_whole_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted_of, "__defaults__", (600,))
    part = dataclasses.replace(design.FEW, orders=("", ",order=spjf"))
    folder = tmp_path / "slots4"
    (folder / "cells").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"policies": part.policies}))
    (folder / "profile.json").write_text(json.dumps({"name": "law", "law": {"k4": 0.001}}))
    for policy in part.policies:
        cell = cell_of(simulated(policy, 1.0), policy)
        (folder / f"cells/{design.name_of(1, policy)}.json").write_text(json.dumps(cell))
    (folder / "cells/lonely.json").write_text(json.dumps(cell | {"round": 2}))
    many = tmp_path / "slots64"
    (many / "cells").mkdir(parents=True)
    for name in ("plan.json", "profile.json"):
        (many / name).write_text((folder / name).read_text())
    (many / "cells/one.json").write_text(json.dumps(cell))
    page, holds = report.write_report(tmp_path, tmp_path / "docs", ["slots4", "slots64"])
    text = page.read_text()
    assert "## 4 slots, load 0.8" in text
    assert "| `order=spjf` |" in text
    assert "Not used: round 2: continuous:max_batch_size=4 has no cell." in text
    assert "## slots64\n\n**Nothing to compare.**\n\nNot used: round 1:" in text
    assert not holds
    data = json.loads(page.with_suffix(".json").read_text())["slots4"]
    assert data["compared"] == "queueing_delay"
    assert [cell["policy"] for cell in data["cells"]] == list(part.policies)
    assert len(data["cells"][0]["block_mean_delays"]) == 20
    assert data["holds"] == (page.read_text().count("does not hold") == 0)


def test_without_a_whole_round_there_is_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which has no whole round; expected one to write of"):
        report.write_report(tmp_path, tmp_path, ["slots4"])


def test_the_flags_set_requests_and_rounds() -> None:
    few, many = parts_of(parser().parse_args(["--requests", "200", "--rounds", "2"]))
    assert (few.requests, few.rounds, len(few.cells)) == (200, 2, 10)
    assert (many.requests, many.rounds) == (200, 1)
    (only,) = parts_of(parser().parse_args(["--part", "slots64"]))
    assert only.policies[0] == "continuous:max_batch_size=64"
    with pytest.raises(ValueError, match="got --requests 99 --rounds 3; expected at least 100"):
        parts_of(parser().parse_args(["--requests", "99"]))


def test_a_cell_sends_more_than_it_counts() -> None:
    assert design.QUIET_MACHINE.sent(4000) == 4000 + 400 + 100
    assert design.QUIET_MACHINE.first(4000) == 400
