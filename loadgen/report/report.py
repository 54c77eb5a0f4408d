"""Comparisons as tables for people: means beside every theory, quantiles and use, the parts of
the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console

from loadgen.compare.comparison import Comparison, DifferencePart, TheoryEstimate
from loadgen.compare.residual import disturbance, parts_of, verdict
from loadgen.report.orders import show_orders
from policies.text import counted, short_form
from queueing.commands.terminal import Column, Table, say
from queueing.measurement.check import AGREE, Check, in_words, pooled, signed

HEADINGS = (
    "load",
    "n",
    "observed\n(ms)",
    *(CHECK_HEADINGS := ("model\n(ms)", "difference", "gateway's\nshare")),
    "steady\nstate (ms)",
    "arrivals'\nshare",
    "batch\nsize",
    "speed",
)
QUANTILE_HEADINGS = (
    "load",
    "p50\n(ms)",
    "p90\n(ms)",
    "p99\n(ms)",
    "batch\nsize",
    "utili-\nsation",
    "as printed\n(ms)",
    "live\n(ms)",
)
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
    "gateway: time lost before dispatches; docs/agreement.md explains each column",
)
ORDER_NOTES = (
    "predictor: predicted lengths as they came against those asked",
    "process: the arrival process that was asked for, simulated, against Poisson arrivals",
    "- under gateway: within shape; no recursion tells it apart under an order of service",
)
NUMERALS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
SHORT = {"sampling noise": "chance", "no prediction": "-"}
PART_ENDS = ("observed\n(ms)", "verdict")


def table(comparisons: Iterable[Comparison]) -> Table:
    """One row per policy and epoch: the observed mean, the model beside the same requests, and the
    steady state that was predicted.
    """
    return _table(HEADINGS, map(_row, comparisons))


def quantile_table(comparisons: Iterable[Comparison]) -> Table:
    """Observed above predicted at the run's speed: quantiles of what is compared, batch size,
    utilisation; printed and live means.
    """
    return _table(QUANTILE_HEADINGS, map(_quantile_row, comparisons))


def part_table(comparisons: Iterable[Comparison]) -> Table:
    """From the prediction a priori to the observed mean, part by part, and the verdict."""
    names = parts_of(comparisons)
    headings = ("load", "a priori\n(ms)", *(f"{name}\n(ms)" for name in names), *PART_ENDS)
    return _table(headings, [_part_row(comparison, names) for comparison in comparisons])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    columns = [
        Column(heading="policy", left=True, short=short_form),
        *(Column(heading=h, left=h == "verdict") for h in headings),
    ]
    return Table(columns, list(rows), keys=2)


def show_table(comparisons: Sequence[Comparison], to: Console) -> None:
    """The first table, what its reader must know, and orders of service beside one another."""
    to.print(table(comparisons))
    say(to, "")
    for line in notes(comparisons):
        say(to, line)
    show_orders(comparisons, to)


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader of the table must know, one line each."""
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
        f"{_name(c)} at load {_plain(c.load, '.2f')} ({disturbance(c)})"
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
        f"{_name(c)} at load {_plain(c.load, '.2f')}: {difference(check)}; cause: {cause}."
        for c, check in judged
        for cause in check.causes
    ]
    return " ".join([sentence, *apart])


def check_columns(comparison: Comparison) -> tuple[str, str, str]:
    """The model's mean, the difference to the observed one, and the gateway's share of it."""
    recursion = comparison.quantity.measured_service
    share = "-" if recursion is None else _percent(recursion.deviation)
    check = comparison.check
    if check is None:
        return "-", "-", share
    mark = "!" if check.verdict == "disagree" else ""
    return _ms(check.modelled), difference(check, digits=4) + mark, share


def difference(check: Check, digits: int = 0) -> str:
    """Observed / model - 1 with its half width, which takes that many places at least."""
    if not check.modelled:
        return "-"
    half = 100 * check.relative_half_width
    width = f"± {half:{digits}.1f} %" if math.isfinite(half) else "± ?"
    return f"{signed((check.ratio - 1) * 100)} {width}"


def _percent(share: float) -> str:
    return f"{signed(share * 100)} %" if math.isfinite(share) else "-"


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
        for line in (*PART_NOTES, *_order_notes(comparisons)):
            say(to, line)
        for line in reasons(comparisons):
            say(to, line)


