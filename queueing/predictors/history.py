"""Output lengths predicted from those of like prompts: the mean of ln(tokens) of the answers to the
same prompt, shrunk towards that of prompts that begin alike, of the same client, and of all.

    m_k = (n_k mean_k + c_k m_(k-1)) / (n_k + c_k)         k: from all answers to the same prompt

c_k is the variance within a group over that between groups. Two answers to one prompt differ by a
factor of e^.62 (one standard deviation), answers to different prompts by e^.7 to e^.9 (AlpacaEval).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence

SHRINKING = (0.0, 20.0, 5.0, 0.7)  # c_k
MOST_GROUPS = 20_000
FADING = 0.98  # weight of the answers before the next one: of all but the last 50 little is left


class LengthHistory:
    """Groups that have had no answer for longest are forgotten first."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Hashable], tokens: float) -> None:
        """One more answer; `groups`: from the widest to the narrowest, as many as `SHRINKING`."""
        for group in groups:
            count, total = self._groups.get(group, (0.0, 0.0))
            self._groups[group] = FADING * count + 1.0, FADING * total + math.log(tokens)
            self._groups.move_to_end(group)
        while len(self._groups) > MOST_GROUPS:
            self._groups.popitem(last=False)

    def log_length(self, groups: Sequence[Hashable], known: float | None = None) -> float | None:
        """ln(tokens) that is expected; None where nothing is known. Where a prediction of the
        prompt is `known`, only answers to the same prompt change it.
        """
        found, first = known, 0 if known is None else len(SHRINKING) - 1
        for group, shrinking in zip(groups[first:], SHRINKING[first:], strict=True):
            count, total = self._groups.get(group, (0.0, 0.0))
            if count:
                own = total / count
                found = own if found is None else (total + shrinking * found) / (count + shrinking)
        return found
