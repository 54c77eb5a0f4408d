"""The gateway behind its HTTP routes: an engine that comes up, a batcher, the limits in force,
what is observed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from policies import Policy, SpecError, format_policy, parse_policy
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Header
from server.admission.control import Overload
from server.calibration.in_force import LatencyModelInForce
from server.engines.base import Capabilities, Engine
from server.errors import ApiError
from server.live import LiveModel
from server.live.arrivals_seen import ArrivalsSeen
from server.queue import poison
from server.queue.batcher import Batcher
from server.queue.change import PolicyChange
from server.queue.observers import Observer
from server.runtime.clock import clock_of
from server.runtime.ids import RandomIds
from server.settings import Settings
from server.supervision import stalls
from server.supervision.progress import StuckWatch
from server.supervision.steady import Steady
from server.supervision.supervisor import Supervisor
from server.telemetry.cost.stages import Timing
from server.telemetry.metrics import Metrics
from server.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from server.calibration.idle_probes import IdleProbes
    from server.calibration.offer import Offer
    from server.engines.base import Work

log = logging.getLogger("kendall")


class Gateway:
    """One engine and its queue. `start` returns when the engine serves; until then requests are
    refused with 503.
    """

    def __init__(self, settings: Settings, engine: Engine, law: LatencyModel | None = None) -> None:
        self.settings = settings
        self.engine = engine
        self.metrics = Metrics()
        self.latency = LatencyModelInForce(law)
        self.max_output_tokens = settings.max_output_tokens
        self.patience = settings.patience
        self.draining = False
        # the process ends soon: not ready, but requests are accepted until it drains
        self.leaving = False
        self.ending = False  # the process shuts down: it drains for good
        self.stuck: str | None = None  # why nothing moves, until another engine serves
        self.on_given_up: Callable[[str], None] | None = None
        self.on_restarted: Callable[[], None] | None = None
        self.supervisor = Supervisor(
            engine,
            settings.supervision,
            on_down=self._on_down,
            on_up=self._on_up,
            on_given_up=self._on_given_up,
        )
        self.steady = Steady(engine, self.supervisor)
        self.dead: str | None = None  # why the engine is lost
        self.live: LiveModel | None = None
        self.probes: IdleProbes | None = None
        self.arrivals = ArrivalsSeen()
        self._call_ids = RandomIds()
        self.overload = Overload(self)
        self._policy = parse_policy(settings.policy)
        self._batcher: Batcher | None = None
        self._recorder: Recorder | None = None
        self.created = int(time.time())  # noqa: TID251 - a date, not a clock
        self._tasks: list[asyncio.Task[None]] = []

    # life

    async def start(self) -> None:
        """Bring the engine up. Raises EngineStartError."""
        self.now = clock_of(asyncio.get_running_loop())
        self.refusals = poison.Refusals(self.now)
        capabilities = await self.supervisor.start()
        observers: list[Observer] = [self.metrics]
        if self.settings.record_file:
            header = Header(
                writer="gateway",
                configuration=self.describe_engine(capabilities) | {"policy": self.settings.policy},
                versions=dict(capabilities.versions),
                hardware=dict(capabilities.hardware),
            )
            self._recorder = Recorder(
                self.settings.record_file, header, self.metrics.dropped_records.inc
            )
            observers.append(self._recorder)
        self.live = LiveModel(self, capabilities)
        observers.append(self.live)
        observers += self.overload.observers()
        suspect_after = self.settings.supervision.suspect_after
        self._batcher = Batcher(
            self.engine,
            capabilities,
            self._policy,
            observers,
            self.overload.queue(),
            suspect_after=suspect_after,
        )
        self._batcher.trials.on_sound = self.supervisor.forgive
        self.metrics.failures_of(self._batcher.failures)
        self.metrics.gauge_of(
            "queue_length", "Sequences waiting in the queue", lambda: self.batcher.queue_length
        )
        self.metrics.gauge_of(
            "max_clipped_fraction",
            "Largest fraction of answers that the autopilot may clip (--max-clipped-fraction)",
            lambda: self.settings.max_clipped_fraction,
        )
        self.metrics.gauge_of("in_service", "Sequences in service", lambda: self.batcher.in_service)
        self.metrics.gauge_of(
            "requests_in_system",
            (
                "Requests that arrived and are not yet counted by outcome: "
                "kendall_requests_received_total minus the sum of kendall_requests_total"
            ),
            lambda: self.batcher.unrecorded,
        )
        self.metrics.gauge_of(
            "engine_up",
            "Whether the engine serves (1: yes, 0: it is restarting or has failed for good)",
            lambda: self.supervisor.serving,
        )
        self.metrics.gauge_of(
            "engine_restarts",
            "Restarts of a failed engine since the gateway started",
            lambda: self.supervisor.restarts,
        )
        self.metrics.serves(capabilities.engine, self.settings.served_model_name)
        self.metrics.switched(
            format_policy(self._policy), self.max_output_tokens, 0, changed_policy=False
        )
        if (timeout := self.settings.supervision.stuck_timeout) > 0:
            watch = StuckWatch(
                self._batcher,
                timeout,
                lambda: self.latency.law,
                self._on_stuck,
                partial(stalls.on_still, self._batcher),
                form_time=self.settings.security.max_form_compile_time,
            )
            self._tasks.append(asyncio.create_task(watch.run(), name="stuck-watch"))
        named = (
            f"{capabilities.engine} engine, model {self.settings.served_model_name}, policy "
            f"{format_policy(self._policy)}"
        )
        scheme = "http" if self.settings.security.tls.certfile is None else "https"
        log.info("ready: %s, %s://%s:%d", named, scheme, self.settings.host, self.settings.port)
        self.live.restore()
        if self.settings.calibrate:
            from server.calibration.calibration import calibrate_at_start  # noqa: PLC0415 - it needs scipy, and few start with it

            await calibrate_at_start(self)
        if self.settings.idle_probes:
            from server.calibration.idle_probes import IdleProbes  # noqa: PLC0415 - it needs scipy

            self.probes = IdleProbes(self, on_offer=self._on_offer)
            self._tasks.append(asyncio.create_task(self.probes.run()))
        if self.settings.prediction_interval > 0:
            self._tasks.append(
                asyncio.create_task(self.live.run(self.settings.prediction_interval))
            )

    async def stop(self) -> None:
        """Fail what is unanswered, let the engine go, close the files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.abandon("the gateway is shutting down")
        if self.live is not None:
            await self.live.close()
        await self.supervisor.stop()
        if self._recorder is not None:
            self._recorder.close()

    async def drain(self) -> bool:
        """Take nothing new; return when everything that had arrived is answered, or False if the
        drain was undone before.
        """
        self._close_queue()
        if self._batcher is None:
            return True
        drained = await self._batcher.drained()
        self.flush()
        return drained

    def undo_drain(self) -> None:
        """Take requests again. Raises ApiError 409: the gateway shuts down."""
        if self.ending or self.leaving:
            raise ApiError(
                409, "shutting_down", "the gateway is shutting down; this drain cannot be undone"
            )
        self.draining = False
        if self._batcher is not None:
            self._batcher.reopen()

    def begin_drain(self) -> None:
        """The process ends: take nothing new, for good; a partial batch waits no longer for
        company.
        """
        self.ending = True
        self._close_queue()

    def _close_queue(self) -> None:
        self.draining = True
        self.latency.stop_calibration(
            ApiError(
                503,
                "shutting_down",
                "calibration: the gateway takes no new requests",
                retry_after=10,
            )
        )
        if self._batcher is not None:
            self._batcher.close()

    def abandon(self, message: str) -> None:
        """Whoever is not answered yet is told so now: the gateway ends."""
        self.draining = self.ending = True
        self.supervisor.refuse(message)
        if self._batcher is not None:
            self._batcher.lose_all("shutting_down", message)

    def flush(self) -> None:
        """What is known is in the run file, unless the disk is full or hangs."""
        if self._recorder is not None:
            self._recorder.flush()

    def _on_down(self, message: str) -> None:
        self.latency.stop_calibration(
            ApiError(503, "engine_unavailable", f"calibration: the engine failed: {message}")
        )
        if self._batcher is not None:
            guilty = self._batcher.interrupt(message, self.settings.supervision.max_interruptions)
            if guilty is not None:
                self._refuse(guilty.work, self._batcher)

    def _refuse(self, work: Work, batcher: Batcher) -> None:
        """It kills engines: refused for a while, with what its caller has sent of the same
        prompt already.
        """
        self.refusals.add(work)
        for ticket in list(batcher.unanswered_tickets()):
            same = (
                ticket.work.caller == work.caller
                and ticket.work.prompt_token_ids == work.prompt_token_ids
            )
            if same and ticket.ending.finish_reason is None:
                batcher.lose(
                    ticket,
                    "failed",
                    poison.CODE,
                    "another request with this prompt killed the engine; do not send it again",
                )

    def _on_up(self, capabilities: Capabilities) -> None:
        self.stuck = None
        if self._batcher is not None:
            # what waited meanwhile waited for the restart, what was in service was served by two
            # engines
            self.begin_epoch()
            self._batcher.resume(capabilities)
        if self.on_restarted is not None:
            self.on_restarted()

    def _on_given_up(self, message: str) -> None:
        self.dead = message
        self.latency.stop_calibration(
            ApiError(503, "engine_unavailable", f"calibration: the engine is gone: {message}")
        )
        if self._batcher is not None:
            self._batcher.lose_all("engine_unavailable", "the engine is gone")
        if self.on_given_up is not None:
            self.on_given_up(message)

    def _on_stuck(self, message: str) -> None:
        self.stuck = message
        self.supervisor.lost(message)

    # state

    @property
    def ready(self) -> bool:
        """Whether the engine serves."""
        return self._batcher is not None and self.dead is None and self.supervisor.serving

    @property
    def holding(self) -> bool:
        """Whether the queue waits for something else than service: a calibration, the trial of
        requests that may kill engines, a proof.
        """
        return self.latency.calibrating or (
            self._batcher is not None and self._batcher.trials.holding
        )

    @property
    def started(self) -> bool:
        """Whether there is a queue: the engine came up once."""
        return self._batcher is not None

    @property
    def healthy(self) -> bool:
        """Whether to be left alone: it starts, serves or replaces its engine, which ends in
        bounded time, serving or dead.
        """
        return self.dead is None

    @property
    def policy_text(self) -> str:
        """The policy in force, or the one that will be once the engine serves."""
        return format_policy(self._policy) if self._batcher is None else self._batcher.policy_text

    @property
    def batcher(self) -> Batcher:
        """The queue; only once ready."""
        if self._batcher is None:
            raise ApiError(
                503,
                "engine_unavailable",
                "the engine is starting; wait until /ready answers 200",
                retry_after=5,
            )
        return self._batcher

    def live_model(self) -> LiveModel:
        """What it knows of itself; only once ready."""
        if self.live is None:
            raise ApiError(
                503,
                "engine_unavailable",
                "the engine is starting; wait until /ready answers 200",
                retry_after=5,
            )
        return self.live

    def admit(self) -> Batcher:
        """The queue, if it takes requests now."""
        if self.dead is not None:
            raise ApiError(
                503,
                "engine_unavailable",
                "the engine has failed for good; restart the gateway",
                retry_after=10,
            )
        if self.draining:
            raise ApiError(
                503, "shutting_down", "the gateway takes no new requests", retry_after=10
            )
        return self.batcher

    def describe_engine(self, capabilities: Capabilities) -> dict[str, Any]:
        """What serves, for `/v1/models`, the run file and the log."""
        return {
            "engine": capabilities.engine,
            "emulated": capabilities.engine == "emulated",
            "model": self.settings.served_model_name,
            "max_model_len": capabilities.max_model_len,
            "max_num_seqs": capabilities.max_num_seqs,
            "max_num_batched_tokens": capabilities.max_num_batched_tokens,
            "kv_cache_tokens": capabilities.kv_cache_tokens,
            "servers": capabilities.servers,
        }

    def policy_in_force(self) -> dict[str, Any]:
        """What `GET /admin/policy` answers."""
        batcher = self.batcher
        return {
            "policy": batcher.policy_text,
            "effective_max_batch_size": batcher.effective_max_batch_size,
            "padded": batcher.policy.padded and batcher.capabilities.pads,
            "max_output_tokens": self.max_output_tokens,
            "patience": self.patience,
            "epoch": batcher.epoch,
        }

    def begin_epoch(self, policy: Policy | None = None) -> int:
        """Another policy, or only another limit or law: statistics begin anew. Returns the
        epoch's number.
        """
        epoch = self.batcher.switch(policy)
        self.metrics.switched(
            self.batcher.policy_text,
            self.max_output_tokens,
            epoch,
            changed_policy=policy is not None,
        )
        self.overload.begin_epoch()
        if self.live is not None:
            self.live.begin_epoch(epoch)
        return epoch

    def _on_offer(self, _offer: Offer, taken: bool) -> None:
        if taken:
            self.begin_epoch()  # under another law

    def engine_identity(self) -> dict[str, Any]:
        """What a law and a state file are good for."""
        return self.describe_engine(self.batcher.capabilities)

    def change(self, change: PolicyChange, *, by_autopilot: bool = False) -> dict[str, Any]:
        """Put policy and limits in force together, or raise and change nothing."""
        batcher = self.batcher
        try:
            policy = None if change.policy is None else parse_policy(change.policy)
        except SpecError as error:
            raise ApiError(400, "invalid_policy", str(error), param="policy") from None
        if policy is not None and format_policy(policy) == batcher.policy_text:
            policy = None
        named = change.model_fields_set
        limit = change.max_output_tokens if "max_output_tokens" in named else self.max_output_tokens
        patience = change.patience if "patience" in named else self.patience
        if policy is None and (limit, patience) == (self.max_output_tokens, self.patience):
            return self.policy_in_force()  # nothing changes: the evidence of the epoch is kept
        self.max_output_tokens, self.patience = limit, patience
        epoch = self.begin_epoch(policy)
        if policy is not None and self.live is not None and not by_autopilot:
            self.live.on_manual_switch(batcher.policy_text)
        log.info(
            "epoch %d: policy %s, max_output_tokens %s, patience %s",
            epoch,
            batcher.policy_text,
            "none" if limit is None else limit,
            "none" if patience is None else f"{patience:g} s",
        )
        return self.policy_in_force()

    # requests

    def begin_timing(self) -> Timing | None:
        """For one call in some dozens: what times its stages. None before it is up, too: it then
        refuses calls.
        """
        return self.metrics.own_time.begin(self.now) if self.ready else None

    def next_call_id(self, prefix: str) -> str:
        """A fresh id for a call: random, so that no restart and no replica repeats one, and none
        tells how many calls there were.
        """
        return f"{prefix}-{self._call_ids.next()}"
