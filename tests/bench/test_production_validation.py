"""The production design of the live validation: its cells, what of a run is compared, by which
rule, and its page.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.live.answers import answered, answers, verdict, verdict_of_cell
from bench.live.cell import model_of
from bench.live.design import (
    MEMORY,
    PRODUCTION,
    QUIET_MACHINE,
    gateway_arguments,
    plan_of,
    points,
)
from bench.live.production_page import write_production_page
from loadgen.sweep.grid import Basis
from queueing.distributions.token_distribution import parse_distribution
from queueing.latency.law import parse_law
from queueing.measurement.record import Record


def record(number: int, arrived: float, first: float, whole: float, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "outcome": "completed",
        "arrived_at": arrived,
        "first_token_at": arrived + first,
        "released_at": arrived + whole,
        "sojourn_time": whole,
    }
    return Record(**fields | changed)


def test_its_cells_are_two_policies_at_three_loads_with_three_kinds_of_answers() -> None:
    plan = plan_of(QUIET_MACHINE, 1, PRODUCTION, fast=False)
    cells = list(points(plan, PRODUCTION))
    assert len({cell.name for cell in cells}) == len({cell.seed for cell in cells}) == 18
    assert {(cell.policy[-2:], cell.load) for cell in cells} == {
        (slots, load) for slots in ("32", "64") for load in (0.5, 0.7, 0.85)
    }
    assert not any(cell.longer for cell in cells)
    laws = {cell.output_tokens: parse_distribution(cell.output_tokens, 100_000) for cell in cells}
    scvs = sorted(law.variance / law.mean**2 for law in laws.values())
    assert [law.mean for law in laws.values()] == [pytest.approx(40, rel=0.02)] * 3
    assert scvs == [
        pytest.approx(1, rel=0.05),
        pytest.approx(4, rel=0.05),
        pytest.approx(4, rel=0.3),
    ]


def test_with_little_memory_the_rates_are_those_that_the_memory_allows() -> None:
    plan = plan_of(QUIET_MACHINE, 1, MEMORY, fast=False)
    cells = list(points(plan, MEMORY))
    assert [cell.memory for cell in cells] == [MEMORY.memory] * 3
    assert {cell.load for cell in cells} == set(MEMORY.loads)
    given = gateway_arguments(QUIET_MACHINE, MEMORY, fast=False)
    assert (
        given[given.index("--engine-arg") + 1] == f"num_gpu_blocks_override={MEMORY.memory // 32}"
    )
    bounds = {"max_model_len": 2048, "max_num_seqs": 64, "step_tokens": None}
    law = parse_law("k1=0.0001,k2=0.001,k3=0.00003,k4=0.001,kp=0.000008")
    basis = Basis(plan, law, SimpleNamespace(**bounds))  # type: ignore[arg-type]
    limited, free = (
        model_of(basis, cell).largest_stable_rate
        for cell in (cells[0], dataclasses.replace(cells[0], memory=None))
    )
    assert limited < 0.95 * free


def test_what_came_after_an_answer_that_was_not_over_is_left_out() -> None:
    """Else only the short answers among the last would count."""
    records = [
        record(0, 0.5, 0.1, 0.2),  # before the window
        record(2, 3.0, 0.1, 0.2),
        record(1, 2.0, 0.1, 0.2),
        record(3, 4.0, 0.1, 9.0),  # over after the window
        record(4, 5.0, 0.1, 0.2),
    ]
    assert [each.request_id for each in answered(records, (1.0, 10.0))] == ["r1", "r2"]
    records[3] = record(3, 4.0, 0.1, 2.0, outcome="cancelled")
    assert [each.request_id for each in answered(records, (1.0, 10.0))] == ["r1", "r2"]
    records[3] = record(3, 4.0, 0.1, 2.0)
    assert len(answered(records, (1.0, 10.0))) == 4


def test_means_and_p95_of_both_durations_stand_beside_what_was_predicted() -> None:
    rng = np.random.default_rng(3)
    first, whole = rng.exponential(0.1, 4000), 0.5 + rng.exponential(0.2, 4000)
    records = [record(i, 1.0 + 0.01 * i, first[i], whole[i]) for i in range(4000)]
    live = {"time_to_first_token": {"mean": 0.105, "p95": 0.4}, "sojourn_time": {"mean": 0.7}}
    found = answers(records, (0.0, 100.0), live)
    values = {(row["quantity"], row["statistic"]): row for row in found}
    mean, p95 = (values["time_to_first_token", name] for name in ("mean", "p95"))
    assert mean["observed"] == pytest.approx(first.mean())
    assert p95["observed"] == pytest.approx(np.quantile(first, 0.95), rel=0.01)
    assert mean["low"] < mean["observed"] < mean["high"]
    assert (mean["predicted"], p95["predicted"]) == (0.105, 0.4)
    assert [verdict(row) for row in found] == [
        "holds",
        "does not hold",
        "holds",
        "nothing predicted",
    ]
    assert verdict_of_cell(found) == "does not hold"
    assert verdict_of_cell([mean, values["sojourn_time", "mean"]]) == "holds"


@pytest.mark.parametrize(
    ("half", "predicted", "says"),
    [
        (0.01, 1.0999, "holds"),
        (0.01, 1.1001, "does not hold"),
        (0.01, 0.9001, "holds"),
        (0.01, 0.8999, "does not hold"),
        (0.2, 1.1999, "holds"),
        (0.2, 1.2001, "does not hold"),
        (0.2499, 1.0, "holds"),
        (0.2501, 1.0, "too short"),
        (math.nan, 1.0, "too short"),
        (0.01, None, "nothing predicted"),
    ],
)
def test_the_rule(half: float, predicted: float | None, says: str) -> None:
    known = not math.isnan(half)
    row = {
        "observed": 1.0,
        "low": 1 - half if known else None,
        "high": 1 + half if known else None,
        "predicted": predicted,
    }
    assert verdict(row) == says
    assert verdict_of_cell([row]) == says.replace("nothing predicted", "does not hold")


def test_the_page_has_a_row_for_every_cell_and_counts_them(tmp_path: Path) -> None:
    def cell(name: str, seed: int, predicted: float) -> dict[str, Any]:
        row = {"observed": 0.1, "low": 0.098, "high": 0.102, "predicted": predicted, "n": 1234}
        names = [("time_to_first_token", "mean"), ("time_to_first_token", "p95")]
        names += [("sojourn_time", "mean"), ("sojourn_time", "p95")]
        return {
            "cell": name,
            "attempt": 1,
            "seed": seed,
            "policy": "continuous:max_batch_size=32",
            "load": 0.5,
            "output_tokens": "mixture:weights=...",
            "seconds": 61.0,
            "observed": {"value": 0.1, "low": 0.098},
            "answers": [row | {"quantity": each, "statistic": one} for each, one in names],
            "noise": [] if seed == 1 else ["slower"],
            "engine": "vllm",
            "versions": {"vllm": "0"},
            "hardware": {"cpu": "some", "cores": 2},
            "law": "k4=1",
            "date": "2026-01-01T00:00:00+00:00",
        }

    folder, docs = tmp_path / "run", tmp_path / "docs"
    (folder / "cells").mkdir(parents=True)
    docs.mkdir()
    for number, predicted in ((1, 0.105), (2, 0.2)):
        path = folder / f"cells/c{number}.1.json"
        path.write_text(json.dumps(cell(f"c{number}", number, predicted)))
    page = write_production_page(folder, docs).read_text()
    assert "## 1 of 2 cells hold" in page
    assert "4 hold, 4 do not hold; the furthest" in page
    assert "| bimodal | 1,234 | 61 | 100 ± 2 / 105 (+5.0%) |" in page
    assert "**100 ± 2 / 200 (+100.0%)**" in page
    assert "**does not hold** \\*" in page
    assert (docs / "production-validation/cells/c1.1.json").is_file()
