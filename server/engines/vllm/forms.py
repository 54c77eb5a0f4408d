"""Compiles the forms of answers (JSON schemas, grammars, expressions) before their requests queue.
The gateway imports no vLLM by it.

A client's form may take minutes to compile, or crash the compiler. Compiled first by the engine it
would hold up or end everybody's service; so it is compiled first in a process of its own, with
vLLM's own code, under a time limit, and that process is killed where the limit is met or the client
leaves. The engine then compiles what is known to compile.

There are two such processes, and callers take turns: one caller never has both, a form that was
compiled before waits for none, and the seconds that a caller's forms take are budgeted.
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

from kendall.server.engines.base import (
    CALLER,
    BusyError,
    InvalidSamplingError,
    OverBudgetError,
    Sampling,
    Structured,
)
from kendall.server.engines.vllm.reader import first_line
from kendall.server.runtime.pools import in_daemon
from kendall.server.runtime.turns import Turns

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

log = logging.getLogger("kendall")
READY = "ready"
THREADS = "vllm-forms"  # their name
START_TIMEOUT = 60.0  # seconds until the process can compile: it loads the tokenizer
MOST_WAITING = 64  # forms of one caller that wait for those before them
PROCESSES = 2
BURST = 20.0  # seconds of compiling that a caller has at once
SHARE = 0.25  # seconds of compiling that it gains a second
MOST_CALLERS = 4096  # with less than their burst; the one that compiled longest ago is forgotten
MOST_KNOWN, KNOWN_BYTES = 4096, 16 << 20  # forms that were compiled
MOST_REMEMBERED = 1024  # forms that are refused without another try
REMEMBERED_FOR = 600.0  # seconds: the machine may only have been busy
NICE = 5  # of the process: requests in service come first


@dataclass(frozen=True, slots=True)
class RefusedForm:
    """A form that cannot be compiled."""

    message: str
    parameter: str | None = None


class FormCompiler:
    """At most `PROCESSES` processes, each started when a form needs it, that compile one form at a
    time. `work` runs in them, with `configuration`. A caller is who is named in `CALLER`.
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
        self._turns = Turns(PROCESSES)
        self._budgets = CompileBudgets()
        self._idle: list[asyncio.Future[_Worker]] = []  # or starting, for whoever comes next
        self._busy: set[asyncio.Future[_Worker]] = set()
        self._known = CompiledForms()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when
        self._closed = False

    def known(self, structured: Structured) -> Any:
        """The form as the engine takes it, where it was compiled before; else None."""
        return self._known.get(_digest(structured)[0])

    async def prepare(self, sampling: Sampling) -> Any:
        """The form as the engine takes it. Raises InvalidSamplingError: it is wrong, or too
        slow; BusyError: too many wait; OverBudgetError: its caller's forms took too long.
        """
        assert sampling.structured is not None
        key, size = _digest(sampling.structured)
        message, until = self._refused.get(key, ("", 0.0))
        now = asyncio.get_running_loop().time
        if now() < until:
            raise InvalidSamplingError(message)
        caller = CALLER.get()
        self._budgets.check(caller, now())
        if self._turns.waiting_of(caller) >= MOST_WAITING:
            raise BusyError(
                f"{self._turns.waiting_of(caller)} structured-output definitions wait to be "
                "compiled; retry later"
            )
        await self._turns.take(caller)
        try:
            self._budgets.check(caller, now())  # those that it waited for were its own
            answer = await self._ask(sampling, key, caller)
        finally:
            self._turns.give(caller)
        if isinstance(answer, RefusedForm):
            raise InvalidSamplingError(answer.message, answer.parameter)
        self._known.add(key, size, answer)
        return answer

    def close(self) -> None:
        """End the processes, or let them end as soon as they have started."""
        self._closed = True
        workers = [*self._idle, *self._busy]
        self._idle = []
        for worker in workers:
            if worker.done():
                _kill(worker)
            else:
                worker.add_done_callback(_kill)

    async def _ask(self, sampling: Sampling, key: bytes, caller: str) -> Any:
        starting = self._worker()
        self._busy.add(starting)
        keeps = False
        try:
            try:
                worker = await asyncio.shield(starting)
            except asyncio.CancelledError:
                keeps = not starting.cancelled()
                raise  # whoever comes next waits for the same start
            now = asyncio.get_running_loop().time
            began = now()
            try:
                answer = await in_daemon(lambda: worker.ask(sampling, self._limit), THREADS)
            except BaseException as error:  # met its limit, crashed, or the client left
                worker.kill()
                if (said := self._why(error)) is not None:
                    raise self._remember(key, said) from None
                raise
            finally:
                self._budgets.spend(caller, now() - began, now())
            keeps = True
            return answer
        finally:
            self._busy.discard(starting)
            if keeps and not self._closed:
                self._idle.append(starting)

    def _why(self, error: BaseException) -> str | None:
        """What the form did to its compiler; None where that was not its fault."""
        if isinstance(error, TimeoutError):
            return (
                f"got a structured-output definition that takes more than {self._limit:g} s "
                "to compile (--max-form-compile-time); expected a simpler one"
            )
        if not isinstance(error, EOFError | OSError):
            return None
        if self._closed:
            raise RuntimeError("the engine is not running") from None
        return "got a structured-output definition that crashes its compiler; expected another one"

    def _worker(self) -> asyncio.Future[_Worker]:
        while self._idle:
            worker = self._idle.pop()
            if not _has_ended(worker):
                return worker
        return in_daemon(lambda: _start(self._work, self._configuration), THREADS)

    def _remember(self, key: bytes, message: str) -> InvalidSamplingError:
        log.warning("%s", message)
        self._refused[key] = (message, asyncio.get_running_loop().time() + REMEMBERED_FOR)
        if len(self._refused) > MOST_REMEMBERED:
            self._refused.popitem(last=False)
        return InvalidSamplingError(message)


