"""One queue for several servers: what is predicted, against simulations with another seed."""

from __future__ import annotations

import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3"
LENGTHS = parse_distribution("lognormal:mu=4,sigma=0.8", 512)
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
)
NEGLIGIBLE = 1e-3  # of the sojourn
WITHIN = 0.1


def assert_predicted(policy: str, servers: int, load: float, requests: int) -> None:
    model = Queue.read(policy, LENGTHS, LAW, servers=servers, max_num_seqs=16)
    rate = load * model.largest_stable_rate
    found = predict_model(model, rate).queueing_delay.mean
    truth = simulate_model(model, rate, num_requests=requests, seed=77)
    mean, error = truth.queueing_delay.mean, truth.queueing_delay.standard_error
    assert found is not None
    assert mean is not None
    assert error is not None
    assert truth.sojourn_time.mean is not None
    least = NEGLIGIBLE * truth.sojourn_time.mean
    if mean < least:
        assert found < 2 * least
        return
    assert 3 * error < WITHIN * mean, "too few requests to tell"
    assert found == pytest.approx(mean, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_delay_at_every_point(policy: str, servers: int, load: float) -> None:
    rarely_waits = (policy, servers) == ("continuous:max_batch_size=8", 8)
    assert_predicted(policy, servers, load, 9_000_000 if rarely_waits else 3_000_000)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(6)
def test_the_delay_of_two_servers(policy: str) -> None:
    assert_predicted(policy, 2, 0.8, 1_000_000)
