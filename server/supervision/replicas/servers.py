"""Replicas as servers of the queue: what a lost one had in service goes back, others are added and
removed while it serves. Each change of their number begins an epoch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from kendall.server.engines.capabilities import ServersSummary, ServerSummary
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.replicas.replica import Replica

log = logging.getLogger("kendall.supervision")


class Servers:
    """Of one gateway. `on_loss(reason)` is called when one was lost, `blame` with a request that is
    certain to have killed it, `on_forgiven` with how many losses were of such requests,
    `begin_epoch` when their number has changed.
    """

    def __init__(
        self,
        pool: Replicas,
        *,
        most_interruptions: int,
        on_loss: Callable[[str], None],
        blame: Callable[[SequenceState], None],
        on_forgiven: Callable[[int], None],
        begin_epoch: Callable[[], object],
    ) -> None:
        self._pool, self._most = pool, most_interruptions
        self._on_loss, self._blame, self._begin_epoch = on_loss, blame, begin_epoch
        self._on_forgiven = on_forgiven
        self._batcher: Batcher | None = None
        self._turn = asyncio.Lock()  # one start after the other
        self._starts: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_failure: str | None = None  # of a start that was asked for
        pool.on_server_down, pool.on_server_up = self._down, self._up

    def attach(self, batcher: Batcher) -> None:
        """There is a queue."""
        self._batcher = batcher
        batcher.recovery.on_forgiven = self._forgive
        batcher.recovery.on_server_back = self._count_anew
        batcher.use_only({each.id for each in self._pool.replicas.values() if each.serves})

    async def close(self) -> None:
        """Start and remove nothing any more."""
        tasks = [*self._tasks, *self._starts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def restarts(self) -> int:
        """Of all of them, those that were removed too."""
        here = sum(each.supervisor.restarts for each in self._pool.replicas.values())
        return self._pool.restarts_of_removed + here

    def state(self) -> ServersSummary:
        """For `/admin/servers`."""
        running = [] if self._batcher is None else self._batcher.running()
        servers = [
            ServerSummary(
                id=replica.id,
                state=replica.state,
                in_service=len(running[replica.id]) if replica.id < len(running) else 0,
                restarts=replica.supervisor.restarts,
                last_loss=replica.supervisor.last_loss,
            )
            for replica in sorted(self._pool.replicas.values(), key=lambda each: each.id)
        ]
        return ServersSummary(len(self._kept()), self.last_failure, servers)

    def resize(self, count: int) -> ServersSummary:
        """So many are to serve. What is started joins when it is up; what is removed gets nothing
        new from now on, and ends what it has.
        """
        for lost in [each for each in self._pool.replicas.values() if _is_lost(each)]:
            self._remove(lost)
        kept = self._kept()
        if count != len(kept):
            log.info("%d replicas are to serve, were %d", count, len(kept))
        for replica in sorted(kept, key=_least_use_first)[: max(0, len(kept) - count)]:
            self._remove(replica)
        for _ in range(count - len(kept)):
            self._add()
        return self.state()

    # add and remove

    def _kept(self) -> list[Replica]:
        return [each for each in self._pool.replicas.values() if not each.hopeless]

    def _add(self) -> None:
        server_id = next(each for each in itertools.count() if each not in self._pool.replicas)
        replica = self._pool.add(server_id)
        task = asyncio.get_running_loop().create_task(
            self._start(replica), name=f"start-server-{server_id}"
        )
        self._starts[server_id] = task
        task.add_done_callback(lambda _: self._started(server_id, task))

    def _started(self, server_id: int, task: asyncio.Task[None]) -> None:
        if self._starts.get(server_id) is task:
            del self._starts[server_id]

    async def _start(self, replica: Replica) -> None:
        """Within the limit of a first start, each."""
        try:
            async with self._turn:
                replica.capabilities = await replica.supervisor.start()
        except Exception as error:  # noqa: BLE001 - whatever it was: the others serve
            self.last_failure = f"server {replica.id} did not start: {error}"
            log.error("%s", self.last_failure)  # noqa: TRY400 - one line
            await self._pool.remove(replica.id)
            return
        log.info("server %d serves", replica.id)
        self._pool.changed(f"server {replica.id} is new")
        self._take_work(replica.id)

    def _remove(self, replica: Replica) -> None:
        replica.leaving = True
        if (batcher := self._batcher) is not None and self._has_slot(replica.id):
            served = replica.id in batcher.servers_in_use
            batcher.recovery.withdraw_server(replica.id)
            if not replica.serves and batcher.running()[replica.id]:
                self._down(replica.id, "it was removed")
            if served:
                self._count_anew()
        task = asyncio.get_running_loop().create_task(
            self._end(replica), name=f"remove-server-{replica.id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, replica: Replica) -> None:
        """What it has in service ends first: whatever gets no token there is noticed."""
        if (start := self._starts.get(replica.id)) is not None:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        if self._batcher is not None and self._has_slot(replica.id):
            await self._batcher.emptied(replica.id)
        if replica.id in self._pool.replicas:
            await self._pool.remove(replica.id)
        log.info("server %d was removed", replica.id)

    # what becomes of each

    def _down(self, server_id: int, reason: str) -> None:
        batcher = self._batcher
        if batcher is None or not self._has_slot(server_id):
            return
        served = server_id in batcher.servers_in_use
        comes_back = not self._pool.replicas[server_id].hopeless
        self._on_loss(reason)
        culprit = batcher.recovery.interrupt_server(
            server_id, reason, self._most, comes_back=comes_back
        )
        if culprit is not None:
            self._blame(culprit)
        if served:
            self._count_anew()

    def _up(self, server_id: int) -> None:
        if self._batcher is not None:
            self._batcher.recovery.resume_server(server_id)

    def _take_work(self, server_id: int) -> None:
        if self._batcher is not None:
            self._batcher.use_only(self._batcher.servers_in_use | {server_id}, ask=False)
            self._count_anew()

    def _count_anew(self) -> None:
        """With another number of servers statistics begin anew."""
        assert self._batcher is not None
        self._batcher.capabilities = self._pool.capabilities()
        self._begin_epoch()

    def _has_slot(self, server_id: int) -> bool:
        return self._batcher is not None and server_id < len(self._batcher.running())

    def _forgive(self, server_id: int, losses: int) -> None:
        if (replica := self._pool.replicas.get(server_id)) is not None:
            replica.supervisor.forgive(losses)
        self._on_forgiven(losses)


def _is_lost(replica: Replica) -> bool:
    return replica.hopeless and not replica.leaving


def _least_use_first(replica: Replica) -> tuple[bool, int]:
    """Of those that may be removed: who does not serve, then the newest."""
    return replica.serves, -replica.id
