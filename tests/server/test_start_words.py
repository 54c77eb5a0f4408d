"""What the log and the last line say of a start of vLLM, without one."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from kendall.server.engines.base import InvalidPromptError
from kendall.server.engines.vllm.engine import start_message, warn_without_template
from kendall.server.engines.vllm.process import ERROR_FILE

LONG = "size mismatch for layer 0, " * 300


def test_a_short_reason_is_said_whole() -> None:
    assert start_message(ValueError("no such dtype\nmore")) == ("vLLM did not start: no such dtype")


def test_a_line_of_300_characters_is_said_whole() -> None:
    line = "vLLM did not start: " + "x" * 280
    assert start_message(ValueError("x" * 280)) == line
    assert start_message(ValueError("x" * 281)).endswith("... (the rest is in the log above)")


def test_a_long_reason_is_cut_and_the_log_has_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    said = start_message(ValueError(LONG))
    assert said.startswith("vLLM did not start: size mismatch for layer 0, ")
    assert said.endswith("... (the rest is in the log above)")
    assert len(said) == 300
    assert LONG in caplog.text


def test_a_long_reason_of_the_engines_process_is_cut_which_has_written_it_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "error").write_text(f"{LONG}\nmore")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    said = start_message(RuntimeError("Engine core initialization failed. See root cause above."))
    assert said.endswith("... (the rest is in the log above)")
    assert (len(said), caplog.text) == (300, "")


class Core:
    """As much of it as a chat needs."""

    def __init__(self, fault: Exception | None) -> None:
        self.fault = fault

    async def tokens_of_chat(self, messages: Any, arguments: Any) -> list[int]:
        del messages, arguments
        if self.fault is not None:
            raise self.fault
        return [1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (InvalidPromptError("got a chat, for which the model has no chat template"), True),
        (ValueError("this template wants two messages"), False),
        (None, False),
    ],
)
def test_a_model_without_a_chat_template_is_a_warning_at_the_start(
    fault: Exception | None, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core: Any = Core(fault)
    with caplog.at_level(logging.DEBUG, "kendall.engine"):
        assert asyncio.run(warn_without_template(core)) is said
    words = (
        "the model has no chat template: chat calls will be refused; put chat_template.jinja into "
        "its folder and start again, or call /v1/completions"
    )
    unclear = "a first chat could not be rendered: this template wants two messages"
    expected = [] if fault is None else [words if said else unclear]
    assert [each.getMessage() for each in caplog.records if each.name == "kendall.engine"] == (
        expected
    )