def _order_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Those that these need."""
    splits = [comparison.split for comparison in comparisons if comparison.split is not None]
    needed = (
        "predictor" in parts_of(comparisons),
        "process" in parts_of(comparisons),
        any("gateway" not in (part.name for part in split.parts) for split in splits),
    )
    return [note for note, is_needed in zip(ORDER_NOTES, needed, strict=True) if is_needed]


def reasons(comparisons: Sequence[Comparison]) -> list[str]:
    """Why those that do not agree do not, one line each."""
    judged = [(comparison, verdict(comparison)) for comparison in comparisons]
    return [
        f"{_name(c)}, load {_plain(c.load, '.2f')}: {found.text}"
        for c, found in judged
        if found.kind != "agree"
    ]


def as_object(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON has it: seconds, and what follows from its fields."""
    found = verdict(comparison)
    return {
        **msgspec.to_builtins(comparison, enc_hook=float),
        "prediction_error": comparison.prediction_error,
        "too_short": comparison.too_short,
        "verdict": {"kind": found.kind, "text": found.text},
        "check": None if comparison.check is None else comparison.check.as_object(),
    }


def _quantile_row(comparison: Comparison) -> tuple[str, ...]:
    quantity = comparison.quantity
    predicted = quantity.theory_quantiles.get("predicted", {})
    levels = (
        _pair(_ms(quantity.quantiles.get(level, math.nan)), _ms(predicted.get(level, math.nan)))
        for level in ("p50", "p90", "p99")
    )
    return (
        _name(comparison),
        _plain(comparison.load, ".2f"),
        *levels,
        _pair(_plain(comparison.batch_size, ".2f"), _plain(comparison.predicted_batch_size, ".2f")),
        _pair(
            _plain(comparison.utilisation, ".2f"), _plain(comparison.predicted_utilisation, ".2f")
        ),
        _with_deviation(quantity.paper),
        _with_deviation(quantity.live),
    )


def _part_row(comparison: Comparison, names: Sequence[str]) -> tuple[str, ...]:
    split, a_priori = comparison.split, comparison.quantity.a_priori
    known = {} if split is None else {part.name: _part(part) for part in split.parts}
    parts = [known.get(name, "-") for name in names]
    return (
        _name(comparison),
        _plain(comparison.load, ".2f"),
        "-" if a_priori is None else _ms(a_priori.mean),
        *parts,
        _ms(comparison.quantity.observed.mean),
        SHORT.get(kind := verdict(comparison).kind, kind),
    )


def _part(part: DifferencePart) -> str:
    shown = f"{part.seconds * 1e3:+.1f}"
    return "0" if shown in ("+0.0", "-0.0") else shown + ("!" if part.significant else "")


def _pair(observed: str, predicted: str) -> str:
    return observed if predicted == "-" else f"{observed}\n{predicted}"


def _name(comparison: Comparison) -> str:
    return comparison.policy + ("*" if comparison.compared == "sojourn_time" else "")


def _row(comparison: Comparison) -> tuple[str, ...]:
    quantity = comparison.quantity
    observed = quantity.observed
    return (
        _name(comparison),
        _plain(comparison.load, ".2f"),
        str(comparison.n),
        f"{_ms(observed.mean)} ± {_ms(observed.half_width):>5}",
        *check_columns(comparison),
        "-" if quantity.predicted is None else _ms(quantity.predicted.mean),
        _by_arrivals(comparison),
        f"{comparison.batch_size:.2f}",
        _plain(comparison.speed.factor if comparison.speed else None, ".3f"),
    )


def _by_arrivals(comparison: Comparison) -> str:
    if comparison.of_others:
        return "disturbed"
    check, predicted = comparison.check, comparison.quantity.predicted
    if check is None or predicted is None or not predicted.mean > 0:
        return "-"
    return _percent(check.modelled / predicted.mean - 1)


def _with_deviation(estimate: TheoryEstimate | None) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    deviation = estimate.deviation * 100
    shown = f"{deviation:+.1f}%" if math.isfinite(deviation) else "-"  # from a mean of nothing
    return f"{_ms(estimate.mean)} {shown:>6}"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
