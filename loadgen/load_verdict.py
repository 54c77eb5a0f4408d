"""Whether a load run was the run that was asked for: its arrivals audited, its lateness held against a budget.

A run outside its lateness budget is INVALID: its delays are partly those of the sender's machine. So is one whose
sender died. A loop that a limit on the requests at once has partly closed is said to be so: arrivals then wait for
departures, and its lateness holds those waits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadgen.run import LoadResult
from policies.text import SpecError
from queueing.arrival_audit import Audit, Budget, audit_arrivals

BUDGET = Budget(mean=0.001, p99=0.005)  # seconds
_PART = re.compile(r"(mean|p99)=([0-9.eE+-]+)(ms|s)")
_PER_SECOND = {"ms": 1e3, "s": 1.0}


def parse_budget(text: str) -> Budget:
    """`mean=1ms,p99=5ms`; what is left out stays as it is by default. Raises SpecError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or not math.isfinite(value := _number(match[2])) or value <= 0:
            raise SpecError(f"got lateness budget {text!r}; expected for example mean=1ms,p99=5ms")
        found[match[1]] = value / _PER_SECOND[match[3]]
    return Budget(mean=found.get("mean", BUDGET.mean), p99=found.get("p99", BUDGET.p99))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerdict:
    """What is said of a run as a whole."""

    audit: Audit | None  # of the instants of sending; None where nothing was sent
    loop: str  # open | partly closed | closed
    held: int  # requests that waited for a place
    missing: tuple[str, ...]

    @property
    def valid(self) -> bool:
        """Whether the lateness budget was kept and nothing is missing."""
        return not self.missing and self.audit is not None and self.audit.valid is True

    def lines(self) -> list[str]:
        """For a terminal, without the word INVALID."""
        told = [] if self.audit is None else [f"{'arrivals':<14}{self.audit.verdict}"]
        if self.loop != "open":
            told.append(f"{'loop':<14}{self._loop()}")
        return told + [f"{'missing':<14}{sentence}" for sentence in self.missing]

    def _loop(self) -> str:
        if self.loop == "closed":
            return "closed: who sends waits for answers, so a slow server is asked less and its delay is flattered"
        return f"partly closed: {self.held} requests waited for a place; the wait counts in their delay and lateness"

    def why_invalid(self) -> str:
        """One line."""
        if self.missing:
            return "INVALID: records are missing"
        if self.audit is None or self.audit.lateness is None:
            return "INVALID: nothing was sent"
        late = self.audit.lateness
        found = f"mean {late.mean * 1e3:.3g} ms, p99 {late.p99 * 1e3:.3g} ms"
        return f"INVALID: lateness {found}; the budget is mean {late.budget.mean * 1e3:g} ms, p99 {late.budget.p99 * 1e3:g} ms"

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "valid": self.valid,
            "loop": self.loop,
            "held": self.held,
            "missing": self.missing,
            "arrival_audit": None if self.audit is None else asdict(self.audit),
        }


def judge(result: LoadResult, *, process: str, asked_rate: float | None, budget: Budget = BUDGET) -> LoadVerdict:
    """Of a run whose arrivals were asked to be `process`."""
    closed = result.header.configuration.get("loop") == "closed"
    pairs = [(r.sent_at, r.intended_at) for r in result.records if r.sent_at is not None and r.intended_at is not None]
    return LoadVerdict(
        audit=_audit(pairs, process, asked_rate, budget) if pairs else None,
        loop="closed" if closed else "partly closed" if result.held else "open",
        held=result.held,
        missing=result.missing,
    )


def _audit(pairs: Sequence[tuple[float, float]], process: str, asked_rate: float | None, budget: Budget) -> Audit:
    sent, intended = np.array(pairs, dtype=np.float64).T
    judged = "poisson" if process == "poisson" and asked_rate is not None else process if process != "poisson" else "all at once"
    return audit_arrivals(sent, asked_rate=asked_rate if judged == "poisson" else None, intended=intended, process=judged, budget=budget)
