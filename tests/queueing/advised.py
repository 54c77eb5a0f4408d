"""The queue that what-ifs and advice are asked about."""

from __future__ import annotations

from policies import parse_policy
from queueing.distributions.token_distribution import TokenDistribution
from queueing.model import Model
from tests.queueing.estimation_runs import LAW, LENGTHS

POLICY = "capped:max_batch_size=8"


def capacity(policy: str = POLICY, tokens: TokenDistribution = LENGTHS) -> float:
    return Model(
        policy=parse_policy(policy), output_tokens=tokens, law=LAW, max_num_seqs=16
    ).largest_stable_rate
