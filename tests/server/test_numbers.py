"""A queue of numbers that holds no Python floats."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kendall.server.live.number_queue import NumberQueue


def test_it_is_a_deque_whatever_is_appended_and_taken() -> None:
    rng = np.random.default_rng(1)
    numbers, expected = NumberQueue(), deque[float]()
    for _ in range(20_000):
        if expected and rng.random() < 0.45:
            assert numbers[0] == expected.popleft()
            numbers.drop(1)
        else:
            expected.append(float(rng.random()))
            numbers.append(expected[-1])
        assert len(numbers) == len(expected)
    assert [numbers[place] for place in range(len(numbers))] == list(expected)


def test_what_was_taken_is_not_kept() -> None:
    numbers = NumberQueue()
    for value in range(100_000):
        numbers.append(float(value))
        if len(numbers) > 10:
            numbers.drop(1)
    assert len(numbers._values) < 5_000


def test_ascending_ones_are_found_and_dropped_by_their_size() -> None:
    numbers = NumberQueue()
    for value in (1.0, 2.0, 2.0, 3.0):
        numbers.append(value)
    numbers.drop(1)
    assert [numbers.below(least) for least in (0.0, 2.0, 2.5, 4.0)] == [0, 0, 2, 3]
    numbers.drop_below(3.0)
    assert (len(numbers), numbers[0]) == (1, 3.0)
    with pytest.raises(IndexError):
        numbers[1]
