"""Compiles the forms of answers (JSON schemas, grammars, expressions) before their requests queue.
The gateway imports no vLLM by it.

A client's form may take minutes to compile, or crash the compiler. Compiled first by the engine it
would hold up or end everybody's service; so it is compiled first in a process of its own, with
vLLM's own code, under a time limit, and that process is killed where the limit is met or the client
leaves. The engine then compiles what is known to compile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing as mp
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from server.engines.base import BusyError, InvalidSamplingError, Sampling, Structured
from server.engines.vllm.reader import first_line
from server.runtime.pools import in_daemon

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

log = logging.getLogger("kendall")
READY = "ready"
THREADS = "vllm-forms"  # their name
START_TIMEOUT = 60.0  # seconds until the process can compile: it loads the tokenizer
MOST_WAITING = 64  # forms that wait for the one before them
MOST_REMEMBERED = 1024  # forms that are refused without another try
REMEMBERED_FOR = 600.0  # seconds: the machine may only have been busy
NICE = 5  # of the process: requests in service come first


@dataclass(frozen=True, slots=True)
class Refused:
    """A form that cannot be compiled."""

    message: str
    parameter: str | None = None


class FormCompiler:
    """One process, started for the first form, that compiles one form at a time. `work` runs in
    it, with `configuration`.
    """

    def __init__(
        self,
        configuration: Any,
        limit: float,
        work: Callable[[Connection, Any, Iterable[int]], None] | None = None,
    ) -> None:
        self._configuration = configuration
        self._limit = limit
        self._work = work or compile_forms
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._worker: asyncio.Future[_Worker] | None = None
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when
        self._closed = False

    async def prepare(self, sampling: Sampling) -> Any:
        """The form as the engine takes it. Raises InvalidSamplingError: it is wrong, or too
        slow; BusyError: too many wait.
        """
        assert sampling.structured is not None
        key = _digest(sampling.structured)
        message, until = self._refused.get(key, ("", 0.0))
        if asyncio.get_running_loop().time() < until:
            raise InvalidSamplingError(message)
        if self._waiting >= MOST_WAITING:
            raise BusyError(
                f"{self._waiting} structured-output definitions wait to be compiled; retry later"
            )
        self._waiting += 1
        try:
            async with self._turn:
                answer = await self._ask(sampling, key)
        finally:
            self._waiting -= 1
        if isinstance(answer, Refused):
            raise InvalidSamplingError(answer.message, answer.parameter)
        return answer

    def close(self) -> None:
        """End the process, or let it end as soon as it has started."""
        self._closed = True
        worker, self._worker = self._worker, None
        if worker is not None:
            if worker.done():
                _kill(worker)
            else:
                worker.add_done_callback(_kill)

    async def _ask(self, sampling: Sampling, key: bytes) -> Any:
        worker = await self._started()
        try:
            return await in_daemon(lambda: worker.ask(sampling, self._limit), THREADS)
        except TimeoutError:
            self._end(worker)
            raise self._remember(
                key,
                (
                    f"got a structured-output definition that takes more than {self._limit:g} s "
                    "to compile (--max-form-compile-time); expected a simpler one"
                ),
            ) from None
        except (EOFError, OSError):
            self._end(worker)
            if self._closed:
                raise RuntimeError("the engine is not running") from None
            raise self._remember(
                key,
                (
                    "got a structured-output definition that crashes its compiler; expected "
                    "another one"
                ),
            ) from None
        except asyncio.CancelledError:  # the client left
            self._end(worker)
            raise

    async def _started(self) -> _Worker:
        if self._worker is None or _has_ended(self._worker):
            self._worker = in_daemon(lambda: _start(self._work, self._configuration), THREADS)
        starting = self._worker
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            raise  # whoever comes next waits for the same start
        except Exception:
            if self._worker is starting:
                self._worker = None
            raise

    def _end(self, worker: _Worker) -> None:
        self._worker = None
        worker.kill()

    def _remember(self, key: bytes, message: str) -> InvalidSamplingError:
        log.warning("%s", message)
        self._refused[key] = (message, asyncio.get_running_loop().time() + REMEMBERED_FOR)
        if len(self._refused) > MOST_REMEMBERED:
            self._refused.popitem(last=False)
        return InvalidSamplingError(message)


class _Worker:
    """The process and the way to it; `ask` and `answer` block."""

    def __init__(self, process: ForkServerProcess, channel: Connection) -> None:
        self._process = process
        self._channel = channel

    def ask(self, question: Any, limit: float) -> Any:
        """Its answer. Raises TimeoutError, or EOFError or OSError where it has ended."""
        self._channel.send(question)
        return self.answer(limit)

    def answer(self, limit: float) -> Any:
        """What it says next."""
        if not self._channel.poll(limit):
            raise TimeoutError
        return self._channel.recv()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """No error if it is gone."""
        self._process.kill()


def _kill(worker: asyncio.Future[_Worker]) -> None:
    if not worker.cancelled() and worker.exception() is None:
        worker.result().kill()


def _has_ended(worker: asyncio.Future[_Worker]) -> bool:
    return (
        worker.done()
        and not worker.cancelled()
        and worker.exception() is None
        and not worker.result().alive
    )


def _start(work: Callable[[Connection, Any, Iterable[int]], None], configuration: Any) -> _Worker:
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    process = context.Process(
        target=work, args=(there, configuration, cpus), name="kendall-forms", daemon=True
    )
    process.start()
    there.close()
    worker = _Worker(process, here)
    try:
        worker.answer(START_TIMEOUT)
    except (TimeoutError, EOFError, OSError) as error:
        worker.kill()
        raise RuntimeError(
            f"the compiler of structured-output definitions did not start: {type(error).__name__}"
        ) from error
    return worker


def _digest(structured: Structured) -> bytes:
    return hashlib.sha256(
        json.dumps([structured.kind, structured.value, dict(structured.options)]).encode()
    ).digest()


def compile_forms(channel: Connection, configuration: Any, cpus: Iterable[int]) -> None:
    """What the process does until its channel is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a whole process group: the gateway ends it
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with contextlib.suppress(OSError):  # where memory runs out, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if cpus:
        os.sched_setaffinity(0, cpus)  # the gateway's: not the engine's
    # vLLM's own limit leaves a thread behind that compiles on
    os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"
    forms = _Forms(configuration)
    channel.send(READY)
    while True:
        try:
            sampling = channel.recv()
        except EOFError:
            return
        channel.send(forms.compiled(sampling))


