"""What a sweep would do: its cells, their lengths by the advice, the whole time. Nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgen.sweep.grid import Basis, Bounds, Cell
from loadgen.sweep.plan import Plan, searches_of
from loadgen.sweep.status import duration
from queueing.profile import load_law

GUESS = "reference"  # the law of a small engine on a small machine
CONTEXT = 2048  # tokens, of an engine that is not asked
OVERHEAD = 1.0


def basis_of(plan: Plan) -> Basis:
    """Under the given law, or under a guess."""
    law = load_law(GUESS if plan.latency is None else plan.latency).at_speed(1.0)
    return Basis(plan, law, Bounds(max_num_seqs=plan.max_num_seqs, max_model_len=CONTEXT))


def plan_as_object(plan: Plan) -> dict[str, Any]:
    """For `--json`."""
    basis = basis_of(plan)
    cells = list(basis.cells())
    return {
        "plan": msgspec.to_builtins(plan),
        "law": str(basis.law),
        "law_is_a_guess": plan.latency is None,
        "cells": [msgspec.to_builtins(cell) | {"seconds": cell.seconds} for cell in cells],
        "seconds": total_seconds(plan, cells),
    }


def plan_lines(plan: Plan) -> Iterator[str]:
    """For people, as they become known."""
    basis, cells = basis_of(plan), []
    guessed = " (a guess: the sweep calibrates its own, which changes rates and lengths)" if plan.latency is None else ""
    yield f"law: {basis.law}{guessed}"
    width = max(len(policy) for policy in plan.policies)
    for cell in basis.cells():
        cells.append(cell)
        yield f"{len(cells):>4}  {_line(plan, cell, width)}"
    if searches := searches_of(plan):
        yield f"and {len(searches)} searches, each of about five probes"
    yield f"{len(cells)} cells, about {duration(total_seconds(plan, cells))} in all, without the engine's start and calibration"


def _line(plan: Plan, cell: Cell, width: int) -> str:
    limit = "" if cell.max_output_tokens is None else f"  limit {cell.max_output_tokens}"
    head = f"{cell.policy:<{width}}  load {cell.load:5.3f}  {cell.rate:8.4g}/s{limit}"
    if cell.load >= 1 and not plan.allow_unstable:
        return f"{head}  NOT RUN: load >= 1"
    shorter = "  shorter than asked (--cell-limit)" if cell.cut else ""
    return f"{head}  {cell.count:>6} requests  {duration(cell.seconds):>6}{shorter}"


def total_seconds(plan: Plan, cells: list[Cell]) -> float:
    """Sending, short calibrations, and what goes between."""
    run = [cell for cell in cells if cell.load < 1 or plan.allow_unstable]
    return sum(cell.seconds + plan.bracket + OVERHEAD for cell in run) + plan.bracket
