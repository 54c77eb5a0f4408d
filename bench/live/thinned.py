"""Recorded traffic, thinned to an engine."""

from __future__ import annotations

import numpy as np

from policies import parse_policy
from queueing.arrivals.timetable import Timetable
from queueing.distributions.token_distribution import TokenDistribution
from queueing.latency.law import LatencyModel
from queueing.model import Model, step_bound

HOUR = 3_600.0  # seconds


def thinned(
    whole: Timetable,
    policy: str,
    load: float,
    law: LatencyModel,
    *,
    most: int,
    longest: int,
    context: int,
    batch_tokens: int,
    seed: int = 0,
) -> Timetable:
    """As many of the first hour's requests, drawn at random, as make the load; answers of `longest`
    tokens at most and prompts that leave room for them in the context, `most` at once. The prompts
    of a batch have `batch_tokens` at most.
    """
    hour = whole.intended_at < HOUR
    at = whole.intended_at[hour]
    outputs = np.clip(whole.output_tokens[hour], 1, longest)
    prompts = np.clip(whole.prompt_tokens[hour], 1, context - longest)
    parsed = parse_policy(policy)
    model = Model(
        policy=parsed,
        output_tokens=TokenDistribution.from_counts(outputs),
        law=law,
        max_num_seqs=most,
        prompt_tokens=TokenDistribution.from_counts(prompts),
        step_tokens=step_bound(parsed, most, None, batch_tokens),
    )
    share = load * model.largest_stable_rate / (at.size / HOUR)
    kept = np.random.default_rng(seed).random(at.size) < share
    return Timetable(at[kept], prompts[kept], outputs[kept])
