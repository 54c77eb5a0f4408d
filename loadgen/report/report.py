"""Comparisons as tables for people: means beside every theory, quantiles and use, the parts of
the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import msgspec
from rich.console import Console

from kendall.loadgen.compare.client_side import ClientSide
from kendall.loadgen.compare.comparison import Comparison, DifferencePart
from kendall.loadgen.compare.residual import disturbance, parts_of, verdict
from kendall.loadgen.report.columns import BY_KEY, SHORT, difference, policy_name
from kendall.loadgen.report.numbers import number, plain_ms
from kendall.loadgen.report.orders import show_orders
from kendall.policies.text import counted, short_form
from kendall.queueing.commands.terminal import Column, Table, say
from kendall.queueing.measurement.check import AGREE, in_words, pooled

CHECK_KEYS = ("same_arrivals_ms", "check_difference_ms", "measured_service_ms")
CHECK_HEADINGS = tuple(BY_KEY[key].heading for key in CHECK_KEYS)
MEANS = (
    "n",
    "observed_ms",
    *CHECK_KEYS,
    "predicted_ms",
    "arrivals_share",
    "mean_batch_size",
    "speed",
)
QUANTILES = ("p50_ms", "p90_ms", "p99_ms", "batch_size", "utilisation", "paper_ms", "live_ms")
QUANTILE_NOTES = (
    "above: observed, below: predicted at the run's speed; live: theory with the run's own rate "
    "and lengths",
    (
        "as printed: the formula of the documents as they print it, at the run's speed; -: they "
        "print none for this queue"
    ),
)
CHECK_NOTES = (
    (
        "model: the very same requests, served by the calibrated law at the speed that the engine "
        "had at each moment, which is taken from service times, never from delays"
    ),
    (
        "difference: observed / model - 1, with the 95 % interval of the pairs; !: beyond both "
        f"{100 * AGREE:.0f} % and the interval"
    ),
    (
        "gateway's share: what the gateway adds to the delays (observed / recursion on the "
        "measured service times - 1)"
    ),
)
NO_LAW = (
    "- under model, steady state and speed: they need a latency law, which a run file does "
    "not have: --latency gives it"
)
PART_NOTES = (
    "observed - predicted a priori as a sum (ms); !: beyond chance",
    (
        "theory: error of the formula; arrivals: requests drawn against those asked; sender: "
        "arrivals against the timetable"
    ),
    (
        "speed: machine against the calibration; scatter: residual cv against the calibration's; "
        "shape: what neither explains"
    ),
    "gateway: time lost before dispatches; docs/why/agreement.md explains each column",
)
ORDER_NOTES = (
    "predictor: predicted lengths as they came against those asked",
    "process: the arrival process that was asked for, simulated, against Poisson arrivals",
    "- under gateway: within shape; no recursion tells it apart under an order of service",
)
NUMERALS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
PART_ENDS = ("observed\n(ms)", "verdict")


def table(comparisons: Sequence[Comparison]) -> Table:
    """One row per policy and epoch: the observed mean, the model beside the same requests, and the
    steady state that was predicted.
    """
    return _table(MEANS, comparisons)


def quantile_table(comparisons: Sequence[Comparison]) -> Table:
    """Observed above predicted at the run's speed: quantiles of what is compared, batch size,
    utilisation; printed and live means.
    """
    return _table(QUANTILES, comparisons)


def part_table(comparisons: Sequence[Comparison]) -> Table:
    """The way from the prediction a priori to the observed mean, part by part; the verdict."""
    names = parts_of(comparisons)
    headings = (*(f"{name}\n(ms)" for name in names), *PART_ENDS)
    rows = []
    for comparison in comparisons:
        split, kind = comparison.split, verdict(comparison).kind
        parts = {} if split is None else {part.name: part for part in split.parts}
        ends = (
            plain_ms(comparison.quantity.observed.mean),
            "-" if kind == "no prediction" else SHORT.get(kind, kind),
        )
        rows.append([*(_part(parts.get(name)) for name in names), *ends])
    return _table(("a_priori_ms",), comparisons, headings, rows)


def _table(
    keys: Sequence[str],
    comparisons: Sequence[Comparison],
    headings: Sequence[str] = (),
    more: Sequence[Sequence[str]] = (),
) -> Table:
    """Policy, load and these columns of the report; behind them those of `more`."""
    shown = [BY_KEY[key] for key in ("policy", "load", *keys)]
    columns = [
        Column(heading="policy", left=True, short=short_form),
        *(Column(heading=column.heading) for column in shown[1:]),
        *(Column(heading=heading, left=heading == "verdict") for heading in headings),
    ]
    rows = [[column.text(comparison) for column in shown] for comparison in comparisons]
    ends = more or [()] * len(rows)
    return Table(columns, [[*row, *end] for row, end in zip(rows, ends, strict=True)], keys=2)


def show_table(comparisons: Sequence[Comparison], to: Console) -> None:
    """The first table, what its reader must know, and orders of service beside one another."""
    to.print(table(comparisons))
    say(to, "")
    for line in notes(comparisons):
        say(to, line)
    show_orders(comparisons, to)


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """The sentences that a reader of the table must know, one line each."""
    lines = [
        *([whole] if (whole := check_sentence(comparisons)) else []),
        "observed: mean queueing delay ± 95 % half width",
        *(CHECK_NOTES if any(c.check for c in comparisons) else CHECK_NOTES[2:]),
        (
            "steady state: the forecast for the requested rate and lengths, at the engine's speed "
            "in the run; arrivals' share: what these very requests make of it (model / steady "
            "state - 1), in a short run mostly by chance"
        ),
        "speed: measured service times over the calibrated law's (> 1: slower)",
    ]
    if comparisons and not any(c.calibrated for c in comparisons):
        lines.append(NO_LAW)
    if any(c.compared == "sojourn_time" for c in comparisons):
        lines.append(
            "*: means of the sojourn time; before a continuous engine, waiting for its next step "
            "belongs to service"
        )
    if disturbed := [
        f"{policy_name(c)} at load {number(c.load, '.2f')} ({disturbance(c)})"
        for c in comparisons
        if c.of_others
    ]:
        lines.append(f"disturbed, and not judged: {', '.join(disturbed)}")
    correlated = [
        c.policy for c in comparisons if c.quantity.observed.correlated and not c.too_short
    ]
    if correlated:
        lines.append(
            "batch means are correlated, and the interval is widened accordingly: "
            f"{', '.join(correlated)}"
        )
    return lines


def check_sentence(comparisons: Sequence[Comparison]) -> str | None:
    """The checks of all cells together in one sentence, then every cell that disagrees; None
    without a law.
    """
    judged = [(c, check) for c in comparisons if not c.of_others and (check := c.check)]
    whole = pooled([check for _, check in judged])
    if whole is None:
        return None
    policies = len({c.policy for c, _ in judged})
    under = "one policy" if policies == 1 else f"{NUMERALS.get(policies, policies)} policies"
    sentence = f"{counted(whole.requests, 'request')} under {under}: {in_words(whole)}."
    apart = [
        f"{policy_name(c)} at load {number(c.load, '.2f')}: {difference(check)}; cause: {cause}."
        for c, check in judged
        for cause in check.causes
    ]
    return " ".join([sentence, *apart])


def check_columns(comparison: Comparison) -> tuple[str, ...]:
    """The model's mean, the difference to the observed one, and the gateway's share of it."""
    return tuple(BY_KEY[key].text(comparison) for key in CHECK_KEYS)


def show(comparisons: Sequence[Comparison], to: Console) -> None:
    """Tables and notes; the parts only where a law was given."""
    show_table(comparisons, to)
    if any(comparison.quantity.a_priori for comparison in comparisons):
        say(to, "")
        to.print(quantile_table(comparisons))
        for line in QUANTILE_NOTES:
            say(to, line)
        say(to, "")
        to.print(part_table(comparisons))
        splits = [comparison.split for comparison in comparisons if comparison.split is not None]
        needed = (
            "predictor" in parts_of(comparisons),
            "process" in parts_of(comparisons),
            any("gateway" not in (part.name for part in split.parts) for split in splits),
        )
        for line in (*PART_NOTES, *compress(ORDER_NOTES, needed)):
            say(to, line)
        for line in reasons(comparisons):
            say(to, line)


def client_lines(side: ClientSide) -> list[str]:
    """What the clients' records of a server that tells no dispatch say, and how they were read."""
    lines = []
    for one in side.token_times:
        observed, name = one.observed, one.name.replace("_", " ")
        half = "too short" if observed.too_short else f"± {plain_ms(observed.half_width)}"
        beside = "no steady state predicted"
        if one.predicted is not None and one.deviation is not None:
            beside = f"steady state {plain_ms(one.predicted)} ms ({one.deviation:+.1%})"
        lines.append(f"{name}: observed {plain_ms(observed.mean)} ms ({half}), {beside}")
    slots = counted(side.slots, "slot")
    lines.append(
        f"dispatches are inferred from the clients' records ({slots}, in the order of sending), so "
        "the gateway's share says nothing"
    )
    told = "" if side.server is None else f"; {side.server.in_words}"
    lines.append(f"mean queueing delay as inferred: {plain_ms(side.inferred_delay)} ms{told}")
    if side.early:
        lines.append(
            f"{side.early} of {counted(side.requests, 'request')} had a first token before a slot "
            f"was free by this reckoning; expected {slots} and the order of arrival: is "
            "--max-num-seqs that of the server?"
        )
    return lines


def reasons(comparisons: Sequence[Comparison]) -> list[str]:
    """Say why cells do not agree, one line each."""
    judged = [(comparison, verdict(comparison)) for comparison in comparisons]
    return [
        f"{policy_name(c)}, load {number(c.load, '.2f')}: {why.text}"
        for c, why in judged
        if why.kind != "agree"
    ]


def as_object(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON has it: seconds, and what follows from its fields."""
    why = verdict(comparison)
    return {
        **msgspec.to_builtins(comparison, enc_hook=float),
        "prediction_error": comparison.prediction_error,
        "too_short": comparison.too_short,
        "verdict": {"kind": why.kind, "text": why.text},
        "check": None if comparison.check is None else comparison.check.as_dict(),
    }


def _part(part: DifferencePart | None) -> str:
    if part is None:
        return "-"
    milliseconds = f"{part.seconds * 1e3:+.1f}"
    if milliseconds in ("+0.0", "-0.0"):
        return "0"
    return milliseconds + ("!" if part.significant else "")
