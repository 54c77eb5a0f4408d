"""Loads 0.75 and 0.9 on an engine whose speed is a recorded trace, on virtual time:
docs/high-load.md. About three minutes.

.venv/bin/python bench/high_load.py [--page docs/high-load.md] [--policies single,capped]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.live.judgement import RULE
from bench.live.virtual import (
    CALM,
    LENGTHS,
    LOADS,
    MOST,
    POLICIES,
    Trace,
    VirtualCell,
    virtual_cells,
)

ROOT = Path(__file__).parents[1]
HEAD = (
    *(
        "policy",
        "load",
        "n",
        "s",
        "band, stated before (ms)",
        "observed (ms)",
        "at a constant speed (ms)",
        "result",
    ),
    *("at its speeds (ms)", "result"),
)


def main() -> None:
    """Measure and write."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--page", type=Path, default=ROOT / "docs/high-load.md")
    found.add_argument("--policies", default="", help="comma-separated parts of their names")
    options = found.parse_args()
    policies = tuple(
        policy for policy in POLICIES if any(part in policy for part in options.policies.split(","))
    )
    whole = Trace.read()
    sections = [
        _section(title, trace, virtual_cells(trace, policies)) for title, trace in _machines(whole)
    ]
    options.page.write_text("\n".join([_introduction(whole), *sections, _how()]), encoding="utf-8")
    print(options.page)


def _machines(whole: Trace) -> list[tuple[str, Trace]]:
    return [("The first two minutes of the trace", whole.first(CALM)), ("The whole trace", whole)]


def _section(title: str, trace: Trace, cells: Iterable[VirtualCell]) -> str:
    rows, held, held_by_trace = [], 0, 0
    for cell in cells:
        held, held_by_trace = (
            held + cell.lies_in(cell.band),
            held_by_trace + cell.lies_in(cell.true_band),
        )
        rows.append(_row(cell))
        print(" | ".join(rows[-1]), file=sys.stderr)
    low, high = trace.levels.min(), trace.levels.max()
    said = (
        f"{trace.seconds:.0f} s, repeated; the engine's time for the same work lies between "
        f"{low:.2g} and {high:.2g} times its mean."
    )
    counted = (
        f"{held} of {len(rows)} observed means lie in the band; {held_by_trace} in a band "
        "of the same kind along the trace itself."
    )
    return "\n".join(
        [
            f"## {title}",
            "",
            said,
            "",
            _line(HEAD),
            "|" + "---|" * len(HEAD),
            *map(_line, rows),
            "",
            counted,
            "",
        ]
    )


def _row(cell: VirtualCell) -> list[str]:
    compared = cell.found.compared
    observed, predicted = (
        compared.observed,
        compared.predicted.value if compared.predicted.known else None,
    )
    return [
        f"`{cell.policy}`",
        f"{cell.load:g} ({cell.found.load.value:.2f})",
        f"{compared.n:,}",
        f"{cell.seconds:.0f}",
        f"{_ms(cell.band.low)} to {_ms(cell.band.high)}",
        f"{_ms(observed.value)} ± {observed.relative:.0%}",
        _ms(predicted),
        cell.says(predicted),
        _ms(cell.at_its_speeds),
        cell.says(cell.at_its_speeds),
    ]


def _introduction(trace: Trace) -> str:
    about = trace.header
    return (
        "# High load on a wandering engine\n\nAt loads 0.75 and 0.9 the mean delay depends on how "
        "the engine's speed changes, not on its mean speed alone. Here the queue runs on virtual "
        f"time on an engine whose speed was recorded from a real one ({about['engine']}; "
        f"{about['hardware']}; {about['date']}; {about['machine']}).\n\n{RULE}\n\nTwo predictions "
        "are judged by it, neither from a delay. *At a constant speed*: the live model's, with "
        "the mean speed of the cell. *At its speeds*: by simulation along the speeds of the "
        "cell's own batches, second by second. The band holds 95 % of the means of cells of this "
        "length on an engine that goes at the speeds that a run at load 0.3 showed before, second "
        "by second; it is stated before the cell. It counts the chance of arrivals, lengths and "
        "the instant at which the cell begins, and not the error of those speeds: seen through "
        "batches and blocks of one second, stalls are smeared out and the mean is up to 2 % off, "
        "which near saturation moves the mean delay further than chance does. Below each table: "
        "how many means the band holds, and how many it holds with the trace itself in place of "
        "what was seen of it. A band is cut from 200 simulated windows, that of the longest cells "
        "from 20, whose edges are rough: such a band holds 86 % of the means. It decides "
        "nothing.\n"
    )


def _how() -> str:
    return (
        f"## How\n\n- Output tokens `{LENGTHS}`, loads {', '.join(f'{load:g}' for load in LOADS)} "
        "of the largest stable rate at the mean speed; in brackets what the estimators took it "
        "for.\n- A cell is as long as `queueing.simulation.run_length` advises for ±10 % at a "
        f"constant speed, and is doubled while it is too short, up to {MOST:,} requests.\n- The "
        "trace: `bench/live/speed-trace.json`. The cells on the real engine: "
        "[live-validation.md](live-validation.md).\n\n    .venv/bin/python bench/high_load.py\n"
    )


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(seconds: float | None) -> str:
    return (
        "-"
        if seconds is None
        else f"{seconds * 1e3:.3g}"
        if seconds < 1
        else f"{seconds * 1e3:.0f}"
    )


if __name__ == "__main__":
    main()
