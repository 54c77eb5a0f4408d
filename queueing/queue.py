"""The description of a queue: its arrivals, requests, policy and engine; which queue this is, and
where its stability ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec
import numpy as np

from kendall.policies.arguments import positive, real_number, short_repr, whole_number
from kendall.policies.core import UNBOUNDED, Policy
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Continuous, Single
from kendall.policies.ordered import Ordered, counts, in_arrival_order, order_of, with_ranking
from kendall.policies.orders import PARAMETERS
from kendall.policies.orders.order import Aging, ByLength, Order
from kendall.policies.orders.prefill import PrefillFirst
from kendall.policies.registry import class_fault, is_built_in, usable_policies
from kendall.policies.text import (
    SpecError,
    counted,
    format_policy,
    parse_policy,
    policy_batch_size,
    short_number,
    suggest,
)
from kendall.queueing.arrivals.notation import (
    ArrivalProcess,
    has_end,
    highest_rate,
    in_words,
    letters,
    process_and_scv,
)
from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.arrivals.text import Process, at_rate, format_arrivals
from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.flows import Flows, parse_flows
from kendall.queueing.distributions.heavy_tail import LARGEST_COUNT
from kendall.queueing.distributions.packing import Reservations, batch_sizes
from kendall.queueing.distributions.token_distribution import (
    SET_LIMIT,
    SHORTER,
    TokenDistribution,
    Vector,
    parse_distribution,
)
from kendall.queueing.engine_bounds import EngineBounds, or_unbounded
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.durations import check_durations
from kendall.queueing.latency.energy import (
    EnergyLaw,
    EnergyOfServers,
    energy_of_profile,
    parse_energy,
)
from kendall.queueing.latency.kv_memory import (
    ContextUse,
    KvMemory,
    ToolCalls,
    parse_kv,
    parse_tool_calls,
)
from kendall.queueing.latency.kv_transfer import KvTransfer, parse_kv_transfer
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.measurement.slo import level_of
from kendall.queueing.models.batches.binned import binned_rate
from kendall.queueing.models.changeover import Changeover
from kendall.queueing.models.gg1 import LARGEST_SCV
from kendall.queueing.models.gittins import gittins_index, mean_residual, ranks_by_class
from kendall.queueing.models.slots.continuous import SlotTime
from kendall.queueing.models.soap.token_orders import predictor_in_tokens
from kendall.queueing.models.tandem import phase_means, phases
from kendall.queueing.predictors.classes import classes_of
from kendall.queueing.predictors.prediction_cost import (
    PaidPredictions,
    PredictionCost,
    parse_prediction_cost,
)
from kendall.queueing.predictors.predictor_text import (
    NO_PREDICTION,
    PredictorText,
    parse_predictor,
)
from kendall.queueing.result import LEVELS, Levels, LoadBound
from kendall.queueing.second_model import SecondModel, parse_second_model

SMALLEST_RATE, LARGEST_RATE = 1e-12, 1e12  # requests/s: beyond, sums of instants lose all digits
# how requests come to the servers: from one queue, or each server has one of its own that they join
# by chance, in turn, where the fewest requests are, or where fewer are of two by chance
ROUTINGS = ("central", "random", "round_robin", "least_requests", "power_of_two")
NO_TRANSFER = KvTransfer()
_T = TypeVar("_T")
ONE_FLOW = "one flow: its requests are served first come, first served"
LEAST_SHARE = 1e-12  # of the requests, for a model to be served
MOST_PRESENT = 1_000_000_000  # requests, waiting or in service
MOST_QUEUES = 64  # that are simulated side by side
LARGEST_SERVERS = 1_000_000  # the time of a prediction grows with them: below a second


class Limits(TypedDict, total=False):
    """Keyword arguments of `predict`, `simulate` and `largest_stable_rate`; in brackets, what
    leaving one out means.

    max_output_tokens   token limit: a longer output is cut there, and so much KV memory is reserved
                        for every request (no limit: the longest output)
    patience            seconds that a request waits before it leaves unserved (it waits for ever)
    servers             engines that serve one queue (1)
    server_speeds       of each of them, how many times as long as the law's its times are, in place
                        of `servers`: [1, 1.5] or "1,1.5" (equally fast)
    routing             "central", or how requests are sent to servers that have a queue each:
                        "random", "round_robin", "least_requests", "power_of_two" ("central")
    second_model        a second model beside that of `latency`, with the requests that it serves:
                        "threshold=30,switch=0.4,latency=a=0.005,c=0.05" (one model)
    max_num_seqs        largest batch that the engine takes (only the policy bounds the batch)
    max_num_queued_reqs largest number of sequences waiting or in service, as for `kendall serve`; a
                        call with which there would be more is rejected (no limit)
    prompt_tokens       distribution of the prompt lengths; matters where the law has a coefficient
                        kp (no prompts)
    sequences           distribution of the sequences in a call, which arrive together; the arrival
                        rate counts calls (1)
    intraclass_correlation
                        of the output lengths in a call, 0 where they are independent, 1 where those
                        of a call are equal (0)
    pad_prompts         the prompts of a batch are padded to its longest one (False)
    arrival_scv         squared coefficient of variation of the gaps between arrivals, 0 for
                        regular ones (1, Poisson)
    arrivals            arrival process as in `kendall load`: "mmpp:rates=5/50,durations=10/1"; its
                        mean rate is the arrival rate (Poisson)
    disaggregated       prefill on engines of their own, one prompt at a time, then decode under the
                        policy on `servers` engines behind them (False)
    prefill_servers     with disaggregated: engines that prefill, fed from one queue; 0: those of
                        `servers` do both, and a request waits again behind its prefill (1)
    kv_transfer         with disaggregated: what the KV memory of a request takes from one engine to
                        the other, "2ms" or "setup=2ms,token=5us" for each prompt token (no time)
    predictor           how output lengths are predicted, for a policy whose order reads predictions
                        ("none": every request counts as the longest)
    prediction_cost     what a prediction takes: "2ms" before the request joins the queue, or
                        "server=2ms" of the engine's time; with ",bit=0.5ms" that of one bit
                        (nothing)
    flows               whose the requests are, with weights, for a policy whose order counts the
                        service of each: "heavy=9,light=1" (all of one client)
    max_context_tokens  KV memory of an engine: prompts and token limits of those in service; policy
                        "continuous" (it never binds)
    reserved_tokens     of an answer, for which that memory is kept free in place of a larger token
                        limit (its limit)
    step_tokens         tokens that an engine computes in one step: of a batch all its prompts, so
                        that it takes no more requests than these allow; under "continuous" one for
                        each sequence that makes tokens, the rest for prompts, which take several
                        steps where they are longer (chunked prefill) (it never binds)
    quantiles           of every duration besides p50, p90, p95 and p99: "p75,p99.9" (no others)
    kv                  what becomes of the KV memory of an interrupted request, where requests take
                        memory token by token: "preempt=recompute", "preempt=preserve", or
                        "preempt=swap,setup=10ms,token=20us"; policy "continuous" (memory is
                        reserved, see max_context_tokens)
    tool_calls          calls to a tool within requests, and what becomes of the memory meanwhile:
                        "share=0.7,mean=2s,keep=preserve", "discard", "swap" or "auto"; policy
                        "continuous" (none)
    energy              energy law, "beta=0.044,c0=0.155" in joules, or the name of a profile that
                        was measured with its power (that of the latency's profile)
    """

    max_output_tokens: int | None
    patience: float | None
    servers: int
    server_speeds: Sequence[float] | str | None
    routing: str
    second_model: SecondModel | str | None
    max_num_seqs: int | None
    max_num_queued_reqs: int | None
    prompt_tokens: TokenDistribution | str | None
    sequences: TokenDistribution | str | None
    intraclass_correlation: float
    pad_prompts: bool
    arrival_scv: float
    arrivals: Process | str | None
    disaggregated: bool
    prefill_servers: int
    kv_transfer: KvTransfer | str | None
    predictor: PredictorText | str
    prediction_cost: PredictionCost | str | None
    flows: Flows | str | None
    max_context_tokens: int | None
    reserved_tokens: int | None
    step_tokens: int | None
    kv: KvMemory | str | None
    tool_calls: ToolCalls | str | None
    quantiles: Iterable[str] | str
    energy: EnergyLaw | str | None


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
                f"got routing={self.routing} and disaggregated; expected Poisson arrivals at "
                "servers that do the same"
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
        for text, is_given in given.items():
            if is_given:
                raise SpecError(
                    f"got {text} for servers that prefill and decode; expected disaggregated too"
                )

    def _check_models(self, second: SecondModel) -> None:
        given = {
            f"routing={self.routing}": self.routing != "central",
            "disaggregated": self.disaggregated,
            "server_speeds": bool(self.server_speeds),
            f"max_num_queued_reqs={self.max_num_queued_reqs}": self.max_num_queued_reqs is not None,
            "energy": self.energy is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise SpecError(f"got {name} and second_model; expected one of the two")
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
        for name, is_given in given.items():
            if is_given:
                raise SpecError(
                    f"got {name} and {other}; expected one queue for servers that do the same "
                    f"work: leave {name} out"
                )

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


# of an engine that prefills and decodes
_WHOLE: dict[str, Any] = {
    "disaggregated": False,
    "prefill_servers": 1,
    "kv_transfer": NO_TRANSFER,
    "energy": None,
}
_PARTS = {"requests": Requests, "engine": Engine, "arrivals": Arrivals}


@dataclass(frozen=True, eq=False, kw_only=True)
class Queue:
    """Everything a prediction depends on but the arrival rate: when calls come, what they ask for,
    who serves them, and the discipline, which is the policy.
    """

    policy: Policy
    requests: Requests
    engine: Engine
    arrivals: Arrivals = field(default_factory=Arrivals)
    levels: Levels = field(default_factory=lambda: LEVELS)  # of the quantiles of every duration

    def __post_init__(self) -> None:
        if self.engine.pad_prompts and self.requests.prompt_tokens is None:
            raise SpecError(
                "got pad_prompts without prompt_tokens; expected the distribution of the prompts' "
                "lengths too"
            )
        if self.engine.routing != "central" and not self.arrivals.poisson:
            raise SpecError(
                f"got routing={self.engine.routing} and {self.arrivals.text}; expected Poisson "
                "arrivals at servers that do the same"
            )
        self._learn_ranks()
        self._check_end()
        self._check_room()
        self._check_memory()
        self._check_on_demand()
        self._check_step()
        self._check_predictions()
        if self.engine.disaggregated:
            self._check_tandem()
        if self.engine.second_model is not None:
            self._check_models(self.engine.second_model)

    def _learn_ranks(self) -> None:
        """An order whose ranks follow from the lengths or the law gets those of this queue's."""
        order = order_of(self.policy)
        if not isinstance(self.policy, Ordered) or not order.learns or self.shares_server:
            return
        ranking: Order | None
        if order.learns == "service":
            assert isinstance(order, ByLength)
            ranking = self._ranked_by_service(order)
        else:
            assert isinstance(order, Aging)
            ranking = self._ranked_by_age(order)
        if ranking is not None:
            object.__setattr__(self, "policy", with_ranking(self.policy, ranking))

    def _ranked_by_service(self, order: ByLength) -> Order | None:
        """A token of the answer takes its share of a step of all slots. None where that is no
        time, or the policy says what a token of the prompt counts.
        """
        law, slots = self.engine.law, self.bound or 1
        own = getattr(self.policy, "prompt_weight", None)
        share = law.step(slots) / slots
        if own or not share:
            return None
        return replace(order, prompt_weight=law.admission(0, 1) / share)

    def _ranked_by_age(self, order: Aging) -> Order | None:
        lengths, most = self.requests.output_tokens, self.requests.token_limit
        if not order.predicts:
            return self.ranked_by_class(order, (), lengths.pmf[None, :])
        predictor = predictor_in_tokens(self.requests.predictor, most)
        return self.ranked_by_class(order, *classes_of(predictor, lengths, most))

    def ranked_by_class(
        self, order: Aging, classes: tuple[float, ...], joint: Vector
    ) -> Order | None:
        """The order with the ranks of these classes of predictions, and of the joint law of classes
        and lengths (`predictors.classes`); None where a token takes no time.
        """
        lengths, costs = self.requests.output_tokens, self._token_costs
        if costs is None:
            return None
        index = mean_residual if order.learns == "residual" else gittins_index
        return order.with_ranks(*ranks_by_class(lengths, joint, *costs, index), classes)

    @property
    def _token_costs(self) -> tuple[float, float] | None:
        """To begin, and to go on after a preemption, in units of a token's time; None where that is
        0: a token more or less makes no difference.
        """
        law, prompts = self.engine.law, self.requests.prompt_tokens
        prompt = 0.0 if prompts is None else prompts.mean
        slots = self.bound or 1
        admission = law.admission if self.policy.joins_running else law.setup
        begin, go_on = (max(admission(1, prompt, resumed), 0.0) for resumed in (0, 1))
        step = law.step(slots)
        if not step:
            return None
        # to go on takes a step of every slot's time
        return begin / step, slots * go_on / step

    def _check_end(self) -> None:
        """Of arrivals that end the number is drawn too: calls and stations are not drawn then."""
        apart = self.engine.disaggregated or self.requests.sequences is not None
        if has_end(self.arrivals.process) and apart:
            other = "disaggregated" if self.engine.disaggregated else "sequences"
            raise SpecError(
                f"got {self.arrivals.text}, which end, and {other}; expected arrivals that go on, "
                f"or no {other}"
            )

    def _check_room(self) -> None:
        """Every call, and a batch that waits until it is full, must find room."""
        most, calls = self.engine.max_num_queued_reqs, self.requests.sequences
        call = 1 if calls is None else calls.longest
        if most is None:
            return
        if most > MOST_PRESENT:
            raise SpecError(
                f"got max_num_queued_reqs={most}; expected at most {MOST_PRESENT:,}, or none: so "
                "many never wait"
            )
        if call > most:
            raise SpecError(
                f"got max_num_queued_reqs={most} and calls of up to {call} sequences; expected "
                f"at least {call}: a larger call is never admitted"
            )
        policy = self.policy
        if isinstance(policy, Fixed) and policy.max_wait == math.inf:
            lists = order_of(policy).form.bins or 1  # a batch is of one of them
            needed = lists * ((self.bound or policy.batch_size) - 1) + call
            if most < needed:
                raise SpecError(
                    f"got max_num_queued_reqs={most} and policy {self.text}; expected at least "
                    f"{needed}, or max_wait: a batch that is not full waits for ever"
                )

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
            swaps = requests.tool_calls.keep in ("swap", "auto")
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
        for name, is_given in refused.items():
            if is_given:
                raise SpecError(
                    f"{given} and {name}; expected none: KV memory by the token is simulated for "
                    "one queue and server, orders by rank, no losses"
                )
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

    def _check_predictions(self) -> None:
        requests, engine = self.requests, self.engine
        if self.predictions is None:
            return
        given = f"got prediction_cost={requests.prediction_cost}"
        if engine.disaggregated or (requests.patience is not None and not self.predicts_on_server):
            other = "disaggregated" if engine.disaggregated else f"patience={requests.patience:g}"
            raise SpecError(f"{given} and {other}; expected one of the two")
        resumes = self.predicts_on_server and order_of(self.policy).preemptive
        if resumes and (
            not isinstance(self.policy, Single)
            or requests.sequences is not None
            or engine.has_queues
            or engine.law.stall_share
        ):
            raise SpecError(
                f"{given} for order {order_of(self.policy).name}, which interrupts requests; "
                "expected policy single with one queue, one sequence a call and no stalls, or an "
                "external cost"
            )

    def _check_tandem(self) -> None:
        requests, bounds = self.requests, self.engine.bounds
        in_batches = not isinstance(self.policy, Single)
        given = {
            "patience": requests.patience is not None,
            "sequences": requests.sequences is not None,
            "pad_prompts": self.engine.pad_prompts and in_batches,
            f"step_tokens={bounds.step_tokens}": bounds.step_tokens is not None and in_batches,
        }
        if refused := [name for name, is_given in given.items() if is_given]:
            raise SpecError(
                f"got {', '.join(refused)} for disaggregated prefill and decode; expected prompts "
                "that are computed one at a time and whole, one sequence a call, no patience"
            )
        if not self.engine.pooled:
            return
        order = order_of(self.policy)
        if in_batches:
            raise SpecError(
                f"got policy {self.text} for prefill_servers=0; expected single: servers that "
                "prefill and decode serve one phase of one request at a time"
            )
        if order.preemptive or order.form.ratio or not order.is_formal():
            raise SpecError(
                f"got order {order.name} for prefill_servers=0; expected one that ranks what waits "
                "and interrupts nothing: prefill-first, fcfs, spjf, ljf, threshold, boost"
            )

    def _check_models(self, second: SecondModel) -> None:
        requests = self.requests
        given = {
            f"patience={requests.patience}": requests.patience is not None,
            "sequences": requests.sequences is not None,
            f"prediction_cost={requests.prediction_cost}": requests.prediction_cost is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise SpecError(f"got {name} and second_model; expected one of the two")
        if requests.endless:
            raise SpecError(
                "got second_model for output lengths without a limit; expected max_output_tokens "
                "too"
            )
        if second.threshold is not None and requests.predictor == NO_PREDICTION:
            raise SpecError(
                f"got threshold={short_number(second.threshold)} in second_model and no "
                "predictor; expected a predictor of output lengths: exact, lognormal:sigma=0.5 .."
            )
        if second.servers is not None:
            return
        order = order_of(self.policy)
        plain = order.is_formal() and not (order.preemptive or order.form.ratio or order.form.bins)
        known = plain and order.form.quantity in ("arrival", "prediction")
        if not isinstance(self.policy, Single) or not known or order.form.prompt_weight:
            raise SpecError(
                f"got policy {self.text} and second_model on the same server; expected single, "
                "with order fcfs, spjf, ljf or threshold and no prompt_weight, or servers for each "
                "model"
            )
        if second.first == "loaded" and not in_arrival_order(self.policy):
            raise SpecError(
                f"got policy {self.text} and first=loaded in second_model; expected order fcfs, or "
                "first=arrival"
            )

    @classmethod
    def read(
        cls,
        policy: Policy | str,
        output_tokens: TokenDistribution | str,
        latency: LatencyModel | str,
        **limits: Unpack[Limits],
    ) -> Queue:
        """From texts or from what they parse to, the token limit applied. A text is clipped while
        it is read: a heavy tail needs no table then.

        Raises SpecError.
        """
        _check_names(limits)
        tokens = _optional_whole("max_output_tokens", limits.get("max_output_tokens"))
        step = _optional_whole("step_tokens", limits.get("step_tokens"))
        scv = real_number("arrival_scv", limits.get("arrival_scv", 1.0))
        process, scv = process_and_scv(limits.get("arrivals"), scv)
        patience = limits.get("patience")
        servers, parsed = whole_number("servers", limits.get("servers", 1)), _policy(policy)
        second = _read(limits.get("second_model"), SecondModel, parse_second_model)
        energy = limits.get("energy")
        return cls(
            policy=parsed,
            requests=Requests(
                output_tokens=_lengths("output_tokens", output_tokens, tokens, tail=True),
                prompt_tokens=_optional_lengths("prompt_tokens", limits.get("prompt_tokens")),
                max_output_tokens=tokens,
                sequences=_optional_lengths("sequences", limits.get("sequences")),
                intraclass_correlation=real_number(
                    "intraclass_correlation", limits.get("intraclass_correlation", 0.0)
                ),
                predictor=_predictor(limits.get("predictor", NO_PREDICTION)),
                prediction_cost=_read(
                    limits.get("prediction_cost"), PredictionCost, parse_prediction_cost
                ),
                flows=_flows(limits.get("flows")),
                patience=None if patience is None else positive("patience", patience, "seconds"),
                tool_calls=_read(limits.get("tool_calls"), ToolCalls, parse_tool_calls),
            ),
            engine=Engine(
                **_servers(_law(latency), servers, limits.get("server_speeds")),
                routing=limits.get("routing", "central"),
                second_model=second,
                max_num_queued_reqs=_optional_whole(
                    "max_num_queued_reqs", limits.get("max_num_queued_reqs")
                ),
                bounds=EngineBounds(
                    max_num_seqs=_optional_whole("max_num_seqs", limits.get("max_num_seqs")),
                    step_tokens=step,
                    batch_tokens=step,
                    max_context_tokens=_optional_whole(
                        "max_context_tokens", limits.get("max_context_tokens")
                    ),
                    reserved_tokens=_optional_whole(
                        "reserved_tokens", limits.get("reserved_tokens")
                    ),
                ),
                pad_prompts=limits.get("pad_prompts", False),
                disaggregated=_truth("disaggregated", limits.get("disaggregated", False)),
                prefill_servers=whole_number(
                    "prefill_servers", limits.get("prefill_servers", 1), 0
                ),
                kv_transfer=_read(limits.get("kv_transfer"), KvTransfer, parse_kv_transfer)
                or NO_TRANSFER,
                energy=_energy(energy, latency, parsed) if energy or second is None else None,
                kv=_read(limits.get("kv"), KvMemory, parse_kv),
            ),
            arrivals=Arrivals(scv=scv, process=process),
            levels=read_levels(limits.get("quantiles", ())),
        )

    def but(self, **changes: Any) -> Queue:
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

    def with_quantiles(self, levels: Levels) -> Queue:
        """The same with these quantiles of every duration too."""
        missing = {name: level for name, level in levels.items() if name not in self.levels}
        return replace(self, levels={**self.levels, **missing}) if missing else self

    def at_mean_rate(self, arrival_rate: float) -> Queue:
        """The same with its arrival process at that mean rate, where it has one that can be
        scaled.
        """
        process = self.arrivals.process
        if process is None or isinstance(process, Recorded) or process.mean_rate == arrival_rate:
            return self
        return self.but(process=at_rate(process, arrival_rate))

    def clipped_at(self, limit: int) -> Queue:
        """The same under that token limit."""
        lengths = self.requests.output_tokens.clip(limit)
        return self.but(output_tokens=lengths, max_output_tokens=limit)

    @property
    def one_of_several(self) -> Queue | None:
        """One server, at its share of the rate, where each has a queue of its own and all are
        alike: every c-th of Poisson arrivals comes after a sum of c gaps, of SCV 1/c.
        """
        servers, routing = self.engine.servers, self.engine.routing
        if servers == 1 or routing not in {"random", "round_robin"}:
            return None
        scv = 1.0 if routing == "random" else 1 / servers
        return self.but(servers=1, routing="central", scv=scv)

    def seen_by_a_request(self, arrival_rate: float) -> tuple[Queue, float]:
        """The queue that a request meets, and its arrival rate: that of `one_of_several`, or all
        of it.
        """
        one = self.one_of_several
        return (self, arrival_rate) if one is None else (one, arrival_rate / self.engine.servers)

    @cached_property
    def models(self) -> tuple[tuple[float, Queue], ...]:
        """Of the first and the second of two models the share of the requests that go to it, and
        the queue of these alone, on the servers that it has or shares. None where there is no
        second model.
        """
        second = self.engine.second_model
        if second is None:
            return ()
        chances, own = self._chances_of_second, second.servers or 0
        return (
            self._of_model(1 - chances, self.engine.law, self.engine.servers - own),
            self._of_model(chances, second.law, own or self.engine.servers),
        )

    @property
    def _chances_of_second(self) -> Vector:
        """By the length of a request."""
        second, requests = self.engine.second_model, self.requests
        assert second is not None
        return second.chances(requests.output_tokens, requests.predictor, requests.token_limit)

    def _of_model(self, chances: Vector, law: LatencyModel, servers: int) -> tuple[float, Queue]:
        requests = self.requests
        pmf = requests.output_tokens.pmf * chances
        share, lengths = float(pmf.sum()), requests.output_tokens
        if share < LEAST_SHARE:
            share = 0.0
        else:
            lengths = TokenDistribution(pmf / share)
        queue = self.but(
            output_tokens=lengths,
            max_output_tokens=requests.token_limit,
            law=law,
            servers=servers,
            second_model=None,
        )
        return share, queue

    @property
    def models_apart(self) -> bool:
        """Whether each of two models has servers, and so a queue, of its own."""
        second = self.engine.second_model
        return second is not None and second.servers is not None

    @property
    def shares_server(self) -> bool:
        """Whether two models are served by one server."""
        return self.engine.second_model is not None and not self.models_apart

    @property
    def reads_predictions(self) -> bool:
        """Whether the order, or the choice of a model, goes by predicted lengths."""
        second = self.engine.second_model
        by_threshold = second is not None and second.threshold is not None
        return by_threshold or order_of(self.policy).predicts

    @cached_property
    def changeover(self) -> Changeover:
        """Two models on one server, one request at a time."""
        second = self.engine.second_model
        assert second is not None
        (first, one), (share, other) = self.models
        services = tuple(
            ServiceTime.of(
                each.engine.law, each.requests.output_tokens, each.requests.prompt_tokens
            )
            for each in (one, other)
        )
        return Changeover((first, share), (services[0], services[1]), second.switch)

    @property
    def loads_unknown(self) -> bool:
        """Whether the order of service decides how often a model is loaded, which the load leaves
        out then.
        """
        second = self.engine.second_model
        if second is None or not second.switch:
            return False
        return second.first != "arrival" or not in_arrival_order(self.policy)

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
    def lossless(self) -> bool:
        """Whether every request is served: none runs out of patience, none is rejected."""
        return self.requests.patience is None and self.engine.max_num_queued_reqs is None

    @property
    def pads_prompts(self) -> bool:
        """Whether prompts are padded here: batches of one have nothing to pad, and a continuous
        engine admits prompts one by one.
        """
        pads = self.engine.pad_prompts and not self.engine.disaggregated
        return pads and self.bound != 1 and not self.policy.joins_running

    @property
    def whole_call(self) -> int | None:
        """Sequences of every call, where all have as many and no batch splits one; 1 where no call
        has several.
        """
        size = CallLengths(self.requests.output_tokens, self.requests.sequences).size
        whole = size is not None and (self.bound is None or self.bound % size == 0)
        return size if whole else None

    @property
    def step_tokens(self) -> int | None:
        """Tokens that one step computes under this policy, of a batch all its prompts; None: as
        many as there are.
        """
        return self.engine.bounds.of_a_step(self.policy)

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

    @property
    def load_bound(self) -> LoadBound | None:
        """What bounds the largest stable rate of a queue whose memory is given: whichever is used
        up first more often while requests wait.
        """
        if self.on_demand and self.engine.bounds.max_context_tokens is not None:
            room = self.context_use.slots(self.engine.bounds.max_context_tokens)
            return "slots" if self.bound is not None and self.bound <= room else "memory"
        if self.reservations is None:
            return None
        decode = self.decode
        if self.engine.disaggregated and self.largest_stable_rate < decode.largest_stable_rate:
            return None
        chances = self.in_saturation
        full = 1.0 if chances is None else chances.get(self.bound or 0, 0.0)
        return "slots" if full >= 0.5 else "memory"

    @cached_property
    def predictions(self) -> PaidPredictions | None:
        """What predictions cost under this policy's order; None where nothing is paid."""
        cost, order = self.requests.prediction_cost, order_of(self.policy)
        if cost is None or not order.predicts:
            return None
        return cost.under(order.form, self.engine.law.step(1))

    @property
    def predicts_on_server(self) -> bool:
        """Whether predictions take the engine's time."""
        cost = self.requests.prediction_cost
        return cost is not None and cost.place == "server" and self.predictions is not None

    @cached_property
    def prediction_seconds(self) -> Vector:
        """Mean time that the predictions of a request of 1, 2, .. tokens take, s."""
        counts, requests = np.arange(1.0, self.requests.output_tokens.longest + 1), self.requests
        if self.predictions is None:
            return np.zeros(len(counts))
        told = predictor_in_tokens(requests.predictor, requests.token_limit)
        return self.predictions.expected(counts, told)

    @property
    def mean_prediction(self) -> float:
        """That of a random request, s; those beyond a table of lengths take what the last takes."""
        chances = self.requests.output_tokens.pmf[1:]
        return float(chances @ self.prediction_seconds / chances.sum())

    @property
    def external_prediction(self) -> float:
        """Mean time that a request waits for predictions outside of the engine, s."""
        return 0.0 if self.predicts_on_server else self.mean_prediction

    @property
    def law(self) -> LatencyModel:
        """The latency law of a request and of its predictions on the engine, as one service."""
        law = self.engine.law
        if not self.predicts_on_server:
            return law
        return replace(law, k1=law.k1 + self.mean_prediction / law.speed)

    @cached_property
    def batch_time(self) -> BatchTime:
        """The law of a batch's service time; kept, so that predictions at many rates share its
        tables.
        """
        return BatchTime(
            self.law,
            self.requests.output_tokens,
            self.requests.prompt_tokens,
            self.policy.padded,
            self.pads_prompts,
            self.requests.sequences,
            self.requests.intraclass_correlation,
        )

    @cached_property
    def stations(self) -> tuple[ServiceTime, ServiceTime]:
        """Service times of prefill and decode where these are two servers. Raises SpecError:
        prefill takes no time.
        """
        return phases(self.engine.law, self.requests.output_tokens, self.requests.prompt_tokens)

    @cached_property
    def prefill(self) -> Queue:
        """The first of two stations where prefill and decode are on servers of their own: one
        prompt at a time, in the order of the policy or, where that interrupts or forms batches of
        like lengths, of arrival. An order by service ranks by what a prompt takes here.
        """
        law = self.engine.law
        return self.but(
            **_WHOLE,
            policy=_prefill_policy(self.policy),
            servers=self.engine.prefill_servers,
            law=replace(law, k3=0.0, k4=0.0, kr=0.0, turnaround=0.0),
            bounds=EngineBounds(),
            pad_prompts=False,
        )

    @cached_property
    def decode(self) -> Queue:
        """The second one: the same queue under a law without prefill; itself where there is one
        station.
        """
        if not self.engine.disaggregated:
            return self
        law, bounds = self.engine.law, self.engine.bounds
        return self.but(
            **_WHOLE,
            law=replace(law, k1=0.0, k2=0.0, kp=0.0),
            bounds=msgspec.structs.replace(bounds, step_tokens=None, batch_tokens=None),
            pad_prompts=False,
        )

    @property
    def mean_transfer(self) -> float:
        """From prefill to decode, s."""
        transfer, prompts = self.engine.kv_transfer, self.requests.prompt_tokens
        return transfer.setup + transfer.token * (0.0 if prompts is None else prompts.mean)

    @property
    def slot_time(self) -> SlotTime:
        """How long a slot of a continuous engine is taken."""
        requests = self.requests
        return SlotTime(self.law, requests.output_tokens, requests.prompt_tokens, self.step_tokens)

    @property
    def draws_in_advance(self) -> bool:
        """Whether a simulation draws residuals or gaps between stalls before it starts. With a
        continuous policy it draws neither.
        """
        law = self.engine.law
        return bool(law.cv or law.stall_share) and not self.policy.joins_running

    @cached_property
    def largest_stable_rate(self) -> float:
        """Calls/s (each of one request or of `sequences`) from which on the queue of all servers
        has no steady state.

        Raises SpecError: a batch that takes no time.
        """
        if self.engine.second_model is not None:
            return self._rate_of_models()
        self._check_rate()
        if self.engine.pooled:
            return 1 / sum(1 / rate for rate in self.station_rates)
        if self.engine.disaggregated:
            return min(self.station_rates)
        servers = sum(1 / speed for speed in self.engine.server_speeds) or self.engine.servers
        return servers * self._rate_each() / self.requests.call_size

    def _check_rate(self) -> None:
        requests, law = self.requests, self.law
        check_durations(
            law,
            requests.output_tokens,
            requests.prompt_tokens,
            self.bound,
            batches=not self.policy.joins_running,
        )
        if requests.endless and self.bound is None and self.policy.padded and law.k3:
            raise SpecError(
                f"got policy {self.text} without a bound for lengths without one, so that the "
                "load is infinite at every arrival rate; bound the batch size, or set "
                "max_output_tokens"
            )

    def _rate_of_models(self) -> float:
        if self.models_apart:
            return min(queue.largest_stable_rate / share for share, queue in self.models if share)
        if not self.loads_unknown:
            return 1 / self.changeover.mean
        return 1 / sum(share / queue.largest_stable_rate for share, queue in self.models)

    @cached_property
    def station_rates(self) -> tuple[float, float]:
        """Requests/s from which on prefill, and decode behind it, have no steady state; where
        the same servers do both, each of the two alone.
        """
        engine, requests = self.engine, self.requests
        means = phase_means(self.law, requests.output_tokens, requests.prompt_tokens)
        decode = engine.servers / means[1]
        if not isinstance(self.policy, Single):
            decode = self.decode.largest_stable_rate
        return (engine.prefill_servers or engine.servers) / means[0], decode

    def _rate_each(self) -> float:
        """Requests/s of one server."""
        if self.on_demand:
            use, memory = self.context_use, self.engine.bounds.max_context_tokens
            slots = math.inf if self.bound is None else self.bound
            return use.rate(slots if memory is None else min(slots, use.slots(memory)))
        if (chances := self.in_saturation) is not None:
            return self.slot_time.throughput_of(chances)
        if not self.policy.joins_running:
            return self._batch_rate()
        if self.bound is None:
            return self.slot_time.limit()
        return self.slot_time.throughput(self.bound, refilled=True)

    def _batch_rate(self) -> float:
        """Requests/s that full batches serve."""
        bins = order_of(self.policy).form.bins
        if bins is not None and not self.requests.endless:
            limit = self.requests.token_limit
            return binned_rate(self.batch_time, bins, self.requests.predictor, self.bound, limit)
        if self.prompt_limited:
            return self._cut_rate()
        return self.batch_time.largest_stable_rate(self.bound)

    def _cut_rate(self) -> float:
        """Requests/s of batches that a saturated queue fills until the prompts of the next one are
        too many; prompts are taken as independent of the answers.
        """
        prompts, tokens = self.requests.prompt_tokens, self.step_tokens
        assert prompts is not None
        assert tokens is not None
        chances = batch_sizes(prompts, tokens, self.bound)
        each = sum(size * chance for size, chance in chances.items())
        return each / sum(chance * self.batch_time.mean(size) for size, chance in chances.items())

    def load(self, arrival_rate: float) -> float:
        """arrival_rate / largest stable rate."""
        rate = positive("arrival_rate", arrival_rate, "requests per second")
        if not SMALLEST_RATE <= rate <= LARGEST_RATE:
            raise SpecError(
                f"got arrival_rate={rate:g}; expected requests per second between "
                f"{SMALLEST_RATE:g} and {LARGEST_RATE:g}"
            )
        return rate / self.largest_stable_rate

    def stable_load(self, arrival_rate: float) -> float:
        """`load` of a queue that has a steady state. Raises UnstableQueueError: load >= 1 and
        every request is served.
        """
        load = self.load(arrival_rate)
        if load >= 1 and self.lossless and not has_end(self.arrivals.process):
            raise UnstableQueueError(load)
        return load

    @property
    def name(self) -> str:
        """The queue in Kendall's notation, as near as it comes."""
        size = "inf" if self.bound is None else str(self.bound)
        most = self.engine.max_num_queued_reqs
        behind = "" if most is None else f"/{most}"
        behind += "+D" if self.requests.patience is not None else ""
        gaps, servers = self.arrivals.letters, self.engine.servers
        if self.models_apart:
            return " and ".join(queue.name for _, queue in self.models)
        if self.engine.second_model is not None:
            return f"{self.but(second_model=None).name}, two models"
        if self.engine.disaggregated:
            decode = self.but(**_WHOLE).name.removeprefix(gaps)
            stations = f"{self.engine.prefill_servers} -> .{decode}"
            return f"{gaps}/G/{f'{servers} with feedback' if self.engine.pooled else stations}"
        arrivals = gaps if self.requests.sequences is None else f"{gaps}^X"
        if servers > 1 and self.engine.routing != "central":
            return f"{servers} queues {self.but(servers=1, routing='central').name}"
        if not is_built_in(self.policy):
            return f"{arrivals}/G/{servers}{behind} under {self.policy.name}"
        if isinstance(self.policy, Single):
            kind = f"{arrivals}/G"
        elif isinstance(self.policy, Fixed):
            kind = f"{arrivals}/G^{size}"
        else:
            kind = (
                f"{arrivals}/G(n)-PS[{size}]"
                if isinstance(self.policy, Continuous)
                else f"{arrivals}/G^[1,{size}]"
            )
        return f"{kind}/{servers}{behind}"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What must hold for the prediction to hold."""
        requests, engine = self.requests, self.engine
        recorded = isinstance(self.arrivals.process, Recorded)
        common = [
            *self.arrivals_assumed,
            *([] if recorded else [requests.assumption]),
            *_order_of_service(self),
            *self._predictions_assumed(),
            *_flows_served(self.policy, requests.flows),
        ]
        if requests.sequences is not None:
            common.append("calls of independent numbers of sequences, all of a call queued at once")
        if engine.disaggregated:
            common += self._stations_assumed()
        common += [engine.assumption, *self._models_assumed(), *self._bounds_assumed()]
        if self.energy is not None:
            common.append(self.energy.assumption)
        common += self._losses_assumed()
        if engine.pad_prompts and not engine.law.kp:
            common.append(
                "padded prompts change nothing: the latency law has no kp, so prompts take no time"
            )
        elif self.pads_prompts:
            common.append(
                "the prompts of a batch are padded to its longest: kp b max(prompt) instead of kp "
                "sum(prompt)"
            )
        if self.bound is None and self.policy.padded and not requests.endless:
            common.append(
                "padded batches without a bound: stable only while no output exceeds "
                f"{requests.output_tokens.longest} tokens"
            )
        return tuple(common)

    def _stations_assumed(self) -> Iterator[str]:
        engine, pools = self.engine, self.engine.prefill_servers + self.engine.servers > 2
        transfer = engine.kv_transfer
        between = "no time between them"
        if transfer:
            between = f"KV transfer of {transfer.in_words()} between them"
        single = isinstance(self.policy, Single)
        if engine.pooled:
            yield (
                f"{counted(engine.servers, 'engine')} for one phase of one request at a time, not "
                f"interrupted: behind its prefill a request waits for its decode, {between}"
            )
        elif single and not pools:
            yield (
                "prefill and decode on two engines of one law, one request at a time at each, "
                f"{between}"
            )
        else:
            prefill, decode = (
                counted(count, "engine") for count in (engine.prefill_servers, engine.servers)
            )
            yield (
                f"prefill on {prefill}, one prompt at a time (k1 + k2 + kp prompt), decode on "
                f"{decode} of the same law without these, {between}"
            )
        policy = self.policy
        if order_of(policy).name != order_of(_prefill_policy(policy)).name:
            yield "prompts are served in order of arrival"

    def _models_assumed(self) -> Iterator[str]:
        second, requests = self.engine.second_model, self.requests
        if second is None:
            return
        share = f"{self.models[1][0]:.1%} of the requests"
        which = "any length"
        if second.threshold is not None:
            which = (
                f"predicted up to {short_number(second.threshold)} tokens ({requests.predictor})"
            )
        where = f"on {second.servers} of {self.engine.servers} servers"
        if second.servers is None:
            where = "on the same server"
        yield f"second model: {share}, {which}, {where}"
        if not self.models_apart and second.switch:
            most = "the load leaves that out" if self.loads_unknown else "the load has that in it"
            yield (
                f"the server holds one model at a time and takes {short_number(second.switch)} s "
                f"to load the other, which counts as service; {most}"
            )
        if second.first == "loaded":
            yield "requests of the model that is loaded go before all others"

    def _losses_assumed(self) -> Iterator[str]:
        most, patience = self.engine.max_num_queued_reqs, self.requests.patience
        if most is not None:
            calls = "; a call is admitted whole or not at all"
            yield (
                f"at most {counted(most, 'request')} waiting or in service: others are rejected as "
                "they arrive, and count in the loss fraction and in no duration"
                f"{'' if self.requests.sequences is None else calls}"
            )
        if patience is not None:
            every = "all requests" if most is None else "all admitted requests"
            yield (
                f"queueing delay: of {every}, a lost one counts as {patience:g} s; the other "
                "durations: of the requests that are served"
            )

    def counted(self, arrival_rate: float) -> dict[str, Any]:
        """Fields of a `Prediction`: what its numbers of requests and its joules follow from."""
        energy, lengths = self.energy, self.requests.output_tokens
        return {
            "request_rate": arrival_rate * self.requests.call_size,
            "energy_use": None
            if energy is None
            else EnergyOfServers(energy, lengths.mean, self.engine.all_servers),
        }

    @property
    def energy(self) -> EnergyLaw | None:
        """The energy law; None too where it is of batches, and the policy has none."""
        law = self.engine.energy
        return None if law is None or (law.c0 and self.policy.joins_running) else law

    @property
    def arrivals_assumed(self) -> tuple[str, ...]:
        """What is assumed of the arrivals, and where they go."""
        engine, process = self.engine, self.arrivals.process
        largest = math.nan if process is None else self.largest_stable_rate
        assumed = self.arrivals.assumptions(largest)
        if engine.servers == 1 or engine.routing == "central":
            return assumed
        join = _JOIN[engine.routing]
        return (*assumed, f"{engine.servers} servers with a queue each; requests {join}")

    def _predictions_assumed(self) -> tuple[str, ...]:
        paid = self.predictions
        if paid is None:
            unpaid = "the prediction cost is not paid: the order reads no predicted length"
            return () if self.requests.prediction_cost is None else (unpaid,)
        if not self.predicts_on_server:
            return (
                f"predictions outside of the engine: {paid}, which its delay and its sojourn have "
                "on top",
            )
        share = f"predictions cost {short_number(self.mean_prediction)} s of the server a request"
        if self.bound is not None:
            capacity = self.largest_stable_rate * self.requests.call_size / self.engine.servers
            share = f"predictions cost {self.mean_prediction * capacity:.1%} of the server"
            share += "" if self.bound == 1 else " at its largest rate"
        share += f": {paid}"
        if not order_of(self.policy).preemptive:
            return (
                f"{share}; on average {short_number(self.mean_prediction)} s with each service",
            )
        return (
            f"{share}; predictions before the requests that are ranked by them, in order of "
            "arrival, and what is interrupted there goes on where it stopped",
        )

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
            return f"{unbound}: {self.bound or 1} prompts are fewer than {tokens:,}"
        return (
            f"an engine step computes at most {tokens:,} tokens: longer prompts take several steps"
        )


def read_levels(given: Iterable[str] | str) -> Levels:
    """The usual ones and those that are named. Raises SpecError."""
    names = given.split(",") if isinstance(given, str) else given
    return {**LEVELS, **dict(map(level_of, names))}


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


def _swap(kv: KvMemory) -> str:
    setup, token = short_number(kv.setup or 0.0), short_number(kv.token or 0.0)
    return f"{setup} s + {token} s a token each way"


def _check_names(limits: Mapping[str, object]) -> None:
    known = Limits.__annotations__
    for name in limits:
        if name not in known:
            raise TypeError(
                f"got the argument {name!r}; expected {', '.join(known)}{suggest(name, known)}"
            )


def _servers(
    law: LatencyModel, servers: int, speeds: Sequence[float] | str | None
) -> dict[str, Any]:
    """The law, and the servers under it; equal speeds are one of the law. Raises SpecError."""
    if speeds is None:
        return {"law": law, "servers": servers}
    found = read_speeds(speeds)
    if servers not in (1, len(found)):
        raise SpecError(
            f"got servers={servers} and {counted(len(found), 'server speed')}; expected a speed "
            "for each server, or no number of servers"
        )
    if len(set(found)) == 1:
        return {"law": law.at_speed(law.speed * found[0]), "servers": len(found)}
    return {"law": law, "servers": len(found), "server_speeds": found}


def read_speeds(given: Sequence[float] | str) -> tuple[float, ...]:
    """Of servers. Raises SpecError."""
    parts: Sequence[Any] = given.split(",") if isinstance(given, str) else given
    try:
        found = tuple(float(each) for each in parts)
    except (TypeError, ValueError):
        found = ()
    if not found or not all(0 < each < math.inf for each in found):
        raise SpecError(
            f"got server_speeds={short_repr(given)}; expected a number > 0 for each server, for "
            "example 1,1.5"
        )
    return found


_JOIN = {
    "random": "join one by chance",
    "round_robin": "join them in turn",
    "least_requests": "join the one with the fewest requests, waiting and in service",
    "power_of_two": "join the one with fewer requests of two by chance",
}


def _optional_whole(name: str, given: int | None) -> int | None:
    return None if given is None else whole_number(name, given)


def _optional_lengths(name: str, given: TokenDistribution | str | None) -> TokenDistribution | None:
    return None if given is None else _lengths(name, given)


def _lengths(
    name: str, given: TokenDistribution | str, limit: int | None = None, *, tail: bool = False
) -> TokenDistribution:
    if isinstance(given, str):
        return parse_distribution(
            given, limit, tail=tail, remedy=SET_LIMIT if name == "output_tokens" else SHORTER
        )
    if not isinstance(given, TokenDistribution):
        raise SpecError(
            f"got {name}={short_repr(given)}; expected a distribution or its text, for example "
            "'deterministic:value=64'"
        )
    return given if limit is None else given.clip(limit)


def _law(given: LatencyModel | str) -> LatencyModel:
    if isinstance(given, str):
        return load_law(given)
    if not isinstance(given, LatencyModel):
        raise SpecError(
            f"got latency={short_repr(given)}; expected a latency law, its text ('a=..,c=..'), or "
            "a profile's name or path"
        )
    return given


def _energy(
    given: EnergyLaw | str | None, latency: LatencyModel | str, policy: Policy
) -> EnergyLaw | None:
    """That of the latency's profile where none is given, for policies that have batches."""
    if given is None:
        if policy.joins_running or not isinstance(latency, str):
            return None
        return energy_of_profile(latency)
    law = parse_energy(given) if isinstance(given, str) else given
    if not isinstance(law, EnergyLaw):
        raise SpecError(
            f"got energy={short_repr(given)}; expected an energy law or its text, for example "
            "beta=0.044,c0=0.155"
        )
    if law.c0 and policy.joins_running:
        raise SpecError(
            f"got energy c0={short_number(law.c0)} for policy {format_policy(policy)}, which has "
            "no batches; expected joules of a request or a token (beta, per_token), or watts "
            "(busy, idle)"
        )
    return law


def _order_of_service(queue: Queue) -> tuple[str, ...]:
    policy, predictor = queue.policy, queue.requests.predictor
    if not is_built_in(policy):
        return (
            "the policy sees one token limit for all requests, no predicted length and no priority",
            "load: arrival rate over that of full batches, which the policy may not reach",
        )
    order = order_of(policy)
    assumption = order.assumption.format(name=order.name)
    if queue.engine.disaggregated and ranks_by_prompt(policy):
        assumption += " by service, of prompts where they are prefilled, of answers behind that"
    elif isinstance(order, PrefillFirst) and not queue.engine.pooled:
        assumption += ", as first come, first served: nothing waits between prefill and decode here"
    elif order.learns == "service" and queue.shares_server:
        assumption += " by service, the predicted seconds of their model with those to load it"
    elif order.learns == "service":
        assert isinstance(order, ByLength)
        weight = short_number(order.prompt_weight, 3)
        assumption += f" by service, a token of the prompt counts as {weight} of the answer"
    elif order.learns == "residual":
        assumption += " by residual length, given the prediction and the tokens made"
    if order.predicts:
        return (f"{assumption}; predictor of the output lengths: {predictor}",)
    unread = "the predictor changes nothing: the order reads no predicted length"
    if predictor == NO_PREDICTION or queue.reads_predictions:
        return (assumption,)
    return (assumption, unread)


def _flows_served(policy: Policy, flows: Flows | None) -> tuple[str, ...]:
    if counts(policy):
        if flows is None:
            return (ONE_FLOW,)
        return (f"flows: {flows}, independent of the lengths",)
    return () if flows is None else ("the flows change nothing: the order counts no service",)


def _read(given: _T | str | None, kind: type[_T], parse: Callable[[Any], _T]) -> _T | None:
    """As it is, or what its text says."""
    return given if given is None or isinstance(given, kind) else parse(given)


def _truth(name: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise SpecError(f"got {name}={short_repr(given)}; expected True or False")
    return given


def _flows(given: Flows | str | None) -> Flows | None:
    return parse_flows(given) if isinstance(given, str) else given


def _prefill_policy(policy: Policy) -> Single:
    order = order_of(policy)
    if not isinstance(policy, Ordered) or order.preemptive or order.batches:
        return Single()
    found = Single(**{name: getattr(policy, name) for name in ("order", *PARAMETERS)})
    if not ranks_by_prompt(policy):
        return found
    assert isinstance(order, ByLength)
    return with_ranking(found, replace(order, prompt_weight=1.0))


def ranks_by_prompt(policy: Policy) -> bool:
    """Whether a server that prefills ranks by prompts alone: under an order by service, whose law
    says what a token of the prompt counts.
    """
    order = order_of(policy)
    own = getattr(policy, "prompt_weight", None)
    return order.learns == "service" and not own


def _predictor(given: PredictorText | str) -> PredictorText:
    return given if isinstance(given, PredictorText) else parse_predictor(given)


def _policy(given: Policy | str) -> Policy:
    if isinstance(given, str):
        return parse_policy(given)
    if fault := class_fault(type(given)) if not is_built_in(given) else None:
        raise SpecError(
            f"got policy={short_repr(given)}; expected one of {', '.join(usable_policies())}, as a "
            f"text or as parse_policy returns it, or an instance of a policy's class ({fault})"
        )
    return given
