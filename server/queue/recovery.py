"""What was in service when an engine was lost: kept for the next one, and handed to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.engines.base import Capabilities
from server.queue.continuing import interrupted
from server.queue.poison import CODE, FAILED, Trials
from server.queue.proof import Proof
from server.queue.sequence import SequenceState
from server.queue.service import Fail, Lease, Service


class Recovery:
    """`ask` is called when everything kept has been handed over, `fail` for a sequence that cannot
    continue.
    """

    def __init__(
        self,
        service: Service,
        lease: Lease,
        ask: Callable[[], None],
        fail: Fail,
        suspect_after: int,
    ) -> None:
        self._service, self._lease = service, lease
        self._ask, self._fail = ask, fail
        self.down = False  # a lost engine is being started again
        self.trials = Trials(
            suspect_after, self.restart, self._over, lambda proved: Proof(service.engine, proved)
        )

    @property
    def blocks(self) -> bool:
        """Whether the queue waits for a new engine, a trial or a proof."""
        return self.down or self.trials.pauses_dispatch

    def interrupt(self, message: str, most: int) -> SequenceState | None:
        """The engine is gone and another one is being started: what waits keeps its place, what is
        in service stays there for `resume`.

        Three kinds fail now: what cannot be continued exactly, what saw more than `most` engines
        die, and the request that is certain to have killed it, which is returned.
        """
        self._lease.revoke()
        self.down = True
        sequences = self._service.sequences()
        guilty = self.trials.died(sequences)
        for sequence in sequences:  # all, before one that fails ends the batch of others
            if sequence.stream is not None:
                sequence.interruptions += 1
        for sequence in sequences:
            if sequence is guilty:
                self._fail(sequence, "failed", CODE, f"{FAILED} ({message})")
            elif sequence.stream is not None and (
                reason := interrupted(sequence, most)
            ):  # the others had not gone back to the engine yet
                self._fail(sequence, "failed", "engine_unavailable", f"{reason} ({message})")
        return guilty

    def resume(self, capabilities: Capabilities) -> None:
        """Another engine serves: first what was in service continues, batch by batch under its own
        policy, then the queue.
        """
        self._service.capabilities, self.down = capabilities, False
        self.trials.resume(
            [
                sequence
                for batch in self._service.batches()
                for sequence in batch.sequences
                if sequence.id in batch.open
            ]
        )

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Back into the engine, batch by batch; a part of a batch joins the part that is there."""
        ids = {sequence.id for sequence in sequences}
        for batch in self._service.batches():
            if part := [sequence for sequence in batch.sequences if sequence.id in ids]:
                served = any(sequence.stream is not None for sequence in batch.sequences)
                self._service.start(batch, part, joining=served)

    def renew(self, sequence: SequenceState) -> None:
        """Out of the engine, and in again behind what it has; its place in its batch stays."""
        assert sequence.batch is not None
        self._service.engine.cancel([sequence.id])
        self._service.start(sequence.batch, [sequence], joining=True)

    def settled(self, sequence: SequenceState) -> None:
        """A completed answer can show that the engine is sound."""
        if self.trials.explained and sequence.outcome == "completed":
            self.trials.completed(sequence)

    def _over(self) -> None:
        self._service.ledger.notify()
        self._ask()
