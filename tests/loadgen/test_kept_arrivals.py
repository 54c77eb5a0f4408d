"""Arrivals, lengths and conditions as kept: what is drawn under a seed, what texts mean, what is
refused and in which words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from kendall.loadgen.compare.assertions import (
    broken_lines,
    canonical,
    parse_assertion,
    percentiles_of,
)
from kendall.loadgen.measures.goodput import parse_goodput
from kendall.loadgen.measures.metrics import parse_metrics, parse_percentiles, percentile_name
from kendall.loadgen.sweep.grid import GatewayBounds, SweepCell
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import parse_length_prediction
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.processes import (
    Deterministic,
    Gamma,
    Poisson,
    Recorded,
    check_expected,
    cut,
    delivered_rate,
    partial_sums,
    renewal,
)
from kendall.queueing.arrivals.rates import Piecewise, Ramp, invert_steps, knots, unit_instants
from kendall.queueing.arrivals.text import at_rate, format_arrivals, parse_arrivals
from kendall.queueing.arrivals.timetable import (
    draw_prompts,
    draw_timetable,
    split,
    streams,
    with_predictions,
)
from kendall.queueing.arrivals.trace_formats import decimal_nanoseconds, finite, nanoseconds, whole
from kendall.queueing.distributions.token_distribution import parse_distribution
from tests.kept_values import moved

PROCESSES = (
    Poisson(4.0),
    Poisson(math.inf),
    Gamma(4.0, 0.3),
    Gamma(4.0, math.inf),
    Deterministic(4.0),
    Recorded(np.array([0.5, 0.5, 2.0, 9.0])),
    Piecewise((2.0, 0.0, 8.0), (3.0, 1.0, 2.0)),
    Ramp(1.0, 9.0, 5.0),
    Ramp(9.0, 1.0, 5.0),
    Ramp(0.0, 6.0, 5.0),
    Ramp(1.0, 9.0, 5.0, "exponential"),
    Ramp(9.0, 1.0, 5.0, "exponential"),
    Ramp(3.0, 3.0, 5.0, "exponential"),
    Mmpp((2.0, 20.0), (3.0, 1.0)),
    Mmpp((0.0, 20.0, 5.0), (0.1, 0.05, 0.2)),
    Mmpp((0.01, 5.0), (1e-3, 1e-3)),
)
SPECS = (
    "poisson:rate=10",
    "gamma:rate=10,burstiness=0.3",
    "deterministic:rate=10",
    "mmpp:rates=5/50,durations=10/1",
    "piecewise:rates=5/50,durations=10/1",
    "ramp:start=1,end=9,duration=5",
    "ramp:start=1,end=9,duration=5,shape=exponential",
    "poisson:rate=inf",
)


def said(calculate: Callable[[], Any]) -> Any:
    """The result, or the words of the refusal."""
    try:
        return calculate()
    except (SpecError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def table(function: Callable[..., Any], arguments: Iterable[Any]) -> dict[str, Callable[[], Any]]:
    def of(argument: Any) -> Callable[[], Any]:
        return lambda: said(
            lambda: function(*argument) if isinstance(argument, tuple) else function(argument)
        )

    return {f"{function.__name__}({argument!r})": of(argument) for argument in arguments}


def instants(process: Any, count: int | None, duration: float | None) -> Any:
    return process.instants(np.random.default_rng(5), count=count, duration=duration)


def units(count: int | None, limit: float | None) -> Any:
    return unit_instants(np.random.default_rng(2), count, limit)


def about(process: Any) -> list[Any]:
    return [
        process.mean_rate,
        [
            process.dispersion,
            [process.dispersion_over(window) for window in (0.1, 5.0)],
            process.stationary,
        ]
        if isinstance(process, Mmpp)
        else None,
    ]


def changed(text: str) -> list[str]:
    process = parse_arrivals(text)
    return [format_arrivals(process), said(lambda: format_arrivals(at_rate(process, 3.5)))]


def of_made(kind: Any, *given: Any) -> str:
    return repr(kind(*given))


def test_arrivals_are_as_kept() -> None:
    ends = (
        (9, None),
        (None, 4.0),
        (9, 1.0),
        (None, None),
        (0, None),
        (None, -1.0),
        (None, math.inf),
    )
    cases = table(instants, [(process, *end) for process in PROCESSES for end in ends])
    cases |= table(about, PROCESSES)
    cases |= table(changed, (*SPECS, "poisson", "posson:rate=3", "gamma:rate=0", "mmpp:rates=1"))
    cases |= table(
        of_made,
        [
            (Poisson, 0.0),
            (Poisson, math.nan),
            (Gamma, 1.0, 0.0),
            (Deterministic, -1.0),
            (Piecewise, (), ()),
            (Piecewise, (1.0,), (1.0, 2.0)),
            (Piecewise, (0.0,), (1.0,)),
            (Piecewise, (-1.0,), (1.0,)),
            (Piecewise, (1.0,), (0.0,)),
            (Ramp, 0.0, 0.0, 1.0),
            (Ramp, 0.0, 1.0, 1.0, "exponential"),
            (Ramp, 1.0, 2.0, 0.0),
            (Ramp, 1.0, 2.0, 1.0, "square"),
            (Ramp, 1.0, math.inf, 1.0),
            (Mmpp, (1.0,), (1.0,)),
            (Mmpp, (0.0, 0.0), (1.0, 1.0)),
            (Mmpp, (1.0, 2.0), (1.0, 0.0)),
            (Recorded, np.array([2.0, 1.0])),
            (Recorded, np.array([])),
        ],
    )
    cases |= table(renewal, [(2.0,), (2.0, 1.0), (2.0, 0.5), (2.0, math.inf)])
    cases |= table(check_expected, [1.0, 1e7, 1e8, 1e9, math.inf])
    cases |= table(
        delivered_rate, [np.array(given) for given in ([], [1.0], [1.0, 3.0], [2.0, 2.0])]
    )
    cases |= table(cut, [(np.arange(5.0), *end) for end in ((3, None), (None, 2.0), (9, 3.5))])
    cases |= table(units, [(4, None), (None, 3.0)])
    assert moved("arrivals.json", cases) == []


def test_inversion_by_hand() -> None:
    rates, starts, expected = knots(np.array([2.0, 0.0, 4.0]), np.array([1.0, 3.0, 0.5]))
    np.testing.assert_array_equal(starts, [0.0, 1.0, 4.0, 4.5])
    np.testing.assert_array_equal(expected, [0.0, 2.0, 2.0, 4.0])
    found = invert_steps(np.array([1.0, 2.0, 3.0, 4.0]), rates, starts, expected)
    np.testing.assert_array_equal(found, [0.5, 1.0, 4.25, 4.5])
    sizes: list[int] = []

    def ones(size: int) -> Any:
        sizes.append(size)
        return np.ones(size)

    np.testing.assert_array_equal(partial_sums(ones, 3, None), [1.0, 2.0, 3.0])
    assert sizes == [3]
    assert len(partial_sums(ones, None, 5000.0)) == 5000
    assert len(partial_sums(ones, 9, 4.5)) == 4


def test_timetables_are_as_kept() -> None:
    prompts, outputs = (parse_distribution(f"uniform:low={low},high=20") for low in (1, 3))
    drawn = draw_timetable(
        Gamma(5.0, 0.5), count=30, seed=6, prompt_tokens=prompts, output_tokens=outputs
    )
    known = {
        name: with_predictions(drawn, parse_length_prediction(name), 6)
        for name in (
            "exact",
            "exponential",
            "lognormal:sigma=0.5",
            "onebit:threshold=9,accuracy=0.8",
        )
    }
    cases: dict[str, Callable[[], Any]] = {
        "drawn": lambda: [drawn.columns(), drawn.rate, len(drawn)],
        "predicted": lambda: {name: each.predicted_output_tokens for name, each in known.items()},
        "parts": lambda: split(drawn, 4),
        "prompts": lambda: draw_prompts(drawn, 6, range(5, 60)),
        "streams": lambda: [generator.random() for generator in streams(6)],
    }
    cases |= table(
        parse_length_prediction,
        ["exactly", "lognormal", "lognormal:sigma=-1", "one_bit:threshold=0", "one_bit:accuracy=2"],
    )
    assert moved("timetables.json", cases) == []


def test_numbers_of_traces_are_as_kept() -> None:
    cases = table(
        decimal_nanoseconds,
        ["1.5", " 0 ", "-2e-9", "x", "inf", "nan", "9223372036.854775807", "9223372036.854775808"],
    )
    cases |= table(
        nanoseconds, ["2024-05-10 00:00:00", "2024-05-10T02:00:00.25+02:00", "today", "2024-05-10"]
    )
    cases |= table(finite, ["1", 2, "inf", "nan", "x", None])
    cases |= table(whole, ["1", 0, 2.0, 2.5, -1, "x", None])
    assert moved("trace-numbers.json", cases) == []


def test_a_number_of_nanoseconds_may_be_anything_below_two_to_the_63() -> None:
    assert decimal_nanoseconds("9223372036.854775807") == 2**63 - 1
    for text in ("9223372036.854775808", "-9223372036.854775808"):
        with pytest.raises(ValueError, match="beyond what nanoseconds can hold"):
            decimal_nanoseconds(text)


CONDITIONS = (
    "p99_ttft < 200ms",
    "ttft_p99<=0.2s",
    "mean_time_to_first_token_ms < 200",
    "median-itl > 5us",
    "completed >= 100",
    "error_rate == 0%",
    "goodput != 5.5",
    "prediction_error < 15%",
    "duration < 1.5min",
    "ttft < 200",
    "throughput > 3s",
    "p99_ttft",
    "p99_ttft < fast",
    "p99_tftt < 2s",
    "queue < 1s",
)
VALUES: dict[str, float | None] = {
    "p99_ttft": 0.25,
    "mean_ttft": 0.2,
    "p50_itl": None,
    "completed": 99.0,
    "error_rate": 0.0,
    "goodput": 5.5,
    "prediction_error": -0.2,
    "duration": math.nan,
    "request_throughput": 2.0,
    "mean_queueing_delay": 1.0,
}


def judged(text: str) -> Any:
    condition = parse_assertion(text)
    return [condition, broken_lines([condition], VALUES), broken_lines([condition], VALUES, "here")]


def test_conditions_are_as_kept() -> None:
    cases = table(judged, CONDITIONS)
    cases |= table(canonical, [text.partition(" ")[0] for text in CONDITIONS])
    cases["percentiles"] = lambda: sorted(percentiles_of(map(parse_assertion, CONDITIONS[:3])))
    cases |= table(
        parse_goodput, [(["ttft:100ms e2el:1s"],), (["tpot:50"],), (["x:1"],), (["ttft"],)]
    )
    cases |= table(parse_metrics, ["ttft,itl", "", "tftt", "ttft,ttft", ",".join(("e2el", "ttft"))])
    cases |= table(parse_percentiles, ["50,99", "99.9", "", "0", "100", "101", "x", "50,50"])
    cases |= table(percentile_name, [50.0, 99.0, 99.9, 12.345])
    assert moved("conditions.json", cases) == []


def test_cells_and_bounds_as_texts() -> None:
    cell = SweepCell(
        name="x", policy="dynamic", load=0.4567, rate=12.5, max_output_tokens=None, count=50
    )
    assert (str(cell), cell.seconds) == ("dynamic at load 0.457 (12.5/s)", 4.0)
    limited = SweepCell(
        name="x", policy="single", load=1.0, rate=3.0, max_output_tokens=16, count=1
    )
    assert str(limited) == "single at load 1 (3/s, limit 16)"
    assert str(GatewayBounds(max_num_seqs=4, max_model_len=9)) == "max_num_seqs=4, max_model_len=9"
