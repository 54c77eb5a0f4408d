"""The gateway behind its HTTP routes: builds the parts, starts and stops them, and tells the queue
what becomes of its engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Header
from kendall.server.admission.control import Overload
from kendall.server.admission.limits_in_force import LimitsInForce
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.engines.base import Capabilities, Engine, describe_engine
from kendall.server.engines.proxied import ProxyingEngine
from kendall.server.live import LiveModel
from kendall.server.live.arrivals_seen import ArrivalsSeen
from kendall.server.openai_tools.serving_objects import serving_objects_of
from kendall.server.queue import poison
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.observers import Observer
from kendall.server.runtime.background import going_on
from kendall.server.runtime.clock import clock_of
from kendall.server.runtime.errors import ApiError, not_started
from kendall.server.runtime.ids import CallIds
from kendall.server.settings import Settings
from kendall.server.supervision.lifecycle import Lifecycle
from kendall.server.supervision.progress import SilenceLimits, StuckWatch, on_still
from kendall.server.supervision.replicas.pool import Replicas
from kendall.server.supervision.replicas.servers import Servers
from kendall.server.supervision.replicas.stuck import StuckReplicas
from kendall.server.supervision.supervisor import Supervisor
from kendall.server.supervision.tokenizer import RestartSafeTokenizer
from kendall.server.telemetry.metrics import Metrics
from kendall.server.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from kendall.server.calibration.idle_probes import IdleProbes
    from kendall.server.engines.base import EngineRequest
    from kendall.server.predictors.lengths import LengthPredictor
    from kendall.server.queue.sequence import SequenceState
    from kendall.server.telemetry.tracing import Tracing

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
        self.limits = _limits_of(settings, self.metrics)
        self.on_given_up: Callable[[str], None] | None = None
        self.on_restarted: Callable[[], None] | None = None
        self.supervisor = Supervisor(
            engine,
            settings.supervision,
            on_down=self._on_down,
            on_up=self._on_up,
            on_given_up=self._on_given_up,
        )
        self.lifecycle = Lifecycle(self.supervisor)
        self.tokenizer = RestartSafeTokenizer(engine, self.supervisor)
        self.serving_objects = serving_objects_of(
            engine, settings
        )  # of tools and the newer endpoints
        self.live: LiveModel | None = None
        self.tracing: Tracing | None = None  # where calls are traced
        self.probes: IdleProbes | None = None
        self.arrivals = ArrivalsSeen()
        self.length_predictor: LengthPredictor | None = None
        self.call_ids = CallIds()
        self.overload = Overload(self)
        self.limits.on_epoch.append(self.overload.begin_epoch)
        self.servers = _servers_of(self)  # of several engines that are started here
        # known once: the protocol is looked at attribute by attribute
        self.proxying = engine if isinstance(engine, ProxyingEngine) else None
        if self.proxying is not None:
            self.proxying.on_servers, self.proxying.on_room = self._on_servers, self._on_room
        self._serving: frozenset[int] = frozenset()  # of those behind: what takes work
        self._rooms: dict[int, int | None] = {}  # of those behind: sequences at once
        self._batcher: Batcher | None = None
        self._recorder: Recorder | None = None
        self.created = int(time.time())  # noqa: TID251 - a date, not a clock
        self._tasks: list[asyncio.Task[None]] = []

    # life

    async def start(self) -> None:
        """Bring the engine up. Raises EngineStartError."""
        self.now = clock_of(asyncio.get_running_loop())
        self.rejected_prompts = poison.RejectedPrompts(self.now)
        capabilities = await self.supervisor.start()
        self.settings = self.settings.under(capabilities.model_names)
        if self.serving_objects is not None:
            await self.serving_objects.open()
        self._open_queue(capabilities)
        self._watch_progress()
        settings = self.settings
        self.live_model().saved.restore()
        if settings.calibrate:
            from kendall.server.calibration.calibration import calibrate_at_start  # noqa: PLC0415 - it needs scipy, and few start with it

            log.info(
                "calibrating the engine's law, some 3,000 to 5,000 steps; requests wait until then"
            )
            await calibrate_at_start(self)
        log.info(
            "ready: %s engine, model %s, policy %s, %s://%s:%d",
            capabilities.engine,
            settings.served_model_name,
            self.limits.policy_text,
            "http" if settings.security.tls.certfile is None else "https",
            settings.host,
            settings.port,
        )
        if settings.idle_probes:
            from kendall.server.calibration.idle_probes import IdleProbes  # noqa: PLC0415 - it needs scipy

            self.probes = IdleProbes(self)
            self._keep_up("idle probing", self.probes.run)
        if settings.prediction_interval > 0:
            run = partial(self.live_model().run, settings.prediction_interval)
            self._keep_up("the live model", run)

    def _keep_up(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(going_on(what, work), name=what))

    def _open_queue(self, capabilities: Capabilities) -> None:
        """The queue, and what observes it: metrics, records, the live model, admission."""
        observers: list[Observer] = [self.metrics]
        settings = self.settings
        if settings.record_file:
            recorder = self._recorder = _recorder(self, settings.record_file, capabilities)
            self.metrics.gauge_of(
                "unwritten_records",
                "Records that wait in memory for the disk of the run file",
                lambda: recorder.unwritten,
            )
            observers.append(self._recorder)
        self.live = LiveModel(self, capabilities)
        self.limits.on_epoch.append(self.live.begin_epoch)
        self.limits.on_manual_switch = self.live.pilot.follow
        observers.append(self.live)
        observers += self.overload.observers()
        if settings.length_predictor != "none":
            observers.append(self._predicting_lengths(self.live))
        if settings.otlp_traces_endpoint is not None:
            from kendall.server.telemetry.tracing import Tracing, exporting_provider  # noqa: PLC0415 - few trace

            provider = exporting_provider(settings.otlp_traces_endpoint)
            self.tracing = Tracing(provider, settings.served_model_name, self.now)
            observers.append(self.tracing)
        self._batcher = Batcher(
            self.engine,
            capabilities,
            self.limits.policy,
            observers,
            self.overload.queue_for,
            suspect_after=self.settings.supervision.suspect_after,
        )
        self._batcher.recovery.trials.on_sound = self.supervisor.forgive
        if self.proxying is not None:
            self._batcher.use_only(self._serving)
            for server_id, room in self._rooms.items():
                self._batcher.trust(server_id, room)
        if self.servers is not None:
            self.servers.attach(self._batcher)
        self.lifecycle.came_up()
        _add_gauges(self, self._batcher)
        self.metrics.serves(capabilities.engine, self.settings.served_model_name)
        self.limits.govern(self._batcher)

    def _predicting_lengths(self, live: LiveModel) -> LengthPredictor:
        from kendall.server.predictors.lengths import LengthPredictor, add_gauges  # noqa: PLC0415 - few predict

        predictor = LengthPredictor(self.settings.length_predictor, live.ask, self.now)
        self.length_predictor = predictor
        predictor.restore()
        add_gauges(predictor, self.metrics)
        if predictor.options.name == "learned":
            self._keep_up("the length predictor", predictor.run)
        return predictor

    def _watch_progress(self) -> None:
        """Replace an engine that makes no token, and continue a sequence that gets none. A call at
        a server behind is given up.
        """
        timeout = self.settings.supervision.stuck_timeout
        form_time = self.settings.security.max_form_compile_time
        if timeout <= 0:
            return
        if self.proxying is not None:
            self.proxying.silence_of = SilenceLimits(timeout, lambda: self.latency.law)
            return
        watch: StuckWatch | StuckReplicas
        if isinstance(self.engine, Replicas):
            watch = StuckReplicas(
                self.engine, self.batcher, timeout, lambda: self.latency.law, form_time
            )
        else:
            watch = StuckWatch(
                self.batcher,
                timeout,
                lambda: self.latency.law,
                self.lifecycle.replace_stuck_engine,
                partial(on_still, self.batcher),
                form_time=form_time,
            )
        self._keep_up("the check for a stuck engine", watch.run)

    async def stop(self) -> None:
        """Fail what is unanswered, let the engine go, close the files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.abandon("the gateway is shutting down")
        if self.servers is not None:
            await self.servers.close()
        if self.live is not None:
            await self.live.close()
        if self.length_predictor is not None:
            await self.length_predictor.close()
        if self.serving_objects is not None:
            self.serving_objects.close()
        await self.supervisor.stop()
        if self.tracing is not None:
            await self.tracing.close()
        if self._recorder is not None:
            self._recorder.close()

    async def drain(self) -> bool:
        """Take nothing new; return when everything that had arrived is answered, or False if the
        drain was undone before.
        """
        self.lifecycle.drain()
        self._close_queue()
        if self._batcher is None:
            return True
        drained = await self._batcher.drained()
        self.flush()
        return drained

    def undo_drain(self) -> None:
        """Take requests again. Raises ApiError 409: the gateway shuts down."""
        self.lifecycle.reopen()
        if self._batcher is not None:
            self._batcher.reopen()

    def begin_drain(self) -> None:
        """The process ends: take nothing new, for good; a partial batch is dispatched."""
        self.lifecycle.end()
        self._close_queue()

    def _close_queue(self) -> None:
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
        """The gateway ends: every request without an answer fails now."""
        self.lifecycle.end()
        self.supervisor.refuse(message)
        if self._batcher is not None:
            self._batcher.fail_all("shutting_down", message)

    def flush(self) -> None:
        """What is known is in the run file, unless the disk is full or hangs."""
        if self._recorder is not None:
            self._recorder.flush()

    @property
    def lost_records(self) -> int:
        """Records that could not be written to the run file; all of them once it has stopped."""
        return 0 if self._recorder is None else self._recorder.lost

    def reload(self, settings: Settings) -> None:
        """Other settings, which differ only in what can change while the gateway serves. Raises
        what `LimitsInForce.change` raises, and changes nothing then.
        """
        if settings.patience != self.settings.patience:
            endless = settings.patience == math.inf
            self.limits.change_patience(None if endless else settings.patience)
        self.settings = settings
        self.overload.change(settings.overload)

    # what becomes of the engine

    def _on_down(self, message: str) -> None:
        _end_what_used_it(self, message)
        if self._batcher is not None:
            guilty = self._batcher.recovery.interrupt(
                message, self.settings.supervision.max_interruptions
            )
            if guilty is not None:
                _blame(self, guilty)

    def _on_up(self, capabilities: Capabilities) -> None:
        if self._batcher is not None:
            self.lifecycle.came_up()
            # what waited meanwhile waited for the restart, what was in service was served by two
            # engines
            self.limits.begin_epoch()
            self._batcher.recovery.resume(capabilities)
        if self.on_restarted is not None:
            self.on_restarted()

    def _on_servers(self, serving: frozenset[int]) -> None:
        """Other servers behind take work: with another number of them statistics begin anew."""
        before, self._serving = self._serving, serving
        if self._batcher is not None and self.proxying is not None and serving != before:
            if before - serving:
                _end_what_used_it(self, "other servers serve now")
            self._batcher.capabilities = self.proxying.capabilities()
            self._batcher.use_only(serving, ask=False)
            self.limits.begin_epoch()

    def _on_room(self, server_id: int, room: int | None) -> None:
        """A server behind is on trial, or off it."""
        before, self._rooms[server_id] = self._rooms.get(server_id), room
        if self._batcher is not None and room != before:
            self._batcher.trust(server_id, room)

    def _on_given_up(self, message: str) -> None:
        self.lifecycle.fail(message)
        self.latency.stop_calibration(
            ApiError(503, "engine_unavailable", f"calibration: the engine is gone: {message}")
        )
        if self._batcher is not None:
            self._batcher.fail_all("engine_unavailable", "the engine is gone")
        if self.on_given_up is not None:
            self.on_given_up(message)

    # what is there

    @property
    def dispatch_paused(self) -> bool:
        """Whether the queue waits for something else than service: a calibration, the trial of
        requests that may kill engines, a proof.
        """
        return self.latency.calibrating or (
            self._batcher is not None and self._batcher.recovery.trials.pauses_dispatch
        )

    @property
    def context(self) -> int | None:
        """Of the model, tokens; None before the engine is up."""
        return None if self._batcher is None else self._batcher.capabilities.max_model_len

    @property
    def batcher(self) -> Batcher:
        """The queue. Raises ApiError 503 before the engine is up."""
        if self._batcher is None:
            raise not_started()
        return self._batcher

    def live_model(self) -> LiveModel:
        """What the gateway knows of itself. Raises ApiError 503 before the engine is up."""
        if self.live is None:
            raise not_started()
        return self.live

    def admit(self) -> Batcher:
        """The queue, if it takes requests now."""
        if self.lifecycle.lost is not None:
            raise ApiError(
                503,
                "engine_unavailable",
                "the engine has failed for good; restart the gateway",
                retry_after=10,
            )
        if self.lifecycle.draining:
            raise ApiError(
                503, "shutting_down", "the gateway takes no new requests", retry_after=10
            )
        return self.batcher


