"""A queue of numbers that holds no Python floats."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from server.live.numbers import Numbers


def test_it_is_a_deque_whatever_is_appended_and_taken() -> None:
    rng = np.random.default_rng(1)
    numbers, expected = Numbers(), deque[float]()
    for _ in range(20_000):
        if expected and rng.random() < 0.45:
            assert numbers.first() == expected.popleft()
            numbers.drop_first()
        else:
            expected.append(float(rng.random()))
            numbers.append(expected[-1])
        assert len(numbers) == len(expected)
    assert list(numbers) == list(expected)


def test_what_was_taken_is_not_kept() -> None:
    numbers = Numbers()
    for value in range(100_000):
        numbers.append(float(value))
        if len(numbers) > 10:
            numbers.drop_first()
    assert len(numbers._values) < 5_000


def test_nothing_is_taken_of_an_empty_one() -> None:
    numbers = Numbers()
    for wrong in (numbers.first, numbers.drop_first):
        with pytest.raises(IndexError):
            wrong()
