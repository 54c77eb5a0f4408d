"""Do printed intervals of a mean delay cover it, also where they are narrow? Simulated runs against
the exact mean.

.venv/bin/python bench/interval_coverage.py [--runs 600] [--page docs/load-testing.md]

Every queue is run at loads 0.3 to 0.9 with 200 to 20,000 requests. An interval counts as printed
where the run is not "too short"; the printed ones of a queue are pooled and sorted by their half
width over the mean, and coverage is given for each decile. Each run is judged twice: by its delays
alone (any server), and with what `kendall load`, `compare` and `sweep` know besides.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadgen.compare.comparison import Predicted
from loadgen.compare.sampling_error import sampling_error
from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.latency.law import LatencyModel
from queueing.measurement.delay_variance import AsymptoticVariance, single_server_variance
from queueing.measurement.statistics import Interval, find_warm_up, mean_interval
from queueing.model import Model
from queueing.prediction import predict_model
from queueing.simulation.experiment import simulate_run
from queueing.simulation.fast import SimulatedRun

ONE = parse_distribution("deterministic:value=1")
LENGTHS = parse_distribution("uniform:low=1,high=60")
BATCHES = LatencyModel(k1=0.002, k2=0.01, k3=0.0002, k4=0.002)
SINGLE = parse_policy("single")
QUEUES = {
    "M/M/1": Model.read(SINGLE, ONE, LatencyModel(k4=1.0, cv=1.0)),
    "M/D/1": Model.read(SINGLE, ONE, LatencyModel(k4=1.0)),
    "M/G/1, SCV 4": Model.read(SINGLE, ONE, LatencyModel(k4=1.0, cv=2.0)),
    "capped:max_batch_size=8": Model.read(
        parse_policy("capped:max_batch_size=8"), LENGTHS, BATCHES
    ),
}
LOADS = (0.3, 0.5, 0.7, 0.9)
COUNTS = (200, 600, 1_000, 2_000, 6_000, 20_000)
FEW = 20  # printed intervals of a cell, below which its coverage is not given
MOST = 8_000_000  # requests of a cell
HOW = ("delays alone", "with theory")
BEGIN, END = (
    "<!-- begin: bench/interval_coverage.py -->",
    "<!-- end: bench/interval_coverage.py -->",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One queue at one load: intervals of many runs of one length, by how they were judged."""

    load: float
    count: int
    exact: float
    intervals: dict[str, list[Interval]]

    def printed(self, how: str) -> list[Interval]:
        """Those of runs that are not too short."""
        return [each for each in self.intervals[how] if not each.too_short]


