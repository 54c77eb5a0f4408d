"""The bench of mispredictions: its cells cover the design, and the sentences of its page follow
from the data.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bench.misprediction import (
    BIT,
    BURST,
    COST,
    COSTLY,
    ERRORS,
    FALSE_LONG,
    FALSE_SHORT,
    HALF_LONG,
    HALF_SHORT,
    HIGH,
    INTERRUPTING,
    KINDS,
    LEARNED,
    LOW,
    MAIN,
    MEMORY,
    QUESTIONS,
    Cell,
    Json,
    Results,
    block_means,
    design,
    own_speed,
    queue_of,
    replayed,
    texts_of,
    timetable,
    unmeasured,
)
from bench.misprediction_page import Findings, page

LAW = "k1=0.0001,k2=0.0015,k3=0.00002,k4=0.0009,kp=0.000006,kr=0.0003"
Milliseconds = Mapping[tuple[str, str], float]


def findings(
    tmp_path: Path,
    delays: Milliseconds,
    noise: float = 0.01,
    group: tuple[int, float] = MAIN,
    name: str = "",
) -> Findings:
    """Of cells of the main group, or another one, with these mean delays, service 20 ms; noise: of
    a block.
    """
    rng, results = np.random.default_rng(0), Results(tmp_path / "results.json")
    run: Json = {"began": "2026-01-01", "engine": "made up", "hardware": {}, "versions": {}}
    run |= {"seed": 1, "minutes": 1.0, "gateway": []}
    results.data |= {"laws": {"4": LAW}, "runs": [run]}
    slots, load = group
    names = {"rate": 70.0, "count": 3000, "seed": 1, "speed": 1.0}
    results.data["groups"] = {Cell(slots, load, "", "", name=name).group: names}
    for (order, told), mean in ({("fcfs", "none"): 10.0} | dict(delays)).items():
        blocks = mean / 1e3 * (1 + noise * rng.standard_normal(20))
        found: Json = {"delay": blocks.tolist(), "sojourn": (blocks + 0.02).tolist()}
        found |= {"delay_shift": [0.0] * 20, "sojourn_shift": [0.0] * 20, "speed": [1.0]}
        found |= {"sojourn_simulated": [0.03] * 20}
        found |= {"delay_simulated": [0.01] * 20, "stationary": 0.01, "formula": None}
        found |= {"late": [1e-4], "date": "2026-01-01", "preemptions": [0.5]}
        found |= {"alpha_over_beta": 2.0, "runs": [0]}
        found |= {"false_long": 0.2, "false_short": 0.1, "service": [0.02] * KINDS[name].pieces}
        results.data["cells"][str(Cell(*group, order, told, name=name))] = found
    return Findings(results)


def test_a_cell_is_compared_at_the_speed_of_fcfs(tmp_path: Path) -> None:
    """An engine that was slow for a cell: twice the delay of fcfs, and three times as simulated."""
    found = findings(tmp_path, {("spjf", "exact"): 20.0})
    cell = Cell(*MAIN, "spjf", "exact")
    found.cells[cell] |= {"delay_simulated": [0.03] * 20, "delay_shift": [-0.018] * 20}
    price = found.price("delay", cell, cell.fcfs)
    assert price.mean == pytest.approx(20 / 30 * 12 / 10, rel=0.01)
    assert price.half_width < 0.02


def test_the_cells_cover_the_design() -> None:
    cells = design()
    assert len(set(cells)) == len(cells)
    assert {cell.fcfs for cell in cells} <= set(cells)
    plain = {(cell.slots, cell.load) for cell in cells if not cell.name}
    assert plain == {(4, 0.7), (4, 0.85), (16, 0.85)}
    assert {cell.name for cell in cells} == set(KINDS)
    assert {cell.order for cell in cells if cell.predictor == LEARNED} == {"spjf", *INTERRUPTING}
    main = {(cell.order, cell.predictor) for cell in cells if (cell.slots, cell.load) == MAIN}
    wanted = [(order, told) for order in ("spjf", *INTERRUPTING) for told in ERRORS.values()]
    wanted += [(order, told) for order in INTERRUPTING for told in (LOW, HIGH)]
    wanted += [
        (order, bit) for order in ("spjf", "sprpt") for bit in (BIT, FALSE_LONG, FALSE_SHORT)
    ]
    assert {*wanted, ("gittins", "none")} <= main
    assert {cell.order for cell in cells if cell.cost} == set(COSTLY)


@pytest.mark.parametrize("group", sorted({cell.group for cell in design()}))
def test_all_cells_of_a_group_have_the_same_requests(group: str) -> None:
    cells = [cell for cell in design() if cell.group == group and not cell.cost]
    first, *others = (timetable(cell, 70.0, 200, 3) for cell in cells)
    for other in others:
        assert np.array_equal(other.intended_at, first.intended_at)
        assert np.array_equal(other.output_tokens, first.output_tokens)


def test_lengths_are_learned_from_prompts_that_no_cell_sends() -> None:
    """Nor does a cell send one twice, or predict what the gateway has to."""
    cell = Cell(4, 0.8, "spjf", LEARNED, name=LEARNED)
    learned, sent = ([*(texts_of(cell, 20.0, 1000, 3, part) or ())] for part in (0, 1))
    assert not {*map(str, learned)} & {*map(str, sent)}
    assert len({*map(str, sent)}) == 1000
    assert timetable(cell, 20.0, 1000, 3).predicted_output_tokens is None


@pytest.mark.left_out
@pytest.mark.parametrize("cell", [cell for cell in design() if cell.kind.blocks], ids=str)
def test_memory_and_not_slots_limits_the_cells_of_few_blocks(cell: Cell) -> None:
    queue = queue_of(cell, LAW)
    assert queue.load_bound == "memory"
    run = replayed(cell, LAW, timetable(cell, 0.5 * queue.largest_stable_rate, 300, 1), 1.0)
    assert len(run.queueing_delay) == 300


@pytest.mark.parametrize("order", COSTLY)
def test_a_prediction_costs_tokens_of_those_that_pay_it(order: str) -> None:
    """`server=4tokens,bit=1tokens`; skippredict keeps the short ones first."""
    free, paid = (timetable(Cell(*MAIN, order, "exact", c), 70.0, 500, 3) for c in ("", COST))
    tokens, more = free.output_tokens, paid.output_tokens - free.output_tokens
    if order.startswith("skippredict"):
        assert np.array_equal(more, np.where(tokens <= 32, 1, 5))
        assert paid.predicted_output_tokens is not None
        assert np.array_equal(paid.predicted_output_tokens <= 32, tokens <= 32)
    elif order.startswith("delaypredict"):
        assert np.array_equal(more, np.where(tokens > 32, 4, 0))
    else:
        assert set(more.tolist()) == {4}


def test_the_speed_of_an_engine_is_found_from_its_service_times() -> None:
    cell = Cell(*MAIN, "sprpt", ERRORS["1"])
    requests = timetable(cell, 60.0, 400, 3)
    run = replayed(cell, LAW, requests, 1.3)
    service = float((run.sojourn_time - run.queueing_delay).mean())
    assert own_speed(cell, LAW, requests, service) == pytest.approx(1.3, rel=2e-3)


def test_block_means_leave_out_the_first_tenth_and_the_last_requests() -> None:
    counted = np.repeat(np.arange(20.0), 100)
    values = np.concatenate([np.full(200, 1e9), counted, np.full(50, 1e9)])
    assert block_means(values) == list(range(20))
    assert block_means(np.arange(11.0), pieces=12) == [5.0]  # a burst has no other requests


def test_what_has_been_measured_is_not_measured_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.data["cells"] = findings(tmp_path, {}).data["cells"]
    results.save()
    results = Results(tmp_path / "results.json")
    options = argparse.Namespace(cells="", seed=1, again=False)
    assert {*design()} - {*unmeasured(results, options)} == {Cell(*MAIN, "fcfs", "none")}
    options = argparse.Namespace(cells="4 slots, load 0.7: (fcfs|gittins)", seed=1, again=True)
    assert {cell.order for cell in unmeasured(results, options)} == {"fcfs", "gittins"}


def test_a_cell_of_bursts_is_measured_until_it_has_all(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.data["cells"] = findings(tmp_path, {}, group=BURST, name=QUESTIONS).data["cells"]
    options = argparse.Namespace(cells=f"{QUESTIONS}.*fcfs", seed=1, again=False)
    assert not unmeasured(results, options)
    results.data["cells"][str(Cell(*BURST, "fcfs", "none", name=QUESTIONS))]["service"].pop()
    assert unmeasured(results, options) == [Cell(*BURST, "fcfs", "none", name=QUESTIONS)]


def test_the_bursts_answer_in_place_of_the_main_group(tmp_path: Path) -> None:
    delays = {SRPT: 10.0, ("trail,c=0.2", "exact"): 4.0, ("spjf", BIT): 5.0}
    delays |= {("spjf", HALF_LONG): 9.0, ("spjf", HALF_SHORT): 6.0}
    found = findings(tmp_path, delays, group=BURST, name=QUESTIONS)
    assert "c = 0.2 pays" in found.trail()
    assert "a false long costs more than a false short" in found.false_bits()
    assert found.main(*SRPT) is None
    assert "half of the short lengths" in page(found)


SRPT = ("sprpt", "exact")


@pytest.mark.parametrize(
    ("worst", "noise", "said"),
    [
        (5.0, 0.01, "is graceful: none of 2 cells needs more"),  # 25 / 25 / 2
        (180.0, 0.01, "is not graceful"),  # 200 / 25 / 2 = 4
        (155.0, 0.2, "cannot be told"),  # 175 / 25 / 2 = 3.5
    ],
)
def test_whether_degradation_is_graceful_follows_from_the_data(
    tmp_path: Path, worst: float, noise: float, said: str
) -> None:
    found = findings(tmp_path, {SRPT: 5.0, ("srpt-b", LOW): worst}, noise).graceful()
    assert said in found
    assert "`srpt-b`" in found or worst == 5.0


def test_orders_with_large_errors_are_set_against_fcfs(tmp_path: Path) -> None:
    two = ERRORS["2"]
    delays = {SRPT: 5.0, ("spjf", two): 7.0, ("sprpt", two): 14.0, ("trail", two): 10.0}
    found = findings(tmp_path, delays).graceful()
    assert "worse: `sprpt` (1.4" in found
    assert "better: `spjf` (0.7" in found
    assert "not told apart: `trail` (1.0" in found


@pytest.mark.parametrize(
    ("long", "short", "said"),
    [
        (6.0, 8.0, "a false short costs more than a false long"),
        (9.0, 6.0, "a false long costs more than a false short"),
        (7.0, 6.0, "cannot be told apart"),  # 2 ms for each 0.2, 1 ms for each 0.1
    ],
)
def test_the_costs_of_false_bits_are_compared_for_each(
    tmp_path: Path, long: float, short: float, said: str
) -> None:
    delays = {("spjf", BIT): 5.0, ("spjf", FALSE_LONG): long, ("spjf", FALSE_SHORT): short}
    found = findings(tmp_path, delays).false_bits()
    assert found.startswith("Under `spjf`")
    assert said in found
    assert "sprpt" not in found


@pytest.mark.parametrize(
    ("trail", "said"),
    [(4.0, "c = 0.8 pays"), (6.5, "c = 0.8 costs"), (5.0, "c = 0.8 cannot be told")],
)
def test_whether_the_c_of_trail_pays(tmp_path: Path, trail: float, said: str) -> None:
    delays = {SRPT: 5.0, ("trail", "exact"): trail, ("trail", LOW): 1.0}
    found = findings(tmp_path, delays).trail()
    assert said in found
    assert "over 1 predictor;" in found


def test_the_loads_at_which_predicting_does_harm(tmp_path: Path) -> None:
    found = findings(tmp_path, {})
    assert found.harm() == "Not simulated."
    ratios = {"spjf": [1.1, 0.9, 0.8], "sprpt": [1.1, 0.9, None], "x": [1.2, 1.1, None]}
    found.data["costs"] = {"cost": COST, "loads": [0.1, 0.5, 0.9], "ratios": ratios}
    assert found.harm() == (
        f"With `{COST}`: `spjf` pays at loads 0.5 to 0.9; `sprpt` pays at load 0.5, does harm from "
        "0.9 on; `x` does harm at every load."
    )


def test_the_page_counts_the_cells_that_are_as_predicted(tmp_path: Path) -> None:
    """All are predicted to equal fcfs: 11 of 10 ms holds, 15 does not."""
    found = findings(tmp_path, {("spjf", "exact"): 11.0, SRPT: 15.0}, noise=1e-4)
    assert found.agreement() == (1, 2, 1, 2)
    text = page(found)
    assert "Of 2 cells 1 have a ratio" in text
    assert "| `sprpt` | `exact` | 15.0 | 1.50 ± 0.00 | 1.00 | 1.00 |" in text
    assert text.count("differs") == 1


def test_each_kind_of_cells_has_to_be_as_predicted_in_four_of_five(tmp_path: Path) -> None:
    delays = {("spjf", "exact"): 11.0, ("spjf,by=memory", "exact"): 15.0}
    found = findings(tmp_path, delays, 1e-4, (16, 0.85), MEMORY)
    assert found.kinds() == "memory 1 of 2 (does not hold)"
    assert "- memory: prompts `uniform:low=16,high=400`, max_context_tokens 1632" in page(found)
