"""Token distributions against their textbook moments, and their text form."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.text import SpecError
from queueing.distributions import TokenDistribution, parse_distribution
from queueing.record import Header, Record, write_run

laws = (
    st.lists(st.floats(0, 1), min_size=1, max_size=40)
    .filter(lambda weights: sum(weights) > 1e-3)
    .map(lambda weights: TokenDistribution(np.append(0.0, np.array(weights) / sum(weights))))
)


@given(laws, st.integers(1, 50))
def test_a_clip_is_the_law_of_the_minimum(law: TokenDistribution, cap: int) -> None:
    expected = float(law.pmf @ np.minimum(law.counts, cap))
    assert law.clip(cap).mean == pytest.approx(expected, rel=1e-12)
    assert law.clip(cap).longest <= cap
    assert law.clip(cap).clip(cap).mean == law.clip(cap).mean


@given(laws, st.integers(1, 30), st.integers(1, 30))
def test_the_longest_of_several_is_longer_and_composes(law: TokenDistribution, first: int, second: int) -> None:
    assert law.maximum(first + second).mean >= law.maximum(first).mean - 1e-9
    assert law.maximum(first).maximum(second).mean == pytest.approx(law.maximum(first * second).mean, rel=1e-9)


@given(laws, st.integers(1, 20), st.integers(1, 50))
def test_clipping_and_taking_the_longest_commute(law: TokenDistribution, size: int, cap: int) -> None:
    assert law.clip(cap).maximum(size).mean == pytest.approx(law.maximum(size).clip(cap).mean, rel=1e-9)


@given(laws, st.floats(0, 1))
def test_a_quantile_is_the_first_count_that_reaches_the_level(law: TokenDistribution, level: float) -> None:
    count = law.quantile(level)
    assert law.cdf[count] >= level - 1e-12
    assert count == 1 or law.cdf[count - 1] < level


@given(laws)
def test_probabilities_sum_to_one_and_the_variance_matches_the_moments(law: TokenDistribution) -> None:
    assert law.pmf.sum() == pytest.approx(1, abs=1e-12)
    assert law.variance == pytest.approx(law.moment(2) - law.mean**2, abs=1e-8)
    assert law.scv == pytest.approx(law.variance / law.mean**2)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("deterministic:value=128", 128, 0),
        ("uniform:low=0,high=1000", 500, 1000 / math.sqrt(12)),
        ("normal:mean=800,std=20", 800, 20),
        ("lognormal:mu=5,sigma=0.4", math.exp(5.08), math.exp(5.08) * math.sqrt(math.expm1(0.16))),
        ("exponential:mean=200", 200, 200),
        ("geometric:mean=200", 200, math.sqrt(200 * 199)),
        ("weibull:shape=2,scale=200", 200 * math.gamma(1.5), 200 * math.sqrt(1 - math.gamma(1.5) ** 2)),
        ("pareto:alpha=9,minimum=200", 225, 200 * math.sqrt(9 / 64 / 7)),
    ],
)
def test_moments_are_those_of_the_textbook_up_to_rounding(text: str, mean: float, deviation: float) -> None:
    law = parse_distribution(text)
    assert law.mean == pytest.approx(mean, rel=1e-4)
    assert math.sqrt(law.variance) == pytest.approx(deviation, rel=2e-3, abs=1e-9)


def test_rounding_gives_the_ends_of_a_uniform_law_half_a_share() -> None:
    law = parse_distribution("uniform:low=1,high=32")
    assert law.pmf[1] == pytest.approx(0.5 / 31)
    assert law.pmf[2] == pytest.approx(1 / 31)
    assert law.mean == pytest.approx(16.5)


def test_a_parsed_clip_equals_a_clip_after_parsing() -> None:
    clipped = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
    assert clipped.pmf == pytest.approx(parse_distribution("lognormal:mu=2.5,sigma=0.7").clip(64).pmf, abs=1e-14)


def test_samples_follow_the_law_and_the_seed() -> None:
    law = parse_distribution("geometric:mean=20")
    draws = law.sample(np.random.default_rng(3), 200_000)
    assert draws.min() >= 1
    assert abs(draws.mean() - law.mean) < 4 * math.sqrt(law.variance / 200_000)
    assert (draws == law.sample(np.random.default_rng(3), 200_000)).all()


def test_counts_come_from_a_file_of_numbers_or_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("1\n3\n3\n5\n")
    records = [Record(request_id=str(n), outcome="completed", output_tokens=n) for n in (1, 3, 3, 5)]
    records.append(Record(request_id="lost", outcome="abandoned", output_tokens=0))
    write_run(tmp_path / "run", Header(writer="load"), records)
    for name in ("counts", "run"):
        law = parse_distribution(f"empirical:path={tmp_path / name}")
        assert law.pmf.tolist() == [0, 0.25, 0, 0.5, 0, 0.25]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("unifrom:low=1,high=2", "did you mean 'uniform'"),
        ("uniform:low=1,hihg=2", "did you mean 'high'"),
        ("uniform:low=1", "needs high"),
        ("uniform:low=3,high=3", "low < high"),
        ("geometric:mean=0.5", "mean >= 1"),
        ("exponential:mean=inf", "mean > 0"),
        ("pareto:alpha=1.1,minimum=20", "--max-output-tokens"),
        ("empirical:path=/nowhere", "No such file"),
        ("exponential:mean=x", "expected a number"),
    ],
)
def test_a_wrong_text_says_what_was_expected(text: str, part: str) -> None:
    with pytest.raises(SpecError, match=part):
        parse_distribution(text)


def test_a_heavy_tail_is_accepted_with_a_limit() -> None:
    assert parse_distribution("pareto:alpha=1.1,minimum=20", 64).longest == 64


@pytest.mark.parametrize("pmf", [[1.0], [0.5, 0.5], [0.0, 0.4], [0.0, -0.1, 1.1], [0.0, math.nan]])
def test_a_vector_that_is_no_law_of_counts_is_refused(pmf: list[float]) -> None:
    with pytest.raises(SpecError):
        TokenDistribution(np.array(pmf))
