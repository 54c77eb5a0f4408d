"""Limits on one request that need more than its head."""

from __future__ import annotations

import json

from server.errors import ApiError
from server.http.api.schema import Generation


def check_prompt(prompt_tokens: int, most: int | None) -> None:
    """Raises ApiError 400: the operator's own limit, below the model's context."""
    if most is not None and prompt_tokens > most:
        raise ApiError(
            400,
            "context_length_exceeded",
            (
                f"got a prompt of {prompt_tokens} tokens; expected at most {most}, this gateway's "
                "limit: shorten it"
            ),
            param="prompt",
        )


def check_form_size(call: Generation, most: int) -> None:
    """Raises ApiError 400: what the answer's form takes to compile grows with its size, often
    faster.
    """
    form = call.form()
    size = 0 if form is None else len(json.dumps(form.value, ensure_ascii=False).encode())
    if size > most:
        message = (
            f"got a structured-output definition of {size} bytes; expected at most {most}, this "
            "gateway's limit: simplify it"
        )
        raise ApiError(400, "form_too_large", message, param=call.form_field())
