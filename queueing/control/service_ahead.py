"""A model's service times as the queue ahead needs them (`queueing.control.wait_ahead`): small
enough to be sent to another process.

Sizes are spaced by factors of two up to the bound: between them means and variances of a batch's
service time are near a line.
"""

from __future__ import annotations

from kendall.queueing.control.wait_ahead import BatchService, Pace, SlotService
from kendall.queueing.queue import Queue

_LARGEST = 1024  # where neither the policy nor the engine has a bound


def service_ahead(model: Queue) -> BatchService | SlotService:
    """Moments under the model's law and lengths. Raises NotConvergedError for slots."""
    bound = _LARGEST if model.bound is None else model.bound
    if model.policy.joins_running:
        slots = model.slot_time
        mean, share = slots.parts(bound, refilled=True)
        first, more = slots.first_token(bound, share, refilled=True), slots.mean_tokens - 1
        step = (mean - first) / more if more > 0 else slots.law.step(bound)
        return SlotService(
            slots=bound * model.engine.servers,
            throughput=model.engine.servers * bound / mean,
            scv=slots.scv(bound, mean, share),
            first_token=first,
            pace=Pace(first - step, step),
        )
    time = model.batch_time
    sizes = sorted({min(2**power, bound) for power in range(bound.bit_length() + 1)})
    means = [time.mean(size) for size in sizes]
    variances = [
        max(0.0, time.second_moment(size) - mean**2)
        for size, mean in zip(sizes, means, strict=True)
    ]
    step = time.law.step(1)
    return BatchService(
        largest=bound,
        servers=model.engine.servers,
        sizes=tuple(sizes),
        means=tuple(means),
        variances=tuple(variances),
        first_token=time.first_token(bound),
        pace=Pace(means[0] - step * model.requests.output_tokens.mean, step)
        if bound == 1
        else None,
    )
