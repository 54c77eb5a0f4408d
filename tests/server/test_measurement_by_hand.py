"""Which batches a calibration designs, when an idle moment is used and what follows from it,
counted by hand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import f as f_law

from kendall.policies import SpecError
from kendall.queueing.latency.fit import Measured
from kendall.queueing.latency.law import parse_law
from kendall.server.admission.limits_in_force import PolicyChange
from kendall.server.calibration.calibration import CalibrationRequest
from kendall.server.calibration.candidate_law import compare
from kendall.server.calibration.designed import Cell, design, longest_cells, usual_length
from kendall.server.calibration.probe_schedule import (
    ProbedCell,
    ProbedLoop,
    ProbeLimits,
    ProbeSchedule,
)
from kendall.server.calibration.turnaround import ClosedLoop, slot_time, solve_turnaround
from kendall.server.engines.base import Capabilities

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=50e-6,k4=0.9e-3,kp=1e-5,turnaround=1.5e-3")
BOUNDS = Capabilities(
    engine="vllm",
    model="m",
    max_num_seqs=100,
    max_model_len=4096,
    max_num_batched_tokens=8192,
    kv_cache_tokens=10**6,
    eos_token_ids=frozenset({2}),
    vocab_size=1000,
)


def shapes(cells: list[Cell]) -> list[tuple[int, int, int]]:
    """Size, length and prompt of each; all members are alike."""
    assert all(set(cell.lengths) == {cell.lengths[0]} for cell in cells)
    return [(len(cell.lengths), cell.lengths[0], cell.prompt_tokens) for cell in cells]


# the grid


def test_the_grid_has_every_size_with_every_length_and_a_few_with_long_prompts() -> None:
    sizes, lengths = (1, 2, 4, 8, 16, 32, 64, 100), (1, 4, 16, 32, 64, 128, 256, 300)
    assert shapes(design(BOUNDS, 32, None, 300)) == [
        *((size, length, 32) for size in sizes for length in lengths),
        *((size, 16, 128) for size in (1, 2, 4, 8)),
    ]


def test_prompts_fit_one_step_and_longer_ones_have_the_sizes_that_do() -> None:
    """8192 tokens of a step: 81 for each of 100, then 4 times as many up to 4 times 500."""
    found = shapes(design(BOUNDS, 500, None, 4))
    assert found[-10:] == [
        *((size, 4, 324) for size in (1, 2, 4, 8)),
        *((size, 4, 1296) for size in (1, 2, 4)),
        *((size, 4, 2000) for size in (1, 2, 4)),
    ]
    assert {prompt for _, _, prompt in found[:-10]} == {81}


@pytest.mark.parametrize(
    ("bounds", "asked", "sizes", "longest"),
    [
        ({}, {"max_batch_size": 8}, (1, 2, 4, 8), 64),
        ({}, {"max_batch_size": 3}, (1, 2, 3), 64),
        ({"max_num_seqs": 4}, {"max_batch_size": 8}, (1, 2, 4), 64),
        ({"max_num_batched_tokens": 5}, {}, (1, 2, 4, 5), 64),
        ({"max_model_len": 40}, {}, (1, 2, 4, 8, 16, 32, 64, 100), 20),
        ({}, {"max_output_tokens": 2}, (1, 2, 4, 8, 16, 32, 64, 100), 2),
    ],
)
def test_the_grid_is_as_large_as_is_asked_and_the_engine_allows(
    bounds: dict[str, int], asked: dict[str, int], sizes: tuple[int, ...], longest: int
) -> None:
    found = shapes(design(dataclasses.replace(BOUNDS, **bounds), **asked))
    assert tuple(sorted({size for size, *_ in found})) == sizes
    assert max(length for _, length, _ in found) == longest


def test_what_the_memory_does_not_hold_is_left_out() -> None:
    """A member of one token holds 32 + 65, one of 64 tokens 32 + 128."""
    found = shapes(design(dataclasses.replace(BOUNDS, kv_cache_tokens=16 * 160)))
    assert {size for size, length, prompt in found if (length, prompt) == (64, 32)} == {
        *(1, 2, 4, 8, 16)
    }
    assert max(size for size, length, _ in found if length == 1) == 16
    assert {size for size, _, prompt in found if prompt == 128} == {1, 2, 4, 8}


def test_the_longest_answers_take_half_of_the_steps_in_two_sizes_twice_each() -> None:
    grid = [Cell((length,) * size, 32) for size in (1, 4) for length in (1, 64)]
    steps = 5 * (1 + 64) * 2
    expected = int(0.5 * steps / 4)
    assert shapes(longest_cells(BOUNDS, grid, 5, None)) == [
        (1, expected, 32),
        (4, expected, 32),
    ]
    assert shapes(longest_cells(BOUNDS, grid, 5, 70)) == [(1, 70, 32), (4, 70, 32)]
    assert longest_cells(BOUNDS, grid, 5, 64) == [], "no longer than what is measured"
    assert longest_cells(BOUNDS, grid, 3, None) == [], "too few steps"
    short = dataclasses.replace(BOUNDS, max_model_len=100)
    assert shapes(longest_cells(short, grid, 5, None)) == [(1, 68, 32), (4, 68, 32)]
    small = dataclasses.replace(BOUNDS, kv_cache_tokens=4 * (32 + 81 + 64) - 1)
    assert shapes(longest_cells(small, grid, 5, None)) == [(1, 81, 32)]
    none = dataclasses.replace(BOUNDS, kv_cache_tokens=32 + 81 + 64 - 1)
    assert longest_cells(none, grid, 5, None) == []


def test_the_usual_length_is_the_longest_that_was_measured_more_than_four_times() -> None:
    assert usual_length([]) == 0
    assert usual_length([(300,)] * 4 + [(64, 64)] * 5 + [(16,)] * 9) == 64
    assert usual_length([(300,)] * 5 + [(64,)] * 9) == 300
    assert usual_length([(300,)] * 4 + [(64,)] * 4) == 300, "nothing else is known"


# what may be asked


@pytest.mark.parametrize(
    ("field", "least", "most", "default"),
    [
        ("seconds", 0.001, 600, 5.0),
        ("repeats", 2, 100, 5),
        ("max_batch_size", 1, None, None),
        ("max_output_tokens", 2, None, None),
        ("prompt_tokens", 1, None, None),
        ("seed", -5, None, 0),
    ],
)
def test_a_calibration_is_asked_for_within_bounds(
    field: str, least: float, most: float | None, default: float | None
) -> None:
    assert getattr(CalibrationRequest(), field) == default
    assert getattr(CalibrationRequest.model_validate({field: least}), field) == least
    outside = [] if field == "seed" else [0 if least < 1 else least - 1]
    if most is not None:
        assert getattr(CalibrationRequest.model_validate({field: most}), field) == most
        outside.append(most + 1)
    for value in (*outside, "5", math.inf, True):
        with pytest.raises(ValidationError):
            CalibrationRequest.model_validate({field: value})


def test_nothing_more_than_the_law_is_measured_unless_it_is_asked_for() -> None:
    plain = CalibrationRequest()
    assert (plain.speed_only, plain.resume_cost, plain.latency, plain.name) == (
        False,
        False,
        None,
        None,
    )
    with pytest.raises(ValidationError):
        CalibrationRequest.model_validate({"speed": True})


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"max_output_tokens": 1}, True),
        ({"max_output_tokens": 2**31 - 1}, True),
        ({"max_output_tokens": 2**31}, False),
        ({"max_output_tokens": 0}, False),
        ({"patience": 1e-9}, True),
        ({"patience": 0}, False),
        ({"patience": math.inf}, False),
        ({"policy": 1}, False),
        ({"policies": "single"}, False),
    ],
)
def test_a_change_of_the_limits_is_within_bounds(change: dict[str, Any], taken: bool) -> None:
    if taken:
        assert PolicyChange.model_validate(change).model_fields_set == change.keys()
        return
    with pytest.raises(ValidationError):
        PolicyChange.model_validate(change)


# when to probe


def test_probes_take_a_fifth_of_idle_time_and_then_a_fiftieth() -> None:
    assert ProbeLimits() == ProbeLimits(
        quiet=2.0, longest=0.25, share=0.2, upkeep=0.02, fewest=3, kept=8, retry=60.0
    )


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ({"share": 1.0, "upkeep": 1.0}, True),
        ({"share": 0.02}, True),
        ({"share": 0.019}, False),
        ({"share": 1.01}, False),
        ({"upkeep": 0.0}, False),
        ({"quiet": 0.0}, True),
        ({"quiet": -0.1}, False),
        ({"fewest": 2, "kept": 2}, True),
        ({"fewest": 1}, False),
        ({"fewest": 9}, False),
        ({"longest": 0.0}, False),
    ],
)
def test_limits_of_probes_are_shares_and_times(limits: dict[str, Any], taken: bool) -> None:
    if taken:
        assert dataclasses.asdict(ProbeLimits(**limits)).items() >= limits.items()
        return
    with pytest.raises(SpecError, match="expected 0 < upkeep <= share <= 1, longest > 0 and 2 <="):
        ProbeLimits(**limits)


def measured(cell: Cell, seconds: float) -> Measured:
    return Measured(cell.lengths, len(cell.lengths) * cell.prompt_tokens, seconds)


def probed(size: int, length: int, prompt: int, *seconds: float) -> ProbedCell:
    found = ProbedCell(Cell((length,) * size, prompt), 3)
    for each in seconds:
        found.add(measured(found.cell, each))
    return found


def test_a_larger_cell_takes_as_many_times_as_long_as_it_is_larger() -> None:
    small = probed(2, 4, 32, 9.0, 0.1, 0.3, 0.2)
    assert (small.count, small.service_time) == (4, 0.2), "the median of the last three"
    assert small.bound_on(probed(4, 12, 160)) == pytest.approx(0.2 * 2 * 3 * 5)
    assert small.bound_on(probed(2, 4, 32)) == 0.2
    for smaller in (probed(1, 12, 160), probed(4, 3, 160), probed(4, 12, 31)):
        assert small.bound_on(smaller) == math.inf
    assert probed(2, 4, 32).bound_on(probed(4, 12, 160)) == math.inf


def schedule(longest: float = 0.25, **limits: Any) -> ProbeSchedule:
    """One alone, and two of four tokens; a loop of answers of 8 and 24 tokens."""
    grid = [Cell((4, 4), 32), Cell((1,), 32), Cell((16,), 32)]
    loop = ClosedLoop(2, (8, 24), 32)
    return ProbeSchedule(grid, loop, ProbeLimits(longest=longest, **limits))


def cells_of(found: ProbeSchedule) -> list[tuple[int, int]]:
    return [
        (probe.batch_size, probe.length)
        for probe in found.admitted()
        if isinstance(probe, ProbedCell)
    ]


def next_of(found: ProbeSchedule, seconds: float) -> None:
    """The next probe takes so long for each of its members' tokens."""
    probe = found.next(np.random.default_rng(0))
    assert probe is not None
    if isinstance(probe, ProbedLoop):
        probe.add(seconds)
    else:
        probe.add(measured(probe.cell, seconds * probe.length))


