"""A load summary for a terminal: single numbers first, then one line per duration, a histogram of
one of them, the status codes, then doubts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kendall.loadgen.measures.failures import NO_WHOLE_ANSWER
from kendall.loadgen.measures.metrics import ITL, LATENESS, ORDER, WORDS, percentile_name
from kendall.loadgen.report.summary import LoadSummary
from kendall.policies.durations import rounded_duration
from kendall.policies.text import short_number
from kendall.queueing.commands.terminal import Column, Table
from kendall.queueing.measurement.mean_interval import run_factor

UNSURE = "?"
BAR, ASCII_BAR = "\N{BLACK SQUARE}", "#"
LONGEST_BAR = 32  # marks
LATE = 0.02  # mean lateness over mean end-to-end time beyond which the sender is part of the result


def load_lines(summary: LoadSummary) -> list[str]:
    """The lines above the table: requests, rates, tokens, goodput, Little's law."""
    return [f"{name:<14}{text}" for name, text in load_heads(summary)]


def _outcomes(summary: LoadSummary) -> str:
    # a request that got no answer within the drain limit has failed, as the line on failures
    # counts it
    counts = dict(summary.outcomes)
    cut = 0 if summary.interrupted else counts.pop("cancelled", 0) - summary.hung_up
    if cut:
        counts["failed"] = counts.get("failed", 0) + cut
    about = {"failed": f" ({cut} without an answer in time)"} if cut else {}
    if summary.hung_up:
        cancelled = counts.setdefault("cancelled", summary.hung_up)
        all_of_them = cancelled == summary.hung_up
        about["cancelled"] = " by the client" if all_of_them else f" ({summary.hung_up} by clients)"
    outcomes = [f"{count} {name}{about.get(name, '')}" for name, count in sorted(counts.items())]
    interrupted = " (interrupted)" if summary.interrupted else ""
    return (", ".join(outcomes) or "nothing sent") + interrupted


def _prefixes(summary: LoadSummary) -> Iterator[tuple[str, str]]:
    shares = {"the server reports": summary.cached_prompt_tokens}
    shares["the trace has"] = summary.shared_prompt_tokens
    if known := [f"{_percent(share)} {who}" for who, share in shares.items() if share is not None]:
        yield "prefix cache", f"of the prompt tokens: {', '.join(known)}"


def load_heads(summary: LoadSummary) -> Iterator[tuple[str, str]]:
    """The names and texts of these lines."""
    yield "requests", _outcomes(summary)
    asked = "" if summary.asked_rate is None else f"asked {short_number(summary.asked_rate)}, "
    drawn, delivered, completed = map(
        short_number, (summary.drawn_rate, summary.delivered_rate, summary.completed_rate)
    )
    of = ""
    if summary.conversations is not None:
        of = " conversations"
        completed += f" requests, in {summary.conversations} conversations"
    yield "rate (1/s)", f"{asked}drawn {drawn}, delivered {delivered}{of}, completed {completed}"
    if summary.output_tokens is not None:
        lengths = f"answers of {short_number(summary.output_tokens.mean)} on average"
        if summary.prompt_tokens is not None:
            lengths += f"; prompts of {short_number(summary.prompt_tokens.mean)}"
        answered = short_number(summary.output_tokens_per_second)
        tokens = short_number(summary.tokens_per_second)
        yield "tokens (1/s)", f"{answered} answered, {tokens} with prompts; {lengths}"
    yield from _of_the_server(summary)
    yield from _prefixes(summary)
    if (goodput := summary.goodput) is not None:
        limits = ", ".join(goodput.limits)
        text = (
            f"{goodput.share:.2%} ({goodput.low:.2%} to {goodput.high:.2%}), "
            f"{short_number(goodput.rate)}/s: {limits}"
        )
        if math.isnan(goodput.share):
            text = (
                "unknown: nothing was sent, or the server does not report a quantity that has a "
                f"limit ({limits})"
            )
        yield "goodput", text
    if (little := summary.little) is not None:
        # rounded alike, to four digits of the largest, so that what is shown adds up where the law
        # holds
        sides = (little.number_in_system, little.rate_times_time, little.edges)
        largest = max(map(abs, sides))
        digits = max(0, 3 - math.floor(math.log10(largest))) if largest > 0 else 0
        held, product, edges = (round(value, digits) for value in sides)
        edges = held - product if little.holds else edges
        text = (
            f"{held:,.{digits}f} in the system; rate x mean time {product:,.{digits}f}, edges "
            f"{edges:+,.{digits}f}"
        )
        wrong = "" if little.holds else "; THEY DIFFER: the records are wrong"
        yield "Little's law", text + wrong


