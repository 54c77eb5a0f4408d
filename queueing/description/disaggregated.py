"""Prefill and decode, each on servers of its own or a phase at a time on the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import msgspec

from kendall.policies.core import Policy
from kendall.policies.immediate import Single
from kendall.policies.ordered import Ordered, order_of, with_ranking
from kendall.policies.orders import PARAMETERS
from kendall.policies.orders.order import ByLength
from kendall.policies.text import SpecError, counted
from kendall.queueing.description.parts import NO_TRANSFER
from kendall.queueing.description.predictions import Predictions
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.tandem import phase_means, phases

# of an engine that prefills and decodes
WHOLE: dict[str, Any] = {
    "disaggregated": False,
    "prefill_servers": 1,
    "kv_transfer": NO_TRANSFER,
    "energy": None,
}


class Stations(Predictions):
    """A queue of two stations, prefill and decode."""

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

    @cached_property
    def stations(self) -> tuple[ServiceTime, ServiceTime]:
        """Service times of prefill and decode where these are two servers. Raises SpecError:
        prefill takes no time.
        """
        return phases(self.engine.law, self.requests.output_tokens, self.requests.prompt_tokens)

    @cached_property
    def prefill(self) -> Self:
        """The first of two stations where prefill and decode are on servers of their own: one
        prompt at a time, in the order of the policy or, where that interrupts or forms batches of
        like lengths, of arrival. An order by service ranks by what a prompt takes here.
        """
        law = self.engine.law
        return self.but(
            **WHOLE,
            policy=prefill_policy(self.policy),
            servers=self.engine.prefill_servers,
            law=replace(law, k3=0.0, k4=0.0, kr=0.0, turnaround=0.0),
            bounds=EngineBounds(),
            pad_prompts=False,
        )

    @cached_property
    def decode(self) -> Self:
        """The second one: the same queue under a law without prefill; itself where there is one
        station.
        """
        if not self.engine.disaggregated:
            return self
        law, bounds = self.engine.law, self.engine.bounds
        return self.but(
            **WHOLE,
            law=replace(law, k1=0.0, k2=0.0, kp=0.0),
            bounds=msgspec.structs.replace(bounds, step_tokens=None, batch_tokens=None),
            pad_prompts=False,
        )

    @property
    def mean_transfer(self) -> float:
        """From prefill to decode, s."""
        transfer, prompts = self.engine.kv_transfer, self.requests.prompt_tokens
        return transfer.setup + transfer.token * (0.0 if prompts is None else prompts.mean)

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
        if order_of(policy).name != order_of(prefill_policy(policy)).name:
            yield "prompts are served in order of arrival"


def prefill_policy(policy: Policy) -> Single:
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
