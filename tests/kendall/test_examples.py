"""Every command's help has two examples, which its parser takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import kendall.cli
from kendall.examples import EXAMPLES

COMMANDS = list(kendall.cli.COMMANDS)


def test_each_command_has_two() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert {len(examples) for examples in EXAMPLES.values()} == {2}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_parser_takes_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = kendall.cli.command_of(name)
    for example in EXAMPLES[name]:
        program, called, *arguments = shlex.split(example)
        assert (program, called) == ("kendall", name)
        with command.make_context(name, arguments) as context:
            assert context.params


def test_the_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kendall.cli.main(["summary", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for example in EXAMPLES["summary"]:
        assert f"Example: {example}" in shown


@pytest.mark.parametrize("example", [*EXAMPLES["predict"], *EXAMPLES["policies"]])
def test_those_that_need_nothing_print_an_answer(
    example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(shlex.split(example)[1:])
    assert stop.value.code == 0
    assert capsys.readouterr().out
