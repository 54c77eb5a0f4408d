"""How `kendall COMMAND --help` shows a command: texts as they are written, kinds of value, which
variable sets an option.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kendall.policies.durations import Duration

KINDS = {bool: "", int: "INTEGER", float: "NUMBER", str: "TEXT"}
VARIABLES = (
    "Environment variables also set options: KENDALL_<OPTION> for every command that has the "
    "option, KENDALL_<COMMAND>_<OPTION> for one command, for example KENDALL_SEED=3. A flag "
    "overrides them."
)
STATUSES = (
    "Exit status: 0 success; 1 failure, for example because no server answers; 2 an invalid "
    "argument or a key that a server refuses; 3 a check failed or no stable choice exists."
)
DURATIONS = (
    "A DURATION is a number of seconds, or a number with a unit: 2s, 100ms, 500us, 1.5min "
    "(or 1.5m), 1h, 7d."
)


def show_as_written(
    command: Any, shared_variables: bool = True, examples: Sequence[str] = ()
) -> None:
    """Make typer show a command's texts literally: it takes `[engine-args]` for markup and drops
    it.
    """
    durations = any(_takes_duration(parameter) for parameter in command.params)
    notes = [
        *(f"Example: {example}" for example in examples),
        *((DURATIONS,) if durations else ()),
        *((VARIABLES,) if shared_variables else ()),
        STATUSES,
    ]
    # without the line ends of the source: the terminal has its own width
    paragraphs = [paragraph.splitlines() for paragraph in (command.help or "").split("\n\n")]
    command.help = _literal(
        "\n\n".join(
            "\n".join(lines) if any(line[:1].isspace() for line in lines) else " ".join(lines)
            for lines in paragraphs
        )
    )
    command.epilog = _literal("\n\n".join(notes))
    command.context_settings = {**command.context_settings, "help_option_names": ["-h", "--help"]}
    command.format_help = partial(_format_help, command.format_help, command)
    for parameter in command.params:
        parameter.help = _literal(" ".join([parameter.help or "", *_other_ways(parameter)]))
        parameter.show_envvar = False
        # shown beside the kind they would take a third of the width; an error names them
        parameter.min = parameter.max = None
        if parameter.metavar is None:
            parameter.metavar = (
                kind_of(parameter)
                if parameter.param_type_name == "option"
                else parameter.name.upper().removesuffix("S")
            )


def _other_ways(parameter: Any) -> list[str]:
    """The other names and variables of an option, where the rule at the end of the help does not
    state them.
    """
    ways = []
    if parameter.param_type_name == "option" and len(parameter.opts) > 1:
        ways.append(f"Also {', '.join(parameter.opts[1:])}.")
    if parameter.secondary_opts and parameter.default is True:
        ways.append(f"{parameter.secondary_opts[0]} turns it off.")
    if parameter.show_envvar and parameter.envvar:
        ways.append(f"Variable: {parameter.envvar}.")
    return ways


def _format_help(as_before: Any, command: Any, ctx: Any, formatter: Any) -> None:
    """With one name an option: several would be cut in the column of names. Nothing is parsed
    after this.
    """
    command.get_help_option(ctx).metavar = ""
    for parameter in command.params:
        parameter.opts, parameter.secondary_opts = parameter.opts[:1], []
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda **_: ""  # its name says it
        elif isinstance(parameter.default, float) or parameter.default is True:
            default = "on"
            if parameter.default is not True:
                unit = "s" if _takes_duration(parameter) else ""
                default = f"{parameter.default:g}{unit}"
            parameter._get_default_string = lambda text=default, **_: text
    as_before(ctx, formatter)


def kind_of(parameter: Any) -> str:
    """The kind of an option's value in one word; empty for a switch."""
    if _takes_duration(parameter):
        return "DURATION"
    if parameter.multiple:
        return "TEXT"
    return KINDS.get(parameter.type_descriptor.annotation, "PATH")


def _takes_duration(parameter: Any) -> bool:
    return isinstance(parameter.type_descriptor.parameter_info.parser, Duration)


def _literal(text: str | None) -> str | None:
    from rich.markup import escape
    from typer.core import HAS_RICH

    return escape(text) if text and HAS_RICH else text
