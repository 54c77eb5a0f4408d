"""`kendall serve --show-config`: every setting in force, where it comes from, as TOML that can
be fed back, or as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kendall.options import JSON
from kendall.server.operations.configuration.file import (
    ENGINE_ARGS,
    ENGINE_TABLE,
    is_secret,
    options_of,
)

HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Shown:
    """One setting."""

    key: str
    value: Any  # of TOML's types; None: not set
    source: str
    engine: bool = False  # of the table [engine-args]

    @property
    def secret(self) -> bool:
        """Whether its value stays here."""
        return is_secret(self.key, self.value)


def effective(
    ctx: typer.Context, engine_args: Mapping[str, Any], settled: Mapping[str, Any]
) -> list[Shown]:
    """What is in force; `settled` holds what was derived or made canonical, by parameter name."""
    found = []
    for key, parameter in options_of(ctx.command).items():
        value = settled.get(parameter.name, ctx.params[parameter.name])
        if parameter.metavar == JSON and value is not None:
            value = json.loads(value)
        found.append(Shown(key, _plain(value), source_of(ctx, parameter)))
    in_file = ctx.meta.get(ENGINE_TABLE, {})
    given = next(
        source_of(ctx, parameter)
        for parameter in ctx.command.params
        if parameter.name == "engine_arg"
    )
    for key, value in engine_args.items():
        source = str(ctx.params["config"]) if in_file.get(key) == value else given
        found.append(Shown(key, value, source, engine=True))
    return found


def source_of(ctx: typer.Context, parameter: Any) -> str:
    """Which of the four it was, by name."""
    source = ctx.get_parameter_source(parameter.name)
    match source.name if source is not None else "DEFAULT":
        case "COMMANDLINE" if parameter.param_type_name == "argument":
            return "argument"
        case "COMMANDLINE":
            # --no-wait-estimates
            said_no = parameter.secondary_opts and ctx.params[parameter.name] is False
            return str((parameter.secondary_opts if said_no else parameter.opts)[0])
        case "ENVIRONMENT":
            return str(parameter.envvar)
        case "DEFAULT_MAP":
            return str(ctx.params.get("config"))
        case _:
            return "default"


def as_toml(shown: Sequence[Shown]) -> str:
    """A file for `--config` that gives the same again, secrets apart."""
    lines = ["# kendall serve --config FILE: each setting with its source; secrets are left out"]
    lines += [_line(each) for each in shown if not each.engine]
    if any(each.engine for each in shown):
        lines += ["", f"[{ENGINE_ARGS}]", *(_line(each) for each in shown if each.engine)]
    return "\n".join(lines) + "\n"


def as_json(shown: Sequence[Shown]) -> str:
    """One object: key to value and source."""
    settings = {each.key: _entry(each) for each in shown if not each.engine}
    settings[ENGINE_ARGS] = {each.key: _entry(each) for each in shown if each.engine}
    return json.dumps(settings, default=str) + "\n"


def _entry(each: Shown) -> dict[str, Any]:
    value = HIDDEN if each.secret else each.value
    if isinstance(value, float) and not math.isfinite(value):
        value = str(value)  # which JSON has no number for
    return {"value": value, "source": each.source}


def _line(each: Shown) -> str:
    if each.secret:
        return f"# {each.key} = {HIDDEN}  # {each.source}"
    if each.value is None:
        return f"# {each.key} is not set"
    return f"{each.key} = {_toml(each.value)}  # {each.source}"


def _toml(value: Any) -> str:
    match value:
        case dict():
            return (
                "{"
                + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items())
                + "}"
            )
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case _:
            return str(value)  # integers, floats (inf and nan too) and dates are written alike


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
