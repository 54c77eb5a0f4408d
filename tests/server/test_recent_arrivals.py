"""The gauge of the arrival rate counts calls; what waits and fills batches are their sequences."""

from __future__ import annotations

import asyncio

import pytest

from kendall.queueing.estimation.window.producer import CallGroups
from kendall.server.live.activity import ArrivalActivity
from kendall.server.page.state import COLUMNS, row
from tests.server.asgi import call, completion, running
from tests.virtual_time import run_virtual


def test_calls_of_several_sequences_are_one_arrival_each() -> None:
    async def main() -> tuple[str, dict[str, float | None], dict[str, float]]:
        async with running() as (app, gateway):
            begun = gateway.now()
            for body in (completion(n=3), completion(prompt=["a", "b"], n=2), completion()):
                await call(app, "POST", "/v1/completions", body)
            await asyncio.sleep(30)
            text = (await call(app, "GET", "/metrics")).body.decode()
            seconds = gateway.now() - begun
            rates = {"calls": 3 / seconds, "sequences": 8 / seconds}
            return text, dict(zip(COLUMNS, row(gateway, 1.0), strict=True)), rates

    text, shown, rates = run_virtual(main())
    line = next(line for line in text.splitlines() if line.startswith("kendall_arrival_rate "))
    assert float(line.split()[1]) == pytest.approx(rates["calls"], rel=0.01)
    assert shown["arrival_rate"] == pytest.approx(rates["calls"], rel=0.01)
    assert shown["sequence_rate"] == pytest.approx(rates["sequences"], rel=0.01)


def recent_with(*sequences: tuple[float, str | None]) -> ArrivalActivity:
    recent, groups = ArrivalActivity(0.0, 60.0), CallGroups()
    for at, name in sequences:
        recent.saw(at, begins_call=groups.begins(at, name))
    return recent


def test_calls_of_one_id_at_two_instants_are_two_and_sequences_without_a_call_are_one_each() -> (
    None
):
    recent = recent_with(
        (1.0, "a"), (1.0, "a"), (2.0, "a"), (3.0, None), (3.0, None), (4.0, "b"), (4.0, "c")
    )
    assert recent.call_rate(10.0) == pytest.approx(0.6)
    assert recent.sequence_rate(10.0) == pytest.approx(0.7)


def test_a_minute_later_they_are_forgotten_with_all_their_sequences() -> None:
    recent = recent_with(*[(1.0, "a")] * 4, (50.0, "b"))
    assert (recent.call_rate(60.0), recent.sequence_rate(60.0)) == pytest.approx((2 / 60, 5 / 60))
    assert (recent.call_rate(100.0), recent.sequence_rate(100.0)) == pytest.approx((1 / 60, 1 / 60))
    assert (recent.call_rate(200.0), recent.sequence_rate(200.0)) == (0.0, 0.0)
    recent.saw(300.0, begins_call=True)
    recent.saw(300.0, begins_call=False)
    assert recent.sequence_rate(300.0) == pytest.approx(2 / 60)


def test_what_is_kept_does_not_grow_where_nobody_asks() -> None:
    recent = ArrivalActivity(0.0, 60.0)
    for number in range(20_000):
        recent.saw(float(number), begins_call=True)
        assert len(recent._sequences) <= 2000
        assert len(recent._calls) <= 2000
    assert recent.call_rate(20_000.0) == pytest.approx(1.0)
