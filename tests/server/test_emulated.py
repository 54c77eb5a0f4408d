"""The emulated engine: beside a loop that is late, what it reads and draws, its words and their
probabilities.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import statistics
import threading
import time
import weakref
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from kendall.policies import Request, SpecError
from kendall.queueing.arrivals.timetable import streams
from kendall.queueing.latency.law import LatencyModel
from kendall.server.engines import emulated
from kendall.server.engines.base import (
    InvalidPromptError,
    InvalidSamplingError,
    Sampling,
    Step,
    Token,
    TokenLogprob,
    UnsupportedError,
    describe_engine,
)
from kendall.server.engines.emulated import (
    MOST_AT_ONCE,
    TOKENS,
    UNIFORM,
    EmulatedEngine,
    token_ids_of,
)
from kendall.server.operations.serving import engine_seed
from tests.eventually import eventually
from tests.server.harness import engine_request_of
from tests.virtual_time import run_virtual

LAW = LatencyModel(k4=1e-3)


class Listener:
    """Keeps what it hears, turn by turn of the loop."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.ended: str | None = None

    def on_tokens(self, tokens: list[Token]) -> None:
        self.tokens += tokens

    def on_end(self, end: str) -> None:
        self.ended = end

    def on_failure(self, message: str, code: str = "engine_unavailable") -> None:
        raise AssertionError(message, code)


def request(name: str, output_tokens: int) -> Request:
    return Request(id=name, arrived_at=0.0, prompt_tokens=1, max_output_tokens=output_tokens)


@pytest.mark.parametrize("padded", [False, True])
def test_steps_that_are_due_are_done_together_and_none_is_lost(padded: bool) -> None:
    """A loop that stood still for 80 ms makes up for the steps of 1 ms, some in each of its
    turns.
    """

    async def main() -> tuple[list[int], Listener]:
        engine = EmulatedEngine(LAW)
        await engine.start()
        listener = Listener()
        engine_request = engine_request_of(request("a", 70), 70)
        (stream,) = engine.dispatch(0, [engine_request], padded=padded, joining=False)
        stream.listener = listener
        time.sleep(0.08)  # noqa: ASYNC251 - on purpose
        counts = []
        while len(listener.tokens) < 70:
            await asyncio.sleep(0)
            counts.append(len(listener.tokens))
        return counts, listener

    counts, listener = asyncio.run(main())
    assert (
        max(after - before for before, after in zip([0, *counts], counts, strict=False))
        == MOST_AT_ONCE
        == 32
    )
    assert [token.id for token in listener.tokens] == list(range(2, 72))
    assert [token.ends for token in listener.tokens] == [False] * 69 + [True]


def test_a_step_tells_how_many_began_in_it() -> None:
    async def main() -> list[Step]:
        engine = EmulatedEngine(LAW)
        await engine.start()
        steps: list[Step] = []
        engine.on_step = steps.append
        for name, after in (("a", 0.0005), ("b", 0.002)):
            for stream in engine.dispatch(
                0, [engine_request_of(request(name, 4), 4)], padded=False, joining=True
            ):
                stream.listener = Listener()
            await asyncio.sleep(after)
        await asyncio.sleep(0.01)
        return steps

    steps = run_virtual(main())
    assert [(step.running, step.admitted, step.prompt_tokens) for step in steps] == [
        (1, 1, 1),
        (2, 1, 1),
        (2, 0, 0),
        (2, 0, 0),
        (1, 0, 0),
    ]


def test_a_step_tells_its_server_and_when_it_ended() -> None:
    async def main() -> list[Step]:
        engine = EmulatedEngine(LAW, servers=2)
        await engine.start()
        steps: list[Step] = []
        engine.on_step = steps.append
        await asyncio.sleep(0.5)
        engine.dispatch(1, [engine_request_of(request("a", 2), 2)], padded=False, joining=True)
        await asyncio.sleep(0.5)
        return steps

    steps = run_virtual(main())
    assert [step.server_id for step in steps] == [1, 1]
    assert [step.at for step in steps] == [pytest.approx(0.501), pytest.approx(0.502)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hi there", "hi there"),
        ([{"type": "text", "text": "hi"}, {"type": "text", "text": "there you"}], "hi there you"),
        (None, ""),
        ("", ""),
        ([], ""),
    ],
)
def test_a_message_is_its_role_and_its_words(content: object, words: str) -> None:
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    read = run_virtual(EmulatedEngine(LAW).encode_chat(said, {}))
    assert read == token_ids_of(f"user: {words} assistant: yes")


