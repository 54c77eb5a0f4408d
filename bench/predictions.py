"""How long predictions take: from the shell, in process with tables built, and a sweep of rates
that shares tables.

.venv/bin/python bench/predictions.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
LENGTHS = "lognormal:mu=5,sigma=0.7"
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "fixed:batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=8",
)


def model(policy: str) -> Queue:
    """The queue that is predicted."""
    return Queue.read(policy, parse_distribution(LENGTHS, 1024), LAW)


def shell(runs: int) -> None:
    """The command, interpreter start included."""
    arguments = [
        "predict",
        "--policy",
        "capped:max_batch_size=8",
        "--arrival-rate",
        "5",
        "--output-tokens",
        LENGTHS,
    ]
    arguments += ["--max-output-tokens", "1024", "--latency", "reference", "--json"]
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kendall", *arguments], check=True, stdout=subprocess.DEVNULL
        )
        seconds.append(time.perf_counter() - start)
    print(
        f"kendall predict from the shell: median {statistics.median(seconds):.2f} s of "
        f"{', '.join(f'{s:.2f}' for s in seconds)}"
    )


def in_process(runs: int) -> None:
    """An exact prediction with its tables built."""
    queue = model("capped:max_batch_size=64")
    for load in (0.3, 0.6, 0.8, 0.9):
        predict_model(queue, load * queue.largest_stable_rate)
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            predict_model(queue, load * queue.largest_stable_rate)
            seconds.append(time.perf_counter() - start)
        print(
            f"capped, b_max = 64, load {load}: median {1e3 * statistics.median(seconds):.0f} ms, "
            f"least {1e3 * min(seconds):.0f} ms"
        )


def sweep(rates: int) -> None:
    """Many rates, each policy's tables shared."""
    total = time.perf_counter()
    for policy in POLICIES:
        queue, start = model(policy), time.perf_counter()
        methods = set()
        for load in np.linspace(0.02, 0.8 if policy == "dynamic" else 0.95, rates):
            methods.add(predict_model(queue, float(load) * queue.largest_stable_rate).method)
        print(
            f"  {policy:<30}{time.perf_counter() - start:6.1f} s  {', '.join(sorted(methods))}",
            flush=True,
        )
    print(f"sweep of {rates} rates x {len(POLICIES)} policies: {time.perf_counter() - total:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", type=int, default=200)
    given = parser.parse_args()
    shell(given.runs)
    in_process(given.runs)
    sweep(given.rates)


if __name__ == "__main__":
    main()
