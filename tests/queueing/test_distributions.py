"""Token distributions against their textbook moments, and their text form."""

import math
import re
from fractions import Fraction
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import (
    TokenDistribution,
    format_distribution,
    parse_distribution,
)
from kendall.queueing.measurement.record import Header, Record, write_run

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
def test_the_longest_of_several_is_longer_and_composes(
    law: TokenDistribution, first: int, second: int
) -> None:
    assert law.maximum(first + second).mean >= law.maximum(first).mean - 1e-9
    assert law.maximum(first).maximum(second).mean == pytest.approx(
        law.maximum(first * second).mean, rel=1e-9
    )


@given(laws, st.integers(1, 20), st.integers(1, 50))
def test_clipping_and_taking_the_longest_commute(
    law: TokenDistribution, size: int, cap: int
) -> None:
    assert law.clip(cap).maximum(size).mean == pytest.approx(
        law.maximum(size).clip(cap).mean, rel=1e-9
    )


@given(laws, st.floats(0, 1))
def test_a_quantile_is_the_first_count_that_reaches_the_level(
    law: TokenDistribution, level: float
) -> None:
    count = law.quantile(level)
    assert law.cdf[count] >= level - 1e-12
    assert count == 1 or law.cdf[count - 1] < level + 1e-12


@given(laws)
def test_probabilities_sum_to_one_and_the_variance_matches_the_moments(
    law: TokenDistribution,
) -> None:
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
        (
            "weibull:shape=2,scale=200",
            200 * math.gamma(1.5),
            200 * math.sqrt(1 - math.gamma(1.5) ** 2),
        ),
        ("pareto:alpha=9,minimum=200", 225, 200 * math.sqrt(9 / 64 / 7)),
    ],
)
def test_moments_are_those_of_the_textbook_up_to_rounding(
    text: str, mean: float, deviation: float
) -> None:
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
    assert clipped.pmf == pytest.approx(
        parse_distribution("lognormal:mu=2.5,sigma=0.7").clip(64).pmf, abs=1e-14
    )


def test_samples_follow_the_law_and_the_seed() -> None:
    law = parse_distribution("geometric:mean=20")
    draws = law.sample(np.random.default_rng(3), 200_000)
    assert draws.min() >= 1
    assert abs(draws.mean() - law.mean) < 4 * math.sqrt(law.variance / 200_000)
    assert (draws == law.sample(np.random.default_rng(3), 200_000)).all()


def test_counts_come_from_a_file_of_numbers_or_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("1\n3\n3\n5\n")
    records = [
        Record(request_id=str(n), outcome="completed", output_tokens=n) for n in (1, 3, 3, 5)
    ]
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
        ("uniform:low=1", "without high; expected it"),
        ("uniform:low=3,high=3", "low < high"),
        ("geometric:mean=0.5", "mean >= 1"),
        ("exponential:mean=inf", "mean > 0"),
        ("pareto:alpha=1.1,minimum=20", "set max_output_tokens"),
        ("empirical:path=/nowhere", "No such file"),
        ("exponential:mean=x", "expected a number"),
        ("mixture:weights=0.5+0.5,parts=geometric:mean=3", "2 weights and 1 part in"),
        ("mixture:weights=0.5+0.4,parts=geometric:mean=3+geometric:mean=5", "sum 1"),
        ("mixture:weights=1,parts=mixture:weights=1", "mixture within"),
        ("mixture:weights=1,parts=geometric_:mean=3", "did you mean 'geometric'"),
        ("mixture:weights=1,parts=uniform:low=3:high=2", "low < high"),
        ("mixture:weights=1", "without parts; expected it"),
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


@given(laws)
def test_survival_is_the_other_side_of_the_distribution_function(law: TokenDistribution) -> None:
    assert law.survival + law.cdf == pytest.approx(np.ones(law.longest + 1), abs=1e-12)
    assert (np.diff(law.survival) <= 0).all()


def test_upper_tails_keep_their_digits_down_to_1e_12() -> None:
    law = parse_distribution("exponential:mean=200")
    counts = np.arange(2, law.longest)
    assert law.survival[law.longest - 1] < 1.01e-12
    assert law.survival[counts] == pytest.approx(np.exp(-(counts + 0.5) / 200), rel=1e-11, abs=0)
    assert law.pmf[counts] == pytest.approx(
        np.exp(-(counts - 0.5) / 200) * -math.expm1(-1 / 200), rel=1e-11, abs=0
    )


