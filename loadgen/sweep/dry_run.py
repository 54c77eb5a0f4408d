"""The plan of a sweep in words: its cells, their lengths by the advice, its searches, the whole
time; with orders of service what theory expects of each cell. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from rich.console import Console

from kendall.loadgen.compare.comparison import Predicted
from kendall.loadgen.compare.theory import predict_means
from kendall.loadgen.sweep.grid import Basis, GatewayBounds, SweepCell
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.saturation import first_rate, predicted_rate, probe_cell, probes_expected
from kendall.loadgen.sweep.slo import slo_of
from kendall.loadgen.sweep.status import duration
from kendall.policies import format_policy, parse_policy
from kendall.policies.text import counted, first_come_form, short_form, short_number
from kendall.queueing.choosing.orders import by_pair
from kendall.queueing.commands.terminal import Column, Table, say
from kendall.queueing.latency.profile import load_law

GUESS = "reference"  # the law of a small engine on a small machine
CONTEXT = 2048  # tokens, of an engine that is not asked
OVERHEAD = 1.0


def basis_of(plan: SweepPlan) -> Basis:
    """Under the given law, or under a guess."""
    law = load_law(GUESS if plan.latency is None else plan.latency).at_speed(1.0)
    return Basis(plan, law, GatewayBounds(max_num_seqs=plan.max_num_seqs, max_model_len=CONTEXT))


class PlannedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A search as far as it can be foreseen: its probes are about as long as the one at the
    predicted rate.
    """

    policy: str
    max_output_tokens: int | None
    goal: str
    rate: float  # around which it begins, per second
    probes: int
    seconds: float  # of all of them


