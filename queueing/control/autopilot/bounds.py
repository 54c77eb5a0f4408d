"""What may be turned, and how far: the settings that an operator allows, and the one-knob
neighbours of a setting.

Batch sizes and token limits are preferred numbers, 2^k and 3 2^k (1, 2, 3, 4, 6, 8, 12, ...). A
window of some thousand answers tells the length that 5 % exceed to a few per cent only; a limit
that followed its noise would begin a new epoch every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policies import POLICIES, Policy, SpecError, format_policy, parse_policy, policy_batch_size
from policies.text import suggest
from queueing.control.advice.forecast import Knobs

Knob = Literal["policy", "batch size", "token limit"]
SIZED = {
    "fixed": "batch_size",
    "capped": "max_batch_size",
    "elastic": "max_batch_size",
    "continuous": "max_batch_size",
}
SIZE_OPTIONAL = ("elastic", "continuous")
USUAL = ("capped", "elastic", "continuous")
LARGEST = 64  # batch size, where neither engine nor operator says one


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`policies`: a bare name (`elastic`) allows every batch size of it, a text with keys
    (`capped:max_batch_size=8`) just itself.

    A policy in force that lies outside is left as soon as something inside is better; a token limit
    that does is left at once.
    """

    policies: tuple[str, ...] = USUAL
    # of all requests, by the gateway's token limit; 0: no limit is ever set
    max_clipped_fraction: float = 0.05
    largest_batch_size: int | None = None  # None: the engine's
    smallest_token_limit: int = 16
    # where given, there is always a limit, and it is at most this
    largest_token_limit: int | None = None

    def __post_init__(self) -> None:
        if not self.policies:
            raise SpecError(
                "got no policies for the autopilot; expected at least one, for example elastic"
            )
        for text in self.policies:
            if ":" in text:
                parse_policy(text)
            elif text not in POLICIES:
                raise SpecError(
                    f"got policy {text!r} for the autopilot; expected one of "
                    f"{', '.join(POLICIES)}{suggest(text, POLICIES)}"
                )
        if not 0 <= self.max_clipped_fraction < 1:
            raise SpecError(
                f"got max_clipped_fraction={self.max_clipped_fraction}; expected a fraction >= 0 "
                "and < 1"
            )
        if self.largest_batch_size is not None and self.largest_batch_size < 1:
            raise SpecError(
                f"got largest_batch_size={self.largest_batch_size}; expected at least 1"
            )
        high = self.largest_token_limit
        if self.smallest_token_limit < 1 or (high is not None and high < self.smallest_token_limit):
            got = f"smallest_token_limit={self.smallest_token_limit}, largest_token_limit={high}"
            raise SpecError(
                f"got {got}; expected at least 1, and the largest no smaller than the smallest"
            )

    def bound(self, max_num_seqs: int | None) -> int:
        """The largest batch size: the engine's or the operator's, whichever is less."""
        return min(
            (each for each in (self.largest_batch_size, max_num_seqs) if each is not None),
            default=LARGEST,
        )

    def allows_limit(self, limit: int | None) -> bool:
        """Whether a token limit lies inside, whatever it clips."""
        if limit is None:
            return self.largest_token_limit is None
        return self.smallest_token_limit <= limit and (
            self.largest_token_limit is None or limit <= self.largest_token_limit
        )

    def token_limits(self, longest: int) -> tuple[int, ...]:
        """Every limit that may be set, ascending; `longest` answer that the engine can give."""
        high = (
            longest - 1
            if self.largest_token_limit is None
            else min(self.largest_token_limit, longest - 1)
        )
        return preferred(self.smallest_token_limit, high)

    def other_policies(self, current: Knobs, max_num_seqs: int | None) -> list[Knobs]:
        """Other families, with the batch size in force or the largest; texts with keys as they
        stand.
        """
        bound, policy, engine = self.bound(max_num_seqs), parse_policy(current.policy), max_num_seqs
        size = min(policy_batch_size(policy) or bound, bound)
        texts = [
            form
            for text in self.policies
            for form in (
                [text]
                if ":" in text
                else [sized(text, each, engine, policy) for each in dict.fromkeys((size, bound))]
            )
        ]
        return _others(current, texts)

    def other_sizes(self, current: Knobs, max_num_seqs: int | None) -> list[Knobs]:
        """The family in force at other batch sizes; of dynamic, capped."""
        bound, policy = self.bound(max_num_seqs), parse_policy(current.policy)
        family = "capped" if policy.name == "dynamic" else policy.name
        if family not in self.policies or family not in SIZED:
            return []
        return _others(
            current, [sized(family, size, max_num_seqs, policy) for size in batch_sizes(bound)]
        )


def knob_between(before: Knobs, after: Knobs) -> Knob:
    """Which knob was turned."""
    if before.max_output_tokens != after.max_output_tokens:
        return "token limit"
    names = {parse_policy(each.policy).name for each in (before, after)}
    return "batch size" if len(names) == 1 or names == {"dynamic", "capped"} else "policy"


def sized(family: str, size: int, max_num_seqs: int | None, in_force: Policy | None = None) -> str:
    """A family at a batch size, as canonical text; the engine's own bound is left out where it may
    be.

    What else the policy `in_force` has stays (`max_wait`), where it is of this family.
    """
    if family not in SIZED or (
        family in SIZE_OPTIONAL and max_num_seqs is not None and size >= max_num_seqs
    ):
        return family
    if in_force is not None and in_force.name == family:
        return format_policy(dataclasses.replace(in_force, **{SIZED[family]: size}))  # type: ignore[type-var]
    return f"{family}:{SIZED[family]}={size}"


def batch_sizes(bound: int) -> tuple[int, ...]:
    """Preferred numbers up to the bound, and the bound itself."""
    return tuple(sorted({*preferred(1, bound), bound}))


def preferred(low: int, high: int) -> tuple[int, ...]:
    """2^k and 3 2^k in [low, high], ascending."""
    found = {factor * 2**power for factor in (1, 3) for power in range(max(high, 1).bit_length())}
    return tuple(sorted(number for number in found if low <= number <= high))


def _others(current: Knobs, texts: Sequence[str]) -> list[Knobs]:
    own = format_policy(parse_policy(current.policy))
    canonical = dict.fromkeys(format_policy(parse_policy(text)) for text in texts)
    return [dataclasses.replace(current, policy=text) for text in canonical if text != own]