def test_the_smallest_cell_admits_those_whose_bound_is_short_enough() -> None:
    """0.02 s for one token: eight times as long for two of four, and sixteen times for sixteen."""
    found = schedule()
    assert cells_of(found) == [(1, 1)]
    next_of(found, 0.02)
    assert cells_of(found) == [(2, 4), (1, 1)]
    assert schedule(longest=0.16).next(np.random.default_rng(0)) is not None
    at_bound, below = schedule(longest=0.16), schedule(longest=0.1599)
    for each in (at_bound, below):
        next_of(each, 0.02)
    assert (2, 4) in cells_of(at_bound)
    assert (2, 4) not in cells_of(below)
    slow = schedule()
    next_of(slow, 0.3)
    assert slow.next(np.random.default_rng(0)) is None
    slow.forget_smallest()
    assert cells_of(slow) == [(1, 1)]


@pytest.mark.parametrize(("longest", "admitted"), [(13 / 64, True), (0.203, False)])
def test_the_loop_is_run_where_its_requests_one_by_one_are_short_enough(
    longest: float, admitted: bool
) -> None:
    """One token takes 1/128 s and sixteen 3/32: 8 tokens at most 4/64, 24 at most 9/64."""
    found = schedule(longest=longest)
    for probe in found.admitted():
        assert isinstance(probe, ProbedCell)
        probe.add(measured(probe.cell, 1 / 128))
    for probe in found.admitted():
        if isinstance(probe, ProbedCell) and probe.length == 16:
            probe.add(measured(probe.cell, 3 / 32))
    assert any(isinstance(probe, ProbedLoop) for probe in found.admitted()) is admitted


