"""Decisions that fail: logged, asked for again, and a policy given up that keeps failing."""

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


class PolicyFailures:
    """A policy that keeps failing is asked again each RETRY seconds, and given up after FAULTY.

    There is a traceback of each failure; of one that comes again at most one in SILENCE seconds,
    with the number of those that were not logged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._now = loop, clock_of(loop)
        self.error: str | None = None  # of the last decision, if it failed
        self._failing_since = math.inf
        # called once with the error of a policy that fails for too long; it may change the policy
        self.on_faulty: Callable[[str], None] | None = None
        self.on_failure: Callable[[], None] | None = None  # at each decision that fails
        self._logged: dict[str, float] = {}  # when, by kind
        self._silent: dict[str, int] = {}  # failures since, by kind

    def failed(self, error: Exception) -> float | None:
        """Called where the error is handled. Returns the instant at which to ask again; None where
        the policy is given up, or was not what failed.
        """
        if self.error is None:
            self._failing_since = self._now() - getattr(error, "seconds", 0.0)
        self.error = str(error) or type(error).__name__
        self._log(self.error)
        if self.on_failure is not None:
            self.on_failure()
        if not isinstance(error, DecisionError):
            return None
        if self._now() - self._failing_since < FAULTY or self.on_faulty is None:
            return self._now() + RETRY
        self._failing_since = math.inf
        self._loop.call_soon(self.on_faulty, self.error)
        return None

    def _log(self, message: str) -> None:
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
