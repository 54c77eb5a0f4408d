"""The queue of a window's estimates, under any policy, token limit and number of servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from kendall.policies import Policy, SpecError, is_first_come
from kendall.queueing.description.parts import Engine, Requests
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.lengths.within_calls import significant
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue

RARELY_CUT = 0.01  # of the batches, by their prompts: a forecast does not heed it


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The bounds that the operator and the engine set."""

    max_output_tokens: int | None = None
    patience: float | None = None
    servers: int = 1
    pads: bool = True  # the engine can pad a batch; else a padded policy is served as elastic
    engine: EngineBounds = field(default_factory=EngineBounds)
    owns_queue: bool = False  # the engine: only its slots and the servers can be other ones
    routing: str = "central"  # to several servers (queueing.description.parts)


def model_of(
    policy: Policy,
    lengths: TokenDistribution,
    law: LatencyModel,
    limits: QueueLimits,
    estimates: Estimates,
) -> Queue:
    """The queue of the estimates under this policy, with these lengths and this law."""
    bounds = msgspec.structs.replace(
        limits.engine.for_slots(policy),
        batch_tokens=heeded_batch_tokens(limits.engine.batch_tokens, estimates.prompts_cut),
        max_context_tokens=None,
        reserved_tokens=None,
    )
    step = bounds.of_a_step(policy)
    matter = (law.kp or step is not None) and estimates.prompt_tokens.counts.size
    queue = Queue(
        policy=policy,
        requests=Requests(
            output_tokens=lengths,
            prompt_tokens=estimates.prompt_tokens.law() if matter else None,
            sequences=estimates.call_sizes,
            intraclass_correlation=0.0
            if estimates.call_sizes is None
            else significant(estimates.alike(policy, bounds.max_num_seqs)),
            predictor=parse_predictor(estimates.predictor or "none"),
            patience=limits.patience,
        ),
        engine=Engine(
            law=law,
            servers=limits.servers,
            bounds=bounds,
            routing=limits.routing if limits.servers > 1 else "central",
        ),
    )
    return _in_memory(queue, limits, estimates)


def heeded_batch_tokens(batch_tokens: int | None, share: float) -> int | None:
    """The bound on the prompts of a batch, where the share of the batches that it cuts matters."""
    return batch_tokens if share > RARELY_CUT else None


def known_memory(limits: QueueLimits, estimates: Estimates) -> tuple[int, int] | None:
    """The KV memory, and what the mean request holds of it beside its prompt, whether or not its
    answer gets so long; None where one of them or the prompts are not known.
    """
    memory, held = limits.engine.max_context_tokens, estimates.held_tokens
    if memory is None or not math.isfinite(held) or not estimates.prompt_tokens.counts.size:
        return None
    limit = math.inf if limits.max_output_tokens is None else limits.max_output_tokens
    return memory, max(1, round(min(held, limit)))


def _in_memory(model: Queue, limits: QueueLimits, estimates: Estimates) -> Queue:
    """With the engine's KV memory, where first come, first served may wait for it in slots: each
    request holds its prompt, and for the rest as much as the mean one.
    """
    known = known_memory(limits, estimates)
    if known is None:
        return model
    memory, reserved = known
    policy = model.policy
    alone = policy.joins_running and is_first_come(policy) and model.requests.sequences is None
    if not alone:
        return model
    try:
        limited = model.but(
            prompt_tokens=estimates.prompt_tokens.law(),
            max_context_tokens=memory,
            reserved_tokens=reserved,
            max_output_tokens=reserved,
        )
    except SpecError:  # not even the largest one fits
        return model
    return limited if limited.memory_limited else model
