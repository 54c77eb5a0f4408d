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
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from queueing.control.advice.forecast import Knobs
from queueing.estimation.window.feed import Feed
from queueing.measurement.record import Record, call_of
from server.engines.base import Capabilities
from server.errors import ApiError
from server.live.busy import BusyTime
from server.live.failures import Failures
from server.live.gauges import LiveGauges
from server.live.host import Host
from server.live.pilot import Pilot
from server.live.predictor import Ask, Predictor, PredictorLostError
from server.live.question import ENOUGH, Question
from server.live.questions import Questions
from server.live.recent_arrivals import RecentArrivals
from server.live.self_checks import SelfChecks
from server.live.state_file import load_state, save_state
from server.queue.ticket import Batch, Ticket
from server.runtime.pools import in_a_thread
from server.settings import AutopilotMode
from server.telemetry.energy.batches import MeteredBatches
from server.telemetry.energy.meter import EnergyMeter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from queueing.control.wait_ahead import BatchService, SlotService

log = logging.getLogger("kendall.live")
SHOWN = 60.0  # seconds over which the gauges of rate and utilisation average
LAST_LOOK = 5.0  # seconds that a shutdown waits for it
SAVED = 60.0  # seconds between two states on disk
LONGEST_SAVE = 10.0  # seconds that one may take
LAST_SAVE = 2.0  # seconds that a shutdown waits for it


