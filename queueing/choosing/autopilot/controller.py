"""The controller: asked every few seconds with an assessed window, answers with at most one
decision.

unstable          the load's lower end is above 1: the setting with the lowest load one knob away,
                  at once, and again every few seconds
safe direction    too few data, or an assumption of the model fails: only settings with a clearly
                  lower load, and a sure gain
steady            the setting with the shortest mean delay one knob away (of different families:
                  sojourn time, as their services differ); its gain must exceed a threshold, its
                  interval exclude 0, and it must stay stable, with a margin, at the upper ends of
                  the intervals of rate and speed

One knob at a time; after a change nothing for `Rules.cool_down` seconds and `Rules.fewest`
requests, longer after a rollback. Every change is measured afterwards
(queueing.choosing.autopilot.judging). The driver asks after each assessment, puts `Decision.after`
in force if `Decision.acts`, and logs `Decision.says`; if it does not act, the next assessment shows
that and the change is forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from kendall.policies.text import SpecError
from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds, Rules
from kendall.queueing.choosing.autopilot.candidates import repairs
from kendall.queueing.choosing.autopilot.choosing import Chooser, Proposal
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.judging import judge, measurable, overwhelmed
from kendall.queueing.choosing.autopilot.knowledge import Knowledge, learn
from kendall.queueing.choosing.autopilot.state import State, Trial

Mode = Literal["off", "advise", "act"]


@dataclass(slots=True, kw_only=True)
class Autopilot:
    """Plain values throughout: may live in the predicting process, or travel with each question.
    Raises SpecError for a mode it lacks.
    """

    bounds: AutopilotBounds = field(default_factory=AutopilotBounds)
    mode: Mode = "off"
    rules: Rules = field(default_factory=Rules)
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise SpecError(
                f"got autopilot mode {self.mode!r}; expected {', '.join(get_args(Mode))}"
            )

    def decide(self, seen: AssessedWindow) -> Decision | None:
        """The one thing to do or to say now; up to about a second of computing when a search is
        due, else little.
        """
        if self.mode == "off":
            return None
        trial = self.state.trial
        if trial is not None and trial.decision.after != seen.current:
            # somebody else turned a knob, or the driver did not: there is nothing to measure
            self.state.trial = None
        known = learn(seen, self.state, self.rules)
        if isinstance(known, str):
            return None  # nothing to say either: the prediction already tells what is missing
        judged = self._judged(seen, known)
        if judged is not None:
            return judged
        chooser = Chooser(seen, known, self.bounds, self.state, self.rules)
        if chooser.unstable:
            resting = seen.now - self.state.changed_at < self.rules.rescue_gap
            return None if resting else self._proposed(seen, known, chooser.rescue())
        if self._resting(seen) or (
            seen.now < self.state.think_at and chooser.loads(seen.current)[0] < 1
        ):
            return None
        self.state.think_at = seen.now + self.rules.think_every
        wrong = repairs(seen, self.bounds)
        return self._proposed(
            seen, known, chooser.search() if wrong is None else chooser.to_bounds(*wrong)
        )

    def restore(self, state: State, shift: float = 0.0) -> None:
        """Take up what it remembered; `shift` seconds from the old clock to the new one."""
        self.state = state.shifted(shift)

    def _judged(self, seen: AssessedWindow, known: Knowledge) -> Decision | None:
        """What became of the last change, if that can be said."""
        trial = self.state.trial
        if trial is None:
            return None
        over = seen.now - trial.decision.at >= self.rules.longest_trial
        if not (over or overwhelmed(seen, trial) or measurable(seen, trial, self.rules)):
            return None
        cautious = known.operating_points[0]
        predicted = cautious.predicted_mean(seen.current, trial.decision.compared)
        found = judge(seen, trial, known.rate, predicted, self.rules)
        if found is None:
            return None
        self.state.trial = None
        if found.kind == "rollback":
            here, there = (cautious.load(setting) for setting in (found.before, found.after))
            if there * known.highest >= 1 and there > here:
                reason = (
                    f"{found.reason}, but before it the load would now be {there:.2f}: there "
                    "is no way back"
                )
                found = replace(
                    found, kind="kept", before=found.after, after=found.before, reason=reason
                )
                return replace(found, load_before=found.load_after, load_after=found.load_before)
            self.state.remember(trial.decision.after, known.rate.value, seen.now, self.rules)
            if self.mode != "act":
                return replace(
                    found, kind="held back", reason=f"the autopilot only advises ({found.reason})"
                )
            self._changed(seen, self.rules.cool_down * self.rules.after_rollback)
        return found

    def _resting(self, seen: AssessedWindow) -> bool:
        """Whether the last change is too recent; before the first one there is nothing to wait
        for.
        """
        return math.isfinite(self.state.changed_at) and (
            seen.now < self.state.cool_until or seen.estimates.count < self.rules.fewest
        )

    def _proposed(
        self, seen: AssessedWindow, known: Knowledge, proposal: Proposal | None
    ) -> Decision | None:
        """The change, noted as on trial; or what stands against it, said once and again after a
        while.
        """
        if proposal is None:
            return None
        found, against = proposal.decision, proposal.against
        if against is None and self.mode == "advise":
            against = "the autopilot only advises"
        if against is not None:
            if found.after == self.state.said and seen.now - self.state.said_at < self.rules.repeat:
                return None
            self.state.said, self.state.said_at = found.after, seen.now
            return replace(found, kind="held back", reason=f"{against} ({found.reason})")
        self.state.trial = Trial(
            decision=found,
            rate=known.rate,
            waiting=seen.waiting,
            unstable_before=not math.isfinite(found.predicted_before.value),
        )
        self._changed(seen, self.rules.cool_down)
        return found

    def _changed(self, seen: AssessedWindow, pause: float) -> None:
        self.state.changed_at, self.state.cool_until = seen.now, seen.now + pause
        self.state.think_at = seen.now + min(pause, self.rules.think_every)
        self.state.said = None
