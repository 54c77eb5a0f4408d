"""Options that came from the environment where they do not fit: a variable is set for every
command, a flag for this one.

KENDALL_MAX_CLIPPED_FRACTION is meant for `serve`, and `advise` has the option too, for one
objective. A flag that does not fit is an error; a variable that does not fit was meant for another
command, and is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from kendall.policies.text import SpecError


def from_environment(ctx: typer.Context, name: str) -> bool:
    """Whether this parameter's value was taken from its environment variable."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"


def by_flag(ctx: typer.Context, name: str) -> bool:
    """Whether it stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether anything gives it: a flag, the environment, a file."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@contextmanager
def defaults_named(ctx: typer.Context, **values: str) -> Iterator[None]:
    """In an error raised inside, a value that was not given is called the default: `got the
    default --objective delay`.
    """
    try:
        yield
    except SpecError as error:
        got, semicolon, expected = str(error).partition("; ")
        for name, value in values.items():
            source, flag = ctx.get_parameter_source(name), "--" + name.replace("_", "-")
            if source is not None and source.name == "DEFAULT":
                got = re.sub(
                    rf"({flag} |\b{name}=){re.escape(value)}\b", f"the default {flag} {value}", got
                )
        raise SpecError(got + semicolon + expected) from None


def fitting(ctx: typer.Context, values: Mapping[str, Any], fits: Collection[str]) -> dict[str, Any]:
    """The values, without those from the environment that do not fit here."""
    return {
        name: value
        for name, value in values.items()
        if name in fits or not from_environment(ctx, name)
    }


def flags_first(
    ctx: typer.Context, values: Mapping[str, Any], rivals: Collection[str]
) -> dict[str, Any]:
    """The values; of the `rivals`, which exclude one another, those from the environment give
    way (None) to a flag.
    """
    if not any(by_flag(ctx, name) for name in rivals):
        return dict(values)
    return {
        name: None if name in rivals and from_environment(ctx, name) else value
        for name, value in values.items()
    }
