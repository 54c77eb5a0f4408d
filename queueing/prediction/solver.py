"""A model of some queues: which it covers, by which methods, and the numbers that it gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kendall.policies.core import Policy
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Capped, Continuous, Dynamic, Elastic, Single
from kendall.policies.unpadded import UnpaddedFixed
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.models.batches.batch_chain import BatchQueue
from kendall.queueing.models.batches.bin_chain import BinnedQueue
from kendall.queueing.queue import Queue
from kendall.queueing.result import Mean, Quantiles

ANALYSED = (Single, Dynamic, Capped, Elastic, Fixed, UnpaddedFixed, Continuous)
IN_DOUBT = "approximation in doubt: "  # how the assumption begins that says why


@dataclass(frozen=True)
class Solver:
    """`covers` names the methods by which it answers a queue (exact, approximation, bound, paper),
    none where it does not cover it. `solve` gives the fields of a Prediction by each of them.
    Raises UnstableQueueError, NotConvergedError.
    """

    covers: Callable[[Queue], tuple[str, ...]]
    solve: Mapping[str, Callable[[Queue, float], dict[str, Any]]]
    ordered: bool = False  # of orders of service other than first come, first served
    finite: bool = False  # of queues that reject requests (`max_num_queued_reqs`), and of no others
    policies: tuple[type[Policy], ...] = ANALYSED
    models: int = 1  # that one server has


def answered(
    delay: Quantiles, sojourn: Quantiles, batch_size: float, utilisation: float | None
) -> dict[str, Any]:
    """The fields that every solver fills."""
    return {
        "queueing_delay": delay,
        "sojourn_time": sojourn,
        "batch_size": Mean(batch_size),
        "utilisation": utilisation,
    }


def token_times(delay: Quantiles, first: float, step: float | None) -> dict[str, Any]:
    """`first` seconds from dispatch to the first token, `step` seconds from one token to the next.

    A law with a negative k1 or k2, fitted to longer answers, may put the first token before the
    dispatch: then it says nothing of it.
    """
    arrived = None if first < 0 or delay.mean is None else delay.mean + first
    return {"time_to_first_token": Quantiles(arrived), "inter_token_latency": Quantiles(step)}


def of_batches(
    model: Queue,
    time: BatchTime,
    queue: BatchQueue | BinnedQueue,
    delay: Quantiles,
    sojourn: Quantiles,
) -> dict[str, Any]:
    """The fields of a queue of batches; `time` is that of its batches."""
    sizes = range(1, queue.largest + 1)
    first = queue.by_request(np.array([time.first_token(size) for size in sizes]))
    step = None  # an unpadded batch shrinks: it has no one step time
    if model.policy.padded:
        step = queue.by_request(np.array([time.step(size) for size in sizes]))
    service = queue.by_request(np.array([time.mean(size) for size in sizes]))
    answer = answered(delay, sojourn, queue.batch_size, queue.utilisation)
    return answer | token_times(delay, first, step) | {"service_time": Quantiles(service)}
