"""From a run's measurements to the law, and what the law leaves out.

    H = k1 b + k2 + kp sum(prompt) + (k3 b + k4) l             the padded law: queueing.latency.fit,
                                                               on all batches
    s = g b n + k3 b + k4                                      a step whose context is n tokens per
                                                               sequence
    H = the padded law + g b sum of the contexts of its steps  the law with that growth

The law has no context: its k3 holds the growth at the mean of the measured lengths, so that it
overrates short outputs and underrates long ones. Both errors are given, cell by cell. Energy of a
batch of the longest output: c[b] = beta b + c0.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.latency.energy import EnergyFit, fit_energy
from kendall.queueing.latency.fit import Fit, Measured, fit_law
from kendall.queueing.latency.profile import Profile
from kendall.queueing.latency.regression import LeastSquares, least_squares

from .design import Cell, Shape

WINDOWS = 4  # parts of the longest outputs in which the step is averaged


@dataclass(frozen=True, slots=True)
class Batch:
    """One served batch."""

    cell: Cell
    ends: tuple[float, ...]  # seconds from its start until each token was there
    joules: float | None
    round: int

    @property
    def service_time(self) -> float:
        return self.ends[-1]

    def row(self) -> dict[str, Any]:
        """The batch as a profile's cell has it, without its single steps."""
        return {
            "batch_size": self.cell.batch_size,
            "prompt_tokens": self.cell.prompt_tokens,
            "output_tokens": self.cell.output_tokens,
            "service_time": self.service_time,
            "prefill": self.ends[0],
            "joules": self.joules,
            "round": self.round,
        }


@dataclass(frozen=True, slots=True)
class RawRun:
    """One or more raw files of the same machine, model and versions."""

    header: dict[str, Any]
    batches: tuple[Batch, ...]
    files: tuple[str, ...]

    def cells(self) -> dict[Cell, list[Batch]]:
        """The batches of each cell, in the order of size, prompt and output."""
        batches: dict[Cell, list[Batch]] = defaultdict(list)
        for batch in self.batches:
            batches[batch.cell].append(batch)
        return dict(
            sorted(
                batches.items(),
                key=lambda item: (item[0].batch_size, item[0].prompt_tokens, item[0].output_tokens),
            )
        )

    def longest_outputs(self) -> dict[int, list[Batch]]:
        """By batch size, the batches of the longest output measured at every size, at the first
        prompt length. Raises SpecError.
        """
        prompt = self.header["prompt_tokens"][0]
        cells = {
            cell: batches for cell, batches in self.cells().items() if cell.prompt_tokens == prompt
        }
        lengths = [
            {cell.output_tokens for cell in cells if cell.batch_size == size}
            for size in {cell.batch_size for cell in cells}
        ]
        common = max(set.intersection(*lengths), default=0) if lengths else 0
        if common < 2:
            raise SpecError(
                "got no output of 2 tokens or more at every batch size; expected whole rounds in "
                f"{', '.join(self.files)}"
            )
        return {
            cell.batch_size: batches
            for cell, batches in cells.items()
            if cell.output_tokens == common
        }

    def padded_law(self) -> Fit:
        """The law on all batches. Raises SpecError where they do not determine it."""
        batches = [
            Measured(
                (cell.output_tokens,) * cell.batch_size,
                cell.batch_size * cell.prompt_tokens,
                batch.service_time,
            )
            for cell, of_cell in self.cells().items()
            for batch in of_cell
        ]
        try:
            return fit_law(batches, np.random.default_rng(0))
        except ValueError as error:
            raise SpecError(str(error)) from None

    def repeat_cv(self) -> float:
        """Coefficient of variation of a cell's repeats, root mean square over cells: the scatter
        without the law's misfit.
        """
        times = [
            [batch.service_time for batch in batches]
            for batches in self.cells().values()
            if len(batches) > 1
        ]
        return (
            float(np.sqrt(np.mean([np.var(one, ddof=1) / np.mean(one) ** 2 for one in times])))
            if times
            else float("nan")
        )

    def round_speeds(self) -> list[float]:
        """Mean of time over its cell's mean, round by round: how the machine's speed wandered."""
        means = {cell: mean_time(batches) for cell, batches in self.cells().items()}
        ratios: dict[int, list[float]] = defaultdict(list)
        for batch in self.batches:
            ratios[batch.round].append(batch.service_time / means[batch.cell])
        return [
            float(np.mean(ratios[turn]))
            for turn in sorted(ratios)
            if len(ratios[turn]) == len(means)
        ]

    def step_growth(self) -> LeastSquares:
        """k3, k4 and g of a step, from the longest outputs. Raises SpecError where these do not
        determine them.
        """
        rows, times = [], []
        for size, batches in self.longest_outputs().items():
            for seconds, context in zip(*window_steps(batches, 16), strict=True):
                rows.append((size, 1.0, size * context))
                times.append(seconds)
        return least_squares(
            dict(zip(("k3", "k4", "g"), np.array(rows, dtype=float).T, strict=True)), times
        )

    def grown_law(self) -> dict[Cell, float]:
        """Seconds of each cell by the law with growth, relative least squares on the cells' means.
        Raises SpecError.
        """
        cells = self.cells()
        times = np.array([mean_time(batches) for batches in cells.values()])
        sizes, prompts, outputs = np.array(
            [(c.batch_size, c.prompt_tokens, c.output_tokens) for c in cells], dtype=float
        ).T
        contexts = (outputs - 1) * (prompts + outputs / 2)  # sum of n + 1 .. n + l - 1
        columns = {
            "k1": sizes,
            "k2": np.ones_like(sizes),
            "k3": sizes * outputs,
            "k4": outputs,
            "g": sizes * contexts,
        }
        if len(set(prompts.tolist())) > 1:
            columns["kp"] = sizes * prompts
        fit = least_squares(
            {name: column / times for name, column in columns.items()}, np.ones_like(times).tolist()
        )
        return dict(zip(cells, (times * (1 - fit.residuals)).tolist(), strict=True))

    def batch_energy(self) -> EnergyFit | None:
        """c[b] at the longest output; None where the energy was not read. Raises SpecError: fewer
        than three sizes, or beta <= 0.
        """
        batches = self.longest_outputs()
        joules = [
            [batch.joules for batch in of_size if batch.joules is not None]
            for of_size in batches.values()
        ]
        if not all(joules):
            return None
        times = [mean_time(of_size) for of_size in batches.values()]
        watts = [float(np.mean(spent)) / time for spent, time in zip(joules, times, strict=True)]
        return fit_energy(
            list(batches), watts, [size / time for size, time in zip(batches, times, strict=True)]
        )

    def profile(self, fit: Fit, name: str) -> Profile:
        """The profile that `--latency` reads; its cells are the batches without their single steps,
        which the raw file keeps.
        """
        header, cells = self.header, list(self.cells())
        shape = Shape(**header["shape"])
        return Profile(
            name=name,
            law=fit.law,
            intervals=fit.intervals,
            r2=fit.r2,
            mape=fit.mape,
            engine="plain PyTorch decode loop, static batches (bench/gpu_law.py)",
            model=(
                f"{header['model']} shape, {shape.parameters / 1e9:.2f} billion random weights, "
                f"{header['dtype']}"
            ),
            machine=header["machine"],
            date=header["date"],
            versions=header["versions"],
            max_num_seqs=max(cell.batch_size for cell in cells),
            prompt_tokens=header["prompt_tokens"][0],
            max_output_tokens=max(cell.output_tokens for cell in cells),
            note=(
                "padded law, least squares of relative errors; growth of the step with its context "
                f"is in k3; raw: {', '.join(self.files)}"
            ),
            cells=[batch.row() for batches in self.cells().values() for batch in batches],
        )


