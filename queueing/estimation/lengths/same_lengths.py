"""Which earlier epochs' lengths are those of today's clients.

How long prompts and answers are does not depend on the policy, so an epoch may use the lengths of
those before it: of limits that were higher it has no others. But clients change too. Going back
from this epoch, an earlier one is used as long as its prompts and its answers differ from all that
was used before it by no more than chance and `MATERIAL`:

    sup over n of |S(n) - S'(n)| <= max(`MATERIAL`, `CHANCE` sqrt(1/m + 1/m'))

Smirnov 1948: passes 999 of 1000 pairs of one law. S by the product-limit estimator
(queueing.estimation.lengths.lengths), n up to where a limit or a client that left has cut more than
`CUT` of either sample.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.lengths.lengths import Lengths, weigh
from kendall.queueing.estimation.window.snapshot import CENSORED, WITHOUT_LENGTH, Snapshot

CHANCE = 1.95
MATERIAL = 0.05
CUT = 0.1

Mask = npt.NDArray[np.bool_]


def lengths_from(seen: Snapshot) -> float:
    """Instant of the window, seconds, from which on dispatched requests tell the lengths of this
    epoch's clients.
    """
    epochs, dispatched_at = seen.column("epoch"), seen.column("dispatched_at")
    used: Mask = (epochs == seen.epoch) & (dispatched_at >= seen.carried_from)
    since = max(seen.carried_from, seen.epoch_at)
    for epoch in np.unique(epochs[(epochs < seen.epoch) & (dispatched_at >= seen.carried_from)])[
        ::-1
    ]:
        before = (epochs == epoch) & (dispatched_at >= seen.carried_from)
        if differ(outputs(seen, used), outputs(seen, before)) or differ(
            prompts(seen, used), prompts(seen, before)
        ):
            return since
        used, since = used | before, float(np.min(dispatched_at[before]))
    return seen.carried_from


def outputs(seen: Snapshot, kept: Mask, half_life: float = math.inf) -> Lengths:
    """Of the answers that met their end; `half_life` (s) lets older ones count less. One cut
    after n tokens says N >= n + 1.
    """
    ending = seen.column("ending")
    kept = kept & (ending < WITHOUT_LENGTH)
    cut = ending[kept] == CENSORED
    ages = seen.now - seen.column("dispatched_at")[kept]
    return Lengths(
        (seen.column("output_tokens")[kept] + cut).astype(np.int64), cut, weigh(ages, half_life)
    )


def prompts(seen: Snapshot, kept: Mask, half_life: float = math.inf) -> Lengths:
    """Nothing censors a prompt."""
    kept = kept & (seen.column("prompt_tokens") >= 1)
    counts = seen.column("prompt_tokens")[kept].astype(np.int64)
    ages = seen.now - seen.column("dispatched_at")[kept]
    return Lengths(counts, np.zeros(counts.size, dtype=bool), weigh(ages, half_life))


def differ(one: Lengths, other: Lengths) -> bool:
    """Whether two samples are of different laws; False where one is empty."""
    if not one.counts.size or not other.counts.size:
        return False
    top = int(min(_told_to(one), _told_to(other), max(one.known_to, other.known_to)))
    apart = np.max(np.abs(one.survival_to(top) - other.survival_to(top)))
    return bool(
        apart > max(MATERIAL, CHANCE * math.sqrt(1 / one.counts.size + 1 / other.counts.size))
    )


def _told_to(sample: Lengths) -> float:
    """The count up to which cuts have taken at most `CUT` of the sample."""
    cut = np.sort(sample.counts[sample.censored])
    allowed = int(CUT * sample.counts.size)
    return math.inf if cut.size <= allowed else float(cut[allowed] - 1)
