"""Questions to the predicting process."""

from __future__ import annotations

from typing import Any

from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.producer import WindowProducer
from kendall.server.live.assessment_request import AssessmentRequest
from tests.queueing.estimation_runs import LAW


def question_at(now: float, policy: str, *, slots: int = 16, **given: Any) -> AssessmentRequest:
    """Of an empty window."""
    producer = WindowProducer()
    producer.begin_epoch(0, 0.0)
    usual: dict[str, Any] = {"window": 1e9, "shape": LAW, "longest": 64}
    return AssessmentRequest(
        delta=producer.take(),
        at=now,
        setting=Setting(policy=policy),
        engine=EngineBounds(max_num_seqs=slots),
        **(usual | given),
    )
