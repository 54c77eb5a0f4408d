"""Why a prediction has no value, and why a command ends without a result.

CommandError                      the arguments are right, but nobody listens there, a file is
                                  missing, ...: one line, exit status 1
PredictionError
  +- UnstableQueueError           the queue grows without bound; carries the load
  +- NotConvergedError            the numerical method stopped before it was accurate; carries the
                                  residual
       +- OutOfReachError         it did not start, or broke off: too large a table, or a number
                                  too large or too small
            +- LargeBatchesError  larger batches occur than it follows
       +- InfiniteMeanError       the queue is stable, but its mean delay is infinite
  +- NoStableChoiceError          nothing that was tried is stable, or keeps the constraint;
       |                          carries the smallest load
       +- UnattainableError       nothing can: requests that find everything empty break it
"""

from __future__ import annotations

import math
from typing import Any

from kendall.policies.text import short_number

INFINITE_MEAN = (
    "the mean delay is infinite: batch sizes have no bound, and residual service times make them "
    "heavy-tailed"
)
SMALLER = "bound the batch size or the output tokens lower, or use the method simulation"


class CommandError(RuntimeError):
    """A command cannot do what was asked although its arguments are right; the message is one
    line.
    """


class PredictionError(Exception):
    """A quantity that was asked for cannot be given."""

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process as it is, whatever its own arguments are."""
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(
    kind: type[PredictionError], args: tuple[Any, ...], state: dict[str, Any]
) -> PredictionError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UnstableQueueError(PredictionError):
    """More arrives than the policy can serve: there is no stationary delay."""

    def __init__(self, load: float) -> None:
        super().__init__(
            f"got load {short_number(load)}; a steady state needs a load below 1: "
            "lower the arrival rate or the token limit, or serve larger batches"
        )
        self.load = load


class NotConvergedError(PredictionError):
    """The numbers could not be made accurate; `residual` is what was left of the equation,
    `reason` the message without advice.
    """

    def __init__(
        self, what: str, residual: float, advice: str = "use the method simulation"
    ) -> None:
        self.reason = f"{what} did not converge: residual {residual:.3g}"
        super().__init__(f"{self.reason}; {advice}")
        self.residual = residual


class OutOfReachError(NotConvergedError):
    """The method cannot follow this queue within a few seconds, 1 GB of memory and the range of
    a float.
    """

    def __init__(
        self, what: str, advice: str = "use the method simulation", residual: float = math.inf
    ) -> None:
        self.reason = f"{what} is out of reach of this method"
        PredictionError.__init__(self, f"{self.reason}; {advice}")
        self.residual = residual


class LargeBatchesError(OutOfReachError):
    """Batches occur that are larger than the largest a chain follows; `lost`: their share,
    `bound`: the policy's or the engine's.
    """

    def __init__(self, largest: int, lost: float, bound: int | None, followed: int) -> None:
        limit = "no bound is set" if bound is None else f"the bound is {bound}"
        what = f"a batch size above {largest} ({lost:.2g} of the batches; {limit})"
        super().__init__(
            what, f"bound the batch size at {followed} or less, or use the method simulation", lost
        )


class InfiniteMeanError(NotConvergedError):
    """The queue is stable, and its delay has no mean."""

    def __init__(self) -> None:
        self.reason = INFINITE_MEAN
        PredictionError.__init__(
            self,
            (
                f"{INFINITE_MEAN}; bound the batch size, or use the method simulation, which gives "
                "its quantiles"
            ),
        )
        self.residual = math.inf


class NoStableChoiceError(PredictionError):
    """An optimisation found nothing to choose; `load` is the smallest load among what it tried.
    `idle`: at a load where hardly anybody waits, so that less of it changes nothing.
    """

    def __init__(self, tried: str, why: str, load: float, *, idle: bool = False) -> None:
        less = "" if idle else "lower the arrival rate, or "
        found = f"tried {tried}: {why} (smallest load {short_number(load)})"
        super().__init__(f"{found}; {less}relax the constraint")
        self.load = load


class UnattainableError(NoStableChoiceError):
    """No choice keeps the constraint, at no load, and nothing was tried."""

    def __init__(self, why: str, remedy: str) -> None:
        PredictionError.__init__(self, f"{why}; {remedy}")
        self.load = 0.0
        self.remedy = remedy
