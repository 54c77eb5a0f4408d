"""A sequence's way back: what of the engine's tokens is its answer, and who is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.server.engines.base import EngineEnd, Token, TokenStream
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.continuing import interrupted, listen
from kendall.server.queue.proxied import sequence_of
from kendall.server.queue.sequence import SequenceState
from tests.server.harness import Collector, Immediate, engine_request_of
from tests.server.passed import Scripted
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.01, k2=0.1, k3=0.01, k4=0.05)


class Wary(Immediate):
    """Keeps how many tokens came each time; one that is told to fails over the text."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes: list[int] = []
        self.fails = False

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        if self.fails:
            raise RuntimeError("the transport is closed")
        super().on_text(text, tokens)
        self.pushes.append(len(tokens))


Served = tuple[SequenceState, Wary, Collector]


def serving(
    act: Callable[[Served], None],
    *,
    limit: int = 3,
    asked: int | None = None,
    policy: str = "continuous:max_batch_size=4",
    **sampling: Any,
) -> Served:
    """One request in service on an engine that has made nothing yet; `act` plays the engine, at
    once.
    """

    async def main() -> Served:
        engine, collector, consumer = EmulatedEngine(LAW), Collector(), Wary()
        batcher = Batcher(engine, await engine.start(), parse_policy(policy), [collector])
        request = Request(id="one", arrived_at=-2.0, prompt_tokens=2, max_output_tokens=limit)
        asking = msgspec.structs.replace(
            engine_request_of(request, None, **sampling), asked_output_tokens=asked
        )
        batcher.limit_tokens(limit)
        (sequence,) = batcher.submit([asking], [consumer])
        consumer.sequence = sequence
        assert sequence.running is not None
        act((sequence, consumer, collector))
        await engine.stop()
        return sequence, consumer, collector

    return run_virtual(main())


def words(*texts: str) -> list[Token]:
    """Tokens of these texts, their ids from 10 on."""
    return [Token(10 + index, text) for index, text in enumerate(texts)]


def pushed(*pushes: list[Token]) -> Callable[[Served], None]:
    """The engine hands over so many tokens at a time."""

    def act(served: Served) -> None:
        stream = served[0].stream
        assert stream is not None
        for tokens in pushes:
            stream.push(tokens)

    return act


FIVE = words("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("limit", "sampling", "pushes", "text", "ids", "taken", "reason"),
    [
        # by the limit: what one push holds beyond it is not the answer's
        (3, {}, [FIVE], "abc", [10, 11, 12], [3], "length"),
        (3, {}, [FIVE[:2], FIVE[2:]], "abc", [10, 11, 12], [2, 1], "length"),
        (5, {}, [FIVE], "abcde", [10, 11, 12, 13, 14], [5], "length"),
        (1, {}, [FIVE], "a", [10], [1], "length"),
        (6, {}, [FIVE], "abcde", [10, 11, 12, 13, 14], [5], None),
        # by a stop token in the middle, which is counted and not shown
        (9, {"stop_token_ids": (12,)}, [FIVE], "ab", [10, 11, 12], [3], "stop"),
        (
            9,
            {"stop_token_ids": (12,), "include_stop_str_in_output": True},
            [FIVE],
            "abc",
            [10, 11, 12],
            [3],
            "stop",
        ),
        # by a stop string over two tokens
        (9, {"stop": ("cd",)}, [FIVE], "ab", [10, 11, 12, 13], [4], "stop"),
        (9, {"stop": ("cd",)}, [FIVE[:3], FIVE[3:]], "ab", [10, 11, 12, 13], [3, 1], "stop"),
        # what comes behind the end is not heard
        (2, {}, [FIVE[:2], FIVE[2:], FIVE], "ab", [10, 11], [2], "length"),
    ],
)
def test_several_tokens_at_once_end_where_they_would_have_ended_one_by_one(
    limit: int,
    sampling: dict[str, Any],
    pushes: list[list[Token]],
    text: str,
    ids: list[int],
    taken: list[int],
    reason: str | None,
) -> None:
    sequence, consumer, _ = serving(pushed(*pushes), limit=limit, **sampling)
    assert (consumer.text, consumer.pushes, consumer.tokens) == (text, taken, sum(taken))
    assert (
        sequence.output_token_ids,
        sequence.stop_detector.output_tokens,
        sequence.stop_detector.finish_reason,
    ) == (
        ids,
        len(ids),
        reason,
    )
    assert sequence.outcome == (None if reason is None else "completed")


