"""What an order of service is: one class, whose `form` says who goes first. The live queue reads
the form here, the compiled queues in `queueing.simulation.orders.policy_order`, the analysis in
`queueing.models.soap.token_orders`. A class of this folder with a `name` of its own is an order.

The driver keeps the queue in the order of `rank`, lower first and equal ranks in the order of
arrival, so that a policy takes its first requests.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

from kendall.policies.core import Request, Running, Server, Waiting, fitting_ids
from kendall.policies.errors import SpecError
from kendall.policies.flow_counters import TokenWeights

# largest priority of either sign: without a bound on it the bound on overtaking would bound nothing
MOST_PRIORITY = 100
MOST_BINS = 1000
LEAST_TOKENS = 1e-9  # of a prediction that waits are divided by
LARGEST = 1e100  # of a parameter: times as many tokens it is a number


def predicted_tokens(request: Request) -> float:
    """The predicted length, at most the limit; the limit where none is predicted."""
    predicted = request.predicted_output_tokens
    if predicted is None:
        return float(request.max_output_tokens)
    return min(predicted, float(request.max_output_tokens))


def _priority(request: Request) -> float:
    """One that was admitted before priorities aged may have any."""
    return float(max(-MOST_PRIORITY, min(MOST_PRIORITY, request.priority)))


def predicted_memory(request: Request) -> float:
    """Tokens of KV memory that it is predicted to hold, summed over its steps."""
    tokens = predicted_tokens(request)
    return tokens * (request.prompt_tokens + (tokens + 1) / 2)


Quantity = Literal["arrival", "prediction", "memory", "priority", "deadline"]
_OF_REQUEST: dict[Quantity, Callable[[Request], float]] = {
    "arrival": lambda _: 0.0,  # equal ranks
    "prediction": predicted_tokens,
    "memory": predicted_memory,
    "priority": _priority,
    "deadline": lambda request: request.deadline,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The rank of a request with so many tokens made, lower first:

        value = weight x quantity + per_token x made + level
        quantity = quantity + prompt_weight x prompt tokens, while no token is made
        value = min(|value|, weight x quantity) where it `bounces`
        value = -infinity where weight x quantity <= `first_up_to`, or made < `first_tokens`
        rank = value, or with `aging` S: arrival + S x value

    `above`: 1 where weight x quantity is above it, else 0, in its place. `boosts`: in its place
    ln(1 - e^-x), x = weight x quantity / boosts. With aging a request is overtaken only by those
    that arrive within S x (own value - their value) seconds after it; S = 0 is first come, first
    served.
    """

    quantity: Quantity = "arrival"
    weight: float = 1.0
    prompt_weight: float = 0.0
    above: float | None = None
    boosts: float | None = None
    first_up_to: float | None = None  # of a smaller quantity: before all others, by arrival
    first_tokens: int = 0  # of every request: before all others, by arrival
    per_token: float = 0.0
    bounces: bool = False  # what falls to 0 with its tokens rises again, up to where it began
    starts: tuple[int, ...] = ()  # tokens made with which each level begins: 0, ..
    ranks: tuple[float, ...] = ()  # of each level, in place of its number; with `every` 0
    classes: tuple[float, ...] = ()  # the largest prediction of each class but the last, whose
    # levels have ranks of their own: a row of `ranks` behind the other
    every: int = 0  # tokens of each level from the last of these on; 0: it has no end
    aging: float | None = None  # seconds for each unit of the value
    settled: float | None = None  # share of the prediction from which on it is not interrupted
    ratio: bool = False  # no rank, but the largest of time waited / value first
    bins: int | None = None  # batches of one bin, of so many equal shares of the token limit

    def value(self, request: Request, made: int) -> float:
        """What it is ranked by."""
        value = _OF_REQUEST[self.quantity](request)
        if self.prompt_weight and not made:
            value += self.prompt_weight * request.prompt_tokens
        value *= self.weight
        short = self.first_up_to is not None and value <= self.first_up_to
        if short or made < self.first_tokens:
            return -math.inf
        if self.above is not None:
            value = float(value > self.above)
        elif self.boosts is not None:
            value = boosted(value / self.boosts)
        if self.per_token:
            begun = value
            value += self.per_token * made
            if self.bounces:
                value = min(abs(value), begun)
        if not self.starts:
            return value
        row = bisect_left(self.classes, predicted_tokens(request)) if self.classes else 0
        return value + self.level(made, row)

    def level(self, made: int, row: int = 0) -> float:
        """Its number, from 0, or what it has of `ranks`, of the class `row`."""
        if self.ranks:
            return self.ranks[row * len(self.starts) + bisect_right(self.starts, made) - 1]
        beyond = made - self.starts[-1]
        whole = beyond // self.every if self.every and beyond > 0 else 0
        return bisect_right(self.starts, made) - 1 + whole


