"""When the requests of `kendall load` come: a process drawn, or recorded instants, from what the
options say.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from kendall.loadgen.sending.options import LoadOptions
from kendall.policies.text import SpecError, suggest
from kendall.queueing.arrivals.processes import Deterministic, Gamma, Poisson
from kendall.queueing.arrivals.rates import Ramp
from kendall.queueing.arrivals.text import Process, parse_arrivals
from kendall.queueing.arrivals.timetable import Timetable, draw_timetable, load_timetable
from kendall.queueing.arrivals.traces import load_trace
from kendall.queueing.distributions.token_distribution import (
    SHORTER,
    TokenDistribution,
    parse_distribution,
)

NUM_PROMPTS = 1000  # where neither their number nor a duration is given
OUTPUT_TOKENS = 128  # max_tokens where neither a law of the lengths nor --max-tokens is given
SHAPES = ("linear", "exponential")


class DrawnArrivals(NamedTuple):
    """When requests come, and how long their answers are to be."""

    seed: int
    process: Process | None  # None: recorded instants
    timetable: Timetable
    natural: bool  # no length was asked for: the model ends its answers
    predictor: str | None = None  # of recorded predictions, where its file names it
    block_tokens: int | None = None  # of a prompt's block with a hash id


def draw_arrivals(options: LoadOptions, source: str) -> DrawnArrivals:
    """A process drawn, or recorded instants, with the lengths that are drawn or recorded. Raises
    SpecError.
    """
    if source == "--timetable":
        assert options.timetable is not None
        try:
            header, timetable = load_timetable(options.timetable)
        except OSError as error:
            raise SpecError(
                f"got timetable {options.timetable}: {error.strerror}; expected a file of "
                "--save-timetable"
            ) from None
        except ValueError as error:
            raise SpecError(str(error)) from None
        recorded = header.get("seed")
        seed = recorded if options.seed is None and isinstance(recorded, int) else options.seed or 0
        return DrawnArrivals(
            seed,
            None,
            _within(timetable, options),
            natural=header.get("lengths") == "natural",
            predictor=header.get("predictor"),
            block_tokens=header.get("block_tokens"),
        )
    seed = options.seed or 0
    if source == "--trace":
        assert options.trace is not None
        trace = load_trace(
            options.trace, options.trace_format, options.time_scale, count=options.num_prompts
        )
        return DrawnArrivals(
            seed,
            None,
            _within(trace.timetable, options),
            natural=False,
            block_tokens=trace.block_tokens,
        )
    process, count, duration = _process(options, source)
    prompt_tokens, output_tokens = length_laws(options)
    timetable = draw_timetable(
        process,
        count=count,
        duration=duration,
        seed=seed,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    return DrawnArrivals(seed, process, timetable, natural=options.output_tokens is None)


def length_laws(options: LoadOptions) -> tuple[TokenDistribution, TokenDistribution]:
    """The laws of the prompts' and the answers' lengths. Raises SpecError."""
    law = options.output_tokens or f"deterministic:value={options.max_tokens or OUTPUT_TOKENS}"
    return (
        parse_distribution(options.prompt_tokens, remedy=SHORTER),
        parse_distribution(law, options.max_tokens, remedy="set --max-tokens"),
    )


def _within(timetable: Timetable, options: LoadOptions) -> Timetable:
    """The first rows of recorded ones, as many as were asked for and not after the duration."""
    last = len(timetable) if options.num_prompts is None else options.num_prompts
    if options.duration is not None:
        last = min(
            last, int(np.searchsorted(timetable.intended_at, options.duration, side="right"))
        )
    if not last:
        raise SpecError(f"got no request within {options.duration} s; expected at least one")
    return timetable.rows(np.arange(min(last, len(timetable))))


def _process(options: LoadOptions, source: str) -> tuple[Process, int | None, float | None]:
    """The process, and how many arrivals or seconds of it."""
    count = options.num_prompts
    if count is None and options.duration is None:
        count = NUM_PROMPTS
    if source == "--max-concurrency":
        return Poisson(math.inf), options.num_prompts or NUM_PROMPTS, None
    if source == "--ramp-up-strategy":
        return _ramp(options), None, None
    if options.arrivals is not None:
        return parse_arrivals(options.arrivals), count, options.duration
    rate, burstiness = options.request_rate, options.burstiness
    assert rate is not None
    # as in `vllm bench serve`, but that nothing is rescaled
    process: Process
    if burstiness == 1.0 or math.isinf(rate):
        process = Poisson(rate)
    elif math.isinf(burstiness):
        process = Deterministic(rate)
    else:
        process = Gamma(rate, burstiness)
    return process, count, options.duration


def _ramp(options: LoadOptions) -> Ramp:
    """Over the duration, or over the time in which it brings the asked number of requests on
    average.
    """
    start, end, shape = options.ramp_up_start_rps, options.ramp_up_end_rps, options.ramp_up_strategy
    if start is None or end is None:
        raise SpecError(
            "got --ramp-up-strategy alone; expected --ramp-up-start-rps and --ramp-up-end-rps too"
        )
    if shape not in SHAPES:
        raise SpecError(
            f"got --ramp-up-strategy {shape!r}; expected "
            f"{' or '.join(SHAPES)}{suggest(str(shape), SHAPES)}"
        )
    ramp = Ramp(
        start, end, options.duration or 1.0, "linear" if shape == "linear" else "exponential"
    )
    if options.duration is not None:
        return ramp
    return dataclasses.replace(ramp, duration=(options.num_prompts or NUM_PROMPTS) / ramp.mean_rate)
