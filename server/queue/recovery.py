"""What was in service when an engine was lost: kept for the next one, and handed to it.

Of several engines that each are one server of the queue (`server.supervision.replicas`) one can be
lost alone. What it had in service goes back to the head of the queue then and continues on
another, except for requests that may have killed it: they wait for its own return and are tried
there, while the queue goes on with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kendall.server.engines.base import Capabilities
from kendall.server.queue.continuing import interrupted
from kendall.server.queue.poison import CODE, FAILED, Trials
from kendall.server.queue.proof import Proof
from kendall.server.queue.sequence import SequenceState
from kendall.server.queue.service import Fail, Lease, Service

# losses of one server are numbered from a multiple of this on: a sequence may have seen those of
# several
LOSSES = 10**9


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
        self._suspect_after = suspect_after
        self.down = False  # a lost engine is being started again
        self._handling = False  # what one server had is being put back
        self.trials = Trials(
            suspect_after, self.restart, self._over, lambda proved: Proof(service.engine, proved)
        )
        self.servers: dict[int, ServerTrials] = {}  # of those that were lost alone
        # so many losses of this server were caused by requests that are refused now
        self.on_forgiven: Callable[[int, int], None] | None = None
        # one of several servers takes work again
        self.on_server_back: Callable[[], None] | None = None

    @property
    def blocks(self) -> bool:
        """Whether the queue waits for a new engine, a trial or a proof."""
        return self.down or self.trials.pauses_dispatch or self._handling

    @property
    def tries(self) -> bool:
        """Whether an engine has a trial or a proof to do."""
        return self.trials.pauses_dispatch or any(
            trials.pauses_dispatch for trials in self.servers.values()
        )

    def statistics(self) -> dict[str, Any]:
        """For `/admin/state`."""
        every = self._all()
        return {
            "on_trial": any(trials.suspect is not None for trials in every),
            "proving": any(trials.proving for trials in every),
            "convicted": sum(trials.convicted for trials in every),
        }

    def stop(self) -> None:
        """No trial goes on."""
        for trials in self._all():
            trials.stop()

    # the engine

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
        self._detach(sequences, guilty, message, most)
        return guilty

    def resume(self, capabilities: Capabilities) -> None:
        """Another engine serves: first what was in service continues, batch by batch under its own
        policy, then the queue.
        """
        self._service.capabilities, self.down = capabilities, False
        up = {slot.id for slot in self._service.slots if slot.up}
        self.trials.resume(self._kept(up))

    # one of several servers

    def interrupt_server(
        self, server_id: int, message: str, most: int, *, comes_back: bool
    ) -> SequenceState | None:
        """This server is gone and takes no work; what it had in service goes back to the head of
        the queue, except for suspects that it will try when it comes back. See `interrupt`.
        """
        self._lease.revoke()
        trials = self._trials_of(server_id)
        self._service.slots[server_id].up = False
        self._handling = True
        try:
            sequences = self._service.sequences(server_id)
            guilty = trials.died(sequences)
            continues = self._detach(sequences, guilty, message, most)
            if not comes_back:
                continues = self._kept({server_id})
            self._service.put_all_back(
                [
                    each
                    for each in continues
                    if each.outcome is None and not (comes_back and trials.suspected(each))
                ]
            )
        finally:
            self._handling = False
        self._ask()
        return guilty

    def resume_server(self, server_id: int) -> None:
        """It serves: first what it has to try, then its part of the queue."""
        self._trials_of(server_id).resume(self._kept({server_id}))

    def withdraw_server(self, server_id: int) -> None:
        """It gets nothing new, and ends what it has."""
        self._lease.revoke()
        slot = self._service.slots[server_id]
        slot.up, slot.leaving = False, True

    # for trials

    def restart(self, sequences: Sequence[SequenceState]) -> None:
        """Back into the engine, batch by batch; a part of a batch joins the part that is there."""
        ids = {sequence.id for sequence in sequences}
        for batch in self._service.batches():
            # one that was preempted or put back has moved on to another batch
            own = [sequence for sequence in batch.sequences if sequence.batch is batch]
            if part := [sequence for sequence in own if sequence.id in ids]:
                served = any(sequence.stream is not None for sequence in own)
                self._service.start(batch, part, joining=served)

    def renew(self, sequence: SequenceState) -> None:
        """Out of the engine, and in again behind what it has; its place in its batch stays."""
        assert sequence.batch is not None
        self._service.engine.cancel([sequence.id])
        self._service.start(sequence.batch, [sequence], joining=True)

    def settled(self, sequence: SequenceState) -> None:
        """Its last token can show that the engine is sound."""
        self.trials.settled(sequence)
        batch = sequence.batch
        if batch is not None and (own := self.servers.get(batch.server_id)) is not None:
            own.settled(sequence)

    def _all(self) -> tuple[Trials, ...]:
        return (self.trials, *self.servers.values())

    def _trials_of(self, server_id: int) -> ServerTrials:
        if server_id not in self.servers:

            def over() -> None:
                slot = self._service.slots[server_id]
                slot.up = not slot.leaving
                self._service.ledger.notify()
                if slot.up and self.on_server_back is not None:
                    self.on_server_back()
                self._ask()

            self.servers[server_id] = ServerTrials(
                self._suspect_after,
                self.restart,
                over,
                lambda proved: Proof(self._service.engine, proved, server_id),
                first_death=(server_id + 1) * LOSSES,
            )
            self.servers[server_id].on_forgiven = self._forgiven
        return self.servers[server_id]

    def _forgiven(self, server_id: int, losses: int) -> None:
        if self.on_forgiven is not None:
            self.on_forgiven(server_id, losses)

    def _detach(
        self,
        sequences: Sequence[SequenceState],
        guilty: SequenceState | None,
        message: str,
        most: int,
    ) -> list[SequenceState]:
        """They hear no more of the engine that had them; returns those that can go on."""
        for sequence in sequences:  # all, before one that fails ends the batch of others
            if sequence.stream is not None:
                sequence.interruptions += 1
        continues = []
        for sequence in sequences:
            if sequence is guilty:
                self._fail(sequence, "failed", CODE, f"{FAILED} ({message})")
            elif sequence.stream is None:  # it had not gone back to the engine yet
                continue
            elif reason := interrupted(sequence, most):
                self._fail(sequence, "failed", "engine_unavailable", f"{reason} ({message})")
            elif sequence.stop_detector.finish_reason is None:
                continues.append(sequence)
        return continues

    def _kept(self, servers: Collection[int]) -> list[SequenceState]:
        """In no engine, and not over: those in service on these servers."""
        return [
            sequence
            for batch in self._service.batches()
            if batch.server_id in servers
            for sequence in batch.sequences
            if sequence.id in batch.open and sequence.stream is None
        ]

    def _over(self) -> None:
        self._service.ledger.notify()
        self._ask()


class ServerTrials(Trials):
    """Of one of several servers: the others go on meanwhile."""

    on_forgiven: Callable[[int, int], None]

    def _give_back(self, deaths: Collection[int]) -> None:
        """Each to the server that died."""
        for server_id in {death // LOSSES - 1 for death in deaths}:
            losses = sum(death // LOSSES - 1 == server_id for death in deaths)
            self.on_forgiven(server_id, losses)
