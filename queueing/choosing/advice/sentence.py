"""One plain sentence of advice: what to set, what that should change, and how sure that is; or
that nothing is worth changing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kendall.policies.text import counted, short_number
from kendall.queueing.choosing.forecast import Advice, Forecast, Setting
from kendall.queueing.choosing.gain.criterion import Criterion, forbidden
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.phrases import HALF_A_PERCENT, NO_CHANGE, seconds, share, small_share
from kendall.queueing.estimation.interval import Estimate


def sentence(
    advice: Advice,
    best: Forecast,
    objective: Objective,
    measure: Criterion,
    values: Sequence[float | None],
    *,
    in_force: Sequence[float] | None = None,
) -> str:
    """The sentence of an advice that has a best choice. `values`: the measure at the setting in
    force and at the best one; `in_force`: the value that each SLO bounds at the setting in force,
    seconds.
    """
    now, gain, target = advice.current, advice.gain, advice.target
    here, there = knob_text(now.setting, target), knob_text(best.setting, target)
    before, after = (
        seconds(value) if value is None or measure.seconds else short_number(value)
        for value in values
    )
    change = f"{measure.name} {before} -> {after}"
    against = forbidden(
        objective, now, limits_tokens=target == "max-output-tokens", simulated=in_force
    )
    if now.setting == best.setting:
        held = "" if against is None else f", though it {against}"
        text = f"{there} is the best choice already{held}: {measure.name} {before}"
    elif now.prediction is None and not now.load >= 1:
        text = f"set {there}: {change}; what is in force cannot be forecast"
    elif against is not None:
        text = f"set {there}: the current {here} {against}; {change}"
    elif target == "servers" and objective.slo is None and not _too_small(gain):
        text = (
            f"one more server ({best.setting.servers}): {change}, {percent(gain)}; without an "
            "SLO more is always faster"
        )
    elif objective.slo is not None and target in ("max-output-tokens", "servers"):
        text = f"{there} is enough in place of {here}: {change}, within {objective.slo.seconds:g} s"
    elif _too_small(gain):
        met = "" if objective.slo is None else f"{here} meets the SLO; "
        means = f"{measure.name} {before} with {here}, {after} with {there}"
        # where the numbers alone would be a reason to change
        unsure = "" if gain.value < HALF_A_PERCENT else "; the gain is uncertain and may be none"
        return f"{met}{NO_CHANGE}: {means}{unsure}" + _notes(best)
    else:
        text = f"set {there} instead of {here}: {change}, {percent(gain)}"
    return text + _clipped(now, best, target) + _delays(now, best, measure) + _notes(best)


def _notes(best: Forecast) -> str:
    return "".join(f"; {note}" for note in best.notes)


def _clipped(now: Forecast, best: Forecast, target: str) -> str:
    """The fraction of the answers that the token limit cuts, and that in force where it is
    another one.
    """
    cut, limit = best.clipped_fraction, best.setting.max_output_tokens
    if target != "max-output-tokens" or limit is None or cut is None:
        return ""
    other = now.setting != best.setting and now.clipped_fraction is not None
    return f"; cuts {small_share(cut)} of the answers" + (
        f", now {small_share(now.clipped_fraction)}" if other else ""
    )


def _delays(now: Forecast, best: Forecast, measure: Criterion) -> str:
    """The queueing delays too, where sojourn times were compared."""
    if measure.compared in (None, "queueing_delay") or now.setting == best.setting:
        return ""
    delays = [
        None if each.prediction is None else each.prediction.queueing_delay.mean
        for each in (now, best)
    ]
    return f"; mean queueing delay {seconds(delays[0])} -> {seconds(delays[1])}"


def knob_text(setting: Setting, target: str) -> str:
    """The knob that the target turns, as it stands."""
    if target == "servers":
        return counted(setting.servers, "server")
    if target == "max-output-tokens":
        unlimited = setting.max_output_tokens is None
        return setting.limit_words if unlimited else f"the {setting.limit_words}"
    return setting.policy


def percent(gain: Estimate) -> str:
    """`34 % less (28 to 40 %)`; an interval open below says so."""
    low, high = (share(end) if abs(end) < 100 else "minus much" for end in (gain.low, gain.high))
    words = "less" if gain.value > -HALF_A_PERCENT else "more"
    return f"{share(abs(gain.value))} % {words} (95 %: {low} to {high} % less)"


def _too_small(gain: Estimate) -> bool:
    """Whether the gain or the lower end of its interval is 0 as `percent` prints them."""
    return min(gain.low, gain.value) < HALF_A_PERCENT
