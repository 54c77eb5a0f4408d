"""What may be turned, how far, how often and how surely: the settings that an operator allows, and
the controller's own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kendall.policies import SpecError, parse_policy, policy_batch_size
from kendall.policies.registry import policy_class, usable_policies
from kendall.policies.text import suggest
from kendall.queueing.choosing.candidates import (
    LARGEST_SIZE,
    batch_sizes,
    one_knob_away,
    preferred,
    size_of,
    sized,
)
from kendall.queueing.choosing.forecast import Setting

Knob = Literal["policy", "batch size", "token limit"]
USUAL = ("capped", "elastic", "continuous")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutopilotBounds:
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
            if ":" not in text and policy_class(text) is None:
                known = usable_policies()
                raise SpecError(
                    f"got policy {text!r} for the autopilot; expected one of "
                    f"{', '.join(known)}{suggest(text, known)}"
                )
            parse_policy(text if ":" in text else sized(text, 1))
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
            default=LARGEST_SIZE,
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

    def other_policies(self, current: Setting, max_num_seqs: int | None) -> list[Setting]:
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
        return one_knob_away(current, policies=texts)

    def other_sizes(self, current: Setting, max_num_seqs: int | None) -> list[Setting]:
        """The family in force at other batch sizes; of dynamic, capped."""
        bound, policy = self.bound(max_num_seqs), parse_policy(current.policy)
        family = "capped" if policy.name == "dynamic" else policy.name
        if family not in self.policies or size_of(family) is None:
            return []
        texts = [sized(family, size, max_num_seqs, policy) for size in batch_sizes(bound)]
        return one_knob_away(current, sizes=texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How much better, how sure, how often, how far from the edge: gains and margins are
    fractions, times seconds.
    """

    threshold: float = 0.05  # a gain must exceed this, and its interval must exclude 0
    # seconds of mean delay that a change must save: less is not worth a new epoch
    floor: float = 1e-3
    # of the load: a setting must stay below 1 - margin at the upper ends of rate and speed
    margin: float = 0.02
    safer: float = 0.05  # by how much a setting must lower the load to count as the safe direction
    think_every: float = 60.0  # between two searches while the queue is stable
    cool_down: float = 60.0  # since the last change
    fewest: int = 200  # requests that ended since the last change
    after_rollback: float = 4.0  # times longer after a rollback
    rescue_gap: float = 5.0  # between two changes while the queue is unstable
    longest_trial: float = 300.0  # a change that could not be measured by then is kept
    # a setting that was rolled back is not tried again, and twice as long each time
    forbidden: float = 600.0
    forgiven: float = 0.3  # unless the load has changed by this much
    carried: float = 300.0  # for so long, rate and speed of an earlier epoch may stand in
    fewest_arrivals: int = 30  # before a rate counts as known
    fewest_ended: int = 10  # answers before lengths do
    unseen_speed: float = 0.1  # half width of the speed, relative, where no window showed it
    repeat: float = 300.0  # seconds between two equal things that were held back


def knob_between(before: Setting, after: Setting) -> Knob:
    """Which knob was turned."""
    if before.max_output_tokens != after.max_output_tokens:
        return "token limit"
    names = {parse_policy(each.policy).name for each in (before, after)}
    return "batch size" if len(names) == 1 or names == {"dynamic", "capped"} else "policy"
