"""The wait of the k-th in the queue: by hand where it is certain, and against simulated requests
with what each found at its arrival.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from kendall.policies import Fixed, parse_policy
from kendall.queueing.control.service_ahead import service_ahead
from kendall.queueing.control.wait_ahead import (
    BatchFormation,
    BatchInService,
    BatchService,
    Followed,
    SlotService,
    Wait,
    WaitForFormation,
    WaitLaw,
    batch_formation,
)
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=0.12, turnaround=1.55e-3)
CERTAIN = BatchService(largest=4, servers=1, sizes=(1, 4), means=(1.0, 2.5), variances=(0.0, 0.0))


def test_an_exponential_service_forgets_and_a_certain_one_counts_down() -> None:
    exponential = Wait(2.0, 4.0)
    assert exponential.after(5.0).mean == pytest.approx(2.0)
    assert exponential.after(5.0).variance == pytest.approx(4.0)
    assert Wait(2.0).after(0.5) == Wait(1.5)
    assert Wait(2.0).after(3.0) == Wait(0.0)
    assert exponential.within(2.0) == pytest.approx(1 - math.exp(-1))
    assert exponential.quantile(0.99) == pytest.approx(2 * math.log(100))


@pytest.mark.parametrize("mean", [0.01, 1.0, 100.0])
def test_a_wait_is_certain_below_a_relative_spread_and_never_over_before_it_began(
    mean: float,
) -> None:
    assert Wait(mean, 0.99e-9 * mean**2).certain
    uncertain = Wait(mean, 1.01e-9 * mean**2)
    assert not uncertain.certain
    assert [each.within(-1e-3) for each in (uncertain, Wait(mean), Wait(0.0))] == [0.0] * 3
    assert (Wait(0.0).within(0.0), Wait(mean).within(mean)) == (1.0, 1.0)


@pytest.mark.parametrize(("mean", "variance"), [(2.0, 1.0), (2.0, 12.0)])
@pytest.mark.parametrize("elapsed", [0.0, 0.7, 5.0])
def test_what_is_left_has_the_moments_of_the_law_beyond(
    mean: float, variance: float, elapsed: float
) -> None:
    law = scipy.stats.gamma(mean**2 / variance, scale=variance / mean)
    going = law.sf(elapsed)
    first = scipy.integrate.quad(law.sf, elapsed, math.inf)[0] / going
    second = scipy.integrate.quad(lambda x: 2 * (x - elapsed) * law.sf(x), elapsed, math.inf)[0]
    left = Wait(mean, variance).after(elapsed)
    assert (left.mean, left.variance) == pytest.approx((first, second / going - first**2))


def test_a_wait_with_a_time_behind_it() -> None:
    """The time behind it by the means of its 32 parts of equal chance."""
    wait, after = Wait(2.0, 3.0), Wait(1.5, 0.6)
    law = scipy.stats.gamma(1.5**2 / 0.6, scale=0.6 / 1.5)
    ends = law.ppf(np.arange(33) / 32)
    parts = [
        32 * scipy.integrate.quad(lambda x: x * law.pdf(x), low, high)[0]
        for low, high in itertools.pairwise(ends)
    ]
    own, found = scipy.stats.gamma(4 / 3, scale=3 / 2), Followed(wait, after)
    assert found.mean == pytest.approx(3.5)
    for seconds in (0.5, 2.0, 9.0):
        expected = float(np.mean(own.cdf(seconds - np.array(parts))))
        assert found.within(seconds) == pytest.approx(expected, rel=1e-6)
    for level in (0.01, 0.5, 0.999):
        assert found.within(found.quantile(level)) == pytest.approx(level, abs=1e-7)


def test_a_certain_time_behind_a_wait_moves_its_law() -> None:
    wait = Wait(2.0, 3.0)
    moved = Followed(wait, Wait(1.5))
    assert moved.within(4.0) == wait.within(2.5)
    assert moved.quantile(0.9) == wait.quantile(0.9) + 1.5
    nobody = WaitForFormation(Wait(1.0), BatchFormation(1, 0.0, math.inf))
    assert math.isinf(Followed(nobody, Wait(1.0, 1.0)).quantile(0.5))


@pytest.mark.parametrize(
    ("server", "left", "mean"),
    [
        (Wait(0.0), math.inf, 2.0),
        (Wait(0.0), 3.0, 2 * (1 - math.exp(-1.5))),
        (Wait(1.0), math.inf, 1 + 2 * math.exp(-0.5)),
        (Wait(1.0), 3.0, 1 + 2 * (math.exp(-0.5) - math.exp(-1.5))),
        (Wait(1.0, 1.0), math.inf, 1 + 2 - 1 / 1.5),
        (Wait(3.0), 2.5, 3.0),
    ],
)
def test_the_longer_of_a_server_and_of_the_next_arrival(
    server: Wait, left: float, mean: float
) -> None:
    """Exponential arrivals at 0.5/s: the mean and the law of a maximum."""
    both = WaitForFormation(server, BatchFormation(1, 0.5, left))
    assert both.mean == pytest.approx(mean, rel=3e-3)
    for seconds in (0.5, 1.2, 2.9):
        formed = 1.0 if seconds >= left else 1 - math.exp(-0.5 * seconds)
        assert both.within(seconds) == pytest.approx(server.within(seconds) * formed)
    for level in (0.5, 0.95):
        found = both.quantile(level)
        assert both.within(found) >= level - 1e-9
        assert both.within(found * (1 - 1e-6)) <= level


def test_a_batch_that_nobody_completes_waits_for_its_time_or_for_ever() -> None:
    for left in (math.inf, 4.0):
        alone = WaitForFormation(Wait(1.0), BatchFormation(2, 0.0, left))
        assert alone.mean == left
        assert alone.quantile(0.9) == pytest.approx(left)


def test_what_is_left_of_a_service_is_finite_however_late_it_is() -> None:
    late = Wait(1.0, 0.01).after(50.0)
    assert 0 < late.mean < 1


@pytest.mark.parametrize(
    ("place", "size", "elapsed", "expected"),
    [
        (0, 4, 0.5, 2.0),  # into the next batch
        (3, 4, 0.5, 2.0),  # its last member
        (4, 4, 0.5, 4.5),  # one full batch in between
        (11, 4, 0.5, 7.0),
        (0, 1, 0.25, 0.75),  # a smaller one is in service
        (0, 2, 0.0, 1.5),  # between known sizes: on the line
    ],
)
def test_batches_before_it_are_full_ones(
    place: int, size: int, elapsed: float, expected: float
) -> None:
    assert CERTAIN.wait(place, [BatchInService(size, elapsed)]).mean == pytest.approx(expected)


def test_an_empty_server_keeps_nobody_waiting() -> None:
    assert CERTAIN.wait(0, []) == Wait(0.0)
    assert CERTAIN.wait(4, []).mean == 0.0 + 2.5


def test_several_servers_take_turns() -> None:
    two = BatchService(largest=1, servers=2, sizes=(1,), means=(1.0,), variances=(0.0,))
    busy = [BatchInService(1, 0.2), BatchInService(1, 0.7)]
    assert [two.wait(place, busy).mean for place in range(4)] == pytest.approx([0.3, 0.8, 1.3, 1.8])


def test_free_slots_start_at_once_and_full_ones_by_departures() -> None:
    slots = SlotService(slots=4, throughput=2.0)
    assert slots.wait(1, taken=2) == Wait(0.0)
    assert slots.wait(2, taken=2).mean == pytest.approx(0.5)
    third = slots.wait(2, taken=4)
    assert (third.mean, third.variance) == pytest.approx(
        (1.5, 0.75)
    )  # Erlang: three departures at rate 2
    alone = SlotService(slots=1, throughput=2.0, scv=0.0)
    first = alone.wait(0, taken=1)  # of a certain service any part, as likely as any other
    assert (first.mean, first.variance) == pytest.approx((0.25, 0.5**2 / 12))
    pair = SlotService(slots=2, throughput=2.0, scv=0.0).wait(1, taken=2)
    assert (pair.mean, pair.variance) == pytest.approx(
        (1.75 / 2, (0.5 * 0.75**2 + 0.5 / 12 + 0.25) / 4)
    )


def test_the_backlog_is_gone_when_its_batches_are_over() -> None:
    assert CERTAIN.until_gone(1, [BatchInService(4, 0.5)]) == pytest.approx(2.0)
    assert CERTAIN.until_gone(5, [BatchInService(4, 0.5)]) == pytest.approx(4.5)
    idle = BatchService(largest=1, servers=2, sizes=(1,), means=(1.0,), variances=(0.0,))
    assert idle.until_gone(1, [BatchInService(1, 0.2)]) == pytest.approx(0.8), (
        "not the idle server's"
    )
    assert idle.until_gone(1, []) == pytest.approx(0.5), "two at a time"


def test_of_several_batches_in_service_as_many_end_as_have_to() -> None:
    two = BatchService(largest=4, servers=2, sizes=(1, 4), means=(1.0, 1.0), variances=(0.0, 0.0))
    busy = [BatchInService(1, 0.2), BatchInService(3, 0.7)]
    assert [two.until_gone(count, busy) for count in (1, 3, 4, 5, 9)] == pytest.approx(
        [0.3, 0.3, 0.8, 1.3, 1.8]
    )
    assert SlotService(slots=4, throughput=2.0).until_gone(3) == pytest.approx(1.5)


def test_company_is_waited_for_beside_the_server() -> None:
    """Erlang arrivals or max_wait, whichever is sooner, and never less than the server takes."""
    assert batch_formation(
        place=5, waiting=6, batch_size=4, rate=2.0, left=math.inf
    ) == BatchFormation(2, 2.0, math.inf)
    assert batch_formation(place=3, waiting=4, batch_size=4, rate=2.0, left=math.inf) is None
    assert batch_formation(place=0, waiting=6, batch_size=4, rate=2.0, left=math.inf) is None
    assert WaitForFormation(Wait(0.0), BatchFormation(2, 2.0, math.inf)).mean == pytest.approx(
        1.0, rel=1e-3
    )
    assert WaitForFormation(Wait(0.0), BatchFormation(9, 0.001, 0.3)).mean == pytest.approx(0.3)
    assert WaitForFormation(Wait(5.0), BatchFormation(1, 100.0, math.inf)).mean == pytest.approx(
        5.0
    )
    one = WaitForFormation(
        Wait(1.0, 1.0), BatchFormation(1, 1.0, math.inf)
    )  # the longer of two exponentials
    assert one.mean == pytest.approx(1.5, rel=1e-3)
    assert one.within(one.quantile(0.9)) == pytest.approx(0.9)
    assert WaitForFormation(Wait(1.0), BatchFormation(9, 0.001, 0.3)).quantile(
        1.0
    ) == pytest.approx(1.0)
    assert BatchFormation(9, 0.001, 0.3).within(0.3) == 1.0
    assert WaitForFormation(Wait(0.0), BatchFormation(1, 0.0, math.inf)).mean == math.inf


def _waits(
    records: list[Record], service: BatchService | SlotService, policy: object, rate: float
) -> list[tuple[float, WaitLaw]]:
    """Every request's delay, and its wait by what it found at its arrival."""
    arrived, begun, free = (
        np.array([getattr(r, f) for r in records])
        for f in ("arrived_at", "dispatched_at", "server_free_at")
    )
    found = []
    for record in records[len(records) // 10 : -200]:
        at = record.arrived_at
        assert at is not None
        assert record.queueing_delay is not None
        place = int(
            np.count_nonzero((arrived < at) & (begun >= at))
        )  # those that its own arrival starts with it waited until then
        inside = np.flatnonzero((begun < at) & (free > at))
        wait: WaitLaw
        if isinstance(service, SlotService):
            wait = service.wait(place, len(inside))
        else:
            served = (
                [BatchInService(len(inside), at - float(begun[inside[0]]))] if len(inside) else []
            )
            wait = service.wait(place, served)
            if isinstance(policy, Fixed):
                first = np.sort(arrived[(arrived <= at) & (begun >= at)])[
                    place // service.largest * service.largest
                ]
                together = batch_formation(
                    place, place + 1, service.largest, rate, float(first) + policy.max_wait - at
                )
                wait = wait if together is None else WaitForFormation(wait, together)  # type: ignore[arg-type]
        found.append((record.queueing_delay, wait))
    return found


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("text", "load", "tolerance"),
    [
        pytest.param("single", 0.8, 0.04, marks=pytest.mark.slow),
        ("capped:max_batch_size=4", 0.8, 0.04),
        pytest.param("dynamic", 0.6, 0.04, marks=pytest.mark.slow),
        pytest.param("elastic:max_batch_size=4", 0.8, 0.04, marks=pytest.mark.slow),
        pytest.param("fixed:batch_size=4", 0.7, 0.05, marks=pytest.mark.slow),
        ("fixed:batch_size=4,max_wait=0.05", 0.7, 0.08),
        ("continuous:max_batch_size=4", 0.9, 0.08),
        pytest.param("continuous:max_batch_size=16", 0.95, 0.08, marks=pytest.mark.slow),
    ],
)
def test_the_mean_and_the_levels_are_those_of_simulated_requests(
    text: str, load: float, tolerance: float
) -> None:
    """Mean over requests within the tolerance; the 50 % and 90 % levels are exceeded about as
    often as they say.
    """
    policy = parse_policy(text)
    model = Queue.read(
        policy, parse_distribution("geometric:mean=24").clip(200), LAW, max_num_seqs=32
    )
    rate = load * model.largest_stable_rate
    jobs, rngs = draw_jobs(model, rate, 5000, np.random.SeedSequence(7))
    records = sorted(
        simulate_trace(policy, jobs, SimulatedEngine(LAW, max_batch_size=32), rngs),
        key=lambda record: record.arrived_at or 0.0,
    )
    waits = _waits(records, service_ahead(model), policy, rate)
    observed = np.array([delay for delay, _ in waits])
    predicted = np.array([wait.mean for _, wait in waits])
    assert observed.mean() > 0
    assert predicted.mean() == pytest.approx(observed.mean(), rel=tolerance)
    waiting = [(delay, wait) for delay, wait in waits if wait.mean > 1e-3]
    assert len(waiting) > 2000
    for level in (0.5, 0.9):
        over = np.array(
            [delay - wait.quantile(level) for delay, wait in waiting[::4]]
        )  # a level may be an atom: many end with `max_wait`
        assert np.mean(over < -1e-6) < level + 0.08
        assert np.mean(over < 1e-6) > level - 0.08


