"""The engine in an actor, on a stand-in for Ray: what it asks of the actor, what it does when that
dies, hangs or does not start, and what becomes of its streams.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from kendall.queueing.latency.law import parse_law
from kendall.server.engines.base import (
    NOT_RUNNING,
    EngineEnd,
    EngineRequest,
    EngineStartError,
    FailureCode,
    InvalidPromptError,
    Sampling,
    Step,
    Token,
    TokenStream,
)
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.engines.ray.engine import ANSWER, PING_EVERY, STOP, RayEngine
from tests.eventually import eventually
from tests.server.asgi import LAW, SLOW, call
from tests.server.ray.actors import actors
from tests.server.ray.fake_ray import FakeActor, Ray, RayError, connected, faked
from tests.server.ray.test_messages import Trace, request
from tests.virtual_time import run_virtual

HANG = 3.0  # seconds
MAKE = partial(EmulatedEngine, parse_law(LAW))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    with connected(monkeypatch) as module:
        yield module


class Heard:
    """Listens to one stream, and lets it go at its end, as a gateway does."""

    def __init__(self, engine: RayEngine, stream: TokenStream) -> None:
        stream.listener = self
        self._let_go = partial(engine.cancel, [stream.request_id])
        self.tokens = 0
        self.ended: str | None = None

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        self.tokens += len(tokens)
        if tokens[-1].ends:
            self.ended = "at its length"
            self._let_go()

    def on_end(self, end: EngineEnd) -> None:
        self.ended = str(end)

    def on_failure(self, message: str, code: FailureCode = "engine_unavailable") -> None:
        assert self.ended is None
        self.ended = f"{code}: {message}"


class Told:
    """An engine that is up, and what it tells its gateway."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self.steps, self.deaths = list[Step](), list[tuple[float, str]]()
        engine.on_step = self.steps.append
        engine.on_death = lambda why: self.deaths.append((asyncio.get_running_loop().time(), why))

    def serve(self, *requests: EngineRequest, joining: bool = True) -> list[Heard]:
        streams = self.engine.dispatch(0, requests, padded=False, joining=joining)
        assert [each.request_id for each in streams] == [each.request.id for each in requests]
        return [Heard(self.engine, each) for each in streams]


def served(
    main: Callable[[Told], Coroutine[Any, Any, object]],
    make: Callable[[], Any] = MAKE,
    **options: Any,
) -> None:
    """On virtual time, with an engine that is up and that is stopped afterwards."""

    async def whole() -> None:
        there = Told(RayEngine(make, hang_timeout=HANG, **options))
        await there.engine.start()
        try:
            await main(there)
        finally:
            await there.engine.stop()

    run_virtual(whole())


# what passes


def test_what_is_dispatched_is_answered_and_each_step_is_told(ray: Ray) -> None:
    async def main(there: Told) -> None:
        heard = there.serve(request(0, 9), request(1, 4))
        await eventually(lambda: all(each.ended for each in heard))
        assert [each.tokens for each in heard] == [9, 4]
        assert {each.ended for each in heard} == {"at its length"}
        first = there.steps[0]
        assert (first.running, first.admitted, first.prompt_tokens, first.server_id) == (2, 2, 6, 0)
        assert [step.at for step in there.steps] == sorted({step.at for step in there.steps})
        assert there.deaths == []

    served(main)
    assert ray.actors[0].asked[:2] == ["start", "process_id"]


def test_an_engine_says_what_it_is_and_where(ray: Ray) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE)
        assert not await engine.healthy()
        capabilities = await engine.start()
        assert capabilities.engine == "emulated"
        assert capabilities.versions["ray"] == "2.0-fake"
        assert engine.process_id is not None
        assert await engine.healthy()
        await engine.stop()
        assert not await engine.healthy()

    run_virtual(main())


def test_orders_are_taken_in_turn_though_calls_overtake_each_other(ray: Ray) -> None:
    """A request that is cancelled at once is never served, and those around it are."""

    async def main(there: Told) -> None:
        heard = []
        for number in range(9):
            heard += there.serve(request(number, 5))
            if number % 2:
                there.engine.cancel([f"r{number}"])
        await asyncio.sleep(1)
        assert [each.tokens for each in heard] == [5, 0, 5, 0, 5, 0, 5, 0, 5]

    served(main)