def cells(
    name: str, runs: int, loads: tuple[float, ...] = LOADS, counts: tuple[int, ...] = COUNTS
) -> Iterator[Cell]:
    """Seeded: the same cells whenever they are asked for."""
    model = QUEUES[name]
    for load in loads:
        rate = load * model.largest_stable_rate
        exact = predict_model(model, rate).queueing_delay.mean
        assert exact is not None
        for count in counts:
            number = min(runs, MOST // count)
            planned = None if model.bound == 1 else _planned(model, rate, count, exact)
            found: dict[str, list[Interval]] = {how: [] for how in HOW}
            for seed in range(number):
                run = simulate_run(
                    model, rate, count, np.random.SeedSequence((seed, count, round(100 * load)))
                )
                for how, interval in zip(HOW, judged(run, planned), strict=True):
                    found[how].append(interval)
            yield Cell(load, count, exact, found)


def judged(run: SimulatedRun, planned: float | None = None) -> tuple[Interval, Interval]:
    """By the delays alone, and with theory: M/G/1's formula, or the spread of planned runs."""
    run = run.after(find_warm_up(np.asarray(run.queueing_delay, dtype=np.float64)).dropped)
    delays, arrived_at, service_times = (
        np.asarray(each, dtype=np.float64)
        for each in (run.queueing_delay, run.arrived_at, run.server_free_at - run.dispatched_at)
    )
    if planned is None:
        theory = single_server_variance(arrived_at, delays, service_times)
    else:
        relative = delays.size * planned**2
        theory = AsymptoticVariance(
            relative, max(1.0, relative * float(delays.mean() ** 2 / delays.var()))
        )
    return mean_interval(delays), mean_interval(delays, theory=theory)


def _planned(model: Model, rate: float, count: int, exact: float) -> float:
    """Standard deviation over the mean of runs of this length under the law, as `compare` plans
    it.
    """
    answer = Predicted(
        load=model.load(rate), queueing_delay=exact, sojourn_time=None, method="exact"
    )
    found = sampling_error(model, rate, count, "queueing_delay", answer, seed=1)
    assert found is not None
    return found.relative_spread


def row(name: str, how: str, found: list[Cell]) -> str:
    """Printed intervals of a queue, pooled: coverage of all, and by decile of the half width
    over the mean.
    """
    pool = sorted(
        (each.relative, each.covers(cell.exact)) for cell in found for each in cell.printed(how)
    )
    runs = sum(len(cell.intervals[how]) for cell in found)
    if len(pool) < 100:
        return f"| {name} | {how} | {runs:,} | {len(pool)} | - | - | - |"
    covers = np.array([covered for _, covered in pool], dtype=np.float64)
    deciles = " ".join(f"{100 * part.mean():.0f}" for part in np.array_split(covers, 10))
    return (
        f"| {name} | {how} | {runs:,} | {len(pool):,} | {100 * covers.mean():.1f} | {deciles} "
        f"| {_worst(found, how)} |"
    )


def _worst(found: list[Cell], how: str) -> str:
    """The lowest coverage of a cell, of those that print at least `FEW` intervals."""
    every = [(_coverage(cell, how), cell) for cell in found if len(cell.printed(how)) >= FEW]
    lowest, cell = min(every, key=lambda pair: pair[0])
    return (
        f"{100 * lowest:.0f} (load {cell.load}, {cell.count:,}: {len(cell.printed(how))} of "
        f"{len(cell.intervals[how])})"
    )


def _coverage(cell: Cell, how: str) -> float:
    return float(np.mean([each.covers(cell.exact) for each in cell.printed(how)]))


def shares(found: list[Cell], how: str) -> Iterator[str]:
    """Of one queue: share of the runs that print an interval, and of these that cover, by load
    and length.
    """
    for load in sorted({cell.load for cell in found}):
        yield (
            f"| {load} | "
            + " | ".join(_share(cell, how) for cell in found if cell.load == load)
            + " |"
        )


def _share(cell: Cell, how: str) -> str:
    printed = cell.printed(how)
    share = f"{100 * len(printed) / len(cell.intervals[how]):.0f}"
    return share if len(printed) < FEW else f"{share}, {100 * _coverage(cell, how):.0f}"


def text(runs: int) -> str:
    """Both tables."""
    every = {name: list(cells(name, runs)) for name in QUEUES}
    deciles = "cover by decile of the printed half width, narrowest first, %"
    lines = [
        (
            f"| queue | judged by | runs | printed | cover, % | {deciles} | lowest of a cell, % "
            "(printed, of runs) |"
        ),
        "|---" * 7 + "|",
    ]
    lines += [row(name, how, found) for name, found in every.items() for how in HOW]
    for how in HOW:
        lines += [
            "",
            (
                f"M/M/1, {how}: share of the runs that print an interval and, of 20 or more, "
                "share of these that cover, %"
            ),
            "",
        ]
        lines += [
            "| utilisation | " + " | ".join(f"{count:,}" for count in COUNTS) + " |",
            "|---" * (len(COUNTS) + 1) + "|",
        ]
        lines += shares(every["M/M/1"], how)
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or put them into a page between its marks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=600, help="runs of a cell, fewer of long ones (default 600)"
    )
    parser.add_argument("--page", type=Path, help="put the tables between the marks of this page")
    given = parser.parse_args()
    found = text(given.runs)
    print(found)
    if given.page is not None:
        page = given.page.read_text()
        given.page.write_text(
            re.sub(f"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{found}\n\n{END}", page)
        )


if __name__ == "__main__":
    main()
