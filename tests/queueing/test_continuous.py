"""The approximation for continuous batching against an independent, step-by-step simulation and
against its exact limits.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.models.mgc import deterministic_ratio
from kendall.queueing.models.slots.continuous import (
    SlotTime,
    doubt,
    lengths_ratio,
    occupancy,
    solve_continuous,
    trusted,
)
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.queueing.simulation.fast import Trace, replay
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

LAW = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=1.55e-3)
UNIFORM = parse_distribution("uniform:low=1,high=32")
LOGNORMAL = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)


def by_steps(
    arrivals: list[float], outputs: list[int], slots: int, law: LatencyModel
) -> tuple[list[float], list[float]]:
    """Starts and ends, one engine step after the other: written without the policy, the driver
    or the service process.
    """
    starts, ends = [0.0] * len(arrivals), [0.0] * len(arrivals)
    entering: dict[int, float] = {}
    left: dict[int, int] = {}
    next_in, now = 0, 0.0
    while next_in < len(arrivals) or entering or left:
        while (
            next_in < len(arrivals)
            and len(entering) + len(left) < slots
            and (arrivals[next_in] <= now or not left)
        ):
            if not left and entering and arrivals[next_in] > max(now, min(entering.values())):
                break
            starts[next_in] = max(now, arrivals[next_in])
            entering[next_in] = starts[next_in] + law.turnaround
            next_in += 1
        if not left:
            now = max(now, min(entering.values()))
        joined = [name for name, at in entering.items() if at <= now]
        left |= {name: outputs[name] for name in joined}
        entering = {name: at for name, at in entering.items() if name not in joined}
        end = now + law.admission(len(joined)) + law.step(len(left))
        while (
            next_in < len(arrivals)
            and len(entering) + len(left) < slots
            and arrivals[next_in] < end
        ):
            starts[next_in] = arrivals[next_in]
            entering[next_in] = arrivals[next_in] + law.turnaround
            next_in += 1
        now = end
        left = {name: count - 1 for name, count in left.items()}
        for name in [name for name, count in left.items() if not count]:
            ends[name] = now
            del left[name]
    return starts, ends


@pytest.mark.thinned(3)
@pytest.mark.parametrize("turnaround", [0.0, 0.5e-3, 1.55e-3])
def test_the_simulator_equals_an_independent_simulation_by_steps(turnaround: float) -> None:
    """Without a turnaround several may enter at the very end of a step: each pays its k1."""
    law = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=turnaround)
    rng = np.random.default_rng(8)
    arrivals, outputs = (
        np.cumsum(rng.exponential(1 / 150, 3000)).tolist(),
        UNIFORM.sample(rng, 3000).tolist(),
    )
    trace = [
        Job(Request(id=str(i), arrived_at=at, prompt_tokens=0, max_output_tokens=32), outputs[i])
        for i, at in enumerate(arrivals)
    ]
    records = simulate_trace(
        parse_policy("continuous:max_batch_size=4"), trace, SimulatedEngine(law), [rng]
    )
    starts, ends = by_steps(arrivals, outputs, 4, law)
    for record in records:
        index = int(record.request_id)
        assert record.dispatched_at == pytest.approx(starts[index], abs=1e-9)
        assert record.released_at == pytest.approx(ends[index], abs=1e-9)


def test_one_slot_without_turnaround_is_m_g_1() -> None:
    law = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3)
    slots, single = (
        solve_continuous(SlotTime(law, LOGNORMAL), 40.0, 1),
        solve_mg1(law, LOGNORMAL, 40.0),
    )
    assert slots.queueing_delay == pytest.approx(single.delay.mean, rel=1e-6)
    assert slots.sojourn_time == pytest.approx(single.sojourn.mean, rel=1e-6)


def test_without_a_bound_nobody_waits_and_the_share_is_what_limits() -> None:
    time = SlotTime(LAW, UNIFORM)
    queue = solve_continuous(time, 300.0, None)
    assert queue.queueing_delay == 0
    assert queue.load == pytest.approx(300 * (LAW.k1 + LAW.k3 * 16.5))
    assert queue.sojourn_time == pytest.approx(
        solve_continuous(time, 300.0, 400).sojourn_time, rel=1e-3
    )


def wait_of_m_d_c(servers: int, rate: float) -> float:
    """Mean delay under service times of 1: whoever is in service now has left one service time
    later, so N' = (N - c)^+ + Poisson(rate).
    """
    size = servers + int(40 / (1 - rate / servers))
    logs = (
        np.arange(size) * math.log(rate)
        - rate
        - np.array([math.lgamma(n + 1) for n in range(size)])
    )
    arrivals, matrix = np.exp(logs), np.zeros((size, size))
    for number in range(size):
        left = max(0, number - servers)
        matrix[number, left:] = arrivals[: size - left]
    matrix[:, -1] += 1 - matrix.sum(axis=1)
    equations = matrix.T - np.eye(size)
    equations[-1] = 1.0
    there = np.linalg.solve(equations, np.eye(size)[-1])
    return float(there @ np.maximum(0, np.arange(size) - servers)) / rate


def wait_of_m_m_c(servers: int, rate: float) -> float:
    """Erlang's C over the free capacity."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = rate * blocked / (number + rate * blocked)
    return blocked / (1 - rate / servers * (1 - blocked)) / (servers - rate)


