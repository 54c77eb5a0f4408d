"""Multi-bin batching: its bins and its capacity."""

import dataclasses

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.batches.binned import bins_of
from kendall.queueing.models.soap.token_orders import predicted_tokens
from kendall.queueing.prediction import predict
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.made import made_queue

LAW = LatencyModel(k1=1e-3, k2=3e-3, k3=4e-4, k4=2e-3)
UNIFORM = parse_distribution("uniform:low=1,high=100")


def model(policy: str, predictor: str = "exact", **settings) -> Queue:
    given = {
        "policy": parse_policy(policy),
        "output_tokens": UNIFORM,
        "law": LAW,
        "predictor": parse_predictor(predictor),
    }
    return made_queue(**{**given, **settings})


def bins(count: int, predictor: str = "exact", lengths: TokenDistribution = UNIFORM):
    return list(bins_of(lengths, count, parse_predictor(predictor)))


def test_exact_predictions_cut_the_lengths_at_equal_shares_of_the_limit():
    found = bins(4)
    assert [share for share, _ in found] == pytest.approx([0.2525, 0.25, 0.25, 0.2475], abs=0.01)
    assert [(part.counts[part.pmf > 0].min(), part.longest) for _, part in found] == [
        (1, 25), (26, 50), (51, 75), (76, 100),
    ]  # fmt: skip
    assert sum(share * part.mean for share, part in found) == pytest.approx(UNIFORM.mean)


def test_without_predictions_all_are_in_the_last_bin():
    ((share, part),) = bins(4, "none")
    assert share == pytest.approx(1)
    assert part.pmf == pytest.approx(UNIFORM.pmf)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("predictor", ["lognormal:sigma=0.5", "exponential", "onebit:threshold=30"])
@pytest.mark.parametrize("count", [3, 7])
def test_bins_are_those_of_drawn_predictions(count, predictor):
    rng = np.random.default_rng(1)
    lengths = UNIFORM.sample(rng, 400_000)
    told = predicted_tokens(parse_predictor(predictor), rng, lengths.astype(float), 100)
    drawn = np.maximum(1, np.ceil(count * (told / 100)))
    found = bins(count, predictor)
    assert len(found) == len(set(drawn))
    for k, (share, part) in zip(sorted(set(drawn)), found, strict=True):
        inside = lengths[drawn == k]
        assert share == pytest.approx(len(inside) / len(lengths), abs=0.003)
        assert part.mean == pytest.approx(inside.mean(), rel=0.01)


def test_one_bin_has_the_capacity_of_no_bins_and_more_bins_have_more():
    rates = [
        model(f"capped:max_batch_size=8,order=binned,bins={count}").largest_stable_rate
        for count in (1, 2, 4, 100)
    ]
    assert rates[0] == pytest.approx(model("capped:max_batch_size=8").largest_stable_rate)
    assert rates == sorted(rates)
    no_padding = sum(
        p * (1e-3 * 8 + 3e-3 + (4e-4 * 8 + 2e-3) * n) for n, p in enumerate(UNIFORM.pmf)
    )
    # rounding puts a few neighbours, 7 and 8 of 100, into one bin
    assert rates[-1] == pytest.approx(8 / no_padding, rel=1e-3)


def test_the_capacity_is_a_mean_over_the_bins_by_hand():
    lengths = TokenDistribution(np.array([0, 0.5, 0, 0, 0.5]))  # 1 or 4 tokens
    found = model("capped:max_batch_size=2,order=binned,bins=2", output_tokens=lengths)
    short, long = (2e-3 + 3e-3 + (8e-4 + 2e-3) * n for n in (1, 4))
    assert found.largest_stable_rate == pytest.approx(2 / (0.5 * short + 0.5 * long))
    assert found.but(servers=3).largest_stable_rate == pytest.approx(3 * found.largest_stable_rate)


def test_without_a_bound_it_is_the_limit_of_large_batches():
    found = model("dynamic:order=binned,bins=2").largest_stable_rate
    each = [1e-3 + 4e-4 * longest for longest in (50, 100)]
    short, long = (share for share, _ in bins(2))
    assert found == pytest.approx(1 / (short * each[0] + long * each[1]))


@pytest.mark.parametrize(
    ("policy", "predictor"),
    [
        ("capped:max_batch_size=8,order=binned,bins=4", "exact"),
        ("capped:max_batch_size=8,order=binned,bins=4", "lognormal:sigma=0.5"),
        ("capped:max_batch_size=4,order=binned,bins=8", "none"),
        ("fixed:batch_size=8,order=binned,bins=3", "exact"),
        ("elastic:max_batch_size=8,order=binned,bins=3", "onebit:threshold=30"),
    ],
)
def test_more_than_the_capacity_is_not_served(policy, predictor):
    """100,000 requests that are all there nearly at once: how many are served a second."""
    queue = model(policy, predictor)
    run = simulate_run(queue, 1e4, 100_000, np.random.SeedSequence(2))
    served = 100_000 / (run.server_free_at.max() - run.arrived_at[0])
    assert served == pytest.approx(queue.largest_stable_rate, rel=0.01)


def test_below_the_capacity_there_is_a_steady_state():
    queue = model("capped:max_batch_size=8,order=binned,bins=4")
    plain = model("capped:max_batch_size=8").largest_stable_rate
    rate = 0.95 * queue.largest_stable_rate
    assert rate > 1.2 * plain
    run = simulate_run(queue, rate, 300_000, np.random.SeedSequence(3))
    thirds = [part.mean() for part in np.array_split(run.queueing_delay[30_000:], 3)]
    assert max(thirds) < 1.3 * min(thirds)


def test_load_and_stability_of_a_prediction_follow_the_bins():
    policy, law = "capped:max_batch_size=8,order=binned,bins=4", str(LAW)
    limit, lengths = model(policy).largest_stable_rate, "uniform:low=1,high=100"
    found = predict(policy, 0.3 * limit, lengths, law, predictor="exact")
    assert (found.load, found.method) == (pytest.approx(0.3), "simulation")
    with pytest.raises(UnstableQueueError, match=r"got load 1\.01"):
        predict(policy, 1.01 * limit, lengths, law, predictor="exact")
    assert 0.99 * limit > 1.2 * model("capped:max_batch_size=8").largest_stable_rate


def test_laws_of_the_bins_keep_the_batch_time_of_prompts_and_padding():
    prompts = parse_distribution("uniform:low=10,high=50")
    law = dataclasses.replace(LAW, kp=1e-5)
    queue = model("capped:max_batch_size=4,order=binned,bins=1", law=law, prompt_tokens=prompts)
    time = BatchTime(law, UNIFORM, prompts, padded=True)
    assert queue.largest_stable_rate == pytest.approx(time.largest_stable_rate(4))