class LiveModel:
    """Estimates, prediction beside observation, what-ifs and advice of one gateway."""

    def __init__(self, gateway: Host, capabilities: Capabilities) -> None:
        self._gateway = gateway
        now = gateway.now()
        self._feed = Feed()
        self._feed.begin_epoch(0, now)
        self._started_at = now
        self._recent = RecentArrivals(now, SHOWN)
        self._busy = BusyTime(
            max(SHOWN, 2 * gateway.settings.prediction_interval)
        )  # the self-checks look that far back
        self._self_checks = SelfChecks(now, self._busy)
        self.meter = _meter(gateway, capabilities)
        self._metered = MeteredBatches(self.meter)
        self._gauges = LiveGauges(gateway.metrics)
        self._predictor = Predictor(begin=self._begin_life)
        self.questions = Questions()
        self._pilot = Pilot(gateway)
        self.failures = Failures(log, "the live prediction")
        self.pilot_failures = Failures(log, "the autopilot")
        self._waiting_before = 0
        self._what_if_due = now + gateway.settings.what_if_interval
        self._save_due = now
        self._state: dict[str, Any] | None = None  # the estimates as they would be saved
        # the last look of this epoch, as `/admin/prediction` shows it
        self.prediction: dict[str, Any] | None = None
        self.reason: str | None = None  # why the last look has no prediction
        # service times of this epoch's policy, for waits that are told
        self.ahead: BatchService | SlotService | None = None
        self.estimates: dict[str, Any] | None = None
        self.what_if: list[dict[str, Any]] | None = None
        self.what_if_in_force: dict[str, Any] | None = None  # the same of the setting in force
        self.what_if_at: float | None = None
        self.checks: list[dict[str, Any]] = []
        gateway.metrics.arrival_rate.set_function(self.arrival_rate)
        gateway.metrics.utilisation.set_function(self.utilisation)

    # what happens

    def on_arrival(self, ticket: Ticket) -> None:
        """Counted whatever becomes of it; its instant is the kernel's, which the event loop
        cannot have shaped.
        """
        work, now = ticket.work, self._gateway.now()
        arrived_at = work.request.arrived_at
        received_at = arrived_at if work.received_at is None else work.received_at
        begins = self._feed.on_arrival(received_at, retry=work.retry, call=call_of(ticket.id))
        self._recent.saw(arrived_at, begins_call=begins)
        self._self_checks.on_arrival(arrived_at, now)

    def on_dispatch(self, batch: Batch) -> None:
        """A busy server."""
        self._metered.on_dispatch(batch)
        self._busy.begin(batch.server_id, batch.dispatched_at)

    def on_idle(self, server_id: int, at: float) -> None:
        """A busy interval is over."""
        self._metered.on_idle(server_id, at)
        self._busy.end(server_id, at)

    def on_settle(self, ticket: Ticket) -> None:
        """Out of the system."""
        self._self_checks.on_settle(ticket, self._gateway.now())

    def on_record(self, record: Record) -> None:
        """Delay, length and service time. One that was refused never joined this queue: neither
        its rate nor its balance knows it.
        """
        if record.outcome == "rejected":
            return
        self._feed.on_record(record)
        self._self_checks.on_record(record, self._gateway.now())

    def begin_epoch(self, epoch: int) -> None:
        """A policy, limit, patience or law changed: nothing is averaged across."""
        self._feed.begin_epoch(epoch, self._gateway.now())
        self._waiting_before = self._gateway.batcher.queue_length
        self.prediction = self.what_if = self.what_if_in_force = self.what_if_at = self.ahead = None
        self._what_if_due = self._gateway.now()  # as soon as there is something to look at
        self._gauges.begin_epoch()

    def on_manual_switch(self, policy: str) -> None:
        """An operator put another policy in force; the autopilot does not move back from it."""
        self._pilot.follow(policy)

    # what it shows

    @property
    def autopilot(self) -> dict[str, Any]:
        """Its mode, bounds and last decisions."""
        return self._pilot.shown()

    def arrival_rate(self) -> float:
        """Calls per second over the last minute, whatever the epoch: a change of the policy does
        not change what arrives.
        """
        return self._recent.call_rate(self._gateway.now())

    def sequence_rate(self) -> float:
        """Sequences per second over the last minute: a call may ask for several."""
        return self._recent.sequence_rate(self._gateway.now())

    def utilisation(self) -> float:
        """Fraction of the last minute in which a server was busy, averaged over servers; epochs
        do not cut it.
        """
        now = self._gateway.now()
        start = max(self._started_at, now - SHOWN)
        return self._busy.fraction(start, now, self._gateway.batcher.capabilities.servers)

    def why_nothing(self) -> str:
        """The reason why there is no prediction."""
        if self._gateway.latency.law is None:
            return "no latency law: POST /admin/calibrate or start with --latency"
        every = self._gateway.settings.prediction_interval
        return self.reason or (
            f"no prediction yet: one is made every {every:g} s once {ENOUGH} requests of this "
            "epoch have ended"
        )

    # the loop

    def energy(self) -> dict[str, Any]:
        """Where joules are read, and what a batch, a request of it and a token cost."""
        found = self.meter.estimate()
        terms = (
            {}
            if found is None
            else {
                "beta": found.beta.to_dict(),
                "c0": found.c0.to_dict(),
                "per_token": found.per_token.to_dict(),
            }
        )
        return self.meter.state() | {"estimate": terms or None}

    async def run(self, interval: float) -> None:
        """Check and look every `interval` seconds; a look that takes longer is waited for by the
        next one, not by the checks.
        """
        looking = asyncio.create_task(self._begin())
        try:
            while True:
                await asyncio.sleep(interval)
                self.check()
                self._gauges.energy(self.meter)
                if (
                    looking.done()
                    and self._gateway.latency.law is not None
                    and not self._gateway.latency.calibrating
                ):
                    looking = asyncio.create_task(self._look())
        finally:
            looking.cancel()

    async def _begin(self) -> None:
        """The predicting process comes up with what an earlier life of the gateway knew."""
        if self._state is None and not self._pilot.on:
            return  # it comes up with the first look
        try:
            await self._predictor.start()
        except PredictorLostError as error:
            self.failures.failed(str(error))

    async def _begin_life(self, ask: Ask, life: int) -> None:
        """A predicting process knows nothing of the one before: what that one had of the window
        is lost.
        """
        if life > 1:
            self._feed.begin_epoch(
                self._gateway.batcher.epoch, self._gateway.now(), carry_lengths=False
            )
        try:
            if self._state is not None:
                found = await ask("restore", self._state)
                self.estimates = self.estimates or found
        except PredictorLostError:
            raise
        except Exception:
            log.exception("the prediction process could not load the saved state")
        await self._pilot.start(ask)

    async def _look(self) -> None:
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
        found = self._self_checks.look(
            self._gateway.now(),
            batcher.unanswered_tickets(),
            batcher.queue_length,
            batcher.capabilities.servers,
        )
        self._gauges.checks(found)
        self.checks = [
            {
                "name": each.name,
                "holds": each.holds,
                "by_counters": _number(each.measured),
                "by_records": _number(each.expected),
            }
            for each in found
        ]

    async def update(self) -> None:
        """One look at the window as it is; what-ifs and the state file when they are due."""
        question = await self._asked()
        if question is None:
            return
        epoch = question.news.epoch
        found = await self._predictor.ask("look", question)
        if self._gateway.batcher.epoch != epoch:
            return
        if found["pilot_failure"] is not None:
            self.pilot_failures.failed(found["pilot_failure"])
        else:
            self.pilot_failures.succeeded()
        if found["decision"] is not None:
            self._pilot.carry_out(found["decision"])
        if self._gateway.batcher.epoch != epoch:
            return  # the autopilot turned a knob: what was predicted is of the epoch before
        self._take(found)
        if found["state"] is not None:
            self._state = found["state"]
            self._pilot.remember(found["pilot"])
            self._save_due = question.at + SAVED
            await self._save_beside()
        if found["can_say_what_if"] and question.at >= self._what_if_due:
            self._what_if_due = question.at + self._gateway.settings.what_if_interval
            await self.update_what_if()

    def _take(self, found: Mapping[str, Any]) -> None:
        self.reason, self.ahead = found["reason"], found["ahead"]
        if found["prediction"] is None:
            self.estimates = self.estimates or found["estimates"]
            return
        self.estimates, self.prediction = found["estimates"], found["prediction"]
        self._gauges.show(found["prediction"])

    async def update_what_if(self) -> None:
        """Every other policy, some limits and caps."""
        epoch = self._gateway.batcher.epoch
        found = await self._predictor.ask("ask_what_ifs")
        if found and self._gateway.batcher.epoch == epoch:
            self.what_if_in_force, *self.what_if = found
            self.what_if_at = self._gateway.now()
            self._gauges.what_if(self.what_if, self._gateway.max_output_tokens)

    async def distribution(self) -> dict[str, Any] | None:
        """The compared delays of the last look as a histogram, beside the predicted one; None
        where theory has no answer.
        """
        found: dict[str, Any] | None = await self._predictor.ask("ask_distribution")
        return found

    async def steer(self, mode: AutopilotMode) -> dict[str, Any]:
        """What the autopilot may do from now on. Raises ApiError where there are no looks that
        it could decide by.
        """
        if self._gateway.settings.prediction_interval <= 0:
            raise ApiError(
                409,
                "no_prediction",
                (
                    "got --prediction-interval 0; expected an interval > 0, because the autopilot "
                    "needs the live prediction"
                ),
            )
        await self._pilot.steer(self._predictor, mode)
        return self.autopilot

    async def advice(self, parameters: Mapping[str, str]) -> list[dict[str, Any]]:
        """What would be best; raises SpecError. Empty before there are estimates."""
        question = await self._asked()
        if question is not None:
            await self._predictor.ask("look", dataclasses.replace(question, decides=False))
        found: list[dict[str, Any]] = await self._predictor.ask("ask_advice", dict(parameters))
        return found

    async def _asked(self) -> Question | None:
        """What a look is asked, of a process that is up: one that comes up begins the window
        anew.
        """
        if self._gateway.latency.law is None:
            return None
        await self._predictor.start()
        return self._question()

    def _question(self) -> Question | None:
        gateway = self._gateway
        if gateway.latency.law is None:
            return None
        batcher = gateway.batcher
        bounds = batcher.capabilities
        return Question(
            news=self._feed.take(),
            at=gateway.now(),
            window=gateway.settings.prediction_window,
            shape=gateway.latency.law,
            knobs=Knobs(
                policy=batcher.policy_text,
                max_output_tokens=gateway.max_output_tokens,
                servers=bounds.servers,
            ),
            max_num_seqs=bounds.max_num_seqs,
            longest=bounds.max_model_len,
            patience=gateway.patience,
            bounds=self._pilot.bounds,
            reach=_reach(gateway),
            waiting=batcher.queue_length,
            saving=gateway.settings.state_file is not None and gateway.now() >= self._save_due,
            waiting_before=self._waiting_before,
            in_service=self._in_service(ended=False),
            ended=self._in_service(ended=True),
        )

    def _in_service(self, *, ended: bool) -> tuple[tuple[float, int], ...]:
        """Dispatch and tokens so far of those whose own end has come, or has not."""
        return tuple(
            (ticket.at.dispatched, ticket.ending.output_tokens)
            for ticket in self._gateway.batcher.unanswered_tickets()
            if ticket.batch is not None
            and ticket.at.dispatched is not None
            and (ticket.ending.finish_reason is not None) == ended
        )

    # a restart

    def restore(self) -> None:
        """Take up law and estimates of an earlier life, if they are of this engine."""
        path = self._gateway.settings.state_file
        state = None if path is None else load_state(path, self._gateway.engine_identity())
        if state is None:
            return
        self._gateway.latency.restore(state.get("profile"), state.get("law"))
        self._state = state.get("estimates")
        self._pilot.restore(state)
        log.info("loaded the live model saved at %s from %s", state.get("saved_at"), path)

    async def _save_beside(self) -> None:
        try:
            await in_a_thread(self.save, LONGEST_SAVE)
        except TimeoutError:
            log.warning(
                "cannot write the state file %s: it took longer than %g s",
                self._gateway.settings.state_file,
                LONGEST_SAVE,
            )

    def save(self) -> None:
        """Law and estimates into the state file. May run beside the event loop."""
        gateway = self._gateway
        path = gateway.settings.state_file
        if path is None or gateway.latency.law is None:
            return
        profile = None if gateway.latency.profile is None else gateway.latency.profile.to_dict()
        try:
            state = {
                "engine": gateway.engine_identity(),
                "law": str(gateway.latency.law),
                "profile": profile,
                "estimates": self._state,
            }
            save_state(path, state | self._pilot.saved())
        except OSError as error:
            log.warning("cannot write the state file %s: %s", path, error)

    async def close(self) -> None:
        """Save what is known now, and let the predicting process go."""
        if self._gateway.settings.state_file is not None and not self._predictor.busy:
            self._save_due = -math.inf
            with suppress(Exception):  # then what was saved last is kept
                await asyncio.wait_for(self.update(), LAST_LOOK)
        saving = threading.Thread(
            target=self.save, daemon=True
        )  # nothing else is left to do: the event loop may wait for it
        saving.start()
        saving.join(LAST_SAVE)
        await self._predictor.close()
        self.meter.close()


def _reach(gateway: Host) -> tuple[int, int] | None:
    """Of the calibration in force, where it is one."""
    cells = (
        []
        if gateway.latency.profile is None
        else [cell["lengths"] for cell in gateway.latency.profile.cells]
    )
    return (max(map(len, cells)), max(map(max, cells))) if cells else None


def _meter(gateway: Host, capabilities: Capabilities) -> EnergyMeter:
    """Of the engine's own devices; an emulated engine draws nothing that could be its."""
    if capabilities.engine == "emulated":
        return EnergyMeter(None)
    devices = int(gateway.settings.engine_args.get("tensor_parallel_size", 1))
    meter = EnergyMeter.of_machine(gpu="gpu" in capabilities.hardware, devices=devices)
    meter.start(gateway.now)
    return meter


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