class Noting(EmulatedEngine):
    """Keeps what it was asked; an actor of the stand-in is in this process."""

    noted: list[Any] = []

    def dispatch(self, server_id: int, requests: Any, *, padded: bool, joining: bool) -> Any:
        self.noted.append((server_id, padded, joining, [each.trace for each in requests]))
        return super().dispatch(server_id, requests, padded=padded, joining=joining)

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [len(text), int(special_tokens)]

    async def encode_chat(self, messages: Any, template_arguments: Any) -> list[int]:
        if not messages:
            raise InvalidPromptError("got no messages; expected one")
        return [len(messages), len(template_arguments)]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    kept: list[Any] = []
    monkeypatch.setattr(Noting, "noted", kept)
    return kept


NOTING = partial(Noting, parse_law(LAW))


def test_how_a_batch_is_to_be_served_reaches_the_engine(ray: Ray, noted: list[Any]) -> None:
    async def main(there: Told) -> None:
        for padded, joining in ((True, False), (False, True), (False, False)):
            there.engine.dispatch(3, [request(0, 1)], padded=padded, joining=joining)
            await asyncio.sleep(1)

    served(main, NOTING)
    assert noted == [(0, True, False, [None]), (0, False, True, [None]), (0, False, False, [None])]


def test_a_trace_travels_as_its_headers(ray: Ray, noted: list[Any]) -> None:
    async def main(there: Told) -> None:
        there.serve(request(7, 1, trace=Trace()), request(8, 1))
        await asyncio.sleep(1)

    served(main, NOTING)
    ((*_, (trace, none)),) = noted
    assert trace.handed_on("r7") == {"traceparent": "00-r7-01"}
    assert none is None


def test_a_listener_that_fails_costs_its_own_answer_alone(ray: Ray) -> None:
    class Failing(Heard):
        def on_tokens(self, tokens: Sequence[Token]) -> None:
            raise ValueError("no room")

    async def main(there: Told) -> None:
        said: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told))
        streams = there.engine.dispatch(
            0, [request(0, 9), request(1, 9)], padded=False, joining=True
        )
        failing, well = Failing(there.engine, streams[0]), Heard(there.engine, streams[1])
        await asyncio.sleep(1)
        assert failing.ended == "internal_error: internal error while handling a token: no room"
        assert (well.tokens, well.ended) == (9, "at its length")
        assert [told["message"] for told in said] == ["a token listener failed"]
        # the engine was told to let it go
        assert sum(step.running for step in there.steps) < 18

    served(main)


def test_no_order_is_sent_for_what_is_not_there(ray: Ray) -> None:
    async def main(there: Told) -> None:
        there.engine.cancel(["never"])
        (heard,) = there.serve(request(0, 3))
        await eventually(lambda: heard.ended)
        there.engine.cancel(["r0"])
        await asyncio.sleep(0.1)
        assert ray.actors[0].asked.count("take") == 2  # it was dispatched, and let go

    served(main)


# prompts


def test_prompts_are_read_in_the_actor(ray: Ray, noted: list[Any]) -> None:
    async def main(there: Told) -> None:
        engine = there.engine
        assert await engine.encode("abc") == [3, 1]
        assert await engine.encode("abc", special_tokens=False) == [3, 0]
        chat = [{"role": "user", "content": "a"}]
        assert await engine.encode_chat(chat, {"a": 1, "b": 2}) == [1, 2]
        assert engine.decode((305, 306)) == EmulatedEngine(parse_law(LAW)).decode([305, 306])
        sampling = Sampling(max_tokens=3)
        assert await engine.check_sampling(sampling) == sampling
        # what the engine raises there is raised here, as itself
        with pytest.raises(InvalidPromptError, match="got no messages; expected one"):
            await engine.encode_chat([], {})

    served(main, NOTING)


def test_a_question_is_given_up_after_its_limit(ray: Ray) -> None:
    async def main() -> None:
        engine, loop = RayEngine(MAKE, hang_timeout=10 * ANSWER), asyncio.get_running_loop()
        await engine.start()
        ray.actors[0].hang()
        began = loop.time()
        with pytest.raises(RuntimeError, match=f"did not answer within {ANSWER:g} s"):
            await engine.encode("abc")
        assert loop.time() - began == ANSWER == 30
        with pytest.raises(TimeoutError, match="after 5 s"):
            engine.decode([305])
        await engine.stop()

    run_virtual(main())


def test_an_engine_that_does_not_run_says_so(ray: Ray) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE)
        await engine.start()
        await engine.stop()
        asked: list[Callable[[], Any]] = [
            lambda: engine.encode("abc"),
            lambda: engine.encode_chat([], {}),
            lambda: engine.check_sampling(Sampling(max_tokens=1)),
        ]
        for ask in asked:
            with pytest.raises(RuntimeError, match=NOT_RUNNING):
                await ask()
        with pytest.raises(RuntimeError, match=NOT_RUNNING):
            engine.decode([305])
        (stream,) = engine.dispatch(0, [request(0, 3)], padded=False, joining=True)
        heard = Heard(engine, stream)
        engine.cancel(["r0"])
        await asyncio.sleep(0)
        assert heard.ended == f"engine_unavailable: {NOT_RUNNING}"
        assert ray.actors[0].asked.count("take") == 0

    run_virtual(main())


