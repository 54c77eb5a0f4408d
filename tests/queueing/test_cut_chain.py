"""Where the chain of batch sizes is cut when there is no bound, and when doubling the cut is
given up.
"""

import math
from collections.abc import Callable

import pytest

from kendall.queueing.errors import LargeBatchesError
from kendall.queueing.models.batches.batch_chain import LOST, solve_cut


def _sizes_tried(share_lost: Callable[[int], float]) -> tuple[list[int], bool]:
    tried: list[int] = []

    def cut_at(size: int) -> tuple[None, float]:
        tried.append(size)
        return None, share_lost(size)

    try:
        solve_cut(None, lambda _size: False, cut_at)  # type: ignore[arg-type]
    except LargeBatchesError:
        return tried, False
    return tried, True


@pytest.mark.parametrize(
    ("share_lost", "last", "solved"),
    [
        (lambda _size: 0.0, 32, True),
        (lambda size: math.exp(-size / 40), 1024, True),  # geometric
        (lambda size: math.exp(-size / 45), 2048, True),
        (
            lambda size: math.exp(-size / 85),
            2048,
            False,
        ),  # tried to the end: exp(-24) misses it narrowly
        (lambda size: math.exp(-((size / 300) ** 2)), 2048, True),  # a Gaussian tail falls fourfold
        (lambda size: size**-1.6, 1024, False),  # a power of the size never does
        (lambda _size: 0.3, 64, False),
    ],
)
def test_the_cut_is_doubled_as_long_as_it_may_reach_the_tail(
    share_lost: Callable[[int], float], last: int, solved: bool
) -> None:
    tried, reached = _sizes_tried(share_lost)
    assert (tried[-1], reached) == (last, solved)
    assert tried == [32 * 2**each for each in range(len(tried))]
    assert not solved or share_lost(last) < LOST
