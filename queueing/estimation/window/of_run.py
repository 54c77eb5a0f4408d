"""A run's requests as a window that began with its epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kendall.queueing.estimation.window.snapshot import ENDED, FIELDS, WITHOUT_LENGTH, Snapshot
from kendall.queueing.measurement.recursion import Served


def window_of_run(requests: Sequence[Served], shortest_delay: float = math.inf) -> Snapshot:
    """Those of one policy and epoch, in order of arrival, rows in that order; who was cut short
    says nothing of a length. `shortest_delay`: seconds, of all requests since the gateway started.
    """
    columns = {
        "arrived_at": [r.arrived_at for r in requests],
        "dispatched_at": [r.dispatched_at for r in requests],
        "server_free_at": [r.server_free_at for r in requests],
        "released_at": [_known(r.released_at if r.completed else None) for r in requests],
        "batch_id": [r.batch_id for r in requests],
        "batch_size": [r.batch_size for r in requests],
        "server_id": [r.server_id for r in requests],
        "prompt_tokens": [r.prompt_tokens for r in requests],
        "output_tokens": [r.output_tokens for r in requests],
        "ending": [ENDED if r.completed and r.output_tokens else WITHOUT_LENGTH for r in requests],
        "epoch": [r.epoch for r in requests],
        "predicted_tokens": [_known(r.predicted_output_tokens) for r in requests],
        "preemptions": [r.preemptions for r in requests],
        "max_output_tokens": [_known(r.max_output_tokens) for r in requests],
    }
    rows = np.full((len(requests), len(FIELDS)), math.nan)
    for place, name in enumerate(FIELDS):
        if name in columns:
            rows[:, place] = columns[name]
    return Snapshot(
        policy=requests[0].policy,
        epoch=requests[0].epoch,
        epoch_at=-math.inf,
        start=-math.inf,
        now=max(request.server_free_at for request in requests),
        arrivals=np.array(columns["arrived_at"], dtype=np.float64),
        rows=rows,
        servers=1 + max(request.server_id for request in requests),
        shortest_delay=shortest_delay,
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value
