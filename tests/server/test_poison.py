"""Requests that kill the engine: they are found and fail, their neighbours do not, and the
gateway stays up. Virtual time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.base import EngineRequest, TokenStream
from kendall.server.supervision.restarts import RestartBudget
from kendall.server.supervision.settings import SupervisionSettings
from tests.server.asgi import LAW, Call, call, completion
from tests.server.counts import tell
from tests.server.mortal import MortalEngine, SilentOnProofs, faulty, words
from tests.server.statuses import ADMIN_KEY, CLIENT_KEY, KEYS
from tests.virtual_time import run_virtual

MARK = 666
# seconds of a proof, until a suspect is looked at, and for which a prompt is refused
LIMIT, LOOK, REFUSED_FOR = 10.0, 0.05, 600.0
TRIAL_TOKENS = 16
BATCHED = [
    *(
        "dynamic",
        "fixed:batch_size=4,max_wait=0.0005",
        "capped:max_batch_size=4",
        "elastic:max_batch_size=4",
    ),
    "continuous:max_batch_size=4",
]


class Poisoned(MortalEngine):
    """Dies half a millisecond after it got a prompt with the mark, or with `behind` tokens made
    of it; `always`: whatever it got.
    """

    always = False
    behind = 0

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        streams = super().dispatch(server_id, requests, padded=padded, joining=joining)
        life = self.life
        for engine_request in requests:
            if self.always or (
                MARK in engine_request.prompt_token_ids
                and len(engine_request.output_token_ids) >= self.behind
            ):
                asyncio.get_running_loop().call_later(0.0005, self._poisoned, life)
        return streams

    def _poisoned(self, life: int) -> None:
        if self.life == life:
            self.kill("poison")


class Mute(SilentOnProofs, Poisoned):
    """Makes no token of the gateway's own request either."""


def ask(app: Any, prompt: list[int], tokens: int = 40, **fields: Any) -> Call:
    body = completion(
        prompt=prompt, kendall_forced_output_tokens=tokens, max_tokens=300, ignore_eos=False
    )
    return Call(app, "POST", "/v1/completions", body | fields)


def text_of(made: Call) -> str:
    return str(made.json()["choices"][0]["text"])


def test_ten_poison_calls_cost_a_hundred_innocents_nothing() -> None:
    """Acceptance A2: each of the ten has another prompt; eight in service together; the restart
    budget is the default, 8 in 10 minutes.
    """

    async def main() -> None:
        async with faulty("continuous:max_batch_size=8", Poisoned(parse_law(LAW))) as (
            app,
            gateway,
            _,
            records,
        ):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            innocents, poison = [], []
            for number in range(110):
                if number % 11 == 5:
                    poison.append(ask(app, [MARK, number]))
                else:
                    innocents.append(ask(app, [5, 6, number], stream=False))
                await asyncio.sleep(0.004)
            await asyncio.gather(*(made.task for made in (*innocents, *poison)))
            tell(
                "poison",
                restarts=gateway.supervisor.restarts,
                seconds=round(gateway.now(), 1),
                outcomes=Counter(r.outcome for r in records),
            )
            assert Counter(made.status for made in innocents) == {200: 100}
            assert {text_of(made) for made in innocents} == {words(40)}
            assert Counter(made.status for made in poison) == {500: 10}
            assert {made.json()["error"]["code"] for made in poison} == {"engine_killed"}
            assert {made.headers["x-should-retry"] for made in poison} == {"false"}
            assert Counter(record.outcome for record in records) == {"completed": 100, "failed": 10}
            assert (ends, gateway.supervisor.state, gateway.batcher.unanswered) == (
                [],
                "serving",
                0,
            )
            assert gateway.supervisor.restarts <= 30, "three at most for each"
            await asyncio.sleep(2 * LOOK)
            state = (await call(app, "GET", "/admin/state")).json()["supervision"]
            assert (state["convicted"], state["refused_prompts"], state["on_trial"]) == (
                10,
                10,
                False,
            )
            assert (
                b'kendall_failures_total{reason="engine_killed"} 10.0'
                in (await call(app, "GET", "/metrics")).body
            )

    run_virtual(main())