def test_a_record_counts_the_tokens_of_the_answer_only() -> None:
    _, _, collector = serving(pushed(FIVE))
    (record,) = collector.records
    assert (record.outcome, record.output_tokens, record.finish_reason) == (
        "completed",
        3,
        "length",
    )
    assert (record.server_id, record.batch_id, record.batch_size) == (0, 0, 1)
    assert (
        record.dispatched_at
        == record.first_token_at
        == record.last_token_at
        == record.released_at
        == 0.0
    )
    assert record.queueing_delay == record.sojourn_time == 2.0, "it came two seconds before"


def test_a_record_has_every_instant_of_a_request_and_its_waits_and_stints() -> None:
    """It waits from 1 s to 2 s, is served to 4 s, waits to 6 s while a limit changes, has its last
    token at 8.5 s and leaves at 9 s.
    """

    class Slow(Immediate):
        def on_release(self) -> None: ...

    async def main() -> tuple[Record, ...]:
        engine, collector, consumer = Scripted(), Collector(), Slow()
        policy = parse_policy("continuous:max_batch_size=2")
        batcher = Batcher(engine, engine.capabilities, policy, [collector])
        request = Request(
            id="one",
            arrived_at=1.0,
            prompt_tokens=7,
            max_output_tokens=9,
            predicted_output_tokens=5.5,
            flow="f",
        )
        asking = msgspec.structs.replace(
            engine_request_of(request, None),
            asked_output_tokens=9,
            client_request_id="mine",
            received_at=0.5,
        )
        await asyncio.sleep(1)
        batcher.limit_tokens(3)
        batcher.pause_dispatch(True)
        (sequence,) = batcher.submit([asking], [consumer])
        waiting = sequence.record()
        await asyncio.sleep(1)
        batcher.pause_dispatch(False)
        await asyncio.sleep(1)
        engine.streams["one"].cached_tokens = 4
        engine.streams["one"].push(FIVE[:1])
        await asyncio.sleep(1)
        batcher.pause_dispatch(True)
        batcher.put_back([sequence])
        await asyncio.sleep(1)
        assert sequence.queueing_delay() == 2.0
        batcher.switch()
        between = sequence.record()
        await asyncio.sleep(1)
        batcher.pause_dispatch(False)
        assert sequence.queueing_delay() == 3.0
        await asyncio.sleep(1)
        engine.streams["one"].push(FIVE[1:2])
        batcher.switch()
        await asyncio.sleep(1.5)
        engine.streams["one"].push(FIVE[2:])
        await asyncio.sleep(0.5)
        assert sequence.stints == ((2.0, 4.0, 0),)
        sequence.released()
        sequence.released()
        return (waiting, between, *collector.records)

    waiting, between, record = run_virtual(main())
    assert record == Record(
        request_id="one",
        client_request_id="mine",
        outcome="completed",
        policy="continuous:max_batch_size=2",
        epoch=1,
        server_id=0,
        batch_id=1,
        batch_size=1,
        received_at=0.5,
        arrived_at=1.0,
        first_dispatched_at=2.0,
        dispatched_at=6.0,
        first_token_at=3.0,
        last_token_at=8.5,
        released_at=9.0,
        server_free_at=8.5,
        queueing_delay=3.0,
        batch_forming_delay=0.0,
        service_time=4.5,
        sojourn_time=8.0,
        prompt_tokens=7,
        cached_tokens=4,
        output_tokens=3,
        max_output_tokens=3,
        predicted_output_tokens=5.5,
        finish_reason="length",
        clipped=True,
        flow="f",
        preemptions=1,
        interruptions=0,
    )
    assert (waiting.epoch, waiting.server_id, waiting.batch_id, waiting.batch_size) == (
        0,
        None,
        None,
        None,
    )
    assert (waiting.queueing_delay, waiting.batch_forming_delay, waiting.service_time) == (
        0.0,
        None,
        None,
    )
    assert (between.service_time, between.cached_tokens, between.sojourn_time) == (2.0, 4, None)
    assert between.epoch == 1, "the one in force, while it waits"
    assert (waiting.cached_tokens, waiting.finish_reason, waiting.clipped) == (None, None, False)


@pytest.mark.parametrize(
    ("asked", "pushes", "clipped"),
    [(9, [FIVE], True), (4, [FIVE], True), (3, [FIVE], False), (4, [FIVE[:2]], False)],
)
def test_clipped_is_what_the_gateway_ended_before_the_clients_own_limit(
    asked: int, pushes: list[list[Token]], clipped: bool
) -> None:
    sequence, _, _ = serving(pushed(*pushes), limit=3, asked=asked)
    assert sequence.clipped is clipped


def test_the_record_of_one_in_service_has_no_end_and_no_duration_yet() -> None:
    def act(served: Served) -> None:
        pushed(FIVE[:2])(served)
        record = served[0].record()
        assert (record.dispatched_at, record.output_tokens) == (0.0, 2)
        assert (record.server_free_at, record.service_time, record.sojourn_time) == (None,) * 3

    serving(act, limit=9)


