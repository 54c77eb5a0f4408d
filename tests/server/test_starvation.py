"""Half an hour of short requests that would keep a long one waiting for ever, on virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from tests.server.harness import replay
from tests.virtual_time import run_virtual

SPAN = 1800.0  # seconds
LAW = LatencyModel(k2=0.25, k4=0.05)  # 0.3 s for one token
RATE = 1.2 / 0.3  # more than can be served
LONG = 40


def job(name: str, at: float, tokens: int) -> tuple[Request, int]:
    request = Request(
        id=name,
        arrived_at=at,
        prompt_tokens=4,
        max_output_tokens=64,
        predicted_output_tokens=float(tokens),
    )
    return request, tokens


def served_under(policy: str) -> dict[str, Record]:
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(1 / RATE, int(SPAN * RATE)))
    jobs = [job(str(place), float(at), 1) for place, at in enumerate(arrivals)]
    place = int(np.searchsorted(arrivals, 60.0))  # behind a minute of overload
    jobs.insert(place, job("long", 60.0, LONG))
    return {
        record.request_id: record for record in run_virtual(replay(parse_policy(policy), jobs, LAW))
    }


def overtakers(records: dict[str, Record]) -> list[float]:
    """How much later they arrived, seconds."""
    long = records["long"]
    assert long.first_dispatched_at is not None
    return [
        (record.arrived_at or 0.0) - 60.0
        for record in records.values()
        if (record.arrived_at or 0.0) > 60.0
        and (record.dispatched_at or np.inf) < long.first_dispatched_at
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "aging"), [("spjf", 0.0), ("spjf", 2.0), ("sprpt", 0.5), ("ljf", 0.5)]
)
def test_nobody_who_came_later_than_aging_allows_goes_first(order: str, aging: float) -> None:
    records = served_under(f"single:order={order},aging={aging:g}")
    assert {record.outcome for record in records.values()} == {"completed"}
    ahead = overtakers(records)
    bound = 0.0 if order == "ljf" else aging * (LONG - 1)
    assert max(ahead, default=0.0) <= bound + 1e-9
    if bound:
        assert len(ahead) > 0.8 * bound * RATE, "short ones do go first"


def test_without_aging_a_long_request_waits_to_the_end() -> None:
    records = served_under("single:order=spjf")
    started = records["long"].first_dispatched_at
    assert started is not None
    assert started > SPAN
