"""What HTTP cannot reach: preemption, a bug in one consumer, the queue as policies read it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from kendall.policies import (
    Continuous,
    Decision,
    Dispatch,
    Dynamic,
    Elastic,
    Policy,
    Preempt,
    QueueState,
    Request,
    Single,
    WaitUntil,
    parse_policy,
)
from kendall.policies.orders.preemptive import Gittins
from kendall.policies.waiting_queues import queue_for
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.server.engines.base import EngineRequest, TokenStream
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.continuing import detach
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState
from kendall.server.telemetry.metrics import Metrics
from tests.server.harness import FRAGILE, Collector, Immediate, engine_request_of, replay, submitted
from tests.server.mortal import SilentOnProofs
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0,k2=1e-3,k3=0,k4=1e-3")
LIMIT, LOOK = 10.0, 0.05  # seconds of a proof, and until a suspect is looked at


@dataclass(frozen=True, kw_only=True)
class Unpadded:
    """What both preempting policies of these tests have in common; a dataclass, as a policy has
    to be.
    """

    padded: ClassVar[bool] = False
    release: ClassVar[str] = "request"
    wants_steps: ClassVar[bool] = False
    joins_running: ClassVar[bool] = False


class YoungestFirst(Unpadded):
    """Preempts whoever runs for whoever arrived later: enough to exercise the driver."""

    name: ClassVar[str] = "youngest"

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


class Evicting(Unpadded):
    """Dispatches all that wait as one batch; preempts the request `evicted` as soon as another
    one waits.
    """

    name: ClassVar[str] = "evicting"

    def decide(self, state: QueueState, now: float) -> Decision:
        (server,) = state.servers
        if state.waiting and not server.in_service:
            return Dispatch(tuple(waiting.request.id for waiting in state.waiting), 0)
        evicted = [
            running.request.id for running in server.in_service if running.request.id == "evicted"
        ]
        return Preempt(tuple(evicted)) if state.waiting and evicted else WaitUntil(float("inf"))


def request(name: str, at: float, **fields: Any) -> Request:
    return Request(id=name, arrived_at=at, prompt_tokens=4, max_output_tokens=200, **fields)


def test_a_preempted_request_goes_on_behind_what_it_has() -> None:
    """Every token once, in order, and each request one outcome."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        capabilities = await engine.start()
        undisturbed = Batcher(engine, capabilities, Single())
        (alone,) = submitted(undisturbed, [engine_request_of(request("alone", 0.0), 50)])
        await undisturbed.answered()
        batcher = Batcher(engine, capabilities, YoungestFirst(), [collector])
        loop = asyncio.get_running_loop()
        (old,) = submitted(batcher, [engine_request_of(request("old", loop.time()), 50)])
        await asyncio.sleep(0.02)
        (young,) = submitted(batcher, [engine_request_of(request("young", loop.time()), 10)])
        await batcher.answered()
        assert [record.request_id for record in collector.records] == ["young", "old"]
        assert (young.tokens, old.tokens) == (10, 50)
        assert old.text == alone.text
        assert batcher.in_service == batcher.queue_length == batcher.unrecorded == 0
        first, second = collector.records
        assert (first.preemptions, second.preemptions) == (0, 1)
        assert first.first_dispatched_at == first.dispatched_at
        for record in collector.records:
            waited, served = record.queueing_delay, record.service_time
            assert waited is not None
            assert served is not None
            assert record.server_free_at is not None
            assert record.arrived_at is not None
            assert waited + served == pytest.approx(record.server_free_at - record.arrived_at)
            assert record.first_token_at is not None
            assert record.first_dispatched_at is not None
            assert record.first_token_at > record.first_dispatched_at
        assert second.first_dispatched_at == second.arrived_at
        assert second.dispatched_at == first.server_free_at
        assert second.first_token_at is not None
        assert second.first_token_at < first.dispatched_at < second.dispatched_at  # type: ignore[operator]
        assert second.queueing_delay == pytest.approx(first.service_time)

    run_virtual(main())


def test_a_preemption_is_counted_under_the_policy_that_preempted_not_the_one_that_goes_on() -> None:
    """Of two predicted requests the shorter preempts; then the policy is switched."""
    metrics = Metrics()
    jobs = [
        (request("long", 0.0, predicted_output_tokens=50), 50),
        (request("short", 0.01, predicted_output_tokens=10), 10),
    ]
    orders, plain = "single:order=sprpt", "continuous:max_batch_size=1"
    records = run_virtual(
        replay(
            parse_policy(orders),
            jobs,
            LAW,
            switches=[(0.015, parse_policy(plain))],
            observers=[metrics],
        )
    )
    assert {record.request_id: (record.policy, record.preemptions) for record in records} == {
        "short": (orders, 0),
        "long": (plain, 1),
    }
    text = metrics.exposition().decode()
    assert f'kendall_preemptions_total{{policy="{orders}"}} 1.0' in text
    assert f'kendall_preemptions_total{{policy="{plain}"}} 0.0' in text


