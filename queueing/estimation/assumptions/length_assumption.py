"""Whether the sequences of a call are as unlike each other as those of different calls.

independent_lengths    of calls of several sequences. Fails where the intraclass correlation of
                       their output lengths (queueing.estimation.lengths.within_calls) is beyond
                       chance, and with independent lengths the predicted mean would be another one
                       by `MATERIAL` and by `FLOOR`. The prediction draws lengths by call, so that
                       a failure is no reason to doubt it.
"""

from __future__ import annotations

import math

from policies.text import short_number
from queueing.estimation.assumptions.assumption import Assumption
from queueing.estimation.assumptions.engine_assumptions import FLOOR, MATERIAL
from queueing.estimation.interval import Estimate
from queueing.estimation.lengths.within_calls import significant


def independent_lengths(alike: Estimate, mean: float | None, worth: float) -> Assumption:
    """`mean`: predicted, seconds; `worth`: with independent lengths, over it."""
    if not alike.known:
        says = "not judged: too few calls of several sequences, or all answers are equally long"
        return Assumption("independent_lengths", None, math.nan, says)
    if not significant(alike):
        says = "the lengths in a call are independent"
        return Assumption("independent_lengths", True, alike.value, says)
    says = f"the lengths in a call have an intraclass correlation of {short_number(alike.value, 2)}"
    if mean is None:
        return Assumption("independent_lengths", None, alike.value, says)
    fails = abs(worth - 1) >= MATERIAL and abs(worth - 1) * mean >= FLOOR
    would = f"{short_number(1000 * worth * mean, 3)} ms" if worth < 1e6 else "without bound"
    says += (
        f": drawn independently, the predicted mean would be {would}, not "
        f"{short_number(1000 * mean, 3)} ms; the prediction draws lengths by call"
    )
    return Assumption("independent_lengths", not fails, alike.value, says, counted=True)