def test_policies_see_how_far_it_is() -> None:
    seen: list[int] = []

    def act(served: Served) -> None:
        running = served[0].running
        assert running is not None
        for tokens in (FIVE[:2], FIVE[2:3]):
            pushed(tokens)(served)
            seen.append(running.output_tokens_so_far)

    serving(act, limit=9)
    assert seen == [2, 3]


@pytest.mark.parametrize(
    ("end", "text", "reason"), [("length", "abc", "length"), ("stop", "abc", "stop")]
)
def test_an_engine_that_ends_by_itself_gives_back_the_text_that_was_held(
    end: EngineEnd, text: str, reason: str
) -> None:
    """`c` may have been the beginning of a stop string."""

    def act(served: Served) -> None:
        pushed(FIVE[:3])(served)
        assert served[1].text == "ab"
        served[0].on_end(end)
        served[0].on_end(end)

    sequence, consumer, collector = serving(act, limit=9, stop=("cd",))
    assert (consumer.text, sequence.stop_detector.finish_reason, sequence.outcome) == (
        text,
        reason,
        "completed",
    )
    assert (consumer.tokens, collector.records[0].output_tokens, len(collector.records)) == (
        3,
        3,
        1,
    )


@pytest.mark.parametrize(
    "how", ["cancelled by the engine", "lost by the engine", "a consumer that fails"]
)
def test_an_answer_that_is_lost_fails_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def act(served: Served) -> None:
        sequence, consumer, _ = served
        pushed(FIVE[:1])(served)
        if how == "cancelled by the engine":
            sequence.on_end("cancelled")
        elif how == "lost by the engine":
            sequence.on_failure("no memory")
        else:
            consumer.fails = True
            pushed(FIVE[1:2])(served)
        consumer.fails = False
        sequence.on_tokens(FIVE)
        sequence.on_end("length")

    sequence, consumer, collector = serving(act, limit=9)
    code = "internal_error" if how == "a consumer that fails" else "engine_unavailable"
    assert consumer.failed == ("failed", code)
    assert consumer.text == "a"
    assert [record.outcome for record in collector.records] == ["failed"]
    assert sequence.outcome == "failed"
    logged = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in logged] == (
        ["internal error while handling a token of an answer"] if code == "internal_error" else []
    )


def test_a_member_of_a_padded_batch_that_ended_hears_no_more_and_leaves_with_the_others() -> None:
    async def main() -> None:
        engine, collector, consumers = EmulatedEngine(LAW), Collector(), (Wary(), Wary())
        batcher = Batcher(
            engine, await engine.start(), parse_policy("fixed:batch_size=2"), [collector]
        )
        requests = [
            engine_request_of(
                Request(id=name, arrived_at=0.0, prompt_tokens=2, max_output_tokens=limit), None
            )
            for name, limit in NAMED
        ]
        short, long = batcher.submit(requests, consumers)
        consumers[0].sequence, consumers[1].sequence = short, long
        assert short.stream is not None
        assert long.stream is not None
        short.stream.push(FIVE)
        short.stream.push(FIVE)
        short.stream.end("cancelled")
        assert (consumers[0].text, short.stop_detector.finish_reason, short.outcome) == (
            "abc",
            "length",
            None,
        )
        long.stream.push(FIVE)
        assert (short.outcome, long.outcome) == ("completed", "completed")
        assert [(record.request_id, record.output_tokens) for record in collector.records] == [
            ("short", 3),
            ("long", 4),
        ]
        await engine.stop()

    run_virtual(main())


NAMED = (("short", 3), ("long", 4))


# another engine in the middle of an answer


@pytest.mark.parametrize(
    ("sampling", "behind"),
    [
        ({}, (10, 11)),
        ({"seed": 5}, ()),
        ({"seed": 5, "temperature": 0.0}, (10, 11)),
        ({"presence_penalty": 0.5, "temperature": 0.0}, ()),
    ],
)
def test_what_goes_back_to_the_queue_begins_anew_where_it_cannot_go_on_behind_its_tokens(
    sampling: dict[str, Any], behind: tuple[int, ...]
) -> None:
    async def main() -> None:
        engine, consumer = Scripted(), Wary()
        batcher = Batcher(engine, engine.capabilities, parse_policy("continuous"))
        request = Request(id="one", arrived_at=0.0, prompt_tokens=2, max_output_tokens=9)
        (sequence,) = batcher.submit([engine_request_of(request, None, **sampling)], [consumer])
        engine.streams["one"].push(FIVE[:2])
        batcher.put_back([sequence])
        assert sequence.engine_request.output_token_ids == behind
        assert len(engine.dispatched) == 2
        engine.streams["one"].push(FIVE[len(behind) : 3])  # made again, and then what is new
        assert (consumer.text, sequence.output_token_ids) == ("abc", [10, 11, 12])

    run_virtual(main())


