"""The text form of arrival processes, in the grammar of policies: `name:key=value{,key=value}`.

    poisson:rate=10                                 exponential gaps
    gamma:rate=10,burstiness=0.3                    gamma gaps; burstiness is their shape, as in
                                                    `vllm bench serve`
    deterministic:rate=10                           equal gaps
    mmpp:rates=5/50,durations=10/1                  Markov-modulated Poisson; mean seconds per state
    piecewise:rates=5/20/5,durations=60/30/60       Poisson in steps; ends with the last
    ramp:start=1,end=50,duration=60[,shape=linear]  Poisson with a rising or falling rate;
                                                    shape=exponential too

Rates in requests per second; durations with a unit (policies.durations) or as bare seconds:
`durations=10s/500ms`; `/` separates the parts of a list.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast

from kendall.policies.durations import EXAMPLES as DURATIONS
from kendall.policies.durations import parse_duration
from kendall.policies.text import SpecError, format_number, parse_number, suggest
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.processes import Deterministic, Gamma, Poisson
from kendall.queueing.arrivals.rates import Piecewise, Ramp
from kendall.queueing.arrivals.spec_text import parse_numbers, read_spec

Process = Poisson | Gamma | Deterministic | Mmpp | Piecewise | Ramp
EXAMPLES = {
    "poisson": "poisson:rate=10",
    "gamma": "gamma:rate=10,burstiness=0.3",
    "deterministic": "deterministic:rate=10",
    "mmpp": "mmpp:rates=5/50,durations=10/1",
    "piecewise": "piecewise:rates=5/20/5,durations=60/30/60",
    "ramp": "ramp:start=1,end=50,duration=60,shape=linear",
}
SHAPES = ("linear", "exponential")


def parse_arrivals(text: str) -> Process:
    """The process that a text names. Raises SpecError: unknown name or key, missing key, value
    out of range.
    """
    name, pairs = read_spec(text, "arrivals", EXAMPLES, frozenset({"shape"}))
    try:
        return _build(name, pairs, text)
    except SpecError as error:
        raise error if text in str(error) else SpecError(f"{error} (in {text!r})") from None


def _build(name: str, pairs: dict[str, str], text: str) -> Process:
    if name in {"mmpp", "piecewise"}:
        rates = parse_numbers("rates", pairs["rates"], text)
        durations = tuple(
            _seconds("durations", part, text) for part in pairs["durations"].split("/")
        )
        return Mmpp(rates, durations) if name == "mmpp" else Piecewise(rates, durations)
    if name == "ramp":
        shape = pairs.pop("shape", "linear")
        if shape not in SHAPES:
            raise SpecError(
                f"got shape={shape!r}; expected {' or '.join(SHAPES)}{suggest(shape, SHAPES)}"
            )
        start, end = (parse_number(key, pairs[key], text) for key in ("start", "end"))
        return Ramp(
            start,
            end,
            _seconds("duration", pairs["duration"], text),
            cast("Literal['linear', 'exponential']", shape),
        )
    rate = parse_number("rate", pairs["rate"], text)
    if name == "gamma":
        return Gamma(rate, parse_number("burstiness", pairs["burstiness"], text))
    return Poisson(rate) if name == "poisson" else Deterministic(rate)


def _seconds(key: str, text: str, context: str) -> float:
    try:
        return parse_duration(text)
    except SpecError:
        raise SpecError(
            f"got {key}={text!r} in {context!r}; expected a duration: {DURATIONS}"
        ) from None


def format_arrivals(process: Process) -> str:
    """The canonical text: keys in the order above, defaults left out, shortest numbers."""
    match process:
        case Poisson() | Deterministic():
            return f"{type(process).__name__.lower()}:rate={format_number(process.rate)}"
        case Gamma():
            return (
                f"gamma:rate={format_number(process.rate)},"
                f"burstiness={format_number(process.burstiness)}"
            )
        case Mmpp() | Piecewise():
            return (
                f"{type(process).__name__.lower()}:"
                f"rates={_join(process.rates)},durations={_join(process.durations)}"
            )
        case Ramp():
            numbers = [
                f"{key}={format_number(getattr(process, key))}"
                for key in ("start", "end", "duration")
            ]
            return (
                "ramp:"
                + ",".join(numbers)
                + ("" if process.shape == "linear" else f",shape={process.shape}")
            )


def at_rate(process: Process, mean_rate: float) -> Process:
    """The same process at another mean rate: all its rates times one factor; burstiness,
    durations and shape stay.
    """
    if not 0 < mean_rate < math.inf:
        raise SpecError(f"got request rate {mean_rate}; expected requests per second > 0")
    factor = mean_rate / process.mean_rate
    match process:
        case Poisson() | Gamma() | Deterministic():
            return dataclasses.replace(process, rate=mean_rate)
        case Mmpp() | Piecewise():
            return dataclasses.replace(
                process, rates=tuple(rate * factor for rate in process.rates)
            )
        case Ramp():
            return dataclasses.replace(
                process, start=process.start * factor, end=process.end * factor
            )


def _join(numbers: tuple[float, ...]) -> str:
    return "/".join(format_number(number) for number in numbers)
