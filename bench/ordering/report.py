"""The page and its data, from the cells that there are."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.ordering import page
from bench.ordering.design import FEW
from bench.ordering.judgement import Run, Runs, as_predicted, compared, gains_nothing, pairs
from bench.ordering.predicted import predicted_of
from queueing.errors import UnstableQueueError
from queueing.latency.profile import Profile

NAME = "orders-measured"
BLOCKS = 20  # means of consecutive requests that are kept of each cell


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One number of slots; rounds that are whole."""

    name: str
    runs: Runs
    profile: Profile
    dropped: tuple[str, ...]  # rounds that could not be used, and why

    @property
    def first_come(self) -> str:
        """The policy that the others are compared with."""
        return next(text for text in self.runs if "order" not in text)

    @property
    def few(self) -> bool:
        """Whether so few slots that requests wait; delays are compared, else sojourns."""
        return self.name == FEW.name

    @property
    def holds(self) -> bool:
        """Whether everything is as predicted."""
        judge = as_predicted if self.few else gains_nothing
        return bool(self.runs) and judge(self.runs, self.first_come)


def write_report(folder: Path, output: Path, names: Sequence[str]) -> tuple[Path, bool]:
    """The page's path, and whether everything is as predicted. Raises ValueError: no cells."""
    parts = [part_of(folder / name) for name in names if (folder / name / "cells").is_dir()]
    if not any(part.runs for part in parts):
        raise ValueError(f"got {folder}, which has no whole round; expected one to write of")
    output.mkdir(parents=True, exist_ok=True)
    data = {part.name: _data(part) for part in parts}
    encoded = msgspec.json.format(msgspec.json.encode(data), indent=1)
    (output / f"{NAME}.json").write_bytes(encoded + b"\n")
    written = output / f"{NAME}.md"
    written.write_text(page.page(parts), encoding="utf-8")
    return written, all(part.holds for part in parts)


def part_of(folder: Path) -> Part:
    """Rounds with a cell of every policy; what the law says of them takes seconds a cell."""
    plan = msgspec.json.decode((folder / "plan.json").read_bytes())
    cells = [msgspec.json.decode(path.read_bytes()) for path in folder.glob("cells/*.json")]
    by_round: dict[int, dict[str, Any]] = {}
    for cell in cells:
        by_round.setdefault(cell["round"], {})[cell["policy"]] = cell
    runs: dict[str, list[Run]] = {text: [] for text in plan["policies"]}
    dropped = []
    for number, found in sorted(by_round.items()):
        try:
            predicted = {text: _run(found[text]) for text in plan["policies"]}
        except KeyError as missing:
            dropped.append(f"round {number}: {missing.args[0]} has no cell")
        except UnstableQueueError as error:
            dropped.append(f"round {number}: the engine was too slow for its rate ({error})")
        else:
            for text, run in predicted.items():
                runs[text].append(run)
    whole = runs if any(runs.values()) else {}
    profile = msgspec.json.decode((folder / "profile.json").read_bytes(), type=Profile)
    return Part(folder.name, whole, profile, tuple(dropped))


def _run(cell: Mapping[str, Any]) -> Run:
    print(f"round {cell['round']}, {cell['policy']}: what the law says", file=sys.stderr)
    return Run(cell, predicted_of(cell))


def _data(part: Part) -> dict[str, Any]:
    if not part.runs:
        return {"dropped": part.dropped}
    quantity = "queueing_delay" if part.few else "sojourn_time"
    ratios = compared(part.runs, part.first_come, quantity)
    return {
        "holds": part.holds,
        "compared": quantity,
        "ratios": [_with(each, ("deviation",)) for each in ratios],
        "pairs": [_with(pair, ("says",)) for pair in (pairs(part.runs) if part.few else ())],
        "dropped": part.dropped,
        "profile": part.profile.to_dict() | {"cells": []},
        "cells": [_cell(run) for run in _every(part.runs)],
    }


def _with(value: Any, properties: Iterable[str]) -> dict[str, Any]:
    return dataclasses.asdict(value) | {name: getattr(value, name) for name in properties}


def _every(runs: Runs) -> list[Run]:
    found = [run for mine in runs.values() for run in mine]
    return sorted(found, key=lambda run: str(run.cell["date"]))


def _cell(run: Run) -> dict[str, Any]:
    known = {name: value for name, value in run.cell.items() if name != "columns"}
    blocks = np.array_split(run.column("queueing_delay"), BLOCKS)
    return known | {
        "observed": dataclasses.asdict(run.observed),
        "preemptions": float(run.column("preemptions").mean()),
        "block_mean_delays": [round(float(block.mean()), 6) for block in blocks],
        **dataclasses.asdict(run.predicted),
    }
