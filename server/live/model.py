"""The live model: an observer of the batcher that feeds a window, and the loop that has it looked
at.

The window holds one epoch only. Rate, lengths, speed and residual are estimated from it, never a
delay; all of it is computed in a niced process of its own, so that the event loop never waits for
it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from kendall.queueing.measurement.record import Record, call_of
from kendall.server.calibration.host import LiveHost
from kendall.server.engines.base import Capabilities
from kendall.server.live.activity import Activity
from kendall.server.live.answers import AdviceAnswer, Answer, AssessmentSummary, DelayCharts
from kendall.server.live.assessment_request import ENOUGH, AssessmentRequest, LiveWindow
from kendall.server.live.failures import Failures
from kendall.server.live.gauges import LiveGauges
from kendall.server.live.pilot import Pilot
from kendall.server.live.prediction_client import Ask, PredictorClient, PredictorLostError
from kendall.server.live.questions import Questions
from kendall.server.live.self_checks import SelfChecks
from kendall.server.live.state_file import StateKeeper
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState
from kendall.server.telemetry.energy.batches import MeteredBatches
from kendall.server.telemetry.energy.meter import EnergyMeter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kendall.queueing.choosing.forecast import Advice, LoadBalancerCost, WhatIf
    from kendall.queueing.control.wait_ahead import BatchService, SlotService
    from kendall.queueing.estimation.assumptions.checks import SelfCheck
    from kendall.queueing.estimation.interval import Estimate
    from kendall.queueing.estimation.summaries import EstimatesSummary

log = logging.getLogger("kendall.live")
STALE = 3  # intervals, after which the last reason says nothing of now
LAST_LOOK = 5.0  # seconds that a shutdown waits for it
WHAT_IF_SHARE = 0.1  # of the time that what-ifs take: those that are simulated take half a minute
TELLING = 1.1  # a factor, beside the interval of an estimate
TWO_SIDES = 3.92  # standard deviations that a 95 % interval is wide
MOVED = 5.0  # standard deviations by which arrivals are more or fewer than the estimated rate has


class LiveModel(Observer):
    """Estimates, prediction beside observation, what-ifs and advice of one gateway."""

    def __init__(self, gateway: LiveHost, capabilities: Capabilities) -> None:
        self._gateway = gateway
        now = gateway.now()
        self._window = LiveWindow(gateway)
        self._producer = self._window.producer
        # the self-checks go two intervals back
        self.activity = Activity(
            gateway.now,
            lambda: gateway.batcher.servers_in_use or range(gateway.batcher.capabilities.servers),
            2 * gateway.settings.prediction_interval,
        )
        self._recent, self._busy = self.activity.recent, self.activity.busy
        # of watched servers
        self._busy_until: dict[int, float] = {}
        self._watched_until = -math.inf
        self._self_checks = SelfChecks(now, self._busy)
        self.meter = _meter(gateway, capabilities)
        self._metered = MeteredBatches(self.meter)
        self._gauges = LiveGauges(gateway.metrics)
        self._predictor = PredictorClient(begin=self._begin_life)
        self.ask = self._predictor.ask
        self.questions = Questions()
        self.pilot = Pilot(gateway, self._predictor)
        self.saved = StateKeeper(gateway, self.pilot)
        # at the end of the gateway a service manager may kill the predicting process first
        self.failures = Failures(log, "the live prediction", lambda: gateway.lifecycle.leaving)
        self.pilot_failures = Failures(log, "the autopilot")
        self._what_if_due = now + gateway.settings.what_if_interval
        self._what_if_began = now
        # the last assessment of this epoch, as `/admin/prediction` shows it
        self.prediction: AssessmentSummary | None = None
        self.reason: str | None = None  # why the last assessment has no prediction
        self._looked_at = now  # when that was told
        # service times of this epoch's policy, for wait estimates
        self.ahead: BatchService | SlotService | None = None
        self.estimates: EstimatesSummary | None = None
        self.what_if: list[WhatIf] | None = None
        self.what_if_in_force: WhatIf | None = None  # the same of the setting in force
        self.what_if_at: float | None = None  # the end of the window that they rest on
        self.what_if_left = 0  # of them only the load is known yet
        self._what_if_basis: EstimatesSummary | None = None  # the estimates that they rest on
        # the same setting with a queue at each server, where there are several
        self.load_balancer: LoadBalancerCost | None = None
        self.checks: list[SelfCheck] = []
        gateway.metrics.load.arrival_rate.set_function(self.activity.arrival_rate)
        gateway.metrics.load.utilisation.set_function(self.activity.utilisation)

    # what happens

    def on_arrival(self, sequence: SequenceState) -> None:
        """Counted whatever becomes of it; its instant is the kernel's, which the event loop
        cannot have shaped.
        """
        engine_request, now = sequence.engine_request, self._gateway.now()
        arrived_at = engine_request.request.arrived_at
        received_at = (
            arrived_at if engine_request.received_at is None else engine_request.received_at
        )
        begins = self._producer.on_arrival(
            received_at, retry=engine_request.retry, call=call_of(sequence.id)
        )
        self._recent.saw(arrived_at, begins_call=begins)
        self._self_checks.on_arrival(arrived_at, now)

    def on_refused(self, limit: str) -> None:
        """A call came that this limit kept out of the queue."""
        self._producer.on_refused(self._gateway.now(), limit)

    def on_dispatch(self, batch: Batch) -> None:
        """A busy server."""
        if self.meter.source is not None:
            self._metered.on_dispatch(batch)
        self._busy.begin(batch.server_id, batch.dispatched_at)

    def on_idle(self, server_id: int, at: float) -> None:
        """A busy interval is over."""
        self._metered.on_idle(server_id, at)
        self._busy.end(server_id, at)

    def on_settle(self, sequence: SequenceState) -> None:
        """Out of the system."""
        self._self_checks.on_settle(sequence, self._gateway.now())

    def on_record(self, record: Record) -> None:
        """Delay, length and service time. One that was refused never joined this queue: neither
        its rate nor its balance knows it.
        """
        if record.outcome == "rejected":
            return
        self._producer.on_record(record)
        self._self_checks.on_record(record, self._gateway.now())

    def on_watched(self, record: Record) -> None:
        """A request that somebody else's servers have served: its arrival and its end, known
        together, in the order of arrivals.
        """
        arrived_at, server = record.arrived_at, record.server_id or 0
        begun, ended = record.dispatched_at, record.released_at
        if arrived_at is None or begun is None or ended is None:
            return
        begins = self._producer.on_arrival(arrived_at, call=call_of(record.request_id))
        self._producer.on_record(record)
        if arrived_at <= self._watched_until:
            return  # told of before, in another epoch, or late
        self._watched_until = arrived_at
        self._recent.saw(arrived_at, begins_call=begins)
        before = self._busy_until.get(server, -math.inf)
        if begun > before:
            self._busy.end(server, before)
            self._busy.begin(server, begun)
        self._busy_until[server] = max(before, ended)

    def begin_epoch(self, epoch: int, *, carry_lengths: bool = True) -> None:
        """A policy, limit, patience or law changed: nothing is averaged across."""
        self._window.begin_epoch(epoch, carry_lengths=carry_lengths)
        self.prediction = self.what_if = self.what_if_in_force = self.what_if_at = self.ahead = None
        self.reason = self.load_balancer = None
        self.what_if_left, self._what_if_basis = 0, None
        self._what_if_due = self._gateway.now()  # as soon as there is an assessment
        self._gauges.begin_epoch()

    # what it shows

    def why_nothing(self) -> str:
        """The reason why there is no prediction."""
        if self._gateway.latency.law is None:
            return "no latency law: POST /admin/calibrate or start with --latency"
        every = self._gateway.settings.prediction_interval
        old = self._gateway.now() - self._looked_at > STALE * every
        if self._predictor.busy and (self.reason is None or old):
            return "no prediction yet: the predicting process, which is niced, is at work"
        return self.reason or (
            f"no prediction yet: one is made every {every:g} s once {ENOUGH} requests of this "
            "epoch have ended"
        )

    async def run(self, interval: float) -> None:
        """Check and assess every `interval` seconds; what takes longer is waited for by the
        next one, not by the checks.
        """
        assessing = asyncio.create_task(self._begin())
        try:
            while True:
                await asyncio.sleep(interval)
                self.check()
                self._gauges.energy(self.meter)
                if (
                    assessing.done()
                    and self._gateway.latency.law is not None
                    and not self._gateway.latency.calibrating
                ):
                    assessing = asyncio.create_task(self.assess())
        finally:
            assessing.cancel()

    async def _begin(self) -> None:
        """The predicting process comes up with what an earlier life of the gateway knew."""
        if self.saved.estimates is None and not self.pilot.on:
            return  # it comes up with the first assessment
        try:
            await self._predictor.start()
        except PredictorLostError as error:
            self.failures.failed(str(error))

    async def _begin_life(self, ask: Ask, life: int) -> None:
        """A predicting process knows nothing of the one before: what that one had of the window
        is lost.
        """
        if life > 1:
            self._window.begin_anew()
        try:
            if self.saved.estimates is not None:
                found = await ask("restore", self.saved.estimates)
                self.estimates = self.estimates or found
        except PredictorLostError:
            raise
        except Exception:
            log.exception("the prediction process could not load the saved state")
        await self.pilot.start(ask)

    async def assess(self) -> None:
        """The same as `update`; what fails is logged once."""
        try:
            await self.update()
        except PredictorLostError as error:
            self.failures.failed(str(error))
        except Exception as error:  # noqa: BLE001 - logged once
            self.failures.failed(f"{type(error).__name__}: {error}", error)
        else:
            self.failures.succeeded()

    def check(self) -> None:
        """Little's law, conservation and the utilisation law over the stretch since the last
        time.
        """
        batcher = self._gateway.batcher
        self.checks = self._self_checks.judge(
            self._gateway.now(),
            batcher.unanswered_sequences(),
            batcher.queue_length,
            batcher.capabilities.servers,
        )
        self._gauges.checks(self.checks)

    async def update(self) -> None:
        """Assess the window as it is; what-ifs and the state file when they are due."""
        question = await self._asked()
        if question is None:
            return
        epoch = question.delta.epoch
        found: Answer = await self._predictor.ask("assess_window", question)
        if self._gateway.batcher.epoch != epoch:
            return
        if found.pilot_failure is not None:
            self.pilot_failures.failed(found.pilot_failure)
        else:
            self.pilot_failures.succeeded()
        if found.decision is not None:
            self.pilot.carry_out(found.decision)
        if self._gateway.batcher.epoch != epoch:
            return  # the autopilot turned a knob: what was predicted is of the epoch before
        self._take(found)
        if found.state is not None:
            self.pilot.remember(found.pilot)
            await self.saved.keep(found.state, question.at)
        due = question.at >= self._what_if_due or self.what_if_left or self.what_if_outdated
        if found.can_say_what_if and due:
            await self._what_ifs(until=question.at + self._gateway.settings.prediction_interval)

    def _take(self, answer: Answer) -> None:
        self._looked_at = self._gateway.now()
        self.reason, self.ahead = answer.reason, answer.ahead
        if answer.ranking is not None:
            self._gateway.batcher.rank_by(answer.ranking)
        if answer.prediction is None:
            self.estimates = self.estimates or answer.estimates
            return
        self.estimates, self.prediction = answer.estimates, answer.prediction
        self._gauges.show(answer.prediction)

    @property
    def outdated(self) -> bool:
        """Whether more or fewer requests came since the last assessment than its rate has."""
        calls, expected, deviation = self._arrived()
        return calls > 0 and abs(calls - expected) > MOVED * deviation

    @property
    def rate_factor(self) -> float:
        """The present arrival rate over that of the last assessment, where it is another one; 1
        elsewhere. The load of a setting is in proportion to the rate.
        """
        calls, expected, _ = self._arrived()
        return calls / expected if self.outdated else 1.0

    @property
    def what_if_rate_factor(self) -> float:
        """The present arrival rate over that which the what-ifs rest on."""
        if self.prediction is None or not self._what_if_basis:
            return 1.0
        before = self._what_if_basis.arrival_rate.value
        rate = self.prediction.arrival_rate * self.rate_factor
        return rate / before if before > 0 else 1.0

    @property
    def age(self) -> float | None:
        """Of the last assessment, seconds."""
        return None if self.prediction is None else self._gateway.now() - self.prediction.at

    @property
    def rate_seconds(self) -> float | None:
        """The seconds over which the present arrival rate is known; None before an assessment."""
        if self.prediction is None:
            return None
        if not self.outdated:
            return self.prediction.rate_seconds
        return self.activity.since(self.prediction.at)[1]

    @property
    def what_if_outdated(self) -> bool:
        """Whether the what-ifs are of another arrival rate or speed than there is now."""
        if self.prediction is None or self._what_if_basis is None:
            return False
        now, basis = self.prediction.estimates, self._what_if_basis
        moved = _beyond(basis.arrival_rate, now.arrival_rate) or _beyond(basis.speed, now.speed)
        return self.outdated or moved

    @property
    def stopped(self) -> bool:
        """Whether no requests come any more: the last assessment is of those that came."""
        if self.prediction is None or self._arrived()[0]:
            return False
        ended = self.prediction.estimates.now  # the last call, once the silence is long
        _, expected, deviation = self._arrived(ended)
        return expected > MOVED * deviation

    def _arrived(self, at: float | None = None) -> tuple[int, float, float]:
        """Calls since then, or the last assessment, how many there are at its rate, and the
        standard deviation of that number: by chance, and as the rate is an estimate.
        """
        if self.prediction is None:
            return 0, 0.0, 1.0
        calls, seconds = self.activity.since(self.prediction.at if at is None else at)
        estimates, rate = self.prediction.estimates, self.prediction.estimates.arrival_rate
        expected = self.prediction.arrival_rate * seconds
        chance = max(1.0, estimates.dispersion.value) * max(expected, 1.0)
        known = (rate.high - rate.low) * seconds / TWO_SIDES if rate.known else 0.0
        return calls, expected, math.hypot(math.sqrt(chance), known)

    async def update_what_if(self) -> None:
        """All of them, at the last assessment's estimates."""
        self.what_if_left = 0
        await self._what_ifs(until=math.inf)

    async def _what_ifs(self, until: float) -> None:
        """Every other policy, some limits and caps, as many as come `until` then: the rest follows
        the next assessment. Behind the last of them what a load balancer would cost, and how many
        servers the SLO needs. The next ones are due later where these take long.
        """
        gateway, epoch = self._gateway, self._gateway.batcher.epoch
        anew = not self.what_if_left or self.what_if_outdated
        if anew:
            self._what_if_began = gateway.now()
            self._what_if_basis = self.estimates
        while anew or (self.what_if_left and gateway.now() < until):
            found: list[WhatIf] = await self._predictor.ask("ask_what_ifs", anew)
            anew = False
            if gateway.batcher.epoch != epoch:
                return
            self._take_what_ifs(found)
        if not self.what_if_left:
            every, took = gateway.settings.what_if_interval, gateway.now() - self._what_if_began
            self._what_if_due = self._what_if_began + max(every, took / WHAT_IF_SHARE)
            await self._beside_what_ifs(epoch)

    def _take_what_ifs(self, found: Sequence[WhatIf]) -> None:
        if not found:
            self.what_if_left = 0
            return
        first, *others = found
        self.what_if_in_force, self.what_if, self.what_if_at = first, others, first.at
        self.what_if_left = sum(bool(each.forecast.pending) for each in found)
        self._gauges.what_if(others, self._gateway.limits.max_output_tokens)

    async def _beside_what_ifs(self, epoch: int) -> None:
        servers, batcher = self._gateway.batcher.servers, self._gateway.batcher
        balanced = await _balanced(self._predictor, servers, {}) if self.what_if else None
        if batcher.epoch == epoch:
            self.load_balancer = balanced
        slo = self._gateway.settings.overload.slo
        needed = None if slo is None else await self._predictor.ask("ask_servers", slo)
        if batcher.epoch == epoch:
            self._gauges.needed(needed)

    async def drawn(self) -> DelayCharts | None:
        """What a page draws of the last assessment."""
        drawn: DelayCharts | None = await self._predictor.ask("ask_drawn")
        return drawn

    async def advice(self, parameters: Mapping[str, str]) -> AdviceAnswer:
        """Raises SpecError. Without any before there are estimates."""
        question = await self._asked()
        if question is not None:
            await self._predictor.ask("assess_window", dataclasses.replace(question, decides=False))
        found: list[Advice] = await self._predictor.ask("ask_advice", dict(parameters))
        servers = self._gateway.batcher.servers
        balanced = await _balanced(self._predictor, servers, parameters) if found else None
        rate = await self._predictor.ask("ask_rates", dict(parameters)) if found else None
        return AdviceAnswer(advice=found, load_balancer=balanced, rate=rate)

    async def what_ifs_at(self, parameters: Mapping[str, str]) -> list[WhatIf]:
        """The setting in force and the usual others where another number of requests comes; raises
        SpecError. None before there are estimates.
        """
        found: list[WhatIf] = await self._predictor.ask("ask_what_ifs_at", dict(parameters))
        return found

    async def _asked(self) -> AssessmentRequest | None:
        """The question of an assessment, to a process that is up: one that comes up begins the
        window anew.
        """
        if self._gateway.latency.law is None:
            return None
        await self._predictor.start()
        return self._window.question(self.pilot.bounds, saving=self.saved.due)

    async def close(self) -> None:
        """Save what is known now, and let the predicting process go."""
        if self.saved.wanted and not self._predictor.busy:
            self.saved.make_due()
            with suppress(Exception):  # then what was saved last is kept
                await asyncio.wait_for(self.update(), LAST_LOOK)
        self.saved.save_last()
        await self._predictor.close()
        self.meter.close()


async def _balanced(
    predictor: PredictorClient, servers: int, parameters: Mapping[str, str]
) -> LoadBalancerCost | None:
    """What a load balancer would cost; None with one server."""
    if servers <= 1:
        return None
    found: LoadBalancerCost | None = await predictor.ask("ask_load_balancer", dict(parameters))
    return found


def _meter(gateway: LiveHost, capabilities: Capabilities) -> EnergyMeter:
    """Of the engine's own devices; an emulated engine draws nothing that could be its, and a
    watched one may be on another machine.
    """
    if capabilities.engine in ("emulated", "watched"):
        return EnergyMeter(None)
    devices = int(gateway.settings.engine_args.get("tensor_parallel_size", 1))
    meter = EnergyMeter.of_machine(gpu="gpu" in capabilities.hardware, devices=devices)
    meter.start(gateway.now)
    return meter


def _beyond(before: Estimate, now: Estimate) -> bool:
    """Whether an estimate has left its interval by more than chance and wander do."""
    if not now.known or not math.isfinite(before.value):
        return False
    return not now.low / TELLING <= before.value <= now.high * TELLING
