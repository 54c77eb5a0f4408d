"""What the measurements cannot tell, in words: before a law is believed, and before it is used
beyond what it was measured on.

Of designed cells (b and l set by the calibrator): the condition number of their design, columns
scaled to length 1, says how far relative errors of the times are blown up in the coefficients;
above `ILL` some coefficients trade against each other, and the smallest direction names them. A
coefficient whose interval is wider than `VAGUE` of what its column contributes is not known alone
(the time that the law predicts may still be). Of a window: sizes and lengths beyond the calibrated
ones.

A law is never fitted to a run's own batches: slow moments let the queue grow and so make batches
larger, and the coefficients become nonsense that predicts well. Only a factor is taken from a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.latency.fit import Measured

ILL = 100.0
VAGUE = 0.5
NAMES = ("k1", "k2", "k3", "k4")
BEYOND_SHARE = 0.01  # of the batches


@dataclass(frozen=True, slots=True)
class Identifiability:
    """`condition` of the design; `largest_batch`, `longest` measured; `doubts` in words, none
    where all is well.
    """

    condition: float
    largest_batch: int
    longest: int
    doubts: tuple[str, ...]


def of_cells(
    cells: Sequence[Measured], intervals: Mapping[str, tuple[float, float]], *, padded: bool = True
) -> Identifiability:
    """Designed cells, and the fit's 95 % intervals of k1 .. k4 (s)."""
    if not cells:
        return Identifiability(np.inf, 0, 0, ("nothing was measured: no coefficient is known",))
    rows = []
    for cell in cells:
        size, longest = len(cell.lengths), max(cell.lengths)
        rows.append((size, 1.0, size * longest if padded else sum(cell.lengths), longest))
    design = np.array(rows, dtype=float)
    scaled = design / np.linalg.norm(design, axis=0)
    _, sizes, directions = np.linalg.svd(scaled)
    condition = (
        float(sizes[0] / sizes[-1]) if len(sizes) == len(NAMES) and sizes[-1] > 1e-12 else np.inf
    )
    doubts = [
        *trade_offs(condition, directions[-1]),
        *vague_coefficients(design, intervals),
    ]
    if np.unique(design[:, 0]).size < 2:
        doubts.append(
            f"only batches of {design[0, 0]:.0f} were measured: how the time grows with the size "
            "is not known"
        )
    if np.unique(design[:, 3]).size < 2:
        doubts.append(
            f"only lengths of {design[0, 3]:.0f} were measured: what a token costs is not known "
            "apart from the set-up"
        )
    return Identifiability(
        condition, int(design[:, 0].max()), int(design[:, 3].max()), tuple(doubts)
    )


def beyond(
    sizes: npt.NDArray[np.float64],
    lengths: npt.NDArray[np.float64],
    largest_batch: int,
    longest: int,
    what: str = "requests",
) -> tuple[str, ...]:
    """Sizes and lengths that the calibration did not cover, one entry each of `what`."""
    doubts = []
    for name, values, limit in (
        ("batch sizes", sizes, largest_batch),
        ("lengths", lengths, longest),
    ):
        share = float(np.mean(values > limit)) if values.size else 0.0
        if share > BEYOND_SHARE:
            reach = f"{name} up to {values.max():.0f} were never calibrated (largest: {limit})"
            doubts.append(f"{reach}; {share:.0%} of the {what} rest on the law's form")
    return tuple(doubts)


def trade_offs(condition: float, weakest: npt.NDArray[np.float64]) -> list[str]:
    """Coefficients that the weakest direction of the design cannot tell apart."""
    if condition <= ILL:
        return []
    names = [name for name, part in zip(NAMES, np.abs(weakest), strict=True) if part > 0.3]
    return [
        (
            f"{' and '.join(names)} trade against each other (condition number {condition:.3g}): "
            "measure more distinct sizes and lengths"
        )
    ]


def vague_coefficients(
    design: npt.NDArray[np.float64], intervals: Mapping[str, tuple[float, float]]
) -> list[str]:
    """Coefficients whose interval is wider than `VAGUE` of what their column contributes."""
    doubts = []
    for index, name in enumerate(NAMES):
        low, high = intervals.get(name, (0.0, 0.0))
        middle = (low + high) / 2
        half = (high - low) / 2
        if half > VAGUE * abs(middle):
            share = half * float(design[:, index].mean()) * 1e3
            doubts.append(
                f"{name} is known to +-{half:.2g} s only ({share:.3g} ms in a mean batch): its "
                f"value is {middle:.2g} s"
            )
    return doubts
