"""Asks a policy until it waits, and again when the instant comes that it named."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from policies import Decision, Policy, QueueState, format_policy, is_built_in
from policies.decision import LONGEST_DECISION, DecisionError, decide
from server.runtime.clock import clock_of

log = logging.getLogger("kendall.batcher")
RETRY = 1.0  # seconds after which a policy that failed is asked again
FAULTY = 3.0  # seconds without a decision that can be carried out, after which it is given up
MOST_AT_ONCE = 5000  # decisions without a wait in between: more than any engine has places


def decided(policy: Policy, state: QueueState, now: float, clock: Callable[[], float]) -> Decision:
    """What it decides now. Raises DecisionError, also for one from outside that takes too long."""
    if is_built_in(policy):
        return policy.decide(state, now)
    decision = decide(policy, state, now)
    if (spent := clock() - now) > LONGEST_DECISION:
        error = DecisionError(
            f"policy {format_policy(policy)} took {spent:.1f} s to decide; expected less than "
            f"{LONGEST_DECISION:g} s, as every request waits meanwhile"
        )
        error.seconds = spent
        raise error
    return decision


class DecisionLoop:
    """`step` carries out one decision and returns None, or the instant at which the policy wants
    to be asked again (infinity: after the next event).
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._asking = self._again = False
        self._now = clock_of(self._loop)
        self._failing_since = math.inf
        self.failing: str | None = None  # the error of the last decision, if it failed
        # called once with the error of a policy that fails for too long; it may change the policy
        self.on_faulty: Callable[[str], None] | None = None

    def ask(self) -> None:
        """Carry out decisions until the policy waits. A call from within a decision makes the
        outer one ask again.
        """
        self._again = True
        if self._asking:
            return
        self._asking = True
        try:
            while self._again:
                self._again = False
                deadline = self._step()
                if deadline is None:
                    deadline = self._until_it_waits()
                if deadline < math.inf or self._timer is not None:
                    self._set_timer(deadline)
            self.failing = None
        except Exception as error:
            if self.failing is None:
                log.exception("a dispatch decision failed; the queue continues with the next event")
                self._failing_since = self._now() - getattr(error, "seconds", 0.0)
            self.failing = str(error) or type(error).__name__
            if isinstance(error, DecisionError):
                self._ask_again(self.failing)
        finally:
            self._asking = False

    def _ask_again(self, error: str) -> None:
        """Later, or give the policy up."""
        if self._now() - self._failing_since < FAULTY or self.on_faulty is None:
            self._set_timer(self._now() + RETRY)
        else:
            self._failing_since = math.inf
            self._loop.call_soon(self.on_faulty, error)

    def ask_soon(self) -> None:
        """Ask after what is under way in this turn of the event loop: an engine step brings the
        tokens of all its sequences one after the other.
        """
        if self._soon is None:
            self._soon = self._loop.call_soon(self._asked_soon)

    def _asked_soon(self) -> None:
        self._soon = None
        self.ask()

    def _until_it_waits(self) -> float:
        for _ in range(MOST_AT_ONCE):
            if (deadline := self._step()) is not None:
                return deadline
        raise DecisionError(f"got {MOST_AT_ONCE:,} decisions at one instant; expected a WaitUntil")

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self.ask) if deadline < math.inf else None
