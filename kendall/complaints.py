"""Errors that typer finds in the arguments, in this project's words: got, expected, what to do, in
one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, get_args

from kendall.policies.text import CommaList, suggest

KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def one_line(error: Any, command: Any, arguments: Sequence[str]) -> str:
    """The message, with the value that was got and where it came from. `error` is typer's;
    `command` the one that was run.
    """
    message = " ".join(error.format_message().split())
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if parameter is None or context is None:
        return _usage(error, message, command, arguments)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
    if type(error).__name__ == "MissingParameter":
        return f"got no {name}; expected {_wanted(parameter)}"
    source = context.get_parameter_source(parameter.name)
    match source.name if source is not None else "COMMANDLINE":
        case "ENVIRONMENT":
            return (
                f"got {name} {os.environ.get(parameter.envvar)!r:.80} from {parameter.envvar}; "
                f"expected {_expected(parameter, message)}"
            )
        case "DEFAULT_MAP":
            file = context.params.get("config")
            return (
                f"got {name} {context.default_map[parameter.name]!r:.80} from {file}; expected "
                f"{_expected(parameter, message)}"
            )
        case "DEFAULT":
            expected = f"{_expected(parameter, message)}; {name} {parameter.metavar} sets another"
            return f"got the default {name} {parameter.default}; expected {expected}"
        case _:
            value = _value(parameter, arguments)
            return (
                message
                if value is None
                else f"got {name} {value:.80}; expected {_expected(parameter, message)}"
            )


def _usage(error: Any, message: str, command: Any, arguments: Sequence[str]) -> str:
    """The message of an error that no single parameter's value causes; as it is where typer says
    something new.
    """
    match type(error).__name__:
        case "NoSuchOption":
            return _unknown_option(error.option_name, command)
        case "BadOptionUsage":
            return _bad_usage(error, message, command)
        case _ if extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
            if (second := _second_value(extra[1].split()[0], command, arguments)) is not None:
                return second
            names = [
                parameter.metavar
                for parameter in command.params
                if parameter.param_type_name == "argument"
            ]
            expected = "options only" if not names else f"one {names[0]} and options"
            return (
                f"got {extra[1]!r:.80} too many; expected {expected}; `kendall {command.name} "
                "--help` lists the options"
            )
        case _:
            return message


def _second_value(extra: str, command: Any, arguments: Sequence[str]) -> str | None:
    """The message where the superfluous word stands behind an option's value, as in `--policy
    single dynamic`; None elsewhere.
    """
    known = {
        opt: parameter
        for parameter in command.params
        if not getattr(parameter, "is_flag", True)
        for opt in parameter.opts
    }
    for flag, value, behind in zip(arguments, arguments[1:], arguments[2:], strict=False):
        if behind == extra and flag in known and not value.startswith("--"):
            parameter = known[flag]
            if parameter.multiple:
                form = f"{flag} {value} {parameter.opts[0]} {extra}"
            elif isinstance(parameter.type_descriptor.parameter_info.parser, CommaList):
                form = f"{flag} {value},{extra}"
            else:
                form = f"{flag} {value} alone"
            return f"got {extra!r:.80} behind {flag} {value:.80}; expected {form:.160}"
    return None


def _bad_usage(error: Any, message: str, command: Any) -> str:
    parameter = next(
        (parameter for parameter in command.params if error.option_name in parameter.opts), None
    )
    if parameter is None:
        return message
    if "not take a value" in message:
        return f"got {error.option_name} with a value; expected {error.option_name} alone"
    return f"got {error.option_name} without a value; expected {_wanted(parameter)}"


def _unknown_option(flag: str, command: Any) -> str:
    """`"got --rate; ... did you mean --request-rate?"`: an option that ends so, else one that is
    spelled nearly so.
    """
    if command.name == "serve":
        from kendall.server.engines.vllm.options import argument_names

        argument = flag.lstrip("-").replace("-", "_")
        if argument in argument_names():
            return f"got {flag}, an engine argument of vLLM; expected --engine-arg {argument}=VALUE"
    known = [opt for parameter in command.params for opt in parameter.opts if opt.startswith("--")]
    ends = [
        [opt for opt in parameter.opts if opt.endswith(f"-{flag.lstrip('-')}")]
        for parameter in command.params
    ]
    tails = [opts[0] for opts in ends if opts]  # of an option with two names the first
    near = (
        f"; did you mean {tails[0]}?"
        if len(tails) == 1
        else suggest(flag, tuple(known)).replace("'", "")
    )
    return (
        f"got {flag}; expected an option of `kendall {command.name}`{near or ';'} "
        f"`kendall {command.name} --help` lists them"
    )


def _wanted(parameter: Any) -> str:
    about = " ".join((parameter.help or "").replace("\\[", "[").split()).rstrip(".")
    if parameter.param_type_name == "argument":
        return about if about[1:2].isupper() else about[:1].lower() + about[1:]  # URL stays
    return f"{parameter.opts[0]} {parameter.metavar}: {about[:1].lower()}{about[1:]}"


def _value(parameter: Any, arguments: Sequence[str]) -> str | None:
    """The last value given behind the flag."""
    found = None
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in parameter.opts:
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def _expected(parameter: Any, message: str) -> str:
    """The part behind `expected` where our own parser has spoken, else the kind of number and
    its range.
    """
    _, ours, expected = message.partition("; expected ")
    if ours:
        return expected
    annotation = parameter.type_descriptor.annotation
    kind = KINDS.get(next(iter(get_args(annotation)), annotation))  # of each of a list
    bounds = parameter.type_descriptor.parameter_info
    least, most = bounds.min, bounds.max
    if kind is None:
        return f"another value ({message})"
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return (
        kind + ("" if least is None else f" >= {least}") + ("" if most is None else f" <= {most}")
    )