@pytest.mark.parametrize(
    ("token", "accepted"), [(0, True), (2**31 - 1, True), (-1, False), (2**31, False)]
)
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_token_ids_are_of_any_clients_tokenizer(name: str, token: int, *, accepted: bool) -> None:
    given = {"stop_token_ids": (5, token), "logit_bias": {5: 1.0, token: 1.0}}
    asked, engine = Sampling(max_tokens=4, **{name: given[name]}), EmulatedEngine(LAW)
    if accepted:
        assert run_virtual(engine.check_sampling(asked)) is asked
        return
    with pytest.raises(InvalidSamplingError, match="expected 0 to 2147483647") as refused:
        run_virtual(engine.check_sampling(asked))
    assert refused.value.param == name


@pytest.mark.parametrize(("asked", "named"), [(0, 1), (1, 1), (3, 3)])
def test_a_token_comes_with_as_many_candidates_as_were_asked_for_itself_first(
    asked: int, named: int
) -> None:
    async def main() -> list[Token]:
        engine, listener = EmulatedEngine(LAW), Listener()
        await engine.start()
        engine_request = engine_request_of(request("a", 2), 2, logprobs=asked)
        (stream,) = engine.dispatch(0, [engine_request], padded=False, joining=True)
        stream.listener = listener
        await asyncio.sleep(1.0)
        return listener.tokens

    tokens = run_virtual(main())
    assert len(tokens) == 2
    for token in tokens:
        assert token.logprobs is not None
        found = list(token.logprobs.items())
        assert found[0][0] == token.id
        assert [each.rank for _, each in found] == list(range(1, named + 1))
        assert [each.token for _, each in found] == [TOKENS[number].text for number, _ in found]
        assert {each.logprob for _, each in found} == {UNIFORM}


def test_a_client_that_leaves_a_late_loop_takes_no_token_of_others_with_it() -> None:
    """A cancellation that comes while 20 steps are due and not yet told: the other answer still
    gets each of its tokens.
    """

    async def main() -> Listener:
        engine = EmulatedEngine(LAW)
        await engine.start()
        listener = Listener()
        requests = [engine_request_of(request(name, 25), 25) for name in ("a", "b")]
        staying, leaving = engine.dispatch(0, requests, padded=False, joining=True)
        staying.listener, leaving.listener = listener, Listener()
        time.sleep(0.02)  # noqa: ASYNC251 - on purpose
        engine.cancel(["b"])
        await eventually(lambda: len(listener.tokens) >= 25)
        return listener

    assert [token.id for token in asyncio.run(main()).tokens] == list(range(2, 27))


def test_an_answer_that_ends_by_itself_ends_with_the_engines_own_token_which_is_no_word() -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW, mean_output_tokens=3.0)
        capabilities = await engine.start()
        for number in range(20):
            listener = Listener()
            engine_request = engine_request_of(request(str(number), 1000), None)
            (stream,) = engine.dispatch(0, [engine_request], padded=False, joining=True)
            stream.listener = listener
            await asyncio.sleep(1.1)
            last = listener.tokens[-1]
            assert ({last.id}, last.text) == (capabilities.eos_token_ids, "")
            assert not last.ends, "it is no forced length"
            assert [token.id for token in listener.tokens[:-1]] == list(
                range(2, 1 + len(listener.tokens))
            )
            assert not any(token.ends for token in listener.tokens), "that marks a forced end"

    run_virtual(main())


