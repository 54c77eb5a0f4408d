"""Capabilities of an engine that has started, and why it may fail a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from kendall.policies.core import UNBOUNDED
from kendall.queueing.engine_bounds import EngineBounds

UNKNOWN_TOKENS = 2**31  # a bound that does not bind
FailureCode = Literal[
    "engine_unavailable", "engine_error", "invalid_request", "internal_error", "sequence_stalled"
]
"""Why a sequence failed.

engine_unavailable  the engine was lost, and another one may serve it
engine_error        this sequence alone failed, and would again
invalid_request     the engine refused what the client asks
internal_error      the gateway's fault
sequence_stalled    nothing came of it for too long
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSummary:
    """One server of the queue, for operators, with what there is of its kind.

    `utilisation`: the share of the last minute in which it was busy; `speed`: in the window, a
    factor on the law's times, None where it has served too little.
    """

    id: int
    url: str | UnsetType = UNSET
    state: str
    last_fault: str | UnsetType | None = UNSET
    in_service: int = 0
    restarts: int | UnsetType = UNSET
    last_loss: str | UnsetType | None = UNSET
    utilisation: float | UnsetType = UNSET
    speed: float | UnsetType | None = UNSET


@dataclass(frozen=True, slots=True)
class ServersSummary:
    """Each of them, and how many are to serve."""

    replicas: int
    last_failure: str | None
    servers: list[ServerSummary]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine is and the bounds within which it serves; known once it has started."""

    engine: str  # "vllm" | "emulated" | "http" | "watched"
    model: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    pads: bool = True
    # a prompt may take several steps: it may be longer than max_num_batched_tokens
    chunked_prefill: bool = False
    servers: int = 1
    # the queue is the engine's own, and its policy cannot be another one
    owns_queue: bool = False
    routing: str = "central"  # to several servers, which have a queue each under any other
    # names under which requests may ask for the model, where the engine decides them
    model_names: tuple[str, ...] = ()
    # of the model's own sampling, for calls that say nothing: temperature, top_p, ...
    sampling: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def reserved_tokens(self) -> int:
        """Of an answer, for which memory is kept free: its whole limit (UNBOUNDED) where the memory
        holds `max_num_seqs` contexts; else half of an equal share of it, so that as many requests
        can start whose prompts take the other half.
        """
        if self.max_num_seqs * self.max_model_len <= self.kv_cache_tokens:
            return UNBOUNDED
        return max(1, self.kv_cache_tokens // (2 * self.max_num_seqs))

    @property
    def step_tokens(self) -> int | None:
        """That one step computes at most, where long prompts take several."""
        return self.max_num_batched_tokens if self.chunked_prefill else None

    @property
    def batch_tokens(self) -> int | None:
        """Most prompt tokens of a batch, which are computed in one step."""
        return (
            None if self.max_num_batched_tokens >= UNKNOWN_TOKENS else self.max_num_batched_tokens
        )

    def bounds(self, reserved_tokens: int) -> EngineBounds:
        """As models of the queue have them; `reserved_tokens` are those in force."""
        memory = self.kv_cache_tokens if self.kv_cache_tokens < UNBOUNDED else None
        return EngineBounds(
            max_num_seqs=self.max_num_seqs,
            step_tokens=self.step_tokens,
            batch_tokens=self.batch_tokens,
            max_context_tokens=memory,
            reserved_tokens=None
            if memory is None or reserved_tokens >= UNBOUNDED
            else reserved_tokens,
        )

    @cached_property
    def largest_context(self) -> int:
        """Tokens of one prompt and its answer."""
        length, memory = self.max_model_len, self.kv_cache_tokens
        return length if length < memory else memory

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens of one that leaves room for an answer."""
        longest = self.largest_context - 1
        return longest if self.chunked_prefill else min(longest, self.max_num_batched_tokens)
