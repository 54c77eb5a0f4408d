"""The description of a queue: its arrivals, requests, policy and engine; which queue this is, and
where its stability ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

from kendall.policies.arguments import positive
from kendall.policies.core import Policy
from kendall.policies.fixed import Fixed
from kendall.policies.immediate import Continuous, Single
from kendall.policies.ordered import Ordered, counts, order_of, with_ranking
from kendall.policies.orders.order import Aging, ByLength, Order
from kendall.policies.orders.prefill import PrefillFirst
from kendall.policies.registry import is_built_in
from kendall.policies.text import SpecError, counted, short_number
from kendall.queueing.arrivals.notation import has_end
from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.arrivals.text import at_rate
from kendall.queueing.description.arguments import Limits, read_parts
from kendall.queueing.description.disaggregated import WHOLE, Stations, ranks_by_prompt
from kendall.queueing.description.kv_memory import Memory
from kendall.queueing.description.two_models import Models
from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.flows import Flows
from kendall.queueing.distributions.packing import batch_sizes
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.durations import check_durations
from kendall.queueing.latency.energy import EnergyLaw, EnergyOfServers
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.batches.binned import binned_rate
from kendall.queueing.models.gittins import gittins_index, mean_residual, ranks_by_class
from kendall.queueing.models.slots.continuous import SlotTime
from kendall.queueing.models.soap.token_orders import predictor_in_tokens
from kendall.queueing.predictors.classes import classes_of
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.result import Levels, LoadBound

SMALLEST_RATE, LARGEST_RATE = 1e-12, 1e12  # requests/s: beyond, sums of instants lose all digits
ONE_FLOW = "one flow: its requests are served first come, first served"
MOST_PRESENT = 1_000_000_000  # requests, waiting or in service


@dataclass(frozen=True, eq=False, kw_only=True)
class Queue(Memory, Stations, Models):
    """Everything a prediction depends on but the arrival rate: when calls come, what they ask for,
    who serves them, and the discipline, which is the policy.
    """

    def __post_init__(self) -> None:
        if self.engine.pad_prompts and self.requests.prompt_tokens is None:
            raise SpecError(
                "got pad_prompts without prompt_tokens; expected the distribution of the prompts' "
                "lengths too"
            )
        if self.engine.routing != "central" and not self.arrivals.poisson:
            raise SpecError(
                f"got routing={self.engine.routing} and {self.arrivals.text}; expected Poisson "
                "arrivals at servers with queues of their own: leave the routing out"
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

    @classmethod
    def read(
        cls,
        policy: Policy | str,
        output_tokens: TokenDistribution | str,
        latency: LatencyModel | str,
        **limits: Unpack[Limits],
    ) -> Queue:
        """From texts or from what they parse to, the token limit applied. Raises SpecError."""
        return cls(**read_parts(policy, output_tokens, latency, limits))

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

    @property
    def reads_predictions(self) -> bool:
        """Whether the order, or the choice of a model, goes by predicted lengths."""
        second = self.engine.second_model
        by_threshold = second is not None and second.threshold is not None
        return by_threshold or order_of(self.policy).predicts

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
            decode = self.but(**WHOLE).name.removeprefix(gaps)
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
            *self._interruptions_assumed(),
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

    def _interruptions_assumed(self) -> Iterator[str]:
        at_any_instant = isinstance(self.policy, Continuous) and not self._by_the_token
        if at_any_instant and order_of(self.policy).preemptive:
            yield "an interruption loses the token in the making, which is made again"

    def _losses_assumed(self) -> Iterator[str]:
        most, patience = self.engine.max_num_queued_reqs, self.requests.patience
        if most is not None:
            calls = "; a call is admitted whole or not at all"
            yield (
                f"{self._room}, and count in the loss fraction and in no duration"
                f"{'' if self.requests.sequences is None else calls}"
            )
        if patience is not None:
            every = "all requests" if most is None else "all admitted requests"
            yield (
                f"queueing delay: of {every}, a lost one counts as {patience:g} s; the other "
                "durations: of the requests that are served"
            )

    @property
    def _room(self) -> str:
        most = self.engine.max_num_queued_reqs
        if most is None:
            return "any number of requests may wait"
        room = f"at most {counted(most, 'request')} waiting or in service"
        return f"{room}: others are rejected as they arrive"

    @property
    def _starts(self) -> str:
        """How many requests a server takes at once."""
        policy, most = self.policy, "" if self.bound is None else f", at most {self.bound}"
        if not is_built_in(policy):
            return f"what the policy {policy.name} dispatches"
        if isinstance(policy, Single):
            return "one request at a time"
        if isinstance(policy, Continuous):
            return f"requests side by side{most}, at a rate that depends on their number"
        batch = f"batches of all that wait{most}"
        if isinstance(policy, Fixed):
            wait = f" or, after {short_number(policy.max_wait)} s, of those that wait"
            batch = f"batches of {self.bound}{'' if math.isinf(policy.max_wait) else wait}"
        return f"{batch}, {'which end together' if policy.padded else 'each leaves when it ends'}"

    def model_text(self, arrival_rate: float) -> str:
        """The queue in Kendall's notation and, a line a part, in words, at a mean rate of calls."""
        requests, engine = self.requests, self.engine
        arrivals, servers = (
            list(self.arrivals_assumed),
            f"{counted(engine.servers, 'server')}, one queue",
        )
        if engine.servers > 1 and engine.routing != "central":
            servers = arrivals.pop()
        sort = "requests" if requests.sequences is None else "calls"
        rate = f"mean rate {short_number(arrival_rate)} {sort}/s"
        stations = list(self._stations_assumed()) if engine.disaggregated else [servers]
        lengths = {"output": requests.output_tokens, "prompt": requests.prompt_tokens}
        size = f"calls of independent numbers of sequences, {short_number(requests.call_size)}"
        patience = requests.patience
        parts = {
            "arrivals": [*arrivals, *([rate] if self.arrivals.process is None else [])],
            "requests": [
                *([] if requests.sequences is None else [f"{size} on average"]),
                *(_in_tokens(table, kind) for kind, table in lengths.items() if table is not None),
                requests.assumption,
                *([] if patience is None else [f"one that waits {patience:g} s leaves unserved"]),
            ],
            "service": [self._starts, f"{engine.assumption} {engine.law.rounded()}"],
            "servers": [*stations, *self._models_assumed()],
            "room": [self._room, *self._bounds_assumed()],
            "order of service": [
                *(each.removeprefix("order of service: ") for each in _order_of_service(self)),
                *self._predictions_assumed(),
                *_flows_served(self.policy, requests.flows),
            ],
        }
        lines = (f"{part:<18}{'; '.join(words)}" for part, words in parts.items())
        return "\n".join((self.name, *lines))

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


