"""Errors of predictions: what another process gets of them."""

from __future__ import annotations

import math
import pickle

import pytest

from kendall.queueing.errors import (
    InfiniteMeanError,
    LargeBatchesError,
    NoStableChoiceError,
    NotConvergedError,
    OutOfReachError,
    PredictionError,
    UnstableQueueError,
)

ERRORS = [
    UnstableQueueError(1.25),
    NotConvergedError("the chain", 0.5),
    OutOfReachError("the table", "ask for less"),
    LargeBatchesError(512, 0.25, None, 512),
    InfiniteMeanError(),
    NoStableChoiceError("batch sizes 1 to 8", "none is stable", 1.5),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_in_another_process_as_it_was(error: PredictionError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))
    assert str(error)
    assert vars(error)
    assert all(
        not isinstance(value, float) or not math.isnan(value) for value in vars(error).values()
    )