def resumed(sequence: SequenceState, most: int = 1) -> TokenStream:
    """The engine is lost, and the next one has its request."""
    assert interrupted(sequence, most) is None
    stream = TokenStream(sequence.id)
    listen(sequence, stream)
    return stream


def test_an_answer_without_a_seed_goes_on_behind_its_tokens() -> None:
    def act(served: Served) -> None:
        sequence, _, _ = served
        old = sequence.stream
        pushed(FIVE[:2])(served)
        stream = resumed(sequence)
        assert tuple(sequence.engine_request.output_token_ids) == (10, 11)
        assert stream.listener is sequence
        assert old is not None
        old.push(FIVE)  # what the dead one still had to say
        stream.push(FIVE[2:])

    sequence, consumer, _ = serving(act, limit=4)
    assert (consumer.text, sequence.output_token_ids, sequence.outcome) == (
        "abcd",
        [10, 11, 12, 13],
        "completed",
    )


@pytest.mark.parametrize(
    "pushes",
    [
        [FIVE],
        [FIVE[:1], FIVE[1:]],
        [FIVE[:2], FIVE[2:]],
        [FIVE[:1], FIVE[1:2], FIVE[2:3], FIVE[3:]],
    ],
)
def test_a_seeded_answer_is_made_again_and_only_what_is_new_is_shown(
    pushes: list[list[Token]],
) -> None:
    seen: list[int] = []

    def act(served: Served) -> None:
        sequence, _, _ = served
        pushed(FIVE[:2])(served)
        stream = resumed(sequence)
        assert tuple(sequence.engine_request.output_token_ids) == ()
        assert sequence.running is not None
        running = sequence.running
        for tokens in pushes:
            stream.push(tokens)
            seen.append(running.output_tokens_so_far)
        assert stream.listener is sequence, "it has stepped aside"

    sequence, consumer, _ = serving(act, limit=5, seed=7)
    assert (consumer.text, consumer.tokens, sequence.output_token_ids) == (
        "abcde",
        5,
        [10, 11, 12, 13, 14],
    )
    assert 0 not in consumer.pushes, "nothing is shown where nothing is new"
    assert sequence.outcome == "completed"
    assert seen == [sum(map(len, pushes[: count + 1])) for count in range(len(pushes))], (
        "how far the new engine is"
    )
    assert all(consumer.pushes), "it hears nothing where nothing is new"


@pytest.mark.parametrize("how", ["another token", "an early end", "lost again"])
def test_a_seeded_answer_that_is_not_reproduced_fails(how: str) -> None:
    def act(served: Served) -> None:
        pushed(FIVE[:2])(served)
        stream = resumed(served[0])
        stream.push(FIVE[:1])
        if how == "another token":
            stream.push([Token(99, "z"), *FIVE[2:]])
        elif how == "an early end":
            stream.end("stop")
        else:
            stream.fail("no memory")

    sequence, consumer, _ = serving(act, limit=9, seed=7)
    assert (consumer.failed, consumer.text, sequence.outcome) == (
        ("failed", "engine_unavailable"),
        "ab",
        "failed",
    )


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_that_saw_more_engines_die_than_allowed_is_given_up(most: int) -> None:
    def act(served: Served) -> None:
        sequence, _, _ = served
        for death in range(most):
            sequence.deaths = (*sequence.deaths, death)
            assert interrupted(sequence, most) is None
        sequence.deaths = (*sequence.deaths, most)
        assert f"{most + 1} engines" in (interrupted(sequence, most) or "")

    serving(act)


def test_a_whole_answer_is_not_given_up_with_its_engine() -> None:
    def act(served: Served) -> None:
        pushed(FIVE)(served)
        assert interrupted(served[0], 0) is None

    serving(act)


@pytest.mark.parametrize(("forced", "reason"), [(None, "stop"), (9, None)])
def test_the_models_last_token_ends_an_answer_unless_its_length_is_forced(
    forced: int | None, reason: str | None
) -> None:
    async def main() -> str | None:
        engine = EmulatedEngine(LAW)
        batcher = Batcher(engine, await engine.start(), parse_policy("single"), [Collector()])
        request = Request(id="one", arrived_at=0.0, prompt_tokens=2, max_output_tokens=20)
        asked = engine_request_of(request, forced)
        sequence = sequence_of(batcher, asked, frozenset({1}), Immediate())
        sequence.stop_detector.feed(Token(5, "a"))
        sequence.stop_detector.feed(Token(1, ""))
        return sequence.stop_detector.finish_reason

    assert run_virtual(main()) == reason
