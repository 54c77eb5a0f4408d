"""The answers of the guard, in OpenAI's form, each made once."""

from __future__ import annotations

from kendall.server.runtime.errors import ApiError
from kendall.server.security.early_answer import RejectionResponse


class Denial(RejectionResponse):
    """An answer that can be sent any number of times; `reason` is what the audit trail calls it."""

    def __init__(self, reason: str, status: int, code: str, message: str) -> None:
        super().__init__(ApiError(status, code, message))
        self.reason = reason


NO_KEY = Denial(
    "no_key",
    401,
    "invalid_api_key",
    "got no API key; expected the header `Authorization: Bearer KEY`",
)
WRONG_KEY = Denial(
    "wrong_key",
    401,
    "invalid_api_key",
    "got an unknown key; expected one of this gateway's keys",
)
NO_ADMIN_KEY = Denial(
    "no_admin_key",
    401,
    "invalid_api_key",
    (
        "got no admin key; expected the header `Authorization: Bearer KEY` with a key of "
        "--admin-key, or the key that the gateway printed at its start"
    ),
)
NOT_ADMIN = Denial(
    "not_admin",
    403,
    "admin_key_needed",
    (
        "got an API key, which gives no access to /admin; expected a key of --admin-key, or the "
        "key that the gateway printed at its start"
    ),
)
NOT_HERE = Denial(
    "elsewhere",
    403,
    "admin_key_needed",
    (
        "got an /admin call from another machine or through a proxy; expected it from this "
        "machine (as localhost), or with an admin key"
    ),
)
OTHER_PAGE = Denial(
    "other_page",
    403,
    "other_page",
    (
        "got an /admin call from a page of another origin; expected it from the gateway's own "
        "page, or from outside a browser"
    ),
)
OTHER_NAME = Denial(
    "other_name",
    403,
    "other_name",
    (
        "got a call from a page that calls this gateway by a name of its own; expected an API key "
        "(--api-key), or the page's origin among --allowed-origins"
    ),
)
ALL = (NO_KEY, WRONG_KEY, NO_ADMIN_KEY, NOT_ADMIN, NOT_HERE, OTHER_PAGE, OTHER_NAME)
REASONS = tuple(denial.reason for denial in ALL)
NOT_JSON = RejectionResponse(
    ApiError(
        400,
        "unsupported_media_type",
        (
            "got a body without the content type application/json; expected it, because any page "
            "in a browser may send the others"
        ),
    )
)


def too_large(most: int) -> RejectionResponse:
    """The answer to a body that announces a larger size: nobody waits for its end."""
    return RejectionResponse(
        ApiError(413, "body_too_large", f"got a body of more than {most} bytes; expected less")
    )
