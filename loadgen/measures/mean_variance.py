"""What a load run shows about the variance of its mean delays without the delays: from its arrivals
and service times.

Only a server that takes one request at a time, fed by exponential gaps, has a formula for it
(queueing.measurement.delay_variance).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.measures.metrics import METRICS, began_at
from queueing.measurement.delay_variance import AsymptoticVariance, single_server_variance
from queueing.measurement.record import Record

CONTAIN_THE_DELAY = ("ttfb", "ttft", "e2el")
COMPLETED = 0.98  # share of the requests; what the others took of the server is not known


def variances_of_records(
    completed: Sequence[Record], sent: Sequence[Record]
) -> dict[str, AsymptoticVariance]:
    """By metric, of the completed requests in order of arrival among those sent; empty where
    there is no formula.
    """
    rows = [(began_at(record), record.queueing_delay, record.service_time) for record in completed]
    if len(completed) < COMPLETED * len(sent) or any(None in row for row in rows):
        return {}
    arrived_at, delays, service_times = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    theory = single_server_variance(arrived_at, delays, service_times)
    if theory is None:
        return {}
    found = {"queueing_delay": theory}
    for name in CONTAIN_THE_DELAY:
        durations = [METRICS[name].of(record) for record in completed]
        if None not in durations:
            found[name] = theory.with_rest(delays, np.array(durations, dtype=np.float64))
    return found
