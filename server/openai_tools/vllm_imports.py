"""What Kendall imports of vLLM's API server: the only module that does, and imported late.

Most paths are the same from vLLM 0.28 to 0.33 (run: 0.32); `init_app_state` and `make_arg_parser`
moved. The constructors of the serving objects change with every release, so vLLM builds them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

__all__ = [
    "AnthropicCountTokensRequest",
    "AnthropicMessagesRequest",
    "ChatCompletionRequest",
    "CompletionOutput",
    "CompletionRequest",
    "EngineClient",
    "EngineDeadError",
    "FlexibleArgumentParser",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "ResponsesRequest",
    "SamplingParams",
    "init_app_state",
    "make_arg_parser",
]


def _moved(name: str, *modules: str) -> Any:
    """From the first of the modules that exists and has it."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"vLLM has {name} in none of {', '.join(modules)}")


init_app_state = _moved(
    "init_app_state",
    "vllm.entrypoints.launchers.api_server.app_state",  # from 0.30
    "vllm.entrypoints.openai.api_server",
)
make_arg_parser = _moved(
    "make_arg_parser",
    "vllm.entrypoints.common.cli_args",  # 0.33
    "vllm.entrypoints.launchers.cli_args",  # 0.30 to 0.32
    "vllm.entrypoints.openai.cli_args",
)
