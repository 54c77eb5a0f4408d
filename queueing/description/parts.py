"""The parts of a queue: when calls come, what they ask for, who serves them, and the policy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import msgspec

from kendall.policies.core import Policy
from kendall.policies.text import (
    SpecError,
    counted,
    format_policy,
    policy_batch_size,
    short_number,
    suggest,
)
from kendall.queueing.arrivals.notation import ArrivalProcess, highest_rate, in_words, letters
from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.arrivals.text import format_arrivals
from kendall.queueing.distributions.flows import Flows
from kendall.queueing.distributions.heavy_tail import LARGEST_COUNT
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.energy import EnergyLaw
from kendall.queueing.latency.kv_memory import KvMemory, ToolCalls
from kendall.queueing.latency.kv_transfer import KvTransfer
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.gg1 import LARGEST_SCV
from kendall.queueing.predictors.prediction_cost import PredictionCost
from kendall.queueing.predictors.predictor_text import NO_PREDICTION, PredictorText
from kendall.queueing.result import LEVELS, Levels
from kendall.queueing.second_model import SecondModel

# how requests come to the servers: from one queue, or each server has one of its own that they join
# by chance, in turn, where the fewest requests are, or where fewer are of two by chance
ROUTINGS = ("central", "random", "round_robin", "least_requests", "power_of_two")
NO_TRANSFER = KvTransfer()
LARGEST_SERVERS = 1_000_000  # the time of a prediction grows with them: below a second
MOST_QUEUES = 64  # that are simulated side by side


def refuse(given: Mapping[str, bool], sentence: str) -> None:
    """Raise SpecError with the first name that is given in place of {} in the sentence."""
    for name, is_given in given.items():
        if is_given:
            raise SpecError(sentence.format(name))


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrivals:
    """When calls arrive, but for their rate."""

    # squared coefficient of variation of the independent gaps between them; 1: Poisson
    scv: float = 1.0
    # at any mean rate: the arrival rate scales it; None: independent gaps of SCV `scv`
    process: ArrivalProcess | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.scv <= LARGEST_SCV:
            raise SpecError(
                f"got arrival_scv={self.scv}; expected 0 (regular arrivals) to "
                f"{LARGEST_SCV:g}, 1 for Poisson arrivals"
            )

    @property
    def poisson(self) -> bool:
        """Whether they are a Poisson process at a constant rate."""
        return self.scv == 1 and self.process is None

    @property
    def text(self) -> str:
        """As an argument names them."""
        if self.process is None:
            return f"arrival_scv={self.scv:g}"
        if isinstance(self.process, Recorded):
            return "recorded arrivals"
        return f"arrivals={format_arrivals(self.process)}"

    @property
    def letters(self) -> str:
        """In Kendall's notation."""
        if self.process is not None:
            return letters(self.process)
        return {0.0: "D", 1.0: "M"}.get(self.scv, "GI")

    def assumptions(self, largest_stable_rate: float) -> tuple[str, ...]:
        """In words, with the load at the peak of a process that has one."""
        if self.process is not None:
            highest = highest_rate(self.process)
            peak = None if highest is None else short_number(highest / largest_stable_rate)
            return (
                *in_words(self.process),
                *([] if peak is None else [f"load at its peak {peak}"]),
            )
        if self.scv == 1:
            return ("Poisson arrivals at a constant rate",)
        gaps = "independent gamma gaps" if self.scv else "equal gaps"
        scv = f", squared coefficient of variation {self.scv:g}"
        return (f"{gaps} between arrivals at a constant rate{scv if self.scv else ''}",)


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """What the requests of a call ask for; `output_tokens` are those after clipping."""

    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None = None
    # the limit of every request, in force; None, or below the longest length: that length
    max_output_tokens: int | None = None
    # requests that arrive together, as one call; None: always one
    sequences: TokenDistribution | None = None
    # of the output lengths in a call (queueing.distributions.call_lengths)
    intraclass_correlation: float = 0.0
    predictor: PredictorText = NO_PREDICTION  # of output lengths
    prediction_cost: PredictionCost | None = None  # of each of them; None: nothing
    flows: Flows | None = None  # of the requests; None: one
    patience: float | None = None  # seconds a request waits before it is lost
    tool_calls: ToolCalls | None = None  # within them; None: none

    def __post_init__(self) -> None:
        if self.patience is not None and not self.patience > 0:
            raise SpecError(f"got patience={self.patience}; expected seconds > 0")
        if not 0 <= self.intraclass_correlation <= 1:
            raise SpecError(
                f"got intraclass_correlation={self.intraclass_correlation}; expected 0 "
                "(independent lengths) to 1 (the lengths in a call are equal)"
            )
        if self.intraclass_correlation and self.sequences is None:
            raise SpecError(
                f"got intraclass_correlation={self.intraclass_correlation:g} without sequences; "
                "expected the distribution of the sequences in a call too"
            )
        if self.sequences is not None and self.sequences.longest == 1:
            object.__setattr__(self, "sequences", None)
            object.__setattr__(self, "intraclass_correlation", 0.0)
        if self.sequences is not None and self.flows is not None:
            raise SpecError(
                "got flows and sequences; expected one of the two: sequences of one call would be "
                "of several flows"
            )

    @property
    def call_size(self) -> float:
        """Mean number of sequences in a call."""
        return 1.0 if self.sequences is None else self.sequences.mean

    @property
    def endless(self) -> bool:
        """Whether the lengths have a tail beyond their table
        (queueing.distributions.heavy_tail).
        """
        return self.output_tokens.tail is not None

    @property
    def tail_index(self) -> float:
        """Moments of the lengths from this order on are infinite."""
        return math.inf if self.output_tokens.tail is None else self.output_tokens.tail.index

    @property
    def token_limit(self) -> int:
        """Of every request: the limit in force, without one the longest length; beyond any where
        there is none.
        """
        if self.endless:
            return int(LARGEST_COUNT)
        return max(self.output_tokens.longest, self.max_output_tokens or 0)

    @property
    def assumption(self) -> str:
        """On their lengths."""
        alike = self.intraclass_correlation
        if not alike:
            return "lengths independent of each other and of the queue"
        if alike == 1:
            return "lengths in a call equal, independent of those of other calls and of the queue"
        how = f"equal with probability {short_number(alike, 3)}"
        return f"lengths in a call {how}, else independent of each other; independent of the queue"


