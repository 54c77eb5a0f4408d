"""A prediction made by hand: what a test does not name is that of a stable queue of half load."""

from __future__ import annotations

from typing import Any

from kendall.queueing.result import Prediction


def prediction_of(**about: Any) -> Prediction:
    given = {
        "policy": "x",
        "effective_max_batch_size": 8,
        "model": "m",
        "method": "exact",
        "stable": True,
        "load": 0.5,
        "utilisation": None,
    }
    return Prediction(**(given | about))
