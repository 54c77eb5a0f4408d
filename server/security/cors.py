"""Which pages in a browser may call: none, unless --allowed-origins names them.

The layer stands before the guard: a browser asks with OPTIONS, without a key, and must be able to
read a rejection.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from kendall.policies.text import SpecError

SHOWN = (  # headers that a page may read
    *(
        "x-request-id",
        "x-kendall-queueing-delay-ms",
        "x-kendall-queue-position",
        "x-kendall-predicted-wait-ms",
    ),
    *(
        "server-timing",
        "retry-after",
        "retry-after-ms",
        "x-llm-d-flow-queue-duration-ms",
        "x-llm-d-request-dropped-reason",
    ),
)


def read_origins(text: str | None) -> tuple[str, ...]:
    """`--allowed-origins`: a JSON list, as vLLM has it. Raises SpecError.

    >>> read_origins('["https://chat.example"]')
    ('https://chat.example',)
    """
    try:
        found = [] if text is None else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(
        isinstance(origin, str) and _is_origin(origin) for origin in found
    ):
        raise SpecError(
            f"got --allowed-origins {text!r}; expected a JSON list of origins, for example "
            "'[\"https://chat.example\"]' or '[\"*\"]'"
        )
    return tuple(found)


def cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp | None:
    """The application behind a layer that lets these pages in; None where there are none."""
    if not origins:
        return None
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=SHOWN
    )


def _is_origin(text: str) -> bool:
    if text == "*":
        return True
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.netloc)
        and not (parts.path or parts.query or parts.fragment)
    )