def _recorder(gateway: Gateway, path: Path, capabilities: Capabilities) -> Recorder:
    settings = gateway.settings
    configuration = describe_engine(capabilities, settings.served_model_name)
    header = Header(
        writer="gateway",
        configuration=configuration | {"policy": settings.policy},
        versions=dict(capabilities.versions),
        hardware=dict(capabilities.hardware),
    )
    return Recorder(path, header, gateway.metrics.dropped_records.inc)


def restarts_of(gateway: Gateway) -> int:
    """Of a lost engine, or of all replicas."""
    servers = gateway.servers
    return gateway.supervisor.restarts if servers is None else servers.restarts


def _limits_of(settings: Settings, metrics: Metrics) -> LimitsInForce:
    reserved = settings.reserved_tokens
    given = settings.policy, settings.max_output_tokens, settings.patience
    return LimitsInForce(*given, metrics, reserved_tokens=reserved)


def _servers_of(gateway: Gateway) -> Servers | None:
    if not isinstance(gateway.engine, Replicas):
        return None
    return Servers(
        gateway.engine,
        most_interruptions=gateway.settings.supervision.max_interruptions,
        on_loss=partial(_end_what_used_it, gateway),
        blame=partial(_blame, gateway),
        on_forgiven=gateway.supervisor.forgive,
        begin_epoch=gateway.limits.begin_epoch,
    )


