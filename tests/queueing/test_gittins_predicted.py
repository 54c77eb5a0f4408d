"""Ranks by a request's own predicted law, given the tokens made: the Gittins index against every
stopping point, the mean residual length; mean delays by the analysis, by the simulator and by a
simulation that shares no code with either.
"""

import heapq
import itertools
import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.ordered import order_of
from kendall.policies.orders.preemptive import PredictedGittins
from kendall.queueing.choosing.orders import OrderSearch
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.gittins import mean_residual, ranks_by_class
from kendall.queueing.models.soap.token_orders import (
    TokenService,
    predicted_tokens,
    predictor_in_tokens,
    solve_in_tokens,
)
from kendall.queueing.predictors.classes import CLASSES, classes_of
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run

TOKENS, STEP = LatencyModel(k4=0.005), 0.005
LOGNORMAL, MOST = "lognormal:mu=4.8,sigma=1", 4000
NOISE = "lognormal:sigma=1"
ORDER = "gittins-predicted"


def queue_of(order: str, predictor: str, lengths: str = LOGNORMAL) -> Queue:
    return Queue.read(
        f"single:order={order}", lengths, TOKENS, max_output_tokens=MOST, predictor=predictor
    )


def mean_sojourn(
    order: str, predictor: str = NOISE, lengths: str = LOGNORMAL, load: float = 0.8
) -> float:
    """By the analysis, a resume free; in mean service times."""
    queue = queue_of(order, predictor, lengths)
    sizes = TokenService.alone(TOKENS, queue.requests.output_tokens).sizes
    service = TokenService(0.0, STEP, sizes, limit=queue.requests.token_limit)
    solved = solve_in_tokens(
        order_of(queue.policy), service, load / sizes.mean, 1, queue.requests.predictor
    )
    return solved.sojourn / sizes.mean


@pytest.mark.parametrize(
    "predictor",
    [NOISE, "exact", "exponential", "uniform:low=0.5,high=2", "onebit:threshold=5,accuracy=0.8"],
)
def test_a_rank_is_the_least_service_per_completion_given_the_prediction(predictor: str) -> None:
    rng = np.random.default_rng(1)
    lengths = TokenDistribution(np.append(0.0, rng.dirichlet(np.ones(12))))
    told = predictor_in_tokens(parse_predictor(predictor), 40)
    classes, joint = classes_of(told, lengths, 40)
    assert joint.sum(axis=0) == pytest.approx(lengths.pmf)
    starts, ranks = ranks_by_class(lengths, joint)
    rows = np.reshape(ranks, (len(classes) + 1, len(starts)))
    for row, chances in zip(rows, joint, strict=True):

        def best(age: int, chances: np.ndarray = chances) -> float:
            found = []
            for stop in range(age + 1, len(chances)):
                ended = chances[age + 1 : stop + 1].sum()
                work = sum(chances[n] * (min(n, stop) - age) for n in range(age + 1, len(chances)))
                found.append(work / ended if ended > 0 else math.inf)
            return min(found)

        for age in range(len(chances) - 1):
            if chances[age + 1 :].sum() > 0:
                own = row[np.searchsorted(starts, age, side="right") - 1]
                assert own == pytest.approx(best(age), rel=1e-8)


def test_predictions_are_cut_into_few_classes_of_like_shares() -> None:
    lengths = parse_distribution(LOGNORMAL, MOST)
    told = predictor_in_tokens(parse_predictor(NOISE), MOST)
    classes, joint = classes_of(told, lengths, MOST)
    assert len(joint) == len(classes) + 1 <= CLASSES
    assert list(classes) == sorted(set(classes))
    means = joint @ lengths.counts / joint.sum(axis=1)
    assert all(first < second for first, second in itertools.pairwise(means))
    drawn = lengths.sample(np.random.default_rng(2), 200_000)
    predicted = predicted_tokens(parse_predictor(NOISE), np.random.default_rng(3), drawn, MOST)
    counts = np.bincount(np.searchsorted(classes, predicted), minlength=len(joint))
    assert counts / len(drawn) == pytest.approx(joint.sum(axis=1), abs=0.004)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lengths", [LOGNORMAL, "weibull:shape=0.5,scale=100"])
@pytest.mark.parametrize("predictor", [NOISE, "onebit:threshold=200,accuracy=0.9"])
def test_no_order_has_a_shorter_mean_sojourn_time(predictor: str, lengths: str) -> None:
    """An M/G/1 at load 0.8: of all orders that know the prediction, the age and the laws."""
    own = mean_sojourn(ORDER, predictor, lengths)
    for other in ("gittins", "sprpt", "srpt-b", "spjf", "pspjf", "trail", "fcfs"):
        assert own < mean_sojourn(other, predictor, lengths)