@pytest.mark.parametrize(
    "text",
    [
        "single",
        "capped:max_batch_size=6",
        "elastic:max_batch_size=16",
        "fixed:batch_size=8",
        "continuous:max_batch_size=8",
    ],
)
def test_a_model_serves_ahead_at_its_largest_stable_rate(text: str) -> None:
    """What is drained per second while the queue is long is the capacity that the predictions
    use, of all servers together.
    """
    lengths = parse_distribution("uniform:low=1,high=40")
    model = Queue.read(text, lengths, LAW, servers=2, max_num_seqs=32)
    service = service_ahead(model)
    if isinstance(service, SlotService):
        assert service.throughput == pytest.approx(model.largest_stable_rate)
        assert service.slots == 16
    else:
        assert service.servers * service.largest / service.means[-1] == pytest.approx(
            model.largest_stable_rate
        )
        assert service.sizes[-1] == service.largest == model.bound
        assert service.time(1).mean == pytest.approx(model.batch_time.mean(1))
        between = service.time(3).mean if service.largest >= 4 else model.batch_time.mean(3)
        assert between == pytest.approx(model.batch_time.mean(3), rel=0.02)


@pytest.mark.parametrize(
    "text", ["single", "continuous:max_batch_size=8", "capped:max_batch_size=6"]
)
def test_the_pace_of_a_request_has_the_mean_of_the_service(text: str) -> None:
    """And of one token it is the time to the first; of batches there is none."""
    lengths = parse_distribution("uniform:low=1,high=40")
    model = Queue.read(text, lengths, LAW, max_num_seqs=32)
    service = service_ahead(model)
    if isinstance(service, BatchService) and service.largest > 1:
        assert service.pace is None
        return
    assert service.pace is not None
    mean = (
        service.slots / service.throughput
        if isinstance(service, SlotService)
        else service.time(1).mean
    )
    assert service.pace.seconds(lengths.mean) == pytest.approx(mean)
    assert service.pace.seconds(1) == pytest.approx(service.first_token)


def test_the_pace_of_single_tokens_is_that_of_full_slots() -> None:
    model = Queue.read(
        "continuous:max_batch_size=8", parse_distribution("deterministic:value=1"), LAW
    )
    pace = service_ahead(model).pace
    assert pace is not None
    assert pace.step == pytest.approx(LAW.step(8))
