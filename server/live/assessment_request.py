"""What the predicting process is asked, and the window that it is asked about: light to import, so
that the gateway itself loads no numerics it does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.producer import WindowDelta, WindowProducer
from kendall.queueing.latency.law import LatencyModel
from kendall.server.calibration.host import LiveHost

ENOUGH = 50  # requests of the epoch that met their end, before anything is predicted from them


@dataclass(frozen=True, eq=False, kw_only=True)
class AssessmentRequest:
    """Of one assessment: what was seen, the calibrated law, and what bounds the queue."""

    delta: WindowDelta  # since the question before
    at: float
    window: float  # seconds
    shape: LatencyModel
    setting: Setting  # in force
    engine: EngineBounds
    longest: int  # answer that the engine can give, tokens
    pads: bool = True  # the engine can pad a batch
    owns_queue: bool = False  # the policy is the engine's
    routing: str = "central"  # to several servers
    patience: float | None = None  # seconds
    bounds: AutopilotBounds | None = None  # of the autopilot; None: those it has
    # largest batch and longest answer that the law was measured on
    reach: tuple[int, int] | None = None
    waiting: int = 0
    saving: bool = False  # the estimates are to be saved
    anew: bool = False  # the process that had seen the begin of this epoch is gone
    waiting_before: int = 0  # requests that waited when the epoch began
    in_service: tuple[tuple[float, int], ...] = ()  # dispatched at, output tokens so far
    ended: tuple[
        tuple[float, int], ...
    ] = ()  # the same of those whose own end has come, in padded batches that go on
    # the autopilot decides with this one; who only asks for advice changes nothing
    decides: bool = True


class LiveWindow:
    """What has happened in this epoch since the last assessment. The process keeps the rest."""

    def __init__(self, gateway: LiveHost) -> None:
        self._gateway = gateway
        self.producer = WindowProducer()
        self.producer.begin_epoch(0, gateway.now())
        self._waiting_before = 0
        self._anew = False

    def begin_epoch(self, epoch: int, *, carry_lengths: bool = True) -> None:
        """Nothing is averaged across epochs."""
        self.producer.begin_epoch(epoch, self._gateway.now(), carry_lengths=carry_lengths)
        self._anew = False
        self._waiting_before = self._gateway.batcher.queue_length

    def begin_anew(self) -> None:
        """The process that had the window is gone, and the lengths with it."""
        epoch, now = self._gateway.batcher.epoch, self._gateway.now()
        self.producer.begin_epoch(epoch, now, carry_lengths=False)
        self._anew = True

    def question(self, bounds: AutopilotBounds, *, saving: bool) -> AssessmentRequest | None:
        """With what is new, which is in no later question; None without a latency law."""
        gateway = self._gateway
        if gateway.latency.law is None:
            return None
        batcher = gateway.batcher
        capabilities = batcher.capabilities
        return AssessmentRequest(
            delta=self.producer.take(),
            at=gateway.now(),
            window=gateway.settings.prediction_window,
            shape=gateway.latency.law,
            setting=Setting(
                policy=batcher.policy_text,
                max_output_tokens=gateway.limits.max_output_tokens,
                servers=max(1, batcher.servers),
            ),
            engine=capabilities.bounds(gateway.limits.reserved_tokens),
            longest=capabilities.max_model_len,
            pads=capabilities.pads,
            owns_queue=capabilities.owns_queue,
            routing=capabilities.routing,
            patience=gateway.limits.patience,
            bounds=bounds,
            reach=_reach(gateway),
            waiting=batcher.queue_length,
            saving=saving,
            anew=self._anew,
            waiting_before=self._waiting_before,
            in_service=self._in_service(ended=False),
            ended=self._in_service(ended=True),
        )

    def _in_service(self, *, ended: bool) -> tuple[tuple[float, int], ...]:
        """Dispatch and tokens so far of those whose own end has come, or has not; also of those
        that were taken out of service, whose answers are known to be longer than that.
        """
        return tuple(
            (sequence.at.dispatched, sequence.stop_detector.output_tokens)
            for sequence in self._gateway.batcher.unanswered_sequences()
            if sequence.at.dispatched is not None
            and (sequence.stop_detector.finish_reason is not None) == ended
        )


def _reach(gateway: LiveHost) -> tuple[int, int] | None:
    """Of the calibration in force, where it is one."""
    profile = gateway.latency.profile
    cells = [] if profile is None else [cell["lengths"] for cell in profile.cells]
    return (max(map(len, cells)), max(map(max, cells))) if cells else None
