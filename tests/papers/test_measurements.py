"""Least squares, the documents' measurements and the laws fitted to them, energy, memory,
prompts.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.energy import EnergyLaw, fit_energy
from kendall.queueing.latency.fit import COEFFICIENTS, Measured, fit_law
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import SHIPPED, load_profile
from kendall.queueing.latency.regression import fit_line, least_squares
from papers.energy import efficiency_bound, smallest_mean_batch_size
from papers.measured_laws import (
    INOUE,
    YANG,
    document_profiles,
    inoue_energy,
    inoue_times,
    save_profiles,
    yang_times,
)
from papers.measurements import load_measurement, measurement_names
from papers.memory import (
    LLAMA2_7B,
    YANG_READINGS,
    Device,
    ModelMemory,
    largest_batch,
    needed_memory,
    sequence_bytes,
)

# --- least squares ---


def test_a_line_is_that_of_the_textbook() -> None:
    """Anscombe's first set (1973): y = 3.00 + 0.500 x, R2 0.667, standard errors 1.125 and
    0.118, t(9) = 2.262.
    """
    x = [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5]
    y = [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68]
    fit = fit_line(x, y)
    assert fit.slope == pytest.approx(0.500091, abs=1e-6)
    assert fit.intercept == pytest.approx(3.000091, abs=1e-6)
    assert fit.r2 == pytest.approx(0.666542, abs=1e-6)
    assert fit.intervals["slope"] == pytest.approx(
        (0.500091 - 2.262157 * 0.117906, 0.500091 + 2.262157 * 0.117906), abs=2e-6
    )
    assert fit.intervals["intercept"][1] == pytest.approx(3.000091 + 2.262157 * 1.124747, abs=5e-6)
    assert fit.residuals == pytest.approx(
        np.array(y) - np.array([fit(value) for value in x]), abs=1e-12
    )
    assert fit.residuals.sum() == pytest.approx(0, abs=1e-12)


def test_intervals_cover_the_truth_19_times_in_20() -> None:
    rng, x = np.random.default_rng(3), np.array([1.0, 2, 4, 8, 64, 128])
    covered = np.zeros(2)
    for _ in range(1000):
        fit = fit_line(x.tolist(), (0.5 * x + 3 + rng.normal(0, 2, 6)).tolist())
        covered += [
            fit.intervals["slope"][0] < 0.5 < fit.intervals["slope"][1],
            fit.intervals["intercept"][0] < 3 < fit.intervals["intercept"][1],
        ]
    assert np.abs(covered / 1000 - 0.95).max() < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_measurements_that_determine_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match="more than 2"):
        fit_line([1, 2], [3, 4])
    with pytest.raises(SpecError, match="apart"):
        fit_line([5, 5, 5], [3, 4, 5])
    with pytest.raises(SpecError, match="as many"):
        fit_line([1, 2, 3], [3, 4])
    with pytest.raises(SpecError, match="finite"):
        fit_line([1, 2, 3], [3, 4, math.nan])
    assert math.isnan(least_squares({"one": np.ones(3)}, [2, 2, 2]).r2)


# --- the documents' tables ---


@pytest.mark.parametrize(
    ("name", "alpha", "tau0", "r2", "printed"),
    [
        ("inoue-v100", 0.14382, 1.88736, 0.999751, (0.1438, 1.8874, 0.99975)),
        ("inoue-p4", 0.58330, 1.42839, 0.999859, (0.5833, 1.4284, 0.99986)),
    ],
)
def test_inoues_batch_times_are_reproduced_to_the_printed_digits(
    name: str, alpha: float, tau0: float, r2: float, printed: tuple[float, float, float]
) -> None:
    fit = inoue_times(name)
    assert (round(fit.slope * 1e3, 5), round(fit.intercept * 1e3, 5), round(fit.r2, 6)) == (
        alpha,
        tau0,
        r2,
    )
    assert (round(fit.slope * 1e3, 4), round(fit.intercept * 1e3, 4), round(fit.r2, 5)) == printed


@pytest.mark.parametrize(
    ("name", "beta", "c0", "r2", "printed"),
    [
        ("inoue-v100", 44.187, 155.03, 0.999784, 0.99978),
        ("inoue-p4", 36.629, 51.436, 0.999982, 0.99998),
    ],
)
def test_inoues_energies_are_reproduced(
    name: str, beta: float, c0: float, r2: float, printed: float
) -> None:
    fit = inoue_energy(name)
    assert fit.law.beta * 1e3 == pytest.approx(beta, abs=5e-4)
    assert fit.law.c0 * 1e3 == pytest.approx(c0, abs=5e-3)
    assert (round(fit.line.r2, 6), round(fit.line.r2, 5)) == (r2, printed)


def test_inoues_throughput_per_watt_column_agrees_with_the_other_two() -> None:
    """The printed third column, to its digits: a wrong digit in the data would show."""
    printed = {
        "inoue-v100": [4, 8.1, 12.4, 17.5, 21.4, 22],
        "inoue-p4": [12.9, 16.7, 19.9, 22.6, 26.6, 27],
    }
    for name, ratios in printed.items():
        table = load_measurement(name)
        for rate, watts, ratio in zip(
            table.column("images_per_second"), table.column("watts"), ratios, strict=True
        ):
            assert rate / watts == pytest.approx(ratio, abs=0.06)


@pytest.mark.parametrize(
    ("inputs", "a", "c", "points"), [(128, 0.02299, 0.186, 4), (None, 0.02309, 0.490, 7)]
)
def test_yangs_table_gives_the_stated_lines(
    inputs: float | None, a: float, c: float, points: int
) -> None:
    fit = yang_times(inputs)
    assert (round(fit.slope, 5), round(fit.intercept, 3), len(fit.residuals)) == (a, c, points)


def test_measurements_are_found_by_name() -> None:
    assert measurement_names() == sorted([*INOUE, YANG])
    with pytest.raises(SpecError, match="did you mean 'inoue-p4'"):
        load_measurement("inoue-p5")
    with pytest.raises(SpecError, match="did you mean 'watts'"):
        load_measurement("inoue-p4").column("wats")


# --- profiles ---


@pytest.mark.parametrize("name", [*INOUE, YANG])
def test_a_shipped_profile_is_what_the_measurements_give(name: str) -> None:
    shipped, computed = load_profile(str(SHIPPED / f"{name}.json")), document_profiles()[name]
    assert shipped.to_dict().keys() == computed.to_dict().keys()
    for key, value in computed.to_dict().items():
        other = shipped.to_dict()[key]
        if key in ("law", "r2", "mape"):
            assert other == pytest.approx(value, rel=1e-9)
        elif key == "intervals":
            assert {k: pytest.approx(v, rel=1e-9) for k, v in value.items()} == other
        else:
            assert other == value


def test_the_shipped_profiles_have_the_fields_that_the_command_writes(tmp_path: Path) -> None:
    save_profiles(tmp_path)
    for name in (*INOUE, YANG):
        shipped, written = (
            json.loads((folder / f"{name}.json").read_bytes()) for folder in (SHIPPED, tmp_path)
        )
        assert list(shipped) == list(written)
        assert list(shipped["law"]) == list(written["law"])


def test_the_profiles_laws_are_those_of_the_documents() -> None:
    for name in INOUE:
        fit, law = inoue_times(name), load_profile(name).law
        for size in (1, 8, 128):
            assert law.padded(size, 1) == pytest.approx(fit(size), rel=1e-9)
            assert law.unpadded(size, size, 1) == pytest.approx(fit(size), rel=1e-9)
    assert load_profile(YANG).law.padded(1, 512) == pytest.approx(yang_times()(512), rel=1e-9)
    assert "deterministic:value=1" in (load_profile("inoue-p4").note or "")


# --- energy ---


def mean_batch_size(arrival_rate: float, alpha: float, tau0: float) -> float:
    """E[B] of M/D[b]/1, everything that waits being taken, from the stationary law of its batch
    sizes.
    """
    states = 700
    sizes = np.arange(1, states + 1)
    rows = stats.poisson.pmf(
        np.arange(states + 1)[None, :], arrival_rate * (alpha * sizes + tau0)[:, None]
    )
    kernel = rows[:, 1:].copy()
    kernel[:, 0] += rows[:, 0]  # nobody came: the next batch is the next arrival alone
    kernel /= kernel.sum(axis=1, keepdims=True)
    system = np.vstack([kernel.T - np.eye(states), np.ones(states)])
    stationary = np.linalg.lstsq(system, np.append(np.zeros(states), 1.0), rcond=None)[0]
    return float(stationary @ sizes)


@pytest.mark.parametrize("name", INOUE)
def test_the_efficiency_bound_holds_and_is_near_at_both_ends(name: str) -> None:
    times, law = inoue_times(name), inoue_energy(name).law
    gaps = []
    for load in (0.02, 0.1, 0.3, 0.5, 0.7, 0.85):
        rate = load / times.slope
        size = mean_batch_size(rate, times.slope, times.intercept)
        exact, bound = (
            law.efficiency(size),
            efficiency_bound(law, rate, times.slope, times.intercept),
        )
        assert bound <= exact * (1 + 1e-9)
        gaps.append(exact / bound - 1)
    assert gaps[-1] < 0.002
    assert max(gaps) > 0.01  # a bound that were the value itself would not be this one


def test_the_smallest_mean_batch_is_exact_when_the_server_is_never_idle() -> None:
    times = inoue_times("inoue-v100")
    rate = 0.85 / times.slope
    assert mean_batch_size(rate, times.slope, times.intercept) == pytest.approx(
        smallest_mean_batch_size(rate, times.slope, times.intercept), rel=1e-4
    )


def test_energy_arguments_that_make_no_sense_are_refused() -> None:
    law = EnergyLaw(beta=0.04, c0=0.15)
    assert (law.batch(10), law.efficiency(10)) == pytest.approx((0.55, 10 / 0.55))
    with pytest.raises(UnstableQueueError):
        efficiency_bound(law, 10, 0.1, 1)
    with pytest.raises(SpecError, match="at least 1"):
        law.efficiency(0.5)
    with pytest.raises(SpecError, match="got beta=-1 in an energy law; expected joules >= 0"):
        EnergyLaw(beta=-1, c0=1)
    with pytest.raises(SpecError, match="of nothing"):
        EnergyLaw()
    with pytest.raises(SpecError, match="rates > 0"):
        fit_energy([1, 2, 3], [1, 1, 1], [1, 2, 0])


# --- memory ---


def test_cache_bytes_are_the_product_and_not_the_printed_gigabytes() -> None:
    printed = ModelMemory(layers=32, kv_heads=40, head_dim=128, weights=26e9)
    assert sequence_bytes(printed, 2048) == 2 * 32 * 40 * 128 * 2048 * 2 == 1_342_177_280
    assert sequence_bytes(
        ModelMemory(layers=40, kv_heads=40, head_dim=128, weights=26e9), 2048
    ) == pytest.approx(1.678e9, rel=1e-3)
    assert LLAMA2_7B.bytes_per_token == 524_288


@pytest.mark.parametrize("reading", YANG_READINGS)
def test_each_listed_reading_gives_yangs_49(reading: str) -> None:
    assert largest_batch(*YANG_READINGS[reading]) == 49


@pytest.mark.parametrize(
    ("memory", "utilisation", "batch"),
    [
        (40e9, 1, 39),
        (40 * 2**30, 1, 43),
        (40 * 2**30, 0.9, 37),
        (80e9, 1, 99),
        (80 * 2**30, 0.9, 95),
    ],
)
def test_the_plain_readings_do_not_give_49(memory: float, utilisation: float, batch: int) -> None:
    assert largest_batch(LLAMA2_7B, Device(memory=memory, utilisation=utilisation), 1280) == batch


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    device = Device(memory=24e9, utilisation=0.9, reserved=1e9)
    for tokens, block in ((100, 1), (100, 16), (1280, 16), (17, 256)):
        batch = largest_batch(LLAMA2_7B, device, tokens, block)
        free = 0.9 * 24e9 - 1e9
        assert (
            needed_memory(LLAMA2_7B, batch, tokens, block)
            <= free
            < needed_memory(LLAMA2_7B, batch + 1, tokens, block)
        )
    assert sequence_bytes(LLAMA2_7B, 17, 16) == 32 * LLAMA2_7B.bytes_per_token


def test_memory_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SpecError, match="for the weights"):
        largest_batch(LLAMA2_7B, Device(memory=8e9), 100)
    with pytest.raises(SpecError, match="utilisation"):
        Device(memory=8e9, utilisation=1.1)
    with pytest.raises(SpecError, match="at least 1"):
        sequence_bytes(LLAMA2_7B, 0)
    with pytest.raises(SpecError, match="one layer"):
        ModelMemory(layers=0, kv_heads=1, head_dim=1, weights=1)


# --- prompts ---


@pytest.mark.parametrize("batch_size", [1, 2, 8, 49])
def test_the_longest_uniform_prompt_has_the_law_and_mean_of_equation_17(batch_size: int) -> None:
    prompts = parse_distribution("uniform:low=0,high=4000")
    longest = prompts.maximum(batch_size)
    assert longest.mean == pytest.approx(4000 * batch_size / (batch_size + 1), rel=1e-4)
    for x in (500, 3000, 3900):
        assert longest.cdf[x] == pytest.approx(((x + 0.5) / 4000) ** batch_size, rel=1e-10)


def test_a_batch_with_padded_prompts_takes_the_mean_of_what_its_members_make_it_take() -> None:
    law = LatencyModel(k1=0.01, k2=0.03, k3=4e-4, k4=0.02, kp=2e-4)
    prompts, outputs = (
        parse_distribution("uniform:low=0,high=900"),
        parse_distribution("geometric:mean=50"),
    )
    rng, runs, size = np.random.default_rng(7), 20_000, 6
    longest_prompt = prompts.sample(rng, runs * size).reshape(runs, size).max(axis=1)
    longest = outputs.sample(rng, runs * size).reshape(runs, size).max(axis=1)
    seconds = 0.01 * size + 0.03 + 2e-4 * size * longest_prompt + (4e-4 * size + 0.02) * longest
    error = seconds.std() / math.sqrt(runs)
    assert error < 0.005 * seconds.mean()
    prompt_tokens = size * prompts.maximum(size).mean
    mean = law.padded(size, outputs.maximum(size).mean, prompt_tokens)
    assert abs(mean - seconds.mean()) < 4 * error


def test_a_fitted_law_lies_in_its_intervals_and_these_hold_the_true_one() -> None:
    """Eighteen designed cells, four times each, at a residual of 2 %; four repeats make
    intervals a little short.
    """
    truth = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=2e-5, k4=1.2e-3, kp=2e-6)
    cells = [
        (size, length, prompt)
        for size in (1, 4, 16)
        for length in (4, 16, 64)
        for prompt in (8, 64)
    ] * 4
    covered = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        measured = [
            Measured(
                (length,) * size,
                prompt * size,
                truth.padded(size, length, prompt * size) * rng.normal(1, 0.02),
            )
            for size, length, prompt in cells
        ]
        fit = fit_law(measured, rng, bootstrap=60)
        assert set(fit.intervals) == set(COEFFICIENTS)
        for name, (low, high) in fit.intervals.items():
            assert 0 <= low <= getattr(fit.law, name) <= high, (seed, name)
            covered += low <= getattr(truth, name) <= high
        assert 0.99 < fit.r2 <= 1
        assert 0 < fit.mape < 0.02
        assert 0.01 < fit.law.cv < 0.03
    assert covered >= 36
