"""From vLLM's sampling parameters to ours: all of them, or the call is refused.

The gateway decides by `Sampling` whether a sequence can be continued elsewhere. A parameter that it
did not know of would be lost with the first engine that dies: an answer under a grammar, say, would
go on without one.
"""

from __future__ import annotations

from typing import Any

from kendall.server.engines.base import Sampling, Structured
from kendall.server.runtime.errors import ApiError

SAME = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "logprobs", "prompt_logprobs", "thinking_token_budget"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
LISTS = ("stop", "stop_token_ids", "bad_words")  # vLLM's are never None
OWN_RULE = (
    *("max_tokens", "min_tokens", "logit_bias", "allowed_token_ids", "structured_outputs"),
    # the gateway's affair: how many sequences there are, who makes text of them, and when
    *("n", "detokenize", "output_kind", "skip_clone", "output_text_buffer_length"),
    "skip_reading_prefix_cache",  # vLLM's own, where the prompt's log probabilities are wanted
)
HARMLESS: dict[str, tuple[Any, ...]] = {"stream_interval": (1,), "extra_args": ({},)}
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def sampling_of(params: Any, plain: Any, limit: int) -> Sampling:
    """Of a sequence with at most `limit` tokens; `plain`: vLLM's parameters where nothing is said.
    Raises ApiError 501.
    """
    check_mirrored(params, plain)
    same: dict[str, Any] = {name: getattr(params, name) for name in SAME}
    same |= {name: tuple(getattr(params, name)) for name in LISTS}
    return Sampling(
        max_tokens=limit,
        min_tokens=params.min_tokens,
        logit_bias=dict(params.logit_bias) if params.logit_bias else None,
        allowed_token_ids=None
        if params.allowed_token_ids is None
        else tuple(params.allowed_token_ids),
        structured=structured_of(params.structured_outputs),
        **same,
    )


def check_mirrored(params: Any, plain: Any) -> None:
    """Raises ApiError 501 for a parameter that says something and is not among ours."""
    known = {*SAME, *LISTS, *OWN_RULE}
    for name in type(params).__struct_fields__:
        if name in known or name.startswith("_"):
            continue
        value = getattr(params, name)
        if value != getattr(plain, name) and value not in HARMLESS.get(name, ()):
            raise ApiError(
                501,
                "unsupported",
                f"got {name}, which this gateway does not support; leave it out",
                param=name,
            )


def structured_of(outputs: Any) -> Structured | None:
    """The form that the answer must take."""
    if outputs is None:
        return None
    kind = next(kind for kind in KINDS if getattr(outputs, kind) is not None)
    options = {name: value for name in OPTIONS if (value := getattr(outputs, name))}
    return Structured(kind, getattr(outputs, kind), options)  # type: ignore[arg-type]
