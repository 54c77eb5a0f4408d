"""The vLLM engine over a core that the test plays: what it asks of vLLM and in which order, what it
makes of its outputs and faults. The real one: test_vllm_engine.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kendall.policies import Request
from kendall.server.engines import vllm as package
from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    EngineStartError,
    InvalidPromptError,
    InvalidSamplingError,
    PromptTooLongError,
    Sampling,
    Step,
    Structured,
    Token,
    TokenLogprob,
)
from kendall.server.engines.vllm import forms
from kendall.server.engines.vllm.engine import VllmEngine
from kendall.server.engines.vllm.machine import Machine
from kendall.server.engines.vllm.options import on_cpu
from kendall.server.engines.vllm.process import ERROR_FILE, GATEWAY_PID
from tests.eventually import eventually
from tests.server import form_workers
from tests.server.processes import alive
from tests.virtual_time import run_virtual

LIMIT = 5.0 if on_cpu() else 30.0  # seconds of silence; elsewhere kernels are compiled
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Spelling:
    """A tokenizer of letters, written in Python."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(LETTERS[each] for each in ids if each or not skip_special_tokens)


class FieldError(ValueError):
    """As vLLM's, which name a field."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class FakeCore:
    """Does what it is told and notes what it is asked."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.tokenizer, self.config, self.llm = Spelling(), "configuration", "vLLM's own client"
        self.drops_seed = self.dead = False
        self.answers = True
        self.fault: Callable[[], Exception | None] = lambda: None
        self.asked: list[Any] = []
        self.hears: dict[str, Callable[[Any], None]] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="vllm",
            model="m",
            max_model_len=100,
            max_num_seqs=4,
            max_num_batched_tokens=50,
            kv_cache_tokens=400,
            eos_token_ids=frozenset({0}),
            vocab_size=26,
        )

    def made(self, *question: Any) -> None:
        self.asked.append(question)
        if (error := self.fault()) is not None:
            raise error

    async def warm(self) -> None:
        self.made("warm")

    async def ping(self, timeout: float) -> bool:
        self.asked.append(("ping", timeout))
        return self.answers

    def exit_code(self) -> int:
        return 0

    async def tokens_of_text(self, text: str, *, special_tokens: bool) -> list[int]:
        self.made("text", text, special_tokens)
        return [1, 2]

    async def tokens_of_chat(self, messages: Any, arguments: Any) -> list[int]:
        self.made("chat", messages, arguments)
        return [3]

    def check(self, sampling: Sampling) -> None:
        self.made("check", sampling)

    async def add(self, engine_request: EngineRequest, sampling: Any, receive: Any) -> str:
        self.made("add", engine_request.request.id, sampling.about)
        self.hears[engine_request.request.id] = receive
        return f"internal {engine_request.request.id}"

    async def abort(self, ids: Sequence[str]) -> None:
        self.asked.append(("abort", *ids))

    async def pause(self) -> None:
        self.asked.append(("pause",))

    async def resume(self) -> None:
        self.asked.append(("resume",))

    def stop_listening(self) -> None:
        self.asked.append(("stop listening",))

    def shutdown(self) -> None:
        self.asked.append(("shutdown",))

    def kill(self) -> None:
        self.asked.append(("kill",))

    @property
    def names(self) -> list[str]:
        return [each[0] for each in self.asked]

    def limits(self) -> dict[str, dict[str, Any]]:
        """How each sequence was handed over."""
        return {each[1]: each[2] for each in self.asked if each[0] == "add"}

    def out(
        self,
        name: str,
        *ids: int,
        finish: str | None = None,
        logprobs: Any = None,
        cached: int | None = None,
        **more: Any,
    ) -> None:
        """An output of vLLM."""
        one = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish)
        self.hears[name](SimpleNamespace(outputs=[one], num_cached_tokens=cached, **more))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that imports vLLM, and what it was asked to start."""
    module: Any = ModuleType("kendall.server.engines.vllm.core")
    module.CLIENT_ERRORS, module.PROMPT_ERRORS = (ValueError, TypeError), (ValueError, KeyError)
    module.speaker = lambda error: None if isinstance(error, KeyError) else error
    module.sampling_params = lambda sampling, **about: SimpleNamespace(
        prompt_logprobs=sampling.prompt_logprobs, about=about
    )
    module.core, module.started, module.fault = FakeCore(), [], None

    def boot(arguments: Any, on_step: Any, forks: Any, replica: int | None) -> FakeCore:
        del forks
        module.started.append((arguments, replica))
        module.on_step = on_step
        if module.fault is not None:
            raise module.fault
        found: FakeCore = module.core
        return found

    module.boot = boot
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "core", module, raising=False)
    monkeypatch.setenv(GATEWAY_PID, str(os.getpid()))  # no fork server
    monkeypatch.setattr(gc, "collect", lambda: module.core.asked.append(("collect",)))
    return module


class Listener:
    """Everything that a stream says."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.fails: Exception | None = None

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        if self.fails is not None:
            raise self.fails
        self.heard += [token.text + ("." if token.ends else "") for token in tokens]

    def on_end(self, end: str) -> None:
        self.heard.append(("end", end))

    def on_failure(self, message: str, code: str = "engine_unavailable") -> None:
        self.heard.append((code, message))


