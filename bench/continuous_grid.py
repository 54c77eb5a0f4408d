"""The formula of continuous batching beside simulation of the same model, over slots, loads,
lengths and laws. Writes docs/continuous-grid.csv, cell by cell; the same command goes on where it
was cut. About an hour on one core.

    .venv/bin/python bench/continuous_grid.py            simulate what is missing, then the table
    .venv/bin/python bench/continuous_grid.py --table    the table from the file
    .venv/bin/python bench/continuous_grid.py --formula  the formula's columns anew, and the table

Simulated means have the control variate of `simulate_steady_state`; a column of the file for the
standard error of the mean delay. `doubt` in the table is that of the code, not of the file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.models.slots.continuous import doubt, solve_continuous
from queueing.result import Prediction
from queueing.simulation.experiment import simulate_steady_state

FILE = Path(__file__).parents[1] / "docs/continuous-grid.csv"
LAWS = {
    "gpu": LatencyModel(k1=1e-3, k3=0.06e-3, k4=8e-3),
    "cpu": LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, turnaround=1.55e-3),
    "shared": LatencyModel(k1=0.3e-3, k3=0.5e-3, k4=0.5e-3),
}
LENGTHS = {  # about 64 tokens each
    "fixed": "deterministic:value=64",
    "uniform": "uniform:low=1,high=127",
    "geometric": "geometric:mean=64",
    "lognormal SCV 1": "lognormal:mu=3.81,sigma=0.833",
    "lognormal SCV 2": "lognormal:mu=3.61,sigma=1.048",
    "lognormal SCV 4": "lognormal:mu=3.354,sigma=1.269",
    "lognormal SCV 7": "lognormal:mu=3.119,sigma=1.442",
    "geometric 32 or lognormal 350": "mixture:weights=0.9+0.1,"
    "parts=geometric:mean=32+lognormal:mu=5.733:sigma=0.5",
    "32 or 640": "mixture:weights=0.95+0.05,parts=deterministic:value=32+deterministic:value=640",
    "lognormal 20 or 240": "mixture:weights=0.8+0.2,"
    "parts=lognormal:mu=2.746:sigma=0.7+lognormal:mu=5.231:sigma=0.7",
}
SLOTS = {
    "gpu": (2, 4, 8, 32, 64, 128, 256),
    "cpu": (4, 32, 128),
    "shared": (4, 32, 128),
}
REQUESTS = {0.3: 300_000, 0.6: 500_000, 0.85: 1_000_000, 0.95: 2_000_000}
LIMIT = 8192  # tokens
MEANS = ("queueing_delay", "sojourn_time", "time_to_first_token", "inter_token_latency")
BORDER = 0.05  # of a mean
SHORT = 0.02  # of the sojourn: a delay below it does not matter
ROUGH = 0.025  # relative standard error from which a simulated mean judges nothing


@dataclass(frozen=True)
class Cell:
    """One queue."""

    law: str
    slots: int
    lengths: str
    load: float

    @cached_property
    def model(self) -> Model:
        """It, with the lengths cut at LIMIT."""
        return Model.read(f"continuous:max_batch_size={self.slots}", self.drawn, LAWS[self.law])

    @property
    def drawn(self) -> TokenDistribution:
        """The law of the lengths."""
        return parse_distribution(LENGTHS[self.lengths], LIMIT)


@dataclass(frozen=True)
class Row:
    """A cell; of each mean that judges, model / simulation - 1: not of a delay that is SHORT, nor
    of one with a ROUGH standard error.
    """

    cell: Cell
    off: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest deviation, with its sign."""
        return max(self.off.values(), key=abs)

    @cached_property
    def doubted(self) -> bool:
        """By the code as it is."""
        model = self.cell.model
        rate = self.cell.load * model.largest_stable_rate
        return doubt(model.slot_time, rate, self.cell.slots) is not None


def cells() -> Iterator[Cell]:
    """All, the quick ones first."""
    for load, (law, slots) in itertools.product(REQUESTS, SLOTS.items()):
        for some, lengths in itertools.product(slots, LENGTHS):
            yield Cell(law, some, lengths, load)


