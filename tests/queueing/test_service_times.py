"""Service times, what a memory holds and what calls share, by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.heavy_tail import Tail
from kendall.queueing.distributions.packing import Reservations, batch_sizes
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.batch_time import BatchTime, prompt_total
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import StallClock
from kendall.queueing.latency.service_laws import likely_sum, thinned
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.result import LEVELS

Floats = NDArray[np.float64]
OUTPUTS = TokenDistribution.mixture(
    [0.3, 0.7],
    [parse_distribution("deterministic:value=2"), parse_distribution("uniform:low=4,high=7")],
)
PROMPTS = TokenDistribution.from_counts([3, 3, 8])
LAW = LatencyModel(k1=0.1, k2=0.4, k3=0.05, k4=0.2, kp=0.03, speed=1.5)


def enumerated() -> tuple[Floats, Floats]:
    """Seconds of one request and their probabilities."""
    pairs = list(itertools.product(range(1, OUTPUTS.longest + 1), range(1, PROMPTS.longest + 1)))
    seconds = [1.5 * (0.5 + 0.03 * prompt + 0.25 * tokens) for tokens, prompt in pairs]
    return np.array(seconds), np.array([OUTPUTS.pmf[n] * PROMPTS.pmf[p] for n, p in pairs])


LEVEL = np.array([0.0, 0.5, 1.7, 2.5, 3.3, 4.0, 9.0])


def test_the_time_of_a_request_is_its_set_up_its_prompt_and_its_tokens() -> None:
    found, (seconds, chances) = ServiceTime.of(LAW, OUTPUTS, PROMPTS), enumerated()
    mean, second = chances @ seconds, chances @ seconds**2
    assert (found.mean, found.second_moment) == pytest.approx((mean, second))
    assert found.scv == pytest.approx(second / mean**2 - 1)
    assert found.longest == pytest.approx(seconds[chances > 0].max())
    assert found.transform(0.7) == pytest.approx(chances @ np.exp(-0.7 * seconds))
    over = np.maximum(seconds - LEVEL[:, None], 0.0)
    first, half = found.excess(LEVEL)
    assert first == pytest.approx(over @ chances)
    assert half == pytest.approx(over**2 @ chances / 2)
    cut = found.up_to(2.5)
    assert cut.mean == pytest.approx(chances @ np.minimum(seconds, 2.5))
    order = np.argsort(seconds)
    reached = np.cumsum(chances[order])
    for name, level in LEVELS.items():
        value = seconds[order][np.searchsorted(reached, level - 1e-9)]
        assert found.quantiles(LEVELS).value(name) == pytest.approx(value)
    assert not found.is_constant
    one = ServiceTime.of(LAW, parse_distribution("deterministic:value=4"))
    assert (one.is_constant, one.mean, one.scv) == (True, pytest.approx(2.25), pytest.approx(0.0))


@pytest.mark.parametrize("cv", [0.4, 1.0])
def test_a_residual_multiplies_every_moment_and_every_excess(cv: float) -> None:
    """Gamma, of mean 1; here by its quantiles at even levels."""
    law = LatencyModel(k2=0.5, k4=0.5, cv=cv)
    found = ServiceTime.of(law, TokenDistribution.from_counts([1, 1, 3]))
    levels = (np.arange(100_000) + 0.5) / 100_000
    drawn = stats.gamma(1 / cv**2, scale=cv**2).ppf(levels)

    def expected(of: Callable[[Floats], Floats]) -> float:
        return float((2 * of(drawn) + of(2 * drawn)).mean()) / 3

    assert found.second_moment == pytest.approx(expected(np.square), rel=2e-4)
    assert found.scv == pytest.approx(expected(np.square) / (4 / 3) ** 2 - 1, rel=4e-4)
    assert found.transform(0.8) == pytest.approx(expected(lambda s: np.exp(-0.8 * s)), rel=1e-5)
    first, half = found.excess(np.array([0.3, 1.6]))
    for place, level in enumerate((0.3, 1.6)):
        assert first[place] == pytest.approx(
            expected(lambda s, x=level: np.maximum(s - x, 0.0)), rel=1e-3
        )
        assert half[place] == pytest.approx(
            expected(lambda s, x=level: np.maximum(s - x, 0.0) ** 2 / 2), rel=1e-3
        )
    spread, mass = found.spread
    assert mass.sum() == pytest.approx(1)
    assert mass @ spread == pytest.approx(4 / 3)
    assert mass @ spread**2 == pytest.approx(found.second_moment, rel=1e-4)


@pytest.mark.parametrize("lengths", ["uniform:low=1,high=9000", "weibull:shape=0.4,scale=40"])
@pytest.mark.parametrize("cv", [0.0, 0.5])
def test_many_values_are_merged_with_their_mean_and_variance(lengths: str, cv: float) -> None:
    drawn = parse_distribution(lengths)
    law = LatencyModel(k2=0.001, k4=0.01, cv=cv, kp=0.001)
    found = ServiceTime.of(law, drawn, parse_distribution("uniform:low=1,high=500"))
    mean = 0.001 + 0.01 * drawn.mean + 0.001 * 250.5
    variance = (
        0.01**2 * drawn.variance + 0.001**2 * parse_distribution("uniform:low=1,high=500").variance
    )
    assert len(found.values) <= (1024 if cv else 8192)
    assert found.mean == pytest.approx(mean, rel=1e-4)
    assert found.second_moment == pytest.approx((1 + cv**2) * (variance + mean**2), rel=1e-3)


def test_without_a_term_in_the_batch_size_any_rate_can_be_served() -> None:
    law = LatencyModel(k2=1.0, k4=0.1)
    time = BatchTime(law, OUTPUTS, None, padded=True)
    assert time.largest_stable_rate(None) == math.inf
    assert time.largest_stable_rate(3) == pytest.approx(3 / time.mean(3))


@pytest.mark.parametrize(
    ("padded", "pads", "seconds"),
    [
        # k1 + kp times the mean or the longest prompt + k3 times the mean or longest length
        (True, False, 0.1 + 0.03 * 14 / 3 + 0.05 * 7),
        (True, True, 0.1 + 0.03 * 8 + 0.05 * 7),
        (False, False, 0.1 + 0.03 * 14 / 3 + 0.05 * OUTPUTS.mean),
    ],
)
def test_a_queue_without_a_bound_is_served_at_the_rate_of_large_batches(
    padded: bool, pads: bool, seconds: float
) -> None:
    time = BatchTime(LAW, OUTPUTS, PROMPTS, padded=padded, pad_prompts=pads)
    assert time.largest_stable_rate(None) == pytest.approx(1 / 1.5 / seconds)


def test_prompts_of_a_batch_by_enumeration() -> None:
    drawn = [(3, 2 / 3), (8, 1 / 3)]
    rows = list(itertools.product(drawn, repeat=3))
    chances = np.array([math.prod(chance for _, chance in row) for row in rows])
    for padded, total in ((False, sum), (True, lambda row: 3 * max(row))):
        tokens = np.array([total([count for count, _ in row]) for row in rows])
        mean = chances @ tokens
        found = prompt_total(PROMPTS, 3, padded=padded)
        assert found == pytest.approx((mean, chances @ (tokens - mean) ** 2))


# many lengths


@pytest.mark.parametrize("most", [50, 400])
def test_thinned_lengths_keep_their_mean_and_hardly_gain_variance(most: int) -> None:
    law = parse_distribution("lognormal:mu=5,sigma=0.8")
    few = thinned(law, most)
    assert np.count_nonzero(few.pmf) <= most
    assert few.mean == pytest.approx(law.mean, rel=1e-12)
    assert 0 <= few.variance / law.variance - 1 < 25 / most**2
    assert (few.shortest, few.longest) == (law.shortest, law.longest)
    exact = parse_distribution("uniform:low=1,high=50")
    assert thinned(exact, 50) is exact
    assert np.count_nonzero(thinned(exact, 49).pmf) <= 49


@pytest.mark.parametrize("count", [3, 400])
def test_a_likely_sum_is_bernsteins_bound_or_the_largest_one(count: int) -> None:
    lengths = parse_distribution("uniform:low=1,high=9")
    found = likely_sum(CallLengths(lengths), count)
    bound = count * 5 + math.sqrt(70 * count * lengths.variance) + 24 * 9
    assert found == pytest.approx(min(9 * count, bound))
    together = CallLengths(lengths, parse_distribution("deterministic:value=2"), 1.0)
    assert likely_sum(together, count) == pytest.approx(
        min(9 * count, count * 5 + math.sqrt(70 * together.total_variance(count)) + 24 * 18)
    )


# memory


@pytest.mark.parametrize("slots", [None, 6, 5, 20])
@pytest.mark.parametrize("memory", [60, 100])
def test_how_many_fit_is_that_of_sums_of_prompts_and_limits(memory: int, slots: int | None) -> None:
    prompts = parse_distribution("uniform:low=1,high=20")
    reserved = Reservations(memory, token_limit=5, prompt_tokens=prompts)
    assert (reserved.smallest, reserved.largest, reserved.most) == (6, 25, memory // 6)
    one = np.concatenate([np.zeros(5), prompts.pmf])
    law, at_least = np.ones(1), [1.0]
    for _ in range(min(slots or 99, memory // 6)):
        law = np.convolve(law, one)[: memory + 1]
        at_least.append(float(law.sum()))
    chances = -np.diff([*at_least, 0.0])
    found = reserved.chances(slots)
    assert found == pytest.approx(
        {n: chance for n, chance in enumerate(chances) if chance > 1e-10}, abs=1e-9
    )


def test_reservations_without_prompts_fill_the_memory() -> None:
    assert Reservations(999, 100).chances(None) == {9: 1.0}
    assert Reservations(1000, 100).chances(None) == {10: 1.0}
    assert Reservations(1000, 100).chances(4) == {4: 1.0}


@pytest.mark.parametrize(("tokens", "most"), [(12, None), (12, 2), (7, 4), (40, 3)])
def test_batches_are_cut_where_the_next_prompt_is_too_much(tokens: int, most: int | None) -> None:
    levels = (np.arange(2**15) + 0.5) / 2**15
    drawn = np.random.default_rng(0).permutation(np.where(levels < 2 / 3, 3, 8)).tolist()
    sizes, size, total = list[int](), 0, 0
    for prompt in drawn:
        if size and (size == most or total + prompt > tokens):
            sizes.append(size)
            size = total = 0
        size, total = size + 1, total + prompt
    sizes.append(size)
    found = batch_sizes(PROMPTS, tokens, most)
    assert found == pytest.approx({size: sizes.count(size) / len(sizes) for size in set(sizes)})


# calls


SIZES = TokenDistribution.from_counts([1, 2, 2, 5])


@pytest.mark.parametrize("correlation", [0.3, 1.0])
def test_batches_of_many_calls_count_the_draws_of_an_endless_line(correlation: float) -> None:
    """E X = 2.5, E X^2 = 8.5: 2.4 others of a member's own call."""
    calls = CallLengths(OUTPUTS, SIZES, correlation)
    pairs = correlation * 600 * (8.5 / 2.5 - 1)
    assert calls.equal_pairs(600) == pytest.approx(pairs)
    assert calls.equal_pairs(512) == pytest.approx(512 / 600 * pairs, rel=0.02)
    assert calls.total_variance(600) == pytest.approx((600 + pairs) * OUTPUTS.variance)
    draws = round(600 * (correlation / 2.5 + 1 - correlation))
    assert calls.longest(600).pmf == pytest.approx(OUTPUTS.maximum(draws).pmf)
    assert CallLengths(OUTPUTS, SIZES, 0.0).equal_pairs(600) == 0.0
    assert CallLengths(OUTPUTS, None, 0.5).independent


# rare branches


def test_a_tail_whose_moments_do_not_end_lacks_nothing() -> None:
    tail = Tail.of(lambda x: np.exp(-x / 1000), 1000.0)
    assert tail.left() == (0.0, 0.0)
    assert tail.moment(1) == pytest.approx(2000 * math.exp(-1), rel=2e-3)


def test_a_geometric_law_of_mean_one_is_always_one() -> None:
    assert parse_distribution("geometric:mean=1").pmf.tolist() == [0.0, 1.0]


def test_a_law_without_stalls_has_none_in_any_time() -> None:
    clock = StallClock(LAW, np.random.default_rng(1))
    assert clock.within(1e9) == 0
    clock.pass_by(5.0)
    assert clock.within(1e9) == 0