def test_what_an_order_learns_holds_for_what_is_there_and_begins_no_epoch() -> None:
    """First come, first served until it knows; then the one in service has a worse rank than the
    one that waits.
    """

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(
            engine, await engine.start(), parse_policy("single:order=gittins"), [collector]
        )
        now = asyncio.get_running_loop().time()
        submitted(batcher, [engine_request_of(request("long", now), 50)])
        await asyncio.sleep(0.02)
        submitted(batcher, [engine_request_of(request("short", now + 0.02), 2)])
        await asyncio.sleep(0.005)
        assert [waiting.request.id for waiting in batcher.waiting] == ["short"]
        epoch, ranking = batcher.epoch, Gittins().with_ranks((0, 10), (5.0, 90.0))
        batcher.rank_by(ranking)
        assert (batcher.epoch, batcher.policy_text) == (epoch, "single:order=gittins")
        assert [waiting.request.id for waiting in batcher.waiting] == ["long"]
        policy = batcher.policy
        batcher.rank_by(ranking)  # the same again
        assert batcher.policy is policy
        await batcher.answered()
        ends = [(each.request_id, each.preemptions) for each in collector.records]
        assert ends == [("short", 0), ("long", 1)]

    run_virtual(main())


def test_a_consumer_hears_once_that_service_began() -> None:
    """An answer counts which of its sequences have begun; one that began twice never would."""

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), YoungestFirst())
        loop = asyncio.get_running_loop()
        began: list[str] = []
        for name in ("old", "young"):
            (consumer,) = made = [Immediate()]
            consumer.on_dispatched = lambda name=name: began.append(name)
            (consumer.sequence,) = batcher.submit(
                [engine_request_of(request(name, loop.time()), 10)], made
            )
            await asyncio.sleep(0.002)
        await batcher.answered()
        assert consumer.sequence.at.released is not None
        assert began == ["old", "young"]

    run_virtual(main())


def test_a_preempted_request_that_leaves_while_it_waits_has_its_stints_and_its_waits() -> None:
    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), YoungestFirst(), [collector])
        (old,) = submitted(batcher, [engine_request_of(request("old", 0.0), 50)])
        await asyncio.sleep(0.02)
        submitted(batcher, [engine_request_of(request("young", 0.02), 50)])
        await asyncio.sleep(0.01)
        assert old.sequence is not None
        old.sequence.cancel()
        (record,) = collector.records
        assert (record.outcome, record.preemptions, record.batch_id) == ("cancelled", 1, None)
        assert record.service_time == pytest.approx(0.02)
        assert record.queueing_delay == pytest.approx(0.01)
        await batcher.answered()

    run_virtual(main())


