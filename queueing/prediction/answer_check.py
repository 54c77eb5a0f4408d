"""The check of every predicted number: it is finite, and not below zero. Anything else is no
answer, but a method that failed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kendall.queueing.errors import NotConvergedError, OutOfReachError
from kendall.queueing.result import Mean, Prediction, Quantiles

_ROUNDING = 1e-9  # of the sojourn: a number below zero by no more is zero


def checked_answer(solve: Callable[[], Prediction]) -> Prediction:
    """The result of `solve`, its numbers checked. Raises NotConvergedError: an overflow on the
    way, or a number that cannot be right.
    """
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            return _checked(solve())
    except (FloatingPointError, ZeroDivisionError, OverflowError, np.linalg.LinAlgError) as error:
        raise OutOfReachError(f"a number on the way to the answer ({error})") from None


def _checked(answer: Prediction) -> Prediction:
    slack = _ROUNDING * (answer.sojourn_time.mean or 0.0)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, Quantiles | Mean):
            changed[field.name] = _numbers(field.name, value, slack)
        elif field.name in ("load", "utilisation", "loss_fraction") and value is not None:
            changed[field.name] = _number(field.name, value, _ROUNDING)
    return dataclasses.replace(answer, **changed)


def _numbers(name: str, value: Quantiles | Mean, slack: float) -> Quantiles | Mean:
    def checked(key: str, number: float) -> float:
        if number == math.inf:
            return number
        return _number(f"{key} of the {name.replace('_', ' ')}", number, slack)

    error = value.standard_error
    own = None if error is None else checked("standard_error", error)
    if isinstance(value, Quantiles):
        return dataclasses.replace(value.mapped(checked), standard_error=own)
    return Mean(None if value.mean is None else checked("mean", value.mean), own)


def _number(name: str, value: float, slack: float) -> float:
    if math.isfinite(value) and value >= -slack:
        return max(value, 0.0)
    raise NotConvergedError(f"the {name} ({value:.4g})", abs(value))
