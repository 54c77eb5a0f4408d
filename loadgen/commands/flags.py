"""Flags in the form that `vllm bench serve` has them, where typer has none of its own.

`--save-result` stands alone or before a file; `--goodput` and `--metadata` take several values in a
row. Options that take a list with commas take its values in a row, too, where the next argument can
be nothing else: `--loads 0.3 0.6`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import typer
import typer.core

from kendall.policies.durations import seconds_or_nan

Accepts = Callable[[str], object]  # true: the argument is a further value


def named_results(arguments: list[str]) -> list[str]:
    """The same arguments, where `--save-result` without a file names the current folder.

    >>> named_results(["--save-result", "--json"])
    ['--save-result', '.', '--json']
    """
    found: list[str] = []
    for argument, following in pairwise([*arguments, "-"]):
        found.append(argument)
        if argument == "--save-result" and following.startswith("-"):
            found.append(".")
    return found


def in_a_row(
    arguments: list[str],
    lists: Mapping[str, Accepts],
    repeatable: Mapping[str, Accepts] | None = None,
) -> list[str]:
    """The same arguments with the further values of a list joined by commas, and a repeatable flag
    repeated.

    Each flag says which arguments are further values of it; any other ends its list.

    >>> in_a_row(["--loads", "0.3", "0.6", "dynamic", "5"], {"--loads": are_numbers})
    ['--loads', '0.3,0.6', 'dynamic', '5']
    """
    found: list[str] = []
    flag, has_value = "", False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            flag, has_value = name, bool(equals)
            found.append(argument)
        elif has_value and flag in lists and lists[flag](argument):
            found[-1] = f"{found[-1].rstrip(',')},{argument.lstrip(',')}"
        elif has_value and repeatable and flag in repeatable and repeatable[flag](argument):
            found += [flag, argument]
        else:
            flag, has_value = ("" if has_value else flag), True
            found.append(argument)
    return found


def are_numbers(text: str) -> bool:
    return re.fullmatch(r"[\d.]+(e[+-]?\d+)?(,[\d.]+(e[+-]?\d+)?)*,?", text) is not None


def _are_limits(text: str) -> bool:
    return all(part == "none" or are_numbers(part) for part in text.rstrip(",").split(","))


def _are_metrics(text: str) -> bool:
    from kendall.loadgen.report.load_report import METRIC_NAMES  # noqa: PLC0415 - numerics, which `--help` need not wait for

    return set(text.rstrip(",").split(",")) <= set(METRIC_NAMES)


def _is_goodput(text: str) -> bool:
    pairs = [re.fullmatch(r"[a-z_]\w*(?::|<=?)(.*)", part) for part in text.rstrip(",").split(",")]
    return all(pair is not None and math.isfinite(seconds_or_nan(pair[1])) for pair in pairs)


class _Command(typer.core.TyperCommand):
    """Values of a list may follow one another."""

    lists: ClassVar[Mapping[str, Accepts]] = {
        "--metric-percentiles": are_numbers,
        "--percentile-metrics": _are_metrics,
    }
    repeatable: ClassVar[Mapping[str, Accepts]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """In the form that typer reads."""
        return super().parse_args(ctx, in_a_row(args, self.lists, self.repeatable))


class LoadCommand(_Command):
    """Any further argument is a value of these, as there are no arguments but options."""

    repeatable = {"--goodput": bool, "--metadata": bool}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """In the form that typer reads."""
        return super().parse_args(ctx, named_results(args))


class SummaryCommand(_Command):
    """Run files may follow the limits of --goodput."""

    repeatable = {"--goodput": _is_goodput}


def _are_orders(text: str) -> bool:
    """Names of orders, which no policy has, or further parameters of one."""
    from kendall.policies.orders import ORDERS  # noqa: PLC0415 - `--help` need not wait for it

    names = [part.partition(":")[0] for part in text.strip(",").split(",")]
    return all(name in ORDERS or "=" in name for name in names)


class SweepCommand(_Command):
    """Policies may follow any list."""

    lists = {
        "--orders": _are_orders,
        "--loads": are_numbers,
        "--request-rates": are_numbers,
        "--max-output-tokens": _are_limits,
    }
    repeatable = {
        # a policy has a colon before its first =
        "--slo": re.compile(r"[\w.]+(?:=|<=?)\S+").fullmatch
    }