def test_poison_that_kills_in_the_middle_of_its_answer_is_found_too() -> None:
    """It kills when it comes back with tokens, so that each engine takes it for a while."""

    class Late(Poisoned):
        def dispatch(
            self,
            server_id: int,
            requests: Sequence[EngineRequest],
            *,
            padded: bool,
            joining: bool,
        ) -> list[TokenStream]:
            if any(
                MARK in engine_request.prompt_token_ids and not engine_request.output_token_ids
                for engine_request in requests
            ):
                asyncio.get_running_loop().call_later(0.02, self.kill, "poison")
            return super().dispatch(server_id, requests, padded=padded, joining=joining)

    async def main() -> None:
        engine = Late(parse_law(LAW))
        engine.behind = 1
        async with faulty("continuous:max_batch_size=4", engine) as (app, gateway, _, _):
            innocents = [ask(app, [5, 6, number], 100) for number in range(3)]
            guilty = ask(app, [MARK], 100)
            await asyncio.gather(guilty.task, *(made.task for made in innocents))
            assert [made.status for made in innocents] == [200] * 3
            assert {text_of(made) for made in innocents} == {words(100)}
            assert (guilty.status, gateway.batcher.recovery.trials.convicted) == (500, 1)

    run_virtual(main())


@pytest.mark.parametrize("policy", BATCHED)
def test_innocents_that_saw_two_engines_die_are_tried_one_at_a_time_and_complete(
    policy: str,
) -> None:
    """The queue waits meanwhile and /ready says so; each answer is whole."""

    async def main() -> None:
        async with faulty(policy) as (app, gateway, engine, records):
            blocker = ask(app, [1], 2)
            await asyncio.sleep(0.001)
            calls = [ask(app, [5, number], 60 + number) for number in range(4)]
            await asyncio.sleep(0.03)
            assert gateway.batcher.in_service == 4
            later = ask(app, [7], 5)
            for life in (1, 2):
                while engine.life != life or not engine.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.005)
                engine.kill()
            while engine.life != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.001)
            assert gateway.batcher.recovery.trials.suspect is not None
            assert [len(given.requests) for given in engine.given if given.life == 3] == [1]
            assert (await call(app, "GET", "/ready")).status == 503
            assert gateway.batcher.queue_length == 1
            await asyncio.gather(*(made.task for made in (blocker, *calls, later)))
            assert [text_of(made) for made in calls] == [words(60 + number) for number in range(4)]
            assert text_of(later) == words(5)
            assert [len(given.requests) for given in engine.given if given.life == 3][:4] == [1] * 4
            assert (await call(app, "GET", "/ready")).status == 200
            assert Counter(record.outcome for record in records) == {"completed": 6}
            assert gateway.batcher.recovery.trials.convicted == 0

    run_virtual(main())


def test_a_suspect_is_cleared_by_a_few_tokens_and_keeps_running() -> None:
    """The queue does not wait for whole answers."""

    async def main() -> None:
        async with faulty("continuous:max_batch_size=4") as (app, gateway, engine, _):
            calls = [ask(app, [5, number], 250) for number in range(4)]
            await asyncio.sleep(0.005)
            for life in (1, 2):
                while engine.life != life or not engine.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.002)
                engine.kill()
            while gateway.batcher.recovery.trials.suspect is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            while gateway.batcher.recovery.trials.suspect is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert not any(made.task.done() for made in calls)
            assert all(
                sequence.deaths == ()
                for server in gateway.batcher.in_service_sequences()
                for sequence in server
            )
            assert (
                min(running.output_tokens_so_far for running in gateway.batcher.running()[0])
                >= TRIAL_TOKENS
            )
            await asyncio.gather(*(made.task for made in calls))
            assert {text_of(made) for made in calls} == {words(250)}

    run_virtual(main())


def test_poison_alone_is_convicted_at_the_second_death_and_refused_for_its_caller_for_a_while() -> (
    None
):
    """By key and prompt: another key with the same prompt is asked about anew, and so is
    everybody after ten minutes.
    """

    async def main() -> None:
        async with faulty("single", Poisoned(parse_law(LAW)), **KEYS) as (
            app,
            gateway,
            engine,
            records,
        ):
            own, other = (
                {"authorization": f"Bearer {CLIENT_KEY}"},
                {"authorization": f"Bearer {ADMIN_KEY}"},
            )
            body = completion(prompt=[MARK, 1, 2])
            made = await call(app, "POST", "/v1/completions", body, own)
            assert (made.status, made.json()["error"]["code"], engine.life) == (
                500,
                "engine_killed",
                2,
            )
            await asyncio.sleep(5.0)
            assert (engine.life, gateway.supervisor.state) == (3, "serving")
            again = await call(app, "POST", "/v1/completions", body | {"n": 2}, own)
            error = again.json()["error"]
            assert (again.status, error["code"], error["param"]) == (400, "engine_killed", "prompt")
            assert "refused for 59" in error["message"]
            assert again.headers["x-should-retry"] == "false"
            assert engine.life == 3
            sound = await call(app, "POST", "/v1/completions", completion(prompt=[1, 2]), own)
            assert sound.status == 200
            assert (await call(app, "POST", "/v1/completions", body, other)).status == 500
            await asyncio.sleep(REFUSED_FOR)
            assert (await call(app, "POST", "/v1/completions", body, own)).status == 500
            assert Counter(record.outcome for record in records) == {
                "failed": 3,
                "rejected": 2,
                "completed": 1,
            }
            assert (
                b'kendall_rejections_total{reason="engine_killed"} 2.0'
                in (await call(app, "GET", "/metrics")).body
            )

    run_virtual(main())


