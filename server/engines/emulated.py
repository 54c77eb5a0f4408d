"""An engine that obeys the latency law, token by token, on absolute instants of the event loop's
clock.

For machines without vLLM and for tests on virtual time. Its words mean nothing; its timing is the
law's. It reads the prompts' lengths and draws an answer's own length from a geometric law of the
model it pretends to be, unless a length is forced.
"""

from __future__ import annotations

import asyncio
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kendall.policies import SpecError
from kendall.policies.core import UNBOUNDED
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    InvalidPromptError,
    InvalidSamplingError,
    Sampling,
    Step,
    Token,
    TokenLogprob,
    TokenStream,
    UnsupportedError,
)
from kendall.server.engines.prefix_cache import PrefixCache
from kendall.server.runtime.clock import clock_of

EOS = 0
BOUNDS = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 131072,
    "kv_cache_tokens": 131072,
    "enable_chunked_prefill": 0,
    "enable_prefix_caching": 0,
}
SWITCHES = ("enable_chunked_prefill", "enable_prefix_caching")
# tokens, about, before others have their turn on the loop: a fraction of a millisecond
MOST_AT_ONCE = 32
PROMPT_TOKEN_IDS = 1 << 31  # prompts are counted, not read: they may be of any client's tokenizer
VOCABULARY = ("", *(f" word{index}" for index in range(1, 256)))
LONG_TEXT = 1 << 16  # characters that are read on the event loop
TOKENS = tuple(Token(index, text) for index, text in enumerate(VOCABULARY))
UNIFORM = -math.log(len(VOCABULARY))  # logarithm of a word's probability