SAME = ("shape", "dtype", "machine", "versions", "prompt_tokens", "cuda_graphs")


def read_runs(paths: Sequence[Path]) -> RawRun:
    """The files together. Raises SpecError: not a raw file, no batches, or not measured alike."""
    headers, batches = [], []
    for number, path in enumerate(paths):
        try:
            header, *lines = (json.loads(line) for line in whole_lines(path))
            header.setdefault("cuda_graphs", False)  # before there were any
            headers.append({key: header[key] for key in (*SAME, "model", "date", "seed")})
            for line in lines:
                cell = Cell(line["batch_size"], line["prompt_tokens"], line["output_tokens"])
                turn = line["round"] + 1000 * number
                batches.append(Batch(cell, tuple(line["ends"]), line["joules"], turn))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(
                f"got {path}; expected a raw file of bench/gpu_law.py ({type(error).__name__}: "
                f"{error})"
            ) from None
    if not batches:
        raise SpecError(
            f"got no batches in {', '.join(map(str, paths))}; expected a run that measured some"
        )
    for key in SAME:
        if any(header[key] != headers[0][key] for header in headers):
            raise SpecError(
                f"got files with different {key}; expected runs of one machine, model and design"
            )
    return RawRun(headers[0], tuple(batches), tuple(path.name for path in paths))


def whole_lines(path: Path) -> list[str]:
    """The lines of a file; the last one of a killed run may lack its end and is left out."""
    return path.read_text().rpartition("\n")[0].splitlines()


def mean_time(batches: Sequence[Batch]) -> float:
    return float(np.mean([batch.service_time for batch in batches]))


def window_steps(
    batches: Sequence[Batch], windows: int = WINDOWS
) -> tuple[list[float], list[float]]:
    """Mean step, seconds, and mean context, tokens, of each part of an output; every part is a
    mean over the batches.
    """
    cell = batches[0].cell
    steps = np.mean([np.diff(batch.ends) for batch in batches], axis=0)
    contexts = cell.prompt_tokens + 1 + np.arange(len(steps))  # the new token sees itself too
    parts = [part for part in np.array_split(np.arange(len(steps)), windows) if len(part)]
    return [float(steps[part].mean()) for part in parts], [
        float(contexts[part].mean()) for part in parts
    ]