def _of_the_server(summary: LoadSummary) -> Iterator[tuple[str, str]]:
    """What a server that is no gateway did with the lengths, and tells or does not tell."""
    if summary.lengths is not None:
        yield "lengths", summary.lengths.in_words
    if summary.uncounted:
        yield (
            "usage",
            f"{summary.uncounted:,} answers without it: their tokens are the events of their "
            "streams, of which one may bring several",
        )
    if summary.server_queue is not None:
        yield "server", summary.server_queue.in_words


def load_table(summary: LoadSummary, metrics: Sequence[str] = ORDER) -> Table:
    """Durations in milliseconds, of the chosen metrics those that were measured."""
    levels = [percentile_name(percentile) for percentile in summary.percentiles]
    columns = [
        Column(heading="milliseconds", left=True),
        *(Column(heading=name) for name in ("mean", "± 95 %", *levels, "max", "n")),
    ]
    measured = [(name, summary.durations[name]) for name in metrics if name in summary.durations]
    # digits stand below each other
    is_unsure = any(None in one.intervals.values() for _, one in measured)
    sure = " " if is_unsure else ""
    rows = []
    for name, one in measured:
        stated = name == LATENESS or not one.too_short
        quantiles = (
            in_ms(one.quantiles[level]) + (sure if one.intervals[level] else UNSURE)
            for level in levels
        )
        half_width = in_ms(one.half_width) if stated else "too short"
        ends = (in_ms(one.max), str(one.n))
        rows.append([WORDS[name], in_ms(one.mean), half_width, *quantiles, *ends])
    return Table(columns, rows)