@pytest.mark.parametrize("end", ["stop", "start"])
def test_an_engine_that_stops_or_begins_anew_has_dropped_what_it_served(end: str) -> None:
    async def main() -> None:
        engine = EmulatedEngine(LAW)
        await engine.start()
        before, after = Listener(), Listener()
        (stream,) = engine.dispatch(
            0, [engine_request_of(request("a", 70), 70)], padded=False, joining=True
        )
        stream.listener = before
        await asyncio.sleep(0.0205)
        await getattr(engine, end)()
        assert len(before.tokens) == 20
        if end == "start":
            (stream,) = engine.dispatch(
                0, [engine_request_of(request("a", 5), 5)], padded=False, joining=True
            )
            stream.listener = after
            await asyncio.sleep(0.0007)
            assert after.tokens == [], "the old step would have ended by now"
        await asyncio.sleep(1)
        assert (len(before.tokens), len(after.tokens)) == (20, 5 if end == "start" else 0)

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stop", "start"])
def test_who_listened_to_an_engine_that_stopped_is_held_no_longer(end: str) -> None:
    async def main() -> None:
        engine, listener = EmulatedEngine(LAW), Listener()
        await engine.start()
        (stream,) = engine.dispatch(
            0, [engine_request_of(request("a", 70), 70)], padded=False, joining=True
        )
        stream.listener, held = listener, weakref.ref(listener)
        await asyncio.sleep(0.0205)
        del stream, listener
        gc.collect()
        assert held() is not None, "it is served"
        await getattr(engine, end)()
        gc.collect()
        assert held() is None

    run_virtual(main())


def test_lengths_follow_from_the_seed_alone() -> None:
    """Not from what the servers draw meanwhile: laws are compared on the same answers."""

    async def lengths(law: LatencyModel, seed: int) -> list[int]:
        engine, made = EmulatedEngine(law, seed=seed, mean_output_tokens=20.0), []
        await engine.start()
        for number in range(20):
            listener = Listener()
            (stream,) = engine.dispatch(
                0,
                [engine_request_of(request(str(number), 1000), None)],
                padded=False,
                joining=False,
            )
            stream.listener = listener
            await asyncio.sleep(10.0)
            made.append(len(listener.tokens))
        return made

    of_a_steady_one = run_virtual(lengths(LAW, 3))
    assert run_virtual(lengths(dataclasses.replace(LAW, cv=0.3), 3)) == of_a_steady_one
    assert run_virtual(lengths(LAW, 4)) != of_a_steady_one


@pytest.mark.parametrize(("options", "mean"), [({}, 64.0), ({"mean_output_tokens": 8.0}, 8.0)])
def test_answers_are_as_long_on_average_as_those_of_the_model(
    options: dict[str, float], mean: float
) -> None:
    engine = EmulatedEngine(LAW, **options)  # type: ignore[arg-type]
    asked = engine_request_of(request("a", 10**6), None)
    lengths = [engine.natural_length(asked) for _ in range(4000)]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    assert abs(statistics.mean(lengths) - mean) < 4 * error
    assert error < 0.05 * mean


def test_an_answer_that_goes_on_ends_as_far_behind_what_it_has_as_a_new_one_from_nothing() -> None:
    """A length without memory, and no answer below `min_tokens`."""
    new, continued = (EmulatedEngine(LAW, seed=5) for _ in range(2))
    asked = engine_request_of(request("a", 10**6), None)
    begun = msgspec.structs.replace(asked, output_token_ids=(7,) * 40)
    for _ in range(20):
        assert continued.natural_length(begun) == 40 + new.natural_length(asked)
    least = engine_request_of(request("a", 10**6), None, min_tokens=10**5)
    assert new.natural_length(least) == 10**5


def test_what_an_engine_has_that_nobody_bounds() -> None:
    capabilities = run_virtual(EmulatedEngine(LAW).start())
    assert (
        capabilities.max_model_len,
        capabilities.max_num_seqs,
        capabilities.max_num_batched_tokens,
        capabilities.kv_cache_tokens,
    ) == (2048, 64, 131072, 131072)
    assert not capabilities.chunked_prefill
    chunked = run_virtual(EmulatedEngine(LAW, enable_chunked_prefill=1).start())
    assert chunked.chunked_prefill
    assert "step_tokens" not in describe_engine(capabilities, "tiny")


