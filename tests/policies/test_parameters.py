"""What a text or a caller may give as a parameter, and which requests fit together on a server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from kendall.policies import Capped, Fixed, Policy, QueueState, Request, Waiting, first_ids
from kendall.policies.arguments import positive, real_number, short_repr, whole_number
from kendall.policies.core import UNBOUNDED, Running, Server, sequences_of
from kendall.policies.durations import Duration
from kendall.policies.errors import SpecError
from kendall.policies.parameters import format_value, parameters_of, size_field


@dataclass(frozen=True)
class Outside(Policy):
    """Of every kind."""

    name: ClassVar[str] = "outside"
    count: int = 3
    share: float = math.inf
    exact: bool = False
    label: str = "none"
    bound: int | None = None


PARAMETERS = parameters_of(Outside)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "7", 7),
        ("count", "7.0", 7),
        ("count", "-1e15", -(10**15)),
        ("count", "1e15", 10**15),
        ("share", "0.5", 0.5),
        ("share", "300ms", 0.3),
        ("share", "-2", -2.0),
        ("share", "inf", math.inf),
        ("exact", "true", True),
        ("exact", "false", False),
        ("label", "none", "none"),
        ("bound", "none", None),
        ("bound", "4", 4),
    ],
)
def test_a_parameter_is_read_by_its_kind_and_written_as_it_is_read(
    key: str, text: str, value: object
) -> None:
    found = PARAMETERS[key].parse("outside", text)
    assert (found, type(found)) == (value, type(value))
    assert PARAMETERS[key].parse("outside", format_value(found)) == value


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("count", "1.5", "expected a whole number"),
        ("count", "x", "expected a whole number"),
        ("count", "inf", "expected a whole number"),
        (
            "count",
            "1000000000000001",
            "expected a whole number from -1,000,000,000,000,000 to 1,000,000,000,000,000",
        ),
        (
            "count",
            "-1000000000000001",
            "expected a whole number from -1,000,000,000,000,000 to 1,000,000,000,000,000",
        ),
        ("share", "x", "expected a number, or a duration with its unit, such as 300ms"),
        ("exact", "yes", "expected true or false"),
        ("count", "none", "expected a whole number"),
    ],
)
def test_what_is_not_of_its_kind_is_refused(key: str, text: str, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        PARAMETERS[key].parse("outside", text)
    assert str(error.value).startswith(f"got {key}=")
    assert str(error.value).endswith(expected)
    assert " for policy outside;" in str(error.value)


def test_a_parameter_is_described_for_the_page() -> None:
    assert [each.to_dict()["default"] for each in PARAMETERS.values()] == [
        3,
        None,
        False,
        "none",
        None,
    ]
    assert PARAMETERS["share"].to_dict() == {
        "name": "share",
        "kind": "number",
        "required": False,
        "default": None,
        "size": False,
        "choices": [],
    }
    size = parameters_of(Fixed)["batch_size"].to_dict()
    assert (size["required"], size["default"], size["size"], size["kind"]) == (
        True,
        None,
        True,
        "integer",
    )
    assert [size_field(cls) for cls in (Fixed, Capped, Outside)] == [
        "batch_size",
        "max_batch_size",
        None,
    ]


def test_a_field_that_no_text_can_give_is_refused() -> None:
    @dataclass(frozen=True)
    class Listed(Outside):
        several: list[int] = field(default_factory=list)

    @dataclass(frozen=True)
    class Either(Outside):
        one: int | str = 1

    @dataclass(frozen=True)
    class Made(Outside):
        one: int = field(default_factory=int)

    for cls, words in (
        (Listed, "got the field several: list[int] of Listed; expected int, float, bool or str"),
        (Either, "got the field one: int | str of Either; expected int, float, bool or str"),
        (Made, "got a default_factory for the field one of Made; expected a value"),
    ):
        with pytest.raises(SpecError) as error:
            parameters_of(cls)
        assert str(error.value).startswith(words)


# arguments


@pytest.mark.parametrize("value", [1, 5, np.int64(5), 2**128 - 1])
def test_a_whole_number_of_any_type_is_an_int(value: int) -> None:
    found = whole_number("n", value)
    assert (found, type(found)) == (value, int)


@pytest.mark.parametrize(
    ("value", "least", "expected"),
    [
        (0, 1, "got n=0; expected a whole number, at least 1"),
        (-1, 0, "got n=-1; expected a whole number, at least 0"),
        (1.0, 1, "got n=1.0; expected a whole number, at least 1"),
        (True, 1, "got n=True; expected a whole number, at least 1"),
        (2**128, 1, f"got n={2**128}; expected a whole number of at most 39 digits"),
    ],
)
def test_what_is_no_whole_number_is_refused(value: Any, least: int, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        whole_number("n", value, least)
    assert str(error.value) == expected
    assert whole_number("n", least, least) == least


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "got x=0; expected seconds > 0"),
        (-1.0, "got x=-1.0; expected seconds > 0"),
        (math.inf, "got x=inf; expected seconds > 0, a finite number"),
        (math.nan, "got x=nan; expected seconds > 0"),
        ("1", "got x='1'; expected seconds > 0"),
        (True, "got x=True; expected seconds > 0"),
    ],
)
def test_what_is_not_above_zero_is_refused(value: Any, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        positive("x", value, "seconds")
    assert str(error.value) == expected


def test_a_real_number_is_a_float_infinite_where_it_is_too_large() -> None:
    assert [real_number("x", value) for value in (3, np.float32(0.5), 10**400, -(10**400))] == [
        3.0,
        0.5,
        math.inf,
        -math.inf,
    ]
    assert (positive("x", 2, "seconds"), type(positive("x", 2, "seconds"))) == (2.0, float)
    with pytest.raises(SpecError, match="got x=None; expected a number"):
        real_number("x", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 78, "'" + "a" * 78 + "'"),
        ("a" * 79, "'" + "a" * 79 + "..."),
        (10**5000, "a number of thousands of digits"),
    ],
    ids=["short", "long", "number"],
)
def test_what_is_long_is_cut_in_messages(value: object, text: str) -> None:
    assert short_repr(value) == text


def test_an_option_of_a_duration_is_called_so_in_the_help() -> None:
    assert Duration().__name__ == "duration"


# fitting


def request(name: str, prompt: int = 10, limit: int = 5, **more: Any) -> Request:
    return Request(id=name, arrived_at=0.0, prompt_tokens=prompt, max_output_tokens=limit, **more)


THREE = [Waiting(request(name)) for name in "abc"]


@pytest.mark.parametrize(
    ("waiting", "size", "server", "ids"),
    [
        (THREE, 9, Server(0), "abc"),
        (THREE, 2, Server(0), "ab"),
        (THREE, 0, Server(0), ""),
        (THREE, 9, Server(0, max_batch_size=2), "ab"),
        (THREE, 1, Server(0, max_batch_size=2), "a"),
        # prompts of ten tokens, of one that was interrupted with what it has made
        (THREE, 9, Server(0, max_prompt_tokens=20), "ab"),
        (THREE, 9, Server(0, max_prompt_tokens=19), "a"),
        (THREE, 9, Server(0, max_prompt_tokens=9), "a"),
        ([Waiting(request("a"), 4), *THREE[1:]], 9, Server(0, max_prompt_tokens=33), "ab"),
        ([Waiting(request("a"), 4), *THREE[1:]], 9, Server(0, max_prompt_tokens=34), "abc"),
        # contexts of fifteen, or of ten and what is reserved
        (THREE, 9, Server(0, max_context_tokens=30), "ab"),
        (THREE, 9, Server(0, max_context_tokens=29), "a"),
        (THREE, 9, Server(0, max_context_tokens=14), "a"),
        (
            [Waiting(request(name, reserved_tokens=2)) for name in "abc"],
            9,
            Server(0, max_context_tokens=24),
            "ab",
        ),
        (
            [Waiting(request(name, reserved_tokens=7)) for name in "abc"],
            9,
            Server(0, max_context_tokens=30),
            "ab",
        ),
        # two sequences each count twice
        ([Waiting(request(name, sequences=2)) for name in "abc"], 5, Server(0), "ab"),
        ([Waiting(request(name, sequences=2)) for name in "abc"], 1, Server(0), "a"),
        (
            [Waiting(request(name, sequences=2)) for name in "abc"],
            9,
            Server(0, max_context_tokens=40),
            "ab",
        ),
        # behind one in service: there may be room for none
        (THREE, 9, Server(0, [Running(request("x"), 0.0)], max_context_tokens=45), "ab"),
        (THREE, 9, Server(0, [Running(request("x"), 0.0)], max_context_tokens=29), ""),
        (THREE, 9, Server(0, [Running(request("x"), 0.0)], 9, 99, 45, counted=(1, 30)), "a"),
        (
            [Waiting(request("a", sequences=3))],
            2,
            Server(0, [Running(request("x"), 0.0)]),
            "",
        ),
    ],
)
def test_the_first_that_fit_together_are_taken(
    waiting: list[Waiting], size: int, server: Server, ids: str
) -> None:
    assert first_ids(QueueState(waiting, [server]), size, server) == tuple(ids)


def test_sequences_and_contexts_in_service_are_counted_or_told() -> None:
    running = [Running(request("x", sequences=2), 0.0), Running(request("y"), 0.0)]
    assert (Server(0, running).sequences, Server(0, running).context_tokens) == (3, 20 + 15)
    told = Server(0, running, counted=(7, 99))
    assert (told.sequences, told.context_tokens) == (7, 99)
    assert sequences_of(running) == 3
    assert request("z", limit=3, reserved_tokens=UNBOUNDED).context_tokens == 13
