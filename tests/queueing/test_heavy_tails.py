"""Lengths without a limit whose tail no table holds: what is finite is right, what is infinite
is said to be, and the rest is refused.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtri, zeta
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.distributions.heavy_tail import Tail
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.mg1 import solve_service
from kendall.queueing.models.tandem import tandem_path
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Prediction, Quantiles
from kendall.queueing.simulation.experiment import draw_jobs, simulate_model
from kendall.queueing.simulation.fast import draw_trace

MINIMUM, STEP = 20, 0.01
LAW = f"a={STEP},c=0"
TABLE = 2**20
TIMES = ("queueing_delay", "served_queueing_delay", "sojourn_time", "time_to_first_token")


def pareto(alpha: float) -> str:
    return f"pareto:alpha={alpha},minimum={MINIMUM}"


def moments(alpha: float) -> tuple[float, float]:
    """E[N], E[N^2] of the rounded Pareto law: sums of P(N >= n).

    P(N >= n) = (20 / (n - 1/2))^alpha for n > 20.
    """
    first = MINIMUM + MINIMUM**alpha * zeta(alpha, MINIMUM + 0.5)
    return first, MINIMUM**2 + 2 * MINIMUM**alpha * zeta(
        alpha - 1, MINIMUM + 0.5
    ) if alpha > 2 else math.inf


def model(alpha: float, policy: str = "single", law: str = LAW, **limits: object) -> Queue:
    return Queue.read(policy, pareto(alpha), law, **limits)  # type: ignore[arg-type]


def drawn(alpha: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rounded Pareto lengths, by their own formula."""
    return np.floor(MINIMUM * rng.random(count) ** (-1 / alpha) + 0.5)


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0, 2.1, 2.5])
def test_moments_are_those_of_the_endless_law(alpha: float) -> None:
    law = parse_distribution(pareto(alpha), tail=True)
    mean, second = moments(alpha)
    assert law.longest == TABLE
    assert law.mean == pytest.approx(mean, rel=1e-7)
    assert law.moment(2) == pytest.approx(second, rel=1e-6)
    assert law.variance == pytest.approx(second - mean**2, rel=1e-6)


def test_the_longest_of_several_has_the_tail_of_one_times_their_number() -> None:
    """Against the sum of P(max >= n), in parts of a factor 2^(1/64)."""
    law = parse_distribution(pareto(1.5), tail=True).maximum(8)
    edges = np.arange(1, TABLE) + 0.5
    far = TABLE * 2 ** (np.arange(64 * 60) / 64)
    inside = 1 - (1 - np.minimum(1.0, (MINIMUM / edges) ** 1.5)) ** 8
    beyond = 8 * (MINIMUM / far) ** 1.5
    assert law.mean == pytest.approx(1 + inside.sum() + np.trapezoid(beyond, far), rel=1e-4)
    assert law.moment(2) == math.inf


def test_a_tail_that_is_no_power_is_followed() -> None:
    """lognormal(7, 1.8): 7e-5 of it lies beyond the table, and two fifths of its second moment."""
    text = "lognormal:mu=7,sigma=1.8"
    with pytest.raises(SpecError, match="exceeds 1,048,576"):
        parse_distribution(text)
    law = parse_distribution(text, tail=True)
    assert law.tail is not None
    for k in (1, 2):
        assert law.moment(k) == pytest.approx(math.exp(7 * k + (1.8 * k) ** 2 / 2), rel=2e-3)
    cut = float(law.pmf @ law.counts**2)
    assert cut < 0.75 * law.moment(2)
    for level in (1 - 1e-5, 1 - 1e-7):
        assert law.quantile(level) == pytest.approx(
            math.exp(7 + 1.8 * float(ndtri(level))), rel=0.01
        )


def test_a_mixture_has_the_heaviest_of_its_tails() -> None:
    text = "mixture:weights=0.7+0.3,parts=geometric:mean=300+pareto:alpha=1.5:minimum=20"
    law = parse_distribution(text, tail=True)
    assert law.tail is not None
    assert law.tail.index == 1.5
    assert law.mean == pytest.approx(0.7 * 300 + 0.3 * moments(1.5)[0], rel=1e-7)
    two = parse_distribution(
        "mixture:weights=0.5+0.5,parts=pareto:alpha=1.5:minimum=20+pareto:alpha=2.1:minimum=20",
        tail=True,
    )
    assert two.tail is not None
    assert (two.tail.index, two.mean) == (
        1.5,
        pytest.approx((moments(1.5)[0] + moments(2.1)[0]) / 2, rel=1e-7),
    )


