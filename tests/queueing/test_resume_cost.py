"""`kr`, the cost of resuming a request behind tokens that it has made: the law and its texts, and
the engine that obeys it.
"""

import dataclasses
import json

import numpy as np
import pytest

from kendall.policies.core import Request
from kendall.policies.text import SpecError, parse_policy
from kendall.queueing.estimation.speed.batch_times import batch_times
from kendall.queueing.estimation.window.producer import row
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.profile import Profile, load_profile
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

PLAIN = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,turnaround=1.5e-3,speed=1.3")
LAW = dataclasses.replace(PLAIN, kr=8e-3)


# the law


def test_the_text_of_a_law_has_its_resume_cost_where_there_is_one() -> None:
    assert "kr=0.008" in str(LAW)
    assert parse_law(str(LAW)) == LAW
    assert "kr" not in str(PLAIN)
    assert parse_law("k1=0,k2=0,k3=0,k4=1,kr=0") == LatencyModel(k4=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kr=-0.001", "got kr=-0.001 in a latency law; expected seconds >= 0"),
        ("kr=8ms", "got kr='8ms' in .*; expected seconds without a unit: kr=0.008"),
        ("kr=inf", "got kr="),
    ],
)
def test_a_resume_costs_seconds_and_never_less_than_none(given: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_law(f"k1=0,k2=0,k3=0,k4=1,{given}")


def test_a_resume_is_slowed_down_with_the_machine() -> None:
    for cost in (LatencyModel.setup, LatencyModel.admission):
        assert cost(LAW, 3, 10, 2) - cost(LAW, 3, 10) == pytest.approx(2 * 1.3 * 8e-3)
        assert cost(LAW, 3, 10) == cost(PLAIN, 3, 10) == cost(PLAIN, 3, 10, 2)


def test_a_profile_without_resume_cost_is_written_and_read_as_before_there_was_one(
    tmp_path,
) -> None:  # type: ignore[no-untyped-def]
    bare = Profile(name="bare", law=PLAIN)
    told = Profile(name="told", law=LAW)
    names = [field.name for field in dataclasses.fields(LatencyModel)]
    for profile, expected in ((bare, [n for n in names if n != "kr"]), (told, names)):
        path = tmp_path / "profile.json"
        profile.save(path)
        assert load_profile(str(path)) == profile == Profile.from_dict(profile.to_dict())
        for written in (path.read_text(), profile.to_json()):
            assert list(json.loads(written)["law"]) == expected
    assert load_profile("yang-llama2-7b-a100").law.kr == 0


# the engine


@pytest.mark.parametrize("joining", [True, False])
def test_members_that_go_on_lengthen_the_step_that_they_enter(joining: bool) -> None:
    """Each of them; all that share the step wait for it, and later steps take no longer."""
    ends = []
    for resumed in ((False, False, False), (True, False, True)):
        process = ServiceProcess(LAW, np.random.default_rng(1))
        members = [Member(str(i), 20, 5, resumed=each) for i, each in enumerate(resumed)]
        process.admit(1.0, members, padded=False, joining=joining)
        steps = []
        while not process.idle:
            steps.append(process.next_step_at())
            process.advance(to_change=False)
        ends.append(np.array(steps))
    assert (ends[1] - ends[0]).tolist() == pytest.approx([2 * 1.3 * 8e-3] * 5)


def records_of(policy: str, law: LatencyModel, arrivals: list[tuple[float, int]]) -> list[Record]:
    """Of requests with these arrivals and output tokens, told exactly."""
    jobs = [
        Job(
            Request(
                id=str(i),
                arrived_at=at,
                prompt_tokens=0,
                max_output_tokens=100,
                predicted_output_tokens=float(tokens),
            ),
            tokens,
        )
        for i, (at, tokens) in enumerate(arrivals)
    ]
    return simulate_trace(
        parse_policy(policy), jobs, SimulatedEngine(law), [np.random.default_rng(1)]
    )


def simulated(policy: str, law: LatencyModel, arrivals: list[tuple[float, int]]) -> list[float]:
    """When each of them has its last token."""
    records = records_of(policy, law, arrivals)
    found = {record.request_id: record.released_at for record in records}
    return [found[str(i)] or 0.0 for i in range(len(arrivals))]


def test_a_request_pays_for_each_time_it_goes_on_and_not_before_its_first_token() -> None:
    """A step is 1 s, a batch's setup 0.1 s, a resume 0.5 s. The long request has two tokens at
    2.1 s and is interrupted at 2.5 s and, in its first step behind them, at 4.6 s.
    """
    law = LatencyModel(k2=0.1, k4=1.0, kr=0.5)
    arrivals = [(0.0, 9), (2.5, 1), (4.6, 1)]
    long, first, second = simulated("single:order=sprpt", law, arrivals)
    assert (first, second) == (pytest.approx(3.6), pytest.approx(5.7))
    assert long == pytest.approx(5.7 + 0.1 + 0.5 + 7.0)
    long, first = simulated("single:order=sprpt", law, [(0.0, 9), (0.9, 1)])
    assert (first, long) == (pytest.approx(2.0), pytest.approx(2.0 + 0.1 + 9.0))


def test_an_order_that_interrupts_nobody_never_pays() -> None:
    arrivals = [(0.1 * i, 1 + i % 7) for i in range(50)]
    for policy in ("single:order=spjf", "continuous:max_batch_size=2", "dynamic"):
        assert simulated(policy, LAW, arrivals) == simulated(policy, PLAIN, arrivals)


# what is measured of it


def test_a_speed_is_not_mistaken_for_resumes() -> None:
    """Whether or not kr is known: only uninterrupted services tell a speed."""
    law = LatencyModel(k4=1e-3, kr=8e-3)
    rng = np.random.default_rng(4)
    at, tokens = np.cumsum(rng.exponential(0.06, 3000)), 1 + rng.geometric(0.03, 3000)
    arrivals = list(zip(at.tolist(), np.minimum(tokens, 99).tolist(), strict=True))
    policy = "single:order=sprpt"
    records = records_of(policy, law, arrivals)
    seen = Snapshot(
        policy=policy,
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=float(at[-1]),
        arrivals=at,
        rows=np.array([row(r, r.arrived_at or 0.0, r.dispatched_at or 0.0) for r in records]),
    )
    free = dataclasses.replace(law, kr=0.0)
    assert sum(record.preemptions or 0 for record in records) > 300
    for told in (law, free):
        times = batch_times(parse_policy(policy), seen, told)
        assert times.measured.sum() == pytest.approx(times.fitted.sum(), rel=1e-9)
