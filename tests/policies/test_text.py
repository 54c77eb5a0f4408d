"""The text of a policy: one canonical form, and errors that say what was got, what was expected
and what to do.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import (
    POLICIES,
    Capped,
    Continuous,
    Dynamic,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    Single,
    SpecError,
    format_policy,
    parse_policy,
    policy_batch_size,
)
from kendall.policies.text import counted, format_number, parse_number, short_number
from tests.policies.states import policies, waits

CANONICAL = [
    ("single", Single()),
    ("dynamic", Dynamic()),
    ("fixed:batch_size=8", Fixed(batch_size=8)),
    ("fixed:batch_size=8,max_wait=0.5", Fixed(batch_size=8, max_wait=0.5)),
    ("fixed:batch_size=8,max_wait=2", Fixed(batch_size=8, max_wait=2.0)),
    ("capped:max_batch_size=8", Capped(max_batch_size=8)),
    ("elastic", Elastic()),
    ("elastic:max_batch_size=8", Elastic(max_batch_size=8)),
    ("continuous", Continuous()),
    ("continuous:max_batch_size=32", Continuous(max_batch_size=32)),
    ("continuous:route=prefix", Continuous(route="prefix")),
    (
        "continuous:max_batch_size=8,order=spjf,aging=0.5,route=prefix",
        Continuous(max_batch_size=8, route="prefix", order="spjf", aging=0.5),
    ),
    (
        "fixed:batch_size=8,max_wait=2,route=prefix",
        Fixed(batch_size=8, max_wait=2.0, route="prefix"),
    ),
]


@pytest.mark.parametrize(("text", "policy"), CANONICAL)
def test_canonical_text(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert format_policy(policy) == text


@given(policies)
def test_what_is_written_reads_back_as_the_same_policy(policy: Policy) -> None:
    text = format_policy(policy)
    assert parse_policy(text) == policy
    assert type(parse_policy(text)) is type(policy)
    assert format_policy(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("fixed:max_wait=0.5,batch_size=8", "fixed:batch_size=8,max_wait=0.5"),
        ("fixed:batch_size=8,max_wait=inf", "fixed:batch_size=8"),
        ("fixed:batch_size=8,max_wait=infinity", "fixed:batch_size=8"),
        ("fixed:batch_size=8,max_wait=0.50", "fixed:batch_size=8,max_wait=0.5"),
        ("fixed:batch_size=8,max_wait=5e-1", "fixed:batch_size=8,max_wait=0.5"),
        ("fixed:batch_size=8.0", "fixed:batch_size=8"),
        ("single:order=fcfs", "single"),
        ("continuous:order=fcfs,max_batch_size=4", "continuous:max_batch_size=4"),
        (" capped: max_batch_size = 8 ", "capped:max_batch_size=8"),
    ],
)
def test_other_ways_to_write_it_have_the_same_canonical_text(written: str, canonical: str) -> None:
    """Keys in a fixed order, defaults left out, numbers as short as they can be."""
    assert format_policy(parse_policy(written)) == canonical


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize("text", ["capped:max_batch_size={}", "fixed:batch_size={}"])
def test_a_batch_size_may_reach_its_borders(text: str, size: int) -> None:
    assert policy_batch_size(parse_policy(text.format(size))) == size


@pytest.mark.parametrize(
    ("text", "got", "expected"),
    [
        ("", "got an empty policy", "expected one of single, dynamic"),
        (":batch_size=8", "got ':batch_size=8'", "expected name[:key=value,...]"),
        ("fixed:", "got 'fixed:'", "expected key=value after the colon"),
        ("fixed:batch_size", "got 'batch_size'", "expected key=value"),
        ("fixed:batch_size=", "got batch_size without a value", "expected batch_size=VALUE"),
        ("fixed:=8", "got '=8'", "expected key=value"),
        ("fixed:batch_size=8,", "got ''", "expected key=value"),
        ("fixed:batch_size=8,batch_size=9", "got batch_size twice", "expected it once"),
        ("single,order=fb", "got policy 'single,order=fb'", "expected a colon: single:order=fb"),
        ("fxed:batch_size=8", "got policy 'fxed'", "did you mean 'fixed'?"),
        ("continous", "got policy 'continous'", "did you mean 'continuous'?"),
        ("Dynamic", "got policy 'Dynamic'", "did you mean 'dynamic'?"),
        (
            "zzz",
            "got policy 'zzz'",
            "expected one of single, dynamic, fixed, capped, elastic, continuous",
        ),
        (
            "capped:batch_size=8",
            "got key 'batch_size' for policy capped",
            "did you mean 'max_batch_size'?",
        ),
        (
            "fixed:batch_size=8,maxwait=1",
            "got key 'maxwait' for policy fixed",
            "did you mean 'max_wait'?",
        ),
        ("single:batch_size=8", "got key 'batch_size' for policy single", "expected order"),
        ("fixed", "got 'fixed'", "expected batch_size too, for example fixed:batch_size=8"),
        (
            "fixed:max_wait=1",
            "got 'fixed:max_wait=1'",
            "expected batch_size too, for example fixed:batch_size=8",
        ),
        ("capped:16", "got '16'", "expected key=value, for example capped:max_batch_size=16"),
        (
            "capped",
            "got 'capped'",
            "expected max_batch_size too, for example capped:max_batch_size=8",
        ),
        ("capped:max_batch_size=eight", "got max_batch_size=eight", "expected a whole number"),
        ("capped:max_batch_size=nan", "got max_batch_size=nan", "expected a whole number"),
        (
            "capped:max_batch_size=0",
            "got max_batch_size=0",
            "expected a whole number from 1 to 1,000,000",
        ),
        (
            "capped:max_batch_size=-1",
            "got max_batch_size=-1",
            "expected a whole number from 1 to 1,000,000",
        ),
        (
            "capped:max_batch_size=2.5",
            "got max_batch_size=2.5",
            "expected a whole number from 1 to 1,000,000",
        ),
        (
            "capped:max_batch_size=1e30",
            "got max_batch_size=1e30",
            "expected a whole number from 1 to 1,000,000",
        ),
        (
            "capped:max_batch_size=1000001",
            "got max_batch_size=1000001",
            "expected a whole number from 1 to 1,000,000",
        ),
        (
            "elastic:max_batch_size=9223372036854775808",
            "got max_batch_size=9223372036854775808",
            "from 1 to 1,000,000",
        ),
        (
            "capped:max_batch_size=inf",
            "got max_batch_size=inf",
            "expected a whole number from 1 to 1,000,000",
        ),
        ("fixed:batch_size=8,max_wait=0", "got max_wait=0", "expected seconds > 0"),
        ("fixed:batch_size=8,max_wait=-1", "got max_wait=-1", "expected seconds > 0"),
        ("single:order=fcsf", "got order='fcsf' for policy single", "did you mean 'fcfs'?"),
        ("single:order=lifo", "got order='lifo' for policy single", "expected one of fcfs"),
        ("single:order=spjf,aging=1e306", "got aging=1e+306", "expected at most 1e+100"),
        ("single:order=trail,c=1e308", "got c=1e+308", "expected at most 1e+100"),
        ("single:order=vtc,output_weight=1e308", "got output_weight=1e+308", "at most 1e+100"),
    ],
)
def test_a_wrong_text_is_told_what_to_do(text: str, got: str, expected: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_policy(text)
    message = str(error.value)
    assert got in message
    assert expected in message
    assert "\n" not in message


@given(
    st.text()
    | st.builds("{}:{}".format, st.sampled_from(list(POLICIES)), st.text("abd_=,.-8 ", max_size=20))
)
def test_any_text_is_a_policy_or_a_spec_error(text: str) -> None:
    """Never another exception, and what is accepted has a canonical text."""
    try:
        policy = parse_policy(text)
    except SpecError:
        return
    assert parse_policy(format_policy(policy)) == policy


@given(st.floats(allow_nan=False) | waits)
def test_a_number_reads_back_exactly(value: float) -> None:
    assert parse_number("key", format_number(value), "text") == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (0.1 + 0.2, "0.30000000000000004"),
        (3.0, "3"),
        (-2.0, "-2"),
        (1e15, "1000000000000000"),
        (1e16, "1e+16"),
        (1e300, "1e+300"),
        (math.inf, "inf"),
        (5, "5"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        (Single(), 1),
        (Dynamic(), None),
        (Fixed(batch_size=3), 3),
        (Capped(max_batch_size=4), 4),
        (Elastic(), None),
        (Elastic(max_batch_size=5), 5),
        (Continuous(), None),
        (Continuous(max_batch_size=6), 6),
    ],
    ids=lambda value: format_policy(value) if hasattr(value, "decide") else str(value),
)
def test_the_batch_that_a_policy_asks_for(policy: Policy, size: int | None) -> None:
    assert policy_batch_size(policy) == size


def test_what_is_counted_is_singular_for_one() -> None:
    assert [counted(n, "request") for n in (0, 1, 2, 1234)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "1,234 requests",
    ]
    assert counted(2, "batch", "batches") == "2 batches"


@pytest.mark.parametrize("given", [None, 8, Single()])
def test_what_is_no_text_is_refused_with_what_was_got(given: Any) -> None:
    with pytest.raises(
        SpecError,
        match=re.escape(
            f"got policy={given!r}; expected a text, for example 'capped:max_batch_size=8'"
        ),
    ):
        parse_policy(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "got an empty policy; expected one of single, "), (" ", "got an empty policy; ")],
)
def test_an_empty_text_is_called_so(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}"):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("capped:max_batch_size=", ", for example capped:max_batch_size=8"),
        ("capped:max_batch_size= ", ", for example capped:max_batch_size=8"),
        ("continuous:max_batch_size=4,order=", ", for example continuous:order=spjf"),
        ("fixed:batch_size=8,max_wait=", ""),
        ("single:order=spjf,aging=", ""),
    ],
)
def test_a_key_without_a_value_is_named_with_an_example_that_has_it(
    text: str, example: str
) -> None:
    key = text.strip().rstrip("=").rpartition(":")[2].rpartition(",")[2]
    with pytest.raises(SpecError) as raised:
        parse_policy(text)
    said = f"got {key} without a value in {text!r}; expected {key}=VALUE"
    assert str(raised.value).replace(repr(text.strip()), repr(text)) == said + example


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (11_163.4, 4, "11,160"),
        (9_999.4, 4, "9999"),
        (9_999.6, 4, "10,000"),
        (-11_163.4, 4, "-11,160"),
        (123_456.7, 5, "123,460"),
        (12_345.6, 5, "12346"),
        (0.0123456, 4, "0.01235"),
        (1e-5, 4, "1e-05"),
        (0.0, 4, "0"),
        (9e14, 4, "900,000,000,000,000"),
        (1e15, 4, "1e+15"),
        (math.inf, 4, "inf"),
        (math.nan, 4, "-"),
    ],
)
def test_a_number_for_people_has_few_digits_and_no_exponent_where_it_is_large(
    value: float, digits: int, text: str
) -> None:
    assert short_number(value, digits) == text


def test_a_queue_is_open_unless_it_says_otherwise() -> None:
    assert not QueueState((), ()).closing
