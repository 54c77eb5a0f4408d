"""What became of a change: measured against what was predicted and against what was before, once
the queue has settled.

Means are of what the change was chosen by: queueing delays, or sojourn times where the families
differ.

worse      observed after > predicted there now, and > observed before (both beyond the 95 %
           intervals, which respect autocorrelation), or: the queue grows far beyond what was
           predicted, though it was stable before      -> rolled back, and remembered
kept       everything else; also where the load has changed meanwhile, where the queue had no
           steady state before, and where `Rules.longest_trial` passed without an answer (at high
           load a queue forgets slowly)
"""

from __future__ import annotations

import math
from dataclasses import replace

from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import Rules
from kendall.queueing.choosing.autopilot.decision import Decision, Kind
from kendall.queueing.choosing.autopilot.state import Trial
from kendall.queueing.estimation.interval import UNKNOWN, Estimate

GROWN = 3.0  # times the predicted queue length
ALWAYS = 50  # requests that may wait without anybody thinking of growth


def overwhelmed(seen: AssessedWindow, trial: Trial) -> bool:
    """Whether the queue grew since the change as no steady state of the prediction would."""
    expected = trial.decision.predicted_after
    if trial.unstable_before or not expected.known:
        return False
    usual = max(
        expected.high,
        trial.decision.observed_before.value if trial.decision.observed_before.known else 0.0,
    )
    return seen.waiting > GROWN * (trial.rate.high * usual + trial.waiting) + ALWAYS


def measurable(seen: AssessedWindow, trial: Trial, rules: Rules) -> bool:
    """Whether enough requests of a settled queue were seen."""
    long_enough = seen.now - trial.decision.at >= rules.cool_down and seen.judged >= rules.fewest
    return (
        long_enough
        and seen.enough
        and seen.holds("settled") is not False
        and seen.observed_of(trial.decision.compared).known
    )


def judge(
    seen: AssessedWindow, trial: Trial, rate: Estimate, predicted_now: Estimate, rules: Rules
) -> Decision | None:
    """`kept` or `rollback`, or None where it is too early. `predicted_now`: of the setting in
    force at this window's estimates.
    """
    apart = not (rate.low <= trial.rate.high and trial.rate.low <= rate.high)
    moved = apart and abs(math.log(rate.value / trial.rate.value)) > rules.forgiven
    if overwhelmed(seen, trial) and not moved:
        reason = f"{seen.waiting} requests wait, far more than predicted: the queue grows"
        return _answer(seen, trial, "rollback", reason)
    if not measurable(seen, trial, rules):
        over = seen.now - trial.decision.at >= rules.longest_trial
        reason = "it could not be measured in time: the queue has not settled"
        return _answer(seen, trial, "kept", reason) if over else None
    if trial.unstable_before:
        return _answer(seen, trial, "kept", "the queue had no steady state before the change")
    if moved:
        ratio = rate.value / trial.rate.value
        reason = f"the arrival rate is {ratio:.2f} times that of before: not to be compared"
        return _answer(seen, trial, "kept", reason)
    found = trial.decision
    observed = seen.observed_of(found.compared)
    if _above(observed, predicted_now) and _above(observed, found.observed_before):
        reason = "it does clearly worse than predicted and than before"
        return _answer(seen, trial, "rollback", reason)
    return _answer(seen, trial, "kept", "it does not do worse than predicted and than before")


def measured_gain(before: Estimate, after: Estimate) -> Estimate:
    """1 - after / before of two independent means."""
    if not (before.known and after.known) or before.value <= 0 or after.value <= 0:
        return UNKNOWN
    ratio = after.value / before.value
    factor = math.exp(min(700.0, math.hypot(before.relative, after.relative)))
    return Estimate(
        1 - ratio,
        1 - ratio * factor,
        1 - ratio / factor,
        min(before.effective_n, after.effective_n),
    )


def _above(observed: Estimate, other: Estimate) -> bool:
    """Beyond both intervals together; never above what is not known."""
    if not (observed.known and other.known):
        return False
    half = math.hypot((observed.high - observed.low) / 2, (other.high - other.low) / 2)
    return observed.value - other.value > half


def _answer(seen: AssessedWindow, trial: Trial, kind: Kind, reason: str) -> Decision:
    """The trial's decision with what was observed; a rollback goes the other way."""
    was = trial.decision
    observed = seen.observed_of(was.compared)
    gain = UNKNOWN if trial.unstable_before else measured_gain(was.observed_before, observed)
    found = replace(
        was, at=seen.now, kind=kind, reason=reason, observed_after=observed, measured_gain=gain
    )
    if kind == "kept":
        return found
    return replace(
        found,
        before=was.after,
        after=was.before,
        load_before=was.load_after,
        load_after=was.load_before,
    )
