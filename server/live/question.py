"""What the predicting process is asked: light to import, so that the gateway itself loads no
numerics it does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

from queueing.control.autopilot.bounds import Bounds
from queueing.estimation.window.feed import News
from queueing.latency.law import LatencyModel
from queueing.optimization.forecast import Knobs

ENOUGH = 50  # requests of the epoch that met their end, before anything is predicted from them


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """One look: what was seen, the calibrated law, and what bounds the queue."""

    news: News  # since the question before
    at: float
    window: float  # seconds
    shape: LatencyModel
    knobs: Knobs  # in force
    max_num_seqs: int
    longest: int  # answer that the engine can give, tokens
    patience: float | None = None  # seconds
    bounds: Bounds | None = None  # of the autopilot; None: those it has
    # largest batch and longest answer that the law was measured on
    reach: tuple[int, int] | None = None
    waiting: int = 0
    saving: bool = False  # the estimates are to be saved
    waiting_before: int = 0  # requests that waited when the epoch began
    in_service: tuple[tuple[float, int], ...] = ()  # dispatched at, output tokens so far
    ended: tuple[
        tuple[float, int], ...
    ] = ()  # the same of those whose own end has come, in padded batches that go on
    # the autopilot decides with this look; who only asks for advice changes nothing
    decides: bool = True
