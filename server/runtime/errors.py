"""What goes wrong at the HTTP edge, in OpenAI's shape: `{"error": {"message", "type", "param",
"code"}}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kendall.server.runtime.wording import brief, public

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MAX_RETRY_AFTER = 120  # seconds; the OpenAI client gives up on more
DROPPED_REASON = "x-llm-d-request-dropped-reason"  # llm-d's, with its values
EVICTED = "evicted"  # after its dispatch
_DROPPED = {
    "queue_timeout": "rejected-ttl-expired",
    "shutting_down": "rejected-shutting-down",
    "engine_unavailable": "rejected-no-endpoints",
}


class ApiError(Exception):
    """An answer with an error status; the message says got / expected / what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = public(message)  # whatever library it came from
        self.param = None if param is None else brief(param)
        self.retry_after = retry_after  # seconds; None where nothing is known
        self.details = details  # of a rejection: where the queue stood

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error: dict[str, Any] = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.details is not None:
            error["kendall"] = dict(self.details)
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """`Retry-After` on every 429 and 503, whole seconds, at most 120, and `retry-after-ms`
        where it is known; on 401 how to come.

        After a 501, and after a 500 that is the request's own fault, OpenAI's clients would ask
        again.
        """
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status == 501 or self.code in OWN_FAULTS:
            return {"x-should-retry": "false"}
        if self.status not in (429, 503):
            return {}
        seconds = min(float(MAX_RETRY_AFTER), 1.0 if self.retry_after is None else self.retry_after)
        whole = {
            "retry-after": str(max(1, math.ceil(seconds))),
            DROPPED_REASON: _DROPPED.get(self.code, "rejected-saturated"),
        }
        return (
            whole
            if self.retry_after is None
            else whole | {"retry-after-ms": str(max(1, math.ceil(seconds * 1e3)))}
        )


OWN_FAULTS = frozenset(
    {"engine_error", "engine_killed"}
)  # the engine fails over this request alone, and would again
STATUS_OF_FAILURE = {
    "queue_timeout": 429,
    "queue_full": 429,
    "engine_unavailable": 503,
    "shutting_down": 503,
    "invalid_request": 400,
    "deadline_exceeded": 504,
    "first_token_timeout": 504,
    "sequence_stalled": 504,
}
FAILURES = (  # codes of requests that failed
    *("engine_unavailable", "engine_error", "internal_error", "shutting_down"),
    *("deadline_exceeded", "first_token_timeout", "sequence_stalled", "engine_killed"),
)


def failure_error(code: str, message: str) -> ApiError:
    """The error of a request that failed after it had arrived."""
    return ApiError(STATUS_OF_FAILURE.get(code, 500), code, message)


def not_started() -> ApiError:
    """For what needs an engine, while the first one comes up."""
    return ApiError(
        503,
        "engine_unavailable",
        "the engine is starting; wait until /ready answers 200",
        retry_after=5,
    )