def test_an_engine_says_that_it_computes_long_prompts_in_parts() -> None:
    engine = EmulatedEngine(LAW, enable_chunked_prefill=1, max_num_batched_tokens=512)
    assert describe_engine(run_virtual(engine.start()), "tiny")["step_tokens"] == 512


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0; expected a whole number >= 1"),
        ({"kv_cache_tokens": -5}, "kv_cache_tokens=-5; expected a whole number >= 1"),
        ({"enable_chunked_prefill": 2}, "enable_chunked_prefill=2; expected true or false"),
        (
            {"enable_chunked_prefill": 1, "max_num_batched_tokens": 63},
            "max_num_batched_tokens=63 and max_num_seqs=64; expected at least as many tokens",
        ),
    ],
)
def test_bounds_that_nothing_could_be_served_within_are_refused(
    bounds: dict[str, int], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        EmulatedEngine(LAW, **bounds)
    EmulatedEngine(LAW, enable_chunked_prefill=1, max_num_batched_tokens=64)
    EmulatedEngine(LAW, max_num_batched_tokens=1)


def test_a_token_is_the_word_of_its_number() -> None:
    assert [(token.id, token.text) for token in TOKENS] == [
        (0, ""),
        *((n, f" word{n}") for n in range(1, 256)),
    ]


def test_every_word_has_a_token_of_the_vocabulary_and_no_text_has_one_too() -> None:
    letters = [chr(number) for number in range(33, 127)]
    ids = token_ids_of(
        " ".join(begin + one + other for begin in ("", "~") for one in letters for other in letters)
    )
    assert len(ids) == 2 * 94**2
    assert set(ids) == set(range(1, 256))
    assert token_ids_of("  ") == [1]
    one, other, alike = token_ids_of("12345678 12345679 12345678-and-more")
    assert one == alike != other, "the first eight bytes tell"


def served(output_tokens: int, **sampling: Any) -> list[Token]:
    """A whole answer of so many tokens."""

    async def main() -> list[Token]:
        engine, listener = EmulatedEngine(LAW), Listener()
        await engine.start()
        asked = engine_request_of(request("a", output_tokens), output_tokens, **sampling)
        (stream,) = engine.dispatch(0, [asked], padded=False, joining=False)
        stream.listener = listener
        await asyncio.sleep(10.0)
        return listener.tokens

    return run_virtual(main())


def test_the_words_of_a_long_answer_come_round_again() -> None:
    """And none of them is the end of an answer."""
    made = served(600)
    assert [token.id for token in made] == [1 + place % 255 for place in range(1, 601)]
    assert [token.text for token in made] == [f" word{1 + place % 255}" for place in range(1, 601)]


@pytest.mark.parametrize(("asked", "named"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_as_many_words_are_named_as_were_asked_for_the_one_that_came_first(
    asked: int, named: int
) -> None:
    for token in served(300, logprobs=asked):
        assert token.logprobs is not None
        first, *others = token.logprobs
        assert (first, len(others)) == (token.id, named - 1)
        assert list(token.logprobs.values()) == [
            TokenLogprob(TOKENS[number].text, -math.log(256), rank)
            for rank, number in enumerate(token.logprobs, 1)
        ]
    assert {token.logprobs for token in served(3)} == {None}


def test_an_idle_engine_has_no_timer() -> None:
    """Nor is the event loop given an instant at infinity."""

    async def main() -> list[float]:
        loop, engine = asyncio.get_running_loop(), EmulatedEngine(LAW)
        await engine.start()
        with patch.object(loop, "call_at", wraps=loop.call_at) as timers:
            for name in ("served", "left"):
                asked = engine_request_of(request(name, 2), 2)
                engine.dispatch(0, [asked], padded=False, joining=False)
                if name == "left":
                    engine.cancel([name])
                else:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
        return [call.args[0] for call in timers.call_args_list if call.args[1].__name__ == "_due"]

    assert run_virtual(main()) == pytest.approx([0.001, 0.002, 0.011])


def test_a_length_is_forced_or_none_or_drawn_around_the_mean_of_64_tokens() -> None:
    engine = EmulatedEngine(LAW, seed=1)
    forced = engine_request_of(request("a", 1000), 70, ignore_eos=True, min_tokens=90)
    assert engine.natural_length(forced) == 70
    endless = engine_request_of(request("a", 1000), None, ignore_eos=True)
    assert engine.natural_length(endless) > 1000
    own = engine_request_of(request("a", 1000), None)
    drawn = [engine.natural_length(own) for _ in range(10_000)]
    assert min(drawn) == 1
    assert np.mean(drawn) == pytest.approx(64, rel=0.04)  # four standard errors
    at_least = engine_request_of(request("a", 1000), None, min_tokens=50)
    assert min(engine.natural_length(at_least) for _ in range(1000)) == 50
    behind = msgspec.structs.replace(own, output_token_ids=(5,) * 300)
    more = [engine.natural_length(behind) - 300 for _ in range(10_000)]
    assert min(more) == 1
    assert np.mean(more) == pytest.approx(64, rel=0.04), "without memory"


def test_a_conversation_is_read_word_by_word_with_its_roles() -> None:
    messages = [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"text": "three"}, {"text": "four"}]},
        {"role": "assistant"},
    ]

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        assert await engine.encode_chat(messages, {}) == token_ids_of(
            "user: one two assistant: user: three four assistant:"
        )
        with pytest.raises(InvalidPromptError, match="got no messages"):
            await engine.encode_chat([], {})

    run_virtual(main())