@pytest.mark.parametrize(
    ("slots", "load"),
    [
        (2, 0.3),
        (2, 0.6),
        (2, 0.9),
        (4, 0.3),
        (4, 0.6),
        (4, 0.9),
        (8, 0.6),
        (8, 0.9),
        (32, 0.9),
        (32, 0.95),
    ],
)
def test_equal_times_wait_less_than_exponential_ones_by_the_ratio_of_m_d_c(
    slots: int, load: float
) -> None:
    exact = wait_of_m_d_c(slots, load * slots) / wait_of_m_m_c(slots, load * slots)
    assert deterministic_ratio(slots, load) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("slots", [2, 4, 8, 32])
def test_that_ratio_goes_from_c_over_c_plus_1_in_light_traffic_to_a_half_in_heavy(
    slots: int,
) -> None:
    assert deterministic_ratio(slots, 1e-6) == pytest.approx(slots / (slots + 1), rel=1e-4)
    assert deterministic_ratio(1, 0.5) == 0.5, "M/D/1"
    assert deterministic_ratio(slots, 1 - 1e-6) == pytest.approx(0.5, rel=1e-4)
    ratios = [deterministic_ratio(slots, load) for load in (0.1, 0.5, 0.9, 0.99)]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_general_lengths_lie_where_equal_and_exponential_ones_do(slots: int, load: float) -> None:
    """Steps of one second whatever is in service: a slot is held for as many seconds as there
    are tokens.
    """
    law = LatencyModel(k4=1.0)
    equal, spread = (
        SlotTime(law, parse_distribution(text, 20_000))
        for text in ("deterministic:value=400", "geometric:mean=400")
    )
    alone = 0.5 if slots == 1 else deterministic_ratio(slots, load)

    def ratio(time: SlotTime) -> float:
        rate = load * time.throughput(slots, refilled=True)
        return lengths_ratio(time, rate, slots, occupancy(time, rate, slots, load))

    assert ratio(equal) == pytest.approx(alone, rel=0.01)
    assert ratio(spread) == pytest.approx(1.0, rel=0.01)


@dataclass(frozen=True)
class Simulated:
    """Means over replications, with the standard error of the delay and of the sojourn between
    them; seconds.
    """

    queueing_delay: float
    sojourn_time: float
    time_to_first_token: float
    inter_token_latency: float
    p90: float
    p99: float
    delay_error: float
    sojourn_error: float


