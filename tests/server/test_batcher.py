"""What HTTP cannot reach: preemption, a bug in one consumer, the queue as policies read it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import pytest

from policies import Decision, Dispatch, Preempt, QueueState, Request, Single, WaitUntil
from queueing.latency import parse_law
from server.batcher import Batcher
from server.engines.emulated import EmulatedEngine
from tests.server.harness import Collector, Immediate, work_of
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0,k2=1e-3,k3=0,k4=1e-3")


@dataclass(frozen=True, slots=True, kw_only=True)
class YoungestFirst:
    """Preempts whoever runs for whoever arrived later: enough to exercise the driver."""

    name: ClassVar[str] = "youngest"
    padded: ClassVar[bool] = False
    release: ClassVar[str] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False

    def decide(self, state: QueueState, now: float) -> Decision:
        if not state.waiting:
            return WaitUntil(float("inf"))
        (server,) = state.servers
        youngest = max(state.waiting, key=lambda waiting: waiting.request.arrived_at)
        if not server.in_service:
            return Dispatch((youngest.request.id,), 0)
        running = server.in_service[0]
        if running.request.arrived_at < youngest.request.arrived_at:
            return Preempt((running.request.id,))
        return WaitUntil(float("inf"))


def request(name: str, at: float) -> Request:
    return Request(id=name, arrived_at=at, prompt_tokens=4, max_output_tokens=200)


def test_a_preempted_request_goes_on_behind_what_it_has() -> None:
    """Every token once, in order, and each request one outcome."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        capabilities = await engine.start()
        alone = Immediate()
        undisturbed = Batcher(engine, capabilities, Single())
        (alone.ticket,) = undisturbed.submit([work_of(request("alone", 0.0), 50)], [alone])
        await undisturbed.answered()
        batcher = Batcher(engine, capabilities, YoungestFirst(), [collector])
        loop = asyncio.get_running_loop()
        old, young = Immediate(), Immediate()
        (old.ticket,) = batcher.submit([work_of(request("old", loop.time()), 50)], [old])
        await asyncio.sleep(0.02)
        (young.ticket,) = batcher.submit([work_of(request("young", loop.time()), 10)], [young])
        await batcher.answered()
        assert [record.request_id for record in collector.records] == ["young", "old"]
        assert (young.tokens, old.tokens) == (10, 50)
        assert old.text == alone.text
        assert batcher.in_service == batcher.queue_length == 0

    run_virtual(main())


def test_the_queue_is_read_as_a_sequence() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.hold(True)
        for index in range(5):
            batcher.submit([work_of(request(str(index), 0.0), 3)], [Immediate()])
        view = batcher._state().waiting
        assert len(view) == 5
        assert [waiting.request.id for waiting in view] == list("01234")
        assert [waiting.request.id for waiting in view[:2]] == ["0", "1"]
        assert (view[0].request.id, view[-1].request.id) == ("0", "4")
        with pytest.raises(IndexError):
            view[5]
        with pytest.raises(ValueError, match="in use"):
            batcher.submit([work_of(request("0", 0.0), 3)], [Immediate()])

    run_virtual(main())
