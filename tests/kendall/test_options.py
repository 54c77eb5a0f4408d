"""An option is described once, by the field that it sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
import typer
import typer.testing

from kendall.options import flag_of, option, option_of, with_options, within
from kendall.policies.durations import Duration
from kendall.policies.text import SpecError

RUNNER = typer.testing.CliRunner()


@dataclass(frozen=True, kw_only=True)
class Inner:
    limit: int | None = option("Second", "Limit (0: none).", "--inner-limit", default=3, none=0)


@dataclass(frozen=True, kw_only=True)
class Outer:
    placed: Inner = within("Third", Inner)


@dataclass(frozen=True, kw_only=True)
class Example:
    kind: Literal["plain", "fancy"] = option("Second", "Kind.", default="plain")
    mood: Literal["calm", "wild"] | None = option("Second", "Mood; none by default.")
    names: tuple[str, ...] = option("First", "Names; repeatable.", default=())
    wait: float = option("First", "Wait.", default=1.0, parser=Duration())
    inner: Inner = field(default_factory=Inner)
    own: int = 7  # no option sets it


def run(*arguments: str) -> tuple[Example, bool]:
    app, found = typer.Typer(), []

    @app.command()
    @with_options(("First", "Second"))
    def command(example: Example, *, loud: bool = False) -> None:
        found.append((example, loud))

    outcome = RUNNER.invoke(app, arguments, catch_exceptions=True)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return found[0]


def test_without_arguments_a_command_has_the_defaults_of_the_class() -> None:
    assert run() == (Example(), False)


def test_a_choice_that_may_be_left_out_is_checked_where_it_is_given() -> None:
    assert run("--mood", "wild")[0].mood == "wild"
    with pytest.raises(SpecError, match="got --mood 'sad'; expected calm or wild"):
        run("--mood", "sad")


def test_a_flag_sets_its_field() -> None:
    given = ["--kind", "fancy", "--names", "a", "--names", "b", "--wait", "100ms"]
    assert run(*given, "--inner-limit", "5", "--loud") == (
        Example(kind="fancy", names=("a", "b"), wait=0.1, inner=Inner(limit=5)),
        True,
    )


def test_the_value_that_stands_for_none() -> None:
    assert run("--inner-limit", "0")[0].inner.limit is None


def test_the_options_of_a_class_within_another_are_in_the_panel_of_its_place() -> None:
    app = typer.Typer()

    @app.command()
    @with_options()
    def command(outer: Outer) -> None:
        assert outer == Outer(placed=Inner(limit=4))

    assert RUNNER.invoke(app, ["--inner-limit", "4"]).exit_code == 0
    parameters = typer.main.get_command(app).params
    panels = {each.opts[0]: getattr(each, "rich_help_panel", None) for each in parameters}
    assert panels["--inner-limit"] == "Third"


def test_a_value_that_is_none_of_the_literals() -> None:
    with pytest.raises(SpecError) as error:
        run("--kind", "fanzy")
    assert str(error.value) == (
        "got --kind 'fanzy'; expected plain or fancy; did you mean 'fancy'?"
    )


def test_flags_are_named_by_their_fields() -> None:
    fields = Example.__dataclass_fields__
    assert {name: flag_of(each) for name, each in fields.items()} == {
        "kind": "--kind",
        "mood": "--mood",
        "names": "--names",
        "wait": "--wait",
        "inner": "--inner",
        "own": "--own",
    }
    assert flag_of(Inner.__dataclass_fields__["limit"]) == "--inner-limit"
    assert option_of(fields["own"]) is None
