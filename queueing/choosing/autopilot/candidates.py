"""The settings one knob away that the bounds allow, and the token limit that they ask for."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.candidates import one_knob_away
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.estimation.lengths.lengths import Lengths

ONE_SIDED = 1.6448536269514722  # 95 %
# 84 %: in an unstable queue waiting for more data costs more than a limit that may have to be
# raised again
URGENT = 1.0


def candidates(
    seen: AssessedWindow, bounds: AutopilotBounds, *, urgent: bool = False
) -> list[Setting]:
    """What the bounds allow of the settings one knob away: policies, then batch sizes, then token
    limits.

    A lower limit never makes anyone wait longer, so of the limits only the lowest that the bounds
    allow is worth asking about.
    """
    current, seqs = seen.current, seen.limits.engine.max_num_seqs
    limit = lowest_limit(
        seen.estimates.output_tokens, bounds, seen.longest, URGENT if urgent else ONE_SIDED
    )
    lower = limit is not None and (
        current.max_output_tokens is None or limit < current.max_output_tokens
    )
    settings = [
        *bounds.other_policies(current, seqs),
        *bounds.other_sizes(current, seqs),
        *one_knob_away(current, token_limits=(limit,) if lower else ()),
    ]
    return list(dict.fromkeys(settings))


def repairs(seen: AssessedWindow, bounds: AutopilotBounds) -> tuple[Setting, str] | None:
    """What brings the setting in force back inside the bounds, and what is wrong with it; None
    where it lies inside.
    """
    current, lengths = seen.current, seen.estimates.output_tokens
    limit = current.max_output_tokens
    lowest = lowest_limit(lengths, bounds, seen.longest)
    most = bounds.max_clipped_fraction
    if limit is not None and lower_fraction(lengths, limit) > most:
        cut = clipped_fraction(lengths, limit)
        above = [each for each in bounds.token_limits(seen.longest) if each > limit]
        higher = lowest if lowest is not None and lowest > limit else next(iter(above), None)
        if higher is None and bounds.largest_token_limit is not None:
            return None  # the operator's own largest limit: nothing higher may be set
        return dataclasses.replace(current, max_output_tokens=higher), (
            f"the token limit {limit} cuts {cut:.1%} of the answers, more than the {most:.1%} "
            "allowed"
        )
    if not bounds.allows_limit(limit):
        allowed = bounds.token_limits(seen.longest)
        target = lowest if lowest is not None else (allowed[-1] if allowed else None)
        if target != limit:
            return dataclasses.replace(
                current, max_output_tokens=target
            ), f"{'the ' * (limit is not None)}{current.limit_words} lies outside the bounds"
    return None


def lowest_limit(
    lengths: Lengths, bounds: AutopilotBounds, longest: int, z: float = ONE_SIDED
) -> int | None:
    """The lowest allowed limit that surely cuts no more answers than allowed (`z`: how surely);
    None where there is none.
    """
    allowed = (
        limit
        for limit in bounds.token_limits(longest)
        if upper_fraction(lengths, limit, z) <= bounds.max_clipped_fraction
    )
    return next(allowed, None)


def clipped_fraction(lengths: Lengths, limit: int) -> float:
    """P(N > limit) as estimated; beyond the known lengths, that of the longest."""
    survival = lengths.survival
    return float(survival[min(limit, len(survival) - 1)])


def upper_fraction(lengths: Lengths, limit: int, z: float = ONE_SIDED) -> float:
    """Upper end of P(N > limit), one-sided (Wilson's score interval); the lower end for z < 0. From
    the answers that say whether they go beyond the limit: those that ended, or reached it.
    """
    number = int(np.count_nonzero(~lengths.censored | (lengths.counts >= limit)))
    if not number:
        return 1.0 if z > 0 else 0.0
    p, spread = clipped_fraction(lengths, limit), z * z / number
    root = math.sqrt(p * (1 - p) / number + spread / (4 * number))
    return (p + spread / 2 + z * root) / (1 + spread)


def lower_fraction(lengths: Lengths, limit: int, z: float = ONE_SIDED) -> float:
    """Lower end of P(N > limit), one-sided."""
    return upper_fraction(lengths, limit, -z)
