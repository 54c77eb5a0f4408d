"""The README's table of the live validation, from the same files as the page: `python -m
bench.live.summary` writes it in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench.live.judgement import Judged, counts, judge
from bench.live.page import NAME
from bench.live.results import best, read_results

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BEGIN, END = (
    "<!-- table:live-validation, written by python -m bench.live.summary -->",
    "<!-- end -->",
)


def cells(folder: Path = ROOT / "docs" / NAME) -> list[Judged]:
    """Every cell as the page judges it."""
    every = best(read_results(folder.joinpath("cells").glob("*.json")))
    return [judge(result) for result in every if not result.get("longer")]


def table(judged: Sequence[Judged]) -> str:
    """Observed / predicted mean in milliseconds and their difference, a row a policy, a column a
    load; a sentence with the counts.
    """
    loads = sorted({cell.result["load"] for cell in judged})
    policies = list(dict.fromkeys(cell.result["policy"] for cell in judged))
    by_place = {(cell.result["policy"], cell.result["load"]): cell for cell in judged}
    head = ["policy", *(f"load {load:g}" for load in loads)]
    rows = [
        [
            f"`{policy}`{_starred(judged, policy)}",
            *(_said(by_place.get((policy, load))) for load in loads),
        ]
        for policy in policies
    ]
    lines = [_row(head), "|---|" + "--:|" * len(loads), *map(_row, rows)]
    held, gateway = (
        next(count for count in counts(judged) if count.says.startswith(name))
        for name in ("cells that hold", "gateway")
    )
    engine = judged[0].result
    said = (
        "Observed / predicted mean queueing delay in ms, \\* sojourn time. A cell holds where the "
        "prediction lies in the 95 % interval of the observed mean, or within 5 % of it; **bold** "
        "where it does not. *Too short*: the interval reaches further than a quarter of the mean. "
        f"{held.found:.0f} of {held.of} cells hold; in {gateway.found:.0f} of {gateway.of} the "
        "gateway's queue does with its measured service times what the queue recursion says. vLLM "
        f"{engine['versions']['vllm']} ({engine['hardware']['cpu']}, "
        f"{engine['hardware']['cores']} cores), tiny Llama."
    )
    return "\n".join([*lines, "", said])


def written(text: str, new: str) -> str:
    """The README with the table in its place."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"got a README without one place between {BEGIN!r} and {END!r}")
    return pattern.sub(lambda _: f"{BEGIN}\n{new}\n{END}", text)


def _said(cell: Judged | None) -> str:
    if cell is None or cell.predicted is None or cell.error is None:
        return "-"
    said = f"{cell.observed * 1e3:.3g} / {cell.predicted * 1e3:.3g} ({cell.error:+.1%})"
    return f"{said} *too short*" if cell.too_short else said if cell.holds else f"**{said}**"


def _starred(judged: Sequence[Judged], policy: str) -> str:
    compared = {cell.result["compared"] for cell in judged if cell.result["policy"] == policy}
    return "\\*" if compared == {"sojourn_time"} else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), table(cells())))
