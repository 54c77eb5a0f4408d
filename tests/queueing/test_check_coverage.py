"""The check on windows of the gateway's batcher and the emulated engine, whatever arrives."""

from __future__ import annotations

import pytest

from tests.queueing.check_coverage import CAUSES, KINDS, found_of, named, tenths, windows

COVERED, NAMED = 0.92, 0.9


@pytest.mark.slow
def test_where_the_law_is_right_zero_is_covered_and_nobody_is_accused() -> None:
    every = list(windows(15, seed=3))
    assert {each.kind for each in every} == set(KINDS)
    found = [each for each in map(found_of, every) if each is not None]
    assert len(found) >= 13
    assert sum(each.covers for each in found) >= len(found) - 1
    assert not [each for each in found if each.verdict == "disagree"]


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.thinned(6)
def test_the_cause_is_named_where_something_is_wrong(cause: str) -> None:
    found = named(cause, range(1))
    assert [policy for policy, fails in found if cause not in fails] == []


@pytest.mark.slow
def test_four_hundred_windows_are_covered_the_narrow_ones_too() -> None:
    found = [each for each in map(found_of, windows(400, seed=1)) if each is not None]
    assert len(found) >= 360
    for part in (found, *tenths(found)):
        assert sum(each.covers for each in part) >= COVERED * len(part)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named_in_nine_of_ten_windows(cause: str) -> None:
    found = named(cause, range(10, 20))
    assert sum(cause in fails for _, fails in found) >= NAMED * len(found)