def test_parts_of_a_tail_keep_its_moments() -> None:
    tail = Tail.of(lambda x: (MINIMUM / x) ** 2.5, TABLE - 0.5, 2.5)
    values, chances = tail.atoms()
    first, second = tail.left()
    assert (np.diff(np.sort(values)) > 0).all()
    assert chances.sum() == pytest.approx(tail.above[0], rel=1e-12)
    assert chances @ values + first == pytest.approx(tail.moment(1), rel=1e-12)
    assert chances @ values**2 + second == pytest.approx(tail.moment(2), rel=1e-9)
    assert tail.moment(2) == pytest.approx(
        tail.above[0] * tail.edges[0] ** 2 * 2.5 / 0.5, rel=1e-12
    )
    assert tail.quantile(np.array([1e-30])) == pytest.approx(MINIMUM * 1e12, rel=1e-9)


def test_samples_go_beyond_the_table_by_the_law() -> None:
    law = parse_distribution(pareto(1.05), tail=True)
    counts = law.sample(np.random.default_rng(3), 5_000_000)
    for edge in (1000, TABLE - 1, TABLE, 4 * TABLE):
        expected = counts.size * (MINIMUM / (edge + 0.5)) ** 1.05
        assert np.count_nonzero(counts > edge) == pytest.approx(
            expected, abs=4 * math.sqrt(expected)
        ), edge


def test_both_simulators_draw_the_same_lengths_beyond_the_table() -> None:
    queue = model(1.05)
    seeds = [np.random.SeedSequence(5) for _ in range(2)]
    fast = draw_trace(queue, 0.01, 150_000, seeds[0]).output_tokens
    jobs, _ = draw_jobs(queue, 0.01, 150_000, seeds[1])
    assert fast.max() > TABLE
    assert fast.tolist() == [job.output_tokens for job in jobs]


@pytest.mark.parametrize("alpha", [2.1, 2.5])
def test_the_mean_delay_of_single_requests_is_exact_without_a_limit(alpha: float) -> None:
    queue = model(
        alpha,
        law="k1=0,k2=0.3,k3=0,k4=0.01,cv=0.5,kp=0.001",
        prompt_tokens="uniform:low=1,high=100",
    )
    mean, second = moments(alpha)
    prompts = parse_distribution("uniform:low=1,high=100")
    before, scatter = 0.3 + 0.001 * prompts.mean, 1e-6 * prompts.variance
    service = before + STEP * mean
    square = 1.25 * (STEP**2 * second + 2 * STEP * mean * before + before**2 + scatter)
    answer = predict_model(queue, 0.6 / service)
    assert (answer.method, answer.fallback) == ("exact", None)
    assert answer.load == pytest.approx(0.6, rel=1e-6)
    assert answer.queueing_delay.mean == pytest.approx(0.6 / service * square / (2 * 0.4), rel=1e-5)
    assert answer.sojourn_time.mean == pytest.approx(answer.queueing_delay.mean + service, rel=1e-6)


def test_a_mean_delay_that_is_infinite_is_said_to_be_in_the_first_line() -> None:
    queue = model(1.5)
    rate = 0.5 / (STEP * moments(1.5)[0])
    answer = predict_model(queue, rate)
    assert answer.method == "exact"
    assert answer.load == pytest.approx(0.5, rel=1e-6)
    why = (
        "exact quantiles, but the mean delay is infinite: the lengths have no second moment "
        "(tail index 1.5, at most 2)"
    )
    assert answer.fallback == why
    assert [getattr(answer, name).mean for name in TIMES] == [None] * 4
    assert (
        0
        == answer.queueing_delay.p50
        < answer.queueing_delay.p90
        < answer.queueing_delay.p95
        < answer.queueing_delay.p99
        < math.inf
    )
    flags = [
        "--policy=single",
        f"--arrival-rate={rate}",
        f"--output-tokens={pareto(1.5)}",
        f"--latency={LAW}",
    ]
    printed = CliRunner().invoke(app, ["predict", *flags], catch_exceptions=False).stdout
    assert " ".join(printed.split("load")[0].split()) == f"single M/G/1, at most 1 together ({why})"


