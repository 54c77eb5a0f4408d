"""The check of a model: a paired difference, its verdict and its words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kendall.queueing.measurement.check import Check, in_words, pooled


def check(off: float, half: float, n: int = 100, share: float | None = 0.005) -> Check:
    """Observed / model = 1 + off, with that half width, of a delay of 0.2 s."""
    observed = 0.2 * (1 + off)
    return Check(
        observed=observed,
        modelled=0.2,
        half_width=0.2 * half,
        requests=n,
        measured_services=None if share is None else observed / (1 + share),
    )


@pytest.mark.parametrize(
    ("off", "half", "verdict"),
    [
        (0.0999, 0.001, "agree"),  # within 10 %, however narrow the interval
        (0.1001, 0.001, "disagree"),
        (-0.0999, 0.001, "agree"),
        (-0.1001, 0.001, "disagree"),
        (0.3, 0.3001, "agree"),  # within the interval
        (0.3, 0.2999, "disagree"),
        (0.0, 0.4999, "agree"),
        (0.0, 0.5001, "too_few"),  # an interval that says nothing
        (0.6, 0.5001, "disagree"),  # what is beyond a wide interval too is told
        (0.0, math.inf, "too_few"),
    ],
)
def test_the_verdict_turns_at_its_tolerances(off: float, half: float, verdict: str) -> None:
    assert check(off, half).verdict == verdict


@pytest.mark.parametrize(
    ("off", "share", "said"),
    [
        (0.3, 0.0199, "the engine"),
        (0.3, 0.03, "the gateway: 3 % of the delay"),
        (-0.3, 0.03, "the engine"),  # what the gateway adds does not make a delay shorter
        (0.3, None, "the engine"),
    ],
)
def test_a_disagreement_is_named_after_the_gateway_or_the_engine(
    off: float, share: float | None, said: str
) -> None:
    (cause,) = check(off, 0.01, share=share).causes
    assert cause.startswith(said)


def test_what_fails_of_the_engine_is_the_cause() -> None:
    found = dataclasses.replace(check(0.3, 0.01), suspects=("the engine: its speed changed",))
    assert found.causes == ("the engine: its speed changed",)
    assert dataclasses.replace(found, observed=0.2).causes == ()


def test_of_overlapping_windows_the_verdict_changes_when_two_in_a_row_say_so() -> None:
    shown, before = [], None
    for off in (0.0, 0.3, 0.0, 0.3, 0.3, 0.0, 0.0, 0.3):
        before = check(off, 0.01).after(before)
        shown.append(before.verdict)
    assert shown == ["agree"] * 4 + ["disagree"] * 2 + ["agree"] * 2


def test_the_first_verdict_is_shown_at_once() -> None:
    assert check(0.3, 0.01).after(check(0.0, 0.9)).verdict == "disagree"


def test_what_agrees_has_no_cause() -> None:
    assert check(0.05, 0.01, share=0.05).causes == ()
    assert check(0.0, 1.0).causes == ()


def test_the_pool_counts_each_request_once_and_adds_the_variances() -> None:
    found = pooled([check(0.1, 0.03, n=300), check(-0.1, 0.04, n=100), check(1.0, math.inf)])
    assert found is not None
    assert found.requests == 400
    assert found.ratio == pytest.approx(1.05)
    assert found.relative_half_width == pytest.approx(math.hypot(300 * 0.03, 100 * 0.04) / 400)
    assert pooled([]) is None
    assert pooled([check(0.0, math.inf)]) is None


def test_the_words_have_signs_only_where_the_interval_has_both() -> None:
    assert in_words(check(0.029, 0.025)) == (
        "observed delays are 2.9 % above the model's (95 %: 0.4 to 5.4 %)"
    )
    assert in_words(check(-0.029, 0.025)) == (
        "observed delays are 2.9 % below the model's (95 %: 0.4 to 5.4 %)"
    )
    assert in_words(check(0.01, 0.025)) == (
        "observed delays are 1.0 % above the model's (95 %: -1.5 to +3.5 %)"
    )
    assert in_words(check(-0.0003, 0.015)) == (
        "observed delays are within 0.1 % of the model's (95 %: -1.5 to +1.5 %)"
    )


def test_what_is_not_known_is_null_in_json() -> None:
    known = check(0.08, 0.05).as_dict()
    assert known["ratio_low"] == pytest.approx(1.03)
    assert known["difference_high"] == pytest.approx(0.026)
    assert known["verdict"] == "agree"
    unknown = check(0.08, math.inf).as_dict()
    assert [key for key, value in unknown.items() if value is None] == [
        "difference_low",
        "difference_high",
        "ratio_low",
        "ratio_high",
    ]