def histogram_table(
    summary: LoadSummary, metrics: Sequence[str] = ORDER, *, ascii_only: bool = False
) -> Table | None:
    """Bin the times end to end, else the first of the chosen metrics that was measured. A table
    that is too wide leaves the bars out.
    """
    name = _main_duration(summary, metrics)
    if name is None:
        return None
    bins = summary.durations[name].histogram
    counts = [one.count for one in bins]
    width = (bins[0].high - bins[0].low) * 1e3
    ranges = [in_ms(bins[0].low)]
    if width:  # both ends with the digits of the width, below one another
        digits = max(0, -math.floor(math.log10(width) + 1e-9))
        ends = [[f"{at * 1e3:.{digits}f}" for at in (one.low, one.high)] for one in bins]
        wide = [max(map(len, column)) for column in zip(*ends, strict=True)]
        ranges = [f"{low:>{wide[0]}} to {high:>{wide[1]}}" for low, high in ends]
    mark = ASCII_BAR if ascii_only else BAR
    rows = [
        [
            label,
            str(count),
            _percent(count / sum(counts)),
            mark * round(LONGEST_BAR * count / max(counts)),
        ]
        for label, count in zip(ranges, counts, strict=True)
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


def part_tables(summary: LoadSummary) -> Iterator[Table]:
    """Requests by model where there are several, by turn of their conversations."""
    for of in dict.fromkeys(part.of for part in summary.parts):
        columns = [Column(heading=of, left=True)]
        columns += [
            Column(heading=name)
            for name in ("requests", "completed", "ttft (ms)", "p99", "end to end (ms)", "p99")
        ]
        rows = [
            [
                part.name,
                str(part.requests),
                str(part.completed),
                *(
                    "-" if value is None else in_ms(value)
                    for value in (part.mean_ttft, part.p99_ttft, part.mean_e2el, part.p99_e2el)
                ),
            ]
            for part in summary.parts
            if part.of == of
        ]
        yield Table(columns, rows)


def status_table(summary: LoadSummary) -> Table | None:
    """Count the requests that were answered with each status; its share with a 95 % interval; "in
    bursts" where there were too few of them for an interval.
    """
    rows = [
        [
            "no whole answer" if status == NO_WHOLE_ANSWER else status,
            str(count.requests),
            _percent(count.share),
            "in bursts"
            if count.low is None or count.high is None
            else f"{count.low * 100:.1f} to {_percent(count.high)}",
        ]
        for status, count in summary.status_codes.items()
    ]
    columns = [Column(heading="status code", left=True)]
    columns += [Column(heading=name) for name in ("requests", "share", "95 % interval")]
    return Table(columns, rows) if rows else None


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _needed(summary: LoadSummary, short: Sequence[str]) -> str:
    """Estimate the length of run that would do for the delay that is judged, else for the first
    that is too short, at the rate, the spread and the memory of this one. Nothing of requests that
    were all due at once: their delays grow with their number.
    """
    if math.isinf(summary.drawn_rate) or not 0 < summary.delivered_rate < math.inf:
        return ""
    judged = "queueing_delay" if "queueing_delay" in summary.durations else "e2el"
    for name in dict.fromkeys((judged, *short)):
        duration = summary.durations.get(name)
        if (
            duration is not None
            and duration.too_short
            and math.isfinite(duration.half_width)
            and duration.mean
            and duration.effective_n
        ):
            times = run_factor(duration.half_width / duration.mean, duration.effective_n)
            seconds = times * summary.sent / summary.delivered_rate
            step = int(10 ** max(math.floor(math.log10(seconds)) - 1, 0))  # two digits
            about = rounded_duration(math.ceil(seconds / step) * step)
            words = "end-to-end time" if name == "e2el" else WORDS[name]
            return f"; about {about} at this rate would do for the {words}"
    return ""


def in_ms(seconds: float) -> str:
    """Milliseconds with about four digits; a dash where there are none."""
    value = seconds * 1e3
    if not math.isfinite(value):
        return "-"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1 if abs(value) < 10_000 else 0
    return f"{value:.{digits}f}"


def load_notes(summary: LoadSummary, metrics: Sequence[str] = ORDER) -> list[str]:
    """The notes below the table: how to read it, and what speaks against it."""
    durations = {name: summary.durations[name] for name in metrics if name in summary.durations}
    notes = []
    if durations:
        notes += ["of completed requests, from the intended instant", summary.warm_up_why]
    main = _main_duration(summary, metrics)
    intervals = {} if main is None else durations[main].intervals
    stated = [
        f"{level} {in_ms(ends[0])} to {in_ms(ends[1])}"
        for level, ends in intervals.items()
        if ends is not None
    ]
    if main is not None and stated:  # of the duration that the histogram shows
        notes.append(f"{WORDS[main]}, 95 % intervals (ms): {', '.join(stated)}")
    # where the queue grew to the end, its delays are those of the run's length: no number of
    # requests would settle them
    behind = summary.growth is not None and summary.growth.unstable
    short = [name for name, one in durations.items() if name != LATENESS and one.too_short]
    if short:
        notes.append(
            "too short: the run does not know this mean to 25 %"
            + ("; a longer run would not either" if behind else _needed(summary, short))
        )
    if behind:
        completed = short_number(summary.completed_rate, 3)
        notes.append(
            f"the server did not keep up with the rate: completed {completed}/s of "
            f"{short_number(summary.drawn_rate, 3)}/s offered, and the queue grew to the end of "
            "sending"
        )
    if any(None in one.intervals.values() for one in durations.values()):
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
