"""Whether a latency law gives every batch that can occur a duration above zero, and one that
numbers can carry.

A fitted law may have a slightly negative k1, k2 or kp: it holds for the batches it was fitted to.
The duration is linear in the batch size, the lengths and the prompts, so its smallest value lies in
a corner: the shortest outputs, the prompts that cost least, and a batch of one or of the largest
size.
"""

from __future__ import annotations

import math

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.latency.law import LatencyModel

NO_STEPS = (
    "got k3=0, k4=0 in the latency law of an engine that goes step by step; expected a step that "
    "takes time: one of them > 0, or a policy that forms batches"
)
_EVER = 1_000_000  # batch size that stands for a batch without a bound
_SHORTEST, _LONGEST = 1e-12, 1e12  # seconds


def check_durations(
    law: LatencyModel,
    output: TokenDistribution,
    prompts: TokenDistribution | None,
    bound: int | None,
    *,
    batches: bool,
) -> None:
    """`batches`: the service of whole batches, else the steps of a continuous engine. Raises
    SpecError.
    """
    if not batches and law.k3 + law.k4 == 0:
        raise SpecError(NO_STEPS)
    sizes = (1, _EVER if bound is None else bound)
    shortest = output.shortest if batches else 1
    cheapest = 0
    if prompts is not None:
        cheapest = prompts.shortest if law.kp >= 0 else prompts.longest

    def duration(size: int) -> float:
        if batches:
            return law.padded(size, shortest, size * cheapest)
        return law.admission(size, size * cheapest) + law.step(size)

    size = min(sizes, key=duration)
    least = duration(size)
    if not least > 0:
        raise SpecError(_refusal(law, size, shortest, least, batches=batches))
    most = law.padded(
        1,
        output.mean if math.isfinite(output.mean) else shortest,
        0.0 if prompts is None else prompts.mean,
    )
    if not (least >= _SHORTEST and most <= _LONGEST):
        raise SpecError(
            f"got the latency law {law.rounded()}, by which a request takes between {least:.3g} s "
            f"and {most:.3g} s; expected seconds between {_SHORTEST:g} and {_LONGEST:g}: "
            "coefficients are in seconds"
        )


def _refusal(law: LatencyModel, size: int, shortest: int, least: float, *, batches: bool) -> str:
    negative = {name: getattr(law, name) for name in ("k1", "k2", "kp") if getattr(law, name) < 0}
    given = ", ".join(f"{name}={value:g}" for name, value in negative.items())
    what = (
        f"a batch of {size} with {shortest} output tokens each"
        if batches
        else f"a step that admits {size}"
    )
    advice = f": raise {' or '.join(negative)}" + (
        ", or bound the batch size lower" if size > 1 else ""
    )
    return (
        f"got {given} in the latency law, by which {what} takes {least:.4g} s; expected more "
        f"than 0 s{advice}"
    )
