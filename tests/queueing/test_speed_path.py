"""The requests of a run, served at the speed that the machine had at each moment."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.compare.theory import replay_arrivals
from policies import Policy, parse_policy
from queueing.latency.law import LatencyModel
from queueing.latency.speed import measured_speed
from queueing.latency.speed_path import replay_at_pace
from queueing.measurement.recursion import Served

LAW = LatencyModel(k1=0.002, k2=0.004, k3=0.0002, k4=0.001)
Speed = Callable[[float], float]


def slow_spell(at: float) -> float:
    """Three times as slow for two seconds of every ten."""
    return 3.0 if at % 10 < 2 else 1.0


def wandering(at: float) -> float:
    return 1.0 + 0.6 * math.sin(at / 3)


def ends(start: float, work: float, speed: Speed, step: float = 1e-3) -> float:
    """When so much work of the law is done, by small steps of the run's clock."""
    at = start
    while work > 0:
        work -= step / speed(at)
        at += step
    return at


def run(policy: Policy, rate: float, speed: Speed, n: int = 1500) -> list[Served]:
    """Capped batches on one machine of that speed, independently of the simulators."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    lengths = rng.integers(4, 24, n).tolist()
    most = getattr(policy, "max_batch_size", 1)
    found: list[Served] = []
    free, head, number = 0.0, 0, 0
    while head < n:
        start = max(free, arrivals[head])
        size = 1
        while size < most and head + size < n and arrivals[head + size] <= start:
            size += 1
        members = range(head, head + size)
        work = LAW.padded(size, max(lengths[i] for i in members), 0)
        free = ends(start, work, speed)
        found += [
            Served(
                id=str(i),
                policy=str(policy),
                epoch=0,
                server_id=0,
                batch_id=number,
                batch_size=size,
                arrived_at=arrivals[i],
                dispatched_at=start,
                server_free_at=free,
                released_at=free,
                prompt_tokens=0,
                output_tokens=lengths[i],
                completed=True,
                max_output_tokens=32,
            )
            for i in members
        ]
        head, number = head + size, number + 1
    return found


def mean_delay(instants: dict[str, tuple[float, float]], requests: list[Served]) -> float:
    return float(np.mean([instants[r.id][0] - r.arrived_at for r in requests]))


@pytest.mark.parametrize("speed", [slow_spell, wandering])
@pytest.mark.parametrize(("text", "rate"), [("single", 28.0), ("capped:max_batch_size=4", 60.0)])
def test_the_model_follows_a_machine_whose_speed_changes(
    text: str, rate: float, speed: Speed
) -> None:
    """One speed for the run misses the delays of the slow moments."""
    policy = parse_policy(text)
    requests = run(policy, rate, speed)
    observed = float(np.mean([r.dispatched_at - r.arrived_at for r in requests]))
    one = measured_speed(policy, requests, LAW, replay_arrivals)
    assert one is not None
    constant = mean_delay(replay_arrivals(policy, requests, one.law(LAW)), requests)
    followed = mean_delay(replay_at_pace(policy, requests, LAW, one, replay_arrivals), requests)
    assert abs(observed / followed - 1) < 0.06
    assert abs(observed / followed - 1) < abs(observed / constant - 1)


@pytest.mark.parametrize("text", ["single", "capped:max_batch_size=4"])
def test_a_machine_of_constant_speed_is_served_as_by_its_one_speed(text: str) -> None:
    policy = parse_policy(text)
    requests = run(policy, 20.0, lambda _: 1.4)
    speed = measured_speed(policy, requests, LAW, replay_arrivals)
    assert speed is not None
    assert speed.factor == pytest.approx(1.4, rel=0.03)
    followed = replay_at_pace(policy, requests, LAW, speed, replay_arrivals)
    constant = replay_arrivals(policy, requests, speed.law(LAW))
    assert mean_delay(followed, requests) == pytest.approx(
        mean_delay(constant, requests), rel=0.02, abs=1e-4
    )


def test_a_law_of_the_wrong_shape_still_differs() -> None:
    """The pace explains the machine, not the law: batches of different sizes share a span."""
    policy = parse_policy("capped:max_batch_size=4")
    requests = run(policy, 60.0, lambda _: 1.0)
    wrong = LatencyModel(k1=0.02, k4=1e-6)
    speed = measured_speed(policy, requests, wrong, replay_arrivals)
    assert speed is not None
    observed = float(np.mean([r.dispatched_at - r.arrived_at for r in requests]))
    followed = mean_delay(replay_at_pace(policy, requests, wrong, speed, replay_arrivals), requests)
    assert abs(observed / followed - 1) > 0.1


def test_fixed_with_a_wait_of_its_own_keeps_one_speed() -> None:
    policy = parse_policy("fixed:batch_size=4,max_wait=0.05")
    requests = run(parse_policy("capped:max_batch_size=4"), 40.0, wandering, n=300)
    speed = measured_speed(policy, requests, LAW, replay_arrivals)
    assert speed is not None
    assert replay_at_pace(policy, requests, LAW, speed, replay_arrivals) == replay_arrivals(
        policy, requests, speed.law(LAW)
    )


def test_a_run_of_one_batch_is_served() -> None:
    policy = parse_policy("single")
    requests = run(policy, 20.0, lambda _: 1.0, n=1)
    speed = measured_speed(policy, requests, LAW, replay_arrivals)
    assert speed is not None
    ((start, end),) = replay_at_pace(policy, requests, LAW, speed, replay_arrivals).values()
    assert start == pytest.approx(requests[0].arrived_at)
    assert end - start == pytest.approx(requests[0].server_free_at - requests[0].dispatched_at)