# losses


def test_an_actor_that_dies_is_told_once_and_fails_its_streams(ray: Ray) -> None:
    async def main(there: Told) -> None:
        heard = there.serve(request(0, 900), request(1, 900))
        await eventually(lambda: min(each.tokens for each in heard) > 5)
        ray.actors[0].die()
        died = asyncio.get_running_loop().time()
        await asyncio.sleep(PING_EVERY)
        asked = list(ray.actors[0].asked)
        await asyncio.sleep(2 * (PING_EVERY + HANG))
        assert ray.actors[0].asked == asked  # it is left alone
        (death,) = there.deaths
        assert death == (died, "the actor ended: The actor died")
        assert [each.ended for each in heard] == [f"engine_unavailable: {death[1]}"] * 2
        assert not await there.engine.healthy()
        # it comes up in a new actor, whose orders have numbers of their own
        await there.engine.start()
        assert await there.engine.healthy()
        (again,) = there.serve(request(2, 5))
        await eventually(lambda: again.ended)
        assert (again.tokens, len(ray.actors), len(there.deaths)) == (5, 2, 1)

    served(main)


def test_streams_fail_after_the_death_is_told(ray: Ray) -> None:
    """Sequences that continue on another server have lost their listeners before."""

    async def main(there: Told) -> None:
        streams = there.engine.dispatch(0, [request(0, 900)], padded=False, joining=True)
        heard = Heard(there.engine, streams[0])

        def take_away(_: str) -> None:
            streams[0].listener = None

        there.engine.on_death = take_away
        await eventually(lambda: heard.tokens > 5)
        ray.actors[0].die()
        await asyncio.sleep(1)
        assert heard.ended is None

    served(main)


@pytest.mark.parametrize(("options", "limit"), [({}, 15), ({"hang_timeout": 3.0}, 3)])
def test_an_actor_that_hangs_is_lost_after_the_limit(
    ray: Ray, options: dict[str, Any], limit: float
) -> None:
    """It is asked every two seconds."""

    async def main() -> None:
        engine = RayEngine(partial(EmulatedEngine, parse_law(SLOW)), **options)
        now = asyncio.get_running_loop().time
        there = Told(engine)
        await engine.start()
        (heard,) = there.serve(request(0, 100_000))
        await asyncio.sleep(6.5)
        assert ray.actors[0].asked.count("healthy") == 3
        assert there.deaths == []
        ray.actors[0].hang()
        began = now()
        assert not await engine.healthy()
        assert now() == began + limit
        await asyncio.sleep(20)
        assert there.deaths == [(8 + limit, f"the actor did not answer within {limit} s")]
        assert heard.ended == f"engine_unavailable: {there.deaths[0][1]}"
        assert ray.actors[0].dead
        await engine.stop()

    run_virtual(main())


def test_what_its_engine_says_of_its_own_death_is_told(ray: Ray) -> None:
    async def main(there: Told) -> None:
        (heard,) = there.serve(request(0, 900))
        await eventually(lambda: heard.tokens > 5)
        ray.actors[0].served._engine.on_death("out of memory")
        await asyncio.sleep(2 * (PING_EVERY + HANG))
        assert [why for _, why in there.deaths] == ["out of memory"]
        assert heard.ended == "engine_unavailable: out of memory"
        assert ray.actors[0].dead

    served(main)


class Ailing(EmulatedEngine):
    well = True

    async def healthy(self) -> bool:
        if not self.well:
            raise ValueError("no pulse\nat all")
        return True


def test_an_actor_that_answers_with_an_error_is_lost(ray: Ray) -> None:
    async def main(there: Told) -> None:
        (heard,) = there.serve(request(0, 100_000))
        ray.actors[0].served._engine.well = False
        assert not await there.engine.healthy()
        await asyncio.sleep(3 * PING_EVERY)
        assert there.deaths == [(PING_EVERY, "the actor ended: no pulse")]
        assert heard.ended == "engine_unavailable: the actor ended: no pulse"

    served(main, partial(Ailing, parse_law(SLOW)))


