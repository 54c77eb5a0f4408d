"""Stalls in the law: theory, simulator, kernels and the emulated engine's process agree, and
without stalls nothing changes.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.latency.stalls import SPARE_GAPS, most_stalls
from kendall.queueing.measurement.record import Record
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import (
    check_draws,
    draw_jobs,
    simulate_model,
    simulate_run,
)
from kendall.queueing.simulation.fast import Trace, is_compiled, stall_gaps
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
from kendall.queueing.simulation.run_limits import affordable_requests
from tests.memory import peak_memory

LENGTHS = parse_distribution("geometric:mean=12", 64)
PROMPTS = parse_distribution("uniform:low=10,high=50")
LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, cv=0.12, speed=1.1)
STALLING = dataclasses.replace(LAW, stall_share=0.05, stall=0.067)
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "fixed:batch_size=4",
)


def model(policy: str, law: LatencyModel = STALLING, **limits: object) -> Queue:
    return Queue.read(policy, LENGTHS, law, **limits)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_theory_and_simulation_agree_under_stalls(policy: str, load: float) -> None:
    stalling = model(policy)
    rate = load * stalling.largest_stable_rate
    found = predict_model(stalling, rate)
    assert found.method == "exact"
    runs = [
        simulate_run(stalling, rate, 400_000, np.random.SeedSequence(seed)).after(10_000)
        for seed in range(4)
    ]
    for name in ("queueing_delay", "sojourn_time"):
        means = np.array([getattr(run, name).mean() for run in runs])
        error = means.std(ddof=1) / 2
        assert error < 0.02 * means.mean()
        assert getattr(found, name).mean == pytest.approx(
            means.mean(), abs=4 * error + 0.003 * means.mean()
        )
    delays = np.concatenate([run.queueing_delay for run in runs])
    assert found.queueing_delay.p99 == pytest.approx(np.quantile(delays, 0.99), rel=0.04)


@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_and_simulator_place_the_same_stalls(policy: str) -> None:
    stalling = model(policy, prompt_tokens=PROMPTS, servers=2)
    rate = 0.6 * stalling.largest_stable_rate
    assert is_compiled(stalling)
    stream = [np.random.SeedSequence(3) for _ in range(2)]
    fast = simulate_run(stalling, rate, 2000, stream[0])
    jobs, residuals = draw_jobs(stalling, rate, 2000, stream[1])
    engine = SimulatedEngine(STALLING, max_batch_size=stalling.bound or 2**31)
    records = sorted(simulate_trace(stalling.policy, jobs, engine, residuals), key=_number)
    assert [record.released_at for record in records] == pytest.approx(
        fast.released_at.tolist(), rel=1e-9
    )
    assert [record.first_token_at for record in records] == pytest.approx(
        fast.first_token_at.tolist(), rel=1e-9
    )


def _number(record: Record) -> int:
    return int("".join(re.findall(r"\d", record.request_id)))


def test_kernels_of_one_server_place_the_same_stalls() -> None:
    for policy in ("single", "capped:max_batch_size=8"):
        stalling = model(policy)
        rate = 0.6 * stalling.largest_stable_rate
        fast = simulate_run(stalling, rate, 2000, np.random.SeedSequence(3))
        jobs, residuals = draw_jobs(stalling, rate, 2000, np.random.SeedSequence(3))
        engine = SimulatedEngine(STALLING, max_batch_size=stalling.bound or 2**31)
        records = sorted(simulate_trace(stalling.policy, jobs, engine, residuals), key=_number)
        assert [record.released_at for record in records] == pytest.approx(
            fast.released_at.tolist(), rel=1e-9
        )
        assert [record.first_token_at for record in records] == pytest.approx(
            fast.first_token_at.tolist(), rel=1e-9
        )


@pytest.mark.parametrize("padded", [True, False])
def test_token_by_token_is_the_same_as_from_end_to_end(padded: bool) -> None:
    stalling = dataclasses.replace(STALLING, stall_share=0.3, stall=0.004)
    ends = []
    for to_change in (True, False):
        engine = ServiceProcess(stalling, np.random.default_rng(4))
        members = [Member(str(i), 10, length) for i, length in enumerate((3, 17, 40))]
        engine.admit(0.0, members, padded=padded, joining=False)
        while not engine.idle:
            engine.advance(to_change=to_change)
        ends.append([member.last_token_at for member in members])
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)
    assert ends[0][2] > LAW.without_stalls().setup(3, 30)  # type: ignore[operator]


def test_a_member_that_leaves_moves_no_stall() -> None:
    """The step in flight keeps its end, those after it their stalls."""
    stalling = dataclasses.replace(STALLING, cv=0.0, stall_share=0.5, stall=0.01)
    total = []
    for seed in range(300):
        engine = ServiceProcess(stalling, np.random.default_rng(seed))
        engine.admit(
            0.0, [Member("stays", 1, 50), Member("leaves", 1, 50)], padded=True, joining=False
        )
        for _ in range(10):
            engine.advance(to_change=False)
        engine.remove("leaves", engine.next_step_at() - 1e-6)
        while not engine.idle:
            total.append(engine.next_change_at())
            engine.advance(to_change=True)
    lawful = stalling.setup(2, 2) + 11 * stalling.step(2) + 39 * stalling.step(1)
    assert np.mean(total) == pytest.approx(lawful, rel=0.05)


@pytest.mark.parametrize("prompts", [None, PROMPTS])
def test_the_moments_are_those_of_the_values_and_of_the_lattice(prompts: object) -> None:
    time = BatchTime(STALLING, LENGTHS, prompts, True)  # type: ignore[arg-type]
    values = ServiceTime.of(STALLING, LENGTHS, prompts)  # type: ignore[arg-type]
    assert values.mean == pytest.approx(time.mean(1), rel=1e-9)
    assert values.second_moment == pytest.approx(time.second_moment(1), rel=1e-9)
    table = time.table(4)
    for b in (1, 4):
        law = table.laws[b - 1]
        assert law @ table.instants == pytest.approx(time.mean(b), rel=1e-9)
        assert (1 + STALLING.cv**2) * (law @ table.instants**2) == pytest.approx(
            time.second_moment(b), rel=1e-9
        )


def test_stalls_leave_the_mean_and_add_their_share_times_their_size() -> None:
    plain, stalling = (BatchTime(law, LENGTHS, None, True) for law in (LAW, STALLING))
    assert stalling.mean(4) == plain.mean(4)
    assert stalling.second_moment(4) - plain.second_moment(4) == pytest.approx(
        (1 + LAW.cv**2) * 0.05 * 0.067 * plain.mean(4), rel=1e-9
    )
    single = solve_mg1(STALLING, LENGTHS, 0.5 / plain.mean(1)).delay.mean
    assert single == pytest.approx(
        0.5 / plain.mean(1) * stalling.second_moment(1) / (2 * 0.5), rel=1e-9
    )


def test_the_law_is_written_and_read_with_its_stalls() -> None:
    assert parse_law(str(STALLING)) == STALLING
    assert "stall" not in str(LAW)
    assert STALLING.without_stalls().speed == pytest.approx(0.95 * LAW.speed)
    for share, seconds in ((1.0, 0.1), (-0.1, 0.1), (0.1, 0.0), (0.0, 0.1), (0.1, -1.0)):
        with pytest.raises(SpecError, match="got stall"):
            dataclasses.replace(LAW, stall_share=share, stall=seconds)


def test_a_law_with_too_many_or_too_long_stalls_is_simulated() -> None:
    with pytest.raises(NotConvergedError, match="stalls in the longest batch"):
        most_stalls(1e6)
    with pytest.raises(SpecError, match="quarter of a step"):
        dataclasses.replace(LAW, stall_share=0.5, stall=1e-6)
    stalling = model(
        "capped:max_batch_size=8", dataclasses.replace(LAW, stall_share=0.1, stall=100.0)
    )
    assert predict_model(stalling, 0.3 * stalling.largest_stable_rate).method == "simulation"


@pytest.mark.parametrize(
    ("law", "most"), [("", 1_000_000), (",stall_share=0.2,stall=0.04", 30_000), (",cv=0.3", 30_000)]
)
def test_the_gaps_between_the_stalls_of_many_servers_are_within_the_budget_of_a_simulation(
    law: str, most: int
) -> None:
    """1,000 servers: for each of them as many gaps are drawn beforehand as there are requests."""
    model = Queue.read(
        "capped:max_batch_size=3",
        "geometric:mean=8",
        f"k1=3e-3,k2=0,k3=2e-5,k4=0.01{law}",
        servers=1000,
    )
    count = affordable_requests(model, 0.3 * model.largest_stable_rate, 1_000_000)
    assert 20_000 <= count <= most
    assert law or count > 30_000, "without draws it is not they that bound it"
    if law:
        with pytest.raises(
            SpecError,
            match=(
                r"got 1000000 requests on servers=1000 and (cv=0\.3|stall_share=0\.2); expected "
                r"at most"
            ),
        ):
            simulate_model(model, 1.0, num_requests=1_000_000)


def test_a_service_of_thousands_of_stalls_counts_as_so_many_events() -> None:
    """Of more than 10,000 in each; a million such services took minutes."""
    law = "k1=0,k2=0,k3=0.00095,k4=0.0061,speed=2.259,stall_share=0.1145,stall=0.01232"
    model = Queue.read("single", "deterministic:value=100000", law, servers=2, patience=100.0)
    stalls = model.engine.law.stall_rate * model.batch_time.mean(1)
    assert stalls > 10_000
    count = affordable_requests(model, 1e-4, 1_000_000)
    assert count >= 20_000
    assert count * stalls < 2e9


@pytest.mark.parametrize(
    ("law", "servers", "most"),
    [
        ("cv=0.3", 50_000, 1200),
        ("stall_share=0.2,stall=0.04", 50_000, 1200 - SPARE_GAPS),
        ("cv=0.3,stall_share=0.2,stall=0.04", 20_000, 3000 - SPARE_GAPS),
    ],
)
def test_the_gaps_that_each_server_has_besides_count_as_drawn(
    law: str, servers: int, most: int
) -> None:
    """60,000,000 residuals, and as many gaps, are the most; of a short run on many servers the
    spare gaps are nearly all.
    """
    model = Queue.read(
        "single", "geometric:mean=8", f"k1=3e-3,k2=0,k3=2e-5,k4=0.01,{law}", servers=servers
    )
    check_draws(model, most, 1)
    with pytest.raises(
        SpecError,
        match=(
            f"got {most + 1} requests on servers={servers} and .*; expected at most {most} "
            "requests on so many"
        ),
    ):
        check_draws(model, most + 1, 1)


def test_more_servers_than_have_room_for_their_spare_gaps_are_refused() -> None:
    model = Queue.read(
        "single",
        "geometric:mean=8",
        "k1=3e-3,k2=0,k3=2e-5,k4=0.01,stall_share=0.2,stall=0.04",
        servers=100_000,
    )
    with pytest.raises(
        SpecError,
        match=(
            r"got 100 requests on servers=100000 and stall_share=0\.2; expected at most 56390 "
            r"servers"
        ),
    ):
        simulate_model(model, 1.0, num_requests=100)


def test_the_gaps_between_stalls_are_drawn_into_one_table() -> None:
    """Not into a list that is copied: a GB of them would be two. The numbers are those that a
    server's clock draws one by one.
    """
    count, servers = 50_000, 4
    rngs = [np.random.default_rng(seed) for seed in range(servers)]
    trace = Trace(
        np.arange(float(count)),
        np.ones(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        rngs,
    )
    with peak_memory() as peak:
        drawn = stall_gaps(STALLING, trace)
    assert drawn.shape == (servers, count + SPARE_GAPS)
    assert peak.value < 1.2 * drawn.nbytes
    clock = np.random.default_rng(2).spawn(1)[0]
    assert drawn[2, :9].tolist() == [float(clock.standard_exponential()) for _ in range(9)]