def boosted(share: float) -> float:
    """ln(1 - e^-share); of the least share for 0."""
    return math.log(-math.expm1(-max(share, LEAST_TOKENS)))


def parameter(
    expected: str,
    within: Callable[[Any], bool],
    default: Any = dataclasses.MISSING,
    *,
    seconds: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of an order: its range in words and as a condition; `seconds`: a text may give it
    with a unit; `choices`: all its values.
    """
    metadata = {"expected": expected, "within": within, "seconds": seconds, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


# the latency law; of the distribution of the lengths the Gittins index or the mean residual length
Learns = Literal["service", "gittins", "residual"]


class RankTable(NamedTuple):
    """Ranks that were learned, as `Form` has them."""

    classes: tuple[float, ...]
    starts: tuple[int, ...]
    ranks: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order of service. Raises SpecError for a parameter out of its range."""

    name: ClassVar[str]
    predicts: ClassVar[bool] = False  # by predicted lengths
    preemptive: ClassVar[bool] = False
    batches: ClassVar[bool] = False  # of some of those that wait: not one by one
    assumption: ClassVar[str] = "order of service: {name}"  # of a prediction under this order

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, within = getattr(self, each.name), each.metadata.get("within")
            if value is not None and within is not None and not within(value):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise SpecError(f"got {each.name}={shown}; expected {each.metadata['expected']}")
            if isinstance(value, float) and LARGEST < value < math.inf:
                raise SpecError(f"got {each.name}={value:g}; expected at most {LARGEST:g}")

    @cached_property
    def form(self) -> Form:
        """Who goes first."""
        return Form()

    @property
    def learns(self) -> Learns | None:
        """What its ranks follow from beside the requests."""
        return None

    @property
    def weights(self) -> TokenWeights | None:
        """Of an order that goes by the service of each flow, which the driver counts then."""
        return None

    @classmethod
    def is_formal(cls) -> bool:
        """Whether its form says all that it does."""
        own = ("rank", "may_interrupt", "groups", "first")
        return all(getattr(cls, each) is getattr(Order, each) for each in own)

    @cached_property
    def ranked(self) -> bool:
        """Whether the queue is kept in the order of `rank`; else in that of arrival."""
        form = self.form
        return (form.quantity != "arrival" or bool(form.starts)) and not (form.ratio or form.bins)

    @property
    def wants_steps(self) -> bool:
        """Whether a request in service may lose its rank with every token."""
        form = self.form
        rises = bool(form.starts) or form.per_token > 0 or form.bounces or form.first_tokens > 0
        return self.preemptive and rises

    @property
    def rises(self) -> bool:
        """Whether who arrives later ranks later by as many seconds."""
        return self.form.quantity == "deadline" or self.form.aging is not None

    def rank(self, request: Request, made: int) -> float:
        """Where it stands with so many tokens made; lower first."""
        value, aging = self.form.value(request, made), self.form.aging
        return value if aging is None else request.arrived_at + aging * value

    def may_interrupt(self, running: Running) -> bool:
        """Whether one in service may be preempted by one of a lower rank."""
        if not (self.preemptive and running.preemptible):
            return False
        settled = self.form.settled
        return settled is None or (
            running.output_tokens_so_far < settled * predicted_tokens(running.request)
        )

    def groups(self, waiting: Sequence[Waiting]) -> Sequence[Sequence[Waiting]]:
        """Those waiting, by whom they may share a batch with; the group of the oldest first."""
        if self.form.bins is None:
            return (waiting,)
        found: dict[int, list[Waiting]] = {}
        for each in waiting:
            found.setdefault(self.bin_of(each.request), []).append(each)
        return list(found.values())

    def bin_of(self, request: Request) -> int:
        """From 1 to `bins`."""
        share = predicted_tokens(request) / request.max_output_tokens
        return max(1, math.ceil((self.form.bins or 1) * share))

    def first(
        self,
        waiting: Sequence[Waiting],
        size: int,
        server: Server,
        now: float,
        virtual_tokens: Mapping[str, float],
    ) -> tuple[str, ...]:
        """Up to `size` of those waiting, in the order of service, that fit together on the
        server; `virtual_tokens` as `QueueState` has them.
        """
        del virtual_tokens
        if self.form.bins is not None:
            waiting = self.groups(waiting)[0]
        elif self.form.ratio:
            value = self.form.value

            def ratio(each: Waiting) -> float:
                waited = each.request.arrived_at - now
                return waited / max(value(each.request, 0), LEAST_TOKENS)

            waiting = sorted(waiting, key=ratio)
        return fitting_ids(waiting, size, server)


@dataclass(frozen=True, kw_only=True)
class Aging(Order):
    """An order by values that may age."""

    aging: float | None = parameter(
        "finite seconds >= 0", lambda aging: 0 <= aging < math.inf, None, seconds=True
    )
    table: RankTable | None = dataclasses.field(default=None, init=False, repr=False)

    def with_ranks(
        self,
        starts: tuple[int, ...],
        ranks: tuple[float, ...],
        classes: tuple[float, ...] = (),
    ) -> Self:
        """The order with these ranks: for each class of predictions one from each number of tokens
        made on; without any, nothing is to be preempted.
        """
        found = dataclasses.replace(self)
        object.__setattr__(found, "table", RankTable(classes, starts, ranks))
        return found

    def by_table(self, plain: Form) -> Form | None:
        """The form with the ranks that were learned, if there are any."""
        if self.table is None or not self.table.starts:
            return None
        return dataclasses.replace(plain, weight=0.0, per_token=0.0, **self.table._asdict())


BY = ("tokens", "service")


@dataclass(frozen=True, kw_only=True)
class ByLength(Aging):
    """An order by predicted tokens; `by` service: prompts count too, a token of theirs as
    `prompt_weight` tokens of the answer; 0: what follows from the latency law.
    """

    by: str = parameter("tokens or service", BY.__contains__, BY[0], choices=BY)
    prompt_weight: float = parameter(
        "a finite number >= 0", lambda weight: 0 <= weight < math.inf, 0.0
    )
    predicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_weight and self.by != "service":
            raise SpecError(
                f"got prompt_weight={self.prompt_weight:g} with by={self.by}; expected by=service"
            )

    @property
    def learns(self) -> Learns | None:
        return "service" if self.by == "service" else None

    def by_length(self, **terms: Any) -> Form:
        """The form that ranks by predicted length, with further terms."""
        quantity: Quantity = "memory" if self.by == "memory" else "prediction"
        weight = self.prompt_weight
        return Form(quantity=quantity, prompt_weight=weight, aging=self.aging, **terms)


def key(order: Order, each: Waiting | Running) -> tuple[float, float]:
    """By which a queue is sorted, and those in service are compared with it; lower first."""
    request = each.request
    return order.rank(request, each.output_tokens_so_far), request.arrived_at


def outranked(order: Order, first: Waiting, in_service: Sequence[Running]) -> list[Running]:
    """Those in service that may be preempted for the first of the queue, the worst rank first."""
    own = key(order, first)
    behind = [
        (rank, running)
        for running in in_service
        if order.may_interrupt(running) and (rank := key(order, running)) > own
    ]
    behind.sort(key=lambda each: each[0], reverse=True)
    return [running for _, running in behind]
