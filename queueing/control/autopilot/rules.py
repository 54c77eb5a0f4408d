"""The numbers of the controller: how much better, how sure, how often, how far from the edge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Gains and margins are fractions, times seconds."""

    threshold: float = 0.05  # a gain must exceed this, and its interval must exclude 0
    # seconds of mean delay that a change must save: less is not worth a new epoch
    floor: float = 1e-3
    # of the load: a setting must stay below 1 - margin at the upper ends of rate and speed
    margin: float = 0.02
    safer: float = 0.05  # by how much a setting must lower the load to count as the safe direction
    think_every: float = 60.0  # between two searches while the queue is stable
    cool_down: float = 60.0  # since the last change
    fewest: int = 200  # requests that ended since the last change
    after_rollback: float = 4.0  # times longer after a rollback
    rescue_gap: float = 5.0  # between two changes while the queue is unstable
    longest_trial: float = 300.0  # a change that could not be measured by then is kept
    # a setting that was rolled back is not tried again, and twice as long each time
    forbidden: float = 600.0
    forgiven: float = 0.3  # unless the load has changed by this much
    carried: float = 300.0  # for so long, rate and speed of an earlier epoch may stand in
    fewest_arrivals: int = 30  # before a rate counts as known
    fewest_ended: int = 10  # answers before lengths do
    unseen_speed: float = 0.1  # half width of the speed, relative, where no window showed it
    repeat: float = 300.0  # seconds between two equal things that were held back
