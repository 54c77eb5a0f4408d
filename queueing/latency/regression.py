"""Unweighted least squares with intervals, as the documents fit their lines.

    y_i = sum_j x_ij beta_j + e_i,    s^2 = sum e_i^2 / (n - p),    Cov(beta) = s^2 (X^T X)^-1
    R2 = 1 - sum e_i^2 / sum (y_i - mean y)^2

95 % intervals beta_j +- t(0.975, n - p) sqrt(Cov_jj): valid for independent errors of equal
variance. Measurements over two orders of magnitude seldom have these; the interval then says how
well the line fits, not how well the coefficient is known. Method: QR of the design with columns
scaled to length 1, so that a column of squares does not spoil the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from kendall.policies.text import SpecError

Vector = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """Coefficients by name, their 95 % intervals, R2 (not a number where the responses are all
    equal) and residuals.
    """

    coefficients: dict[str, float]
    intervals: dict[str, Interval]
    r2: float
    residuals: Vector  # measured - fitted


@dataclass(frozen=True, slots=True, eq=False)
class LineFit:
    """y = slope x + intercept."""

    slope: float
    intercept: float
    r2: float
    intervals: dict[str, Interval]  # of "slope" and "intercept", 95 %
    residuals: Vector

    def __call__(self, x: float) -> float:
        """The fitted value at x."""
        return self.slope * x + self.intercept


def fit_line(x: Sequence[float], y: Sequence[float]) -> LineFit:
    """The line through measurements (x, y). Raises SpecError: fewer than three, or all at the
    same x.
    """
    column = np.asarray(x, dtype=float)
    fit = least_squares({"slope": column, "intercept": np.ones_like(column)}, y)
    return LineFit(
        fit.coefficients["slope"],
        fit.coefficients["intercept"],
        fit.r2,
        fit.intervals,
        fit.residuals,
    )


def least_squares(columns: dict[str, Vector], response: Sequence[float]) -> LeastSquares:
    """`response` as a combination of the named columns. Raises SpecError where these do not
    determine it.
    """
    design, measured = np.column_stack(list(columns.values())), np.asarray(response, dtype=float)
    points, unknowns = design.shape
    finite = np.isfinite(design).all() and np.isfinite(measured).all()
    if len(measured) != points or points <= unknowns or not finite:
        raise SpecError(
            f"got {points} points and {len(measured)} responses; expected as many of both, "
            f"finite, and more than {unknowns}"
        )
    lengths = np.linalg.norm(design, axis=0)
    if np.any(lengths == 0) or np.linalg.matrix_rank(design / lengths) < len(columns):
        raise SpecError(
            f"got measurements that cannot tell {', '.join(columns)} apart; expected more "
            "distinct points"
        )
    orthogonal, triangle = np.linalg.qr(design / lengths)
    scaled = np.linalg.solve(triangle, orthogonal.T @ measured)
    residuals = measured - design / lengths @ scaled
    squares, degrees = float(residuals @ residuals), len(measured) - len(columns)
    errors = np.sqrt(squares / degrees) * np.linalg.norm(np.linalg.inv(triangle), axis=1) / lengths
    half = float(stdtrit(degrees, 0.975)) * errors
    values = scaled / lengths
    intervals = zip((values - half).tolist(), (values + half).tolist(), strict=True)
    total = float(np.sum((measured - measured.mean()) ** 2))
    return LeastSquares(
        coefficients=dict(zip(columns, values.tolist(), strict=True)),
        intervals=dict(zip(columns, intervals, strict=True)),
        r2=1 - squares / total if total > 0 else float("nan"),
        residuals=residuals,
    )