def planned_searches(basis: Basis) -> list[PlannedSearch]:
    """An SLO's takes some predictions, about a second."""
    plan, searches = basis.plan, []
    probes = probes_expected(plan.tolerance)
    for policy, limit, goal in plan.searches:
        model = basis.model(policy, limit)
        rate = first_rate(model, predicted_rate(model, slo_of(goal)))
        probe = probe_cell(basis, policy, limit, goal, rate)
        searches.append(
            PlannedSearch(
                policy=policy,
                max_output_tokens=limit,
                goal=goal,
                rate=rate,
                probes=probes,
                seconds=probes * (probe.seconds + plan.bracket + OVERHEAD),
            )
        )
    return searches


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions for a cell before it runs, seconds; None where theory has no answer."""

    method: str | None
    queueing_delay: float | None
    sojourn_time: float | None
    delay_ratio: float | None  # of the mean queueing delay, to that in the order of arrival


def expectation(basis: Basis) -> Callable[[SweepCell], Expected]:
    """By cell; a simulated order takes some seconds, and is compared with the order of arrival
    simulated: a formula for that may be further off than the two are apart. Its delay is that of
    the formula times what the pair says.
    """

    @cache
    def predicted(policy: str, limit: int | None, rate: float, method: str = "auto") -> Predicted:
        return predict_means(basis.model(policy, limit), rate, method)

    def expected(cell: SweepCell) -> Expected:
        plain = format_policy(first_come_form(parse_policy(cell.policy)))
        queue = cell.max_output_tokens, cell.rate
        own = predicted(cell.policy, *queue)
        like = own.method if own.method == "simulation" else "auto"
        first_come = predicted(plain, *queue, like)
        delay, sojourn, usual = own.queueing_delay, own.sojourn_time, first_come.queueing_delay
        ratio = None if delay is None or not usual else delay / usual
        formula = predicted(plain, *queue).queueing_delay
        if own.method == "simulation" and delay and sojourn and usual and formula:
            delay, sojourn = by_pair(delay, sojourn, usual, formula)
        return Expected(
            method=own.method, queueing_delay=delay, sojourn_time=sojourn, delay_ratio=ratio
        )

    return expected


def plan_as_object(plan: SweepPlan) -> dict[str, Any]:
    basis = basis_of(plan)
    cells, searches = list(basis.cells()), planned_searches(basis)
    expected = expectation(basis) if plan.has_orders else None
    return {
        "plan": msgspec.to_builtins(plan),
        "law": str(basis.law),
        "law_is_a_guess": plan.latency is None,
        "cells": [
            msgspec.to_builtins(cell)
            | {"seconds": cell.seconds}
            | ({} if expected is None else {"predicted": msgspec.to_builtins(expected(cell))})
            for cell in cells
        ],
        "searches": [msgspec.to_builtins(search) for search in searches],
        "seconds": total_seconds(plan, cells, searches),
    }


def print_plan(plan: SweepPlan, to: Console) -> None:
    basis, has_cells = basis_of(plan), bool(plan.loads or plan.request_rates)
    guessed = (
        " (a guess: the sweep calibrates its own, which changes rates and lengths)"
        if plan.latency is None
        else ""
    )
    say(to, f"law: {basis.law.rounded()}{guessed}")
    if searches := planned_searches(basis):
        takes = (
            f", about {duration(sum(search.seconds for search in searches))}" if has_cells else ""
        )
        say(
            to,
            f"{plan.searches_in_words}; each of about "
            f"{counted(probes_expected(plan.tolerance), 'probe')}{takes}",
        )
    cells, unstable = _print_cells(basis, to) if has_cells else ([], False)
    for line in _remarks(plan, cells, searches, unstable=unstable):
        say(to, line)


def _print_cells(basis: Basis, to: Console) -> tuple[list[SweepCell], bool]:
    """A cell as soon as it is known, where the table fits the width; and whether interruptions
    leave one without a steady state.
    """
    plan, cells, rows, unstable = basis.plan, [], [], False
    expected = expectation(basis) if plan.has_orders else None
    name: Callable[[str], str] = str
    columns = _columns(plan, name)
    if not _fits(columns, to.width):
        name = short_form
        columns = _columns(plan, name)
    at_once = _fits(columns, to.width)
    if at_once:
        to.print(Table(columns, []))
    for cell in basis.cells():
        cells.append(cell)
        row = _row(plan, len(cells), cell, name)
        if expected is not None:
            theory = expected(cell)
            delay, ratio = theory.queueing_delay, theory.delay_ratio
            row += [
                "-" if delay is None else short_number(delay * 1e3, 4),
                "-" if ratio is None else f"{ratio:.2f}",
            ]
            unstable |= delay is None and (cell.load or 1.0) < 1
        rows.append(row)
        if at_once:
            to.print(Table(columns, rows[-1:], headed=False))
    if not at_once:
        to.print(Table(columns, rows, keys=2))
    return cells, unstable


def _remarks(
    plan: SweepPlan, cells: list[SweepCell], searches: list[PlannedSearch], *, unstable: bool
) -> Iterator[str]:
    if any(cell.cut for cell in cells):
        yield "*: shorter than asked (--cell-limit)"
    if any(not _runs(plan, cell) for cell in cells):
        yield "not run: at load >= 1 there is no steady state (--allow-unstable runs it)"
    if plan.has_orders and cells:
        yield (
            "delay: predicted mean queueing delay; of fcfs: over that in the order of arrival; "
            f"predictor {plan.predictor}"
        )
    if unstable:
        yield "-: no steady state: interruptions cost more than the load leaves"
    parts = [counted(len(cells), "cell")] if cells else []
    parts += [counted(len(searches), "search", "searches")] if searches else []
    takes = f"about {duration(total_seconds(plan, cells, searches))} in all"
    yield (
        f"{' and '.join(parts)}, {takes}, without the engine's start, its calibration and "
        "repeated cells"
    )


def _fits(columns: Sequence[Column], width: int) -> bool:
    height = max(column.heading.count("\n") for column in columns) + 1
    return len(Table(columns, []).lines(width)) == height


def _columns(plan: SweepPlan, name: Callable[[str], str]) -> list[Column]:
    """Wide enough for every cell, so that rows can be printed one by one."""
    widths = {
        "cell": 4,
        "policy": max(len(name(policy)) for policy in plan.ordered_policies),
        "load": 5,
        "rate (1/s)": 10,
    }
    widths |= {"limit": 5} if _limited(plan) else {}
    widths |= {"requests": 8, "time": 10, "": 1}
    if plan.has_orders:
        widths |= {"delay\n(ms)": 6, "of\nfcfs": 5}
    return [
        Column(heading=name, left=name == "policy", least=width) for name, width in widths.items()
    ]


def _limited(plan: SweepPlan) -> bool:
    return plan.max_output_tokens != (None,)


def _row(plan: SweepPlan, number: int, cell: SweepCell, name: Callable[[str], str]) -> list[str]:
    row = [str(number), name(cell.policy), f"{cell.load:.3f}", short_number(cell.rate)]
    if _limited(plan):
        row.append("none" if cell.max_output_tokens is None else str(cell.max_output_tokens))
    if _runs(plan, cell):
        return [*row, str(cell.count), duration(cell.seconds), "*" * cell.cut]
    return [*row, "-", "NOT RUN", ""]


def _runs(plan: SweepPlan, cell: SweepCell) -> bool:
    return cell.load < 1 or plan.allow_unstable


def total_seconds(plan: SweepPlan, cells: list[SweepCell], searches: list[PlannedSearch]) -> float:
    """Sending, short calibrations, and what goes between."""
    run = [cell for cell in cells if _runs(plan, cell)]
    return (
        sum(cell.seconds + plan.bracket + OVERHEAD for cell in run)
        + sum(search.seconds for search in searches)
        + plan.bracket
    )
