"""Limits on one request that need more than its head."""

from __future__ import annotations

from server.errors import ApiError


def check_prompt(prompt_tokens: int, most: int | None) -> None:
    """Raises ApiError 400: the operator's own limit, below the model's context."""
    if most is not None and prompt_tokens > most:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"got a prompt of {prompt_tokens} tokens; expected at most {most}, this gateway's limit: shorten it",
            param="prompt",
        )