@dataclass(frozen=True, eq=False, kw_only=True)
class Engine:
    """How long service takes, on how many servers, and how requests come to them."""

    law: LatencyModel
    servers: int = 1
    # of each server, how many times as long as the law's its times are; empty: equally fast
    server_speeds: tuple[float, ...] = ()
    routing: str = "central"  # of ROUTINGS
    second_model: SecondModel | None = None  # beside that of the law
    max_num_queued_reqs: int | None = None  # sequences waiting or in service
    bounds: EngineBounds = field(default_factory=EngineBounds)
    pad_prompts: bool = False  # the prompts of a batch are padded to its longest one
    # prefill on servers of their own, then decode under the policy on `servers` behind them
    disaggregated: bool = False
    prefill_servers: int = 1  # 0: those behind them do both, a phase at a time
    kv_transfer: KvTransfer = NO_TRANSFER  # between the two
    energy: EnergyLaw | None = None  # joules; None: not asked for
    kv: KvMemory | None = None  # how interruptions treat memory; None: it is reserved

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= LARGEST_SERVERS:
            raise SpecError(
                f"got servers={self.servers}; expected a whole number from 1 to {LARGEST_SERVERS:,}"
            )
        if self.routing not in ROUTINGS:
            raise SpecError(
                f"got routing={self.routing!r}; expected {', '.join(ROUTINGS[:-1])} or "
                f"{ROUTINGS[-1]}{suggest(self.routing, ROUTINGS)}"
            )
        if self.routing != "central" and self.disaggregated:
            raise SpecError(
                f"got routing={self.routing} and disaggregated; expected servers that do the same: "
                "leave one of them out"
            )
        if self.has_queues and self.servers > MOST_QUEUES:
            raise SpecError(
                f"got routing={self.routing} to {self.servers:,} servers; expected at most "
                f"{MOST_QUEUES}, which are simulated side by side"
            )
        if self.server_speeds and len(self.server_speeds) != self.servers:
            raise SpecError(
                f"got {counted(len(self.server_speeds), 'server speed')} for "
                f"{counted(self.servers, 'server')}; expected one for each"
            )
        if self.disaggregated or self.routing != "central":
            self._check_parted()
        self._check_prefill()
        if self.second_model is not None:
            self._check_models(self.second_model)

    def _check_prefill(self) -> None:
        if not 0 <= self.prefill_servers <= LARGEST_SERVERS:
            raise SpecError(
                f"got prefill_servers={self.prefill_servers}; expected a whole number from 1 to "
                f"{LARGEST_SERVERS:,}, or 0 where every server prefills and decodes"
            )
        if self.disaggregated:
            return
        given = {
            f"prefill_servers={self.prefill_servers}": self.prefill_servers != 1,
            f"kv_transfer={self.kv_transfer}": bool(self.kv_transfer),
        }
        refuse(given, "got {} for servers that prefill and decode; expected disaggregated too")

    def _check_models(self, second: SecondModel) -> None:
        given = {
            f"routing={self.routing}": self.routing != "central",
            "disaggregated": self.disaggregated,
            "server_speeds": bool(self.server_speeds),
            f"max_num_queued_reqs={self.max_num_queued_reqs}": self.max_num_queued_reqs is not None,
            "energy": self.energy is not None,
        }
        refuse(given, "got {} and second_model; expected one of the two")
        if second.servers is not None and second.servers >= self.servers:
            raise SpecError(
                f"got a second model on {second.servers} of {counted(self.servers, 'server')}; "
                "expected more servers, of which the first model has the others"
            )
        if second.servers is None and self.servers > 1:
            raise SpecError(
                f"got two models on {self.servers} servers; expected one server, or how many of "
                "them have the second model alone, as servers in second_model"
            )
        if second.servers is None and (self.law.stall_share or second.law.stall_share):
            raise SpecError(
                "got a latency law with stalls and second_model on the same server; expected laws "
                "without stalls, or a server for each model"
            )

    def _check_parted(self) -> None:
        other = "disaggregated" if self.disaggregated else f"routing={self.routing}"
        given = {
            "server_speeds": bool(self.server_speeds),
            "max_num_queued_reqs": self.max_num_queued_reqs is not None,
        }
        remedy = "expected one queue for servers that do the same work: leave {0} out"
        refuse(given, f"got {{0}} and {other}; {remedy}")

    @property
    def has_queues(self) -> bool:
        """Whether each server has a queue whose arrivals depend on those of the others."""
        return self.routing in ("least_requests", "power_of_two") and self.servers > 1

    @property
    def pooled(self) -> bool:
        """Whether a request waits for both its prefill and its decode at the same servers."""
        return self.disaggregated and self.prefill_servers == 0

    @property
    def all_servers(self) -> int:
        """With those that prefill only."""
        return self.servers + (self.prefill_servers if self.disaggregated else 0)

    @property
    def assumption(self) -> str:
        """On service times."""
        speeds = ", ".join(map(short_number, self.server_speeds))
        law = "latency law" if self.second_model is None else "latency law of their model"
        return f"service times obey the {law}{speeds and f', times {speeds} by server'}"


