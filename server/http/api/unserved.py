"""Fields that clients know and this gateway does not serve: refused by name with 501, never
ignored.

A value that asks for nothing (tools=[], echo=false) is no reason to refuse. An unknown name is a
mistake: 400.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from kendall.server.runtime.errors import ApiError

HINTS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
    }  # OpenAI and its clients
    | {"provider", "route", "models"}  # routers such as OpenRouter: where else the request could go
    | {"cache_prompt", "id_slot", "keep_alive"}  # llama.cpp, Ollama: what the server may keep
)
"""They say something about the request; no answer depends on them."""

OPENAI: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
VLLM: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}
MOST_EXTRA = 256  # fields that no model of a call has
UNSERVED = OPENAI | VLLM
"""Each with the values that ask for nothing, beside null."""


def check_unserved(
    extra: Mapping[str, Any],
    defaults: Mapping[str, Any],
    unserved: Mapping[str, tuple[Any, ...]] = UNSERVED,
) -> list[str]:
    """The unknown names among the fields that the call's model does not have.

    `defaults` = further values that ask for nothing of this call. Raises ApiError: 501 for what
    others serve, 400 for too many fields.
    """
    unknown = []
    if len(extra) > MOST_EXTRA:
        raise ApiError(
            400,
            "unknown_field",
            (
                f"got {len(extra)} fields that this gateway does not know; expected at most "
                f"{MOST_EXTRA}"
            ),
        )
    for name in sorted(extra):
        if name in HINTS:
            continue
        if name not in unserved:
            unknown.append(name)
            continue
        value = extra[name]
        harmless = unserved[name] + ((defaults[name],) if name in defaults else ())
        if value is not None and not any(
            type(value) is type(other) and value == other for other in harmless
        ):
            raise ApiError(
                501,
                "unsupported",
                f"got {name}, which this gateway does not support; leave it out",
                param=name,
            )
    return unknown


def unknown_to_all(name: str, known: Iterable[str], why: str) -> ApiError:
    """The error for an unknown field of a call that OpenAI or vLLM has too."""
    return _unknown(name, [*known, *UNSERVED], why)


def unknown_field(name: str, known: Iterable[str]) -> ApiError:
    """The error for an unknown field of a call that only Kendall has."""
    names = list(known)
    return _unknown(name, names, f"which is none of {', '.join(names)}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is nearly this one."""
    return next(iter(difflib.get_close_matches(name[:80], known, 1)), None)


def _unknown(name: str, known: Iterable[str], why: str) -> ApiError:
    near = nearest(name, known)
    remedy = f"did you mean {near}?" if near else "leave it out"
    return ApiError(
        400, "unknown_field", f"got the field {name[:80]!r}, {why}: {remedy}", param=name[:80]
    )
