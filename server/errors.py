"""What goes wrong at the HTTP edge, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MAX_RETRY_AFTER = 120  # seconds; the OpenAI client gives up on more
LONGEST = 1000  # characters of a message: it may quote what came in


class ApiError(Exception):
    """An answer with an error status; the message says got / expected / what to do."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message if len(message) <= LONGEST else message[:LONGEST] + "..."
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """`Retry-After` on every 429 and 503, whole seconds, at most 120. After a 501 OpenAI's clients would ask again."""
        if self.status == 501:
            return {"x-should-retry": "false"}
        if self.status not in (429, 503):
            return {}
        return {"retry-after": str(max(1, min(MAX_RETRY_AFTER, round(self.retry_after or 1))))}


STATUS_OF_LOSS = {"queue_timeout": 429, "queue_full": 429, "engine_unavailable": 503, "shutting_down": 503}


def loss_error(code: str, message: str) -> ApiError:
    """The error of a request that was lost after it had arrived."""
    return ApiError(STATUS_OF_LOSS.get(code, 500), code, message)