_PARTS = {"requests": Requests, "engine": Engine, "arrivals": Arrivals}


@dataclass(frozen=True, eq=False, kw_only=True)
class Parts(ABC):
    """Everything a prediction depends on but the arrival rate."""

    policy: Policy
    requests: Requests
    engine: Engine
    arrivals: Arrivals = field(default_factory=Arrivals)
    levels: Levels = field(default_factory=lambda: LEVELS)  # of the quantiles of every duration

    def but(self, **changes: Any) -> Self:
        """The same with other values of these fields of its parts: `queue.but(servers=1)`."""
        own: dict[str, Any] = {
            name: changes.pop(name) for name in ("policy", "levels") if name in changes
        }
        for part, kind in _PARTS.items():
            names = {each.name for each in fields(kind)} & changes.keys()
            if names:
                new = {name: changes.pop(name) for name in names}
                own[part] = replace(getattr(self, part), **new)
        if changes:
            engine: Engine = own.get("engine", self.engine)
            bounds = msgspec.structs.replace(engine.bounds, **changes)
            own["engine"] = replace(engine, bounds=bounds)
        return replace(self, **own)

    @property
    def text(self) -> str:
        """The policy text as asked."""
        return format_policy(self.policy)

    @property
    def bound(self) -> int | None:
        """`effective_max_batch_size`: the policy's bound or the engine's, whichever is less;
        None where there is neither.
        """
        bounds = (policy_batch_size(self.policy), self.engine.bounds.max_num_seqs)
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def step_tokens(self) -> int | None:
        """Tokens that one step computes under this policy, of a batch all its prompts; None: as
        many as there are.
        """
        return self.engine.bounds.of_a_step(self.policy)

    @property
    def lossless(self) -> bool:
        """Whether every request is served: none runs out of patience, none is rejected."""
        return self.requests.patience is None and self.engine.max_num_queued_reqs is None

    @property
    @abstractmethod
    def largest_stable_rate(self) -> float:
        """Calls/s from which on the queue has no steady state."""
