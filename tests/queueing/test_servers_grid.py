"""Five policies on 2, 4 and 8 servers at two loads: what `predict` answers is within 10 % of an
independent simulation, or it is a simulation and says so.
"""

from __future__ import annotations

import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import parse_law
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3")
LENGTHS = parse_distribution("lognormal:mu=3,sigma=0.8", 200)
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
)
CLOSE = 0.10
NOTHING = 1e-4  # seconds: a delay that nobody feels


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
@pytest.mark.parametrize("servers", [2, 4, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_several_servers_are_predicted_or_simulated(policy: str, servers: int, load: float) -> None:
    model = Queue.read(policy, LENGTHS, LAW, servers=servers, max_num_seqs=16)
    rate = load * model.largest_stable_rate
    found = predict_model(model, rate)
    simulated = simulate_model(model, rate, num_requests=1_000_000, seed=77)
    for name in ("queueing_delay", "sojourn_time"):
        predicted, mean = getattr(found, name).mean, getattr(simulated, name).mean
        error = 3 * (getattr(simulated, name).standard_error or 0.0)
        assert abs(predicted - mean) <= max(CLOSE * mean, error, NOTHING), (name, found.method)
    in_doubt = any("in doubt" in text for text in found.assumptions)
    assert not in_doubt or found.method == "approximation"