def test_probes_take_turns_and_a_law_is_fitted_to_what_every_one_has() -> None:
    found = schedule(longest=10.0, fewest=2, kept=3)
    for _ in range(9):
        next_of(found, 0.01)
    probes = found.admitted()
    assert len(probes) == 4
    assert sorted(probe.count for probe in probes) == [2, 2, 2, 3]
    assert (found.rounds, found.full, found.is_due_for_fit) == (2, False, True)
    assert (len(found.measured()), found.slot_time()) == (
        sum(probe.count for probe in probes if isinstance(probe, ProbedCell)),
        pytest.approx(0.01),
    )
    assert found.rest(0.1) == pytest.approx(0.4), "a fifth"
    found.mark_fitted()
    assert not found.is_due_for_fit
    for _ in range(3):
        next_of(found, 0.01)
    assert (found.rounds, found.full, found.is_due_for_fit) == (3, True, True)
    assert found.rest(0.1) == pytest.approx(4.9), "a fiftieth"
    found.clear()
    assert (found.rounds, found.measured(), found.slot_time()) == (0, [], None)


def test_too_few_measurements_are_none() -> None:
    found = schedule(longest=10.0, fewest=3)
    for _ in range(8):
        next_of(found, 0.01)
    assert (found.measured(), found.slot_time(), found.is_due_for_fit) == ([], None, False)