def test_an_actor_whose_messages_end_is_lost(ray: Ray) -> None:
    async def main(there: Told) -> None:
        (heard,) = there.serve(request(0, 900))
        await eventually(lambda: heard.tokens > 5)
        ray.actors[0].last_message.set_result(None)
        await asyncio.sleep(1)
        assert [why for _, why in there.deaths] == ["the actor sends no more messages"]
        assert heard.ended == "engine_unavailable: the actor sends no more messages"
        assert ray.actors[0].dead

    served(main)


def test_a_death_that_nobody_asks_about_is_survived(ray: Ray) -> None:
    async def main(there: Told) -> None:
        there.engine.on_death = there.engine.on_step = None
        (heard,) = there.serve(request(0, 900))
        await eventually(lambda: heard.tokens > 5)
        ray.actors[0].die()
        await eventually(lambda: heard.ended)
        assert heard.ended == "engine_unavailable: the actor ended: The actor died"

    served(main)


# life


def test_a_second_start_ends_the_first_actor(ray: Ray) -> None:
    async def main(there: Told) -> None:
        (heard,) = there.serve(request(0, 900))
        await eventually(lambda: heard.tokens > 5)
        await there.engine.start()
        assert heard.ended == "engine_unavailable: the engine was stopped"
        assert [each.dead for each in ray.actors] == [True, False]
        assert ray.actors[0].asked[-1] == "stop"
        assert there.deaths == []

    served(main)
    assert [each.dead for each in ray.actors] == [True, True]


def test_an_actor_that_does_not_stop_is_killed(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kendall.engine")

    async def main() -> None:
        engine = RayEngine(MAKE)
        await engine.start()
        ray.actors[0].hang()
        began = asyncio.get_running_loop().time()
        await engine.stop()
        assert asyncio.get_running_loop().time() - began == STOP == 10
        assert ray.actors[0].dead
        assert "the engine in the actor did not stop by itself" in caplog.text
        await engine.stop()  # a second is none

    run_virtual(main())


def test_a_kill_that_ray_refuses_is_survived(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: FakeActor) -> None:
        raise RayError("Ray has ended")

    async def main(there: Told) -> None:
        monkeypatch.setattr(ray, "kill", gone)

    served(main)


class Refusing(EmulatedEngine):
    async def start(self) -> Any:
        raise EngineStartError("got no model; expected one")


def test_an_engine_that_does_not_start_says_why_and_leaves_no_actor(ray: Ray) -> None:
    async def main() -> None:
        engine = RayEngine(partial(Refusing, parse_law(LAW)))
        with pytest.raises(EngineStartError, match=r"^got no model; expected one$"):
            await engine.start()
        assert not await engine.healthy()
        assert ray.actors[0].dead
        await engine.stop()

    run_virtual(main())


def test_an_actor_that_dies_at_the_start_says_so(ray: Ray) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE)
        ray.hang = True
        start = asyncio.ensure_future(engine.start())
        await eventually(lambda: ray.actors)
        ray.actors[0].die()
        with pytest.raises(EngineStartError, match=r"^the actor did not start: The actor died$"):
            await start
        await engine.stop()

    run_virtual(main())


