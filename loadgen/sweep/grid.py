"""The cells of a sweep: what follows from a plan, the engine's law and its bounds.

The law is that of the first calibration, so the cells are the same after every interruption. All
cells share their random numbers: unit gaps, lengths, predicted lengths and prompts come from the
plan's seed, the rate only scales the gaps, the gateway's limit only cuts the answers, and a longer
cell begins as a shorter one does.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from kendall.loadgen.sweep.plan import SweepPlan
from kendall.policies import parse_policy
from kendall.policies.fixed import Fixed
from kendall.policies.text import SpecError, first_come_form, short_number
from kendall.queueing.arrivals.processes import Deterministic, Poisson
from kendall.queueing.arrivals.timetable import Timetable, draw_timetable, with_predictions
from kendall.queueing.description.parts import Engine, Requests
from kendall.queueing.distributions.token_distribution import (
    SHORTER,
    TokenDistribution,
    parse_distribution,
)
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.predictors.predictor_text import PredictorText, parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.run_length import advise_model

# of an advised length: the speed of a machine wanders over seconds, which the advice does not know
LEAST_SECONDS = 15.0
ENDLESS = 10**9  # requests of a point without a steady state: only its limit of time ends it
ORDER_STREAM = 2**31  # spawn key of the order's generator, far from those of the requests


class GatewayBounds(EngineBounds, frozen=True, kw_only=True, omit_defaults=True):
    """The limits that the engine reports, with the context length."""

    max_model_len: int

    def __str__(self) -> str:
        text = f"max_num_seqs={self.max_num_seqs}, max_model_len={self.max_model_len}"
        return text if self.step_tokens is None else f"{text}, step_tokens={self.step_tokens}"


class SweepCell(msgspec.Struct, frozen=True, kw_only=True):
    """One point: a policy under a rate and a token limit."""

    name: str  # also of its files
    policy: str
    load: float  # by the law
    rate: float  # per second
    max_output_tokens: int | None
    count: int
    cut: bool = False  # `cell_limit` leaves it shorter than was asked
    evenly: bool = False  # arrivals at equal distances
    purpose: Literal["grid", "saturation", "slo"] = "grid"

    @property
    def seconds(self) -> float:
        """How long requests are sent."""
        return self.count / self.rate

    def __str__(self) -> str:
        limit = "" if self.max_output_tokens is None else f", limit {self.max_output_tokens}"
        return f"{self.policy} at load {self.load:.3g} ({short_number(self.rate)}/s{limit})"


@dataclass(frozen=True, eq=False)
class Basis:
    """A plan on an engine."""

    plan: SweepPlan
    law: LatencyModel
    bounds: GatewayBounds

    @cached_property
    def prompt_tokens(self) -> TokenDistribution:
        return parse_distribution(self.plan.prompt_tokens, remedy=SHORTER)

    @cached_property
    def output_tokens(self) -> TokenDistribution:
        """Lengths of the answers before the gateway's limit. Raises SpecError where the prompts
        leave no room for one.
        """
        room = self.bounds.max_model_len - self.prompt_tokens.longest
        if room < 1:
            raise SpecError(
                f"got prompts of up to {self.prompt_tokens.longest} tokens; "
                f"expected fewer than the model's context of {self.bounds.max_model_len}"
            )
        return parse_distribution(self.plan.output_tokens, room)

    @cached_property
    def predictor(self) -> PredictorText:
        """The predictor of the lengths that are sent along."""
        return parse_predictor(self.plan.predictor)

    @property
    def longest(self) -> int:
        """Longest answer that any cell lets through, tokens."""
        return max(self.limited(limit).longest for limit in self.plan.max_output_tokens)

    def limited(self, limit: int | None) -> TokenDistribution:
        """Lengths of the answers under the gateway's limit."""
        return self.output_tokens if limit is None else self.output_tokens.clip(limit)

    def model(self, policy: str, limit: int | None) -> Queue:
        """The queue of a cell, but for its rate."""
        parsed = parse_policy(policy)
        return Queue(
            policy=parsed,
            requests=Requests(
                output_tokens=self.limited(limit),
                prompt_tokens=self.prompt_tokens,
                predictor=self.predictor,
            ),
            engine=Engine(law=self.law, bounds=self.bounds.for_slots(parsed)),
        )

    def at_speed(self, speed: float) -> Basis:
        """The same on an engine that is `speed` times slower."""
        return dataclasses.replace(self, law=self.law.at_speed(speed))

    def cells(self) -> Iterator[SweepCell]:
        """The grid, in the order of measuring: all policies at one load, then the next; or at
        random, from the seed.

        An advised length may take a second of simulation.
        """
        plan, points = self.plan, []
        for limit in plan.max_output_tokens:
            models = [self.model(policy, limit) for policy in plan.ordered_policies]
            for load in plan.loads:
                points += [
                    (model, load * model.largest_stable_rate, limit, f"load{load:g}")
                    for model in models
                ]
            for rate in plan.request_rates:
                points += [(model, rate, limit, f"rate{rate:g}") for model in models]
        order = np.arange(len(points))
        if plan.order == "random":
            order = np.random.default_rng(
                np.random.SeedSequence(plan.seed, spawn_key=(ORDER_STREAM,))
            ).permutation(len(points))
        for index in order.tolist():
            yield self._cell(*points[index])

    def _cell(self, model: Queue, rate: float, limit: int | None, point: str) -> SweepCell:
        """A cell is as long under every order of service as in the order of arrival."""
        plain = dataclasses.replace(model, policy=first_come_form(model.policy))
        count, cut = self.count(model, rate, self.needed(plain, rate))
        return SweepCell(
            name=cell_name(model.text, limit, point),
            policy=model.text,
            load=model.load(rate),
            rate=rate,
            max_output_tokens=limit,
            count=count,
            cut=cut,
        )

    def needed(self, model: Queue, rate: float) -> int:
        """Requests that the plan asks of a cell: a number, `duration` seconds' worth, or what
        `precision` takes.
        """
        plan = self.plan
        if plan.num_prompts is not None:
            return plan.num_prompts
        if plan.duration is not None:
            return max(1, math.ceil(rate * plan.duration))
        if model.load(rate) >= 1:
            return ENDLESS
        try:
            advised = advise_model(model, rate, relative=plan.precision)
        except SpecError:  # hardly anybody waits
            advised = advise_model(model, rate, relative=plan.precision, quantity="sojourn_time")
        return max(advised.requests, math.ceil(rate * LEAST_SECONDS))

    def count(self, model: Queue, rate: float, needed: int) -> tuple[int, bool]:
        """The requests of a cell that its limit of time allows, and whether they are fewer than
        needed.

        In whole batches: fixed batching would keep a last, partial one waiting.
        """
        allowed = max(1, min(needed, int(rate * self.plan.cell_limit)))
        size = (model.bound or 1) if isinstance(model.policy, Fixed) else 1
        return -(-allowed // size) * size, allowed < needed

    def timetable(self, cell: SweepCell) -> Timetable:
        """When a cell's requests are sent, how long they are before the gateway's limit, and how
        long they are predicted to be behind it, as the theory's predictor has it.
        """
        drawn = draw_timetable(
            Deterministic(cell.rate) if cell.evenly else Poisson(cell.rate),
            count=cell.count,
            seed=self.plan.seed,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )
        made = drawn.output_tokens
        if cell.max_output_tokens is not None:
            made = np.minimum(made, cell.max_output_tokens)
        cut = dataclasses.replace(drawn, output_tokens=made)
        predicted = with_predictions(cut, self.predictor, self.plan.seed)
        return dataclasses.replace(drawn, predicted_output_tokens=predicted.predicted_output_tokens)


def cell_name(policy: str, limit: int | None, point: str) -> str:
    """A name that can be a file's."""
    parts = [policy, *([] if limit is None else [f"limit{limit}"]), point]
    return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part) for part in parts)


def planned_cells(events: Iterable[dict[str, Any]]) -> list[SweepCell]:
    """The cells that a journal says were planned; none where it was stopped before."""
    planned = next((event for event in events if event["event"] == "planned"), None)
    return msgspec.convert(planned["cells"], list[SweepCell]) if planned else []
