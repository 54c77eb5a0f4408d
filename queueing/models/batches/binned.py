"""Multi-bin batching: batches whose members come from one of K bins of predicted lengths, the bin
of the oldest request that waits.

    largest stable rate = 1 / sum_k p_k E[H_k(B)] / B      H_k(B): a full batch of bin k

p_k is the share of the requests that is predicted into bin k, H_k(B) the time of B of them, whose
true lengths have the law given that prediction. Exact: above this rate full batches do not suffice;
below it no bin is left behind, as the bin of the oldest request is served, so that all bins wait
alike and their batches fill as the queue grows. Without a bound on the batch the limit of
E[H_k(B)] / B. Conditions: lengths with a limit, B / E[H_k(B)] not falling in B.

The delay without a bound: queueing.models.batches.bin_chain. With one, simulation: a full batch
leaves some of its bin, and the state is the number waiting in each bin. Three simpler formulas were
tried (one server, padded batches of at most 4 and 8, K = 2, 4 and 8, uniform and lognormal lengths,
loads 0.3-0.9; formula / simulation - 1, where the numerics converged):

    chain of the number waiting, of whom each is of the leader's bin
      with probability p_k                                                +5 to +62 %
    the same with 2 p_k / (1 + p_k): the leader's bin has waited longest  -23 to +21 %
    recursion of the leader's age, the other bins alternating renewal
      processes                                                           -52 to -5 %

Source: Guldogan et al., Multi-bin batching for increasing LLM inference
throughput (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.models.soap.token_orders import predictor_in_tokens
from kendall.queueing.predictors.predictor_text import PredictorText


def binned_rate(
    time: BatchTime,
    bins: int,
    predictor: PredictorText,
    bound: int | None,
    limit: int | None = None,
) -> float:
    """Requests/s from which on there is no steady state."""
    seconds = sum(
        share / replace(time, output_tokens=lengths).largest_stable_rate(bound)
        for share, lengths in bins_of(time.output_tokens, bins, predictor, limit)
    )
    return float("inf") if seconds == 0 else 1 / seconds


def bins_of(
    lengths: TokenDistribution, bins: int, predictor: PredictorText, limit: int | None = None
) -> Iterator[tuple[float, TokenDistribution]]:
    """Share of the requests and law of their lengths, of each bin that has any; `limit`: of tokens,
    where it is above the longest length.
    """
    limit = limit or lengths.longest
    counts, chances = np.arange(1.0, lengths.longest + 1), lengths.pmf[1:]
    told = predictor_in_tokens(predictor, limit)
    below: Vector = np.zeros(lengths.longest)
    for last in _last_counts(bins, limit):
        at_most = told.at_most(np.array(last), counts)
        inside = chances * (at_most - below)
        below, share = at_most, float(inside.sum())
        if share > 0:
            yield share, TokenDistribution(np.concatenate([[0.0], inside / share]))


def _last_counts(bins: int, limit: int) -> Vector:
    """The largest prediction, whole tokens, of each bin that has any: in the policy's own
    arithmetic.
    """
    numbers = np.arange(1, bins + 1)
    near = np.floor(limit * (numbers / bins))[:, None] + np.array([-1.0, 0.0, 1.0])
    inside = np.ceil(bins * (near / limit)) <= numbers[:, None]
    last = np.unique(np.where(inside & (near <= limit), near, 0.0).max(axis=1))
    return np.asarray(last[last >= 1])
