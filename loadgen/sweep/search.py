"""Searches: the largest rate that stays stable, or that keeps an SLO, each probe a cell of the
journal.

A saturation probe sends at equal distances: whether a queue is stable depends on the mean rate
alone, and without the luck of Poisson arrivals a growth shows with a tenth of the requests. An SLO
probe sends Poisson arrivals, the same unit gaps at every rate, so that a higher rate is worse for
the same requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kendall.loadgen.gateway.gateway_process import GatewayError
from kendall.loadgen.sweep.journal import Event
from kendall.loadgen.sweep.run import Sweep
from kendall.loadgen.sweep.saturation import bisect, first_rate, predicted_rate, probe_cell
from kendall.loadgen.sweep.slo import ObservedSlo, slo_of
from kendall.policies.text import counted


@dataclass(slots=True)
class Search:
    """One policy, one limit, one goal."""

    sweep: Sweep
    policy: str
    limit: int | None
    goal: str  # as `Plan.searches` has it
    speeds: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    probes: int = 0

    @property
    def _slo(self) -> ObservedSlo | None:
        return slo_of(self.goal)

    async def run(self) -> None:
        """Probe until the bracket is narrow enough; write it down."""
        basis, tolerance = self.sweep.rig.basis, self.sweep.plan.tolerance
        model = basis.model(self.policy, self.limit)
        predicted = predicted_rate(model, self._slo)
        bracket = await bisect(self._passes, first_rate(model, predicted), tolerance)
        if not bracket.within(tolerance):
            self.notes.append(f"not within the tolerance after {counted(bracket.probes, 'probe')}")
        speed = float(np.mean(self.speeds)) if self.speeds else 1.0
        model_at_speed = basis.at_speed(speed).model(self.policy, self.limit)
        self.sweep.store.append(
            "search",
            policy=self.policy,
            max_output_tokens=self.limit,
            goal=self.goal,
            low=bracket.low,
            high=bracket.high if math.isfinite(bracket.high) else None,
            probes=bracket.probes,
            predicted=predicted,
            predicted_at_speed=predicted_rate(model_at_speed, self._slo),
            speed=speed,
            note="; ".join(dict.fromkeys(self.notes)) or None,
        )

    async def _passes(self, rate: float) -> bool:
        self.probes += 1
        cell = probe_cell(self.sweep.rig.basis, self.policy, self.limit, self.goal, rate)
        await self.sweep.measure(cell, f"{self.goal}, probe {self.probes}")
        known = self.sweep.store.progress.of(cell.name)
        if known.done is None:
            why = known.reason or "no reason known"
            raise GatewayError(
                f"the search for {self.goal} under {self.policy} stopped: {why}; the same command "
                "continues it"
            )
        self.speeds += [speed for speed in known.done["speeds"] if speed is not None]
        if cell.cut:
            self.notes.append(
                "probes shorter than they should be (--cell-limit): the bracket may be off"
            )
        return self.kept(known.done)

    def kept(self, done: Event) -> bool:
        """Whether a probe that ran to its end kept the SLO, or grew by less than half the
        tolerance.
        """
        if done["ended"] == "unstable":
            return False
        if self._slo is not None:
            return self._slo.holds(self.sweep.store.folder, done)
        if done["growth"] is None:
            self.notes.append("a probe was too short to be judged and passed")
            return True
        return float(done["growth"]["share"]) < self.sweep.plan.tolerance / 2


async def search_all(sweep: Sweep) -> None:
    """Every search of the plan that is not done; results go into the journal as `search`."""
    done = {
        (event["policy"], event["max_output_tokens"], event["goal"])
        for event in sweep.store.journal.events
        if event["event"] == "search"
    }
    for policy, limit, goal in sweep.plan.searches:
        if (policy, limit, goal) not in done:
            sweep.status.left_after = 0.0
            await Search(sweep, policy, limit, goal).run()
