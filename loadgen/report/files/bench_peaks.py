"""The two peaks in a `vllm bench serve` result: tokens in, and requests at work during, the
busiest whole second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from queueing.measurement.record import Record


def peaks(sent: Sequence[Record]) -> tuple[float | None, int]:
    """Tokens per second and requests, over seconds counted from the first sending; completed
    requests only.

    A request counts in every second that it touches, so the second number is above the greatest
    number at one time. The first is None where the instants of the tokens were not recorded.
    """
    done = [
        (r, r.sent_at, r.released_at)
        for r in sent
        if r.outcome == "completed" and r.sent_at is not None and r.released_at is not None
    ]
    if not done:
        return 0.0, 0
    origin = min(begin for _, begin, _ in done)
    seconds = int(np.ceil(max(end for _, _, end in done) - origin)) + 1
    requests = np.zeros(seconds, dtype=np.int64)
    for _, begin, end in done:
        requests[int(begin - origin) : int(end - origin) + 1] += 1
    instants = np.array([at for record, _, _ in done for at in record.token_at or ()])
    if not instants.size:
        return None, int(requests.max())
    tokens = np.bincount((instants - origin).astype(np.int64), minlength=seconds)
    return float(tokens[:seconds].max()), int(requests.max())
