"""A TOML file of options: keys as the flags are named, `-` or `_`, at the top level;
`[engine-args]` goes to vLLM.

Unknown keys and values of another type are errors: a setting that is silently not in force is worse
than none.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from kendall.options import JSON
from kendall.policies.durations import Duration
from kendall.policies.text import SpecError, suggest

ENGINE_ARGS = "engine-args"
NOT_IN_A_FILE = frozenset({"help", "config", "show-config", "json", "engine-arg"})
ENGINE_TABLE = "kendall.engine-args"  # where the context keeps that table
SECRET_WORDS = frozenset({"key", "token", "password", "secret"})
_EXPECTED: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str,), "a path in quotes"),
}
_DURATION: tuple[tuple[type, ...], str] = (
    (int, float, str),
    "a number of seconds, or a duration in quotes such as '100ms'",
)


def take_file(ctx: typer.Context, config: Path | None) -> Path | None:
    """The callback of `--config`, eager: what the file says becomes the default of what follows.
    Raises SpecError.
    """
    if config is not None and not ctx.resilient_parsing:
        values, engine_args = read_options(config, options_of(ctx.command))
        ctx.default_map = values
        ctx.meta[ENGINE_TABLE] = engine_args
    return config


def options_of(command: Any) -> dict[str, Any]:
    """The parameters of a typer command by the key that stands for them in a file:
    `max-num-seqs`.
    """
    return {
        key_of(parameter): parameter
        for parameter in command.params
        if key_of(parameter) not in NOT_IN_A_FILE
    }


def key_of(parameter: Any) -> str:
    """As the flag is named, without dashes before it; an argument by its name."""
    flags = [flag for flag in parameter.opts if flag.startswith("--")]
    return str(flags[0].removeprefix("--") if flags else parameter.name).replace("_", "-")


def read_options(path: Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's values by parameter name, and its `[engine-args]`. Raises SpecError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"got --config {path}; expected a readable TOML file ({error})") from None
    values: dict[str, Any] = {}
    engine_args: dict[str, Any] = {}
    for written, value in table.items():
        key = written.replace("_", "-")
        if key == ENGINE_ARGS:
            engine_args = _engine_args(path, value)
        elif key in options and options[key].name in values:
            raise SpecError(f"got {key} twice in {path}, with - and with _; expected it once")
        elif key in options:
            values[options[key].name] = checked(
                f"{written} = {_shown(key, value)} in {path}", options[key], value
            )
        else:
            raise SpecError(_unknown(path, written, value, options))
    return values, engine_args


def checked(what: str, parameter: Any, value: Any) -> Any:
    """The value as the option takes it. Raises SpecError: it is of another type."""
    annotation = parameter.type_descriptor.annotation
    if parameter.multiple:
        items = value if isinstance(value, list) else [value]
        if all(type(item) is str for item in items):
            return items
        raise SpecError(f"got {what}; expected a list of texts in quotes")
    if parameter.metavar == JSON and isinstance(value, list):
        return json.dumps(value)
    types, expected = (
        _DURATION
        if isinstance(parameter.type_descriptor.parameter_info.parser, Duration)
        else _EXPECTED[annotation]
    )
    if type(value) not in types:
        raise SpecError(f"got {what}; expected {expected}")
    return value


def _engine_args(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(
            f"got {ENGINE_ARGS} = {value!r} in {path}; expected a table: [{ENGINE_ARGS}]"
        )
    return {key.replace("-", "_"): each for key, each in value.items()}


def _unknown(path: Path, written: str, value: Any, options: Mapping[str, Any]) -> str:
    if isinstance(value, dict):
        return (
            f"got table [{written}] in {path}; expected options of `kendall serve` at the top "
            f"level, and no table but [{ENGINE_ARGS}]"
        )
    if written.replace("_", "-") == "engine-arg":
        return f"got {written} in {path}; expected the table [{ENGINE_ARGS}]"
    return (
        f"got key {written!r} in {path}; expected an option of `kendall "
        f"serve`{suggest(written.replace('_', '-'), options)}"
    )


def _shown(key: str, value: Any) -> str:
    return "(not shown)" if is_secret(key, value) else f"{value!r:.60}"


def is_secret(key: str, value: Any) -> bool:
    """Whether a value must not be printed: keys, tokens, passwords; not the name of the file
    that holds them, nor a switch.
    """
    words = {*key.replace("_", "-").lower().split("-")}
    return (
        isinstance(value, str | list)
        and bool(value)
        and "file" not in words
        and bool(words & SECRET_WORDS)
    )