def _end_what_used_it(gateway: Gateway, message: str) -> None:
    """An engine was lost, the one or one of several."""
    if gateway.serving_objects is not None:
        gateway.serving_objects.close()
    gateway.latency.stop_calibration(
        ApiError(503, "engine_unavailable", f"calibration: the engine failed: {message}")
    )


def _blame(gateway: Gateway, guilty: SequenceState) -> None:
    """It is certain to have killed engines."""
    gateway.rejected_prompts.add(guilty.engine_request)
    _fail_same_prompt(gateway.batcher, guilty.engine_request)


def _fail_same_prompt(batcher: Batcher, engine_request: EngineRequest) -> None:
    """It kills engines: what its caller has sent of the same prompt already fails with it."""
    for sequence in list(batcher.unanswered_sequences()):
        same = (
            sequence.engine_request.caller == engine_request.caller
            and sequence.engine_request.prompt_token_ids == engine_request.prompt_token_ids
        )
        if same and sequence.stop_detector.finish_reason is None:
            batcher.fail(
                sequence,
                "failed",
                poison.CODE,
                "another request with this prompt killed the engine; do not send it again",
            )


def _add_gauges(gateway: Gateway, batcher: Batcher) -> None:
    metrics, supervisor = gateway.metrics, gateway.supervisor
    metrics.failures_of(batcher.failures)
    metrics.gauge_of("queue_length", "Sequences waiting in the queue", lambda: batcher.queue_length)
    metrics.gauge_of(
        "max_clipped_fraction",
        ("Largest fraction of answers that the autopilot may clip (--max-clipped-fraction)"),
        lambda: gateway.settings.max_clipped_fraction,
    )
    metrics.gauge_of("in_service", "Sequences in service", lambda: batcher.in_service)
    metrics.gauge_of(
        "requests_in_system",
        (
            "Requests that arrived and are not yet counted by outcome: "
            "kendall_requests_received_total minus the sum of "
            "kendall_requests_total"
        ),
        lambda: batcher.unrecorded,
    )
    metrics.gauge_of(
        "engine_up",
        ("Whether the engine serves (1: yes, 0: it is restarting or has failed for good)"),
        lambda: supervisor.serving,
    )
    metrics.gauge_of(
        "engine_restarts",
        "Restarts of a failed engine since the gateway started",
        lambda: restarts_of(gateway),
    )
