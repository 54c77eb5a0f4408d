"""Runs and batches whose speed is known."""

from __future__ import annotations

import math

import numpy as np

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
from tests.queueing.estimation_runs import LAW, LENGTHS

SLOWER = LAW.at_speed(1.3)


def simulated(
    policy: str, load: float, count: int, seed: int, law: LatencyModel = SLOWER
) -> list[Record]:
    """A run of the simulator that drives the policy objects."""
    model = Queue.read(policy, LENGTHS, law, max_num_seqs=64)
    jobs, residuals = draw_jobs(
        model, load * model.largest_stable_rate, count, np.random.SeedSequence(seed)
    )
    return simulate_trace(model.policy, jobs, SimulatedEngine(law, max_batch_size=64), residuals)


def wandering(seed: int, sigma: float, tau: float, count: int = 1200) -> BatchTimes:
    """Batches of about a second, their log speed an Ornstein-Uhlenbeck process, a gamma residual
    of cv 0.15 on top.
    """
    rng = np.random.default_rng(seed)
    decay = math.exp(-1 / tau)
    level = np.empty(count)
    level[0] = rng.normal()
    for i in range(1, count):
        level[i] = decay * level[i - 1] + math.sqrt(1 - decay**2) * rng.normal()
    ratio = np.exp(sigma * level - sigma**2 / 2) * rng.gamma(0.15**-2, 0.15**2, count)
    fitted = rng.uniform(0.8, 1.2, count)
    ones = np.ones(count)
    return BatchTimes(np.arange(count, dtype=float), ratio * fitted, fitted, ones, ones, 0.5 * ones)


def rest(times: BatchTimes) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    return times.fitted, times.size, times.longest, times.decoding
