"""Queues and predictions made by hand."""

from __future__ import annotations

from typing import Any

from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction


def made_queue(*, law: Any, **about: Any) -> Queue:
    """From the fields of its parts, all by name."""
    return Queue.read(latency=law, **about)


def prediction_of(**about: Any) -> Prediction:
    """What is not named is that of a stable queue of half load."""
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
