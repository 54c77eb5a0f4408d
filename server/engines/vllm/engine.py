"""vLLM behind the `Engine` protocol: one EngineCore process, restartable.

Importing this module is cheap: vLLM (6 s) is imported by `start`, in a thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kendall.server.engines.base import (
    NOT_RUNNING,
    Capabilities,
    EngineRequest,
    EngineStartError,
    InvalidPromptError,
    InvalidSamplingError,
    PromptTooLongError,
    Sampling,
    Step,
    TokenStream,
    stillborn,
)
from kendall.server.engines.vllm.boot import STOPS, Boot, Forks
from kendall.server.engines.vllm.forms import FormCompiler
from kendall.server.engines.vllm.machine import Machine
from kendall.server.engines.vllm.options import check_model, engine_arguments, on_cpu
from kendall.server.engines.vllm.process import CpuSplit, engine_error, parse_cpus, prepare
from kendall.server.engines.vllm.reader import Reader, first_line
from kendall.server.engines.vllm.submit import Cancel, Start, Submitter, stop_after
from kendall.server.engines.vllm.watch import IDLE_PING_EVERY, PING_EVERY, EngineWatch, Patience
from kendall.server.runtime.garbage import collect_everything
from kendall.server.runtime.logs import route
from kendall.server.runtime.pools import in_a_thread
from kendall.server.runtime.wording import brief

if TYPE_CHECKING:
    from kendall.server.engines.vllm.core import Core

__all__ = ["VllmEngine", "prepare"]

HANG_TIMEOUT = 5.0  # seconds without an answer from an engine that decodes on the CPU
COMPILING_HANG_TIMEOUT = 30.0  # elsewhere: kernels are compiled when they are first needed
# seconds more for each prompt token that is still to be computed: a large model on a CPU
SLOWEST_PROMPT_TOKEN = 0.02
MOST_FAILURES = 8  # requests in a row that fail on their way into vLLM: it is the way, then
MOST_SAID = 300  # characters of the line that says why vLLM did not start
THE_REST = " (the rest is in the log above)"
FORM_TIME = 5.0  # seconds that a form may take to compile
TOO_LONG = frozenset(
    {"input_text", "input_tokens"}
)  # what vLLM's error about a prompt beyond the context names
ANSWER_TIMEOUT = 1.0  # seconds for a health check
# seconds for vLLM's own end, which takes 0.1; then its processes are killed all the same
STOP_TIMEOUT = 7.0
# in this process, all forked by one fork server
_STARTED: weakref.WeakSet[VllmEngine] = weakref.WeakSet()
log = logging.getLogger("kendall.engine")


class VllmEngine:
    """One vLLM engine. `engine_args` are vLLM's own, text values allowed; `cpus`
    (KENDALL_ENGINE_CPUS) is where it computes.

    Call `prepare()` first thing in the main thread; otherwise `start` does, later and slower.
    """

    def __init__(
        self,
        model: str,
        *,
        engine_args: Mapping[str, Any] | None = None,
        cpus: str | None = None,
        hang_timeout: float | None = None,
        form_time: float = FORM_TIME,
        replica: int | None = None,
        machine: Machine | None = None,
        engines: int = 1,
    ) -> None:
        self.on_step: Callable[[Step], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self._model = model
        self._engine_args = dict(engine_args or {})
        self._cpus = cpus if cpus is not None else os.environ.get("KENDALL_ENGINE_CPUS") or None
        self._hang_timeout = hang_timeout or (HANG_TIMEOUT if on_cpu() else COMPILING_HANG_TIMEOUT)
        self._form_time = form_time
        self._replica = replica  # its number where there are several
        # of a CPU engine: as it is when the engine starts, unless given; `engines` share it
        self._machine, self._engines = machine, engines
        self._forms: FormCompiler | None = None
        self._failures = 0  # in a row, of the way in
        self._warned = bool(replica)  # of a model without a chat template: once for all replicas
        self._readers: dict[str, Reader] = {}
        self._core: Core | None = None
        self._capabilities: Capabilities | None = None
        self._booting: Boot[Core] | None = None
        self._submitter: Submitter | None = None
        self._watch: EngineWatch | None = None
        self._cpu_split = CpuSplit()

    # ---- life ----

    async def start(self) -> Capabilities:
        """See `Engine`. After a death it starts anew. Cancelled, it ends what it has begun,
        which takes a bounded time.
        """
        await self.stop()
        try:
            cpus = parse_cpus(self._cpus) if self._cpus else None
            core = await self._come_up()
        except EngineStartError:
            raise
        except Exception as error:
            await self.stop()
            raise EngineStartError(start_message(error)) from error
        except BaseException:
            await self.stop()
            raise
        self._capabilities = core.capabilities()
        self._forms = FormCompiler(core.config, self._form_time)
        self._submitter = Submitter(core, self._begin, self._lost)
        self._watch = EngineWatch(
            core.pid, core.ping, self._patience, self._lost, exit_code=core.exit_code
        )
        if cpus:
            self._cpu_split.make(core.pid, cpus)
        return self._capabilities

    async def _come_up(self) -> Core:
        loop = asyncio.get_running_loop()
        _STARTED.add(self)
        self._booting = Boot(
            lambda forks: self._boot(loop, forks), functools.partial(_is_alone, self)
        )
        core = self._core = await self._booting.core()
        self._booting = None
        await core.warm()
        if not self._warned:
            self._warned = await warn_without_template(core)
        return core

    def _boot(self, loop: asyncio.AbstractEventLoop, forks: Forks) -> Core:
        check_model(self._model, self._engine_args)
        machine = self._machine or (Machine.here() if on_cpu() else None)
        arguments = engine_arguments(self._model, self._engine_args, machine, self._engines)
        prepare(self._model)
        engine_error()  # forget an older one
        from kendall.server.engines.vllm import core as vllm_core  # noqa: PLC0415  # six seconds, in this thread

        route("vllm")

        def on_step(running: int, admitted: int, prompt_tokens: int) -> None:
            if self.on_step is not None:
                self.on_step(Step(loop.time(), running, admitted, prompt_tokens))

        return vllm_core.boot(
            arguments,
            on_step,
            forks,
            self._replica,
        )

    async def stop(self) -> None:
        """See `Engine`. Takes a bounded time, whatever the engine's processes do."""
        booting, self._booting = self._booting, None
        if booting is not None:  # a start that was cancelled half-way: its process must not stay
            self._core = await booting.give_up()
        core = await self._let_go()
        readers, self._readers = self._readers, {}
        _fail_all(readers, "the engine was stopped")
        if core is not None:
            await _shut_down(core)
            del core
            # AsyncLLM stands in reference cycles, and its __del__ fails in an interpreter that is
            # shutting down
            await _in_time(collect_everything, "the memory of the last engine was not collected")
        self._cpu_split.undo()
        _STARTED.discard(self)

    async def _let_go(self) -> Core | None:
        core, self._core = self._core, None
        submitter, self._submitter = self._submitter, None
        watch, self._watch = self._watch, None
        forms, self._forms = self._forms, None
        if watch is not None:
            watch.close()
        if forms is not None:
            forms.close()
        if submitter is not None:
            await submitter.close()
        return core

    @property
    def process_id(self) -> int:
        """The EngineCore process, for operators and tests."""
        return self._running_core().pid

    async def healthy(self) -> bool:
        """See `Engine`."""
        return (
            self._core is not None
            and self._watch is not None
            and await self._core.ping(ANSWER_TIMEOUT)
        )

    def _patience(self) -> Patience:
        prompts = sum(reader.prompt_ahead() for reader in self._readers.values())
        return Patience(
            self._hang_timeout + SLOWEST_PROMPT_TOKEN * prompts,
            PING_EVERY if self._readers else IDLE_PING_EVERY,
        )

    def _lost(self, reason: str) -> None:
        """The engine is gone or as good as gone: say so, once, then fail every stream that still
        has a listener.
        """
        watch, self._watch = self._watch, None
        if watch is None or self._core is None:
            return
        watch.close()
        self._core.kill()
        if self.on_death is not None:
            self.on_death(reason)
        readers, self._readers = self._readers, {}
        _fail_all(readers, reason)

    # ---- prompts ----

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """See `Engine`."""
        core = self._running_core()
        return await _tokens(
            core.tokens_of_text(text, special_tokens=special_tokens),
            "the text cannot be tokenized",
            self._capabilities,
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any]
    ) -> list[int]:
        """See `Engine`."""
        core = self._running_core()
        fault = (
            "the model's chat template cannot render these messages with these "
            "chat_template_kwargs: check their fields"
        )
        return await _tokens(
            core.tokens_of_chat(messages, template_arguments), fault, self._capabilities
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Engine`. Special tokens are left out."""
        return str(self._running_core().tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def check_sampling(self, sampling: Sampling) -> Sampling:
        """See `Engine`. A form is compiled, elsewhere: it may take long, or crash what compiles
        it.
        """
        from kendall.server.engines.vllm.core import CLIENT_ERRORS  # noqa: PLC0415  # imported long ago by `_boot`

        core = self._running_core()
        prepared = None
        if sampling.structured is not None and self._forms is not None:
            prepared = self._forms.known(sampling.structured)
            if prepared is None:
                return _with_form(sampling, await self._forms.prepare(sampling))
        try:
            core.check(sampling if prepared is None else replace(sampling, structured=None))
        except CLIENT_ERRORS as error:
            raise InvalidSamplingError(
                first_line(error), getattr(error, "parameter", None)
            ) from error
        return sampling if prepared is None else _with_form(sampling, prepared)

    def client(self) -> Any:
        """vLLM's own client of the engine that serves (`ServingEngine`)."""
        return self._running_core().llm

    def _running_core(self) -> Core:
        if self._core is None:
            raise RuntimeError(NOT_RUNNING)
        return self._core

    # ---- sequences ----

    def dispatch(
        self,
        server_id: int,
        requests: Sequence[EngineRequest],
        *,
        padded: bool,
        joining: bool,
    ) -> list[TokenStream]:
        """See `Engine`."""
        del server_id  # there is one
        core, submitter = self._core, self._submitter
        if core is None or submitter is None or self._watch is None:
            return [stillborn(engine_request) for engine_request in requests]
        readers = [
            Reader(
                TokenStream(engine_request.request.id), engine_request, core.tokenizer, self._lost
            )
            for engine_request in requests
        ]
        self._readers |= {reader.engine_request.request.id: reader for reader in readers}
        submitter.put(Start(readers, together=not joining, padded=padded))
        return [reader.stream for reader in readers]

    def cancel(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        readers = [
            reader
            for request_id in request_ids
            if (reader := self._readers.pop(request_id, None)) is not None
        ]
        for reader in readers:
            reader.closed = True
        if readers and self._submitter is not None:
            self._submitter.put(Cancel(readers))

    async def _begin(self, reader: Reader, padded_length: int | None) -> None:
        from kendall.server.engines.vllm.core import CLIENT_ERRORS, sampling_params  # noqa: PLC0415  # imported long ago by `_boot`

        core, engine_request = self._running_core(), reader.engine_request
        assert self._capabilities is not None
        try:
            sampling = sampling_params(
                engine_request.sampling,
                max_tokens=stop_after(
                    engine_request, padded_length, self._capabilities.max_model_len
                ),
                made=len(engine_request.output_token_ids),
                runs_on=padded_length is not None
                or engine_request.forced_output_tokens is not None,
                keep_seed=not core.drops_seed,
            )
            receive = functools.partial(self._receive, reader)
            reader.internal_id = await core.add(
                engine_request,
                sampling,
                receive if sampling.prompt_logprobs is None else reader.with_prompt(receive),
            )
        except CLIENT_ERRORS as error:
            self._readers.pop(engine_request.request.id, None)
            reader.fail(f"vLLM rejected the request: {first_line(error)}", "invalid_request")
        except Exception as error:  # noqa: BLE001  # whatever vLLM raises
            self._failures += 1
            if core.dead or self._failures >= MOST_FAILURES:
                self._lost(first_line(error))
                return
            self._readers.pop(engine_request.request.id, None)
            reader.fail(
                f"vLLM failed while handling the request: {first_line(error)}", "engine_error"
            )
        else:
            self._failures = 0

    def _receive(self, reader: Reader, output: Any) -> None:
        """Within vLLM's output loop, which an exception would end for everyone: a listener's
        fault stays its own.
        """
        try:
            reader.receive(output)
        except Exception as error:  # noqa: BLE001
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a token listener failed", "exception": error}
            )
            self.cancel([reader.engine_request.request.id])
            reader.closed = False
            reader.fail(
                f"internal error while handling a token: {first_line(error)}", "internal_error"
            )
        if reader.closed and self._readers.get(reader.engine_request.request.id) is reader:
            del self._readers[reader.engine_request.request.id]


def _is_alone(engine: VllmEngine) -> bool:
    return not any(other is not engine for other in _STARTED)


def _with_form(sampling: Sampling, prepared: Any) -> Sampling:
    assert sampling.structured is not None
    return replace(sampling, structured=dataclasses.replace(sampling.structured, prepared=prepared))


async def _tokens(
    call: Awaitable[list[int]], fault: str, capabilities: Capabilities | None
) -> list[int]:
    """Await vLLM's renderer; what it says against a prompt is for the client, unless it
    fails for a reason of its own: then `fault`.
    """
    from kendall.server.engines.vllm.core import PROMPT_ERRORS, speaker  # noqa: PLC0415  # imported long ago by `_boot`

    try:
        return await call
    except InvalidPromptError:
        raise
    except PROMPT_ERRORS as error:
        if getattr(error, "parameter", None) in TOO_LONG and capabilities is not None:
            most = capabilities.longest_prompt
            raise PromptTooLongError(
                f"got a prompt beyond the model's context; expected at most {most} tokens: "
                "shorten it"
            ) from error
        said_by = speaker(error)
        raise InvalidPromptError(fault if said_by is None else first_line(said_by)) from error


async def _shut_down(core: Core) -> None:
    core.stop_listening()
    try:
        await _in_time(core.shutdown, "vLLM did not exit; its processes are killed")
    finally:
        core.kill()


async def _in_time(work: Callable[[], None], otherwise: str) -> None:
    """In a thread. What is said otherwise is logged after STOP_TIMEOUT."""
    try:
        await in_a_thread(work, STOP_TIMEOUT, STOPS)
    except TimeoutError:
        log.error(otherwise)  # noqa: TRY400 - one line


def _fail_all(readers: Mapping[str, Reader], reason: str) -> None:
    for reader in readers.values():
        reader.fail(reason)


def start_message(error: Exception) -> str:
    """Why vLLM did not start, in one line of bounded length. What is left out is in the log: vLLM's
    engine process writes its own errors there, others are written here.
    """
    told = engine_error().strip() if "core initialization failed" in str(error) else ""
    line = f"vLLM did not start: {told.splitlines()[0] if told else first_line(error)}"
    if len(line) <= MOST_SAID:
        return line
    if not told:
        log.error("vLLM did not start: %s", error)
    return brief(line, MOST_SAID - len(THE_REST)) + THE_REST


async def warn_without_template(core: Core) -> bool:
    """Say in the log that the model takes no chats, if so; whether it was said. Templates that
    fail over this one say so in the calls.
    """
    try:
        await core.tokens_of_chat([{"role": "user", "content": "Hello"}], {})
    except InvalidPromptError:
        log.warning(
            "the model has no chat template: chat calls will be refused; put chat_template.jinja "
            "into its folder and start again, or call /v1/completions"
        )
        return True
    except Exception as error:  # noqa: BLE001  # whatever the template raises
        log.debug("a first chat could not be rendered: %s", first_line(error))
    return False
