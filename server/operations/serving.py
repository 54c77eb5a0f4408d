"""Running a gateway: choosing the engine, binding the port, serving until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kendall.policies import SpecError, parse_policy
from kendall.policies.ordered import check_continued
from kendall.policies.text import counted
from kendall.queueing.errors import CommandError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law, poor_fit_of
from kendall.queueing.measurement.machine import split_cpus
from kendall.queueing.measurement.paths import check_writable
from kendall.server.engines.base import Engine, EngineStartError
from kendall.server.engines.folder import EXPECTED
from kendall.server.engines.hugging_face import check_model, folder_of
from kendall.server.gateway import Gateway
from kendall.server.http.app import create_app
from kendall.server.http.bounds import LimitedProtocol
from kendall.server.http.connection import protocol_with
from kendall.server.http.descriptors import Room, raise_descriptor_limit
from kendall.server.live.state_file import before_its_place, check_state_file
from kendall.server.operations.reloading import Reloader, hangups
from kendall.server.operations.servers_behind import http_engine
from kendall.server.operations.shutdown import DrainLog, ExitBound, break_off, say_close, wind_down
from kendall.server.runtime.background import going_on
from kendall.server.runtime.garbage import give_back, settle
from kendall.server.security.admin_key import with_admin_key
from kendall.server.security.exposure import uvicorn_tls, warn_of
from kendall.server.settings import Settings
from kendall.server.supervision.replicas.pool import Replicas, ServingReplicas
from kendall.server.supervision.supervisor import EngineLostError
from kendall.server.wire.listener import ListeningServer
from kendall.server.wire.transport import stamps_arrivals

ENGINE_SEED = 0x6B656E64616C6C << 32  # "kendall"
log = logging.getLogger("kendall")
LAST_WORDS = 2.0  # seconds that answers which were given up have to leave, when the gateway stops
ENGINE_STOP = 60.0  # seconds that the engine and everything else may take to stop, then
NO_TOOLS = ("emulated", "ray")  # engines
LOOP_CLOSE = 20.0  # seconds that the event loop may take to close
# seconds of silence, seconds between questions, questions
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
OnReady = Callable[[Gateway], Any]
OnSignal = Callable[[int], Any]
ReadAgain = Callable[[], Settings]


def choose_engine(settings: Settings) -> tuple[Engine, LatencyModel | None]:
    """The engine that was asked for, and the law known for it. Must run in the main thread,
    before any socket exists.
    """
    if settings.engine != "http" and not settings.model.strip():
        raise SpecError(f"got an empty MODEL; {EXPECTED}")
    _prepare_tracing(settings.otlp_traces_endpoint)
    law = load_law(settings.latency) if settings.latency else None
    if settings.latency and (warning := poor_fit_of(settings.latency)) is not None:
        log.warning("%s", warning)
    name = _engine_name(settings)
    _check_parsers(settings, name)
    if name == "emulated":
        law = law or load_law("reference")
        log.warning(
            "the engine is EMULATED: its timing follows the latency law, its text is meaningless"
        )
        return _emulated(settings, law), law
    if name == "http":
        check_continued(parse_policy(settings.policy))
        return http_engine(settings), law
    if importlib.util.find_spec("vllm") is None:
        raise SpecError(
            f"got --engine {name}, but vLLM is not installed here; expected --engine emulated, or "
            "run `make setup` first"
        )
    return (_ray_engine if name == "ray" else _vllm_engine)(settings), law


def _engine_name(settings: Settings) -> str:
    """What `auto` means here. Raises SpecError for an option of another engine."""
    name: str = settings.engine
    if name == "auto":
        name = "vllm" if importlib.util.find_spec("vllm") else "emulated"
        if name == "emulated":
            log.warning("vLLM is not installed: using the emulated engine")
    if settings.ray_address is not None and name != "ray":
        raise SpecError(f"got --ray-address with --engine {name}; expected --engine ray")
    return name


def engine_seed(server_id: int) -> int:
    """Of an emulated engine: far from the seeds that clients choose, whose streams of random
    numbers would be its own.
    """
    return ENGINE_SEED + server_id


def _emulated(settings: Settings, law: LatencyModel) -> Engine:
    from kendall.server.engines.emulated import EmulatedEngine  # noqa: PLC0415

    bounds = {key: _whole(key, value) for key, value in settings.engine_args.items()}

    def make(server_id: int) -> Engine:
        return EmulatedEngine(law, seed=engine_seed(server_id), **bounds)

    first = make(0)  # a wrong argument is an error now
    if settings.replicas == 1:
        return first
    return Replicas(make, settings.replicas, settings.supervision)


def _prepare_tracing(endpoint: str | None) -> None:
    """Raises SpecError."""
    if endpoint is None:
        return
    try:
        from kendall.server.telemetry.tracing import check_endpoint, log_trace_ids  # noqa: PLC0415 - few trace
    except ImportError as error:
        raise SpecError(
            "got --otlp-traces-endpoint without OpenTelemetry's SDK; expected the packages "
            "opentelemetry-sdk and opentelemetry-exporter-otlp, which come with vLLM: install "
            f"them ({error})"
        ) from None
    check_endpoint(endpoint)
    log_trace_ids()


def _check_parsers(settings: Settings, engine: str) -> None:
    """Raises SpecError."""
    for name in ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser"):
        if engine in NO_TOOLS and getattr(settings, name):
            raise SpecError(
                f"got --{name.replace('_', '-')} with --engine {engine}, which has no tools; "
                "expected --engine vllm"
            )
    if settings.enable_auto_tool_choice and settings.tool_call_parser is None:
        raise SpecError(
            "got --enable-auto-tool-choice without --tool-call-parser; expected the parser of the "
            "model's tool calls, for example hermes"
        )


def _whole(key: str, value: Any) -> int:
    """An argument of the emulated engine; a switch is 0 or 1. Raises SpecError."""
    try:
        return int({"true": 1, "false": 0}.get(str(value).lower(), value))
    except (TypeError, ValueError):
        raise SpecError(
            f"got --engine-arg {key}={value}; expected a whole number, as the emulated engine's "
            "arguments are"
        ) from None


def _vllm_engine(settings: Settings) -> Engine:
    from kendall.server.engines.vllm.engine import VllmEngine, prepare  # noqa: PLC0415
    from kendall.server.engines.vllm.machine import Machine  # noqa: PLC0415
    from kendall.server.engines.vllm.options import check_names, on_cpu  # noqa: PLC0415

    check_names(settings.engine_args)
    check_model(settings.model, settings.engine_args)
    # where several engines compute, the kernel divides the CPUs
    gateway_cpus, engine_cpus = split_cpus() if settings.replicas == 1 else (set(), None)
    prepare(settings.model)
    if gateway_cpus:
        os.sched_setaffinity(0, gateway_cpus)
    model = folder_of(settings.model)
    form_time = settings.security.max_form_compile_time
    # EngineCore asks it where an answer's form begins
    reasoning = settings.reasoning_parser
    engine_args = settings.engine_args | ({"reasoning_parser": reasoning} if reasoning else {})
    make = partial(
        VllmEngine, model, engine_args=engine_args, cpus=engine_cpus, form_time=form_time
    )
    if settings.replicas == 1:
        return make()
    machine = Machine.here() if on_cpu() else None

    def make_one(server_id: int) -> Engine:
        """Those that begin share what is free before the first takes its part; later ones take
        what is left.
        """
        if server_id >= settings.replicas:
            return make(replica=server_id)
        return make(replica=server_id, machine=machine, engines=settings.replicas)

    return ServingReplicas(make_one, settings.replicas, settings.supervision)


def _ray_engine(settings: Settings) -> Engine:
    """Actors; what they import of Ray waits until one starts."""
    from kendall.server.engines.ray.actor import vllm_engine  # noqa: PLC0415
    from kendall.server.engines.ray.engine import RayEngine  # noqa: PLC0415
    from kendall.server.engines.ray.options import needs_of  # noqa: PLC0415
    from kendall.server.engines.vllm.options import check_names  # noqa: PLC0415

    if importlib.util.find_spec("ray") is None:
        raise SpecError(
            "got --engine ray, but Ray is not installed here; expected the extra kendall[ray]: "
            "run `make setup-ray`"
        )
    needs, engine_args = needs_of(settings.engine_args)
    check_names(engine_args)
    form_time = settings.security.max_form_compile_time
    make = partial(vllm_engine, settings.model, engine_args, form_time, settings.replicas)

    def actor(server_id: int) -> Engine:
        del server_id
        return RayEngine(make, needs=needs, address=settings.ray_address)

    if settings.replicas == 1:
        return actor(0)
    return Replicas(actor, settings.replicas, settings.supervision)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises CommandError where the address cannot be had."""
    try:
        sock = socket.create_server((host, port), backlog=2048, reuse_port=False)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CommandError(
            f"got --host {host} --port {port}; expected a free address ({reason}): stop the "
            "process that listens there, or use another port"
        ) from None
    stamps_arrivals(sock)
    _asks_after_silence(sock)
    return sock


