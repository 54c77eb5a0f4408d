"""The batches whose energy is metered: an observer's view of when a server was busy, and with
what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kendall.server.queue.sequence import Batch, SequenceState
from kendall.server.telemetry.energy.meter import EnergyMeter

FEW = 64  # requests of a stretch that are kept without a look at whether they are over


@dataclass(slots=True)
class _BatchStretch:
    """A server is busy: what it served, and the requests that may be in service still."""

    begun: float
    served: int = 0
    tokens: int = 0
    interrupted: bool = False  # a restart draws joules too
    live: list[SequenceState] = field(default_factory=list)
    most: int = FEW

    def add(self, sequences: list[SequenceState]) -> None:
        """A `continuous` server may never be idle: count the sequences that have an outcome and
        drop them.
        """
        self.served += len(sequences)
        self.live += sequences
        if len(self.live) > self.most:
            self.count(over=[sequence for sequence in self.live if sequence.outcome is not None])
            self.live = [sequence for sequence in self.live if sequence.outcome is None]
            self.most = FEW + 2 * len(self.live)

    def count(self, over: list[SequenceState]) -> None:
        """Their tokens are known."""
        self.tokens += sum(sequence.stop_detector.output_tokens for sequence in over)
        self.interrupted = self.interrupted or any(sequence.interruptions for sequence in over)


class MeteredBatches:
    """Tells the meter of every busy stretch of a server: a batch, or for `continuous` all that
    was served in it.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._going: dict[int, _BatchStretch] = {}

    def on_dispatch(self, batch: Batch) -> None:
        """Begins a stretch, or joins it."""
        going = self._going.setdefault(batch.server_id, _BatchStretch(batch.dispatched_at))
        going.add(batch.sequences)

    def on_idle(self, server_id: int, at: float) -> None:
        """Ends it."""
        stretch = self._going.pop(server_id, None)
        if stretch is not None:
            stretch.count(over=stretch.live)
            if not stretch.interrupted:
                self._meter.on_batch(stretch.served, stretch.begun, at, stretch.tokens)
