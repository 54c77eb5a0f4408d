"""The page's words and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench.ordering.design import FEW, LENGTHS, LIMIT, MANY, PROMPT_TOKENS
from bench.ordering.judgement import (
    CLOSE,
    GAIN,
    RANKED,
    REVERSED,
    UNCLEAR,
    Run,
    compared,
    delay_share,
    pairs,
)

if TYPE_CHECKING:
    from bench.ordering.report import Part

INTRODUCTION = (
    "# Orders of service on a real engine\n\n"
    "What shortest-first by predicted length does to the delay of a real engine, beside what the "
    "law predicts of it. All orders of\na round serve the same arrivals, lengths and predictions; "
    "the predictions are exact. Nothing that is predicted uses a delay:\nthe law is calibrated "
    "before, and the speed of the engine during a run is the factor on the law at which the "
    "simulator serves\nthe run's own requests in as many seconds of service as the engine did. "
    "All numbers are in [orders-measured.json](orders-measured.json).\n"
)
COLUMNS = (
    "delay: mean queueing delay, observed / predicted. observed, predicted: the same over that of "
    "first come, first served, ± the 95 %\ninterval of paired batch means; predicted by "
    "simulation of the measured law at the speed of each run. formula: the approximation\nby one "
    "server with which `kendall predict` answers, which says itself that it is in doubt where an "
    "order changes much on several\nslots. same requests: predicted by the simulator on the run's "
    "own arrivals and lengths, so that what differs is engine and\ngateway. p99: of the delay, "
    "observed / predicted. longest tenth: mean sojourn of the tenth of the requests with the most "
    "output\ntokens, observed / predicted. preemptions: of a request, on average.\n"
)


def page(parts: Sequence[Part]) -> str:
    """Markdown."""
    sections = [
        (_few(part) if part.few else _many(part)) if part.runs else _nothing(part) for part in parts
    ]
    return "\n".join([INTRODUCTION, *sections, _how(parts)])


def _few(part: Part) -> str:
    found = compared(part.runs, part.first_come)
    held = sum(each.within(CLOSE) for each in found)
    told = pairs(part.runs)
    count = Counter(pair.says for pair in told)
    rows = [_order(part, text) for text in part.runs]
    head = (
        *("order", "delay (ms)", "observed", "predicted", "deviation", "formula"),
        *("same requests", "p99 (ms)", "longest tenth (ms)", "preemptions", "result"),
    )
    rule = (
        f"A ratio **holds** where observed and predicted differ by at most {CLOSE:.0%} of the "
        f"predicted or by the interval. {held} of {len(found)} hold. Of {len(told)} pairs of "
        f"orders {count[RANKED]} rank as predicted beyond the interval of their "
        f"paired difference, {count[UNCLEAR]} are not told apart, {count[REVERSED]} "
        "rank the other way round."
    )
    ranks = [
        [_short(p.first), _short(p.second), f"{_ms(p.difference)} ± {_ms(p.half_width)}", p.says]
        for p in told
    ]
    return "\n".join(
        [
            f"## {_slots(part)} slots, load {FEW.load:g}",
            "",
            rule,
            "",
            *_table(head, rows),
            "",
            COLUMNS,
            "Ranks, by predicted mean delay; difference: the second's observed mean delay less "
            "the first's, ms.",
            "",
            *_table(("first", "second", "difference", "result"), ranks),
            "",
            "Round by round:",
            "",
            *_rounds(part),
            "",
            *_dropped(part),
        ]
    )


def _order(part: Part, policy: str) -> list[str]:
    mine, base = part.runs[policy], part.runs[part.first_come]
    found = next((e for e in compared(part.runs, part.first_come) if e.policy == policy), None)
    formulas = [run.predicted.formula for run in (*mine, *base)]
    doubt = mine[0].predicted.doubt is not None

    def mean(runs: Sequence[Run], kind: str, name: str) -> float:
        values = [
            getattr(run.observed if kind == "observed" else getattr(run.predicted, kind), name)
            for run in runs
        ]
        return float(np.mean(values))

    same = mean(mine, "same_arrivals", "delay") / mean(base, "same_arrivals", "delay")
    by_formula = "-"
    if None not in formulas:
        by_formula = f"{_formula(mine) / _formula(base):.2f}" + (" (in doubt)" if doubt else "")
    both = [
        f"{_ms(mean(mine, 'observed', name))} / {_ms(mean(mine, 'predicted', name))}"
        for name in ("delay_p99", "longest_tenth")
    ]
    preempted = float(np.mean([run.column("preemptions").mean() for run in mine]))
    return [
        _short(policy),
        f"{_ms(mean(mine, 'observed', 'delay'))} / {_ms(mean(mine, 'predicted', 'delay'))}",
        "1" if found is None else f"{found.observed:.2f} ± {found.half_width:.2f}",
        "1" if found is None else f"{found.predicted:.2f}",
        "" if found is None else f"{found.deviation:+.0%}",
        by_formula,
        f"{same:.2f}",
        *both,
        f"{preempted:.2f}",
        "" if found is None else ("holds" if found.within(CLOSE) else "**does not hold**"),
    ]


def _formula(runs: Sequence[Run]) -> float:
    return float(np.mean([run.predicted.formula or 0.0 for run in runs]))


def _rounds(part: Part) -> list[str]:
    rows = []
    for policy, mine in part.runs.items():
        for run, base in zip(mine, part.runs[part.first_come], strict=True):
            observed = run.observed.delay / base.observed.delay
            predicted = run.predicted.predicted.delay / base.predicted.predicted.delay
            same = run.predicted.same_arrivals.delay / base.predicted.same_arrivals.delay
            rows.append(
                [
                    str(run.cell["round"]),
                    _short(policy),
                    f"{run.predicted.speed:.3f}",
                    f"{run.predicted.load:.2f}",
                    f"{_ms(run.observed.delay)} / {_ms(run.predicted.predicted.delay)}",
                    f"{observed:.2f} / {predicted:.2f} / {same:.2f}",
                ]
            )
    rows.sort(key=lambda row: int(row[0]))
    head = (
        *("round", "order", "speed", "load at it", "delay, observed / predicted (ms)"),
        "ratio, observed / predicted / same requests",
    )
    return _table(head, rows)


def _many(part: Part) -> str:
    found = {e.policy: e for e in compared(part.runs, part.first_come, "sojourn_time")}
    rows = []
    for policy, mine in part.runs.items():
        each, own = found.get(policy), mine[0]
        shares = f"{delay_share(own.observed):.2%} / {delay_share(own.predicted.predicted):.2%}"
        rows.append(
            [
                _short(policy),
                f"{own.predicted.speed:.3f}",
                f"{own.predicted.load:.2f}",
                f"{_ms(own.observed.delay)} / {_ms(own.predicted.predicted.delay)}",
                f"{_ms(own.observed.sojourn)} / {_ms(own.predicted.predicted.sojourn)}",
                shares,
                "1" if each is None else f"{each.observed:.3f} ± {each.half_width:.3f}",
                "1" if each is None else f"{each.predicted:.3f}",
            ]
        )
    says = (
        "Where nearly everybody gets a slot at once there is nothing to order: what an order can "
        "save is a part of the delay. No gain, as predicted: the mean delay is at most "
        f"{GAIN:.0%} of the mean sojourn, observed and predicted, and the sojourn over that of "
        f"first come, first served is within {GAIN:.0%} or its interval of what is predicted at "
        f"the speeds of the two runs. {'It holds.' if part.holds else '**It does not hold.**'}"
    )
    head = (
        *("order", "speed", "load at it", "delay, observed / predicted (ms)"),
        *("sojourn, observed / predicted (ms)", "delay / sojourn, observed / predicted"),
        *("sojourn ratio, observed", "predicted"),
    )
    return "\n".join(
        [
            f"## {_slots(part)} slots, load {MANY.load:g}",
            "",
            says,
            "",
            *_table(head, rows),
            "",
            *_dropped(part),
        ]
    )


def _nothing(part: Part) -> str:
    """A part of which no round could be used."""
    return "\n".join([f"## {part.name}", "", "**Nothing to compare.**", "", *_dropped(part)])


def _how(parts: Sequence[Part]) -> str:
    cells = [run.cell for part in parts for mine in part.runs.values() for run in mine]
    first, dates = cells[0], sorted(str(cell["date"]) for cell in cells)
    versions = ", ".join(f"{name} {value}" for name, value in sorted(first["versions"].items()))
    machine = ", ".join(f"{name} {value}" for name, value in first["hardware"].items())
    noisy = [cell for cell in cells if cell["noise"] > 1]
    lines = [
        "## How",
        "",
        f"- Measured from {dates[0]} to {dates[-1]} (UTC). Hardware: {machine}.",
        f"- Versions: {versions}.",
        f"- Output tokens `{LENGTHS}` (median 24), cut at {LIMIT}; prompts `{PROMPT_TOKENS}`; "
        "predictions exact; prompts of every run its own.",
        f"- Counted requests of each order and round: {first['counted']:,}; {first['first']:,} "
        "before them settle the queue.",
        "- Rate of a round: the load times the largest stable rate under the law at the speed of "
        "a pilot under load. Its orders run one after the other, in random order.",
        "- A run whose speed changed much, or was far from the pilot's, was measured once more "
        "and the quieter attempt kept; whether theory and engine agree had no say. Still not "
        f"quiet: {len(noisy)} of {len(cells)}.",
        f"- Senders were late by {1e3 * max(c['lateness']['p99'] for c in cells):.2g} ms at most "
        "(p99).",
        f"- Seeds: {', '.join(str(seed) for seed in sorted({c['seed'] for c in cells}))}.",
    ]
    for part in parts:
        if part.runs:
            cell = next(iter(part.runs.values()))[0].cell
            lines.append(
                f"- Law of {part.name}: `{cell['law']}` (R2 {part.profile.r2 or 0:.4f}, its cells "
                f"within {part.profile.mape or 0:.1%} on average)."
            )
    return "\n".join([*lines, "", "    .venv/bin/python bench/orders.py", ""])


def _dropped(part: Part) -> list[str]:
    return [f"Not used: {'; '.join(part.dropped)}.", ""] if part.dropped else []


def _slots(part: Part) -> int:
    return int(part.runs[part.first_come][0].cell["slots"])


def _short(policy: str) -> str:
    """Only the order."""
    options = policy.partition(":")[2].split(",")[1:]
    return "`" + (",".join(options) or "order=fcfs") + "`"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if abs(seconds) < 1 else f"{1e3 * seconds:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