def request(
    name: str,
    limit: int = 9,
    *,
    prompt: int = 3,
    forced: int | None = None,
    made: Sequence[int] = (),
    **sampling: Any,
) -> EngineRequest:
    asked = Request(id=name, arrived_at=0.0, prompt_tokens=prompt, max_output_tokens=limit)
    return EngineRequest(
        asked, [1] * prompt, Sampling(max_tokens=limit, **sampling), forced, output_token_ids=made
    )


async def settled() -> None:
    """What was asked of the engine has reached the core."""
    for _ in range(30):
        await asyncio.sleep(0)


def dispatch(
    engine: VllmEngine, *requests: EngineRequest, padded: bool = False, joining: bool = False
) -> list[Any]:
    listeners = [Listener() for _ in requests]
    streams = engine.dispatch(0, requests, padded=padded, joining=joining)
    for stream, listener in zip(streams, listeners, strict=True):
        stream.listener = listener
    return [*zip(listeners, streams, strict=True)]


def served(
    test: Callable[[VllmEngine, list[str]], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """The test with an engine that has started, and the deaths that it told."""

    async def main() -> None:
        engine, deaths = VllmEngine("owner/name", **options), list[str]()
        engine.on_death = deaths.append
        await engine.start()
        try:
            await test(engine, deaths)
        finally:
            await engine.stop()

    asyncio.run(main())


# its life


def test_a_start_asks_for_the_model_and_warms_it_up(vllm: Any) -> None:
    steps: list[Step] = []

    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        ((arguments, replica),) = vllm.started
        assert (arguments["model"], arguments["seed"], replica) == ("owner/name", 0, 2)
        assert (arguments["max_num_seqs"], "enforce_eager" in arguments) == (5, on_cpu())
        assert vllm.core.names == ["warm"], "another replica says whether chats can be rendered"
        assert engine.process_id == os.getpid()
        assert engine.client() == "vLLM's own client"
        vllm.on_step(3, 2, 7)  # nobody listens yet
        engine.on_step = steps.append
        now = asyncio.get_running_loop().time()
        vllm.on_step(3, 2, 7)
        assert steps == [Step(steps[0].at, 3, 2, 7)]
        assert now <= steps[0].at <= asyncio.get_running_loop().time()
        assert await engine.healthy()
        vllm.core.answers = False
        assert not await engine.healthy()
        assert vllm.core.asked[-1] == ("ping", 1.0)
        assert engine.decode((1, 0, 2)) == "bc", "special tokens are left out"

    served(test, replica=2, engine_args={"max_num_seqs": "5"})
    assert vllm.core.names[-4:] == ["stop listening", "shutdown", "kill", "collect"]


def test_an_engine_that_does_not_run_says_so(vllm: Any) -> None:
    async def main() -> None:
        engine = VllmEngine("owner/name")
        for life in range(2):
            if life:
                await engine.start()
                await engine.stop()
            with pytest.raises(RuntimeError, match="the engine is not running"):
                _ = engine.process_id
            with pytest.raises(RuntimeError, match="the engine is not running"):
                await engine.encode("a")
            assert not await engine.healthy()
            ((listener, _),) = dispatch(engine, request("a"))
            await settled()
            assert listener.heard == [("engine_unavailable", "the engine is not running")]
            engine.cancel(["a"])

    asyncio.run(main())
    assert vllm.core.names[:2] == ["warm", "chat"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ValueError("no such dtype\nmore"), "vLLM did not start: no such dtype"),
        (EngineStartError("got a model; expected another"), "got a model; expected another"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(vllm: Any, fault: Exception, said: str) -> None:
    async def main() -> None:
        vllm.fault = fault
        engine = VllmEngine("owner/name")
        with pytest.raises(EngineStartError) as caught:
            await engine.start()
        assert str(caught.value) == said
        assert not await engine.healthy()
        vllm.fault = None
        assert (await engine.start()).max_model_len == 100, "and may be made again"
        await engine.stop()

    asyncio.run(main())


def test_what_an_engine_said_that_did_not_start_before_is_forgotten(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "error").write_text("an older fault")
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    vllm.fault = RuntimeError("Engine core initialization failed")
    with pytest.raises(EngineStartError, match="vLLM did not start: Engine core initialization"):
        asyncio.run(VllmEngine("owner/name").start())


def test_a_start_that_fails_or_is_cancelled_half_way_ends_what_came_up(vllm: Any) -> None:
    async def main() -> None:
        engine = VllmEngine("owner/name", replica=1)
        vllm.core.fault = lambda: LookupError("no answer")
        with pytest.raises(EngineStartError, match="vLLM did not start: no answer"):
            await engine.start()
        vllm.core.fault = asyncio.CancelledError
        with pytest.raises(asyncio.CancelledError):
            await engine.start()

    asyncio.run(main())
    ended = ["warm", "stop listening", "shutdown", "kill", "collect"]
    assert vllm.core.names == 2 * ended


def test_another_start_ends_the_engine_before(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        first, vllm.core = vllm.core, FakeCore()
        await engine.start()
        assert first.names[-3:] == ["stop listening", "shutdown", "kill"]
        assert (len(vllm.started), deaths) == (2, [])

    served(test)


def test_a_folder_that_is_not_there_is_not_asked_of_vllm(vllm: Any) -> None:
    with pytest.raises(EngineStartError, match="which is not a directory; expected"):
        asyncio.run(VllmEngine("./nowhere").start())
    assert vllm.started == []


def test_what_is_in_service_fails_where_the_engine_is_stopped(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        ((listener, _),) = dispatch(engine, request("a"))
        await settled()
        await engine.stop()
        assert listener.heard == [("engine_unavailable", "the engine was stopped")]
        assert deaths == []

    served(test)


def test_a_lost_engine_is_told_once_killed_and_fails_what_is_left(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        (one, _), (other, _) = dispatch(engine, request("a"), request("b"))
        await settled()
        engine.on_death = lambda reason: deaths.append(f"{reason} {one.heard}")
        vllm.core.hears["a"](RuntimeError("EngineDeadError\nmore"))
        assert deaths == ["EngineDeadError []"], "before its streams fail"
        for listener in (one, other):
            assert listener.heard == [("engine_unavailable", "EngineDeadError")]
        assert vllm.core.names.count("kill") == 1
        vllm.core.hears["b"](RuntimeError("again"))
        assert len(deaths) == 1
        assert not await engine.healthy()
        ((late, _),) = dispatch(engine, request("c"))
        await settled()
        assert late.heard == [("engine_unavailable", "the engine is not running")]

    served(test)


async def real(call: Coroutine[Any, Any, Any]) -> Any:
    """What needs threads, within virtual time."""
    task = asyncio.ensure_future(call)
    while not task.done():
        time.sleep(0.001)  # noqa: ASYNC251 - theirs is another clock
        await asyncio.sleep(1e-9)
    return task.result()


@pytest.mark.parametrize(
    ("sequence", "begun", "lost_at", "silence", "options"),
    [
        (None, False, 10.0, LIMIT, {}),
        (None, False, 10.0, 3.0, {"hang_timeout": 3.0}),
        ({"prompt": 100, "made": (1, 2, 3, 4)}, False, 2.0, LIMIT + 104 / 50, {}),
        ({"prompt": 100, "made": (1, 2, 3, 4)}, True, 2.0, LIMIT, {}),
    ],
)
def test_a_silent_engine_has_its_limit_and_a_fiftieth_for_each_token_of_its_prompts(
    vllm: Any,
    sequence: dict[str, Any] | None,
    begun: bool,
    lost_at: float,
    silence: float,
    options: dict[str, float],
) -> None:
    """It is asked every ten seconds, while it serves every two."""

    async def main() -> None:
        engine, loop = VllmEngine("owner/name", **options), asyncio.get_running_loop()  # type: ignore[arg-type]
        deaths: list[tuple[float, str]] = []
        engine.on_death = lambda reason: deaths.append((round(loop.time(), 3), reason))
        await real(engine.start())
        vllm.core.answers = False
        if sequence is not None:
            dispatch(engine, request("a", **sequence))
            await settled()
        if begun:
            vllm.core.out("a", 1)
        await asyncio.sleep(30)
        said = f"the engine process ({os.getpid()}) did not answer within {silence:g} s"
        assert deaths == [(lost_at, said)]
        await real(engine.start())
        await real(engine.stop())
        asked = len(vllm.core.asked)
        await asyncio.sleep(30)
        assert (len(vllm.core.asked), len(deaths)) == (asked, 1), "it is not watched any more"

    run_virtual(main())


GIB = 1 << 30


@pytest.mark.parametrize(("engines", "part"), [({}, 0.26), ({"engines": 2}, 0.12)])
def test_the_memory_is_that_of_the_machine_of_which_engines_take_equal_parts(
    vllm: Any, engines: dict[str, int], part: float
) -> None:
    """(20 * 0.9 - 1.25) / 64, and half of the 20 GiB."""

    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        assert vllm.started[0][0]["gpu_memory_utilization"] == part

    served(test, machine=Machine(frozenset(), 20 * GIB, 64 * GIB), **engines)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two processors",
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_the_gateway_leaves_the_engines_processors_to_it_until_the_end(
    vllm: Any, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of this core is the gateway's own."""
    here = os.sched_getaffinity(0)
    one = min(here)
    if by == "environment":
        monkeypatch.setenv("KENDALL_ENGINE_CPUS", str(one))

    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        assert os.sched_getaffinity(0) == here - {one}

    served(test, cpus=None if by == "environment" else str(one))
    assert os.sched_getaffinity(0) == here


# sequences


def test_several_enter_one_step_and_one_that_joins_or_is_alone_holds_up_nobody(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        begun = len(vllm.core.asked)

        async def asked(*names: str, joining: bool = False) -> list[Any]:
            before = len(vllm.core.asked)
            dispatch(engine, *map(request, names), joining=joining)
            await settled()
            return [each[:2] for each in vllm.core.asked[before:]]

        gate = [("pause",), ("add", "a"), ("add", "b"), ("resume",)]
        assert await asked("a", "b") == gate
        assert await asked("c", "d", joining=True) == [("add", "c"), ("add", "d")]
        assert await asked("e") == [("add", "e")]
        assert len(vllm.core.asked) == begun + 7

    served(test)


def test_each_is_told_how_many_tokens_it_may_make(vllm: Any) -> None:
    """A limit, what the context has left, or a forced length; all of a padded batch the largest
    limit.
    """

    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        alone = [
            request("limit", 9),
            request("begun", 9, made=(1, 2, 3, 4)),
            request("full", 9, prompt=95),
            request("over", 9, prompt=100),
            request("past", 4, made=(1, 2, 3, 4)),
            request("both", 20, prompt=90, made=(1, 2, 3, 4)),
            request("forced", 9, forced=5, made=(1, 2)),
            request("forced beyond", 9, forced=50),
        ]
        dispatch(engine, *alone)
        dispatch(engine, request("p", 9, made=(1,)), request("q", 7, forced=2), padded=True)
        await settled()
        limits = vllm.core.limits()
        assert {name: about["max_tokens"] for name, about in limits.items()} == {
            "limit": 9,
            "begun": 5,
            "full": 5,
            "over": 1,
            "past": 1,
            "both": 6,
            "forced": 3,
            "forced beyond": 9,
            "p": 8,
            "q": 8,
        }
        runs_on = {name for name, about in limits.items() if about["runs_on"]}
        assert runs_on == {"forced", "forced beyond", "p", "q"}
        assert {name: about["made"] for name, about in limits.items() if about["made"]} == {
            "begun": 4,
            "past": 4,
            "both": 4,
            "forced": 2,
            "p": 1,
        }
        assert all(about["keep_seed"] for about in limits.values())
        vllm.core.drops_seed = True
        dispatch(engine, request("r"))
        await settled()
        assert not vllm.core.limits()["r"]["keep_seed"]

    served(test)


def test_tokens_come_with_their_text_and_the_last_one_says_how_it_ended(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        (one, stream), (forced, _), (third, _) = dispatch(
            engine, request("a"), request("b", forced=3, made=(1,)), request("c")
        )
        await settled()
        vllm.core.out("a", 1, 2, cached=2)
        vllm.core.out("a", 3, cached=7)
        vllm.core.out("a", finish="stop")
        assert (one.heard, stream.cached_tokens) == (["b", "c", "d", ("end", "stop")], 2)
        vllm.core.out("b", 4, 5, finish="length")
        assert forced.heard == ["e", "f.", ("end", "length")]
        vllm.core.out("c", 6, finish="repetition")
        assert third.heard == ["g", ("end", "stop")]
        vllm.core.out("c", 6)
        assert third.heard == ["g", ("end", "stop")], "what comes behind its end is dropped"
        engine.cancel(["a", "b", "c"])
        await settled()
        assert "abort" not in vllm.core.names

    served(test)


def test_candidates_come_with_their_texts_and_a_probability_that_json_has(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        heard: list[Token] = []
        ((listener, stream),) = dispatch(engine, request("a", logprobs=2, prompt_logprobs=1))
        listener.on_tokens = heard.extend
        await settled()
        found = {
            1: SimpleNamespace(logprob=-0.5, rank=1),
            2: SimpleNamespace(logprob=-float("inf"), rank=2),
        }
        vllm.core.out("a", 1, logprobs=[found], prompt_logprobs=[None, "of the second token"])
        assert stream.prompt_logprobs == [None, "of the second token"]
        vllm.core.out("a", 2, logprobs=None, prompt_logprobs=None)
        assert stream.prompt_logprobs == [None, "of the second token"]
        assert [token.logprobs for token in heard] == [
            {1: TokenLogprob("b", -0.5, 1), 2: TokenLogprob("c", -9999.0, 2)},
            None,
        ]

    served(test)


def test_one_that_is_cancelled_is_let_go_or_never_begun(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        (one, _), (other, _) = dispatch(engine, request("a"), request("b"))
        await settled()
        engine.cancel(["a", "unknown"])
        vllm.core.out("a", 1)
        await settled()
        assert vllm.core.asked[-1] == ("abort", "internal a")
        assert one.heard == []
        vllm.core.out("b", 1)
        assert other.heard == ["b"]
        dispatch(engine, request("c"), request("d"), request("e"))
        engine.cancel(["c", "d"])
        await settled()
        assert "c" not in vllm.core.limits()
        assert vllm.core.asked[-1][:2] == ("add", "e"), "alone, and nothing to abort"

    served(test)


def test_a_request_that_vllm_refuses_fails_alone(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        faults = iter([ValueError("no such id\nmore"), LookupError("odd"), None])
        vllm.core.fault = lambda: next(faults)
        (refused, _), (failed, _), (good, _) = dispatch(engine, *map(request, "abc"))
        await settled()
        assert refused.heard == [("invalid_request", "vLLM rejected the request: no such id")]
        assert failed.heard == [
            ("engine_error", "vLLM failed while handling the request: odd"),
        ]
        vllm.core.out("c", 1)
        assert (good.heard, deaths) == (["b"], [])
        engine.cancel(["a", "b"])
        await settled()
        assert "abort" not in vllm.core.names

    served(test)


def test_eight_failures_in_a_row_are_the_engines_and_one_is_where_vllm_is_dead(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        faults = [*[LookupError("odd")] * 7, None, *[LookupError("odd")] * 8]
        coming = iter(faults)
        vllm.core.fault = lambda: next(coming, None)
        for number in range(len(faults)):
            assert deaths == []
            dispatch(engine, request(str(number)))
            await settled()
        assert deaths == ["odd"]

    served(test)

    async def dead(engine: VllmEngine, deaths: list[str]) -> None:
        vllm.core.dead, vllm.core.fault = True, lambda: LookupError("EngineDeadError")
        ((listener, _),) = dispatch(engine, request("a"))
        await settled()
        assert deaths == ["EngineDeadError"]
        assert listener.heard == [("engine_unavailable", "EngineDeadError")]

    vllm.core = FakeCore()
    served(dead)


def test_a_connection_to_the_engine_that_fails_is_its_death(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        async def abort(ids: Sequence[str]) -> None:
            raise ConnectionError(*ids)

        vllm.core.abort = abort
        (_, _), (left, _) = dispatch(engine, request("a"), request("b"))
        await settled()
        engine.cancel(["a"])
        await settled()
        assert deaths == [
            "the connection to the engine process failed: ConnectionError('internal a')"
        ]
        assert left.heard == [("engine_unavailable", deaths[0])]

    served(test)


def test_what_the_engine_aborts_by_itself_is_its_death_and_an_error_is_the_requests(
    vllm: Any,
) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        form = Structured("regex", "a", prepared="compiled")
        (plain, _), (formed, _), (dying, _) = dispatch(
            engine, request("a"), request("b", structured=form), request("c")
        )
        await settled()
        vllm.core.out("a", finish="error")
        vllm.core.out("b", finish="error")
        assert plain.heard == [
            (
                "engine_error",
                "the engine failed while serving this request; its log has the details",
            )
        ]
        assert formed.heard == [
            (
                "invalid_request",
                "the engine could not produce an answer that satisfies the structured-output "
                "definition; change or simplify it",
            )
        ]
        assert deaths == []
        vllm.core.out("c", 1, finish="abort")
        assert deaths == ["the engine aborted a request that was not cancelled"]
        assert dying.heard == [("engine_unavailable", deaths[0])], "its tokens are made again"

    served(test)


def test_a_listener_that_fails_costs_its_own_answer_alone(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
        (bad, _), (good, _) = dispatch(engine, request("a"), request("b"))
        await settled()
        bad.fails = LookupError("a hole\nmore")
        vllm.core.out("a", 1)
        vllm.core.out("b", 1)
        said = "internal error while handling a token: a hole"
        assert (bad.heard, good.heard) == ([("internal_error", said)], ["b"])
        assert [each["message"] for each in complaints] == ["a token listener failed"]
        await settled()
        assert vllm.core.asked[-1] == ("abort", "internal a")
        assert deaths == []

    served(test)


# prompts and sampling


def test_prompts_are_read_as_they_were_asked(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        before = len(vllm.core.asked)
        assert await engine.encode("x") == await engine.encode("x", special_tokens=False) == [1, 2]
        assert await engine.encode_chat([{"role": "user"}], {"a": 1}) == [3]
        assert vllm.core.asked[before:] == [
            ("text", "x", True),
            ("text", "x", False),
            ("chat", [{"role": "user"}], {"a": 1}),
        ]

    served(test)


@pytest.mark.parametrize(
    ("fault", "kind", "text", "chat"),
    [
        (ValueError("two systems\nmore"), InvalidPromptError, "two systems", "two systems"),
        (InvalidPromptError("no template"), InvalidPromptError, "no template", "no template"),
        (
            KeyError("role"),
            InvalidPromptError,
            "the text cannot be tokenized",
            "the model's chat template cannot render these messages with these "
            "chat_template_kwargs: check their fields",
        ),
        (
            FieldError("too long", "input_tokens"),
            PromptTooLongError,
            *["got a prompt beyond the model's context; expected at most 50 tokens: shorten it"]
            * 2,
        ),
        (FieldError("odd", "prompt"), InvalidPromptError, "odd", "odd"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said(
    vllm: Any, fault: Exception, kind: type[Exception], text: str, chat: str
) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        vllm.core.fault = lambda: fault
        for call, words in ((engine.encode("x"), text), (engine.encode_chat([], {}), chat)):
            with pytest.raises(kind) as caught:
                await call
            assert (type(caught.value), str(caught.value)) == (kind, words)

    served(test)


def test_sampling_is_checked_by_vllm_which_names_the_field(vllm: Any) -> None:
    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        sampling = Sampling(max_tokens=1, bad_words=("x",))
        assert await engine.check_sampling(sampling) is sampling
        assert vllm.core.asked[-1] == ("check", sampling)
        vllm.core.fault = lambda: FieldError("no such word\nmore", "bad_words")
        with pytest.raises(InvalidSamplingError, match=r"^no such word$") as caught:
            await engine.check_sampling(sampling)
        assert caught.value.param == "bad_words"
        vllm.core.fault = lambda: ValueError("odd")
        with pytest.raises(InvalidSamplingError) as caught:
            await engine.check_sampling(sampling)
        assert caught.value.param is None

    served(test)


@pytest.mark.left_out
def test_a_form_is_compiled_elsewhere_once_and_checked_without_it_from_then_on(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "compile_forms", form_workers.work)

    async def test(engine: VllmEngine, deaths: list[str]) -> None:
        asked = Sampling(max_tokens=1, structured=Structured("regex", "a"), bad_words=("x",))
        for time_before in (True, False):
            found = await engine.check_sampling(asked)
            assert found.structured is not None
            assert found.structured.prepared == "configuration a"
            assert replace(found, structured=asked.structured) == asked
            checks = [each for each in vllm.core.asked if each[0] == "check"]
            others = replace(asked, structured=None)
            assert checks == ([] if time_before else [("check", others)])
        with pytest.raises(InvalidSamplingError, match="got a bad form"):
            await engine.check_sampling(
                Sampling(max_tokens=1, structured=Structured("regex", "bad"))
            )
        of = await engine.check_sampling(
            Sampling(max_tokens=1, structured=Structured("regex", "pid"))
        )
        assert of.structured is not None
        pids.append(of.structured.prepared)

    pids: list[int] = []
    served(test)
    assert asyncio.run(eventually(lambda: not alive(pids[0]))), "it ends with the engine"