def test_lower_tails_keep_their_digits_too() -> None:
    law = parse_distribution("normal:mean=800,std=20")
    below, above = law.pmf[800 - 130 : 800][::-1], law.pmf[801 : 801 + 130]
    assert below[-1] < 2e-11
    assert below == pytest.approx(above, rel=1e-9, abs=0)


@pytest.mark.parametrize("level", [1 - 1e-4, 1 - 1e-8, 1 - 1e-11])
def test_a_quantile_far_out_is_that_of_the_law(level: float) -> None:
    law = parse_distribution("exponential:mean=200")
    assert law.quantile(level) == math.ceil(-200 * math.log(1 - level) - 0.5)


@pytest.mark.parametrize("batch_size", [2, 7, 64, 512])
def test_the_longest_of_a_batch_equals_exact_rational_arithmetic_at_both_ends(
    batch_size: int,
) -> None:
    shares = [Fraction(0), Fraction(1, 10**12), Fraction(1, 4), Fraction(3, 4) - Fraction(1, 10**8)]
    shares += [Fraction(1, 10**8) - Fraction(2, 10**12), Fraction(0), Fraction(1, 10**12)]
    below = [sum(shares[: n + 1]) ** batch_size for n in range(len(shares))]
    exact = [float(b - a) for a, b in zip([Fraction(0), *below], below, strict=False)]
    longest = TokenDistribution(np.array([float(share) for share in shares])).maximum(batch_size)
    assert longest.pmf.tolist() == pytest.approx(exact, rel=1e-10, abs=0)


@pytest.mark.parametrize("batch_size", [2, 64, 512])
def test_the_longest_of_a_batch_keeps_its_upper_tail_on_a_long_support(batch_size: int) -> None:
    law = parse_distribution("pareto:alpha=2.3,minimum=1", 100_000)
    above = (np.arange(1, 100_000) + 0.5) ** -2.3
    expected = -np.expm1(batch_size * np.log1p(-above))
    assert np.abs(law.maximum(batch_size).survival[1:100_000] / expected - 1).max() < 1e-9


@pytest.mark.slow  # of real time
def test_a_support_of_100_000_and_its_longest_of_512_take_less_than_a_fifth_of_a_second() -> None:
    def seconds() -> float:
        start = perf_counter()
        parse_distribution("lognormal:mu=7,sigma=0.9", 100_000).maximum(512)
        return perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.2


@given(st.lists(st.tuples(st.floats(0.1, 1), laws), min_size=1, max_size=4), st.integers(1, 30))
def test_a_mixture_has_the_mixed_moments_and_survival_and_clips_part_by_part(
    kinds: list[tuple[float, TokenDistribution]], cap: int
) -> None:
    total = sum(weight for weight, _ in kinds)
    weights, parts = [weight / total for weight, _ in kinds], [law for _, law in kinds]
    mixed = TokenDistribution.mixture(weights, parts)
    for k in (1, 2, 3):
        assert mixed.moment(k) == pytest.approx(
            sum(w * law.moment(k) for w, law in zip(weights, parts, strict=True)), rel=1e-12
        )
    clipped = TokenDistribution.mixture(weights, [law.clip(cap) for law in parts])
    assert clipped.pmf == pytest.approx(mixed.clip(cap).pmf, abs=1e-14)


MIXTURE = "mixture:weights=0.3+0.7,parts=lognormal:mu=5:sigma=0.4+geometric:mean=300"


def test_a_mixture_is_read_from_its_text() -> None:
    parts = [
        parse_distribution("lognormal:mu=5,sigma=0.4"),
        parse_distribution("geometric:mean=300"),
    ]
    law = parse_distribution(MIXTURE)
    assert law.mean == pytest.approx(0.3 * parts[0].mean + 0.7 * parts[1].mean, rel=1e-12)
    assert parse_distribution(MIXTURE, 256).pmf == pytest.approx(law.clip(256).pmf, abs=1e-14)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("uniform:high=1e3,low=0.50", "uniform:low=0.5,high=1000"),
        (
            "mixture:parts=geometric:mean=1e+2+uniform:high=9:low=2.0,weights=0.25+.75",
            "mixture:weights=0.25+0.75,parts=geometric:mean=100+uniform:low=2:high=9",
        ),
        (MIXTURE, MIXTURE),
        ("empirical:path=a/b-1.csv", "empirical:path=a/b-1.csv"),
        (
            "lognormal:mu=0.1,sigma=0.30000000000000004",
            "lognormal:mu=0.1,sigma=0.30000000000000004",
        ),
    ],
)
def test_the_canonical_text_orders_keys_and_shortens_numbers_and_reads_back(
    text: str, canonical: str
) -> None:
    assert format_distribution(text) == canonical
    assert format_distribution(canonical) == canonical