def seen(alpha: float, load: float, count: int, seeds: range) -> dict[str, tuple[float, float]]:
    """Quantiles of the delay behind one server on the lengths' own formula, and their standard
    errors.
    """
    rows = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(STEP * moments(alpha)[0] / load, count))
        rows.append(
            np.quantile(
                tandem_path(arrivals, STEP * drawn(alpha, count, rng)[None])[0][count // 10 :],
                list(LEVELS.values()),
            )
        )
    means, errors = np.mean(rows, axis=0), np.std(rows, axis=0, ddof=1) / math.sqrt(len(rows))
    return dict(zip(LEVELS, zip(means.tolist(), errors.tolist(), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "load"), [(2.5, 0.6), (2.5, 0.8), (2.1, 0.7), (1.8, 0.3)])
def test_quantiles_of_single_requests_are_those_of_a_simulation(alpha: float, load: float) -> None:
    queue = model(alpha)
    answer = predict_model(queue, load / (STEP * moments(alpha)[0]))
    for level, (value, error) in seen(alpha, load, 2_000_000, range(8)).items():
        assert error <= 0.05 * value
        assert getattr(answer.queueing_delay, level) == pytest.approx(
            value, abs=max(0.01 * value, 4 * error)
        ), level


@pytest.mark.parametrize(
    ("alpha", "load", "level"), [(2.5, 0.7, "p90"), (1.5, 0.4, "p90"), (1.5, 0.7, "p50")]
)
def test_a_quantile_of_single_requests_is_that_of_a_simulation(
    alpha: float, load: float, level: str
) -> None:
    answer = predict_model(model(alpha), load / (STEP * moments(alpha)[0]))
    value, error = seen(alpha, load, 400_000, range(4))[level]
    assert 0 < error <= 0.1 * value
    assert getattr(answer.queueing_delay, level) == pytest.approx(
        value, abs=max(0.01 * value, 4 * error)
    )


def test_far_reaching_lattices_give_what_one_lattice_does() -> None:
    """M/M/1 beside one service in ten thousand million that lasts 4,000 mean ones: in closed
    form but for that.
    """
    values = np.append(-np.log1p(-(np.arange(20_000) + 0.5) / 20_000), 4000.0)
    weights = np.append(np.full(20_000, (1 - 1e-10) / 20_000), 1e-10)
    found = solve_service(ServiceTime(values, weights), 0.7)
    for level, share in LEVELS.items():
        exact = max(0.0, math.log(0.7 / (1 - share)) / 0.3)
        assert getattr(found.delay, level) == pytest.approx(exact, rel=3e-3), level
        assert getattr(found.sojourn, level) == pytest.approx(
            -math.log(1 - share) / 0.3, rel=3e-3
        ), level


def test_a_law_with_hardly_any_tail_is_answered_as_without() -> None:
    """alpha = 3 has a table of its own; the same with the rest carried."""
    whole = Queue.read("single", pareto(3), LAW)
    assert not whole.requests.endless
    pmf = whole.requests.output_tokens.pmf
    tailed = TokenDistribution(pmf, Tail.of(lambda x: (MINIMUM / x) ** 3, len(pmf) - 1.5, 3.0))
    one, other = (
        predict_model(
            Queue.read("single", law, whole.engine.law),
            1.5,
        )
        for law in (whole.requests.output_tokens, tailed)
    )
    assert other.queueing_delay.mean == pytest.approx(one.queueing_delay.mean, rel=1e-3)
    for level in LEVELS:
        assert getattr(other.sojourn_time, level) == pytest.approx(
            getattr(one.sojourn_time, level), rel=2e-3
        ), level


def test_a_second_moment_beyond_the_table_gives_a_power_law_a_tail_however_little_mass() -> None:
    """2.3e-13 of pareto(2.1, 1) lies beyond the table, and a quarter of its second moment."""
    law = parse_distribution("pareto:alpha=2.1,minimum=1", tail=True)
    assert law.tail is not None
    assert float(law.pmf @ law.counts**2) < 0.85 * law.moment(2)


MANY = "k1=1e-3,k2=1e-2,k3=2e-5,k4=1e-2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "law", "limits"),
    [
        ("capped:max_batch_size=8", MANY, {}),
        ("elastic", MANY, {}),
        ("fixed:batch_size=4", MANY, {}),
        ("continuous:max_batch_size=8", MANY, {}),
        ("single", MANY, {"servers": 4}),
        ("single", MANY, {"arrival_scv": 2.0}),
        ("single", MANY + ",stall_share=0.1,stall=0.5", {}),
        ("single", MANY, {"disaggregated": True}),
        ("single", MANY + ",stall_share=0.1,stall=0.5", {"disaggregated": True}),
        ("capped:max_batch_size=8", MANY, {"patience": 5.0}),
    ],
)
@pytest.mark.parametrize("alpha", [1.5, 2.5])
def test_everything_else_is_simulated_and_leaves_out_the_means_that_do_not_settle(
    alpha: float, policy: str, law: str, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kendall.queueing.prediction.steady_state.SIMULATED_REQUESTS", 40_000)
    queue = model(alpha, policy, law, **limits)
    assert methods(queue) == ("simulation",)
    rate = 0.4 * queue.largest_stable_rate
    found = predict_model(queue, rate)
    assert found.fallback is not None
    assert found.fallback.startswith("simulation, not exact: no formula covers ")
    assert "lengths beyond 1,048,576 tokens" in found.fallback
    run = simulate_model(queue, rate, num_requests=2000)
    for answer in (found, run):
        assert_means(answer, settled=alpha > 2, patient="patience" not in limits)


def test_a_tail_of_index_two_has_no_second_moment() -> None:
    queue = model(2.0, "capped:max_batch_size=8", MANY)
    found = simulate_model(queue, 0.4 * queue.largest_stable_rate, num_requests=2000)
    assert_means(found, settled=False, patient=True)


def assert_means(answer: Prediction, *, settled: bool, patient: bool) -> None:
    given = (
        set(TIMES)
        if settled
        else set()
        if patient
        else {"queueing_delay", "served_queueing_delay", "time_to_first_token"}
    )
    for name in TIMES:
        times = getattr(answer, name)
        assert isinstance(times, Quantiles)
        assert (times.mean is not None, times.standard_error is not None) == (
            name in given,
            name in given,
        ), name
        assert times.p99 is not None
    note = (
        "simulated means settle slowly"
        if settled
        else "no means of durations"
        if patient
        else "no mean of the sojourn time"
    )
    assert sum(each.startswith(note) for each in answer.assumptions) == 1
    for station in answer.stations:
        assert (station.queueing_delay.mean is not None) == (settled or station.name == "prefill")


@pytest.mark.parametrize(
    ("policy", "lengths", "what"),
    [
        (
            "single",
            "pareto:alpha=0.8,minimum=20",
            r"whose mean is infinite \(alpha <= 1\).*set max_output_tokens",
        ),
        (
            "single",
            "pareto:alpha=1,minimum=20",
            r"whose mean is infinite \(alpha <= 1\).*set max_output_tokens",
        ),
        (
            "single",
            "mixture:weights=0.5+0.5,parts=geometric:mean=3+pareto:alpha=1:minimum=2",
            "whose mean is infinite",
        ),
        ("single", "lognormal:mu=12,sigma=3", "of which a share of 0.27 exceeds 1,048,576 tokens"),
        (
            "dynamic",
            "pareto:alpha=1.5,minimum=20",
            "without a bound for lengths without one.*bound the batch size, or set",
        ),
    ],
)
def test_a_tail_without_a_steady_state_is_refused_with_what_it_lacks(
    policy: str, lengths: str, what: str
) -> None:
    with pytest.raises(SpecError, match=what):
        Queue.read(policy, lengths, MANY).load(0.1)
    assert Queue.read(policy, lengths, MANY, max_output_tokens=1000).load(0.1) > 0


def test_a_limit_cuts_the_tail() -> None:
    law = parse_distribution(pareto(1.5), tail=True)
    assert law.clip(1000).tail is None
    assert law.clip(1000).pmf == pytest.approx(parse_distribution(pareto(1.5), 1000).pmf, abs=1e-14)
    assert law.clip(TABLE).tail is None
    with pytest.raises(SpecError, match="expected a limit up to there, or none"):
        law.clip(TABLE + 1)
    assert parse_distribution(pareto(1.5), 1000, tail=True).tail is None