# what was measured


def test_two_laws_are_compared_by_an_f_test_of_their_relative_residuals() -> None:
    """Beside the factor by least squares and the test by the residuals of both."""
    rng = np.random.default_rng(3)
    cells = [Cell((length,) * size, 32) for size in (1, 2, 8) for length in (1, 16, 64)] * 2
    times = [
        LAW.padded(len(cell.lengths), cell.lengths[0], 32 * len(cell.lengths))
        * float(np.exp(rng.normal(0, 0.05)))
        for cell in cells
    ]
    found = [measured(cell, seconds) for cell, seconds in zip(cells, times, strict=True)]
    old = dataclasses.replace(LAW, k3=LAW.k3 * 2, k1=LAW.k1 / 2)
    lawful, fitted = (
        np.array(
            [law.padded(len(each.lengths), each.lengths[0], each.prompt_tokens) for each in found]
        )
        for law in (old, LAW)
    )
    relative, shape = np.array(times) / fitted, lawful / fitted
    (factor,), (squares,), *_ = np.linalg.lstsq(shape[:, None], relative, rcond=None)
    own = float(np.sum((relative - 1) ** 2))
    ratio = ((squares - own) / 4) / (own / (len(found) - 5))
    result = compare(found, LAW, old)
    assert result.factor == pytest.approx(factor)
    assert result.gap == pytest.approx(np.abs(factor * shape - 1).max())
    assert result.chance == pytest.approx(f_law.sf(ratio, 4, len(found) - 5))


def test_a_turnaround_is_the_one_under_which_the_loop_holds_its_slots_as_long() -> None:
    loop = ClosedLoop(2, (8, 24, 16, 9), 32)
    for seconds in (0.0, 1.5e-3, 0.04):
        held = slot_time(dataclasses.replace(LAW, turnaround=seconds), loop)
        assert solve_turnaround(LAW, loop, held) == pytest.approx(seconds, abs=1e-8)


def test_a_slot_is_held_for_the_steps_of_its_request_and_the_turnaround() -> None:
    """One slot: each request alone, without the setup of a batch."""
    law = parse_law("k1=0.25e-3,k2=0,k3=50e-6,k4=0.9e-3")
    lengths = (8, 24, 16)
    alone = np.mean([law.padded(1, length, 32) for length in lengths])
    assert slot_time(law, ClosedLoop(1, lengths, 32)) == pytest.approx(float(alone))
