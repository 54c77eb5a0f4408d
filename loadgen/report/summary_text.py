"""A load summary for a terminal: single numbers first, then one line per duration, a histogram of
one of them, the status codes, then doubts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from loadgen.measures.failures import NO_WHOLE_ANSWER
from loadgen.measures.goodput import Goodput
from loadgen.measures.histogram import Bin
from loadgen.measures.little_check import LittleCheck
from loadgen.measures.metrics import ITL, LATENESS, ORDER, WORDS, percentile_name
from loadgen.report.summary import LoadSummary, MeasuredQuantity
from policies.durations import rounded_duration
from policies.text import short_number
from queueing.commands.terminal import Column, Table
from queueing.measurement.mean_interval import run_factor

UNSURE = "?"
BAR, ASCII_BAR = "\N{BLACK SQUARE}", "#"
LONGEST_BAR = 32  # marks
LATE = 0.02  # mean lateness over mean end-to-end time beyond which the sender is part of the result


def load_lines(summary: LoadSummary) -> list[str]:
    """What stands above the table: requests, rates, tokens, goodput, Little's law."""
    return [f"{name:<14}{text}" for name, text in _heads(summary)]


def _heads(summary: LoadSummary) -> Iterator[tuple[str, str]]:
    outcomes = ", ".join(_outcomes(summary)) or "nothing sent"
    yield "requests", outcomes + (" (interrupted)" if summary.interrupted else "")
    asked = "" if summary.asked_rate is None else f"asked {short_number(summary.asked_rate)}, "
    drawn, delivered, completed = map(
        short_number, (summary.drawn_rate, summary.delivered_rate, summary.completed_rate)
    )
    yield "rate (1/s)", f"{asked}drawn {drawn}, delivered {delivered}, completed {completed}"
    if summary.output_tokens is not None:
        prompts = (
            ""
            if summary.prompt_tokens is None
            else f"; prompts of {short_number(summary.prompt_tokens.mean)}"
        )
        answered, tokens = (
            short_number(summary.output_tokens_per_second),
            short_number(summary.tokens_per_second),
        )
        lengths = f"answers of {short_number(summary.output_tokens.mean)} on average{prompts}"
        yield "tokens (1/s)", f"{answered} answered, {tokens} with prompts; {lengths}"
    if summary.goodput is not None:
        yield "goodput", _goodput(summary.goodput)
    if (little := summary.little) is not None:
        verdict = "" if little.holds else "; THEY DIFFER: the records are wrong"
        yield "Little's law", _sides(little) + verdict


def _sides(little: LittleCheck) -> str:
    """Rounded alike, to four digits of the largest, so that what is shown adds up where the law
    holds.
    """
    largest = max(abs(little.number_in_system), abs(little.rate_times_time), abs(little.edges))
    digits = max(0, 3 - math.floor(math.log10(largest))) if largest > 0 else 0
    held, product, edges = (
        round(value, digits)
        for value in (little.number_in_system, little.rate_times_time, little.edges)
    )
    edges = held - product if little.holds else edges
    return (
        f"{held:,.{digits}f} in the system; rate x mean time {product:,.{digits}f}, edges "
        f"{edges:+,.{digits}f}"
    )


def _outcomes(summary: LoadSummary) -> Iterator[str]:
    """A request that got no answer within the drain limit has failed, as the line on failures
    counts it.
    """
    counts = dict(summary.outcomes)
    cut = 0 if summary.interrupted else counts.pop("cancelled", 0)
    if cut:
        counts["failed"] = counts.get("failed", 0) + cut
    for outcome, count in sorted(counts.items()):
        yield f"{count} {outcome}" + (
            f" ({cut} without an answer in time)" if cut and outcome == "failed" else ""
        )


def _goodput(found: Goodput) -> str:
    limits = ", ".join(found.limits)
    if math.isnan(found.share):
        return (
            "unknown: nothing was sent, or the server does not report a quantity that has a "
            f"limit ({limits})"
        )
    return (
        f"{found.share:.2%} ({found.low:.2%} to {found.high:.2%}), "
        f"{short_number(found.rate)}/s: {limits}"
    )


def load_table(summary: LoadSummary, metrics: Sequence[str] = ORDER) -> Table:
    """Durations in milliseconds, of the chosen metrics those that were measured."""
    levels = [percentile_name(percentile) for percentile in summary.percentiles]
    columns = [
        Column(heading="milliseconds", left=True),
        *(Column(heading=name) for name in ("mean", "± 95 %", *levels, "max", "n")),
    ]
    shown = [
        (name, found) for name in metrics if (found := summary.durations.get(name)) is not None
    ]
    sure = (
        " " if any(ends is None for _, found in shown for ends in found.intervals.values()) else ""
    )  # digits stand below each other
    rows = [
        [WORDS[name], *_cells(found, levels, sure, stated=name == LATENESS or not found.too_short)]
        for name, found in shown
    ]
    return Table(columns, rows)


def _cells(found: MeasuredQuantity, levels: Sequence[str], sure: str, *, stated: bool) -> list[str]:
    half = _number(found.half_width * 1e3) if stated else "too short"
    quantiles = (
        _number(found.quantiles[level] * 1e3) + (sure if found.intervals[level] else UNSURE)
        for level in levels
    )
    return [_number(found.mean * 1e3), half, *quantiles, _number(found.max * 1e3), str(found.n)]


