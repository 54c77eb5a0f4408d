"""What a sweep would do: its cells, their lengths by the advice, the whole time. Nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rich.console import Console

from loadgen.sweep.grid import Basis, Bounds, Cell
from loadgen.sweep.plan import Plan, searches_of
from loadgen.sweep.status import duration
from policies.text import counted, short_form, short_number
from queueing.profile import load_law
from queueing.terminal import Column, Table, say

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


def print_plan(plan: Plan, to: Console) -> None:
    """For people; a cell as soon as it is known, where the table fits the width."""
    basis, cells, rows = basis_of(plan), [], []
    guessed = " (a guess: the sweep calibrates its own, which changes rates and lengths)" if plan.latency is None else ""
    say(to, f"law: {basis.law.rounded()}{guessed}")
    name = _policy_form(plan, to.width)
    columns = _columns(plan, name)
    at_once = len(Table(columns, []).lines(to.width)) == 1
    if at_once:
        to.print(Table(columns, []))
    for cell in basis.cells():
        cells.append(cell)
        rows.append(_row(plan, len(cells), cell, name))
        if at_once:
            to.print(Table(columns, rows[-1:], headed=False))
    if not at_once:
        to.print(Table(columns, rows, keys=2))
    for line in _remarks(plan, cells):
        say(to, line)


def _remarks(plan: Plan, cells: list[Cell]) -> Iterator[str]:
    if any(cell.cut for cell in cells):
        yield "*: shorter than asked (--cell-limit)"
    if any(not _runs(plan, cell) for cell in cells):
        yield "not run: at load >= 1 there is no steady state (--allow-unstable runs it)"
    if searches := searches_of(plan):
        yield f"and {len(searches)} searches, each of about five probes"
    yield f"{counted(len(cells), 'cell')}, about {duration(total_seconds(plan, cells))} in all, without the engine's start and calibration"


def _policy_form(plan: Plan, width: int) -> Callable[[str], str]:
    """Whole where the table then fits."""
    return str if len(Table(_columns(plan, str), []).lines(width)) == 1 else short_form


def _columns(plan: Plan, name: Callable[[str], str]) -> list[Column]:
    """Wide enough for every cell, so that rows can be printed one by one."""
    widths = {"cell": 4, "policy": max(len(name(policy)) for policy in plan.policies), "load": 5, "rate (1/s)": 10}
    widths |= ({"limit": 5} if _limited(plan) else {}) | {"requests": 8, "time": 10, "": 1}
    return [Column(heading=name, left=name == "policy", least=width) for name, width in widths.items()]


def _limited(plan: Plan) -> bool:
    return plan.max_output_tokens != (None,)


def _row(plan: Plan, number: int, cell: Cell, name: Callable[[str], str]) -> list[str]:
    limit = ["none" if cell.max_output_tokens is None else str(cell.max_output_tokens)] if _limited(plan) else []
    head = [str(number), name(cell.policy), f"{cell.load:.3f}", short_number(cell.rate), *limit]
    return [*head, str(cell.count), duration(cell.seconds), "*" * cell.cut] if _runs(plan, cell) else [*head, "-", "NOT RUN", ""]


def _runs(plan: Plan, cell: Cell) -> bool:
    return cell.load < 1 or plan.allow_unstable


def total_seconds(plan: Plan, cells: list[Cell]) -> float:
    """Sending, short calibrations, and what goes between."""
    run = [cell for cell in cells if _runs(plan, cell)]
    return sum(cell.seconds + plan.bracket + OVERHEAD for cell in run) + plan.bracket
