"""An engine that dies or hangs under load, on virtual time: what was in service goes on or is
told, what waits keeps its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.queue.observers import Observer
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call, completion
from tests.server.mortal import Forgetful, MortalEngine, faulty, words
from tests.virtual_time import run_virtual

POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=3,max_wait=0.05",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=4",
    "continuous:max_batch_size=4",
]


def ask(app: Any, tokens: int, **fields: Any) -> Call:
    body = (
        completion(
            kendall_forced_output_tokens=tokens, max_tokens=300, stream=True, ignore_eos=False
        )
        | fields
    )
    return Call(app, "POST", "/v1/completions", body)


def text_of(made: Call) -> str:
    if made.status == 200 and made.headers["content-type"].startswith("text/event-stream"):
        return "".join(
            event["choices"][0]["text"]
            for event in made.events()
            if event != "[DONE]" and "choices" in event
        )
    return str(made.json()["choices"][0]["text"])


async def status(app: Any, path: str) -> int | None:
    return (await call(app, "GET", path)).status


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_engine_costs_time_and_nothing_else(policy: str) -> None:
    """Every answer whole and in order, the waiting in their order of arrival, one record each,
    what was in service says so.
    """

    async def main() -> None:
        async with faulty(policy) as (app, gateway, engine, records):
            lengths = [40, 7, 25, 60, 12, 33, 5, 18]
            calls = []
            for index, length in enumerate(lengths):
                calls.append(ask(app, length, stream=index % 2 == 0))
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.03)
            before = {
                request.request.id for server in gateway.batcher.running() for request in server
            }
            waiting = gateway.batcher.queue_length
            assert before
            engine.kill()
            assert (gateway.batcher.queue_length, gateway.batcher.recovery.down) == (waiting, True)
            assert {
                request.request.id for server in gateway.batcher.running() for request in server
            } == before
            for made in calls:
                await made.task
            assert [text_of(made) for made in calls] == [words(length) for length in lengths]
            assert Counter(record.outcome for record in records) == {"completed": len(lengths)}
            assert {record.request_id for record in records if record.interruptions} == before
            assert engine.life == 2
            assert [
                gateway.batcher.in_service,
                gateway.batcher.queue_length,
                gateway.batcher.unanswered,
            ] == [0, 0, 0]
            first = sorted(records, key=lambda record: (record.dispatched_at, record.arrived_at))
            assert [record.arrived_at for record in first] == sorted(
                record.arrived_at for record in records
            )

    run_virtual(main())


def test_a_padded_batch_goes_on_as_one_and_its_answers_leave_together() -> None:
    """A member whose own end came before the death is not made again, and leaves with the others
    after it.
    """

    async def main() -> None:
        async with faulty("fixed:batch_size=3") as (app, gateway, engine, records):
            calls = [ask(app, length) for length in (3, 50, 80)]
            await asyncio.sleep(0.04)
            assert gateway.batcher.in_service == 3
            engine.kill()
            await asyncio.gather(*(made.task for made in calls))
            again = engine.given[-1]
            assert (again.life, again.padded, len(again.requests)) == (2, True, 2)
            assert all(engine_request.output_token_ids for engine_request in again.requests)
            assert len({record.released_at for record in records}) == 1
            assert [text_of(made) for made in calls] == [words(length) for length in (3, 50, 80)]

    run_virtual(main())


def test_while_the_engine_restarts_new_requests_wait_and_the_probes_tell_the_truth() -> None:
    """Health 200 (leave it alone), ready 503; token ids are queued, texts wait for a tokenizer,
    all are served after it.
    """

    async def main() -> None:
        async with faulty("single") as (app, gateway, engine, records):
            engine.kill()
            assert (await status(app, "/health"), await status(app, "/ready")) == (200, 503)
            calls = [
                Call(app, "POST", "/v1/completions", completion(prompt=prompt))
                for prompt in ([1, 2], "some text", [3, 4], "more of it")
            ]
            await asyncio.sleep(1.0)
            assert gateway.batcher.queue_length == 2
            assert gateway.supervisor.statistics()["parked"] == 2
            assert (await call(app, "GET", "/admin/state")).json()["supervision"][
                "state"
            ] == "restarting"
            epoch = gateway.batcher.epoch
            for made in calls:
                await made.task
            assert [made.status for made in calls] == [200] * 4
            assert (await status(app, "/health"), await status(app, "/ready")) == (200, 200)
            assert {record.epoch for record in records} == {epoch + 1}, (
                "what waited for the restart is in no statistics of before"
            )
            assert b"kendall_engine_restarts 1.0" in (await call(app, "GET", "/metrics")).body

    run_virtual(main())


def test_an_engine_that_does_not_come_back_is_given_up_in_bounded_time() -> None:
    """Everyone is told, once, with 503; health says so; and the process is told to end."""

    async def main() -> None:
        engine = MortalEngine(parse_law(LAW), start_fails=99)
        supervision = SupervisionSettings(max_restarts=4, stuck_timeout=0)
        async with faulty("capped:max_batch_size=2", engine, supervision=supervision) as (
            app,
            gateway,
            _,
            records,
        ):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            calls = [ask(app, 50, stream=False) for _ in range(4)]
            text = Call(app, "POST", "/v1/completions", completion(prompt="a text"))
            await asyncio.sleep(0.02)
            engine.kill()
            at = gateway.now()
            late = Call(
                app, "POST", "/v1/completions", completion(prompt="a text that has to wait")
            )
            for made in (*calls, late):
                await made.task
            await text.task
            assert [made.status for made in (*calls, text, late)] == [503] * 6
            assert calls[0].headers["retry-after"]
            assert gateway.now() - at < 4 * (engine.start_takes + 4)
            assert len(ends) == 1
            assert (await status(app, "/health"), await status(app, "/ready")) == (503, 503)
            refused = await call(app, "POST", "/v1/completions", completion())
            assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert Counter(record.outcome for record in records) == {"failed": 5, "rejected": 2}

    run_virtual(main())


def test_failed_starts_are_tried_again() -> None:
    async def main() -> None:
        engine = MortalEngine(parse_law(LAW), start_fails=3)
        async with faulty("single", engine) as (app, gateway, _, _):
            made = ask(app, 30)
            await asyncio.sleep(0.02)
            engine.kill()
            await made.task
            assert (text_of(made), gateway.supervisor.restarts) == (words(30), 1)

    run_virtual(main())


def test_a_seeded_answer_is_made_again_and_compared() -> None:
    """From the start: its stream of chance begins at the first token. The client sees each token
    once.
    """

    async def main() -> None:
        async with faulty("continuous:max_batch_size=4") as (app, _, engine, records):
            seeded, plain = ask(app, 40, seed=7, temperature=0.8), ask(app, 40, temperature=0.8)
            await asyncio.sleep(0.03)
            engine.kill()
            await asyncio.gather(seeded.task, plain.task)
            again = {
                engine_request.sampling.seed: len(engine_request.output_token_ids)
                for given in engine.given
                if given.life == 2
                for engine_request in given.requests
            }
            assert again[7] == 0
            assert again[None] > 0
            assert text_of(seeded) == text_of(plain) == words(40)
            assert {record.outcome for record in records} == {"completed"}

    run_virtual(main())


def test_an_engine_that_does_not_reproduce_ends_the_seeded_answer_with_an_error() -> None:
    async def main() -> None:
        async with faulty("continuous:max_batch_size=4", Forgetful(parse_law(LAW))) as (
            app,
            _,
            engine,
            records,
        ):
            made = ask(app, 40, seed=7, temperature=0.8)
            await asyncio.sleep(0.03)
            engine.kill()
            await made.task
            error = made.events()[-2]["error"]
            assert "did not reproduce" in error["message"]
            assert made.events()[-1] == "[DONE]"
            assert "other" not in text_of(made)
            assert [record.outcome for record in records] == ["failed"]

    run_virtual(main())


def test_what_cannot_be_continued_exactly_is_told_at_once_and_the_others_go_on() -> None:
    """A presence penalty counts output tokens only: as part of a prompt the same tokens would
    not count.
    """

    async def main() -> None:
        async with faulty("capped:max_batch_size=4") as (app, gateway, engine, records):
            blocker = ask(app, 2)
            await asyncio.sleep(0.001)
            streamed, whole, plain = (
                ask(app, 40, presence_penalty=0.5),
                ask(app, 40, presence_penalty=0.5, stream=False),
                ask(app, 40),
            )
            await asyncio.sleep(0.03)
            assert gateway.batcher.in_service == 3
            at = gateway.now()
            engine.kill()
            await asyncio.gather(streamed.task, whole.task)
            assert gateway.now() == at
            assert (whole.status, whole.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "presence_penalty" in streamed.events()[-2]["error"]["message"]
            await asyncio.gather(plain.task, blocker.task)
            assert text_of(plain) == words(40)
            assert Counter(record.outcome for record in records) == {"completed": 2, "failed": 2}

    run_virtual(main())


def test_a_request_that_no_engine_survives_is_given_up_before_the_gateway_is() -> None:
    """Alone in service at its second death it is the cause: `tests/server/test_poison.py` has
    the rest.
    """

    async def main() -> None:
        async with faulty("single") as (app, gateway, engine, records):
            deadly = ask(app, 200)
            healthy, twin = ask(app, 5, prompt=[7]), ask(app, 5, stream=False)
            while not deadly.task.done():
                await asyncio.sleep(0.02)
                engine.kill("its work was too much")
            assert (
                "do not send it again (its work was too much)"
                in deadly.events()[-2]["error"]["message"]
            )
            await asyncio.gather(healthy.task, twin.task)
            assert text_of(healthy) == words(5)
            told = "another request with this prompt killed the engine; do not send it again"
            assert (twin.status, twin.json()["error"]["message"]) == (500, told)
            assert Counter(record.outcome for record in records) == {"failed": 2, "completed": 1}
            assert [record.interruptions for record in records] == [2, 0, 0]
            assert gateway.supervisor.restarts == 2

    run_virtual(main())


def test_a_request_that_saw_too_many_engines_die_is_given_up() -> None:
    """Where nobody is suspected (`suspect_after`), the count alone decides."""

    async def main() -> None:
        supervision = SupervisionSettings(max_interruptions=2, suspect_after=99, stuck_timeout=0)
        async with faulty("single", supervision=supervision) as (app, _, engine, records):
            deadly, healthy = ask(app, 200), ask(app, 5)
            while not deadly.task.done():
                await asyncio.sleep(0.02)
                engine.kill()
            assert (
                "3 engines were lost while this request was in service: it may be the cause"
                in deadly.events()[-2]["error"]["message"]
            )
            await healthy.task
            assert Counter(record.outcome for record in records) == {"failed": 1, "completed": 1}

    run_virtual(main())


def test_an_engine_that_makes_no_tokens_is_replaced() -> None:
    """It answers and lives, but nothing moves. Health stays 200: a probe that restarts the
    gateway would end the recovery.
    """

    async def main() -> None:
        supervision = SupervisionSettings(stuck_timeout=5.0)
        async with faulty("continuous:max_batch_size=2", supervision=supervision) as (
            app,
            gateway,
            engine,
            _,
        ):
            calls = [ask(app, 30) for _ in range(3)]
            await asyncio.sleep(0.01)
            engine.hang()
            at = gateway.now()
            while not gateway.lifecycle.stuck:  # noqa: ASYNC110
                await asyncio.sleep(0.25)
            assert 5.0 < gateway.now() - at < 8.0
            assert (await status(app, "/health"), await status(app, "/ready")) == (200, 503)
            await asyncio.gather(*(made.task for made in calls))
            assert (await status(app, "/health"), await status(app, "/ready")) == (200, 200)
            assert [text_of(made) for made in calls] == [words(30)] * 3
            assert "nothing moved" in gateway.supervisor.last_loss

    run_virtual(main())


def test_an_engine_that_takes_long_to_come_back_is_not_stuck() -> None:
    async def main() -> None:
        engine = MortalEngine(parse_law(LAW), start_takes=20.0)
        supervision = SupervisionSettings(stuck_timeout=5.0)
        async with faulty("single", engine, supervision=supervision) as (app, gateway, _, _):
            made = ask(app, 30)
            await asyncio.sleep(0.01)
            engine.kill()
            await asyncio.sleep(19.0)
            assert (gateway.lifecycle.stuck, gateway.supervisor.last_loss) == (None, "killed")
            await made.task
            assert (text_of(made), engine.life) == (words(30), 2)

    run_virtual(main())


def test_waiting_on_purpose_is_not_standing_still() -> None:
    """`fixed` waits for batch mates for as long as it takes."""

    async def main() -> None:
        async with faulty(
            "fixed:batch_size=2", supervision=SupervisionSettings(stuck_timeout=2.0)
        ) as (app, gateway, engine, _):
            first = ask(app, 5)
            await asyncio.sleep(50.0)
            assert (gateway.lifecycle.stuck, engine.life) == (None, 1)
            await asyncio.gather(first.task, ask(app, 5).task)

    run_virtual(main())


@pytest.mark.parametrize("policy", POLICIES)
def test_clients_that_leave_during_a_restart_and_a_switch_of_policy_lose_nothing(
    policy: str,
) -> None:
    async def main() -> None:
        async with faulty(policy) as (app, gateway, engine, records):
            calls = [ask(app, 30) for _ in range(6)]
            await asyncio.sleep(0.02)
            engine.kill()
            await asyncio.sleep(0.5)
            calls[0].leave()
            calls[-1].leave()
            await asyncio.sleep(0.5)
            assert (
                await call(app, "PUT", "/admin/policy", {"policy": "elastic:max_batch_size=2"})
            ).status == 200
            for made in calls:
                await made.task
            assert [text_of(made) for made in calls[1:-1]] == [words(30)] * 4
            assert Counter(record.outcome for record in records) == {"completed": 4, "cancelled": 2}
            assert (
                gateway.batcher.in_service,
                gateway.batcher.queue_length,
                gateway.batcher.unanswered,
            ) == (0, 0, 0)

    run_virtual(main())


def test_patience_runs_out_while_the_engine_restarts() -> None:
    async def main() -> None:
        async with faulty("single", patience=0.5) as (app, gateway, engine, _):
            serving, waiting = ask(app, 30), ask(app, 5)
            await asyncio.sleep(0.02)
            engine.kill()
            await waiting.task
            assert gateway.now() == pytest.approx(0.5)
            assert waiting.json()["error"]["code"] == "queue_timeout"
            await serving.task
            assert text_of(serving) == words(30)

    run_virtual(main())


def test_a_policy_that_raises_leaves_the_queue_as_it_is_and_is_asked_again() -> None:
    async def main() -> None:
        async with faulty("single") as (app, gateway, _, _):

            class Broken(type(gateway.batcher.policy)):
                __slots__ = ()

                def decide(self, state: Any, now: float) -> Any:
                    raise ZeroDivisionError

            sound = gateway.batcher.policy
            gateway.batcher.switch(Broken())
            calls = [ask(app, 5) for _ in range(3)]
            await asyncio.sleep(0.01)
            assert gateway.batcher.queue_length == 3
            assert gateway.batcher.policy_failures.error
            gateway.batcher.switch(sound)
            await asyncio.gather(*(made.task for made in calls))
            assert [text_of(made) for made in calls] == [words(5)] * 3
            assert gateway.batcher.policy_failures.error is None

    run_virtual(main())


def test_an_observer_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk under the record file, for example: told once, counted always."""

    async def main() -> None:
        async with faulty("capped:max_batch_size=2") as (app, gateway, _, records):

            class FullDisk(Observer):
                def full(self, *_: object) -> None:
                    raise OSError(28, "No space left on device")

                on_arrival = on_dispatch = on_idle = on_settle = on_record = full

            observers = gateway.batcher.observers
            observers.add(FullDisk(), first=True)
            calls = [ask(app, 5) for _ in range(4)]
            await asyncio.gather(*(made.task for made in calls))
            assert [text_of(made) for made in calls] == [words(5)] * 4
            assert Counter(record.outcome for record in records) == {"completed": 4}
            assert observers.faults > 4

    run_virtual(main())
    assert sum("it stays active" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("moment", ["on_dispatched", "on_text", "on_release"])
def test_a_bug_in_one_answer_ends_that_answer_only(
    moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with faulty("capped:max_batch_size=3") as (app, gateway, _, records):
            blocker = ask(app, 2)
            await asyncio.sleep(0.0005)
            calls = [ask(app, 10) for _ in range(3)]
            await asyncio.sleep(0.0005)
            assert gateway.batcher.queue_length == 3
            victim = list(gateway.batcher.unanswered_sequences())[2]  # the blocker is the first

            def fault(*_: Any) -> None:
                raise KeyError(moment)

            class Bad:
                def __init__(self, choice: Any) -> None:
                    self._choice = choice

                def __getattr__(self, name: str) -> Any:
                    return fault if name == moment else getattr(self._choice, name)

            victim.consumer = Bad(victim.consumer)
            await asyncio.gather(*(made.task for made in (blocker, *calls)))
            assert Counter(record.outcome for record in records) == {"completed": 3, "failed": 1}
            assert sorted(text_of(made) == words(10) for made in (calls[0], calls[2])) == [
                True,
                True,
            ]
            assert (gateway.batcher.in_service, gateway.batcher.unanswered) == (0, 0)

    run_virtual(main())
    what = "a token of an answer" if moment == "on_text" else "an answer"
    assert [each.getMessage() for each in caplog.records if each.exc_info] == [
        f"internal error while handling {what}"
    ]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("made", range(8, 14))
def test_a_stop_string_is_found_across_the_seam(made: int) -> None:
    """It spans tokens 10 to 12; the engine dies after each of the tokens around it."""

    async def main() -> None:
        stop = words(12).removeprefix(words(9))
        async with faulty("single") as (app, gateway, engine, records):
            request = ask(app, 40, stop=[stop])
            while not request.task.done() and engine.life == 1:
                await asyncio.sleep(0.0001)
                if any(
                    each.output_tokens_so_far == made
                    for server in gateway.batcher.running()
                    for each in server
                ):
                    engine.kill()
                    await asyncio.sleep(3.0)
            await request.task
            assert text_of(request) == words(9)
            assert records[0].interruptions == (1 if made < 12 else 0)
            assert records[0].finish_reason == "stop"

    run_virtual(main())
