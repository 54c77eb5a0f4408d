"""What if: the other policies, token limits and batch sizes at the estimates of a window, every
minute.

A setting is predicted at the window's rate, lengths, speed and residual, never from a delay.
Lengths are known up to the largest limit that was in force: a lower limit is answered from the
window alone, a higher one only under a named family ("extrapolated").
"""

from __future__ import annotations

from collections.abc import Callable

from kendall.queueing.choosing.candidates import (
    canonical,
    one_knob_away,
    usual_policies,
    usual_sizes,
)
from kendall.queueing.choosing.forecast import Forecast, Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint

LEVELS = (0.5, 0.75, 0.9)  # of the lengths: the token limits asked about


class WhatIfs:
    """The setting in force and the usual others at one operating point, answered bit by bit: the
    load of each at once, by which those without a steady state are known; then forecasts, of the
    setting in force first, then of those with the lowest load.
    """

    def __init__(self, operating_point: OperatingPoint, current: Setting) -> None:
        self._point = operating_point
        bound = operating_point.limits.engine.max_num_seqs
        others = one_knob_away(
            current,
            policies=usual_policies(current, bound),
            token_limits=usual_token_limits(operating_point),
            sizes=usual_sizes(current, bound),
        )
        self._outlines = {
            each: operating_point.outline(each) for each in (canonical(current), *others)
        }
        first, *rest = self._outlines.values()
        waiting = [each for each in rest if each.pending]
        self._left = [first] if first.pending else []
        self._left += sorted(waiting, key=lambda each: each.load)
        self._left.reverse()

    @property
    def left(self) -> int:
        """Settings of which only the load is known."""
        return len(self._left)

    def advance(self, over: Callable[[], bool]) -> None:
        """Forecast the next ones until `over`, and one at least."""
        while self._left:
            setting = self._left.pop().setting
            self._outlines[setting] = self._point.forecast(setting)
            if over():
                return

    def forecasts(self) -> list[Forecast]:
        """What is known so far: the setting in force, other policies, token limits, batch sizes."""
        return list(self._outlines.values())


def usual_token_limits(operating_point: OperatingPoint) -> tuple[int, ...]:
    """The median, the third quartile and the 90th percentile of the lengths, as far as these are
    known.
    """
    lengths = operating_point.lengths
    if lengths is None:
        return ()
    limits = (lengths.whole.quantile(level) for level in LEVELS)
    return tuple(dict.fromkeys(limit for limit in limits if limit <= lengths.known_to))
