"""What an engine takes at once: light to import, for whoever only hands it on."""

from __future__ import annotations

import msgspec

from kendall.policies.core import UNBOUNDED, Policy
from kendall.policies.text import LARGEST_BATCH, SpecError, policy_batch_size

MOST_TOKENS = 2**53  # of a memory or a step: beyond, sums of floats lose some


class EngineBounds(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine takes at once, on each server; None: as much as there is."""

    max_num_seqs: int | None = None  # requests in service
    # tokens that one step computes where long prompts take several: one for each request that makes
    # tokens, the rest for prompts
    step_tokens: int | None = None
    batch_tokens: int | None = None  # prompt tokens of a batch, which one step computes
    # KV memory: those in service hold their prompts and token limits
    max_context_tokens: int | None = None
    reserved_tokens: int | None = None  # held in place of a larger token limit

    def __post_init__(self) -> None:
        if self.max_num_seqs is not None and not 1 <= self.max_num_seqs <= LARGEST_BATCH:
            raise SpecError(
                f"got max_num_seqs={self.max_num_seqs}; expected a whole number from 1 to "
                f"{LARGEST_BATCH:,}"
            )
        for name, tokens in (
            ("step_tokens", self.step_tokens),
            ("max_context_tokens", self.max_context_tokens),
        ):
            if tokens is not None and tokens > MOST_TOKENS:
                raise SpecError(
                    f"got {name}={tokens}; expected at most {MOST_TOKENS:,}, or no limit"
                )
        if self.max_context_tokens is None and self.reserved_tokens is not None:
            raise SpecError(
                f"got reserved_tokens={self.reserved_tokens} without max_context_tokens; expected "
                "the memory too"
            )

    def of_a_step(self, policy: Policy) -> int | None:
        """Tokens of one step under this policy."""
        return self.step_tokens if policy.joins_running else self.batch_tokens

    def for_slots(self, policy: Policy) -> EngineBounds:
        """Without `step_tokens` where those are fewer than the slots, or these have no bound: such
        an engine is not modelled.
        """
        if self.step_tokens is None:
            return self
        slots = min(or_unbounded(self.max_num_seqs), or_unbounded(policy_batch_size(policy)))
        modelled = self.max_num_seqs is not None and self.step_tokens >= slots
        return self if modelled else msgspec.structs.replace(self, step_tokens=None)


def or_unbounded(tokens: int | None) -> int:
    """A bound of an engine where one is given."""
    return UNBOUNDED if tokens is None else tokens
