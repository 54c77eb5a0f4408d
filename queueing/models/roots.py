"""A root inside a bracket, by bisection: scipy.optimize has better ones, and takes longer to
import than `predict` may run.
"""

from __future__ import annotations

from collections.abc import Callable


def bisected(function: Callable[[float], float], low: float, high: float) -> float:
    """Where `function` changes its sign between `low` and `high`, to the last digits. Raises
    ValueError where it does not.

    >>> round(bisected(lambda x: x * x - 2, 0.0, 2.0), 12)
    1.414213562373
    """
    rising = function(high) > 0
    if (function(low) > 0) == rising:
        raise ValueError(
            f"got a function of one sign on [{low}, {high}]; expected a change of sign"
        )
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2