@pytest.mark.parametrize(
    "content",
    [
        "output_tokens\n1\n3\n3\n5\n",
        "id,output_tokens,clipped\na,1,no\nb,3,no\nc,3,yes\n\nd,5,no\n",
        "n_out\n1\n3\n3\n5\n",
        "1\r\n3\r\n3\r\n5.0",
        (
            '{"output_tokens": 1, "id": "a"}\n{"output_tokens": 3}\n{"output_tokens": '
            'null}\n{"output_tokens": 3}\n\n{"output_tokens": 5}\n'
        ),
    ],
)
def test_counts_come_from_csv_json_lines_and_plain_numbers(tmp_path: Path, content: str) -> None:
    (tmp_path / "counts").write_text(content)
    law = parse_distribution(f"empirical:path={tmp_path / 'counts'}")
    assert law.pmf.tolist() == [0, 0.25, 0, 0.5, 0, 0.25]
    mixed = parse_distribution(
        f"mixture:weights=0.5+0.5,parts=empirical:path={tmp_path / 'counts'}+deterministic:value=1"
    )
    assert mixed.pmf[1] == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "no counts; expected whole numbers >= 1: one per line"),
        ("a text\n", "no counts, only 'a text'; expected whole numbers >= 1: "),
        ("output_tokens\n", "no counts, only 'output_tokens'; "),
        ("0\n0\n", "only counts of 0; "),
        ("a\ntext\n", "line 2 has 'text'; "),
        ("1\n2.5\n", "line 2 has '2.5'; "),
        ("a,b\n1,2\n", "got 2 columns"),
        ("1\n\n-3\n", "line 3 has '-3'; expected whole numbers >= 1: "),
        ("1\nnan\n", "line 2 has 'nan'; "),
        ('{"tokens": 3}\n', "line 1 has no field output_tokens"),
        ('{"output_tokens": "x"}\n', "line 1 has 'x'; "),
        ('{"output_tokens": 3}\n{"output_tokens": [3]}\n', r"line 2 has \[3\]; "),
        ('{"output_tokens": null}\n', "no counts; "),
        ('{"output_tokens": 3}\n{nonsense\n', "line 2: .*; expected"),
        ("{nonsense\n", "JSON is malformed"),
        ("id,output_tokens\na,3\nb\n", "line 3 has no output_tokens"),
    ],
)
def test_a_file_that_holds_no_counts_is_refused_with_the_reason(
    tmp_path: Path, content: str, part: str
) -> None:
    (tmp_path / "counts").write_text(content)
    with pytest.raises(SpecError, match=f"^got path={re.escape(str(tmp_path / 'counts'))}: {part}"):
        parse_distribution(f"empirical:path={tmp_path / 'counts'}")


def test_a_file_of_long_counts_needs_a_limit(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("200000\n")
    with pytest.raises(SpecError, match="set max_output_tokens"):
        parse_distribution(f"empirical:path={tmp_path / 'counts'}")


def test_long_empirical_counts_are_accepted_with_a_limit(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("5\n1000000000\n")
    assert parse_distribution(f"empirical:path={tmp_path / 'counts'}", 64).pmf[
        [5, 64]
    ].tolist() == [0.5, 0.5]


def test_counts_that_are_not_whole_are_refused() -> None:
    for counts, wrong in (([1, 2.7], "2.7"), ([0, 1], "0"), ([1, float("nan")], "nan")):
        with pytest.raises(SpecError, match=f"got the count {wrong}; expected whole numbers >= 1"):
            TokenDistribution.from_counts(counts)
    with pytest.raises(SpecError, match="got no counts; expected at least one"):
        TokenDistribution.from_counts([])
