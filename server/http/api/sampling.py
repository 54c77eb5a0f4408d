"""From the fields of a call to how its tokens are chosen."""

from __future__ import annotations

from server.engines.base import (
    BusyError,
    InvalidSamplingError,
    PromptReader,
    Sampling,
    UnsupportedError,
)
from server.http.api.schema import Generation
from server.runtime.errors import ApiError

_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)  # None leaves the engine's default


def sampling_of(call: Generation, limit: int, seed: int | None) -> Sampling:
    """For one sequence with at most `limit` output tokens."""
    fields = call.__dict__
    given = {name: value for name in _SAME_NAME if (value := fields[name]) is not None}
    return Sampling(
        max_tokens=limit,
        min_tokens=min(call.min_tokens, limit),
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        seed=seed,
        logit_bias=call.logit_bias,
        logprobs=call.wanted_logprobs(),
        stop=call.stops(),
        stop_token_ids=tuple(call.stop_token_ids or ()),
        ignore_eos=call.ignore_eos,
        include_stop_str_in_output=call.include_stop_str_in_output,
        skip_special_tokens=call.skip_special_tokens,
        structured=call.form(),
        allowed_token_ids=None if call.allowed_token_ids is None else tuple(call.allowed_token_ids),
        bad_words=tuple(call.bad_words or ()),
        **given,
    )


async def check_sampling(engine: PromptReader, sampling: Sampling, call: Generation) -> Sampling:
    """Ask the engine before anything queues; returns the sampling that it is to have. Raises
    ApiError 400, 501 or 503.
    """
    if not sampling.needs_check:
        return sampling
    try:
        return await engine.check_sampling(sampling)
    except UnsupportedError as error:
        raise ApiError(501, "unsupported", str(error), param=error.param) from None
    except InvalidSamplingError as error:
        raise ApiError(
            400, "invalid_request", str(error), param=error.param or call.form_field()
        ) from None
    except BusyError as error:
        raise ApiError(503, "engine_unavailable", str(error)) from None
