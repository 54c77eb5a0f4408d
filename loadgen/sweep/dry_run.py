"""What a sweep would do: its cells, their lengths by the advice, the whole time. Nothing is started."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgen.sweep.grid import Basis, Bounds, Cell
from loadgen.sweep.plan import Plan, searches_of
from loadgen.sweep.status import duration
from queueing.latency import LatencyModel
from queueing.profile import load_law

GUESS = "reference"  # the law of a small engine on a small machine
CONTEXT = 2048  # tokens, of an engine that is not asked
OVERHEAD = 1.0


def planned(plan: Plan) -> tuple[list[Cell], LatencyModel, bool]:
    """The cells under the given law, or under a guess; whether it is one."""
    guessed = plan.latency is None
    law = load_law(GUESS if plan.latency is None else plan.latency).at_speed(1.0)
    return Basis(plan, law, Bounds(max_num_seqs=plan.max_num_seqs, max_model_len=CONTEXT)).cells(), law, guessed


def plan_as_object(plan: Plan) -> dict[str, Any]:
    """For `--json`."""
    cells, law, guessed = planned(plan)
    return {
        "plan": msgspec.to_builtins(plan),
        "law": str(law),
        "law_is_a_guess": guessed,
        "cells": [msgspec.to_builtins(cell) | {"seconds": cell.seconds} for cell in cells],
        "seconds": total_seconds(plan, cells),
    }


def plan_lines(plan: Plan) -> list[str]:
    """For people."""
    cells, law, guessed = planned(plan)
    width = max((len(cell.policy) for cell in cells), default=0)
    lines = [f"law: {law}" + (" (a guess: the sweep calibrates its own, which changes rates and lengths)" if guessed else "")]
    for number, cell in enumerate(cells, start=1):
        limit = "" if cell.max_output_tokens is None else f"  limit {cell.max_output_tokens}"
        shorter = "  shorter than asked (--cell-limit)" if cell.cut else ""
        refused = "  NOT RUN: load >= 1" if cell.load >= 1 and not plan.allow_unstable else ""
        lines.append(
            f"{number:>4}  {cell.policy:<{width}}  load {cell.load:5.3f}  {cell.rate:8.4g}/s{limit}  {cell.count:>6} requests  "
            f"{duration(cell.seconds):>6}{shorter}{refused}"
        )
    if searches := searches_of(plan):
        lines.append(f"and {len(searches)} searches, each of about five probes")
    return [*lines, f"{len(cells)} cells, about {duration(total_seconds(plan, cells))} in all, without the engine's start and calibration"]


def total_seconds(plan: Plan, cells: list[Cell]) -> float:
    """Sending, short calibrations, and what goes between."""
    run = [cell for cell in cells if cell.load < 1 or plan.allow_unstable]
    return sum(cell.seconds + plan.bracket + OVERHEAD for cell in run) + plan.bracket
