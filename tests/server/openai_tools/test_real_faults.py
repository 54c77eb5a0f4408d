"""An engine that dies within calls to tools and the newer endpoints, and a parser of reasoning."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.eventually import eventually_here
from tests.server.openai_tools.tooled import END, USER, WEATHER, Served, serving
from tests.server.processes import engine_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}  # no reasoning before the call


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Every chat passes the parser."""
    reasoning = ("--reasoning-parser", "qwen3")
    restarts = ("--max-restarts", "10", "--policy", "continuous:max_batch_size=4")
    with serving(tmp_path_factory.mktemp("faults"), *reasoning, *restarts) as it:
        yield it


def kill_engine(served: Served) -> None:
    """The one that serves, or that is coming up."""

    def pid() -> int:
        with contextlib.suppress(LookupError):
            return engine_process(served.process.pid)
        return 0

    os.kill(eventually_here(pid), signal.SIGKILL)


def kill_at(served: Served, count: int, stream: Any) -> None:
    """In the middle of it."""
    for place, _ in enumerate(stream):
        if place == count:
            kill_engine(served)


def test_a_stream_goes_on_behind_a_killed_engine(served: Served) -> None:
    with served.openai() as client:
        stream = client.responses.create(
            model="tiny",
            input="x",
            max_output_tokens=600,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        events: list[Any] = []
        for event in stream:
            events.append(event)
            if len(events) == 20:
                kill_engine(served)
        assert events[-1].response.usage.output_tokens == 600


def test_trap_2_tools_work_after_a_restart(served: Served) -> None:
    kill_engine(served)
    with served.openai() as client:
        called = client.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=[WEATHER],  # type: ignore[list-item]
            tool_choice="required",
            logit_bias=END,  # type: ignore[arg-type]
            max_tokens=300,
            extra_body=AT_ONCE,
        )
        assert called.choices[0].message.tool_calls


def test_trap_1_a_forced_call_ends_with_an_error_where_its_engine_is_killed(served: Served) -> None:
    """Its grammar is a state of the engine that was lost."""
    with served.openai() as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=USER,
            tools=[WEATHER],  # type: ignore[list-item]
            tool_choice="required",
            stream=True,
            max_tokens=1500,
            extra_body=AT_ONCE,
        )
        with pytest.raises(openai.APIError, match="structured"):
            kill_at(served, 8, stream)
    eventually_here(lambda: served.ask("GET", "/admin/state")["unanswered"] == 0)


def test_trap_4_reasoning_is_apart_from_the_answer_and_before_its_form(served: Served) -> None:
    """The random model never ends its reasoning: all of its text is that."""
    with served.openai() as client:
        plain = client.chat.completions.create(model="tiny", messages=USER, max_tokens=8)
        message: Any = plain.choices[0].message
        assert message.reasoning
        assert not message.content
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
        formed = client.chat.completions.create(
            model="tiny",
            messages=USER,
            max_tokens=8,
            response_format=schema,  # type: ignore[arg-type]
        )
        thought: Any = formed.choices[0].message
        assert thought.reasoning != "null", "the form begins behind the reasoning"
    assert "Traceback" not in served.log.partition("was ended by SIGKILL")[0]
