"""docs/production-validation.md from the cells' files: every number on it is computed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.live.answers import CLOSE, LEVELS, verdict, verdict_of_cell
from bench.live.page import cells_that_hold, copy_data, markdown_table
from bench.live.results import best, read_results

TITLES = {
    "production": "Continuous batching as it is run in production, on a real engine",
    "memory": "Requests that wait for KV memory, on a real engine",
}
SLOTS = {
    "production": "32 and 64 slots",
    "memory": "32 slots, KV memory for five requests (513 tokens kept free for each answer)",
}
INTRODUCTION = (
    "# {title}\n"
    "\n"
    "`bench/live_validation.py --design {design}` sends stationary Poisson load to a gateway with "
    "vLLM and the tiny model:\n"
    "{slots}, prompts of 32 to 1,024 tokens, and three kinds of answers with 40 tokens on "
    "average (before the limit of 512): geometric,\n"
    "lognormal with a squared coefficient of variation of 4, and bimodal, where an eighth is ten "
    "times as long as the rest. Means and p95 of\n"
    "the time to first token and of the sojourn time are compared with what the gateway predicted "
    "while it served; a p95 that it did not\n"
    "predict is predicted at the estimates of the same window. All numbers are computed from the "
    "files in [{design}-validation/]({design}-validation/).\n"
)
RULE = (
    f"A statistic holds where the prediction is within {CLOSE:.0%} of the observed value or in its "
    "95 % interval; *too short*: that interval reaches further than a quarter\nof the value to "
    "either side. A cell holds where a statistic holds and none fails; it is too short where all "
    "are."
)
CELLS = {
    "holds": "holds",
    "too short": "*too short*",
    "does not hold": "**does not hold**",
}
PLURAL = {"holds": "hold", "does not hold": "do not hold"}
NAMES = {"time_to_first_token": "first token", "sojourn_time": "sojourn"}


def write_production_page(folder: Path, docs: Path, design: str = "production") -> Path:
    """Page and data under `docs`; the page's path. `design`: a name of `TITLES`."""
    cells = best(read_results(folder.joinpath("cells").glob("*.json")))
    copy_data(folder, docs / f"{design}-validation")
    page = docs / f"{design}-validation.md"
    about = INTRODUCTION.format(title=TITLES[design], design=design, slots=SLOTS[design])
    parts = [about, _counts(cells), _table(cells), _how(cells, design)]
    page.write_text("\n".join(parts), "utf-8")
    return page


def _counts(cells: Sequence[Mapping[str, Any]]) -> str:
    said = Counter(verdict(row) for cell in cells for row in cell["answers"])
    of_cells = Counter(verdict_of_cell(cell["answers"]) for cell in cells)
    each = ", ".join(f"{count} {PLURAL.get(word, word)}" for word, count in said.most_common())
    title = f"## {cells_that_hold(of_cells['holds'], len(cells), of_cells['too short'])}"
    furthest = max(
        (
            abs(row["predicted"] / row["observed"] - 1)
            for cell in cells
            for row in cell["answers"]
            if row["observed"] and row["predicted"]
        ),
        default=0.0,
    )
    return (
        f"{title}\n\n{RULE} Of all statistics: {each}; the furthest prediction is {furthest:.1%} "
        f"off. {_lower(cells)}\n"
    )


def _lower(cells: Sequence[Mapping[str, Any]]) -> str:
    """How many predictions are lower than what was observed."""
    said = []
    for quantity, name in NAMES.items():
        told = [
            row["predicted"] < row["observed"]
            for cell in cells
            for row in cell["answers"]
            if row["quantity"] == quantity and row["observed"] and row["predicted"]
        ]
        said.append(f"of the {name} {sum(told)} of {len(told)}")
    return f"Lower than observed: {', '.join(said)}."


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    head = ["policy", "load", "lengths", "n", "seconds"]
    head += [
        f"{name} {statistic} (ms)" for name in NAMES.values() for statistic in ("mean", *LEVELS)
    ]
    return markdown_table([*head, "cell"], [_row(cell) for cell in cells]) + "\n"


def _row(cell: Mapping[str, Any]) -> list[str]:
    kind = str(cell["output_tokens"]).partition(":")[0]
    return [
        f"`{cell['policy']}`",
        f"{cell['load']:g}",
        {"mixture": "bimodal"}.get(kind, kind),
        f"{cell['answers'][0]['n']:,}",
        f"{cell['seconds']:.0f}",
        *map(_said, cell["answers"]),
        CELLS[verdict_of_cell(cell["answers"])] + ("" if not cell["noise"] else " \\*"),
    ]


def _said(row: Mapping[str, Any]) -> str:
    """Observed with its half width, predicted, difference."""
    observed, low, high, predicted = (
        row[name] for name in ("observed", "low", "high", "predicted")
    )
    if observed is None:
        return "-"
    half = "" if low is None else f" ± {_short(max(observed - low, high - observed))}"
    beside = "-" if not predicted else f"{predicted * 1e3:.3g} ({predicted / observed - 1:+.1%})"
    text = f"{observed * 1e3:.3g}{half} / {beside}"
    found = verdict(row)
    if found == "does not hold":
        return f"**{text}**"
    return f"{text} *too short*" if found == "too short" else text


def _short(seconds: float) -> str:
    """Milliseconds to two digits, without an exponent."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.2g}"


def _how(cells: Sequence[Mapping[str, Any]], design: str) -> str:
    first = cells[0]
    return (
        "Observed ± half width / predicted (predicted over observed); without ± the cell is too "
        "short for an interval. n: the answers that were whole, of those that came in so many "
        "seconds. \\* the machine was not quiet: the reasons are in the files.\n\n"
        f"- Engine {first['engine']}, vLLM {first['versions'].get('vllm', '-')}, "
        f"{first['hardware'].get('cpu', '-')}, {first['hardware'].get('cores', '-')} cores; law "
        f"`{first['law']}`; seeds in the files; {first['date'][:10]}.\n"
        f"- Again: `.venv/bin/python bench/live_validation.py --design {design}` (quiet machine).\n"
    )
