"""A timetable is Poisson, repeats with its seed, and changes with the rate by its scale alone."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from loadgen.timetable import Timetable, delivered_rate, draw, draw_prompts
from policies.text import SpecError
from queueing.distributions import parse_distribution

PROMPTS = parse_distribution("uniform:low=1,high=8")
OUTPUTS = parse_distribution("geometric:mean=20")


def _draw(rate: float = 10.0, n: int = 20_000, seed: int = 1) -> Timetable:
    return draw(rate, n, seed, PROMPTS, OUTPUTS)


@pytest.mark.parametrize("seed", range(4))
def test_gaps_are_exponential(seed: int) -> None:
    gaps = np.diff(_draw(seed=seed).intended_at, prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 0.1)).pvalue > 1e-3
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(gaps.size)


@pytest.mark.parametrize("window", [0.5, 2.0, 5.0])
def test_counts_are_dispersed_as_poisson_over_short_and_long_windows(window: float) -> None:
    """Pinned or rescaled schedules fall below 1 over long windows, repeated gaps rise far above it."""
    instants = _draw().intended_at
    counts = np.bincount((instants / window).astype(int))[:-1]
    statistic = counts.var(ddof=1) / counts.mean() * (counts.size - 1)
    assert 1e-3 < stats.chi2.cdf(statistic, counts.size - 1) < 1 - 1e-3


def test_the_end_is_not_pinned() -> None:
    """The last instant of N arrivals varies as a gamma variable: its coefficient of variation is 1 / sqrt(N)."""
    ends = np.array([_draw(n=100, seed=seed).intended_at[-1] for seed in range(300)])
    assert ends.std() / ends.mean() == pytest.approx(0.1, rel=0.2)


def test_no_instant_prefers_a_phase_of_the_second() -> None:
    assert stats.kstest(_draw().intended_at % 1.0, "uniform").pvalue > 1e-3


def test_the_same_seed_draws_the_same_timetable() -> None:
    one, two, other = _draw(seed=5), _draw(seed=5), _draw(seed=6)
    for name in ("intended_at", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))


def test_another_rate_only_rescales() -> None:
    slow, fast = _draw(rate=10.0), _draw(rate=40.0)
    assert np.allclose(slow.intended_at, 4 * fast.intended_at, rtol=1e-12)
    assert np.array_equal(slow.output_tokens, fast.output_tokens)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)


def test_other_lengths_leave_the_arrivals_alone_and_other_prompts_the_outputs() -> None:
    one = _draw()
    two = draw(10.0, 20_000, 1, parse_distribution("deterministic:value=5"), OUTPUTS)
    assert np.array_equal(one.intended_at, two.intended_at)
    assert np.array_equal(one.output_tokens, two.output_tokens)


def test_a_longer_run_begins_as_the_shorter_one() -> None:
    short, long = _draw(n=100), _draw(n=200)
    assert np.array_equal(short.intended_at, long.intended_at[:100])
    assert np.array_equal(short.output_tokens, long.output_tokens[:100])


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert not _draw(rate=np.inf, n=10).intended_at.any()
    assert delivered_rate(np.zeros(3)) == np.inf


@pytest.mark.parametrize(
    ("rate", "n", "seed", "message"),
    [
        (0.0, 5, 0, "request rate"),
        (-1.0, 5, 0, "request rate"),
        (np.nan, 5, 0, "request rate"),
        (1.0, 0, 0, "prompts"),
        (1.0, 5, -1, "seed"),
    ],
)
def test_arguments_out_of_range_are_named(rate: float, n: int, seed: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        draw(rate, n, seed, PROMPTS, OUTPUTS)


def test_a_timetable_must_be_in_order_and_of_one_length() -> None:
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(ValueError, match="go back"):
        Timetable(np.array([2.0, 1.0]), ones, ones)
    with pytest.raises(ValueError, match="one length"):
        Timetable(np.array([1.0]), ones, ones)


def test_prompts_have_the_drawn_lengths_and_stay_in_the_vocabulary() -> None:
    timetable = _draw(n=500)
    prompts = draw_prompts(timetable, 1, range(10, 50))
    assert [p.size for p in prompts] == timetable.prompt_tokens.tolist()
    ids = np.concatenate(prompts)
    assert ids.min() == 10
    assert ids.max() == 49
    assert np.array_equal(np.concatenate(draw_prompts(timetable, 1, range(10, 50))), ids)