class CompileBudgets:
    """Seconds of compiling that callers have left."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # at which instant

    def check(self, caller: str, now: float) -> None:
        """Raises OverBudgetError."""
        left = self._at(caller, now)
        if left <= 0:
            raise OverBudgetError(
                f"this caller's structured-output definitions took more than {BURST:g} s to "
                "compile; send those that were compiled before, or retry later",
                retry_after=(1.0 - left) / SHARE,
            )

    def spend(self, caller: str, seconds: float, now: float) -> None:
        """So long one was compiled."""
        self._left[caller] = self._at(caller, now) - seconds, now
        self._left.move_to_end(caller)
        if len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)

    def _at(self, caller: str, now: float) -> float:
        left, at = self._left.get(caller, (BURST, now))
        return min(BURST, left + SHARE * (now - at))


class CompiledForms:
    """Forms that were compiled, those that were asked for last."""

    def __init__(self) -> None:
        self._forms: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> Any:
        """None where it is not known."""
        if key not in self._forms:
            return None
        self._forms.move_to_end(key)
        return self._forms[key][1]

    def add(self, key: bytes, size: int, form: Any) -> None:
        """The oldest ones leave for it."""
        if key not in self._forms:
            self._forms[key] = size, form
            self._bytes += size
        while len(self._forms) > MOST_KNOWN or self._bytes > KNOWN_BYTES:
            self._bytes -= self._forms.popitem(last=False)[1][0]


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
        """The worker's next message."""
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
    if not worker.done():
        return False
    return worker.cancelled() or worker.exception() is not None or not worker.result().alive


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


def _digest(structured: Structured) -> tuple[bytes, int]:
    """And the size of what it is of."""
    text = json.dumps([structured.kind, structured.value, dict(structured.options)]).encode()
    return hashlib.sha256(text).digest(), len(text)


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
        from kendall.server.engines.vllm.core import CLIENT_ERRORS, checked  # noqa: PLC0415 - in a process of its own

        try:
            params = checked(self._configuration, self._tokenizer, sampling)
            self._compile(params)
        except CLIENT_ERRORS as error:
            return RefusedForm(first_line(error), getattr(error, "parameter", None))
        except Exception as error:  # noqa: BLE001 - compilers raise whatever they like
            return RefusedForm(
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
