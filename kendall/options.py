"""Options of commands, each described once: by the field of the settings that it sets.

A class of settings says of each field, by `option`, what its flag is called, what its help says and
which values it takes. A command that asks for the class as a parameter, under `with_options`, has
those flags; environment variables, TOML files, `--show-config` and the completion follow from them.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kendall.policies.text import one_of

JSON = "JSON"  # metavar of an option that takes a list as JSON text; in a file it is a list
RELOADED = {"reloaded": True}  # metadata of a field whose new value SIGHUP takes up
DERIVED = {"derived": True}  # of one that follows from others: nobody sets it
_Command = TypeVar("_Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Option:
    """The option of one field."""

    panel: str
    about: str
    flags: tuple[str, ...]  # none: as the field is named
    none: Any  # the value that stands for None
    rules: Mapping[str, Any]  # of typer: min, max, parser, metavar


def option(
    panel: str,
    about: str,
    *flags: str,
    default: Any = None,
    required: bool = False,
    reloaded: bool = False,
    none: Any = None,
    secret: bool = False,
    **rules: Any,
) -> Any:
    """A field of a dataclass that an option sets. Its type is what the settings have: a Literal is
    checked, several values become a tuple. `secret`: no representation of the settings shows it.
    """
    return dataclasses.field(
        default=dataclasses.MISSING if required else default,
        repr=not secret,
        metadata={"option": Option(panel, about, flags, none, rules), "reloaded": reloaded},
    )


def within(panel: str, kind: Any) -> Any:
    """A field of a dataclass that is a class of settings itself; the help has its options in this
    panel.
    """
    return dataclasses.field(default_factory=kind, metadata={"panel": panel})


def flag_option(panel: str, about: str, *flags: str, **rules: Any) -> Any:
    """An option of one command, for its parameter; no flags: as the parameter is named."""
    import typer

    return typer.Option(*flags, help=about, rich_help_panel=panel or None, **rules)


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """The option that sets a field, or None."""
    return field.metadata.get("option")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """`--max-num-seqs`: the first flag that sets a field."""
    described = option_of(field)
    flags = () if described is None else described.flags
    return flags[0].partition("/")[0] if flags else "--" + field.name.replace("_", "-")


def with_options(panels: Sequence[str] = ()) -> Callable[[_Command], _Command]:
    """The command with the options of every class of settings among its parameters in its place;
    its help has the panels in this order.
    """

    def decorated(command: _Command) -> _Command:
        hints = get_type_hints(command, include_extras=True)
        classes = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
        taken: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name in classes:
                taken += _parameters(classes[parameter.name])
            else:
                taken.append(parameter.replace(annotation=hints[parameter.name]))

        def run(**values: Any) -> None:
            made = {name: _made(kind, values) for name, kind in classes.items()}
            command(**made, **values)

        rank = {panel: place for place, panel in enumerate(panels)}
        taken.sort(key=lambda parameter: rank.get(_panel(parameter), -1))
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in taken]
        )
        run.__annotations__ = {each.name: each.annotation for each in taken}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run  # type: ignore[return-value]

    return decorated


def _parameters(kind: Any, panel: str | None = None) -> Iterator[inspect.Parameter]:
    """The parameters of a class; all in one panel of the help, or each in its own."""
    for field in dataclasses.fields(kind):
        hint = _hints(kind)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint, field.metadata.get("panel", panel))
        elif (described := option_of(field)) is not None:
            several = get_origin(hint) is tuple
            place = described.panel if panel is None else panel
            info = flag_option(place, described.about, *described.flags, **described.rules)
            yield inspect.Parameter(
                _name(field),
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field, several=several),
                annotation=Annotated[_typed(hint), info],
            )


def _default(field: dataclasses.Field[Any], *, several: bool) -> Any:
    if field.default is dataclasses.MISSING:
        return inspect.Parameter.empty
    return None if several else field.default


def _name(field: dataclasses.Field[Any]) -> str:
    """The name of a command's parameter: that of the flag, unless this is a keyword of Python."""
    name = flag_of(field).removeprefix("--").replace("-", "_")
    return field.name if keyword.iskeyword(name) else name


def _typed(hint: Any) -> Any:
    """The type of a command's parameter: str for a Literal, a list for a tuple."""
    if (choices := _choices(hint)) is not None:
        return str if choices is hint else str | None
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]] | types.NoneType  # type: ignore[misc]
    return hint


def _choices(hint: Any) -> Any:
    """The Literal that a hint is, or is beside None."""
    hints = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    return next((each for each in hints if get_origin(each) is Literal), None)


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """The settings of these values of parameters, which it takes out of them. Raises SpecError."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = _hints(kind)[field.name]
        described = option_of(field)
        if dataclasses.is_dataclass(hint):
            given[field.name] = _made(hint, values)
        elif described is not None:
            value = values.pop(_name(field))
            if (choices := _choices(hint)) is not None and value is not None:
                value = one_of(flag_of(field), value, choices)
            elif get_origin(hint) is tuple:
                value = tuple(value or ())
            given[field.name] = None if value == described.none else value
    return kind(**given)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _panel(parameter: inspect.Parameter) -> str:
    for each in getattr(parameter.annotation, "__metadata__", ()):
        return getattr(each, "rich_help_panel", None) or ""
    return ""
