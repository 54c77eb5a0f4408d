"""The requests of a run, served at the speed that the machine had at each moment: batches take as
long as measured, but for what the law says of their sizes and lengths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from kendall.policies import Policy, format_policy, parse_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.gain.same_requests import SameRequests
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.checked import CheckedRun, check_run
from kendall.queueing.estimation.window.of_run import window_of_run
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import Served
from kendall.queueing.queue import Queue

ONE_TOKEN = TokenDistribution(np.array([0.0, 1.0]))
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
                policy=format_policy(policy),
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


def checked(requests: list[Served], law: LatencyModel = LAW) -> CheckedRun:
    policy = parse_policy(requests[0].policy)
    model = Queue.read(policy, ONE_TOKEN, law)
    found = check_run(window_of_run(requests), model)
    assert found is not None
    return found


@pytest.mark.parametrize("speed", [slow_spell, wandering])
@pytest.mark.parametrize(("text", "rate"), [("single", 28.0), ("capped:max_batch_size=4", 60.0)])
def test_the_model_follows_a_machine_whose_speed_changes(
    text: str, rate: float, speed: Speed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One speed for the run misses the delays of the slow moments."""
    requests = run(parse_policy(text), rate, speed)
    followed = checked(requests)
    monkeypatch.setattr(
        "kendall.queueing.estimation.checked.WindowRequests.batch_factors", lambda *_: None
    )
    constant = checked(requests)
    assert abs(followed.queueing_delay.ratio - 1) < 0.06
    off = abs(constant.queueing_delay.ratio - 1)
    assert abs(followed.queueing_delay.ratio - 1) < off


@pytest.mark.parametrize("text", ["single", "capped:max_batch_size=4"])
def test_a_machine_of_constant_speed_is_served_as_by_its_one_speed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = run(parse_policy(text), 20.0, lambda _: 1.4)
    followed = checked(requests)
    assert followed.speed.factor == pytest.approx(1.4, rel=0.03)
    monkeypatch.setattr(
        "kendall.queueing.estimation.checked.WindowRequests.batch_factors", lambda *_: None
    )
    assert followed.queueing_delay.modelled == pytest.approx(
        checked(requests).queueing_delay.modelled, rel=0.02, abs=1e-4
    )


def test_a_law_of_the_wrong_shape_still_differs() -> None:
    """The pace explains the machine, not the law: batches of different sizes share a block."""
    requests = run(parse_policy("capped:max_batch_size=4"), 60.0, lambda _: 1.0)
    found = checked(requests, LatencyModel(k1=0.02, k4=1e-6)).queueing_delay
    assert abs(found.ratio - 1) > 0.1


def test_a_slow_spell_is_not_taken_for_a_cost_of_large_batches() -> None:
    """The queue grows in it, and the batches with it: what they cost is seen among neighbours."""
    requests = run(parse_policy("capped:max_batch_size=4"), 60.0, slow_spell)
    check = checked(requests).queueing_delay
    assert abs(check.ratio - 1) < 0.05
    assert check.relative_half_width < 0.1


def test_a_run_of_one_batch_is_served() -> None:
    requests = run(parse_policy("single"), 20.0, lambda _: 1.0, n=1)
    found = checked(requests)
    assert found.dispatched == pytest.approx([requests[0].arrived_at])
    held = requests[0].server_free_at - requests[0].dispatched_at
    assert found.released - found.dispatched == pytest.approx([held])


@pytest.mark.parametrize("speed", [slow_spell, wandering])
def test_a_what_if_meets_the_machine_as_it_was_at_each_moment(speed: Speed) -> None:
    """At its mean speed the setting in force itself would have waited a third as long, or less."""
    text, rate = "capped:max_batch_size=4", 60.0
    requests = run(parse_policy(text), rate, speed)
    seen = window_of_run(requests)
    began = requests[0].arrived_at - 1e-6
    seen = dataclasses.replace(seen, start=began, epoch_at=began)
    limits = QueueLimits(max_output_tokens=32, engine=EngineBounds(max_num_seqs=4))
    point = OperatingPoint(estimates=assess(seen, LAW, limits).estimates, shape=LAW, limits=limits)
    current = Setting(policy=text, max_output_tokens=32)
    found = SameRequests(seen, point, current).mean(current, "queueing_delay")
    assert found == pytest.approx(float(seen.judged().mean()), rel=0.05)