def measured(cell: Cell) -> dict[str, float | str]:
    """A line of the file, seconds."""
    model = cell.model
    rate = cell.load * model.largest_stable_rate
    found = simulate_steady_state(model, rate, REQUESTS[cell.load])
    line: dict[str, float | str] = {
        "law": cell.law,
        "slots": cell.slots,
        "lengths": cell.lengths,
        "load": cell.load,
        "requests": REQUESTS[cell.load],
        "delay_standard_error": found.queueing_delay.standard_error or 0.0,
    }
    for name, by_formula in formula_of(cell).items():
        line[f"formula_{name}"] = by_formula
        line[f"simulated_{name}"] = mean_of(found, name)
    return line


def formula_of(cell: Cell) -> dict[str, float]:
    """Its means, seconds."""
    rate = cell.load * cell.model.largest_stable_rate
    found = solve_continuous(cell.model.slot_time, rate, cell.slots)
    return {name: getattr(found, name) for name in MEANS}


def renew_formula() -> None:
    """Its columns by the code as it is; those of the simulations stay."""
    with FILE.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        found = formula_of(cell_of(row))
        row |= {f"formula_{name}": f"{value:.6g}" for name, value in found.items()}
    with FILE.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def mean_of(found: Prediction, name: str) -> float:
    """Seconds; not a number where it has none."""
    value = getattr(found, name).mean
    return math.nan if value is None else float(value)


def kept() -> list[Row]:
    """The rows of the file."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as lines:
        return [row_of(line) for line in csv.DictReader(lines)]


def cell_of(line: dict[str, str]) -> Cell:
    """Which it is of."""
    return Cell(line["law"], int(line["slots"]), line["lengths"], float(line["load"]))


def row_of(line: dict[str, str]) -> Row:
    """As read. A time to first token is as uncertain as the delay that it holds."""
    values = {key: float(text) for key, text in line.items() if key not in ("law", "lengths")}
    simulated = {name: values[f"simulated_{name}"] for name in MEANS}
    error, least = values["delay_standard_error"], SHORT * simulated["sojourn_time"]
    judging = [
        name
        for name, seconds in simulated.items()
        if (name == MEANS[-1] or error < ROUGH * seconds) and (name != MEANS[0] or seconds > least)
    ]
    return Row(
        cell_of(line), {name: values[f"formula_{name}"] / simulated[name] - 1 for name in judging}
    )


def simulate_missing() -> None:
    """Append the cells that the file lacks."""
    there = {row.cell for row in kept()}
    for number, cell in enumerate(cells(), start=1):
        if cell in there:
            continue
        line = {
            key: f"{value:.6g}" if isinstance(value, float) else value
            for key, value in measured(cell).items()
        }
        new = not FILE.exists()
        with FILE.open("a", newline="") as lines:
            writer = csv.DictWriter(lines, line, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(line)
        print(f"{number}: {cell}", file=sys.stderr)


def table(rows: list[Row]) -> str:
    """By lengths and slots: the worst deviations of trusted cells, and how many are doubted."""
    slots = sorted({row.cell.slots for row in rows})
    lines = [f"| lengths | {' | '.join(map(str, slots))} |", "|---" * (len(slots) + 1) + "|"]
    for lengths in LENGTHS:
        texts = [
            text_of([row for row in rows if row.cell.lengths == lengths and row.cell.slots == some])
            for some in slots
        ]
        lines.append(f"| {lengths} | {' | '.join(texts)} |")
    wrong = [row for row in rows if abs(row.worst) > BORDER and not row.doubted]
    trusted = sum(not row.doubted for row in rows)
    lines.append(f"\n{len(rows)} cells, {trusted} trusted, of which {len(wrong)} are off by more.")
    lines += [f"- {row.cell}: {row.off}" for row in wrong]
    return "\n".join(lines)


def text_of(rows: list[Row]) -> str:
    """Worst of either sign in %, then the number in doubt."""
    trusted = [row.worst for row in rows if not row.doubted]
    doubted = sum(row.doubted for row in rows)
    span = f"{min(trusted):+.0%} {max(trusted):+.0%}" if trusted else "-"
    return span + (f" ({doubted} in doubt)" if doubted else "")


def main() -> None:
    """Simulate and tell."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--table", action="store_true", help="simulate nothing")
    flags.add_argument("--formula", action="store_true", help="compute the formula's columns anew")
    options = flags.parse_args()
    if options.formula:
        renew_formula()
    elif not options.table:
        simulate_missing()
    print(table(kept()))


if __name__ == "__main__":
    main()
