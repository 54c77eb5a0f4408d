"""The KV memory that requests hold, reserved or taken token by token, and the tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

from kendall.policies.core import UNBOUNDED
from kendall.policies.immediate import Continuous
from kendall.policies.ordered import order_of
from kendall.policies.registry import is_built_in
from kendall.policies.text import SpecError, short_number
from kendall.queueing.description.parts import refuse
from kendall.queueing.description.predictions import Predictions
from kendall.queueing.distributions.packing import Reservations
from kendall.queueing.engine_bounds import or_unbounded
from kendall.queueing.latency.kv_memory import ContextUse, KvMemory

SWAPPING = ("swap", "auto")  # of a call to a tool, what may be kept of its memory
_INTERRUPTED = {
    "recompute": "loses its memory; its prompt and its tokens are computed again",
    "swap": "has its memory swapped out and back in, {swap}",
    "preserve": "keeps its memory until others need it, and computes it again then",
}
_KEPT = {
    "preserve": "held",
    "discard": "freed, and computed again",
    "swap": "swapped out and back in, {swap}",
    "auto": "held, freed or swapped ({swap}), whichever wastes least by the predicted call",
}


class Memory(Predictions):
    """A queue whose engine may be full before its slots are."""

    def _check_memory(self) -> None:
        memory = self.reservations
        if memory is None:
            return
        given = f"max_context_tokens={memory.memory}"
        if self.requests.endless:
            raise SpecError(
                f"got {given} for output lengths without a limit, which no memory holds; expected "
                "max_output_tokens too"
            )
        if memory.memory < memory.largest:
            reserved = self.engine.bounds.reserved_tokens
            raise SpecError(
                f"got {given}; expected at least {memory.largest}, the largest prompt "
                f"({memory.largest - memory.token_limit}) and the "
                f"{'token limit' if reserved is None else 'reserved tokens'} "
                f"({memory.token_limit}): give more memory, or set a smaller max_output_tokens"
            )
        if self.memory_limited and not self.policy.joins_running:
            most = "" if self.bound is None else f", {self.bound} x {memory.largest} tokens"
            raise SpecError(
                f"got {given} for policy {self.text}; expected policy continuous, or memory for "
                f"its largest batch{most}: batches that memory cuts are not modelled"
            )

    def _check_on_demand(self) -> None:
        requests, engine, law = self.requests, self.engine, self.engine.law
        given = f"got kv={engine.kv}" if engine.kv is not None else ""
        if requests.tool_calls is not None:
            given = given or f"got tool_calls={requests.tool_calls}"
            swaps = requests.tool_calls.keep in SWAPPING
            if swaps and not self.kv.swaps:
                raise SpecError(
                    f"{given} without the time of a swap; expected it in kv, for example "
                    "preempt=recompute,setup=10ms,token=20us"
                )
        if not given:
            return
        order = order_of(self.policy)
        if not isinstance(self.policy, Continuous) or not is_built_in(self.policy):
            raise SpecError(
                f"{given} for policy {self.text}; expected continuous, whose requests take memory "
                "token by token"
            )
        refused = {
            f"order={order.name}": not order.is_formal() or order.form.ratio,
            f"servers={engine.servers}": engine.servers > 1
            and engine.routing not in {"random", "round_robin"},
            "server_speeds": bool(engine.server_speeds),
            "patience": requests.patience is not None,
            "max_num_queued_reqs": engine.max_num_queued_reqs is not None,
            "disaggregated": engine.disaggregated,
            "second_model": engine.second_model is not None,
            "step_tokens": engine.bounds.step_tokens is not None,
            "reserved_tokens": engine.bounds.reserved_tokens is not None,
            f"turnaround={law.turnaround:g} in the latency law": law.turnaround > 0,
            "negative times in the latency law": law.k1 + law.k3 < 0
            or law.kp < 0
            or law.k1 + law.k3 + law.k4 <= 0,
            "predictions on the engine": self.predicts_on_server,
            "output lengths without a limit": requests.endless,
        }
        remedy = "KV memory by the token is simulated for one queue and server, orders by rank, "
        refuse(refused, f"{given} and {{}}; expected none: {remedy}no losses")
        memory, largest = engine.bounds.max_context_tokens, self._largest_context
        if memory is not None and memory < largest:
            raise SpecError(
                f"got max_context_tokens={memory}; expected at least {largest}, the largest prompt "
                f"({largest - requests.output_tokens.longest}) and the longest output "
                f"({requests.output_tokens.longest}): give more memory, or set a smaller "
                "max_output_tokens"
            )

    def _check_step(self) -> None:
        tokens = self.engine.bounds.step_tokens
        if tokens is None or not self.policy.joins_running:
            return
        if self.bound is None or tokens < self.bound:
            slots = "slots without a bound" if self.bound is None else f"{self.bound} slots"
            raise SpecError(
                f"got step_tokens={tokens} for {slots}; expected at least as many tokens as slots, "
                "one for each: give more, or fewer slots (max_num_seqs)"
            )

    @property
    def reservations(self) -> Reservations | None:
        """What requests hold of a memory that is given: their prompts and the token limit, or what
        is reserved in its place.
        """
        bounds = self.engine.bounds
        if bounds.max_context_tokens is None or self._by_the_token:
            return None
        held = min(self.requests.token_limit, or_unbounded(bounds.reserved_tokens))
        return Reservations(bounds.max_context_tokens, held, self.requests.prompt_tokens)

    @property
    def memory_limited(self) -> bool:
        """Whether a request may find a free slot and no memory."""
        memory = self.reservations
        if memory is None:
            return False
        return self.bound is None or self.bound * memory.largest > memory.memory

    @property
    def _by_the_token(self) -> bool:
        """Whether memory is not reserved."""
        return self.engine.kv is not None or self.requests.tool_calls is not None

    @property
    def kv(self) -> KvMemory:
        """What becomes of the memory of an interrupted request that does not reserve it."""
        return self.engine.kv or KvMemory()

    @property
    def _largest_context(self) -> int:
        prompts = self.requests.prompt_tokens
        longest = 0 if prompts is None else prompts.longest
        return longest + self.requests.output_tokens.longest

    @property
    def on_demand(self) -> bool:
        """Whether requests take memory token by token, and are interrupted: for others, for memory,
        or by their own calls.
        """
        calls = self.requests.tool_calls
        if not self._by_the_token or (calls is not None and calls.share > 0):
            return self._by_the_token
        memory = or_unbounded(self.engine.bounds.max_context_tokens)
        binds = self.bound is None or self.bound * self._largest_context > memory
        return order_of(self.policy).preemptive or (binds and memory < UNBOUNDED)

    @cached_property
    def context_use(self) -> ContextUse:
        """What requests that take memory token by token need of it, in the mean."""
        requests, law, kv = self.requests, self.law, self.kv
        lengths, prompts = requests.output_tokens, requests.prompt_tokens
        prompt = 0.0 if prompts is None else prompts.mean
        work, held = law.admission(1, prompt) + law.speed * law.k3 * lengths.mean, 0.0
        if requests.tool_calls is not None and requests.tool_calls.share > 0:
            calls, context = requests.tool_calls.context(lengths.pmf, prompt)
            again = law.admission(0, context, calls)
            moved = 2 * ((kv.setup or 0.0) * calls + (kv.token or 0.0) * context)
            if requests.tool_calls.keep == "preserve":
                held = requests.tool_calls.mean * context
            elif requests.tool_calls.keep == "discard":
                work += again
            elif requests.tool_calls.keep == "swap":
                work += moved
            elif context:  # what wastes least while all memory is in use
                memory, least = self.engine.bounds.max_context_tokens, min(again, moved)
                longest = math.inf if memory is None else least * memory / context
                kept, given_up = requests.tool_calls.up_to(longest)
                held, work = kept * context, work + given_up * least
        return ContextUse(
            work=work,
            alone=law.speed * law.k4 * lengths.mean,
            held=prompt + (lengths.moment(2) / lengths.mean + 1) / 2,
            in_calls=held,
        )

    @property
    def prompt_limited(self) -> bool:
        """Whether a batch may take fewer than wait, because of their prompts."""
        tokens, prompts = self.step_tokens, self.requests.prompt_tokens
        if tokens is None or self.policy.joins_running or prompts is None:
            return False
        return self.bound is None or (self.bound > 1 and self.bound * prompts.longest > tokens)

    @cached_property
    def in_saturation(self) -> Mapping[int, float] | None:
        """With which chances how many are in service on a server while requests wait, where the
        memory may bind; else None.
        """
        memory = self.reservations
        if memory is None or not self.memory_limited:
            return None
        return memory.chances(self.bound)

    def _tokens_assumed(self) -> Iterator[str]:
        """On memory that is taken token by token."""
        memory, kv, calls = self.engine.bounds.max_context_tokens, self.kv, self.requests.tool_calls
        where = "KV memory without a bound" if memory is None else f"KV memory of {memory:,} tokens"
        where += " on each server" if self.engine.servers > 1 else ""
        if not self.on_demand:
            yield f"{where} interrupts no request: kv changes nothing"
        else:
            yield (
                f"{where}: a request holds its prompt and the tokens made; where the next ones do "
                "not fit, the last in the order is interrupted"
            )
            yield f"an interrupted request {_INTERRUPTED[kv.preempt].format(swap=_swap(kv))}"
            yield (
                "the queue is looked at between two steps; queueing delay: all time in the queue; "
                "load: as if no request were interrupted, which makes more work"
            )
        if kv.swaps and kv.preempt != "swap" and (calls is None or calls.keep not in SWAPPING):
            yield "nothing is swapped: setup and token of kv are not paid"
        if calls is not None:
            kinds = " or ".join(f"{short_number(mean)} s" for _, mean in calls.kinds)
            yield (
                f"{calls.share:.0%} of the requests of several tokens call a tool once, at a "
                f"uniform token, exponential of mean {kinds}; memory meanwhile: "
                f"{_KEPT[calls.keep].format(swap=_swap(kv))}; calls count in the service time"
            )

    def _bounds_assumed(self) -> tuple[str, ...]:
        if self._by_the_token:
            return tuple(self._tokens_assumed())
        memory = self.reservations
        if memory is None:
            if self.step_tokens is not None:
                return (self._step_assumed(), "memory bounds of the engine do not bind")
            return ("token and memory bounds of the engine do not bind",)
        holds = f"KV memory of {memory.memory:,} tokens"
        if self.engine.servers > 1:
            holds += " on each server"
        if not self.memory_limited:
            most = (self.bound or 0) * memory.largest
            return (
                f"{holds} does not bind: those in service hold {most:,} at most",
                self._step_assumed(),
            )
        held = f"the token limit of {memory.token_limit:,}"
        if memory.token_limit < self.requests.token_limit:
            held = (
                f"{memory.token_limit:,} tokens for its answer, whose further tokens the engine "
                "finds room for without an interruption,"
            )
        return (
            f"{holds}: a request holds its prompt and {held} from its dispatch to its end; the "
            "first in the queue waits until it fits",
            self._step_assumed(),
        )

    def _step_assumed(self) -> str:
        unbound, tokens = "token bounds of the engine do not bind", self.step_tokens
        if tokens is None:
            return unbound
        if self.requests.prompt_tokens is None:
            return f"{unbound}: no prompts are given"
        if self.prompt_limited:
            return (
                f"the prompts of a batch have {tokens:,} tokens at most, or it has one request: "
                "the next in the queue waits for another"
            )
        if not self.policy.joins_running:
            if self.bound == 1:
                return f"{unbound}: one request at a time is taken whatever its prompt"
            return f"{unbound}: the prompts of {self.bound} requests have at most {tokens:,} tokens"
        return (
            f"an engine step computes at most {tokens:,} tokens: longer prompts take several steps"
        )


def _swap(kv: KvMemory) -> str:
    setup, token = short_number(kv.setup or 0.0), short_number(kv.token or 0.0)
    return f"{setup} s + {token} s a token each way"
