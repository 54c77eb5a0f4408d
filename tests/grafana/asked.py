"""What the dashboards ask Prometheus, as Grafana would send it, and whether an answer can be
drawn in the unit it is labelled with.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "grafana/dashboards"
FILES = sorted(FOLDER.glob("*.json"))
VARIABLES = ("$instance", "$policy", "$model")

# What a run at 15 requests a second can show. A delay, also a predicted one, is of the order of the
# longest sojourn of the run, which milliseconds under "s" would not be; a fraction is about 1 at
# most, which percents under "percentunit" are not, unless it is an error or a speed.
BOUNDS = {
    "s": (0.0, math.nan),
    "reqps": (0.0, 100.0),
    "percentunit": (0.0, 5.0),
    "short": (0.0, 5000.0),
    "suffix: tok/s": (0.0, 20_000.0),
    "bytes": (2.0**24, 2.0**36),
    "none": (0.0, 2.0),
}
UNBOUNDED = re.compile(r"error|- 1$|speed_ratio")
ORDER = 10.0  # a bucket's end may lie beyond what it holds, an interval's end beyond what happened


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    expr: str
    unit: str
    instant: bool = False
    reference: str = "A"

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel} ({self.reference})"

    @property
    def vllm(self) -> bool:
        """Whether only the real engine can answer."""
        return "vllm:" in self.expr


def queries_of(path: Path) -> Iterator[Asked]:
    """Every query of a dashboard's panels and its annotations."""
    dashboard = json.loads(path.read_text())
    for panel in (panel for panel in dashboard["panels"] if panel["type"] != "row"):
        units = _column_units(panel)
        for target in panel["targets"]:
            unit = units.get(target["refId"], panel["fieldConfig"]["defaults"]["unit"])
            yield Asked(
                path.name,
                panel["title"],
                target["expr"],
                unit,
                bool(target.get("instant")),
                target["refId"],
            )
    for mark in dashboard["annotations"]["list"]:
        yield Asked(path.name, f"annotation {mark['name']}", mark["expr"], "none")


def _column_units(panel: Mapping[str, Any]) -> dict[str, str]:
    """A table has a unit a column, under the name that its transformation gives the column."""
    renamed = {
        old.removeprefix("Value #"): new
        for step in panel.get("transformations") or []
        for old, new in step["options"].get("renameByName", {}).items()
    }
    units = {
        override["matcher"]["options"]: entry["value"]
        for override in panel["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "unit"
    }
    return {reference: units[name] for reference, name in renamed.items()}


def filled(expr: str, *, window: str, shown: str) -> str:
    """Grafana's variables filled in, "all" chosen everywhere."""
    for name in VARIABLES:
        expr = expr.replace(name, ".*")
    return expr.replace("$__rate_interval", window).replace("$__range", shown)


def bounds(asked: Asked, longest: float) -> tuple[float, float]:
    """What a value can be, `longest` being the longest sojourn of the run in seconds."""
    if asked.unit == "s":
        return 0.0, ORDER * longest
    if asked.unit == "percentunit" and UNBOUNDED.search(asked.expr):
        return -1.0, 1000.0
    return BOUNDS[asked.unit]


def faults(asked: Asked, series: list[dict[str, Any]], longest: float) -> Iterator[str]:
    """Why an answer cannot be drawn; `longest`: seconds, the longest sojourn of the run."""
    values = [float(value) for each in series for _, value in each["values"]]
    if not values:
        yield f"{asked}: no data"
    if strange := [value for value in values if not math.isfinite(value)]:
        yield f"{asked}: {len(strange)} of {len(values)} values are not finite"
    low, high = bounds(asked, longest)
    if "what_if" in asked.expr and low <= min(values, default=low) <= high:
        return  # of the policies that are not in force, one may be about to saturate
    if outside := [value for value in values if math.isfinite(value) and not low <= value <= high]:
        yield (
            f"{asked}: {outside[0]} and {len(outside) - 1} others lie outside {low} to {high}, "
            f"what unit {asked.unit!r} can be here"
        )
