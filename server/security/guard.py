"""The check before every call, before its body is read: a key where one is needed, and a length that is not too large.

/health /ready /version / anyone; the page's files too
/metrics /load /live      anyone; with --metrics-need-key whoever has an API key or an admin key
/v1, anything unknown     where API keys are set: whoever has one, or an admin key
/admin                    where admin keys are set: whoever has one; else a client on this machine (with an API key, where
                          those are set). What a proxy handed on, or a page of another origin sent, is not of this
                          machine, although both reach a gateway on loopback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Scope

from server.security import refusals
from server.security.keys import holder
from server.security.routes import ADMIN, PAGE_FILES, paths
from server.security.settings import SecuritySettings

CALLER = "kendall.api_key"  # key of a request's scope: the name of the API key it came with
HANDED_ON = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})


class Guard:
    """Decides by the head of a request alone."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._open = paths("open") | (frozenset() if settings.metrics_need_key else paths("probe"))
        self._probes = paths("probe")
        self._api_keys = settings.api_keys
        self._admin_keys = settings.admin_keys
        self._all_keys = (*settings.api_keys, *settings.admin_keys)
        self._origins = settings.allowed_origins
        self._max_body_bytes = settings.max_body_bytes
        self._too_large = refusals.too_large(settings.max_body_bytes)

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a call that may not be; None where it may. Does not read the body."""
        path = scope["path"]
        asks = scope["method"] == "OPTIONS"  # a browser, without a key, what it may do
        if asks or path in self._open or path.startswith(PAGE_FILES):
            return None
        token = length = None
        for name, value in scope["headers"]:
            if name == b"authorization" and token is None:
                token = _bearer(value)
            elif name == b"content-length":
                length = value
        return self._key_refused(scope, path, token) or self._length_refused(length)

    def _length_refused(self, length: bytes | None) -> Response | None:
        if length is None or not length.isdigit() or (len(length) < 19 and int(length) <= self._max_body_bytes):
            return None
        return self._too_large

    def _key_refused(self, scope: Scope, path: str, token: bytes | None) -> Response | None:
        if path.startswith(ADMIN):
            return self._admin_refused(scope, token)
        if self._api_keys or (self._admin_keys and path in self._probes):
            return self._client_refused(scope, token)
        return None

    def _client_refused(self, scope: Scope, token: bytes | None) -> Response | None:
        if token is None:
            return refusals.NO_KEY
        key = holder(self._all_keys, token)
        if key is None:
            return refusals.WRONG_KEY
        scope[CALLER] = key.name
        return None

    def _admin_refused(self, scope: Scope, token: bytes | None) -> Response | None:
        if not self._admin_keys:
            if not self._from_this_machine(scope):
                return refusals.NOT_HERE
            return self._client_refused(scope, token) if self._api_keys else None
        if token is None:
            return refusals.NO_ADMIN_KEY
        if holder(self._admin_keys, token) is not None:
            return None
        return refusals.NOT_ADMIN if holder(self._api_keys, token) else refusals.WRONG_KEY

    def _from_this_machine(self, scope: Scope) -> bool:
        client = scope.get("client")
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if client is None or not is_loopback(client[0]) or HANDED_ON & headers.keys():
            return False
        host = _host_of(b"//" + headers.get(b"host", b""))
        if host is None or not is_loopback(host):
            return False  # a name that a page elsewhere bound to this machine's address
        origin = headers.get(b"origin")
        return origin is None or _host_of(origin) == host or origin.decode("latin-1") in self._origins


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, is one that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped: ipaddress.IPv4Address | None = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _bearer(value: bytes) -> bytes | None:
    scheme, _, token = value.partition(b" ")
    return (token.strip() or None) if scheme.lower() == b"bearer" else None


def _host_of(url: bytes) -> str | None:
    try:
        return urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return None