def simulated(
    time: SlotTime, rate: float, slots: int, requests: int, replications: int = 8
) -> Simulated:
    """The compiled replay, which equals the policy's own sample paths (test_kernels)."""
    policy = parse_policy(f"continuous:max_batch_size={slots}")
    model = Queue.read(policy, time.output_tokens, time.law, prompt_tokens=time.prompt_tokens)
    rows = []
    for stream in np.random.SeedSequence(11).spawn(replications):
        run = simulate_run(model, rate, requests, stream).after(requests // 10)
        later = (run.released_at - run.first_token_at).sum() / max(1, (run.output_tokens - 1).sum())
        first, (p90, p99) = (
            (run.first_token_at - run.arrived_at).mean(),
            np.quantile(run.queueing_delay, (0.9, 0.99)),
        )
        rows.append((run.queueing_delay.mean(), run.sojourn_time.mean(), first, later, p90, p99))
    errors = np.std(rows, axis=0, ddof=1) / np.sqrt(replications)
    return Simulated(*np.mean(rows, axis=0), errors[0], errors[1])


def off(predicted: float | None, simulated_value: float) -> float:
    assert predicted is not None
    return abs(predicted / simulated_value - 1)


WITHOUT = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3)
EVEN = LatencyModel(k1=0.3e-3, k3=0.5e-3, k4=0.5e-3)
POINTS = [
    (law, lengths, slots, load)
    for law in (WITHOUT, LAW, EVEN)
    for lengths, slots, load in (
        ("geometric:mean=16", 2, 0.3),
        ("geometric:mean=16", 32, 0.85),
        ("uniform:low=1,high=32", 4, 0.85),
        ("uniform:low=1,high=32", 16, 0.6),
        ("lognormal:mu=2.5,sigma=0.7", 8, 0.85),
        ("lognormal:mu=2.5,sigma=0.8", 4, 0.6),
        ("lognormal:mu=2.5,sigma=0.8", 16, 0.85),
        ("deterministic:value=16", 2, 0.6),
        ("deterministic:value=16", 8, 0.85),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", POINTS, ids=str)
def test_trusted_means_are_near_the_simulation(case: tuple[LatencyModel, str, int, float]) -> None:
    """The delay within 10 % or 2 % of the sojourn, the sojourn, the first and the later tokens
    within 3 % (first 5 %): beyond the noise.
    """
    law, lengths, slots, load = case
    time = SlotTime(law, parse_distribution(lengths, 256))
    rate = load * time.throughput(slots, refilled=True)
    queue, seen = solve_continuous(time, rate, slots), simulated(time, rate, slots, 200_000)
    assert trusted(time, rate, slots)
    assert seen.sojourn_error <= 0.015 * seen.sojourn_time
    allowed = max(0.10 * seen.queueing_delay, 0.02 * seen.sojourn_time)
    assert abs(queue.queueing_delay - seen.queueing_delay) <= allowed + 3 * seen.delay_error
    assert (
        abs(queue.sojourn_time - seen.sojourn_time)
        <= 0.03 * seen.sojourn_time + 3 * seen.sojourn_error
    )
    assert (
        abs(queue.time_to_first_token - seen.time_to_first_token)
        <= 0.06 * seen.time_to_first_token + 3 * seen.delay_error
    )
    assert off(queue.inter_token_latency, seen.inter_token_latency) <= 0.02


@pytest.mark.thinned(3)
@pytest.mark.parametrize("lengths", [UNIFORM, LOGNORMAL])
@pytest.mark.parametrize("slots", [2, 4, 8])
def test_the_approximation_is_near_the_simulation(lengths: TokenDistribution, slots: int) -> None:
    """Load 0.7, with a turnaround: the delay within 5 %, sojourn, first token and later tokens
    within 2, 3 and 1 %.
    """
    time = SlotTime(LAW, lengths)
    rate = 0.7 * time.throughput(slots, refilled=True)
    queue, seen = solve_continuous(time, rate, slots), simulated(time, rate, slots, 40_000)
    assert seen.delay_error <= 0.04 * seen.queueing_delay
    assert (
        abs(queue.queueing_delay - seen.queueing_delay)
        <= 0.05 * seen.queueing_delay + 3 * seen.delay_error
    )
    assert off(queue.sojourn_time, seen.sojourn_time) <= 0.02
    assert off(queue.time_to_first_token, seen.time_to_first_token) <= 0.03
    assert off(queue.inter_token_latency, seen.inter_token_latency) <= 0.01


def test_an_admission_that_stops_all_slots_smooths_the_departures() -> None:
    """c = 32, admissions 26 % of the engine: with C^2 = Var N / E[N]^2 the delay would be a
    quarter too long.
    """
    time = SlotTime(WITHOUT, parse_distribution("geometric:mean=16"))
    rate = 0.95 * time.throughput(32, refilled=True)
    mean, share = time.parts(32, refilled=True)
    assert time.scv(32, mean, share) == pytest.approx(
        time.output_tokens.scv * (1 - rate / 0.95 * time.admitted) ** 2
    )
    queue, seen = solve_continuous(time, rate, 32), simulated(time, rate, 32, 100_000)
    assert seen.delay_error <= 0.05 * seen.queueing_delay
    assert (
        abs(queue.queueing_delay - seen.queueing_delay)
        <= 0.05 * seen.queueing_delay + 3 * seen.delay_error
    )


@pytest.mark.parametrize(
    "lengths", ["geometric:mean=16", "deterministic:value=16", "uniform:low=1,high=4"]
)
@pytest.mark.parametrize("law", [WITHOUT, EVEN])
def test_the_capacity_without_a_turnaround_is_exact(law: LatencyModel, lengths: str) -> None:
    """All requests there from the start: they leave at X(c), within the noise of their lengths."""
    tokens, count, slots = parse_distribution(lengths), 100_000, 16
    time, outputs = SlotTime(law, tokens), tokens.sample(np.random.default_rng(4), count)
    model = Queue.read(
        f"continuous:max_batch_size={slots}", tokens, dataclasses.replace(law, turnaround=0.0)
    )
    trace = Trace(np.zeros(count), outputs, np.zeros(count, dtype=np.int64), [])
    released = np.sort(replay(model, trace).released_at)
    measured = (count * 8 // 10) / (released[count * 9 // 10] - released[count // 10])
    noise = np.sqrt(tokens.scv / (count * 0.8))
    assert time.throughput(slots, refilled=True) == pytest.approx(measured, rel=4 * noise + 1e-4)


def test_prompts_count_in_the_mean_and_in_the_variation() -> None:
    law = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, speed=1.3)
    time = SlotTime(law, LOGNORMAL, parse_distribution("lognormal:mu=4,sigma=1", 512))
    rate = 0.8 * time.throughput(8, refilled=True)
    assert trusted(time, rate, 8)
    queue, seen = solve_continuous(time, rate, 8), simulated(time, rate, 8, 60_000)
    assert seen.delay_error <= 0.04 * seen.queueing_delay
    assert (
        abs(queue.queueing_delay - seen.queueing_delay)
        <= 0.06 * seen.queueing_delay + 3 * seen.delay_error
    )
    assert off(queue.sojourn_time, seen.sojourn_time) <= 0.03


@pytest.mark.parametrize(
    ("lengths", "slots", "load"),
    [(UNIFORM, 2, 0.6), (UNIFORM, 8, 0.85), (LOGNORMAL, 4, 0.85), (LOGNORMAL, 16, 0.9)],
)
def test_a_quantile_of_the_delay_is_near_the_simulation_or_none(
    lengths: TokenDistribution, slots: int, load: float
) -> None:
    time = SlotTime(WITHOUT, lengths)
    rate = load * time.throughput(slots, refilled=True)
    queue, seen = solve_continuous(time, rate, slots), simulated(time, rate, slots, 60_000)
    assert queue.delay.mean == queue.queueing_delay
    for level, measured in ((queue.delay.p90, seen.p90), (queue.delay.p99, seen.p99)):
        assert level is None or off(level, measured) <= 0.15
    assert queue.delay.p99 is not None
    assert queue.delay.p50 == 0 or queue.waiting > 0.25


def test_quantiles_next_to_the_atom_and_of_equal_lengths_are_not_given() -> None:
    """P(Wq > 0) = 0.17 at load 0.3 and c = 2: the 90th percentile lies next to the atom."""
    time = SlotTime(WITHOUT, LOGNORMAL)
    queue = solve_continuous(time, 0.3 * time.throughput(2, refilled=True), 2)
    assert 0.1 < queue.waiting < 0.25
    assert queue.delay.p50 == 0
    assert queue.delay.p90 is None
    assert queue.delay.p99 is not None
    alike = SlotTime(WITHOUT, parse_distribution("deterministic:value=16"))
    assert solve_continuous(alike, 0.9 * alike.throughput(2, refilled=True), 2).delay.p99 is None


def test_the_doubtful_corners_are_named() -> None:
    short = parse_distribution("uniform:low=1,high=4")
    cases = [
        (SlotTime(WITHOUT, short), 16, 0.85, "admissions take"),
        (SlotTime(EVEN, short), 8, 0.3, "end in bunches"),
        (SlotTime(LAW, parse_distribution("deterministic:value=16")), 16, 0.95, "turnaround"),
    ]
    for time, slots, load, reason in cases:
        rate = load * time.throughput(slots, refilled=True)
        assert reason in (doubt(time, rate, slots) or "")
        assert not trusted(time, rate, slots)
    assert doubt(SlotTime(LAW, UNIFORM), 200.0, 8) is None
    assert trusted(SlotTime(LAW, UNIFORM), 300.0, None)


@pytest.mark.parametrize(
    ("lengths", "slots", "rate", "reason"),
    [
        # 35 % of the engine's time, at 0.3 ms an admission, from five slots on
        ("uniform:low=1,high=127", 16, 0.349 / 0.3e-3, ""),
        ("uniform:low=1,high=127", 16, 0.351 / 0.3e-3, "admissions take 35%"),
        ("uniform:low=1,high=127", 5, 0.351 / 0.3e-3, "admissions take 35%"),
        ("uniform:low=1,high=127", 4, 0.351 / 0.3e-3, ""),
        # answers of fewer than 8 tokens, and than slots
        ("deterministic:value=8", 16, 1.0, ""),
        ("deterministic:value=7", 16, 1.0, "answers of 7 tokens in 16 slots end in bunches"),
        ("deterministic:value=7", 8, 1.0, "answers of 7 tokens in 8 slots end in bunches"),
        ("deterministic:value=7", 7, 1.0, ""),
    ],
)
def test_the_approximation_is_doubted_beyond_its_bounds(
    lengths: str, slots: int, rate: float, reason: str
) -> None:
    said = doubt(SlotTime(WITHOUT, parse_distribution(lengths)), rate, slots)
    assert (said or "").startswith(reason)
    assert (said is None) == (reason == "")


@pytest.mark.parametrize(
    ("sigma", "slots", "load", "doubted"),
    [
        (0.80, 8, 0.6, False),  # E[N^3] = 6.8 E[N]^3
        (0.81, 8, 0.6, True),  # 7.2
        (1.27, 1, 0.6, False),  # M/G/1
        (1.27, 8, 0.3, False),  # nobody waits
        (1.27, 8, 0.85, False),  # half of the sojourn is delay: two phases are near
        (1.27, 8, 0.7, True),
        (1.13, 8, 0.7, False),  # E[N^3] = 43 E[N]^3
    ],
)
def test_long_answers_are_doubted_where_some_wait(
    sigma: float, slots: int, load: float, doubted: bool
) -> None:
    time = SlotTime(WITHOUT, parse_distribution(f"lognormal:mu=3.5,sigma={sigma}", 8192))
    said = doubt(time, load * time.throughput(slots, refilled=True), slots)
    assert ("a few long answers" in (said or "")) == doubted


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("scv", "slots", "load", "off"),
    [  # formula / simulation - 1 of the mean delay, 3 to 4 million requests, in per cent
        (2.5, 4, 0.9, 0.3),
        (2.5, 16, 0.95, 1.0),
        (4, 4, 0.9, -0.7),
        (4, 4, 0.95, -0.2),
        (4, 16, 0.8, -9.7),
        (4, 16, 0.95, -0.4),
        (7, 2, 0.97, -0.2),
        (7, 4, 0.85, -6.7),
        (7, 4, 0.95, -1.7),
        (7, 8, 0.9, -5.9),
        (7, 8, 0.97, -1.6),
        (7, 16, 0.85, -22),
        (7, 16, 0.95, -7.2),
        (7, 32, 0.9, -18),
        (7, 64, 0.95, -10),
        (12, 2, 0.7, -9.0),
        (12, 4, 0.7, -30),
        (12, 4, 0.9, -5.3),
        (12, 4, 0.97, -1.0),
    ],
)
def test_every_delay_that_a_few_long_answers_make_wrong_is_named(
    scv: float, slots: int, load: float, off: float
) -> None:
    """Lognormal answers of 64 tokens in the mean; also where the delay is most of the sojourn."""
    sigma = math.sqrt(math.log(1 + scv))
    lengths = f"lognormal:mu={math.log(64) - sigma**2 / 2:.6f},sigma={sigma:.6f}"
    law = LatencyModel(k1=0.002, k3=0.0001, k4=0.008)
    time = SlotTime(law, parse_distribution(lengths, 2**20))
    said = doubt(time, load * time.throughput(slots, refilled=True), slots)
    assert ("a few long answers" in (said or "")) == (abs(off) > 5)


@pytest.mark.parametrize(("slots", "doubted"), [(15, False), (16, True)])
def test_equal_answers_in_many_slots_are_doubted_where_few_wait(slots: int, doubted: bool) -> None:
    time = SlotTime(WITHOUT, parse_distribution("deterministic:value=64"))
    rate = 0.78 * time.throughput(slots, refilled=True)
    queue = solve_continuous(time, rate, slots)
    assert 0.02 < queue.queueing_delay / queue.sojourn_time < 0.05
    assert ("one length" in (doubt(time, rate, slots) or "")) == doubted


@pytest.mark.parametrize(
    ("spread", "load", "doubted"),
    [
        # a squared coefficient of variation of 0.05: lengths of 16 - 3 and 16 + 3, or 4 either way;
        # 88 % of the capacity
        (3, 0.881, True),
        (3, 0.879, False),
        (4, 0.95, False),
    ],
)
def test_answers_of_nearly_one_length_are_doubted_near_the_capacity(
    spread: int, load: float, doubted: bool
) -> None:
    pmf = np.zeros(17 + spread)
    pmf[[16 - spread, 16 + spread]] = 0.5
    time = SlotTime(LAW, TokenDistribution(pmf))
    assert (doubt(time, load * time.throughput(16, refilled=True), 16) is not None) == doubted


def test_the_parts_of_the_sojourn_add_up() -> None:
    """Delay, first token, later tokens; with answers of one token there are no later ones."""
    time = SlotTime(LAW, LOGNORMAL)
    for slots in (1, 4, None):
        queue = solve_continuous(time, 25.0, slots)
        assert queue.inter_token_latency is not None
        whole = queue.time_to_first_token + (LOGNORMAL.mean - 1) * queue.inter_token_latency
        assert whole == pytest.approx(queue.sojourn_time)
        assert (
            queue.queueing_delay + LAW.turnaround < queue.time_to_first_token < queue.sojourn_time
        )
        assert queue.inter_token_latency >= LAW.step(1) * (1 - 1e-12)
    assert (
        solve_continuous(
            SlotTime(LAW, parse_distribution("deterministic:value=1")), 25.0, 4
        ).inter_token_latency
        is None
    )


def test_an_overloaded_engine_has_no_steady_state() -> None:
    time = SlotTime(LAW, UNIFORM)
    with pytest.raises(UnstableQueueError):
        solve_continuous(time, 1.01 * time.throughput(4, refilled=True), 4)