def histogram_table(
    summary: LoadSummary, metrics: Sequence[str] = ORDER, *, ascii_only: bool = False
) -> Table | None:
    """Of the times end to end, else of the first of the chosen metrics that was measured. A table
    that is too wide leaves the bars out.
    """
    name = _main_duration(summary, metrics)
    if name is None:
        return None
    bins = summary.durations[name].histogram
    counts = [each.count for each in bins]
    mark = ASCII_BAR if ascii_only else BAR
    rows = [
        [
            label,
            str(count),
            _percent(count / sum(counts)),
            mark * round(LONGEST_BAR * count / max(counts)),
        ]
        for label, count in zip(_ranges(bins), counts, strict=True)
    ]
    columns = [
        Column(heading=f"{WORDS[name]} (ms)", left=True),
        Column(heading="gaps" if name == ITL else "requests"),
        Column(heading="share"),
        Column(heading="", left=True, short=lambda _: ""),
    ]
    return Table(columns, rows)


def _main_duration(summary: LoadSummary, metrics: Sequence[str]) -> str | None:
    chosen = [name for name in metrics if name in summary.durations and name != LATENESS]
    return "e2el" if "e2el" in chosen else next(iter(chosen), None)


def _ranges(bins: Sequence[Bin]) -> list[str]:
    """Both ends with the digits of the width, below one another."""
    width = (bins[0].high - bins[0].low) * 1e3
    if not width:
        return [_number(bins[0].low * 1e3)]
    digits = max(0, -math.floor(math.log10(width) + 1e-9))
    ends = [[f"{at * 1e3:.{digits}f}" for at in (each.low, each.high)] for each in bins]
    wide = [max(map(len, column)) for column in zip(*ends, strict=True)]
    return [f"{low:>{wide[0]}} to {high:>{wide[1]}}" for low, high in ends]


def status_table(summary: LoadSummary) -> Table | None:
    """How many requests were answered with each status, and its share with a 95 % interval; "in
    bursts" where there were too few of them for an interval.
    """
    rows = [
        [
            "no whole answer" if status == NO_WHOLE_ANSWER else status,
            str(found.requests),
            _percent(found.share),
            "in bursts"
            if found.low is None or found.high is None
            else f"{found.low * 100:.1f} to {_percent(found.high)}",
        ]
        for status, found in summary.status_codes.items()
    ]
    columns = [Column(heading="status code", left=True)]
    columns += [Column(heading=name) for name in ("requests", "share", "95 % interval")]
    return Table(columns, rows) if rows else None


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _needed(summary: LoadSummary, shown: Sequence[str]) -> str:
    """How long a run would do for the delay that is judged, else for the first that is too short,
    at the rate, the spread and the memory of this one. Nothing of requests that were all due at
    once: their delays grow with their number.
    """
    if math.isinf(summary.drawn_rate) or not 0 < summary.delivered_rate < math.inf:
        return ""
    judged = "queueing_delay" if "queueing_delay" in summary.durations else "e2el"
    for name in dict.fromkeys((judged, *shown)):
        found = summary.durations.get(name)
        if (
            found is not None
            and found.too_short
            and math.isfinite(found.half_width)
            and found.mean
            and found.effective_n
        ):
            times = run_factor(found.half_width / found.mean, found.effective_n)
            seconds = _rounded_up(times * summary.sent / summary.delivered_rate)
            words = "end-to-end time" if name == "e2el" else WORDS[name]
            return f"; about {rounded_duration(seconds)} at this rate would do for the {words}"
    return ""


def _rounded_up(seconds: float) -> int:
    """To two digits."""
    step = int(10 ** max(math.floor(math.log10(seconds)) - 1, 0))
    return math.ceil(seconds / step) * step


def _quantile_intervals(summary: LoadSummary, metrics: Sequence[str]) -> list[str]:
    """Of the duration that the histogram shows; nothing of quantiles that the run cannot state."""
    name = _main_duration(summary, metrics)
    if name is None:
        return []
    stated = [
        f"{level} {_number(ends[0] * 1e3)} to {_number(ends[1] * 1e3)}"
        for level, ends in summary.durations[name].intervals.items()
        if ends is not None
    ]
    return [f"{WORDS[name]}, 95 % intervals (ms): {', '.join(stated)}"] if stated else []


def _behind(summary: LoadSummary) -> list[str]:
    """Where the queue grew to the end, its delays are those of the run's length: no number of
    requests would settle them.
    """
    if summary.growth is None or not summary.growth.unstable:
        return []
    rates = (
        f"completed {short_number(summary.completed_rate, 3)}/s of "
        f"{short_number(summary.drawn_rate, 3)}/s offered"
    )
    return [
        (
            f"the server did not keep up with the rate: {rates}, and the queue grew to the end of "
            "sending"
        )
    ]


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:.{digits}f}"


def load_notes(summary: LoadSummary, metrics: Sequence[str] = ORDER) -> list[str]:
    """What stands below the table: how to read it, and what speaks against it."""
    shown = [summary.durations[name] for name in metrics if name in summary.durations]
    notes = []
    if shown:
        notes += ["of completed requests, from the intended instant", summary.warm_up_why]
    notes += _quantile_intervals(summary, metrics)
    behind = _behind(summary)
    short = [
        name
        for name in metrics
        if name in summary.durations and name != LATENESS and summary.durations[name].too_short
    ]
    if short:
        notes.append(
            "too short: the run does not know this mean to 25 %"
            + ("; a longer run would not either" if behind else _needed(summary, short))
        )
    notes += behind
    if any(ends is None for found in shown for ends in found.intervals.values()):
        notes.append(f"{UNSURE} too few samples beyond this quantile for an interval")
    late, whole = summary.lateness, summary.durations.get("e2el")
    if (
        late is not None
        and whole is not None
        and not math.isinf(summary.drawn_rate)
        and late.mean > LATE * whole.mean
    ):
        notes.append(
            f"the sender was late (mean {short_number(late.mean * 1e3, 3)} ms): its machine is "
            "too busy to judge short delays"
        )
    return notes + [f"{count} x {error}" for error, count in summary.errors.items()]
