"""Asks a policy until it waits, and again when the instant comes that it named."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable

from kendall.policies import Decision, Policy, QueueState, format_policy
from kendall.policies.decision import LONGEST_DECISION, DecisionError, decide
from kendall.policies.text import counted
from kendall.server.runtime.clock import clock_of

log = logging.getLogger("kendall.batcher")
RETRY = 1.0  # seconds after which a policy that failed is asked again
FAULTY = 3.0  # seconds without a decision that can be carried out, after which it is given up
MOST_AT_ONCE = 5000  # decisions without a wait in between: more than any engine has places
SILENCE = 60.0  # seconds in which no second traceback of the same failure is logged
MOST_KINDS = 16  # of failures whose tracebacks are logged in that time
_OF_ONE = re.compile(r"\S*\d\S*")  # numbers and ids, in which messages of one failure differ


def decided(policy: Policy, clock: Callable[[], float], state: QueueState, now: float) -> Decision:
    """What a policy from outside decides now. Raises DecisionError, also where it takes too
    long.
    """
    decision = decide(policy, state, now)
    if (spent := clock() - now) > LONGEST_DECISION:
        error = DecisionError(
            f"policy {format_policy(policy)} took {spent:.1f} s to decide; expected less than "
            f"{LONGEST_DECISION:g} s, as every request waits meanwhile"
        )
        error.seconds = spent
        raise error
    return decision


class _FailureLog:
    """A traceback of each failure; of one that comes again at most one in SILENCE seconds, with
    the number of those that were not logged.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._logged: dict[str, float] = {}  # when, by kind
        self._silent: dict[str, int] = {}  # failures since, by kind

    def failed(self, message: str) -> None:
        """Called where the error is handled."""
        now, kind = self._now(), _OF_ONE.sub("#", message)
        self._logged = {each: at for each, at in self._logged.items() if now - at < SILENCE}
        if kind in self._logged or len(self._logged) >= MOST_KINDS:
            kind = kind if kind in self._logged else ""  # one count for all beyond the bound
            self._silent[kind] = self._silent.get(kind, 0) + 1
            return
        self._logged[kind] = now
        log.exception(
            "a dispatch decision failed%s; the queue continues with the next event",
            self._not_logged(kind),
        )

    def _not_logged(self, kind: str) -> str:
        silent = self._silent.pop(kind, 0) + self._silent.pop("", 0)
        if not silent:
            return ""
        return f" (and {counted(silent, 'time')} since the last traceback, not logged)"


class DecisionLoop:
    """`step` carries out one decision and returns None, or the instant at which the policy wants
    to be asked again (infinity: after the next event). `policy_text` names the policy in errors.
    """

    def __init__(self, step: Callable[[], float | None], policy_text: Callable[[], str]) -> None:
        self._step, self._policy_text = step, policy_text
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._asking = self._again = False
        self._now = clock_of(self._loop)
        self._failures = _FailureLog(self._now)
        self.dispatched: set[str] = set()  # requests, since the policy was asked
        self._failing_since = math.inf
        self.failing: str | None = None  # the error of the last decision, if it failed
        # called once with the error of a policy that fails for too long; it may change the policy
        self.on_faulty: Callable[[str], None] | None = None
        self.on_failure: Callable[[], None] | None = None  # at each decision that fails

    def ask(self) -> None:
        """Carry out decisions until the policy waits. A call from within a decision makes the
        outer one ask again.
        """
        self._again = True
        if self._asking:
            return
        self._asking = True
        self.dispatched.clear()
        try:
            while self._again:
                self._again = False
                deadline = self._step()
                if deadline is None:
                    deadline = self._until_it_waits()
                if deadline < math.inf or self._timer is not None:
                    self._set_timer(deadline)
            self.failing = None
        except Exception as error:  # noqa: BLE001 - logged, and counted
            self._failed(error)
        finally:
            self._asking = False

    def _failed(self, error: Exception) -> None:
        if self.failing is None:
            self._failing_since = self._now() - getattr(error, "seconds", 0.0)
        self.failing = str(error) or type(error).__name__
        self._failures.failed(self.failing)
        if self.on_failure is not None:
            self.on_failure()
        if isinstance(error, DecisionError):
            self._ask_again(self.failing)

    def put_back(self, request_id: str) -> None:
        """The engine did not begin it: it may be dispatched again at once."""
        self.dispatched.discard(request_id)

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
        raise DecisionError(
            f"policy {self._policy_text()}: got {MOST_AT_ONCE:,} decisions at one instant; "
            "expected a WaitUntil"
        )

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self.ask) if deadline < math.inf else None