class _Forms:
    """vLLM's own checks and compilers, as its engine uses them."""

    def __init__(self, configuration: Any) -> None:
        logging.getLogger("vllm").setLevel(
            logging.CRITICAL
        )  # it logs each form that fails, in full
        self._configuration = configuration
        self._managers: dict[str, Any] = {}  # each serves the backend of its first form alone
        self._tokenizer = self._manager("xgrammar").tokenizer
        self.compiled(
            Sampling(max_tokens=1, structured=Structured("json_object", True))
        )  # the first one is slow

    def compiled(self, sampling: Sampling) -> Any:
        """The checked form, or why it is refused."""
        from server.engines.vllm.core import CLIENT_ERRORS, checked  # noqa: PLC0415 - in a process of its own

        try:
            params = checked(self._configuration, self._tokenizer, sampling)
            self._compile(params)
        except CLIENT_ERRORS as error:
            return Refused(first_line(error), getattr(error, "parameter", None))
        except Exception as error:  # noqa: BLE001 - compilers raise whatever they like
            return Refused(
                f"got a structured-output definition that cannot be compiled: {first_line(error)}"
            )
        form = params.structured_outputs
        if form.json is not None and not isinstance(form.json, str):
            form.json = json.dumps(form.json)  # vLLM copies it deeply for each request
        return form

    def _compile(self, params: Any) -> None:
        from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: PLC0415 - as above

        asked = StructuredOutputRequest.from_sampling_params(params)
        request = SimpleNamespace(
            request_id="form", sampling_params=params, structured_output_request=asked
        )
        manager = self._manager(params.structured_outputs._backend)
        manager.grammar_init(request)
        while asked.grammar is None:  # compiled by a thread of the manager's
            time.sleep(0.001)
        if isinstance(asked.grammar, Exception):
            raise asked.grammar
        if (
            params.structured_outputs._backend == "xgrammar"
        ):  # others allocate pinned memory: a device's
            allowed = manager.backend.allocate_token_bitmask(1)
            asked.grammar.fill_bitmask(allowed, 0)
            if not allowed.any():  # {"$ref": "#"}: the engine would fail at the first token
                raise ValueError("no answer can satisfy it")

    def _manager(self, backend: str) -> Any:
        from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - as above

        if backend not in self._managers:
            self._managers[backend] = StructuredOutputManager(self._configuration)
        return self._managers[backend]