def _asks_after_silence(sock: socket.socket) -> None:
    """Connections taken from it inherit this. Who closes a connection while its answer pauses might
    have closed one direction only, which is no end; a minute later its system answers the question
    with a reset.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class _Server(ListeningServer):
    """uvicorn, with a drain on the first signal, an end on the second, and the engine let go in
    every case.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        gateway: Gateway,
        exit_bound: ExitBound,
        on_signal: OnSignal | None = None,
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_signal = on_signal
        self._exit_bound = exit_bound
        self._signals = 0
        self._drain_log = DrainLog()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: /ready answers 503; after --shutdown-delay new requests are refused and
        those present are finished. Second: those left get an error and the server stops. Third:
        stop without waiting for that.

        uvicorn's own would raise the signal again at the end: status -15 for an orderly end, and
        nothing tidied up at exit.
        """
        del frame
        if self._on_signal is not None:
            self._on_signal(sig)
        self._signals += 1
        loop = asyncio.get_running_loop()
        if self._signals == 1:
            loop.call_soon_threadsafe(self._leave, sig)
        elif self._signals == 2:
            loop.call_soon_threadsafe(self._end, "the gateway is shutting down at once")
            self.should_exit = True
        else:
            self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Clients first. uvicorn leaves the application running when it is forced: not with an
        engine in it.
        """
        self._begin_drain()  # an end without a signal: the engine is lost
        say_close(self)
        await wind_down(self, sockets or [])
        self._drain_log.end(self._gateway)
        break_off(self)
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def _leave(self, sig: int) -> None:
        """Balancers are told first: until they have heard, requests come and are served."""
        settings = self._gateway.settings
        delay = settings.shutdown_delay if sig == signal.SIGTERM else 0.0
        self._gateway.lifecycle.leave()
        self._exit_bound.start(delay + settings.shutdown_timeout + 2 * LAST_WORDS + ENGINE_STOP)
        say_close(self)
        if delay > 0:
            log.info("SIGTERM: /ready answers 503; requests are accepted for %g s more", delay)
        asyncio.get_running_loop().call_later(delay, self._drain)

    def _begin_drain(self) -> None:
        self._drain_log.begin(self._gateway)
        self._gateway.begin_drain()

    def _drain(self) -> None:
        self._begin_drain()
        self.should_exit = True
        limit = self._gateway.settings.shutdown_timeout
        asyncio.get_running_loop().call_later(
            limit,
            self._end,
            f"the gateway is shutting down and this request did not finish within {limit:g} s",
        )

    def _end(self, message: str) -> None:
        self._drain_log.begin(self._gateway)
        self._drain_log.cut(self._gateway)
        self._gateway.abandon(message)
        asyncio.get_running_loop().call_later(LAST_WORDS, setattr, self, "force_exit", True)


