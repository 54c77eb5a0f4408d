"""What a queueing model needs to know of its arrivals: their letters in Kendall's notation, what
they assume in words, whether they end.

Poisson arrivals are the default of every model and no process here. A process that ends (steps, a
ramp) has no steady state: it is simulated from its first second to its last, over and over, from an
empty queue each time.
"""

from __future__ import annotations

import math

from kendall.policies.text import SpecError, format_number, short_number
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.processes import Deterministic, Gamma, Poisson, Recorded
from kendall.queueing.arrivals.rates import Piecewise, Ramp
from kendall.queueing.arrivals.text import Process, format_arrivals, parse_arrivals

Ending = Piecewise | Ramp
ArrivalProcess = Process | Recorded


def read_arrivals(given: Process | str | None) -> Process | None:
    """The process of a text; None for Poisson arrivals. Raises SpecError: no such process, or all
    its arrivals at once.
    """
    process = asked_process(given)
    return None if isinstance(process, Poisson) else process


def asked_process(given: Process | str | None) -> Process | None:
    """As `read_arrivals`, Poisson arrivals too."""
    if given is None:
        return None
    process = parse_arrivals(given) if isinstance(given, str) else given
    if not isinstance(process, Process):
        raise SpecError(
            f"got arrivals={given!r:.80}; expected a text such as 'mmpp:rates=5/50,durations=10/1'"
        )
    if not math.isfinite(process.mean_rate):
        raise SpecError(
            f"got arrivals={format_arrivals(process)}, which all come at once; expected a finite "
            "mean rate in requests per second"
        )
    return process


def process_and_scv(
    given: Process | str | None, arrival_scv: float
) -> tuple[Process | None, float]:
    """What a model is made with: the process, and the SCV of its gaps. Raises SpecError: another
    SCV was asked for beside it.
    """
    if given is not None and arrival_scv != 1:
        raise SpecError(
            f"got arrival_scv={arrival_scv:g} and arrivals; expected one of them: "
            "gamma:rate=..,burstiness=.. has gaps of SCV 1 / burstiness"
        )
    process = read_arrivals(given)
    return process, arrival_scv if process is None else gap_scv(process)


def has_end(process: ArrivalProcess | None) -> bool:
    """Whether its arrivals end: a queue behind it has no steady state, and is always stable."""
    return isinstance(process, Ending | Recorded)


def gap_scv(process: ArrivalProcess | None) -> float:
    """Squared coefficient of variation of independent gaps; 1 where they are Poisson's or are not
    independent.
    """
    if isinstance(process, Gamma):
        return 0.0 if math.isinf(process.burstiness) else 1 / process.burstiness
    return 0.0 if isinstance(process, Deterministic) else 1.0


def letters(process: ArrivalProcess) -> str:
    """In Kendall's notation; G: gaps that depend on each other."""
    match process:
        case Mmpp():
            return "MMPP"
        case Piecewise() | Ramp():
            return "M(t)"
        case Recorded():
            return "G"
        case _:
            return {0.0: "D", 1.0: "M"}.get(gap_scv(process), "GI")


def in_words(process: ArrivalProcess) -> tuple[str, ...]:
    """What is assumed of the arrivals: which process, and its mean rate."""
    rate = f"mean rate {short_number(process.mean_rate)} requests/s"
    match process:
        case Recorded():
            return (f"arrivals and lengths as recorded, {rate}",)
        case Mmpp():
            dispersion = short_number(process.dispersion)
            kind = f"index of dispersion {dispersion} over long windows"
        case Piecewise() | Ramp():
            return (
                f"arrivals {format_arrivals(process)}: {rate} over its "
                f"{format_number(span(process))} s",
                "no steady state: every request from an empty queue to the last arrival counts",
            )
        case _:
            kind = f"independent gaps, squared coefficient of variation {gap_scv(process):g}"
    return (f"arrivals {format_arrivals(process)}: {rate}, {kind}",)


def highest_rate(process: ArrivalProcess) -> float | None:
    """Requests per second in its busiest state or piece; None where its rate is constant or not
    known.
    """
    match process:
        case Mmpp() | Piecewise():
            return max(process.rates)
        case Ramp():
            return max(process.start, process.end)
        case _:
            return None


def span(process: Ending) -> float:
    """Seconds from its start to its end."""
    return process.duration if isinstance(process, Ramp) else sum(process.durations)


def cycle(process: ArrivalProcess) -> float:
    """Mean seconds in which a modulated process passes all its states; 0 for others."""
    return sum(process.durations) if isinstance(process, Mmpp) else 0.0
