"""The queue of a window's estimates, under any policy, token limit and number of servers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from kendall.policies import Policy, SpecError, is_first_come
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.lengths.within_calls import significant
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.model import Model, memory_limited, step_bound
from kendall.queueing.models.soap.predictor_text import parse_predictor

RARELY_CUT = 0.01  # of the batches, by their prompts: a forecast does not heed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator and the engine bound."""

    max_output_tokens: int | None = None
    max_num_seqs: int | None = None
    patience: float | None = None
    servers: int = 1
    pads: bool = True  # the engine can pad a batch; else a padded policy is served as elastic
    # that the engine computes in one step, where it computes long prompts in parts; and of a batch,
    # which computes all its prompts in one
    step_tokens: int | None = None
    batch_tokens: int | None = None
    # KV memory of a server, and of that what is kept free for an answer; None: enough, its limit
    max_context_tokens: int | None = None
    reserved_tokens: int | None = None


def model_of(
    policy: Policy,
    lengths: TokenDistribution,
    law: LatencyModel,
    limits: Limits,
    estimates: Estimates,
) -> Model:
    """The queue of the estimates under this policy, with these lengths and this law."""
    cut = heeded_batch_tokens(limits.batch_tokens, estimates.prompts_cut)
    step = step_bound(policy, limits.max_num_seqs, limits.step_tokens, cut)
    matter = (law.kp or step is not None) and estimates.prompt_tokens.counts.size
    model = Model(
        policy=policy,
        output_tokens=lengths,
        law=law,
        prompt_tokens=estimates.prompt_tokens.law() if matter else None,
        max_num_seqs=limits.max_num_seqs,
        step_tokens=step,
        servers=limits.servers,
        patience=limits.patience,
        sequences=estimates.call_sizes,
        intraclass_correlation=0.0
        if estimates.call_sizes is None
        else significant(estimates.alike(policy, limits.max_num_seqs)),
        predictor=parse_predictor(estimates.predictor or "none"),
    )
    return _in_memory(model, limits, estimates)


def heeded_batch_tokens(batch_tokens: int | None, share: float) -> int | None:
    """The bound on the prompts of a batch, where the share of the batches that it cuts matters."""
    return batch_tokens if share > RARELY_CUT else None


def known_memory(limits: Limits, estimates: Estimates) -> tuple[int, int] | None:
    """The KV memory, and what the mean request holds of it beside its prompt, whether or not its
    answer gets so long; None where one of them or the prompts are not known.
    """
    memory, held = limits.max_context_tokens, estimates.held_tokens
    if memory is None or not math.isfinite(held) or not estimates.prompt_tokens.counts.size:
        return None
    limit = math.inf if limits.max_output_tokens is None else limits.max_output_tokens
    return memory, max(1, round(min(held, limit)))


def _in_memory(model: Model, limits: Limits, estimates: Estimates) -> Model:
    """With the engine's KV memory, where first come, first served may wait for it in slots: each
    request holds its prompt, and for the rest as much as the mean one.
    """
    known = known_memory(limits, estimates)
    if known is None:
        return model
    memory, reserved = known
    policy = model.policy
    alone = policy.joins_running and is_first_come(policy) and model.sequences is None
    if not alone:
        return model
    try:
        limited = dataclasses.replace(
            model,
            prompt_tokens=estimates.prompt_tokens.law(),
            max_context_tokens=memory,
            reserved_tokens=reserved,
            max_output_tokens=reserved,
        )
    except SpecError:  # not even the largest one fits
        return model
    return limited if memory_limited(limited) else model