def test_the_same_prompt_in_the_queue_fails_with_the_one_that_was_convicted() -> None:
    """A client that sends its poison twenty times costs two engines, not forty."""

    async def main() -> None:
        async with faulty("single", Poisoned(parse_law(LAW))) as (app, gateway, engine, _):
            calls = [ask(app, [MARK, 1]) for _ in range(20)]
            sound = ask(app, [1, 2], 5)
            await asyncio.gather(*(made.task for made in (*calls, sound)))
            assert [made.status for made in calls] == [500] * 20
            assert (sound.status, engine.life, gateway.batcher.recovery.trials.convicted) == (
                200,
                3,
                1,
            )

    run_virtual(main())


@pytest.mark.parametrize("together", [1, 20])
def test_poison_alone_does_not_end_the_gateway(together: int) -> None:
    """Twenty different prompts and no other request between them, one after the other or all at
    once; eight restarts in ten minutes.
    """

    async def main() -> None:
        async with faulty("continuous:max_batch_size=4", Poisoned(parse_law(LAW))) as (
            app,
            gateway,
            engine,
            records,
        ):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            given_back: list[int] = []
            forgive = gateway.batcher.recovery.trials.on_sound
            assert forgive is not None
            gateway.batcher.recovery.trials.on_sound = lambda deaths: (
                given_back.append(deaths),
                forgive(deaths),
            )[1]
            calls = []
            for number in range(20):
                calls.append(ask(app, [MARK, number]))
                if len(calls) % together == 0:
                    await calls[-1].task
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(made.status for made in calls) == {500: 20}
            assert {made.json()["error"]["code"] for made in calls} == {"engine_killed"}
            await asyncio.sleep(5.0)
            assert (ends, gateway.supervisor.state, gateway.batcher.recovery.trials.convicted) == (
                [],
                "serving",
                20,
            )
            assert sum(given_back) == gateway.supervisor.restarts == engine.life - 1, (
                "each death is given back once"
            )
            assert Counter(record.outcome for record in records) == {"failed": 20}, (
                "the gateway's own requests are in no record"
            )
            assert text_of(await call(app, "POST", "/v1/completions", completion())) == words(8)
            assert (await call(app, "GET", "/ready")).status == 200

    run_virtual(main())


def test_after_a_conviction_the_next_engine_proves_itself_before_the_queue_goes_on() -> None:
    """Not ready meanwhile; an engine that makes no token of the gateway's own request gives
    nothing back, and serves all the same.
    """

    async def main() -> None:
        async with faulty("single", Mute(parse_law(LAW))) as (app, gateway, engine, _):
            poison = ask(app, [MARK])
            later = ask(app, [1], 5)
            await poison.task
            while engine.life != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            began = gateway.now()
            await asyncio.sleep(1.0)
            assert gateway.batcher.recovery.trials.pauses_dispatch
            assert (await call(app, "GET", "/ready")).status == 503
            assert (await call(app, "GET", "/admin/state")).json()["supervision"]["proving"]
            served = asyncio.ensure_future(gateway.batcher.served())
            assert not gateway.batcher.idle
            assert not later.task.done()
            while gateway.batcher.recovery.trials.pauses_dispatch:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert gateway.now() - began == pytest.approx(LIMIT, abs=0.05)
            assert not served.done(), "a calibration waits for it"
            assert len(gateway.batcher.recovery.trials.explained) == 2
            await later.task
            await served
            assert later.status == 200
            assert not gateway.batcher.recovery.trials.explained, "an answer to a client is as good"

    run_virtual(main())