def serve(
    settings: Settings,
    *,
    on_ready: OnReady | None = None,
    on_signal: OnSignal | None = None,
    read_again: ReadAgain | None = None,
) -> int:
    """Serve until stopped; returns the exit status. `on_ready` is called on the loop once the
    engine serves, `on_signal` per signal.

    With `read_again`, SIGHUP never ends the process: it takes up what that returns.
    """
    if settings.record_file is not None:
        check_writable(settings.record_file, "--record-file")
    if settings.state_file is not None:
        _check_two_files(settings.record_file, settings.state_file)
        check_writable(settings.state_file, "--state-file", before_its_place(settings.state_file))
        check_state_file(settings.state_file)
    return _run(settings, _Hooks(on_ready, on_signal, read_again))


def _check_two_files(record_file: Path | None, state_file: Path) -> None:
    """Raises SpecError where they are one."""
    if record_file is not None and record_file.resolve() == state_file.resolve():
        raise SpecError(
            f"got --record-file {record_file} and --state-file {state_file}, which are one file; "
            "expected two: each would replace the other"
        )


@dataclass(frozen=True, slots=True)
class _Hooks:
    on_ready: OnReady | None
    on_signal: OnSignal | None
    read_again: ReadAgain | None
    exit_bound: ExitBound = field(default_factory=ExitBound)