_JOIN = {
    "random": "join one by chance",
    "round_robin": "join them in turn",
    "least_requests": "join the one with the fewest requests, waiting and in service",
    "power_of_two": "join the one with fewer requests of two by chance",
}


def _in_tokens(lengths: TokenDistribution, kind: str) -> str:
    if lengths.shortest == lengths.longest and lengths.tail is None:
        return counted(lengths.longest, f"{kind} token")
    most = "without a limit" if lengths.tail is not None else f"at most {lengths.longest:,}"
    return f"{short_number(lengths.mean)} {kind} tokens on average, {most}"


def _order_of_service(queue: Queue) -> tuple[str, ...]:
    policy, predictor = queue.policy, queue.requests.predictor
    if not is_built_in(policy):
        return (
            "the policy sees one token limit for all requests, no predicted length and no priority",
            "load: arrival rate over that of full batches, which the policy may not reach",
        )
    order = order_of(policy)
    assumption = order.assumption.format(name=order.name) + _ranked_by(order, queue)
    if order.predicts:
        return (f"{assumption}; predictor of the output lengths: {predictor}",)
    unread = "the predictor changes nothing: the order reads no predicted length"
    if predictor == NO_PREDICTION or queue.reads_predictions:
        return (assumption,)
    return (assumption, unread)


def _ranked_by(order: Order, queue: Queue) -> str:
    """Behind the order's name."""
    if queue.engine.disaggregated and ranks_by_prompt(queue.policy):
        return " by service, of prompts where they are prefilled, of answers behind that"
    if isinstance(order, PrefillFirst) and not queue.engine.pooled:
        return ", as first come, first served: nothing waits between prefill and decode here"
    if order.learns == "residual":
        return " by residual length, given the prediction and the tokens made"
    if order.learns != "service":
        return ""
    if queue.shares_server:
        return " by service, the predicted seconds of their model with those to load it"
    assert isinstance(order, ByLength)
    weight = short_number(order.prompt_weight, 3)
    return f" by service, a token of the prompt counts as {weight} of the answer"


def _flows_served(policy: Policy, flows: Flows | None) -> tuple[str, ...]:
    if counts(policy):
        if flows is None:
            return (ONE_FLOW,)
        return (f"flows: {flows}, independent of the lengths",)
    return () if flows is None else ("the flows change nothing: the order counts no service",)
