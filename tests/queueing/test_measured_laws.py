"""A law from measurements: what fits them, what they cannot tell, and which batches it can time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.durations import NO_STEPS, check_durations
from kendall.queueing.latency.energy import EnergyLaw, EnergyOfServers
from kendall.queueing.latency.fit import Measured, fit_law, reweighted
from kendall.queueing.latency.identifiability import (
    beyond,
    of_cells,
    trade_offs,
    vague_coefficients,
)
from kendall.queueing.latency.law import LatencyModel, parse_law, slow_law
from kendall.queueing.latency.profile import LEAST_R2, Profile, ProfileFile
from kendall.queueing.latency.speed import Speed, measured_speed, residual_cv

LAW = LatencyModel(k1=0.002, k2=0.03, kp=0.0004, k3=0.0005, k4=0.006)
GRID = [(size, length) for size in (1, 2, 4, 8) for length in (4, 16, 32)]


def batch(size: int, length: int, prompts: int = 10, factor: float = 1.0) -> Measured:
    """Members of which the first is the longest."""
    lengths = (length, *[1 + length // 2] * (size - 1))
    total, tokens = sum(lengths), size * prompts
    return Measured(lengths, tokens, factor * LAW.unpadded(size, total, length, tokens))


# fits


@pytest.mark.parametrize("padded", [True, False])
def test_batches_without_noise_give_their_law_back(padded: bool) -> None:
    cells = [
        Measured(each.lengths, each.prompt_tokens, time(each, padded=padded))
        for size, length in GRID
        for each in (batch(size, length), batch(size, length, 90))
    ]
    found = fit_law(cells, np.random.default_rng(1), padded=padded, bootstrap=2)
    for name in ("k1", "k2", "kp", "k3", "k4"):
        assert getattr(found.law, name) == pytest.approx(getattr(LAW, name))
        assert found.intervals[name] == pytest.approx((getattr(LAW, name),) * 2)
    assert (found.law.cv, found.mape, found.r2) == pytest.approx((0.0, 0.0, 1.0), abs=1e-9)


def time(each: Measured, *, padded: bool) -> float:
    size, longest = len(each.lengths), max(each.lengths)
    if padded:
        return LAW.padded(size, longest, each.prompt_tokens)
    return LAW.unpadded(size, sum(each.lengths), longest, each.prompt_tokens)


def test_with_one_prompt_length_its_cost_is_part_of_k1() -> None:
    found = fit_law([batch(*each) for each in GRID], np.random.default_rng(1), padded=False)
    assert (found.law.kp, found.intervals["kp"]) == (0.0, (0.0, 0.0))
    assert found.law.k1 == pytest.approx(LAW.k1 + 10 * LAW.kp)


def test_errors_are_of_the_means_of_cells_and_intervals_by_drawing_within_them() -> None:
    """Each cell twice, a tenth above and below: its mean is right, so nothing but the intervals and
    the residual knows of it.
    """
    cells = [batch(*each, factor=factor) for each in GRID for factor in (0.9, 1.1)]
    found = fit_law(cells, np.random.default_rng(1), padded=False, bootstrap=40)
    assert found.mape == pytest.approx(0.0, abs=1e-3)
    times = np.array([each.service_time for each in cells])
    assert found.law.cv == pytest.approx(0.1 * math.sqrt(24 / 23), rel=0.01)
    assert found.r2 == pytest.approx(
        1 - 0.01 * (times**2).sum() / 1.01 / ((times - times.mean()) ** 2).sum(), abs=1e-3
    )
    low, high = found.intervals["k4"]
    assert low < LAW.k4 < high
    assert high - low > 0.05 * LAW.k4


def test_relative_errors_count_alike() -> None:
    """Times of 1 and 100 s by one coefficient: the mean of the ratios, not that of the sums."""
    design = np.array([[1.0], [100.0]])
    found = reweighted(design, np.array([1.2, 100.0]), np.array([True]))
    assert found.tolist() == pytest.approx([1.1])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([(1, 4), (2, 8), (4, 16), (8, 32)], "sizes and lengths vary together"),
        ([(1, 4), (2, 4), (4, 4)], "sizes and lengths vary together"),
    ],
)
def test_batches_that_tell_nothing_are_refused(
    lengths: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_law([batch(*each) for each in lengths], np.random.default_rng(1))


def test_times_that_do_not_grow_with_the_lengths_are_refused() -> None:
    cells = [Measured((length,) * size, size, 0.1 * size) for size, length in GRID]
    with pytest.raises(SpecError, match="times do not grow with their lengths"):
        fit_law(cells, np.random.default_rng(1), bootstrap=0)


# speed


def test_the_speed_of_a_run_is_that_of_its_sums_and_its_residual_that_of_squares() -> None:
    measured, fitted = np.array([1.0, 2.0, 6.0]), np.array([1.0, 2.0, 3.0])
    found = measured_speed(measured, fitted)
    assert found is not None
    lawful = 1.5 * fitted
    cv = math.sqrt(((measured - lawful) ** 2).sum() / (lawful**2).sum() * 3 / 2)
    assert (found.factor, found.cv, found.n) == (1.5, pytest.approx(cv), 3)
    means = measured - lawful
    assert found.half_width == pytest.approx(interval(means) / lawful.mean())
    law = LatencyModel(k4=0.01, cv=0.4, speed=7.0)
    assert found.law(law) == LatencyModel(k4=0.01, cv=found.cv, speed=1.5)
    assert measured_speed(np.empty(0), np.empty(0)) is None
    assert residual_cv(np.array([2.0]), np.array([1.0])) == 0.0
    assert residual_cv(np.array([1.0, 3.0]), np.array([2.0, 2.0])) == pytest.approx(0.5 * 2**0.5)
    assert Speed(1.0, 0.0, 1).half_width == math.inf


def interval(values: np.ndarray) -> float:
    """Of as many batches as values (Student, two degrees), widened for their correlation."""
    centred = values - values.mean()
    correlation = (centred[:-1] * centred[1:]).sum() / (centred**2).sum()
    phi = min(max(correlation + 1 / 3, 0.0), 0.9)
    return float(4.302653 * values.std(ddof=1) / math.sqrt(3) * math.sqrt((1 + phi) / (1 - phi)))


# what cannot be told


def test_a_grid_has_no_doubts_and_says_how_far_it_reaches() -> None:
    found = of_cells([batch(*each) for each in GRID], {"k4": (0.005, 0.007)})
    assert (found.largest_batch, found.longest, found.doubts) == (8, 32, ())
    design = np.array([(size, 1, size * length, length) for size, length in GRID], dtype=float)
    assert found.condition == pytest.approx(np.linalg.cond(design / np.linalg.norm(design, axis=0)))
    unpadded = of_cells([batch(*each) for each in GRID], {}, padded=False)
    design[:, 2] = [sum(batch(*each).lengths) for each in GRID]
    assert unpadded.condition == pytest.approx(
        np.linalg.cond(design / np.linalg.norm(design, axis=0))
    )


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [(4, 8), (4, 16), (4, 32), (4, 64)],
            "only batches of 4 were measured: how the time grows",
        ),
        ([(1, 9), (2, 9), (4, 9), (8, 9)], "only lengths of 9 were measured: what a token costs"),
    ],
)
def test_one_size_or_one_length_tells_nothing_of_the_other(
    cells: list[tuple[int, int]], said: str
) -> None:
    found = of_cells([batch(*each) for each in cells], {})
    assert found.condition > 1e8
    assert [doubt.startswith(said) for doubt in found.doubts].count(True) == 1
    assert "trade against each other" in found.doubts[0]


def test_two_sizes_and_two_lengths_tell_both() -> None:
    found = of_cells([batch(*each) for each in itertools.product((1, 8), (4, 64))], {})
    assert not any(doubt.startswith("only") for doubt in found.doubts)


def test_fewer_cells_than_coefficients_have_no_condition() -> None:
    assert of_cells([batch(1, 4), batch(2, 8)], {}).condition == math.inf


@pytest.mark.parametrize(("condition", "told"), [(100.0, False), (100.1, True)])
def test_coefficients_trade_from_a_condition_of_a_hundred_on(condition: float, told: bool) -> None:
    """Those with more than three tenths of the weakest direction."""
    found = trade_offs(condition, np.array([0.31, -0.9, 0.3, 0.05]))
    expected = (
        f"k1 and k2 trade against each other (condition number {condition:.3g}): measure more"
    )
    assert [doubt.startswith(expected) for doubt in found] == [True] * told


@pytest.mark.parametrize(("half", "told"), [(0.00099, False), (0.00101, True)])
def test_an_interval_wider_than_half_of_its_coefficient_is_told(half: float, told: bool) -> None:
    design = np.array([[2.0, 1.0, 10.0, 5.0], [4.0, 1.0, 30.0, 7.0]])
    found = vague_coefficients(design, {"k1": (0.002 - half, 0.002 + half)})
    said = (
        f"k1 is known to +-{half:.2g} s only ({3000 * half:.3g} ms in a mean batch): its value is "
    )
    assert found == [f"{said}0.002 s"] * told


@pytest.mark.parametrize(("above", "told"), [(1, False), (2, True)])
def test_more_than_a_hundredth_beyond_the_calibration_is_told(above: int, told: bool) -> None:
    sizes = np.append(np.full(100 - above, 8.0), np.full(above, 9.0))
    lengths = np.full(100, 32.0)
    expected = (
        f"batch sizes up to 9 were never calibrated (largest: 8); {above}% of the batches rest on "
        "the law's form"
    )
    assert beyond(sizes, lengths, 8, 32, "batches") == (expected,) * told
    assert (
        beyond(lengths, sizes, 32, 8)
        == (expected.replace("batches", "requests").replace("batch sizes", "lengths"),) * told
    )
    assert beyond(np.empty(0), np.empty(0), 1, 1) == ()


# durations


LENGTHS = parse_distribution("uniform:low=5,high=20")
PROMPTS = parse_distribution("uniform:low=10,high=50")


def durations(law: str, bound: int | None = 4, *, batches: bool = True, **limits: object) -> None:
    given = {"output": LENGTHS, "prompts": None, **limits}
    check_durations(parse_law(law), bound=bound, batches=batches, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("law", "bound", "batches", "prompts", "message"),
    [
        # k2 + k1 b + (k3 b + k4) 5
        ("k1=0,k2=-0.05,k3=0,k4=0.0101", 4, True, None, None),
        ("k1=0,k2=-0.05,k3=0,k4=0.01", 4, True, None, "a batch of 1 with 5 output tokens each"),
        ("k1=-0.0124,k2=0,k3=0,k4=0.01", 4, True, None, None),
        (
            "k1=-0.0126,k2=0,k3=0,k4=0.01",
            4,
            True,
            None,
            "got k1=-0.0126 in the latency law, by which a batch of 4 with 5 output tokens each "
            "takes -0.0004 s; expected more than 0 s: raise k1, or bound the batch size lower",
        ),
        ("k1=-1e-9,k2=0,k3=0,k4=0.01", None, True, None, None),
        ("k1=-1e-6,k2=0,k3=0,k4=0.01", None, True, None, "a batch of 1000000 with 5 output"),
        # the prompts that cost least: the longest where they cost less than nothing
        ("k1=0,k2=0,k3=0,k4=0.01,kp=-0.0009", 1, True, PROMPTS, None),
        (
            "k1=0,k2=0,k3=0,k4=0.01,kp=-0.0011",
            1,
            True,
            PROMPTS,
            "got kp=-0.0011 in the latency law, by which a batch of 1 with 5 output tokens each "
            "takes -0.005 s; expected more than 0 s: raise kp",
        ),
        ("k1=0,k2=-0.06,k3=0,k4=0.01,kp=0.0011", 1, True, PROMPTS, None),
        ("k1=0,k2=-0.06,k3=0,k4=0.01,kp=0.0009", 1, True, PROMPTS, "raise k2"),
        # steps: k1 n + k3 n + k4
        ("k1=-0.0024,k2=-9,k3=0,k4=0.01", 4, False, None, None),
        ("k1=-0.0026,k2=0,k3=0,k4=0.01", 4, False, None, "a step that admits 4 takes -0.0004 s"),
        ("k1=0.1,k2=0,k3=0,k4=0", 4, False, None, NO_STEPS),
        ("k1=0.1,k2=0,k3=0,k4=0", 4, True, None, None),
        ("k1=0,k2=0,k3=0,k4=1e-13", 4, True, None, "between 5e-13 s and 1.25e-12 s; expected"),
        ("k1=0,k2=0,k3=0,k4=3e-13", 4, True, None, None),
        ("k1=0,k2=0,k3=0,k4=7e10", 4, True, None, None),
        ("k1=0,k2=0,k3=0,k4=9e10", 4, True, None, "expected seconds between 1e-12 and 1e+12"),
    ],
)
def test_every_batch_that_can_occur_takes_time(
    law: str, bound: int | None, batches: bool, prompts: object, message: str | None
) -> None:
    if message is None:
        durations(law, bound, batches=batches, prompts=prompts)
        return
    with pytest.raises(SpecError) as error:
        durations(law, bound, batches=batches, prompts=prompts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("law", "said"),
    [
        ("k1=9,k2=9,k3=0.4,k4=0.59", False),
        ("k1=0,k2=0,k3=0.4,k4=0.6", True),
        ("k1=0,k2=0,k3=0.4,k4=0.4,speed=2", True),
    ],
)
def test_a_token_of_a_second_is_likely_one_of_milliseconds(law: str, said: bool) -> None:
    found = slow_law(parse_law(law))
    assert (found is not None) == said
    assert found is None or found.startswith("the latency law takes 1")


# energy


@pytest.mark.parametrize(
    ("law", "size", "used", "joules"),
    [
        # 2 + 12 / 4 + 0.1 of 50 tokens + three servers' watts over 5 requests a second
        (EnergyLaw(2.0, 12.0, 0.1, 100.0, 20.0), 4.0, 0.75, 2 + 3 + 5 + 3 * (75 + 5) / 5),
        (EnergyLaw(2.0, 12.0, 0.1, 100.0, 20.0), 4.0, 0.0, 2 + 3 + 5 + 3 * 20 / 5),
        (EnergyLaw(2.0, 12.0), None, 0.5, None),
        (EnergyLaw(2.0, 12.0), 6.0, None, 4.0),
        (EnergyLaw(2.0), None, None, 2.0),
        (EnergyLaw(busy=10.0), 4.0, None, None),
        (EnergyLaw(idle=10.0), 4.0, 0.25, 3 * 7.5 / 5),
    ],
)
def test_the_joules_of_a_request(
    law: EnergyLaw, size: float | None, used: float | None, joules: float | None
) -> None:
    found = EnergyOfServers(law, output_tokens=50.0, servers=3).joules(5.0, size, used)
    assert found == (None if joules is None else pytest.approx(joules))


def test_a_batch_and_its_requests_use_the_same_energy() -> None:
    law = EnergyLaw(2.0, 12.0)
    assert law.batch(4.0) == 20.0
    assert law.efficiency(4.0) == 4.0 / 20.0
    assert law.efficiency(1.0) == 1 / 14.0
    with pytest.raises(SpecError, match=r"mean batch size of 0\.9; expected at least 1"):
        law.efficiency(0.9)


# profiles


@pytest.mark.parametrize(("r2", "poor"), [(None, False), (LEAST_R2, False), (0.899, True)])
def test_a_law_that_explains_less_than_nine_tenths_fits_poorly(
    r2: float | None, poor: bool
) -> None:
    found = Profile(name="one", law=LAW, r2=r2).poor_fit
    assert (found is not None) == poor
    assert found is None or found.startswith(
        "the law fits poorly: R2 0.90, where a quiet machine gives at least 0.9; stop other work"
    )


def test_a_profile_says_where_it_is_from_and_what_it_was_measured_on(tmp_path) -> None:
    profile = Profile(
        name="m",
        law=LAW,
        engine="vllm",
        model="m",
        machine={"device": "H200", "cpu": "EPYC", "cores": 16},
        date="2026-11-05T10:00:00",
        versions={"vllm": "0.32.0", "python": "3.12"},
    )
    path = tmp_path / "m.json"
    measured = "measured: vllm 0.32.0, m, H200, EPYC, 16 cores, 2026-11-05"
    assert ProfileFile(profile, path, "cache").describe() == [f"profile m, {path}", measured]
    assert ProfileFile(profile, path, "shipped").describe()[0] == (
        "profile m, shipped with Kendall; `kendall calibrate m` measures yours"
    )
    bare = Profile(name="n", law=LAW)
    assert ProfileFile(bare, path, "shipped").describe() == ["profile n, shipped with Kendall"]
    assert ProfileFile(bare, path, "file").to_dict() == {
        "name": "n",
        "source": "file",
        "path": str(path),
        "engine": None,
        "model": None,
        "machine": {},
        "date": None,
        "versions": {},
        "r2": None,
    }
