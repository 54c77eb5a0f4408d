"""The approximation for continuous batching against an independent, step-by-step simulation and against its exact limits."""

import numpy as np
import pytest

from policies import Request, parse_policy
from queueing.continuous import SlotTime, solve_continuous
from queueing.distributions import TokenDistribution, parse_distribution
from queueing.latency import LatencyModel
from queueing.mg1 import solve_mg1
from queueing.simulation import Job, simulate_trace

LAW = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=1.55e-3)
UNIFORM = parse_distribution("uniform:low=1,high=32")
LOGNORMAL = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)


def by_steps(arrivals: list[float], outputs: list[int], slots: int, law: LatencyModel) -> tuple[list[float], list[float]]:
    """Starts and ends, one engine step after the other: written without the policy, the driver or the service process."""
    starts, ends = [0.0] * len(arrivals), [0.0] * len(arrivals)
    entering: dict[int, float] = {}
    left: dict[int, int] = {}
    next_in, now = 0, 0.0
    while next_in < len(arrivals) or entering or left:
        while next_in < len(arrivals) and len(entering) + len(left) < slots and (arrivals[next_in] <= now or not left):
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
        while next_in < len(arrivals) and len(entering) + len(left) < slots and arrivals[next_in] < end:
            starts[next_in] = arrivals[next_in]
            entering[next_in] = arrivals[next_in] + law.turnaround
            next_in += 1
        now = end
        left = {name: count - 1 for name, count in left.items()}
        for name in [name for name, count in left.items() if not count]:
            ends[name] = now
            del left[name]
    return starts, ends


@pytest.mark.parametrize("turnaround", [0.0, 0.5e-3, 1.55e-3])
def test_the_simulator_equals_an_independent_simulation_by_steps(turnaround: float) -> None:
    """Without a turnaround several may enter at the very end of a step: each pays its k1."""
    law = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=turnaround)
    rng = np.random.default_rng(8)
    arrivals, outputs = np.cumsum(rng.exponential(1 / 150, 3000)).tolist(), UNIFORM.sample(rng, 3000).tolist()
    trace = [Job(Request(id=str(i), arrived_at=at, prompt_tokens=0, max_output_tokens=32), outputs[i]) for i, at in enumerate(arrivals)]
    records = simulate_trace(parse_policy("continuous:max_batch_size=4"), trace, law, [rng])
    starts, ends = by_steps(arrivals, outputs, 4, law)
    for record in records:
        index = int(record.request_id)
        assert record.dispatched_at == pytest.approx(starts[index], abs=1e-9)
        assert record.released_at == pytest.approx(ends[index], abs=1e-9)


def test_one_slot_without_turnaround_is_m_g_1() -> None:
    law = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3)
    slots, single = solve_continuous(SlotTime(law, LOGNORMAL), 40.0, 1), solve_mg1(law, LOGNORMAL, 40.0)
    assert slots.queueing_delay == pytest.approx(single.delay.mean, rel=1e-6)
    assert slots.sojourn_time == pytest.approx(single.sojourn.mean, rel=1e-6)


def test_without_a_bound_nobody_waits_and_the_share_is_what_limits() -> None:
    time = SlotTime(LAW, UNIFORM)
    queue = solve_continuous(time, 300.0, None)
    assert queue.queueing_delay == 0
    assert queue.load == pytest.approx(300 * (LAW.k1 + LAW.k3 * 16.5))
    assert queue.sojourn_time == pytest.approx(solve_continuous(time, 300.0, 400).sojourn_time, rel=1e-3)


@pytest.mark.parametrize("lengths", [UNIFORM, LOGNORMAL])
@pytest.mark.parametrize("slots", [2, 4, 8])
def test_the_approximation_is_near_the_simulation(lengths: TokenDistribution, slots: int) -> None:
    """Load 0.7; a quick guard, the acceptance test has the statistics."""
    time, rng = SlotTime(LAW, lengths), np.random.default_rng(2)
    rate = 0.7 * time.throughput(slots, refilled=True)
    delays, sojourns = [], []
    for _ in range(4):
        arrivals, outputs = np.cumsum(rng.exponential(1 / rate, 12_000)), lengths.sample(rng, 12_000)
        starts, ends = by_steps(arrivals.tolist(), outputs.tolist(), slots, LAW)
        delays.append((np.array(starts) - arrivals)[1000:].mean())
        sojourns.append((np.array(ends) - arrivals)[1000:].mean())
    predicted = solve_continuous(time, rate, slots)
    error = np.std(delays, ddof=1) / 2
    assert error <= 0.07 * np.mean(delays)
    assert abs(predicted.queueing_delay - np.mean(delays)) <= 0.05 * np.mean(delays) + 3 * error
    assert predicted.sojourn_time == pytest.approx(np.mean(sojourns), rel=0.03)
