"""Flags in the form that `vllm bench serve` has them, where typer has none of its own.

`--save-result` stands alone or before a file; `--goodput` and `--metadata` take several values in a row.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

ALONE = {"--save-result": "."}  # what the flag means without a value
VLLMS = {"--ready-check-timeout-sec": "--ready-check-timeout"}  # other names of the same
SEVERAL = frozenset({"--goodput", "--metadata"})


def option(flag: str, about: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with its twin in the environment."""
    twin = "KENDALL_" + flag.removeprefix("--").replace("-", "_").upper()
    return typer.Option(flag, help=about, envvar=twin, rich_help_panel=panel, **settings)


def spelled_out(arguments: list[str]) -> list[str]:
    """The same arguments with one value behind every flag that takes values.

    >>> spelled_out(["--save-result", "--goodput", "ttft:9", "e2el:50"])
    ['--save-result', '.', '--goodput', 'ttft:9', '--goodput', 'e2el:50']
    """
    found: list[str] = []
    several: str | None = None
    arguments = [_renamed(argument) for argument in arguments]
    for index, argument in enumerate(arguments):
        value_follows = index + 1 < len(arguments) and not arguments[index + 1].startswith("-")
        if argument.startswith("-"):
            several = argument if argument in SEVERAL else None
        elif several and found[-1] != several:
            found.append(several)
        found.append(argument)
        if argument in ALONE and not value_follows:
            found.append(ALONE[argument])
    return found


def _renamed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return VLLMS.get(name, name) + equals + value


class LoadCommand(typer.core.TyperCommand):
    """A command whose arguments may be in vLLM's form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Spell them out, then as ever."""
        return super().parse_args(ctx, spelled_out(args))