def test_a_start_may_be_cancelled(ray: Ray) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE)
        ray.hang = True
        start = asyncio.ensure_future(engine.start())
        await eventually(lambda: ray.actors)
        start.cancel()
        await asyncio.wait({start}, timeout=2 * STOP)
        assert start.cancelled()
        assert ray.actors[0].dead
        await engine.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"a100": 2.0}, "the engine needs 2 a100 where the cluster has 1 in all; expected "),
        ({"CPU": 4.0, "GPU": 3.0}, "needs 3 GPU where the cluster has 2 in all"),
        ({"tpu": 0.5}, "needs 0.5 tpu where the cluster has 0 in all"),
    ],
)
def test_what_the_cluster_lacks_is_said(ray: Ray, needs: dict[str, float], said: str) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE, needs=needs)
        with pytest.raises(EngineStartError, match=said):
            await engine.start()
        assert ray.actors == []
        await engine.stop()

    run_virtual(main())


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ({}, {"num_cpus": 0, "num_gpus": 0, "resources": None}),
        ({"CPU": 4.0, "GPU": 2.0}, {"num_cpus": 4.0, "num_gpus": 2.0, "resources": None}),
        ({"a100": 1.0}, {"num_cpus": 0, "num_gpus": 0, "resources": {"a100": 1.0}}),
    ],
)
def test_an_actor_takes_what_its_engine_needs_and_is_not_restarted_by_ray(
    ray: Ray, needs: dict[str, float], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main(there: Told) -> None:
        assert ray.actors[0].options == options | {"max_restarts": 0}

    with caplog.at_level(logging.INFO, "kendall.engine"):
        served(main, needs=needs)
    wants = ", ".join(f"{number:g} {name}" for name, number in needs.items())
    said = f"the engine's actor takes {wants} on one machine, once they are free"
    told = [record.getMessage() for record in caplog.records if record.name == "kendall.engine"]
    assert told == ([said] if needs else [])


# the connection, in real time


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    for name in ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")  # to what it was before, afterwards
        monkeypatch.delenv(name)
    with faked(monkeypatch) as module:
        yield module


def test_engines_share_one_connection_which_the_last_ends(unconnected: Ray) -> None:
    async def main() -> None:
        engines = [RayEngine(MAKE), RayEngine(MAKE)]
        await asyncio.gather(*(each.start() for each in engines))
        assert len(unconnected.inits) == 1
        await engines[0].stop()
        assert unconnected.is_initialized()
        await engines[1].stop()
        assert not unconnected.is_initialized()
        await engines[0].start()
        assert len(unconnected.inits) == 2
        await engines[0].stop()
        assert unconnected.shutdowns == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "options", "environment"),
    [
        (
            None,
            {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"},
            {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        ),
        ("auto", {"address": "auto"}, {}),
    ],
)
def test_a_ray_of_its_own_listens_on_loopback_alone(
    unconnected: Ray, address: str | None, options: dict[str, Any], environment: dict[str, str]
) -> None:
    async def main() -> None:
        engine = RayEngine(MAKE, address=address)
        await engine.start()
        await engine.stop()

    asyncio.run(main())
    ((given, there),) = zip(unconnected.inits, unconnected.environments, strict=True)
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "kendall"}
    assert given == options | common
    assert there == environment | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        (None, "expected to start one on this machine: its log is under /tmp/ray"),
        ("10.0.0.1:6379", "expected a cluster at --ray-address 10.0.0.1:6379: `ray status` there"),
    ],
)
def test_a_connection_that_fails_says_why_and_is_tried_anew(
    unconnected: Ray, address: str | None, advice: str
) -> None:
    def refuse() -> None:
        unconnected.shutdowns += 1  # none was made
        raise ConnectionError("nothing listens\nthere")

    async def main() -> None:
        engine = RayEngine(MAKE, address=address)
        unconnected.connecting = refuse
        said = f"got no connection to Ray: nothing listens; {advice}"
        with pytest.raises(EngineStartError) as caught:
            await engine.start()
        assert str(caught.value).startswith(said)
        unconnected.connecting = lambda: None
        await engine.start()
        assert await engine.healthy()
        await engine.stop()

    asyncio.run(main())


def test_a_connection_that_is_not_made_in_time_is_given_up(
    unconnected: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kendall.server.engines.ray.cluster.CONNECT", 0.05)
    made = threading.Event()
    unconnected.connecting = lambda: made.wait(30)

    async def main() -> None:
        engine = RayEngine(MAKE)
        with pytest.raises(EngineStartError, match=r"no connection to Ray within 0.05 s; expected"):
            await engine.start()
        made.set()
        await engine.stop()

    asyncio.run(main())


# behind the gateway


def test_two_actors_serve_one_queue_and_a_lost_one_costs_no_answer(ray: Ray) -> None:
    async def main() -> None:
        async with actors() as there:
            calls = [there.ask(200, each) for each in range(16)]
            await eventually(lambda: min(there.served(0), there.served(1)) > 20)
            lost = ray.actors[0]
            lost.die()
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(made.status for made in calls) == {200: 16}
            told = [made.json()["usage"]["completion_tokens"] for made in calls]
            assert told == [200] * 16
            await eventually(lambda: there.gateway.batcher.servers == 2)
            records = there.collector.records
            assert Counter(record.outcome for record in records) == {"completed": 16}
            assert {record.interruptions for record in records} == {0, 1}
            assert len(ray.actors) == 3

    run_virtual(main())


def test_actors_come_and_go_while_they_serve(ray: Ray) -> None:
    async def main() -> None:
        async with actors() as there:
            calls = [there.ask(200, each) for each in range(40)]
            assert await there.resize(3) == 200
            await eventually(lambda: there.gateway.batcher.servers == 3)
            calls += [there.ask(50, each) for each in range(24)]
            assert await there.resize(1) == 200
            await asyncio.gather(*(made.task for made in calls))
            assert Counter(made.status for made in calls) == {200: 64}
            await eventually(lambda: set(there.pool.replicas) == {0})
            state = (await call(there.app, "GET", "/admin/state")).json()
            assert state["engine"]["servers"] == 1
            assert [each.dead for each in ray.actors] == [False, True, True]

    run_virtual(main())