def test_a_long_text_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def read(text: str) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return [len(text)]

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        assert [await engine.encode("x" * size) for size in (65_536, 65_537)] == [
            [65_536],
            [65_537],
        ]

    monkeypatch.setattr(emulated, "token_ids_of", read)
    asyncio.run(main())
    assert threads == [True, False]


def test_token_ids_are_words_of_the_vocabulary_whatever_tokenizer_they_are_of() -> None:
    assert EmulatedEngine(LAW).decode([1, 255, 256, 257, 0]) == " word1 word255 word1"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_token_ids_that_no_prompt_may_have_are_refused(name: str) -> None:
    def asked(token: int) -> Sampling:
        given: Any = {5: 1.0, token: 1.0} if name == "logit_bias" else (5, token)
        return Sampling(max_tokens=3, **{name: given})

    async def main() -> None:
        engine = EmulatedEngine(LAW)
        assert await engine.healthy()
        assert (await engine.start()).vocab_size == 2**31
        for token in (0, 2**31 - 1):
            assert await engine.check_sampling(asked(token)) == asked(token)
        for token in (-1, 2**31):
            with pytest.raises(InvalidSamplingError) as refused:
                await engine.check_sampling(asked(token))
            said = f"{name}: got token id {token}; expected 0 to 2147483647"
            assert (str(refused.value), refused.value.param) == (said, name)

    run_virtual(main())


@pytest.mark.parametrize("asked", [{"bad_words": ("no",)}, {"allowed_token_ids": (5,)}])
def test_what_words_without_meaning_cannot_keep_to_is_refused(asked: dict[str, Any]) -> None:
    async def main() -> None:
        with pytest.raises(UnsupportedError, match="use --engine vllm") as refused:
            await EmulatedEngine(LAW).check_sampling(Sampling(max_tokens=3, **asked))
        assert [refused.value.param] == list(asked)

    run_virtual(main())


@pytest.mark.parametrize(("chunked", "first_token_at"), [(0, 0.001), (1, 0.004)])
def test_a_long_prompt_takes_several_steps_where_the_engine_computes_it_in_parts(
    chunked: int, first_token_at: float
) -> None:
    """200 tokens, of 64 a step."""

    async def main() -> None:
        engine = EmulatedEngine(LAW, max_num_batched_tokens=64, enable_chunked_prefill=chunked)
        await engine.start()
        listener, loop = Listener(), asyncio.get_running_loop()
        asked = engine_request_of(request("a", 3)._replace(prompt_tokens=200), 3)
        (stream,) = engine.dispatch(0, [asked], padded=False, joining=True)
        stream.listener = listener
        while not listener.tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.0001)
        assert loop.time() == pytest.approx(first_token_at, abs=0.0002)

    run_virtual(main())


def test_a_served_engine_draws_no_numbers_of_a_load_generator() -> None:
    """With one seed the lengths of answers were the gaps between arrivals."""

    def first(generator: np.random.Generator) -> float:
        return float(generator.random())

    engines = [np.random.SeedSequence(engine_seed(server)).spawn(4) for server in range(8)]
    ours = {first(np.random.default_rng(child)) for children in engines for child in children}
    theirs = {first(generator) for seed in range(200) for generator in streams(seed)}
    assert len(ours) == 32
    assert not ours & theirs