def test_an_answer_that_waits_for_a_proof_is_not_stuck() -> None:
    """The proof may take longer than --stuck-timeout."""

    async def main() -> None:
        supervision, engine = SupervisionSettings(stuck_timeout=5.0), Mute(parse_law(LAW))
        async with faulty(BATCHED[-1], engine, supervision=supervision) as (app, gateway, _, _):
            innocent, poison = ask(app, [5], 200), ask(app, [MARK])
            await poison.task
            assert poison.json()["error"]["code"] == "engine_killed"
            convicted_in = engine.life
            while not gateway.batcher.recovery.trials.proving:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert gateway.batcher.in_service == 1
            await asyncio.sleep(0.7 * LIMIT)
            assert gateway.lifecycle.stuck is None
            await innocent.task
            assert (text_of(innocent), engine.life) == (words(200), convicted_in + 1)

    run_virtual(main())


def test_who_waits_for_an_idle_engine_goes_on_when_the_proof_is_over() -> None:
    """A calibration: no other request ends meanwhile that would wake it."""

    async def main() -> None:
        async with faulty("single", Poisoned(parse_law(LAW))) as (app, gateway, _, _records):
            await ask(app, [MARK]).task
            trials = gateway.batcher.recovery.trials
            while not trials.proving:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert gateway.batcher.unanswered == gateway.batcher.in_service == 0
            served = asyncio.ensure_future(gateway.batcher.served())
            while trials.pauses_dispatch:
                assert not gateway.batcher.idle
                assert not served.done()
                await asyncio.sleep(0.001)
            assert gateway.batcher.idle
            await asyncio.sleep(0.001)
            assert served.done()

    run_virtual(main())


def test_a_proof_ends_where_every_unanswered_request_has_failed() -> None:
    """The engine is gone for good, or the gateway ends."""

    async def main() -> None:
        async with faulty("single", Mute(parse_law(LAW))) as (app, gateway, _, _records):
            await ask(app, [MARK]).task
            recovery = gateway.batcher.recovery
            while not recovery.tries:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert recovery.statistics()["proving"]
            gateway.batcher.fail_all("engine_unavailable", "the engine is gone")
            assert not recovery.tries
            assert not recovery.statistics()["proving"]

    run_virtual(main())


def test_an_engine_that_dies_of_everything_is_given_up_all_the_same() -> None:
    """A convicted request counts for nothing as long as no engine has made tokens of something
    else, the gateway's own request included.
    """

    async def main() -> None:
        engine = Poisoned(parse_law(LAW))
        engine.always = True
        async with faulty("continuous:max_batch_size=4", engine) as (app, gateway, _, records):
            ends: list[str] = []
            gateway.on_given_up = ends.append
            calls = [ask(app, [number]) for number in range(40)]
            await asyncio.gather(*(made.task for made in calls))
            assert (len(ends), gateway.supervisor.restarts) == (1, 8)
            assert set(Counter(made.status for made in calls)) == {500, 503}
            assert Counter(record.outcome for record in records) == {"failed": 40}

    run_virtual(main())


def test_a_request_whose_first_engine_was_killed_from_outside_is_no_suspect() -> None:
    async def main() -> None:
        async with faulty("single") as (app, gateway, engine, _):
            made = ask(app, [1], 30)
            await asyncio.sleep(0.02)
            engine.kill()
            await made.task
            assert (made.status, gateway.batcher.recovery.trials.convicted) == (200, 0)

    run_virtual(main())


def test_a_suspect_whose_client_leaves_ends_its_trial() -> None:
    async def main() -> None:
        async with faulty("continuous:max_batch_size=2") as (app, gateway, engine, records):
            calls = [ask(app, [5, number], 200) for number in range(2)]
            for life in (1, 2):
                while engine.life != life or not engine.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.005)
                engine.kill()
            calls[0].leave()
            await asyncio.sleep(0.1)
            while gateway.batcher.recovery.trials.suspect is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            calls[1].leave()
            await asyncio.sleep(0.2)
            assert gateway.batcher.recovery.trials.suspect is None
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(record.outcome for record in records) == {"cancelled": 2, "completed": 1}

    run_virtual(main())


def test_forgiven_losses_do_not_count() -> None:
    budget = RestartBudget(2, 100.0, 300.0)
    assert [budget.next_wait(at, at - 1.0) for at in (10.0, 11.0)] == [0.0, 0.5]
    budget.forgive(2)
    assert [budget.next_wait(at, at - 1.0) for at in (12.0, 13.0, 14.0)] == [0.0, 0.5, None]
    budget.forgive(99)
    assert budget.next_wait(15.0, None) == 0.0
