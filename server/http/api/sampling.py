"""From the fields of a call to how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.engines.base import (
    CALLER,
    BusyError,
    InvalidSamplingError,
    OverBudgetError,
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
)  # None leaves the model's default


def sampling_of(
    call: Generation, limit: int, seed: int | None, own: Mapping[str, float]
) -> Sampling:
    """For one sequence with at most `limit` output tokens, of a model with its `own` sampling."""
    fields = call.__dict__  # a model's own look-up takes ten times as long
    given: dict[str, Any] = {
        name: value
        for name in _SAME_NAME
        if (value := fields[name]) is not None or (value := own.get(name)) is not None
    }
    allowed = fields["allowed_token_ids"]
    return Sampling(
        max_tokens=limit,
        min_tokens=fields["min_tokens"],
        presence_penalty=fields["presence_penalty"],
        frequency_penalty=fields["frequency_penalty"],
        seed=seed,
        logit_bias=fields["logit_bias"],
        logprobs=call.wanted_logprobs(),
        stop=call.stops() if fields["stop"] else (),
        stop_token_ids=tuple(fields["stop_token_ids"] or ()),
        ignore_eos=fields["ignore_eos"],
        include_stop_str_in_output=fields["include_stop_str_in_output"],
        skip_special_tokens=fields["skip_special_tokens"],
        structured=None if call.formless else call.form(),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(fields["bad_words"] or ()),
        **given,
    )


async def check_sampling(
    engine: PromptReader, sampling: Sampling, call: Generation, caller: str
) -> Sampling:
    """Ask the engine before anything queues; returns the sampling that it is to have. Raises
    ApiError 400, 429, 501 or 503.
    """
    if not sampling.needs_check:
        return sampling
    CALLER.set(caller)
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
    except OverBudgetError as error:
        raise ApiError(
            429, "form_budget_exceeded", str(error), retry_after=error.retry_after
        ) from None