@pytest.mark.parametrize("sampling", [{"seed": 3}, {"presence_penalty": 0.5}])
def test_what_cannot_go_on_exactly_is_not_preempted(sampling: dict[str, object]) -> None:
    """A policy that wants it all the same is wrong, which is said; nothing is lost."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), YoungestFirst(), [collector])
        submitted(batcher, [engine_request_of(request("old", 0.0), 30, **sampling)])
        await asyncio.sleep(0.02)
        assert [each.preemptible for each in batcher.running()[0]] == [False]
        submitted(batcher, [engine_request_of(request("young", 0.02), 10)])
        assert batcher.policy_failures.error is not None
        assert "got a decision to preempt old" in batcher.policy_failures.error
        await batcher.answered()
        assert [(record.request_id, record.outcome) for record in collector.records] == [
            ("old", "completed"),
            ("young", "completed"),
        ]
        assert batcher.policy_failures.error is None

    run_virtual(main())


class Quantum(Unpadded):
    """Whoever is five tokens ahead of one that waits makes room for it."""

    name: ClassVar[str] = "quantum"
    wants_steps: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        (server,) = state.servers
        if state.waiting and not server.in_service:
            last = min(state.waiting, key=lambda each: (each.output_tokens_so_far, each.request.id))
            return Dispatch((last.request.id,), 0)
        (own,) = server.in_service
        least = min((each.output_tokens_so_far for each in state.waiting), default=10**9)
        ahead = own.output_tokens_so_far >= least + 5
        return Preempt((own.request.id,)) if ahead else WaitUntil(float("inf"))


def test_a_policy_that_wants_steps_is_asked_after_every_step_of_the_engine() -> None:
    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Quantum(), [collector])
        asked = submitted(batcher, [engine_request_of(request(name, 0.0), 12) for name in "ab"])
        await batcher.answered()
        assert [consumer.tokens for consumer in asked] == [12, 12]
        assert [(each.request_id, each.preemptions) for each in collector.records] == [
            ("a", 1),
            ("b", 1),
        ]
        first, second = collector.records
        at = [first.first_dispatched_at, second.first_dispatched_at, first.dispatched_at]
        assert at == sorted(at)  # type: ignore[type-var]
        assert len(set(at)) == 3
        batcher.switch(Single())
        assert not batcher.wants_steps

    run_virtual(main())


def test_the_queue_is_read_as_a_sequence() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.pause_dispatch(True)
        assert batcher.unrecorded == batcher.unanswered == 0
        for index in range(5):
            batcher.submit([engine_request_of(request(str(index), 0.0), 3)], [Immediate()])
        assert batcher.unrecorded == batcher.unanswered == 5
        view = batcher.waiting
        assert len(view) == 5
        assert [waiting.request.id for waiting in view] == list("01234")
        assert [waiting.request.id for waiting in view[:2]] == ["0", "1"]
        assert (view[0].request.id, view[-1].request.id) == ("0", "4")
        assert (batcher.place_of(request("5", 0.0)), batcher.waiting_tokens) == (5, 5 * 4)
        with pytest.raises(IndexError):
            view[5]

    run_virtual(main())


@pytest.mark.parametrize("names", [("0",), ("new", "0"), ("new", "new")])
def test_of_a_call_with_an_id_in_use_nothing_is_taken(names: tuple[str, ...]) -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.pause_dispatch(True)
        batcher.submit([engine_request_of(request("0", 0.0), 3)], [Immediate()])
        requests = [engine_request_of(request(name, 0.0), 3) for name in names]
        with pytest.raises(ValueError, match=f"request id '{names[-1]}' is in use"):
            batcher.submit(requests, [Immediate() for _ in names])
        assert batcher.unrecorded == batcher.unanswered == batcher.queue_length == 1

    run_virtual(main())


@pytest.mark.parametrize(
    "event",
    [
        *("submit", "pause_dispatch", "close", "fail_all", "interrupt", "interrupt_server"),
        *("withdraw_server", "revoke"),
    ],
)
def test_a_lent_engine_comes_back_with_whatever_happens(event: str) -> None:
    """Its holder hears it at once and once; what waits afterwards is served."""

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        blocked: list[bool] = []
        batcher.lease.acquire(lambda: blocked.append(batcher.lease.blocks))
        assert (batcher.lease.active, batcher.lease.blocks, blocked) == (True, True, [])
        act = {
            "submit": lambda: submitted(
                batcher, [engine_request_of(request(f"{len(blocked)}", 0.0), 3)]
            ),
            "pause_dispatch": lambda: batcher.pause_dispatch(False),
            "close": batcher.close,
            "fail_all": lambda: batcher.fail_all("engine_unavailable", "gone"),
            "interrupt": lambda: batcher.recovery.interrupt("gone", 3),
            "interrupt_server": lambda: batcher.recovery.interrupt_server(
                0, "gone", 3, comes_back=True
            ),
            "withdraw_server": lambda: batcher.recovery.withdraw_server(0),
            "revoke": batcher.lease.revoke,
        }[event]
        act()
        assert (batcher.lease.active, blocked) == (False, [False])
        assert batcher.lease.blocks is (event == "fail_all")
        assert batcher.lease.active is False
        act()
        assert blocked == [False]

    run_virtual(main())


def test_a_batch_is_over_without_those_who_were_preempted() -> None:
    """Or its server would never be free again."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Evicting(), [collector])
        first = submitted(
            batcher,
            [
                engine_request_of(request("evicted", 0.0), 50),
                engine_request_of(request("stays", 0.0), 30),
            ],
        )
        await asyncio.sleep(0.01)
        last = submitted(batcher, [engine_request_of(request("last", 0.01), 5)])
        await batcher.answered()
        assert [record.request_id for record in collector.records] == ["stays", "last", "evicted"]
        assert [consumer.tokens for consumer in (*first, *last)] == [50, 30, 5]

    run_virtual(main())


def test_who_left_a_padded_batch_is_recorded_with_it() -> None:
    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Dynamic(), [collector])
        leaves, _ = submitted(
            batcher, [engine_request_of(request(name, 0.0), 50) for name in ("leaves", "stays")]
        )
        await asyncio.sleep(0.01)
        assert (batcher.unanswered, batcher.unrecorded, len(collector.records)) == (2, 2, 0)
        assert leaves.sequence is not None
        leaves.sequence.cancel()
        assert (batcher.unanswered, batcher.unrecorded, len(collector.records)) == (1, 2, 0)
        await batcher.answered()
        await asyncio.sleep(0)
        assert (batcher.unanswered, batcher.unrecorded, len(collector.records)) == (0, 0, 2)

    run_virtual(main())


@pytest.mark.parametrize("policy", [Single(), Elastic(), Continuous(max_batch_size=1)])
def test_an_answer_that_ends_with_a_stop_token_leaves_the_engine_to_the_next(
    policy: Policy,
) -> None:
    """The engine would go on to the limit; the next batch would be refused, or served beside
    nobody's answer.
    """

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), policy, [collector])
        (stopped,) = submitted(
            batcher,
            [
                engine_request_of(
                    request("stopped", 0.0),
                    None,
                    max_tokens=100,
                    stop_token_ids=(5,),
                    ignore_eos=True,
                )
            ],
        )
        (after,) = submitted(batcher, [engine_request_of(request("after", 0.0), 5)])
        await batcher.answered()
        assert (stopped.tokens, after.tokens) == (4, 5)
        assert [record.outcome for record in collector.records] == ["completed", "completed"]
        assert asyncio.get_running_loop().time() < 0.02

    run_virtual(main())


