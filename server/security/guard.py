"""The check before every call, before its body is read: a key where one is needed, and a length that is not too large.

    /health /ready /version   anyone
    /metrics /load            anyone; with --metrics-need-key an API key or an admin key
    /v1, anything unknown     an API key or an admin key, where API keys are set
    /admin                    an admin key, where admin keys are set; otherwise a client on this machine (and its API key, where
                              those are set). A request that a proxy handed on, or that a page of another origin sent, is not
                              of this machine: both reach a gateway on loopback.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from server.errors import ApiError
from server.security.keys import holder
from server.security.routes import ADMIN, paths
from server.security.settings import SecuritySettings

CALLER = "kendall.caller"  # of a request's scope: the name of the key it came with
HANDED_ON = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
NO_KEY = "got no API key; expected the header `Authorization: Bearer KEY`"
WRONG_KEY = "got an API key that is not known here; expected one of this gateway's"
NO_ADMIN_KEY = "got no admin key; expected the header `Authorization: Bearer KEY` with a key of --admin-key"
NOT_ADMIN = "got a key that does not open /admin; expected a key of --admin-key"
NOT_HERE = "got an /admin call from elsewhere; expected it from this machine, directly, or a key: start the gateway with --admin-key"


class Guard:
    """Decides by the head of a request alone."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._open = paths("open") | (frozenset() if settings.metrics_need_key else paths("probe"))
        self._probes = paths("probe")
        self._api_keys = settings.api_keys
        self._admin_keys = settings.admin_keys
        self._all_keys = (*settings.api_keys, *settings.admin_keys)
        self._most = settings.max_body_bytes
        self._origins = settings.allowed_origins
        self._too_large = refusal(413, "body_too_large", f"got a body of more than {self._most} bytes; expected less")

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a call that may not be; None where it may."""
        path = scope["path"]
        if path in self._open or scope["method"] == "OPTIONS":  # a browser asks with OPTIONS, without a key, what it may do
            return None
        token = length = None
        for name, value in scope["headers"]:
            if name == b"authorization" and token is None:
                token = _bearer(value)
            elif name == b"content-length":
                length = value
        refused = self._key_refused(scope, path, token)
        if refused is None and length is not None and len(length) < 20 and int(length) > self._most:
            return self._too_large
        return refused

    def _key_refused(self, scope: Scope, path: str, token: bytes | None) -> Response | None:
        if path.startswith(ADMIN):
            return self._admin_refused(scope, token)
        if self._api_keys or (path in self._probes and self._all_keys):
            return self._client_refused(scope, token)
        return None

    def _client_refused(self, scope: Scope, token: bytes | None) -> Response | None:
        if token is None:
            return _NO_KEY
        key = holder(self._all_keys, token)
        if key is None:
            return _WRONG_KEY
        scope[CALLER] = key.name
        return None

    def _admin_refused(self, scope: Scope, token: bytes | None) -> Response | None:
        if self._admin_keys:
            if token is None:
                return _NO_ADMIN_KEY
            if (key := holder(self._admin_keys, token)) is not None:
                scope[CALLER] = key.name
                return None
            return _NOT_ADMIN if holder(self._api_keys, token) else _WRONG_KEY
        if not self._from_this_machine(scope):
            return _NOT_HERE
        return self._client_refused(scope, token) if self._api_keys else None

    def _from_this_machine(self, scope: Scope) -> bool:
        client = scope.get("client")
        if client is None or not is_loopback(client[0]):
            return False
        headers = dict(scope["headers"])
        if HANDED_ON & headers.keys():
            return False
        host = _host_of(b"//" + headers.get(b"host", b""))
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1") not in self._origins and _host_of(origin) != host:
            return False  # a page of another origin, in a browser on this machine
        return host is not None and is_loopback(host)  # a name that was bound to this machine for a page elsewhere is none


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, is this machine's own and reached by nobody else."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def refusal(status: int, code: str, message: str) -> JSONResponse:
    """An answer in OpenAI's form, made once."""
    error = ApiError(status, code, message)
    return JSONResponse(error.body(), status, error.headers())


def read_origins(text: str | None) -> tuple[str, ...]:
    """`--allowed-origins`, a JSON list as vLLM has it. Raises ValueError."""
    found = [] if text is None else json.loads(text)
    if not isinstance(found, list) or not all(isinstance(origin, str) for origin in found):
        raise ValueError("no list of texts")
    return tuple(_checked(found))


def _checked(origins: Iterable[str]) -> Iterable[str]:
    for origin in origins:
        if origin != "*" and (not urlsplit(origin).scheme or urlsplit(origin).path):
            raise ValueError(f"{origin!r} is no origin")
        yield origin


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.partition(b" ")
    return token.strip() or None if scheme.lower() == b"bearer" else None


def _host_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None


_NO_KEY = refusal(401, "invalid_api_key", NO_KEY)
_WRONG_KEY = refusal(401, "invalid_api_key", WRONG_KEY)
_NO_ADMIN_KEY = refusal(401, "invalid_api_key", NO_ADMIN_KEY)
_NOT_ADMIN = refusal(403, "admin_key_needed", NOT_ADMIN)
_NOT_HERE = refusal(403, "admin_key_needed", NOT_HERE)
