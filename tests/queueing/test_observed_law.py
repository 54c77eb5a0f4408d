"""The law of an engine that is only watched, from the times of its requests: by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from kendall.queueing.estimation.served_times import ObservedLaw, ServedTimes
from kendall.queueing.estimation.speed.observed_law import observed_law
from kendall.queueing.latency.law import LatencyModel

LAW = LatencyModel(k1=0.004, k3=0.002, k4=0.02, kp=0.0001)
Row = tuple[float, ...]


def served(rows: Sequence[Row], **more: float) -> ServedTimes:
    """Of rows (server, queued, started, first, last, prompt, output), which arrived as they began
    to wait; `held`: seconds beyond the time from the first step to the last.
    """
    server, queued, started, first, last, prompts, outputs = np.array(rows, dtype=float).T
    return ServedTimes(
        arrived=started - queued,
        queued=queued,
        started=started,
        first=first,
        last=last,
        held=last - started + more.get("held", 0.0),
        prompts=prompts,
        outputs=outputs,
        server=server.astype(np.int64),
    )


def groups(
    sizes: Sequence[int],
    law: LatencyModel = LAW,
    *,
    prompts: Sequence[int] = (100, 300, 50, 200),
    outputs: Sequence[int] = (20, 35, 50),
    servers: int = 1,
) -> list[Row]:
    """Requests that begin and end together, one group after the other on each server."""
    rows, at = [], [0.0] * servers
    for number, size in enumerate(sizes):
        server = number % servers
        prompt = prompts[number % len(prompts)]
        output = outputs[number % len(outputs)]
        first = at[server] + law.step(size) + law.admission(size, size * prompt)
        last = first + (output - 1) * law.step(size)
        rows += [(server, 0.0, at[server], first, last, prompt, output)] * size
        at[server] = last + 1.0
    return rows


def fitted(rows: Sequence[Row], **more: float) -> ObservedLaw:
    found = observed_law(served(rows, **more), np.random.default_rng(1))
    assert found is not None
    return found


@pytest.mark.parametrize("servers", [1, 2])
def test_requests_that_share_every_step_have_the_law_of_the_engine(servers: int) -> None:
    """Each row holds the equations of the module exactly, but those at both ends, whose neighbours
    are not all known.
    """
    sizes = [5 - number * 7 % 5 for number in range(64)]
    found = fitted(groups(sizes, servers=servers)[3:-1], held=0.03)
    for name in ("k1", "k3", "k4", "kp"):
        value = getattr(LAW, name)
        assert getattr(found.law, name) == pytest.approx(value, rel=1e-6)
        assert found.intervals[name] == pytest.approx((value, value), rel=1e-6)
    assert found.error == pytest.approx(0.0, abs=1e-8)
    assert found.requests == sum(sizes) - 4
    assert found.doubts == ()
    assert found.law.turnaround == pytest.approx(0.03, rel=1e-6), "nothing else was in service"


def test_who_enters_holds_up_those_who_are_there() -> None:
    """Each step takes the same time, however many requests are in it. A token takes longer only
    where another request enters, by the time of that request's prompt.
    """
    law = LatencyModel(k1=0.004, k4=0.02, kp=0.0001)
    rows, at = [], 0.0
    for number in range(80):
        prompt, later, tokens = 100 + 37 * (number % 7), 300 - 41 * (number % 5), 20 + number % 9
        first = at + 0.02 + 0.004 + 0.0001 * prompt
        enters = first + 0.02 * (5 + number % 6)
        begun = enters + 0.02 + 0.004 + 0.0001 * later
        last = first + 0.02 * (tokens - 1) + 0.004 + 0.0001 * later
        rows.append((0, 0.0, at, first, last, prompt, tokens))
        rows.append((0, 0.0, enters, begun, begun + 0.02 * 3, later, 4))
        at = last + 0.5
    found = fitted(rows, held=0.03)
    assert found.law.k3 == pytest.approx(0.0, abs=1e-9)
    for name in ("k1", "k4", "kp"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-6)
    # one of two finds the other in service, and waits for half a step of it
    assert found.law.turnaround == pytest.approx(0.03 - 0.01 / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "doubts"),
    [
        (
            groups([3] * 40),
            ["the number in service never varied: k3 is taken as 0, and what more slots"],
        ),
        (groups([1, 2, 3, 4] * 15, prompts=(100,)), ["prompts are alike: kp is a part of k1"]),
    ],
)
def test_what_cannot_be_told_apart_is_said(rows: list[Row], doubts: list[str]) -> None:
    found = fitted(rows)
    assert [doubt.split(" would")[0] for doubt in found.doubts] == doubts
    assert (found.law.k3 == 0) == ("never varied" in doubts[0])
    assert (found.law.kp == 0) == ("alike" in doubts[0])
    assert found.error < 0.01


@pytest.mark.parametrize(("spread", "trade", "some"), [(0.2, True, False), (0.7, False, True)])
def test_coefficients_that_trade_or_are_vague_are_named(
    spread: float, trade: bool, some: bool
) -> None:
    """Only short answers were in other company."""
    rng = np.random.default_rng(2)
    rows, sizes = [], [3, 2, 3, 4] * 20
    exact = groups(sizes, outputs=(60, 2))
    noise = np.repeat(np.exp(spread * rng.standard_normal((len(sizes), 2))), sizes, axis=0)
    for (server, queued, started, first, last, *rest), (one, other) in zip(
        exact, noise, strict=True
    ):
        later = started + (first - started) * one
        rows.append((server, queued, started, later, later + (last - first) * other, *rest))
    found = fitted(rows)
    trading = [doubt for doubt in found.doubts if "trade" in doubt]
    assert [doubt.split(" (")[0] for doubt in trading] == (
        ["k3 and k4 trade against each other"] if trade else []
    )
    assert all(doubt.endswith("): the number in service varied too little") for doubt in trading)
    told = [doubt for doubt in found.doubts if "between" in doubt]
    vague = [
        f"{name} is between {low:.2g} and {high:.2g} s only"
        for name, (low, high) in found.intervals.items()
        if (high - low) / 2 > getattr(found.law, name) / 2
    ]
    assert told == vague
    assert bool(vague) is some


@pytest.mark.parametrize(("number", "known"), [(59, False), (60, True)])
def test_a_law_needs_sixty_requests(number: int, known: bool) -> None:
    """Two rows each, a prefill and a decode."""
    found = observed_law(served(groups([1] * number, outputs=(2,))), np.random.default_rng(1))
    assert (found is not None) is known


def test_requests_of_a_token_have_a_prefill_only() -> None:
    rows = groups([1] * 140, outputs=(1,))
    assert observed_law(served(rows[:119]), np.random.default_rng(1)) is None
    assert observed_law(served(rows), np.random.default_rng(1)) is not None


# ---- slots ----


def stays(*spans: tuple[float, float], queued: Sequence[float] = (), server: int = 0) -> list[Row]:
    """Requests in an engine from one instant to another, of eleven tokens each."""
    waits = [*queued, *[0.0] * (len(spans) - len(queued))]
    return [
        (server, wait, begin, begin + 0.1, end, 1, 11)
        for (begin, end), wait in zip(spans, waits, strict=True)
    ]


def test_a_step_is_a_token_behind_the_first() -> None:
    rows = [(0, 0.0, 0.0, 1.0, 3.0, 1, 11), (0, 0.0, 0.0, 1.0, 5.0, 1, 3), (0, 0, 0, 1, 1, 1, 1)]
    assert served(rows).step == pytest.approx(6.0 / 12)
    assert served(rows[2:]).step == 0


def test_who_leaves_as_another_begins_is_not_beside_it() -> None:
    rows = [*stays((0, 2), (2, 4), (3, 5)), *stays((0, 4), (1, 4), (2, 4), server=1)]
    assert served(rows[:3]).most_in_service() == 2
    assert served(rows).most_in_service() == 3


def test_slots_are_the_most_that_ran_while_something_waited() -> None:
    """Two at a time, of ten requests of 2 s; the others wait."""
    spans = [(float(number), number + 2.0) for number in range(10)]
    rows = stays(*spans, queued=[0.0, 0.0, *[1.5] * 8])
    assert served(rows).slots() == 2
    assert served([*rows, *stays(*spans, queued=[0.0] * 7 + [0.15] * 3, server=1)]).slots() == 2
    assert served(stays(*spans, queued=[0.0] * 8 + [1.5] * 2)).slots() is None
    assert served(stays(*spans, queued=[0.0] * 7 + [1.5] * 3)).slots() == 2
    assert served(stays(*spans, queued=[0.18] * 10)).slots() is None, "none longer than a step"


@pytest.mark.parametrize(("beside", "slots"), [(1.5, 2), (3.0, 3)])
def test_a_number_that_was_there_for_a_moment_is_not_the_slots(beside: float, slots: int) -> None:
    """Two for 20 s while another waits, three for a twentieth or a tenth of that; stays count
    shorter by a step of 0.19 s altogether.
    """
    rows = stays((0, 20), (0, 20), (8, 8 + beside), (20, 30), (20, 30), (20, 30))
    waits = [0.0, 0.0, 0.0, 19.5, 19.5, 19.5]
    found = served([(each[0], wait, *each[2:]) for each, wait in zip(rows, waits, strict=True)])
    assert math.isfinite(found.step)
    assert found.slots() == slots