def test_a_request_that_is_never_dispatched_has_policy_and_epoch_of_its_end() -> None:
    """Both, as in the simulator; one that was dispatched has both of its dispatch."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Single(), [collector])
        served, waiting = (
            submitted(batcher, [engine_request_of(request(name, 0.0), 50)])[0]
            for name in ("served", "waiting")
        )
        assert batcher.switch(Dynamic()) == batcher.epoch == 1
        assert waiting.sequence is not None
        waiting.sequence.cancel()
        await batcher.answered()
        await asyncio.sleep(0)
        found = {record.request_id: (record.policy, record.epoch) for record in collector.records}
        assert found == {"served": ("single", 0), "waiting": ("dynamic", 1)}
        assert served.tokens == 50

    run_virtual(main())


class Refusing(EmulatedEngine):
    """Takes no batch with a request called `bad`."""

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        if any(engine_request.request.id == "bad" for engine_request in requests):
            raise ValueError("no such batch")
        return super().dispatch(server_id, requests, padded=padded, joining=joining)


def test_a_batch_that_the_engine_refuses_fails_and_the_next_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine, collector = Refusing(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Single(), [collector])
        submitted(batcher, [engine_request_of(request(name, 0.0), 5) for name in ("bad", "good")])
        await batcher.answered()
        await asyncio.sleep(0)
        assert [(record.request_id, record.outcome) for record in collector.records] == [
            ("bad", "failed"),
            ("good", "completed"),
        ]
        assert batcher.in_service == batcher.unrecorded == 0

    run_virtual(main())
    assert [each.getMessage() for each in caplog.records if each.exc_info] == [
        "the engine rejected a batch"
    ]


class Noting(EmulatedEngine):
    """Notes how many it is given at once, and whether they join others."""

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        given.append((len(requests), joining))
        return super().dispatch(server_id, requests, padded=padded, joining=joining)


given: list[tuple[int, bool]] = []


def test_a_batch_that_goes_on_begins_anew_and_a_part_of_it_joins_the_rest() -> None:
    given.clear()

    async def main() -> None:
        engine, collector = Noting(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Dynamic(), [collector])
        submitted(batcher, [engine_request_of(request(name, 0.0), 50) for name in ("one", "other")])
        await asyncio.sleep(0.01)
        (sequences,) = batcher.in_service_sequences()
        for suspects in (sequences, sequences[:1]):
            engine.cancel([sequence.id for sequence in suspects])
            assert [detach(sequence) for sequence in suspects] == [None] * len(suspects)
            batcher.recovery.restart(suspects)
        await batcher.answered()
        await asyncio.sleep(0)
        assert [record.outcome for record in collector.records] == ["completed", "completed"]

    run_virtual(main())
    assert given == [(2, False), (2, False), (1, True)]


def test_an_answer_that_is_handed_over_again_has_each_token_once() -> None:
    """The engine first lets go of what it has of it."""

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Continuous(max_batch_size=2))
        asked = submitted(
            batcher, [engine_request_of(request(name, 0.0), 50) for name in ("again", "other")]
        )
        await asyncio.sleep(0.0205)  # in the middle of a step
        again = asked[0].sequence
        assert again is not None
        assert detach(again) is None
        batcher.recovery.renew(again)
        await batcher.answered()
        assert [consumer.tokens for consumer in asked] == [50, 50]
        assert asked[0].text == asked[1].text

    run_virtual(main())


def test_a_member_that_is_whole_when_its_engine_dies_is_not_made_again() -> None:
    given.clear()

    async def main() -> None:
        engine = Noting(LAW)
        batcher = Batcher(engine, await engine.start(), Dynamic())
        asked = submitted(
            batcher,
            [
                engine_request_of(request(name, 0.0), tokens)
                for name, tokens in (("a", 3), ("b", 50))
            ],
        )
        await asyncio.sleep(0.02)
        assert await replaced(batcher, engine) is None
        await batcher.answered()
        assert [consumer.tokens for consumer in asked] == [3, 50]

    run_virtual(main())
    assert given == [(2, False), (1, False)]


STATISTICS = {"on_trial": False, "proving": False, "convicted": 0}


async def replaced(batcher: Batcher, engine: EmulatedEngine) -> SequenceState | None:
    """Replace the engine after its death; returns the request that certainly caused it."""
    guilty = batcher.recovery.interrupt("gone", 3)
    assert batcher.resting
    await engine.stop()
    batcher.recovery.resume(await engine.start())
    return guilty


async def tried() -> tuple[Batcher, list[Immediate]]:
    """Two have seen two engines die: the first is on trial, and the queue waits."""
    engine = EmulatedEngine(LAW)
    batcher = Batcher(engine, await engine.start(), Continuous(max_batch_size=3))
    asked = submitted(batcher, [engine_request_of(request(name, 0.0), 100) for name in "ab"])
    for _ in range(2):
        await asyncio.sleep(0.01)
        assert await replaced(batcher, engine) is None
    asked += submitted(batcher, [engine_request_of(request("later", 0.02), 5)])
    assert (batcher.queue_length, batcher.in_service) == (1, 2)
    assert (batcher.resting, batcher.recovery.tries) == (False, True)
    assert batcher.recovery.statistics() == STATISTICS | {"on_trial": True}
    return batcher, asked


def test_the_queue_goes_on_when_the_trials_are_over() -> None:
    async def main() -> None:
        batcher, asked = await tried()
        await asyncio.sleep(2.5 * LOOK)
        assert (batcher.queue_length, batcher.recovery.tries) == (0, False)
        assert batcher.recovery.statistics() == STATISTICS
        await batcher.answered()
        assert [consumer.tokens for consumer in asked] == [100, 100, 5]

    run_virtual(main())


def test_a_gateway_that_ends_tries_nobody_any_more() -> None:
    async def main() -> None:
        batcher, asked = await tried()
        batcher.fail_all("shutting_down", "the gateway ends")
        assert not batcher.recovery.tries
        assert (batcher.unanswered, batcher.in_service) == (0, 0)
        assert [consumer.failed for consumer in asked] == [("failed", "shutting_down")] * 3

    run_virtual(main())


def test_a_proof_keeps_the_engine_until_it_fails_and_an_answer_is_as_good() -> None:
    """Who waits for an idle engine is woken when it is over."""

    async def main() -> None:
        engine = SilentOnProofs(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        given_back: list[int] = []
        batcher.recovery.trials.on_sound = given_back.append
        (deadly,) = submitted(batcher, [engine_request_of(request("deadly", 0.0), 200)])
        await asyncio.sleep(0.01)
        assert await replaced(batcher, engine) is None
        await asyncio.sleep(0.01)
        assert await replaced(batcher, engine) is deadly.sequence
        assert batcher.recovery.statistics() == STATISTICS | {"proving": True, "convicted": 1}
        served = asyncio.ensure_future(batcher.served())
        await asyncio.sleep(LIMIT - 0.1)
        assert (batcher.resting, batcher.idle, served.done()) == (True, False, False)
        await asyncio.sleep(0.2)
        assert (batcher.resting, batcher.idle, served.done()) == (False, True, True)
        assert given_back == []
        submitted(batcher, [engine_request_of(request("later", LIMIT), 5)])
        await batcher.answered()
        assert given_back == [2]

    run_virtual(main())


# one of two servers


async def on_two(
    policy: Policy, consumers: dict[str, Immediate], *, fragile: str = "", suspect_after: int = 2
) -> tuple[Batcher, EmulatedEngine]:
    """Requests of these names, one after the other; `fragile`: one that cannot go on elsewhere."""
    engine = EmulatedEngine(LAW, servers=2)
    batcher = Batcher(engine, await engine.start(), policy, suspect_after=suspect_after)
    for name, consumer in consumers.items():
        sampling = FRAGILE if name == fragile else {}
        (consumer.sequence,) = batcher.submit(
            [engine_request_of(request(name, 0.0), 30, **sampling)], [consumer]
        )
    await asyncio.sleep(0.01)
    return batcher, engine


def served_on(batcher: Batcher) -> list[str]:
    """Names of those in service on each server; each has one letter."""
    return ["".join(each.request.id for each in server) for server in batcher.running()]


class Leading(Immediate):
    """One choice of a call: if it fails, so does the other one."""

    other: Immediate

    def on_failed(self, outcome: str, code: str, message: str) -> None:
        super().on_failed(outcome, code, message)
        assert self.other.sequence is not None
        self.other.sequence.cancel()


def test_what_a_lost_server_had_goes_before_those_who_wait_whatever_ends_with_it() -> None:
    """A choice that cannot go on ends the other choice of its call, on the other server: that place
    is for the one that has lost its own.
    """

    async def main() -> None:
        leading, other, waits = Leading(), Immediate(), Immediate()
        leading.other = other
        consumers = {"f": leading, "o": other, "g": Immediate(), "h": Immediate(), "w": waits}
        batcher, _ = await on_two(Continuous(max_batch_size=2), consumers, fragile="f")
        assert (served_on(batcher), batcher.queue_length) == (["fg", "oh"], 1)
        assert batcher.recovery.interrupt_server(0, "gone", 3, comes_back=True) is None
        assert (served_on(batcher), batcher.queue_length) == (["", "hg"], 1)
        assert leading.failed == ("failed", "engine_unavailable")
        assert waits.sequence is not None
        waits.sequence.cancel()
        assert (waits.sequence.outcome, batcher.queue_length) == ("cancelled", 0)
        await batcher.answered()
        assert (consumers["g"].tokens, consumers["h"].tokens) == (30, 30)

    run_virtual(main())


def test_suspects_wait_for_the_server_that_they_were_on_unless_it_is_lost_for_good() -> None:
    async def main() -> None:
        consumers = {name: Immediate() for name in "abc"}
        batcher, engine = await on_two(Continuous(max_batch_size=2), consumers, suspect_after=1)
        assert served_on(batcher) == ["ac", "b"]
        assert batcher.recovery.interrupt_server(0, "gone", 3, comes_back=True) is None
        engine.cancel(["a", "c"])
        assert (served_on(batcher), batcher.queue_length) == (["ac", "b"], 0)
        assert batcher.recovery.interrupt_server(0, "it was removed", 3, comes_back=False) is None
        assert (served_on(batcher), batcher.queue_length) == (["", "ba"], 1)
        await batcher.answered()
        assert [consumer.tokens for consumer in consumers.values()] == [30, 30, 30]
        assert len({consumer.text for consumer in consumers.values()}) == 1

    run_virtual(main())


def test_a_server_that_comes_back_takes_work_at_once_also_where_it_had_been_removed() -> None:
    async def main() -> None:
        consumers = {name: Immediate() for name in "abc"}
        batcher, _ = await on_two(Single(), consumers)
        assert served_on(batcher) == ["a", "b"]
        batcher.recovery.interrupt_server(0, "gone", 3, comes_back=True)
        assert (served_on(batcher), batcher.servers_in_use) == (["", "b"], {1})
        batcher.recovery.resume_server(0)
        assert (served_on(batcher), batcher.servers_in_use) == (["a", "b"], {0, 1})
        batcher.recovery.withdraw_server(0)
        emptied = asyncio.ensure_future(batcher.emptied(0))
        await asyncio.sleep(0.01)
        assert (served_on(batcher)[0], batcher.servers_in_use) == ("a", {1})
        assert not emptied.done()
        await batcher.answered()
        await asyncio.sleep(0)
        assert emptied.done()
        assert [consumer.tokens for consumer in consumers.values()] == [30, 30, 30]
        last = consumers["c"].sequence
        assert last is not None
        assert last.batch is not None
        assert last.batch.server_id == 1
        batcher.use_only({0, 1})
        batcher.recovery.interrupt_server(0, "gone", 3, comes_back=True)
        batcher.recovery.resume_server(0)
        assert batcher.servers_in_use == {0, 1}

    run_virtual(main())


@pytest.mark.parametrize("patience", [5.0, 0.012])
def test_who_leaves_the_queue_makes_way_for_the_next_where_no_place_became_free(
    patience: float,
) -> None:
    """By itself, or because its patience ran out: the next one needs less memory."""

    async def main() -> None:
        engine = EmulatedEngine(LAW, kv_cache_tokens=420)
        batcher = Batcher(engine, await engine.start(), Continuous())
        served, large, small = (
            request(name, 0.0, deadline=deadline)._replace(max_output_tokens=limit)
            for name, limit, deadline in (
                ("s", 200, 9.0),
                ("l", 300, patience),
                ("n", 100, 9.0),
            )
        )
        asked = [
            submitted(batcher, [engine_request_of(each, 50)])[0] for each in (served, large, small)
        ]
        await asyncio.sleep(0.01)
        assert (served_on(batcher), batcher.queue_length) == (["s"], 2)
        if patience > 1:
            assert asked[1].sequence is not None
            asked[1].sequence.cancel()
        await asyncio.sleep(0.005)
        assert (served_on(batcher), batcher.queue_length) == (["sn"], 0)
        await batcher.answered()
        assert [consumer.tokens for consumer in asked] == [50, 0, 50]

    run_virtual(main())


class Broken(Immediate):
    """Raises when it is notified that its request failed."""

    def on_failed(self, outcome: str, code: str, message: str) -> None:
        raise KeyError(outcome)


def test_a_fault_of_one_who_is_told_of_a_failure_is_logged_and_the_next_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine, collector, broken = EmulatedEngine(LAW), Collector(), Broken()
        batcher = Batcher(engine, await engine.start(), Single(), [collector])
        (sequence,) = batcher.submit([engine_request_of(request("a", 0.0), 9)], [broken])
        submitted(batcher, [engine_request_of(request("b", 0.0), 9)])
        batcher.fail(sequence, "failed", "engine_error", "no")
        await batcher.answered()
        assert [(record.request_id, record.outcome) for record in collector.records] == [
            ("a", "failed"),
            ("b", "completed"),
        ]

    run_virtual(main())
    (said,) = (record for record in caplog.records if record.exc_info)
    assert said.getMessage() == "internal error while telling a client that its request failed"


class WhileOpen(Unpadded):
    """One after the other, as long as more may arrive."""

    name: ClassVar[str] = "while-open"

    def decide(self, state: QueueState, now: float) -> Decision:
        (server,) = state.servers
        if not state.waiting or server.in_service or state.closing:
            return WaitUntil(float("inf"))
        return Dispatch((state.waiting[0].request.id,), 0)


def test_a_policy_is_asked_when_the_queue_opens_again() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), WhileOpen())
        batcher.close()
        (waiting,) = submitted(batcher, [engine_request_of(request("one", 0.0), 5)])
        assert batcher.in_service == 0
        batcher.reopen()
        assert batcher.in_service == 1
        await batcher.answered()
        assert waiting.tokens == 5

    run_virtual(main())


def test_who_waits_has_a_timer_only_where_its_patience_ends() -> None:
    async def main() -> None:
        engine, loop = EmulatedEngine(LAW), asyncio.get_running_loop()
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.pause_dispatch(True)
        patient, hasty = request("patient", 0.0), request("hasty", 0.0, deadline=5.0)
        with patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            waiting = submitted(batcher, [engine_request_of(each, 3) for each in (patient, hasty)])
        assert [timer.args[0] for timer in timers.call_args_list] == [5.0]
        await asyncio.sleep(6.0)
        assert [each.failed for each in waiting] == [None, ("abandoned", "queue_timeout")]

    run_virtual(main())


def test_servers_are_those_that_are_named_and_may_be_none() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.use_only(())
        (waiting,) = submitted(batcher, [engine_request_of(request("one", 0.0), 5)])
        assert (batcher.running(), batcher.servers, batcher.queue_length) == ([[]], 0, 1)
        batcher.use_only({0})
        await batcher.answered()
        assert waiting.tokens == 5
        batcher.use_only({2})
        assert (batcher.running(), batcher.servers_in_use) == ([[], [], []], {2})

    run_virtual(main())


def test_a_call_has_a_consumer_for_each_of_its_requests() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        requests = [engine_request_of(request(name, 0.0), 5) for name in "ab"]
        with pytest.raises(ValueError, match="shorter"):
            batcher.submit(requests, [Immediate()])
        assert batcher.unanswered == batcher.queue_length == 0

    run_virtual(main())


def test_a_pause_holds_what_waits_and_its_end_dispatches_it_at_once() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Single())
        batcher.pause_dispatch(True)
        (waiting,) = submitted(batcher, [engine_request_of(request("one", 0.0), 5)])
        await asyncio.sleep(1.0)
        assert (batcher.in_service, batcher.queue_length, batcher.moved_at) == (0, 1, 0.0)
        batcher.pause_dispatch(False)
        assert (batcher.in_service, batcher.queue_length, batcher.moved_at) == (1, 0, 1.0)
        await batcher.answered()
        assert waiting.tokens == 5

    run_virtual(main())


def test_a_client_that_cannot_be_told_of_a_failure_has_its_outcome_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone(Immediate):
        def on_failed(self, outcome: str, code: str, message: str) -> None:
            raise RuntimeError("the transport is closed")

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Single(), [collector])
        (sequence,) = batcher.submit([engine_request_of(request("gone", 0.0), 5)], [Gone()])
        (after,) = submitted(batcher, [engine_request_of(request("after", 0.0), 5)])
        batcher.fail(sequence, "failed", "engine_error", "no memory")
        await batcher.answered()
        assert [(each.outcome, each.error) for each in collector.records] == [
            ("failed", "no memory"),
            ("completed", None),
        ]
        assert (batcher.failures, after.tokens) == ({"engine_error": 1}, 5)

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert [each.getMessage() for each in caplog.records if each.exc_info] == [
        "internal error while telling a client that its request failed"
    ]


def test_patience_is_for_the_first_dispatch() -> None:
    """One that is preempted before it has run out waits for as long as it takes."""

    async def main() -> None:
        engine, collector = EmulatedEngine(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), YoungestFirst(), [collector])
        (old,) = submitted(batcher, [engine_request_of(request("old", 0.0, deadline=0.025), 50)])
        await asyncio.sleep(0.02)
        submitted(batcher, [engine_request_of(request("young", 0.02), 50)])
        assert batcher.queue_length == 1
        await batcher.answered()
        assert (old.failed, old.tokens) == (None, 50)
        assert [(each.request_id, each.outcome) for each in collector.records] == [
            ("young", "completed"),
            ("old", "completed"),
        ]

    run_virtual(main())


@pytest.mark.parametrize("event", ["the first one leaves", "priorities begin to count"])
def test_one_that_had_no_place_behind_a_larger_one_is_dispatched_as_soon_as_it_is_first(
    event: str,
) -> None:
    """Memory for 500 tokens: one in service holds 204, the larger one asks for 404."""

    async def main() -> None:
        engine, aging = EmulatedEngine(LAW, kv_cache_tokens=500), list[float]()
        batcher = Batcher(
            engine,
            await engine.start(),
            Continuous(max_batch_size=4),
            queue_for=lambda policy: queue_for(policy, *aging),
        )
        submitted(batcher, [engine_request_of(request("served", 0.0), 50)])
        larger = request("larger", 0.0, priority=1)._replace(max_output_tokens=400)
        (first,) = submitted(batcher, [engine_request_of(larger, 50)])
        submitted(batcher, [engine_request_of(request("small", 0.0), 50)])
        assert [each.request.id for each in batcher.waiting] == ["larger", "small"]
        if event == "the first one leaves":
            assert first.sequence is not None
            first.sequence.cancel()
        else:
            aging.append(60.0)
            batcher.rank_again()
        assert [each.request.id for each in batcher.running()[0]] == ["served", "small"]
        await batcher.answered()

    run_virtual(main())


class Idle(Observer):
    """Notes when a server holds nothing any more."""

    def __init__(self) -> None:
        self.events: list[tuple[int, float]] = []

    def on_idle(self, server_id: int, at: float) -> None:
        self.events.append((server_id, at))


@pytest.mark.parametrize(
    ("policy", "last"),
    [
        (Single(), ["short", "long"]),
        (Dynamic(), ["long"]),
        (Elastic(), ["long"]),
        (Continuous(max_batch_size=2), ["long"]),
    ],
)
def test_a_server_is_idle_at_the_instant_at_which_the_last_one_leaves_it(
    policy: Policy, last: list[str]
) -> None:
    """Between two batches, too."""

    async def main() -> None:
        engine, collector, idle = EmulatedEngine(LAW), Collector(), Idle()
        batcher = Batcher(engine, await engine.start(), policy, [collector, idle])
        lengths = {"short": 5, "long": 9}
        submitted(
            batcher,
            [engine_request_of(request(name, 0.0), tokens) for name, tokens in lengths.items()],
        )
        await batcher.answered()
        free = {record.request_id: record.server_free_at for record in collector.records}
        assert idle.events == [(0, free[name]) for name in last]
        assert free["long"] == asyncio.get_running_loop().time()

    run_virtual(main())


@pytest.mark.parametrize("policy", [Single(), Continuous(max_batch_size=1)])
def test_who_waits_for_an_idle_engine_does_not_wait_until_answers_are_written(
    policy: Policy,
) -> None:
    class Slow(Immediate):
        def on_release(self) -> None: ...

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), policy)
        (sequence,) = batcher.submit([engine_request_of(request("one", 0.0), 5)], [Slow()])
        waiting = [asyncio.ensure_future(each) for each in (batcher.served(), batcher.emptied(0))]
        await asyncio.sleep(0.001)
        assert (batcher.in_service, [each.done() for each in waiting]) == (1, [False, False])
        await asyncio.sleep(1.0)
        assert (batcher.in_service, [each.done() for each in waiting]) == (0, [True, True])
        assert (sequence.outcome, batcher.unanswered) == (None, 1)
        sequence.released()

    run_virtual(main())


def test_one_that_the_engine_forgot_joins_the_rest_of_its_batch_again() -> None:
    given.clear()

    async def main() -> None:
        engine, collector = Noting(LAW), Collector()
        batcher = Batcher(engine, await engine.start(), Dynamic(), [collector])
        asked = submitted(
            batcher, [engine_request_of(request(name, 0.0), 50) for name in ("one", "other")]
        )
        await asyncio.sleep(0.01)
        lost = asked[0].sequence
        assert lost is not None
        assert detach(lost) is None
        with patch.object(engine, "cancel", wraps=engine.cancel) as cancelled:
            batcher.recovery.renew(lost)
        assert [call.args for call in cancelled.call_args_list] == [(["one"],)], (
            "the engine may still have it"
        )
        await batcher.answered()
        await asyncio.sleep(0)
        assert [each.tokens for each in asked] == [50, 50]
        assert [record.outcome for record in collector.records] == ["completed", "completed"]

    run_virtual(main())
    assert given == [(2, False), (1, True)]


class Hearing(Observer):
    """Notes each event, with the one whose it is."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def on_arrival(self, sequence: SequenceState) -> None:
        self.events.append(("arrival", sequence.id))

    def on_dispatch(self, batch: Batch) -> None:
        self.events.append(("dispatch", *(sequence.id for sequence in batch.sequences)))

    def on_idle(self, server_id: int, at: float) -> None:
        self.events.append(("idle", str(server_id)))

    def on_settle(self, sequence: SequenceState) -> None:
        self.events.append(("settle", sequence.id))

    def on_record(self, record: Record) -> None:
        self.events.append(("record", record.request_id))


