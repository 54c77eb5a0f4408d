"""A sequence that the engine has forgotten, while others move: it is continued once, or fails
with 504. Virtual time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.gateway import Gateway
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call, completion
from tests.server.mortal import Forgetful, MortalEngine, faulty, words
from tests.virtual_time import run_virtual

WATCHED = SupervisionSettings(stuck_timeout=5.0)


def ask(app: Any, tokens: int, **fields: Any) -> Call:
    body = completion(kendall_forced_output_tokens=tokens, max_tokens=1900, ignore_eos=False)
    return Call(app, "POST", "/v1/completions", body | fields)


def text_of(made: Call) -> str:
    return str(made.json()["choices"][0]["text"])


def forget(engine: MortalEngine, gateway: Gateway, place: int = 0) -> None:
    """The engine has no such sequence any more, and says nothing of it."""
    engine.cancel(
        [[running for server in gateway.batcher.running() for running in server][place].request.id]
    )


async def others(app: Any) -> None:
    """Somebody always moves."""
    while True:
        assert (
            await call(app, "POST", "/v1/completions", completion(max_tokens=1500))
        ).status == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"seed": 7, "temperature": 0.8}])
def test_one_lost_sequence_of_four_goes_on_where_it_was(
    sampling: dict[str, Any], streamed: bool
) -> None:
    """Not the engine is replaced: the others are served as ever."""

    async def main() -> None:
        async with faulty("continuous:max_batch_size=4", supervision=WATCHED) as (
            app,
            gateway,
            engine,
            records,
        ):
            lost = ask(app, 200, stream=streamed, **sampling)
            await asyncio.sleep(0.05)
            busy = [asyncio.create_task(others(app)) for _ in range(3)]
            await asyncio.sleep(0.01)
            forget(engine, gateway)
            at = gateway.now()
            await lost.task
            assert 5.0 < gateway.now() - at < 9.0
            text = (
                "".join(event["choices"][0]["text"] for event in lost.events()[:-1])
                if streamed
                else text_of(lost)
            )
            assert text == words(200)
            assert (engine.life, gateway.supervisor.restarts, gateway.lifecycle.stuck) == (
                1,
                0,
                None,
            )
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
            assert (
                next(record for record in records if record.output_tokens == 200).outcome
                == "completed"
            )

    run_virtual(main())


@pytest.mark.parametrize(("slots", "lost"), [(4, 2), (8, 6)])
def test_several_lost_sequences_go_on_while_the_rest_moves(slots: int, lost: int) -> None:
    async def main() -> None:
        async with faulty(f"continuous:max_batch_size={slots}", supervision=WATCHED) as (
            app,
            gateway,
            engine,
            _,
        ):
            calls = [ask(app, 300 + number) for number in range(lost)]
            await asyncio.sleep(0.05)
            busy = [asyncio.create_task(others(app)) for _ in range(slots - lost)]
            await asyncio.sleep(0.01)
            for place in range(lost):
                forget(engine, gateway, place)
            await asyncio.gather(*(made.task for made in calls))
            assert [text_of(made) for made in calls] == [
                words(300 + number) for number in range(lost)
            ]
            assert engine.life == 1
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    run_virtual(main())


def test_a_sequence_that_is_lost_twice_fails_with_504_and_has_its_own_counter() -> None:
    async def main() -> None:
        async with faulty("continuous:max_batch_size=4", supervision=WATCHED) as (
            app,
            gateway,
            engine,
            records,
        ):
            lost = ask(app, 500)
            await asyncio.sleep(0.05)
            busy = asyncio.create_task(others(app))
            await asyncio.sleep(0.01)
            forget(engine, gateway)
            while len([given for given in engine.given if given.requests[0].output_token_ids]) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            forget(engine, gateway)
            await lost.task
            error = lost.json()["error"]
            assert (lost.status, error["code"], error["type"]) == (
                504,
                "sequence_stalled",
                "server_error",
            )
            assert "no token of this answer for" in error["message"]
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)
            assert Counter(record.outcome for record in records)["failed"] == 1
            assert gateway.batcher.failures == {"sequence_stalled": 1}
            assert (
                b'kendall_failures_total{reason="sequence_stalled"} 1.0'
                in (await call(app, "GET", "/metrics")).body
            )
            assert (gateway.batcher.in_service, engine.life) == (0, 1)

    run_virtual(main())


def test_what_cannot_be_continued_exactly_fails_at_the_first_stall() -> None:
    async def main() -> None:
        async with faulty("continuous:max_batch_size=4", supervision=WATCHED) as (
            app,
            gateway,
            engine,
            _,
        ):
            lost = ask(app, 500, presence_penalty=0.5)
            await asyncio.sleep(0.05)
            busy = asyncio.create_task(others(app))
            await asyncio.sleep(0.01)
            forget(engine, gateway)
            await lost.task
            assert lost.status == 504
            assert "presence_penalty" in lost.json()["error"]["message"]
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)

    run_virtual(main())


def test_an_answer_that_is_not_reproduced_after_a_stall_fails() -> None:
    class Other(Forgetful):
        """As if its second answer to the same question differed."""

        def dispatch(self, *arguments: Any, **options: Any) -> Any:
            self.life += bool(self.given)
            return super().dispatch(*arguments, **options)

    async def main() -> None:
        async with faulty(
            "continuous:max_batch_size=2", Other(parse_law(LAW)), supervision=WATCHED
        ) as (app, gateway, engine, _):
            lost = ask(app, 500, seed=7, temperature=0.8)
            await asyncio.sleep(0.05)
            busy = asyncio.create_task(others(app))
            await asyncio.sleep(0.01)
            forget(engine, gateway)
            await lost.task
            assert "did not reproduce" in lost.json()["error"]["message"]
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)

    run_virtual(main())


@pytest.mark.parametrize(
    "policy",
    ["capped:max_batch_size=3", "elastic:max_batch_size=3", "dynamic", "fixed:batch_size=3"],
)
def test_a_lost_member_of_a_batch_joins_its_batch_again(policy: str) -> None:
    """The batch waits for it, as for any member that takes long."""

    async def main() -> None:
        law = parse_law("k1=0,k2=1e-3,k3=0,k4=0.01")
        async with faulty(policy, MortalEngine(law), law, supervision=WATCHED) as (
            app,
            gateway,
            engine,
            records,
        ):
            blocker = ask(app, 1)
            await asyncio.sleep(0.0001)
            calls = [
                ask(app, tokens)
                for tokens in ((30, 1400) if policy.startswith("fixed") else (30, 40, 1400))
            ]
            await asyncio.sleep(0.1)
            assert gateway.batcher.in_service == 3
            forget(engine, gateway, 1 if policy.startswith("fixed") else 0)
            await asyncio.gather(*(made.task for made in (*calls, blocker)))
            assert [text_of(made) for made in calls] == [
                words(tokens) for tokens in ((30, 1400) if len(calls) == 2 else (30, 40, 1400))
            ]
            assert (engine.life, Counter(record.outcome for record in records)) == (
                1,
                {"completed": len(calls) + 1},
            )

    run_virtual(main())


def test_an_engine_that_hangs_while_more_keep_arriving_is_replaced() -> None:
    """An arrival that joins the others in a hanging engine is no progress of it."""

    async def main() -> None:
        async with faulty("continuous:max_batch_size=64", supervision=WATCHED) as (
            app,
            gateway,
            engine,
            _,
        ):
            calls = [ask(app, 30)]
            await asyncio.sleep(0.01)
            engine.hang()
            at = gateway.now()
            while engine.life == 1:
                calls.append(ask(app, 30))
                await asyncio.sleep(0.5)
                assert gateway.now() - at < 15.0, "nobody noticed"
            await asyncio.gather(*(made.task for made in calls))
            assert {text_of(made) for made in calls} == {words(30)}

    run_virtual(main())


def test_a_slow_law_gives_every_sequence_its_twenty_steps() -> None:
    """A step of 2 s: 5 s without a token are nothing."""

    async def main() -> None:
        law, hasty = parse_law("k1=0,k2=0,k3=0,k4=2"), SupervisionSettings(stuck_timeout=1.0)
        async with faulty(
            "continuous:max_batch_size=2", MortalEngine(law), law, supervision=hasty
        ) as (app, gateway, engine, _):
            calls = [ask(app, 5), ask(app, 9)]
            await asyncio.gather(*(made.task for made in calls))
            assert [made.status for made in calls] == [200, 200]
            assert (len(engine.given), gateway.supervisor.restarts) == (2, 0)

    run_virtual(main())
