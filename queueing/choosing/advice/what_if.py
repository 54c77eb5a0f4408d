"""What-if forecasts: the setting in force and the usual settings one knob away from it (policies,
token limits, batch sizes), all at the estimates of one window.

A setting is predicted from the window's arrival rate, lengths, speed and residual, never from a
measured delay. Lengths are known up to the largest limit that was in force: a lower limit is
answered from the window alone, a higher one only under a named family of lengths ("extrapolated").
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from kendall.queueing.choosing.candidates import (
    canonical,
    one_knob_away,
    usual_policies,
    usual_sizes,
)
from kendall.queueing.choosing.forecast import Forecast, Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint

LIMIT_LEVELS = (0.5, 0.75, 0.9)  # quantiles of the output lengths that are tried as token limits


class WhatIfs:
    """Forecasts at one operating point, computed in slices of time.

    The constructor computes every load, which shows which settings have no steady state. `advance`
    then forecasts the setting in force and after it the others, the lowest load first.
    """

    def __init__(self, operating_point: OperatingPoint, current: Setting) -> None:
        self._operating_point = operating_point
        current = canonical(current)
        max_num_seqs = operating_point.limits.engine.max_num_seqs
        owned = operating_point.limits.owns_queue
        others = one_knob_away(
            current,
            policies=() if owned else usual_policies(current, max_num_seqs),
            token_limits=usual_token_limits(operating_point),
            sizes=usual_sizes(current, max_num_seqs),
        )
        if owned:
            number = current.servers
            others += [
                dataclasses.replace(current, servers=each)
                for each in (number - 1, number + 1)
                if each
            ]
        self._forecasts = {
            setting: operating_point.outline(setting) for setting in (current, *others)
        }
        pending = [forecast for forecast in self._forecasts.values() if forecast.pending]
        pending.sort(key=lambda forecast: (forecast.setting != current, forecast.load))
        self._unforecast = deque(forecast.setting for forecast in pending)

    def advance(self, is_over: Callable[[], bool]) -> None:
        """Forecast at least one more setting, and further ones until `is_over`."""
        while self._unforecast:
            setting = self._unforecast.popleft()
            self._forecasts[setting] = self._operating_point.forecast(setting)
            if is_over():
                return

    def forecasts(self) -> list[Forecast]:
        """The setting in force, other policies, token limits, batch sizes; those that `advance`
        has not reached have a load only (`Forecast.pending`).
        """
        return list(self._forecasts.values())


def usual_token_limits(operating_point: OperatingPoint) -> tuple[int, ...]:
    """The median, the third quartile and the 90th percentile of the output lengths, without those
    beyond the longest known length.
    """
    lengths = operating_point.lengths
    if lengths is None:
        return ()
    limits = (lengths.whole.quantile(level) for level in LIMIT_LEVELS)
    return tuple(dict.fromkeys(limit for limit in limits if limit <= lengths.known_to))