def test_observers_hear_of_a_request_from_its_arrival_to_its_record() -> None:
    async def main() -> None:
        engine, hearing = EmulatedEngine(LAW), Hearing()
        batcher = Batcher(engine, await engine.start(), Single(), [hearing])
        submitted(batcher, [engine_request_of(request("a", 0.0), 5)])
        (left,) = submitted(batcher, [engine_request_of(request("b", 0.0), 5)])
        assert left.sequence is not None
        left.sequence.cancel()
        batcher.turn_away(Record(request_id="c", outcome="rejected"))
        await batcher.answered()
        assert hearing.events == [
            *(("arrival", "a"), ("dispatch", "a"), ("arrival", "b")),
            *(("settle", "b"), ("record", "b"), ("record", "c")),
            *(("idle", "0"), ("settle", "a"), ("record", "a")),
        ]

    run_virtual(main())


def test_a_request_without_a_prediction_is_said_once_where_the_policy_orders_by_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), parse_policy("single:order=spjf"))
        batcher.pause_dispatch(True)
        names = iter("abcdefgh")

        def said_of(*predictions: float | None) -> int:
            caplog.clear()
            submitted(
                batcher,
                [
                    engine_request_of(
                        request(next(names), 0.0, predicted_output_tokens=prediction), 5
                    )
                    for prediction in predictions
                ],
            )
            return sum("(said once)" in text for text in caplog.messages)

        assert [said_of(3.0, 9.0), said_of(3.0, None), said_of(None)] == [0, 1, 0]
        batcher.switch(parse_policy("single:order=priority"))
        assert said_of(None) == 0
        batcher.switch(parse_policy("single:order=spjf"))
        assert said_of(None) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        (Single(), 1),
        (Dynamic(), 5),
        (Continuous(max_batch_size=4), 4),
        (Continuous(max_batch_size=5), 5),
        (Continuous(max_batch_size=6), 5),
    ],
)
def test_the_largest_batch_is_within_the_bounds_of_policy_and_engine(
    policy: Policy, size: int
) -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW, max_num_seqs=5)
        batcher = Batcher(engine, await engine.start(), policy)
        assert batcher.effective_max_batch_size == size

    run_virtual(main())


class Turning(Unpadded):
    """Takes whoever it has dispatched out again at once."""

    name: ClassVar[str] = "turning"

    def decide(self, state: QueueState, now: float) -> Decision:
        (server,) = state.servers
        if server.in_service:
            return Preempt((server.in_service[0].request.id,))
        return Dispatch((state.waiting[0].request.id,), 0)


def test_a_policy_that_dispatches_and_preempts_without_end_is_stopped_at_the_second_dispatch() -> (
    None
):
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), Turning())
        submitted(batcher, [engine_request_of(request(name, 0.0), 5) for name in ("one", "other")])
        assert batcher.policy_failures.error == (
            "policy turning: got a second dispatch of 'one' at one instant; expected a WaitUntil"
        )
        assert [waiting.request.id for waiting in batcher.waiting] == ["one", "other"]
        batcher.switch(Single())
        await batcher.answered()
        assert batcher.policy_failures.error is None

    run_virtual(main())