def test_exact_predictions_make_it_srpt_and_none_make_it_gittins() -> None:
    """Within what the classes and the ages leave."""
    assert 1 <= mean_sojourn(ORDER, "exact") / mean_sojourn("sprpt", "exact") < 1.015
    assert mean_sojourn(ORDER, "none") == mean_sojourn("gittins", "none")
    even = "geometric:mean=50"
    assert mean_sojourn(ORDER, "none", even) == mean_sojourn("fcfs", "none", even)


def means_simulated(queue: Queue, rate: float, runs: int = 12) -> np.ndarray:
    return np.array(
        [
            float(simulate_run(queue, rate, 60_000, stream).sojourn_time[6000:].mean())
            for stream in np.random.SeedSequence(5).spawn(runs)
        ]
    )


def test_the_analysis_is_the_simulation_where_going_on_costs_nothing() -> None:
    queue = queue_of(ORDER, NOISE)
    rate = 0.8 * queue.largest_stable_rate
    means = means_simulated(queue, rate)
    error = means.std(ddof=1) / math.sqrt(len(means))
    mean_service = STEP * queue.requests.output_tokens.mean
    exact = mean_sojourn(ORDER) * mean_service
    assert error < 0.02 * exact
    # a token in the making is lost with every interruption by an arrival: half of one, 2.5 ms
    assert abs(means.mean() - exact) < 4 * error + 0.005 * exact


def test_the_simulated_means_are_below_those_of_sprpt_and_of_gittins_without_predictions() -> None:
    """The same requests under each."""
    queue = queue_of(ORDER, NOISE)
    rate = 0.8 * queue.largest_stable_rate
    own = means_simulated(queue, rate, 8)
    for other in ("sprpt", "gittins"):
        saved = means_simulated(queue.but(policy=parse_policy(f"single:order={other}")), rate, 8)
        saved -= own
        assert saved.mean() > 4 * saved.std(ddof=1) / math.sqrt(len(saved))