def _run(settings: Settings, hooks: _Hooks) -> int:
    raise_descriptor_limit()
    sock = bind(settings.host, settings.port)
    port = sock.getsockname()[1]  # that asked for may be 0, any
    warn_of(settings.host, settings.security)
    scheme = "http" if settings.security.tls.certfile is None else "https"
    try:
        engine, law = choose_engine(settings)
    except BaseException:
        sock.close()
        raise
    log.info(
        "listening on %s://%s:%d; the engine starts (/ready answers 200 when it serves)",
        scheme,
        settings.host,
        port,
    )
    try:
        with (
            sock,
            with_admin_key(settings.security, port) as security,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            settled = dataclasses.replace(settings, security=security, port=port)
            gateway, failures = runner.run(
                _serve(lambda: Gateway(settled, engine, law), sock, hooks)
            )
            hooks.exit_bound.start(LOOP_CLOSE)  # threads that wait for a disk
    finally:
        hooks.exit_bound.cancel()
    if failures:
        if isinstance(failures[0], EngineStartError):
            raise SpecError(str(failures[0])) from failures[0]
        raise failures[0]
    if lost := gateway.lost_records:
        log.error(
            "exit status 1: %s could not be written to %s; free or replace its disk",
            counted(lost, "record"),
            settings.record_file,
        )
        return 1
    return 0


async def _serve(
    make: Callable[[], Gateway], sock: socket.socket, hooks: _Hooks
) -> tuple[Gateway, list[BaseException]]:
    gateway = make()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    gateway.on_given_up = lambda reason: failed(
        EngineLostError(f"the engine failed and could not be restarted: {reason}")
    )
    # the engine that was let go took everything out of what is set aside
    gateway.on_restarted = settle

    def ready(gateway: Gateway) -> None:
        settle()
        if hooks.on_ready is not None:
            hooks.on_ready(gateway)

    app = create_app(gateway, failed, ready)
    room = Room(gateway.metrics.registry, gateway.settings.security.max_connections_per_address)
    config = _configuration(app, gateway.settings, room)
    server = _Server(config, gateway, hooks.exit_bound, hooks.on_signal)

    def quiet() -> bool:
        return not (gateway.lifecycle.started and gateway.batcher.unanswered)

    giving_back = asyncio.create_task(
        going_on("giving memory back", lambda: give_back(quiet)), name="memory"
    )
    try:
        with _reloading(gateway, app, config, hooks.read_again):
            await server.serve(sockets=[sock])
    finally:
        giving_back.cancel()
        await asyncio.gather(giving_back, return_exceptions=True)
    return gateway, failures


def _configuration(app: FastAPI, settings: Settings, room: Room) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # its loggers go where ours go
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nothing here asks for the client's address
        http=protocol_with(LimitedProtocol, settings.supervision.slow_reader_timeout, room),
        ws="none",
        timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout + 2 * LAST_WORDS),
        timeout_keep_alive=75,
        server_header=False,
        **uvicorn_tls(settings.security.tls),
    )


def _reloading(
    gateway: Gateway, app: FastAPI, config: uvicorn.Config, read_again: ReadAgain | None
) -> contextlib.AbstractContextManager[None]:
    if read_again is None:
        return contextlib.nullcontext()
    return hangups(Reloader(gateway, app, read_again, lambda: config.ssl).ask)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415

    return uvloop.new_event_loop  # type: ignore[no-any-return]
