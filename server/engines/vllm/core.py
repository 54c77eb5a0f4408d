"""Everything that is asked of vLLM, in one place: the only module of the gateway's process that
imports it, and so imported late.

Every name used exists at the same path in vLLM 0.28 to 0.33 (run: 0.32).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing as mp
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import vllm
import vllm.v1.engine.utils
from jinja2 import TemplateError
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.renderers import ChatParams
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from kendall.queueing.measurement.machine import hardware
from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    InvalidPromptError,
    Sampling,
    Structured,
)
from kendall.server.engines.vllm.boot import Forks
from kendall.server.engines.vllm.options import on_devices
from kendall.server.engines.vllm.process import kill_tree

log = logging.getLogger("kendall.engine")
CLIENT_ERRORS: tuple[type[Exception], ...] = (
    VLLMClientError,
    ValueError,
    TypeError,
    OverflowError,
    NotImplementedError,
)
# badly shaped messages and templates raise all of these
PROMPT_ERRORS: tuple[type[Exception], ...] = (
    *CLIENT_ERRORS,
    KeyError,
    AttributeError,
    TemplateError,
)
NO_CHAT_TEMPLATE = (
    "got a chat, for which the model has no chat template; expected a call of /v1/completions, or "
    "chat_template.jinja in the model's folder and a restart of the gateway"
)
# seconds that the event loop waits for it at most when an engine has died: milliseconds, unless the
# machine is starved
EXIT_CODE = 0.5
_STARTING = threading.local()  # `forks` of the engine that this thread starts
StepListener = Callable[[int, int, int], None]  # running, admitted, prompt tokens


class Core:
    """One AsyncLLM with its EngineCore process. Made in a thread by `boot`, used on the event
    loop.
    """

    def __init__(
        self, config: Any, on_step: StepListener, forks: Forks, *, shows_metrics: bool = True
    ) -> None:
        # the variable that selects it knows fork and spawn only, and vLLM's CPU platform insists on
        # spawn; another engine may be starting in another thread
        _STARTING.forks = forks
        vllm.v1.engine.utils.get_mp_context = _forks_of_this_thread
        self.config = config
        loggers = [_step_logger(on_step), *(() if shows_metrics else (_NoMetrics,))]
        self.llm = AsyncLLM.from_vllm_config(config, stat_loggers=loggers, disable_log_stats=True)
        self.process = self.llm.engine_core.resources.engine_manager.processes[0]
        self.pid: int = self.process.pid
        # CPU: the generator of a seeded request cannot skip over a chunk, and the engine would die
        # of it
        self.drops_seed: bool = (
            current_platform.is_cpu() and config.scheduler_config.enable_chunked_prefill
        )

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer as transformers made it."""
        return self.llm.renderer.get_tokenizer()

    async def add(
        self,
        engine_request: EngineRequest,
        sampling: SamplingParams,
        receive: Callable[[Any], None],
    ) -> str:
        """Hand over one sequence; `receive` hears every output, or the exception that ended it, at
        once. Returns vLLM's id.

        The collector's own `put` would wake a task for each output: for one that only passes it on,
        that costs more than the rest of the way.
        """
        collector = await self.llm.add_request(
            engine_request.request.id,
            prompt_of(engine_request),
            sampling,
            **(engine_request.engine_arguments or {}),
            trace_headers=None
            if engine_request.trace is None
            else engine_request.trace.handed_on(engine_request.request.id),
        )
        collector.put = receive
        if collector.output is not None:
            receive(collector.output)
        return str(collector.request_id)

    def check(self, sampling: Sampling) -> None:
        """Raises CLIENT_ERRORS for what vLLM would refuse once it has the sequence."""
        checked(self.config, self.tokenizer, sampling)

    @property
    def dead(self) -> bool:
        """Whether vLLM has given its engine up."""
        return bool(self.llm.errored)

    async def abort(self, internal_ids: Sequence[str]) -> None:
        """Let these go, by the ids that `add` returned."""
        await self.llm.abort(internal_ids, internal=True)

    async def pause(self) -> None:
        """Stop before the next step; what is running stays where it is."""
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.llm.resume_generation()

    def exit_code(self) -> int | None:
        """Of the engine's process, once that has ended; waits for the fork server, which hears
        of it first, for a moment.
        """
        self.process.join(EXIT_CODE)
        code: int | None = self.process.exitcode
        return code

    async def ping(self, timeout: float) -> bool:
        """Whether EngineCore's loop answers in time."""
        try:
            await asyncio.wait_for(self.llm.is_paused(), timeout)
        except Exception:  # noqa: BLE001  # whatever the reason: it does not answer
            return False
        return True

    async def warm(self) -> None:
        """The first request would ask this: a round trip in the middle of a gated start."""
        await self.llm.get_supported_tasks()

    async def tokens_of_text(self, text: str, *, special_tokens: bool) -> list[int]:
        """Through vLLM's renderer."""
        renderer = self.llm.renderer
        prompt = parse_model_prompt(self.llm.model_config, text)
        params = renderer.default_cmpl_tok_params
        if not special_tokens:
            params = dataclasses.replace(params, add_special_tokens=False)
        (rendered,) = await renderer.render_cmpl_async([prompt], params)
        return list(rendered["prompt_token_ids"])

    async def tokens_of_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> list[int]:
        """Through vLLM's renderer and the model's chat template. Raises InvalidPromptError where
        the model has none.
        """
        given = {"add_generation_prompt": True, **arguments, "tokenize": False}
        template = given.pop("chat_template", None)
        conversation = [dict(message) for message in messages]
        params = ChatParams(chat_template=template, chat_template_kwargs=given)
        try:
            _, (rendered,) = await self.llm.renderer.render_chat_async([conversation], params)
        except ChatTemplateResolutionError as error:
            raise InvalidPromptError(NO_CHAT_TEMPLATE) from error
        return list(rendered["prompt_token_ids"])

    def capabilities(self) -> Capabilities:
        """Capabilities of the engine that came up."""
        scheduler, cache, model = (
            self.config.scheduler_config,
            self.config.cache_config,
            self.llm.model_config,
        )
        of_gpu = {} if current_platform.is_cpu() else {"gpu": current_platform.get_device_name()}
        return Capabilities(
            engine="vllm",
            model=str(model.model),
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            kv_cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            chunked_prefill=bool(scheduler.enable_chunked_prefill),
            eos_token_ids=self._eos_token_ids(),
            vocab_size=model.get_vocab_size(),
            sampling=model.get_diff_sampling_param(),
            versions={
                "vllm": vllm.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            hardware=hardware() | of_gpu,
        )

    def _eos_token_ids(self) -> frozenset[int]:
        found = self.llm.model_config.try_get_generation_config().get("eos_token_id")
        ids = {found} if isinstance(found, int) else set(found or ())
        own = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset(ids | ({own} if own is not None else set()))

    def stop_listening(self) -> None:
        """On the loop, before `shutdown`: an end that was asked for is not logged as the
        engine's death.
        """
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()

    def shutdown(self) -> None:
        """End the process, whatever it is doing, and free what vLLM holds here."""
        try:
            self.llm.shutdown(0)
        except Exception:
            # one that was killed may end while vLLM asks for its children; sockets stay open then
            log.warning("vLLM's shutdown failed; its process is killed", exc_info=True)
            self.llm.engine_core.resources()
        self.kill()
        self._join()
        del self.llm

    def kill(self) -> None:
        """SIGKILL to the engine and its workers; no error if they are gone."""
        with contextlib.suppress(ValueError):  # closed by vLLM already
            if self.process.is_alive():
                kill_tree(self.pid)

    def _join(self) -> None:
        with contextlib.suppress(ValueError):  # closed by vLLM already
            self.process.join(5)


def speaker(error: Exception) -> BaseException | None:
    """The error whose words against a prompt are meant for people; None where Python failed in the
    middle of the rendering.

    vLLM's own errors say what is wrong with the request, and so does the template's
    `raise_exception`.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for each in chain:
        if type(each) is TemplateError:  # by the template's own `raise_exception`
            return each
    return (
        None
        if any(
            isinstance(each, (TypeError, KeyError, AttributeError, TemplateError)) for each in chain
        )
        else error
    )


def lacks_template(error: BaseException) -> bool:
    """Whether it is vLLM's word for a chat to a model without a chat template."""
    while not isinstance(error, ChatTemplateResolutionError):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True


def boot(
    arguments: Mapping[str, Any],
    on_step: StepListener,
    forks: Forks,
    replica: int | None = None,
) -> Core:
    """Start vLLM; blocks for seconds, or until `forks` gives up. Raises whatever vLLM raises,
    TypeError for an unknown argument.
    """
    known = {entry.name for entry in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(set(arguments) - known):
        raise TypeError(
            f"engine arguments: got {', '.join(unknown)}, which this vLLM ({vllm.__version__}) "
            "does not know"
        )
    if replica is not None and "device_ids" in known and not current_platform.is_cpu():
        arguments = on_devices(arguments, replica, current_platform.device_count())
    config = AsyncEngineArgs(**arguments).create_engine_config()
    # vLLM's own metrics: the registry has room for those of one engine
    return Core(config, on_step, forks, shows_metrics=replica is None)


def checked(config: Any, tokenizer: Any, sampling: Sampling) -> SamplingParams:
    """As vLLM checks it once it has the sequence. Raises CLIENT_ERRORS."""
    params = sampling_params(
        sampling, max_tokens=sampling.max_tokens, made=0, runs_on=False, keep_seed=True
    )
    params.verify(
        config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
    )
    params.update_from_tokenizer(tokenizer)
    return params


class _Checked(SamplingParams, omit_defaults=True, dict=True):  # type: ignore[call-arg, misc]  # vLLM is not followed by mypy
    """Checked with its form before its request queued: vLLM would do it again, on the event
    loop.
    """

    def verify(self, *_: Any) -> None:
        """Nothing is left to check."""


def sampling_params(
    sampling: Sampling, *, max_tokens: int, made: int, runs_on: bool, keep_seed: bool
) -> SamplingParams:
    """vLLM's parameters; `made` tokens exist already, `runs_on` stops at nothing but `max_tokens`.

    Stop strings are the gateway's affair: they never reach the engine.
    """
    prepared = sampling.structured is not None and sampling.structured.prepared is not None
    return (_Checked if prepared else SamplingParams)(
        max_tokens=max_tokens,
        min_tokens=min(max(0, sampling.min_tokens - made), max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed if keep_seed else None,
        logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        thinking_token_budget=sampling.thinking_token_budget,
        ignore_eos=runs_on or sampling.ignore_eos,
        stop_token_ids=None if runs_on else list(sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        allowed_token_ids=None
        if sampling.allowed_token_ids is None
        else list(sampling.allowed_token_ids),
        bad_words=list(sampling.bad_words),
        structured_outputs=_structured(sampling.structured),
    )


def _structured(structured: Structured | None) -> StructuredOutputsParams | None:
    """A grammar that has ended allows nothing but the end of sequence, and anything behind it: a
    padded member meets its end there, as it would alone, and decodes on.
    """
    if structured is None or structured.prepared is not None:
        return None if structured is None else structured.prepared
    return StructuredOutputsParams(**{structured.kind: structured.value}, **structured.options)


def prompt_of(engine_request: EngineRequest) -> Any:
    """The prompt as vLLM takes it, with what has been made already behind it."""
    ids = [*engine_request.prompt_token_ids, *engine_request.output_token_ids]
    if engine_request.rendered is not None:
        return {**engine_request.rendered, "prompt_token_ids": ids}
    return tokens_input(ids, cache_salt=engine_request.cache_salt)


def _step_logger(on_step: StepListener) -> Callable[..., Any]:
    class Steps(StatLoggerBase):  # type: ignore[misc]  # vLLM is not followed by mypy
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            del scheduler_stats, mm_cache_stats, engine_idx
            if iteration_stats is None:
                return
            first, later = (
                len(iteration_stats.time_to_first_tokens_iter),
                len(iteration_stats.inter_token_latencies_iter),
            )
            if first or later:
                on_step(first + later, first, iteration_stats.num_prompt_tokens)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Steps


class _NoMetrics(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not followed by mypy
    """In the place of vLLM's own, of which each would take the last one's collectors out of the
    registry.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name.startswith("__") else _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _forks_of_this_thread() -> Any:
    return getattr(_STARTING, "forks", None) or mp.get_context("forkserver")