def simulated_apart(
    arrivals: np.ndarray, lengths: np.ndarray, predicted: np.ndarray, sigma: float, noise: float
) -> float:
    """Mean sojourn time of one server that takes, at every arrival, at every end and after every
    0.1 of service, the request with the least index. ln N is normal, N(0, sigma^2), and so is ln Y
    given N: N given Y is Y^weight times a lognormal.
    """
    weight = sigma**2 / (sigma**2 + noise**2)
    ages = np.append(0.0, np.exp(np.linspace(-4.0, 4.0, 400)))
    table, scales = _indices(ages, sigma * math.sqrt(1 - weight)), predicted**weight
    served, ended = np.zeros((2, len(arrivals)))
    present: list[tuple[float, int]] = []
    now, came = 0.0, 0
    while came < len(arrivals) or present:
        now = now if present else max(now, float(arrivals[came]))
        while came < len(arrivals) and arrivals[came] <= now:
            heapq.heappush(present, (scales[came] * table[0], came))
            came += 1
        _, job = heapq.heappop(present)
        until = arrivals[came] - now if came < len(arrivals) else math.inf
        stint = min(lengths[job] - served[job], 0.1, until)
        now, left = now + stint, lengths[job] - served[job] - stint
        served[job] += stint
        if left > 0:
            own = scales[job] * float(np.interp(served[job] / scales[job], ages, table))
            heapq.heappush(present, (own, job))
        else:
            ended[job] = now
    return float((ended - arrivals)[len(arrivals) // 10 :].mean())


def _indices(ages: np.ndarray, spread: float) -> np.ndarray:
    """Of a lognormal law of median 1 at these ages."""
    fine = np.exp(np.linspace(-6 * spread, 6 * spread, 4001))
    ended = np.array([0.5 * math.erfc(-math.log(x) / spread / math.sqrt(2)) for x in fine])
    served = np.cumsum(np.diff(fine, prepend=0.0) * (1 - np.append(0.0, ended[:-1])))
    found = []
    for age in ages:
        at = min(int(np.searchsorted(fine, age)), len(fine) - 2)
        begun, before = (served[at - 1], ended[at - 1]) if at else (0.0, 0.0)
        completions = np.maximum(ended[at + 1 :] - before, 1e-300)
        found.append(float(((served[at + 1 :] - begun) / completions).min()))
    return np.minimum(found, 1e6)


@pytest.mark.left_out
def test_a_simulation_of_its_own_has_the_same_mean() -> None:
    """Lengths without tokens, classes and ages: what these leave is within the errors."""
    sigma, noise, runs = 1.0, 1.0, 10
    queue = queue_of(ORDER, NOISE)
    mean = queue.requests.output_tokens.mean
    rng, own, apart = np.random.default_rng(9), [], []
    for stream in np.random.SeedSequence(8).spawn(runs):
        run = simulate_run(queue, 0.8 * queue.largest_stable_rate, 6000, stream)
        own.append(run.sojourn_time[600:].mean() / (STEP * mean))
        arrivals = run.arrived_at / (STEP * mean)
        lengths = run.output_tokens / mean
        told = lengths * np.exp(noise * rng.standard_normal(len(lengths)))
        scale = math.exp(4.8) / mean
        apart.append(
            scale * simulated_apart(arrivals / scale, lengths / scale, told / scale, sigma, noise)
        )
    differences = np.array(own) - np.array(apart)
    error = differences.std(ddof=1) / math.sqrt(runs)
    assert error < 0.04 * np.mean(apart)
    assert abs(differences.mean()) < 4 * error


def test_a_queue_ranks_by_its_own_lengths_and_predictor() -> None:
    queue = queue_of(ORDER, NOISE)
    assert isinstance(order_of(queue.policy), PredictedGittins)
    assert queue.text == f"single:order={ORDER}"
    forms = [
        order_of(each.policy).form
        for each in (
            queue,
            queue.clipped_at(100),
            queue.but(predictor=parse_predictor("exact")),
            queue.but(prompt_tokens=parse_distribution("deterministic:value=20"),
                      law=LatencyModel(k4=STEP, kp=0.001)),
        )
    ]  # fmt: skip
    assert len({form.ranks for form in forms}) == 4
    assert forms[3].ranks[0] > forms[0].ranks[0]  # a prompt is service before the first token


def test_it_is_a_candidate_among_the_orders() -> None:
    assert ORDER in OrderSearch(queue_of("fcfs", "none"), 0.5, {}).usual()


def test_pairs_of_a_file_are_a_predictor_of_its_ranks(tmp_path: object) -> None:
    """Pairs whose predictions are the lengths: as exact ones."""
    path = f"{tmp_path}/pairs.csv"
    counts = range(1, MOST + 1, 7)
    with open(path, "w", encoding="utf-8") as file:
        file.write("output_tokens,predicted_output_tokens\n")
        file.writelines(f"{n},{n}\n" for n in counts)
    assert mean_sojourn(ORDER, f"joint:path={path}") == pytest.approx(
        mean_sojourn(ORDER, "exact"), rel=0.005
    )


def test_the_residual_length_is_its_mean_given_the_prediction_and_the_tokens_made() -> None:
    lengths = parse_distribution("lognormal:mu=2,sigma=0.8", 30)
    told = predictor_in_tokens(parse_predictor("lognormal:sigma=0.6"), 30)
    classes, joint = classes_of(told, lengths, 30)
    starts, ranks = ranks_by_class(lengths, joint, 5.0, index=mean_residual)
    assert starts == tuple(range(30))
    counts = np.arange(31)
    for row, chances in zip(np.reshape(ranks, (len(classes) + 1, -1)), joint, strict=True):
        for age in range(30):
            left = np.where(counts > age, chances, 0.0)
            expected = left @ (counts - age) / left.sum() + (0.0 if age else 5.0)
            assert row[age] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("predictor", [NOISE, "lognormal:sigma=0.3", "onebit:threshold=200"])
def test_the_residual_length_serves_sooner_than_the_prediction_less_the_tokens_made(
    predictor: str,
) -> None:
    """Without a predictor it still follows from the distribution of the lengths."""
    own = mean_sojourn("sprpt,by=residual", predictor)
    assert mean_sojourn(ORDER, predictor) <= own * (1 + 1e-6)
    assert own < mean_sojourn("sprpt", predictor)
    assert mean_sojourn("sprpt,by=residual", "none") < 0.7 * mean_sojourn("sprpt", "none")


@pytest.mark.parametrize("order", ["sprpt", "trail"])
def test_the_simulator_serves_by_the_residual_length(order: str) -> None:
    """The same requests; sprpt as the analysis has it, where a resume costs half a token."""
    queue = queue_of(f"{order},by=residual", NOISE)
    rate = 0.8 * queue.largest_stable_rate
    own = means_simulated(queue, rate, 8)
    saved = means_simulated(queue.but(policy=parse_policy(f"single:order={order}")), rate, 8) - own
    assert saved.mean() > (4 if order == "sprpt" else -2) * saved.std(ddof=1) / math.sqrt(8)
    if order == "sprpt":
        exact = mean_sojourn("sprpt,by=residual") * STEP * queue.requests.output_tokens.mean
        error = own.std(ddof=1) / math.sqrt(len(own))
        assert abs(own.mean() - exact) < 4 * error + 0.005 * exact