class EmulatedEngine:
    """One or more servers under the law. It says of itself that it is emulated."""

    def __init__(
        self,
        law: LatencyModel,
        *,
        servers: int = 1,
        seed: int = 0,
        mean_output_tokens: float = 64.0,
        **bounds: int,
    ) -> None:
        if law.step(1) == 0:
            raise SpecError(
                "got k3=0, k4=0 in the latency law of the emulated engine, which makes tokens step "
                "by step; expected one of them > 0"
            )
        self.law = law
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        unknown = set(bounds) - set(BOUNDS)
        if unknown:
            raise SpecError(
                f"got engine argument {min(unknown)!r}; expected one that the emulated engine "
                f"has: {', '.join(BOUNDS)}"
            )
        self._bounds = BOUNDS | bounds
        _check(self._bounds)
        rngs = [
            np.random.default_rng(child)
            for child in np.random.SeedSequence(seed).spawn(servers + 1)
        ]
        self._lengths, self._mean = rngs[0], mean_output_tokens
        self._servers = [_EmulatedServer(self, index, rng) for index, rng in enumerate(rngs[1:])]

    def new_process(self, rng: np.random.Generator) -> ServiceProcess:
        """One that holds nothing."""
        chunked = self._bounds["enable_chunked_prefill"]
        tokens = self._bounds["max_num_batched_tokens"] if chunked else UNBOUNDED
        return ServiceProcess(self.law, rng, step_tokens=tokens)

    def new_cache(self) -> PrefixCache | None:
        """One that holds nothing; None where prompts are always computed whole."""
        if not self._bounds["enable_prefix_caching"]:
            return None
        return PrefixCache(self._bounds["kv_cache_tokens"])

    async def start(self) -> Capabilities:
        """Ready at once; holds nothing."""
        for server in self._servers:
            server.drop()
            server.begin(asyncio.get_running_loop())
        return Capabilities(
            engine="emulated",
            model="emulated",
            eos_token_ids=frozenset({EOS}),
            vocab_size=PROMPT_TOKEN_IDS,
            servers=len(self._servers),
            versions={"python": platform.python_version()},
            hardware={"emulated_law": str(self.law)},
            max_model_len=self._bounds["max_model_len"],
            max_num_seqs=self._bounds["max_num_seqs"],
            max_num_batched_tokens=self._bounds["max_num_batched_tokens"],
            kv_cache_tokens=self._bounds["kv_cache_tokens"],
            chunked_prefill=bool(self._bounds["enable_chunked_prefill"]),
        )

    async def stop(self) -> None:
        """Drop everything."""
        for server in self._servers:
            server.drop()

    async def healthy(self) -> bool:
        """Always."""
        return True

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """One token per word; there are no special ones."""
        del special_tokens
        return (
            token_ids_of(text)
            if len(text) <= LONG_TEXT
            else await asyncio.to_thread(token_ids_of, text)
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """One token per word of every message."""
        del template_arguments
        if not messages:
            raise InvalidPromptError("got no messages; expected at least one")
        return await self.encode(
            " ".join(f"{message['role']}: {_text(message.get('content'))}" for message in messages)
        )

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """Words that mean nothing can keep to no form."""
        asked = {
            "structured_outputs": sampling.structured,
            "allowed_token_ids": sampling.allowed_token_ids,
            "bad_words": sampling.bad_words,
        }
        for name, value in asked.items():
            if value:
                raise UnsupportedError(
                    f"got {name}, which the emulated engine does not support; use --engine vllm",
                    name,
                )
        biased = sampling.logit_bias or {}
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
            if outside := [token for token in tokens if not 0 <= token < PROMPT_TOKEN_IDS]:
                raise InvalidSamplingError(
                    f"{name}: got token id {outside[0]}; expected 0 to {PROMPT_TOKEN_IDS - 1}", name
                )
        return sampling

    def decode(self, token_ids: Sequence[int]) -> str:
        """Words."""
        return "".join(VOCABULARY[token_id % len(VOCABULARY)] for token_id in token_ids)

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        """Enter the law's next step together."""
        return self._servers[server_id].dispatch(requests, padded=padded, joining=joining)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Out at once; the step in flight keeps its end."""
        for server in self._servers:
            for request_id in request_ids:
                server.cancel(request_id)

    def natural_length(self, engine_request: EngineRequest) -> int:
        """Where this answer would end by itself: forced, never (`ignore_eos`), or a geometric
        draw.
        """
        if engine_request.forced_output_tokens is not None:
            return engine_request.forced_output_tokens
        if engine_request.sampling.ignore_eos:
            return engine_request.sampling.max_tokens + 1
        return max(
            len(engine_request.output_token_ids) + int(self._lengths.geometric(1 / self._mean)),
            engine_request.sampling.min_tokens,
        )  # without memory


class _EmulatedAnswer:
    """One answer in the making: where it ends, and its next token."""

    def __init__(
        self, engine_request: EngineRequest, natural_length: int, cached_tokens: int
    ) -> None:
        self.stream = stream = TokenStream(engine_request.request.id)
        stream.cached_tokens = cached_tokens
        self._forced = engine_request.forced_output_tokens is not None
        self._made_before = len(engine_request.output_token_ids)
        self._logprobs = engine_request.sampling.logprobs
        self._ends_at = natural_length
        most = engine_request.sampling.max_tokens
        length = (natural_length if natural_length < most else most) - self._made_before
        self.member = Member(
            engine_request.request.id,
            len(engine_request.prompt_token_ids) - cached_tokens + self._made_before,
            length if length > 1 else 1,
            resumed=self._made_before > 0,
        )

    def token(self) -> Token:
        """The token of the step just done."""
        position = self._made_before + self.member.produced
        token_id, ends = 1 + position % (len(VOCABULARY) - 1), position == self._ends_at
        if ends and not self._forced:
            token_id, ends = EOS, False
        if self._logprobs is None and not ends:
            return TOKENS[token_id]
        return Token(token_id, VOCABULARY[token_id], ends, self._candidates(token_id))

    def _candidates(self, token_id: int) -> dict[int, TokenLogprob] | None:
        """The token and those behind it in the vocabulary, all equally likely."""
        if self._logprobs is None:
            return None
        ids = [(token_id + place) % len(VOCABULARY) for place in range(max(1, self._logprobs))]
        return {
            number: TokenLogprob(VOCABULARY[number], UNIFORM, rank)
            for rank, number in enumerate(ids, 1)
        }


class _EmulatedServer:
    """One server: a timer at the end of the step in flight."""

    def __init__(self, engine: EmulatedEngine, index: int, rng: np.random.Generator) -> None:
        self.engine = engine
        self.index = index
        self._rng = rng
        self.process = engine.new_process(rng)
        self._cache = engine.new_cache()
        self._answers: dict[str, _EmulatedAnswer] = {}
        self._padded: bool  # of the last dispatch
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._now = loop, clock_of(loop)

    def dispatch(
        self, requests: Sequence[EngineRequest], *, padded: bool, joining: bool
    ) -> list[TokenStream]:
        self._padded = padded
        answers = [
            _EmulatedAnswer(
                engine_request,
                self.engine.natural_length(engine_request),
                self._cached(engine_request),
            )
            for engine_request in requests
        ]
        for answer in answers:
            self._answers[answer.stream.request_id] = answer
        self.process.admit(
            self._now(), [answer.member for answer in answers], padded=padded, joining=joining
        )
        self._schedule()
        return [answer.stream for answer in answers]

    def _cached(self, engine_request: EngineRequest) -> int:
        if self._cache is None:
            return 0
        return self._cache.take(engine_request.prompt_token_ids, engine_request.cache_salt)

    def cancel(self, request_id: str) -> None:
        if self._answers.pop(request_id, None) is not None:
            # steps that are due and not yet told are still to be done one by one
            self.process.remove(request_id, self._now(), catch_up=False)
            self._schedule()

    def drop(self) -> None:
        self._answers.clear()
        self.process = self.engine.new_process(self._rng)
        self._cache = self.engine.new_cache()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        at = self.process.next_step_at()
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._due) if at < math.inf else None

    def _due(self) -> None:
        """The step whose end has come, and those that a late loop finds due behind it: the law's
        instants do not wait for it.
        """
        self._timer = None
        made = self._step()
        while made < MOST_AT_ONCE and self.process.next_step_at() <= self._now():
            made += self._step()
        self._schedule()

    def _step(self) -> int:
        """One token to each; returns how many."""
        running, ended = self.process.step()
        if self.engine.on_step is not None:
            self._tell_step(running, self.engine.on_step)
        answers = [
            answer for member in running if (answer := self._answers.get(member.id)) is not None
        ]
        if not self._padded:
            for member in ended:
                del self._answers[member.id]
        for answer in answers:
            listener = answer.stream.listener
            if listener is not None:
                listener.on_tokens((answer.token(),))
        return len(running)

    def _tell_step(self, running: Sequence[Member], on_step: Callable[[Step], None]) -> None:
        fresh = [member for member in running if member.produced == 1]
        prompts = sum(member.prompt_tokens for member in fresh)
        on_step(Step(self._now(), len(running), len(fresh), prompts, self.index))


def _check(bounds: Mapping[str, int]) -> None:
    """Raises SpecError."""
    for name, value in bounds.items():
        if name in SWITCHES and value not in (0, 1):
            raise SpecError(f"got engine argument {name}={value}; expected true or false")
        if name not in SWITCHES and value < 1:
            raise SpecError(f"got engine argument {name}={value}; expected a whole number >= 1")
    tokens, slots = bounds["max_num_batched_tokens"], bounds["max_num_seqs"]
    if bounds["enable_chunked_prefill"] and tokens < slots:
        raise SpecError(
            f"got engine arguments max_num_batched_tokens={tokens} and max_num_seqs={slots}; "
            "expected at least as many tokens as sequences, one for each"
        )


def _text(content: Any) -> str:
    """A message's words: a text, or parts with texts."""
    return (
        " ".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    )


def token_ids_of(text: str) -> list[int]:
    """One for each word."""
    return [
        1 + hash_word(word[0]) % (len(VOCABULARY) - 1) for word in re.finditer(r"\S+", text)
    ] or [1]


def hash_word(word: str) -> int:
    """A stable number for a word (Python's own hash differs between processes)."""
    return int.from_bytes(word.encode()[:8], "little")
