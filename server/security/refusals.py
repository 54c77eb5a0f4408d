"""The answers of the guard, in OpenAI's form, each made once."""

from __future__ import annotations

from starlette.responses import JSONResponse

from server.errors import ApiError
from server.overload.refusal import Refusal


def refusal(status: int, code: str, message: str) -> JSONResponse:
    """An answer that can be sent any number of times."""
    error = ApiError(status, code, message)
    return JSONResponse(error.body(), error.status, error.headers())


NO_KEY = refusal(401, "invalid_api_key", "got no API key; expected the header `Authorization: Bearer KEY`")
WRONG_KEY = refusal(401, "invalid_api_key", "got a key that is not known here; expected one of this gateway's")
NO_ADMIN_KEY = refusal(
    401, "invalid_api_key", "got no admin key; expected the header `Authorization: Bearer KEY` with a key of --admin-key"
)
NOT_ADMIN = refusal(403, "admin_key_needed", "got an API key, which does not open /admin; expected a key of --admin-key")
NOT_HERE = refusal(
    403,
    "admin_key_needed",
    "got an /admin call from elsewhere; expected it from this machine (as localhost, through no proxy), "
    "or a gateway with --admin-key and its key",
)


def too_large(most: int) -> Refusal:
    """For a body that says itself that it is larger: nobody waits for its end."""
    return Refusal(ApiError(413, "body_too_large", f"got a body of more than {most} bytes; expected less"))
