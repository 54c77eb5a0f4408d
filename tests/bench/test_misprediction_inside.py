"""The orders in vLLM's own queue: what is sent to it, and how their ranking is judged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.misprediction import RESULTS, ROOT, Json, Results, block_means, replayed, timetable
from bench.misprediction_inside import (
    InVllm,
    Ranking,
    cells,
    joined,
    section,
    simulate,
    unserved,
)
from bench.misprediction_page import Findings

LAW = "k1=0.0001,k2=0.0015,k3=0.00002,k4=0.0009"


def ranking(folder: Path, delays: dict[str, tuple[float, float]]) -> Ranking:
    """Of cells with these mean sojourn times (ms), observed and simulated, blocks to 1 %."""
    rng, results = np.random.default_rng(0), Results(folder / "results.json")
    for cell in cells():
        if (name := f"{cell.order} {cell.predictor}") in delays:
            observed, simulated = delays[name]
            found: Json = {
                "sojourn": (observed * (1 + 0.01 * rng.standard_normal(20))).tolist(),
                "sojourn_simulated": [simulated] * 20,
                "sojourn_shift": [0.0] * 20,
                "speed": 1.0,
            }
            results.data["cells"][str(cell)] = found
    return Ranking(Findings(results, cells()))


FCFS, SPJF, SPRPT = "fcfs none", "spjf exact", "sprpt exact"


def test_pairs_that_are_told_apart_are_judged(tmp_path: Path) -> None:
    """100 and 100.1 ms are not told apart; 80 ms is, and was predicted to be the slowest."""
    found = ranking(tmp_path, {FCFS: (100, 100), SPJF: (100.1, 95), SPRPT: (80, 120)})
    assert found.told_apart() == {(FCFS, SPRPT): True, (SPJF, SPRPT): True}
    assert found.wrong() == [(FCFS, SPRPT), (SPJF, SPRPT)]


def test_what_the_requests_explain_is_no_error_of_the_engine(tmp_path: Path) -> None:
    """A burst of which every order takes its share, in the simulation too."""
    results, burst = Results(tmp_path / "results.json"), np.repeat([1.0, 9.0], 10)
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal(20)
    for cell, mean in zip(cells()[:2], (1.0, 0.9), strict=True):
        found = {"sojourn": (mean * burst * noise).tolist(), "speed": 1.0}
        found |= {"sojourn_simulated": (mean * burst).tolist(), "sojourn_shift": [0.0] * 20}
        results.data["cells"][str(cell)] = found
    ranked = Ranking(Findings(results, cells()))
    assert ranked.told_apart() == {(FCFS, SPJF): True}
    assert ranked.told_apart(other_requests=True) == {}


def test_a_ranking_as_predicted_has_tau_1(tmp_path: Path) -> None:
    found = ranking(tmp_path, {FCFS: (100, 90), SPJF: (90, 80), SPRPT: (80, 70)})
    assert (found.wrong(), found.tau) == ([], 1.0)


def test_two_rankings_are_compared_by_what_both_have(tmp_path: Path) -> None:
    first = ranking(tmp_path, {FCFS: (100, 1), SPJF: (90, 1), SPRPT: (80, 1)})
    second = ranking(tmp_path, {FCFS: (10, 1), SPJF: (20, 1)})
    assert first.against(second) == (-1.0, 0, 1)
    assert first.against(first) == (1.0, 3, 3)


def test_predictions_go_where_the_scheduler_reads_them() -> None:
    target = InVllm(base_url="http://127.0.0.1:1", model="tiny", ignore_eos=True)
    body = json.loads(target.body(np.arange(10, 14), 7, 7, 1, 12.5))
    assert body["vllm_xargs"] == {"predicted_output_tokens": 12.5}
    assert body["max_tokens"] == 7
    assert not {"seed", "predicted_output_tokens"} & body.keys()
    assert "vllm_xargs" not in json.loads(target.body(np.arange(10, 14), 7, 7, 1))


def test_an_engine_that_is_the_simulator_is_predicted(tmp_path: Path) -> None:
    """Served by the law at speed 1.2: speeds and means are found again, of every cell."""
    results, rate, count = Results(tmp_path / "results.json"), 60.0, 450
    results.data |= {"laws": {"4": LAW}, "rounds": []}
    results.data["groups"]["4 0.85"] = {"rate": rate, "count": count, "seed": 1, "speed": 1.2}
    for seed in range(1, 6):
        found = {}
        for cell in cells():
            run = replayed(cell, LAW, timetable(cell, rate, count, seed), 1.2)
            found[str(cell)] = {
                "sojourn": block_means(run.sojourn_time),
                "service": float((run.sojourn_time - run.queueing_delay).mean()),
                "step": 0.002,
                "preemptions": 0.0,
                "late": 0.0,
                "date": "2026-01-01",
                "tries": 1,
            }
        results.data["rounds"].append({"seed": seed, "cells": found})
    simulate(results)
    known = results.data["cells"]
    assert set(known) == set(map(str, cells()))
    for found in known.values():
        assert found["speed"] == pytest.approx(1.2, rel=2e-3)
        assert np.mean(found["sojourn_simulated"]) == pytest.approx(
            np.mean(found["sojourn"]), rel=0.02
        )
    ranked = Ranking(Findings(results, cells()))
    assert ranked.wrong() == []
    assert ranked.tau > 0.9
    of: Json = {"arguments": [], "step_ms": 0, "hardware": {}, "versions": {}}
    results.data |= {"of": of, "minutes": 1}
    said = section(results, Results(ROOT / RESULTS))
    assert "0 of these were\npredicted the other way round." in said
    assert (said.count("| holds |"), said.count("differs |")) == (len(cells()) - 1, 0)


def test_a_cell_is_served_again_where_the_machine_was_slow() -> None:
    """Steps 3 % longer than those of the others; 1 % is usual. First what is missing."""
    steps = {str(cell): {"step": 0.0150} for cell in cells()}
    of_round: Json = {"seed": 1, "cells": steps}
    steps[str(cells()[3])]["step"] = 0.01515
    assert unserved(of_round) == []
    steps[str(cells()[2])]["step"] = 0.01545
    assert unserved(of_round) == [cells()[2]]
    del steps[str(cells()[1])]
    assert unserved(of_round) == [cells()[1]]


def test_nothing_is_said_where_nothing_has_been_measured(tmp_path: Path) -> None:
    assert section(Results(tmp_path / "a.json"), Results(tmp_path / "b.json")) == ""


def test_no_block_is_of_two_rounds() -> None:
    assert (
        joined([[float(turn)] * 20 for turn in range(5)])
        == [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4
    )
