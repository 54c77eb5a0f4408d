"""The real engine, once for the whole module, on a loop of its own: lengths, gates, cancels,
deaths.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kendall.policies import Request
from kendall.server.engines.base import (
    Capabilities,
    EngineEnd,
    EngineRequest,
    EngineStartError,
    InvalidPromptError,
    PromptTooLongError,
    Sampling,
    Step,
    Structured,
    Token,
)
from kendall.server.engines.tiny import EOS, VOCABULARY, make_tiny
from kendall.server.engines.vllm.engine import VllmEngine, prepare
from kendall.server.engines.vllm.options import argument_names
from tests.server.processes import alive, gone

pytestmark = [
    pytest.mark.left_out,
    pytest.mark.engine,
    pytest.mark.timeout(
        900
    ),  # of which a busy machine needs some minutes to bring up two engines at once
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make setup)"
    ),
    # raised inside vLLM and what it imports, while they are imported; none is about our use of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DOOMED = """
import asyncio, sys
from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.engine import VllmEngine, prepare

async def main():
    engine = VllmEngine(str(make_tiny()))
    await engine.start()
    print(engine.process_id, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    prepare(str(make_tiny()))
    asyncio.run(main())
"""


@dataclass
class Heard:
    """Everything that a stream said."""

    tokens: list[Token] = field(default_factory=list)
    ends: list[EngineEnd] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        self.more.set()

    def on_end(self, end: EngineEnd) -> None:
        self.ends.append(end)
        self.over.set()

    def on_failure(self, message: str, code: str = "engine_unavailable") -> None:
        self.failures.append(message)
        self.codes.append(code)
        self.over.set()

    async def at_least(self, count: int) -> None:
        while len(self.tokens) < count:
            self.more.clear()
            await self.more.wait()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


_NUMBERS = itertools.count()
ENDLESS = 1900  # tokens: what the context has room for behind the prompts here
PATIENCE = 50.0  # seconds of silence: a machine that stands still is not the engine's fault


def engine_request(
    limit: int,
    *,
    prompt: int = 16,
    forced: int | None = None,
    made: Sequence[int] = (),
    **sampling: Any,
) -> EngineRequest:
    tokens = [300 + (place * 37) % (VOCABULARY - 300) for place in range(prompt)]
    request = Request(
        id=f"r{next(_NUMBERS)}", arrived_at=0.0, prompt_tokens=prompt, max_output_tokens=limit
    )
    return EngineRequest(request, tokens, Sampling(max_tokens=limit, **sampling), forced, made)


class House:
    """An engine on a loop of its own, and what it said of its steps."""

    def __init__(self, model: Path, **arguments: str) -> None:
        self.runner = asyncio.Runner()
        self.engine = VllmEngine(str(model), engine_args=arguments, hang_timeout=PATIENCE)
        self.steps: list[Step] = []
        self.deaths: list[str] = []
        self.engine.on_step = self.steps.append
        self.engine.on_death = self.deaths.append
        self.capabilities: Capabilities = self.run(self.engine.start(), 600)

    def run(self, call: Coroutine[Any, Any, Any], limit: float = 60) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(limit):
                return await call

        return self.runner.run(bounded())

    def dispatch(
        self, *requests: EngineRequest, padded: bool = False, joining: bool = False
    ) -> list[Heard]:
        heard = [Heard() for _ in requests]
        for stream, listener in zip(
            self.engine.dispatch(0, requests, padded=padded, joining=joining),
            heard,
            strict=True,
        ):
            stream.listener = listener
        return heard

    async def served(self, *requests: EngineRequest, padded: bool = False) -> list[Heard]:
        heard = self.dispatch(*requests, padded=padded)
        await asyncio.gather(*(one.over.wait() for one in heard))
        return heard

    def serve(self, *requests: EngineRequest, padded: bool = False) -> list[Heard]:
        async def call() -> list[Heard]:
            return await self.served(*requests, padded=padded)

        heard: list[Heard] = self.run(call())
        return heard

    def close(self) -> None:
        self.run(self.engine.stop())
        self.runner.close()

    async def idle(self) -> None:
        """Until vLLM itself holds nothing, which must be long before the limit of what was
        `ENDLESS` would be met.
        """
        assert self.engine._core is not None
        before = len(self.steps)
        while self.engine._core.llm.get_num_unfinished_requests():  # noqa: ASYNC110  # nothing to wait on
            await asyncio.sleep(0.01)
        assert len(self.steps) - before < ENDLESS // 2


@pytest.fixture(scope="module")
def doomed(model: Path) -> Iterator[subprocess.Popen[str]]:
    """A gateway process of its own, started early: it imports vLLM beside this one."""
    del model
    with subprocess.Popen(
        [sys.executable, "-c", DOOMED], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def model() -> Path:
    return make_tiny()


@pytest.fixture(scope="module")
def one_house(model: Path, doomed: subprocess.Popen[str]) -> Iterator[House]:
    del doomed
    prepare(str(model))
    house = House(model)
    gc.collect()  # what vLLM leaves to the collector is not to come up in a test of another module
    yield house
    house.close()
    gc.collect()


@pytest.fixture
def house(one_house: House) -> Iterator[House]:
    """It has said nothing yet; one that a test leaves dead is named, and begins anew."""
    one_house.steps.clear()
    one_house.deaths.clear()
    yield one_house
    if one_house.engine._watch is None:
        deaths = list(one_house.deaths)
        one_house.run(one_house.engine.start(), 600)
        pytest.fail(f"the engine was lost: {deaths}")


def test_capabilities_say_what_came_up(house: House) -> None:
    found = house.capabilities
    assert (found.engine, found.max_model_len, found.max_num_seqs, found.vocab_size) == (
        "vllm",
        2048,
        64,
        VOCABULARY,
    )
    assert found.eos_token_ids == {EOS}
    assert found.kv_cache_tokens >= found.max_num_seqs * found.max_model_len
    assert {"vllm", "torch", "python"} <= set(found.versions)
    assert found.hardware["cores"] >= 1
    assert house.run(house.engine.healthy())


def test_forced_lengths_are_met_exactly_and_their_last_token_says_so(house: House) -> None:
    lengths = [1, 2, 7, 20, 33]
    for length, heard in zip(
        lengths,
        house.serve(*(engine_request(50, forced=length) for length in lengths)),
        strict=True,
    ):
        assert [token.ends for token in heard.tokens] == [False] * (length - 1) + [True]
        assert heard.ends == ["length"]


def test_the_limit_in_force_ends_a_forced_length_that_is_longer(house: House) -> None:
    (heard,) = house.serve(engine_request(5, forced=50))
    assert len(heard.tokens) == 5
    assert not any(token.ends for token in heard.tokens)


def test_padded_members_run_on_behind_their_own_end_until_they_are_cancelled(house: House) -> None:
    async def call() -> tuple[list[Heard], list[int]]:
        requests = [engine_request(ENDLESS, forced=3), engine_request(ENDLESS, forced=30)]
        short, long = house.dispatch(*requests, padded=True)
        await long.at_least(30)
        house.engine.cancel([one.request.id for one in requests])
        counts = [len(short.tokens), len(long.tokens)]
        await house.idle()
        await asyncio.sleep(0.05)
        assert [len(short.tokens), len(long.tokens)] == counts
        return [short, long], counts

    (short, long), counts = house.run(call())
    assert counts[0] >= 30
    assert [place for place, token in enumerate(short.tokens, 1) if token.ends] == [3]
    assert [place for place, token in enumerate(long.tokens, 1) if token.ends] == [30]
    assert short.ends == long.ends == []


def test_padded_members_stop_at_no_end_of_sequence_and_at_the_largest_limit(house: House) -> None:
    eager = {EOS: 100.0}
    short, long = house.serve(
        engine_request(4, logit_bias=eager),
        engine_request(12, stop_token_ids=(EOS,), logit_bias=eager),
        padded=True,
    )
    assert short.ids == long.ids == [EOS] * 12
    assert short.ends == long.ends == ["length"]


def test_unpadded_ends_at_the_end_of_sequence_and_at_stop_tokens(house: House) -> None:
    natural, stopped, deaf = house.serve(
        engine_request(9, logit_bias={EOS: 100.0}),
        engine_request(9, logit_bias={500: 100.0}, stop_token_ids=(500,)),
        engine_request(9, logit_bias={EOS: 100.0}, ignore_eos=True),
    )
    assert (natural.ids, natural.ends) == ([EOS], ["stop"])
    assert (stopped.ids, stopped.ends) == ([500], ["stop"])
    assert (deaf.ids, deaf.ends) == ([EOS] * 9, ["length"])


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_batch_begins_in_one_step(house: House, size: int) -> None:
    for _ in range(3):
        house.steps.clear()
        house.serve(*(engine_request(4, prompt=64, forced=4) for _ in range(size)))
        assert [(step.admitted, step.running) for step in house.steps] == [(size, size)] + [
            (0, size)
        ] * 3
        assert house.steps[0].prompt_tokens == 64 * size


def test_one_that_joins_does_not_hold_up_the_others_and_cancelling_frees_the_engine(
    house: House,
) -> None:
    async def call() -> None:
        running = engine_request(ENDLESS)
        (first,) = house.dispatch(running)
        await first.at_least(5)
        joining = engine_request(6, forced=6)
        (second,) = house.dispatch(joining, joining=True)
        await second.over.wait()
        assert len(second.tokens) == 6
        house.engine.cancel([running.request.id, "unknown"])
        await house.idle()
        assert first.ends == first.failures == []

    house.run(call())


def test_a_cancel_right_behind_its_dispatch_is_not_lost(house: House) -> None:
    async def call() -> None:
        for breaths in range(6):  # event loop turns between the two
            requests = [engine_request(ENDLESS) for _ in range(3)]
            heard = house.dispatch(*requests)
            for _ in range(breaths):
                await asyncio.sleep(0)
            house.engine.cancel([one.request.id for one in requests])
            (after,) = await house.served(engine_request(2, forced=2))
            assert after.ends == ["length"]
            await house.idle()
            assert all(one.ends == one.failures == [] for one in heard)

    house.run(call())


def test_a_listener_may_cancel_while_it_hears(house: House) -> None:
    async def call() -> None:
        one = engine_request(ENDLESS)

        class Stopper(Heard):
            def on_tokens(self, tokens: Sequence[Token]) -> None:
                super().on_tokens(tokens)
                if len(self.tokens) == 4:
                    house.engine.cancel([one.request.id])

        stopper = Stopper()
        (stream,) = house.engine.dispatch(0, [one], padded=False, joining=False)
        stream.listener = stopper
        await stopper.at_least(4)
        await house.idle()
        assert (len(stopper.tokens), stopper.ends) == (4, [])

    house.run(call())


def test_a_listener_that_fails_harms_no_other_sequence(house: House) -> None:
    async def call() -> None:
        class Broken(Heard):
            def on_tokens(self, tokens: Sequence[Token]) -> None:
                raise ZeroDivisionError

        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context)
        )
        broken, whole = Broken(), Heard()
        streams = house.engine.dispatch(
            0, [engine_request(50), engine_request(50, forced=20)], padded=False, joining=False
        )
        streams[0].listener, streams[1].listener = broken, whole
        await asyncio.gather(broken.over.wait(), whole.over.wait())
        await house.idle()
        asyncio.get_running_loop().set_exception_handler(None)
        assert (len(whole.tokens), len(broken.failures), len(reported)) == (20, 1, 1)

    house.run(call())
    assert house.deaths == []


def test_a_seed_reproduces_even_behind_a_long_prompt(house: House) -> None:
    again = [
        house.serve(engine_request(12, prompt=1900, seed=7, ignore_eos=True))[0].ids
        for _ in range(2)
    ]
    other = house.serve(engine_request(12, prompt=1900, seed=8, ignore_eos=True))[0].ids
    assert again[0] == again[1] != other


@pytest.mark.slow
def test_chunked_prefill_is_known_and_takes_prompts_longer_than_a_step(
    house: House, model: Path
) -> None:
    assert not house.capabilities.chunked_prefill
    chunking = {"enable_chunked_prefill": "true", "max_num_batched_tokens": "256"}
    other = House(model, **chunking)
    try:
        found = other.capabilities
        assert (found.chunked_prefill, found.max_num_batched_tokens) == (True, 256)
        assert found.longest_prompt == 2047
        long = engine_request(6, prompt=1000, forced=6, temperature=0.0)
        assert other.serve(long)[0].ids == house.serve(long)[0].ids
    finally:
        other.close()


@pytest.mark.slow
def test_answers_that_outgrow_the_memory_come_whole(model: Path) -> None:
    """vLLM interrupts some and computes them again."""
    few = House(model, num_gpu_blocks_override="160", max_num_seqs="8")
    try:
        assert few.capabilities.reserved_tokens < 400
        requests = [engine_request(1500, prompt=16, ignore_eos=True) for _ in range(8)]
        assert few.capabilities.kv_cache_tokens < sum(
            each.request.context_tokens for each in requests
        )
        heard = few.run(few.served(*requests), 240)
        assert [(len(one.tokens), one.ends, one.failures) for one in heard] == [
            (1500, ["length"], [])
        ] * 8
    finally:
        few.close()


def test_output_so_far_is_continued_not_repeated(house: House) -> None:
    (whole,) = house.serve(engine_request(24, temperature=0.0, ignore_eos=True))
    (rest,) = house.serve(engine_request(24, temperature=0.0, ignore_eos=True, made=whole.ids[:10]))
    assert rest.ids == whole.ids[10:]
    assert rest.text == "".join(token.text for token in whole.tokens[10:])
    (forced,) = house.serve(engine_request(24, forced=24, made=whole.ids[:10]))
    assert [token.ends for token in forced.tokens] == [False] * 13 + [True]


def test_the_pieces_are_the_text(house: House) -> None:
    (heard,) = house.serve(engine_request(200, ignore_eos=True, seed=3))
    whole = house.engine.decode(heard.ids)
    assert len(heard.text) > 100
    assert whole.startswith(heard.text)
    assert set(whole[len(heard.text) :]) <= {"\ufffd"}  # half a character at the very end


def test_characters_of_several_tokens_come_whole(house: House) -> None:
    ids = house.run(house.engine.encode("Größe 你好 🙂"))
    assert house.engine.decode(ids) == "Größe 你好 🙂"
    from kendall.server.engines.vllm.reader import FastDetokenizer

    assert house.engine._core is not None
    backend = house.engine._core.tokenizer.backend_tokenizer
    # the prompt ends in half a character: nothing of the prompt may come out
    pieces = [FastDetokenizer(backend, [*ids, ids[-1]], True)]
    assert pieces[0].piece(300) == backend.decode([300])
    fresh = FastDetokenizer(backend, [], True)
    assert "".join(fresh.piece(number) for number in ids) == "Größe 你好 🙂"


def test_logprobs_come_with_each_token(house: House) -> None:
    (heard,) = house.serve(engine_request(5, logprobs=3, ignore_eos=True))
    assert len(heard.tokens) == 5
    for token in heard.tokens:
        assert token.logprobs is not None
        assert len(token.logprobs) in {3, 4}  # the chosen one beside the best three
        assert token.logprobs[token.id].logprob < 0
        assert all(isinstance(candidate.token, str) for candidate in token.logprobs.values())


def test_min_tokens_holds_off_the_end(house: House) -> None:
    eager = {EOS: 50.0}
    unpadded = house.serve(engine_request(20, min_tokens=6, logit_bias=eager))[0]
    assert (unpadded.ids.index(EOS), unpadded.ends) == (6, ["stop"])
    house.serve(engine_request(3, logprobs=2))
    padded = house.serve(
        engine_request(20, min_tokens=6, logit_bias=eager), engine_request(20), padded=True
    )[0]
    assert padded.ids.index(EOS) == 6


def test_a_chat_is_rendered_by_the_models_template(house: House) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert (
        house.engine.decode(house.run(house.engine.encode_chat(messages, {})))
        == "user: Hello\nassistant:"
    )
    bare = house.run(house.engine.encode_chat(messages, {"add_generation_prompt": False}))
    assert house.engine.decode(bare) == "user: Hello\n"


@pytest.mark.parametrize(
    "messages", [[{"content": "no role"}], [{"role": "user", "content": 5}], ["text"]]
)
def test_badly_shaped_messages_are_the_clients_fault(house: House, messages: list[Any]) -> None:
    with pytest.raises(InvalidPromptError):
        house.run(house.engine.encode_chat(messages, {}))


@pytest.mark.parametrize(
    ("messages", "arguments"),
    [
        ([{"role": "user", "content": "x"}], {"self": 1}),
        ([{"role": "user", "content": "x"}], {"conversation": []}),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], {}),
        ([{"role": "user", "content": "x"}], {"tools": 5}),
        ([{"content": "no role"}], {}),
    ],
)
def test_a_fault_in_the_middle_of_the_template_tells_no_internals(
    house: House, messages: list[Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPromptError) as refused:
        house.run(house.engine.encode_chat(messages, arguments))
    assert "chat template cannot render these messages" in str(refused.value)
    with pytest.raises(
        InvalidPromptError, match="tool_calls entries must be objects"
    ):  # vLLM's own words are for people
        house.run(
            house.engine.encode_chat([{"role": "assistant", "content": "x", "tool_calls": [5]}], {})
        )


def test_what_the_template_itself_says_reaches_the_client() -> None:
    from jinja2 import TemplateError, UndefinedError

    from kendall.server.engines.vllm.core import speaker

    def wrapped(cause: Exception) -> Exception:
        error = ValueError("wrapped")
        error.__cause__ = cause
        return error

    own = TemplateError("expected user and assistant in turn")
    assert speaker(wrapped(own)) is own
    for internal in (
        TypeError("got multiple values for 'self'"),
        UndefinedError("'int' has no attribute 'x'"),
        KeyError("x"),
    ):
        assert speaker(wrapped(internal)) is speaker(internal) is None
    plain = ValueError("This model's maximum context length is 5")
    assert speaker(plain) is plain


def test_a_text_longer_than_the_context_is_the_clients_fault(house: House) -> None:
    with pytest.raises(PromptTooLongError):
        house.run(house.engine.encode("word " * 4000))


def test_a_text_that_cannot_fit_by_its_size_is_refused_before_it_is_tokenized(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = house.engine._core
    assert core is not None
    asked: list[object] = []
    tokenize = core.llm.renderer._tokenize_prompt_async

    def told(prompt: object, *given: object) -> object:
        asked.append(prompt)
        return tokenize(prompt, *given)

    monkeypatch.setattr(core.llm.renderer, "_tokenize_prompt_async", told)
    house.run(house.engine.encode("word"))
    assert len(asked) == 1
    huge = "word " * 400_000
    for refused in (
        house.engine.encode(huge),
        house.engine.encode_chat([{"role": "user", "content": huge}], {}),
    ):
        with pytest.raises(PromptTooLongError):
            house.run(refused)
    assert len(asked) == 1, "neither was read token by token"


def test_a_form_that_was_compiled_waits_for_nobody(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up before the queue of those that are to be compiled."""
    known = Sampling(max_tokens=3, structured=Structured("choice", ["yes", "no"]))
    first = house.run(house.engine.check_sampling(known))
    forms = house.engine._forms
    assert forms is not None

    async def never(_: Sampling) -> object:
        raise AssertionError("it is compiled already")

    monkeypatch.setattr(forms, "prepare", never)
    assert house.run(house.engine.check_sampling(known)) == first
    other = Structured("choice", ["yes", "no", "perhaps"])
    asked = house.engine.check_sampling(Sampling(max_tokens=3, structured=other))
    with pytest.raises(AssertionError):
        house.run(asked)


def test_a_refused_request_fails_alone(house: House) -> None:
    bad, good = house.serve(engine_request(5, logprobs=9999), engine_request(5, forced=5))
    assert len(bad.failures) == 1
    assert bad.codes == ["invalid_request"], "its own fault: nobody is to ask again"
    assert "\n" not in bad.failures[0]
    assert len(good.tokens) == 5


def test_death_fails_every_stream_and_a_new_start_serves_again(house: House) -> None:
    async def call() -> None:
        heard = house.dispatch(engine_request(ENDLESS), engine_request(ENDLESS))
        await heard[0].at_least(3)
        os.kill(house.engine.process_id, signal.SIGKILL)
        async with asyncio.timeout(20):  # 0.1 s on a quiet machine
            await asyncio.gather(*(one.over.wait() for one in heard))
        await asyncio.sleep(0.3)
        assert [len(one.failures) for one in heard] == [1, 1]
        (late,) = house.dispatch(engine_request(5))
        await late.over.wait()
        assert late.failures

    house.run(call())
    assert len(house.deaths) == 1
    assert not house.run(house.engine.healthy())
    house.run(house.engine.start(), 600)
    # a first request as short as this: before the AMX registers were asked for, vLLM died of it on
    # CPUs that have them
    assert house.serve(engine_request(5, prompt=3, forced=5))[0].ends == ["length"]


@pytest.mark.slow
def test_an_idle_engines_death_is_noticed_and_named_and_stop_leaves_no_process(
    house: House,
) -> None:
    house.deaths.clear()

    async def call() -> None:
        os.kill(house.engine.process_id, signal.SIGKILL)
        while not house.deaths:  # noqa: ASYNC110  # nothing to wait on
            await asyncio.sleep(0.01)

    house.run(call())
    house.run(house.engine.start(), 600)
    pid = house.engine.process_id
    house.run(house.engine.stop())
    assert house.run(gone([pid])) == []
    (death,) = house.deaths
    assert "was ended by SIGKILL" in death
    house.run(house.engine.start(), 600)


def test_a_stopped_process_is_noticed_by_its_silence(house: House) -> None:
    house.deaths.clear()

    async def call() -> None:
        (heard,) = house.dispatch(engine_request(ENDLESS))
        await heard.at_least(3)
        os.kill(house.engine.process_id, signal.SIGSTOP)
        house.engine._hang_timeout = 1.0
        await heard.over.wait()
        assert len(heard.failures) == 1

    house.run(call())
    assert "did not answer" in house.deaths[0]
    house.engine._hang_timeout = PATIENCE
    house.run(house.engine.start(), 600)


def test_a_killed_gateway_leaves_no_engine(house: House, doomed: subprocess.Popen[str]) -> None:
    del house  # only for the order: this one is ready when the others are done
    assert doomed.stdout is not None
    engine = int(doomed.stdout.readline())
    assert alive(engine)
    doomed.send_signal(signal.SIGKILL)
    doomed.wait()
    assert asyncio.run(gone([engine])) == []


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ("tokenizer.json", "without a tokenizer"),
        ("config.json", "without config.json"),
        ("", "not a directory"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, model: Path, spoil: str, expected: str
) -> None:
    folder = tmp_path / "model"
    if spoil:
        folder.mkdir()
        for file in model.iterdir():
            if file.name != spoil:
                (folder / file.name).symlink_to(file)
    with pytest.raises(EngineStartError, match=expected) as caught:
        asyncio.run(VllmEngine(str(folder)).start())
    assert "\n" not in str(caught.value)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"no-such-thing": "1"}, "no_such_thing"),
        ({"max_model_len": "999999"}, "max_model_len"),
        ({"kv_cache_memory_bytes": "4096"}, "cache blocks"),
    ],
)
def test_arguments_that_vllm_refuses_are_told_in_one_line(
    model: Path, arguments: dict[str, str], expected: str
) -> None:
    async def call() -> str:
        engine = VllmEngine(str(model), engine_args=arguments)
        with pytest.raises(EngineStartError, match=expected) as caught:
            await engine.start()
        await engine.stop()
        return str(caught.value)

    assert "\n" not in asyncio.run(call())


def test_the_names_read_from_vllms_source_are_its_arguments() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert argument_names() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
