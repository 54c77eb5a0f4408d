"""A reader follows a call to its admission through few files, and comes back into few of them."""

from __future__ import annotations

import asyncio

import pytest

from tests.way_of_a_call import CALLS, way_of


@pytest.mark.parametrize("path", CALLS)
def test_a_call_reaches_admission_through_few_files(path: str) -> None:
    way = asyncio.run(way_of(path))
    assert way.over
    assert len(way.stays) <= 25
    assert way.returns <= 4
