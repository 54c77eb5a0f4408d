"""The check before every call, before its body is read: a key where one is needed, a length that is
not too large, and no page that a browser shows from elsewhere.

/health /ready /version /  anyone; the page's files too
/metrics /load /live       anyone; with --metrics-need-key whoever has an API key or an admin key
/v1, anything unknown      where API keys are set: whoever has one, or an admin key. Where none is:
                           a body must be called JSON, because a page of any origin may send the
                           other content types without asking; and no page whose own name was bound
                           to this gateway's address (DNS rebinding), unless its origin is allowed
/admin                     whoever has an admin key, and no page of another origin. Where no key was
                           given and only this machine reaches the gateway, a client on this machine
                           needs none, but for draining and calibrating: an address proves little,
                           and what looks like a proxy, another page or another name is refused
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import Scope

from kendall.remote import address_of, is_loopback
from kendall.server.security import denials
from kendall.server.security.early_answer import RejectionResponse
from kendall.server.security.keys import holder
from kendall.server.security.routes import ADMIN, ANTHROPIC, PAGE_FILES, WORK, paths
from kendall.server.security.settings import SecuritySettings

CALLER = "kendall.api_key"  # key of a request's scope: the name of the key it came with
HANDED_ON = frozenset(
    {
        *(
            b"forwarded",
            b"via",
            b"x-real-ip",
            b"x-forwarded-for",
            b"x-forwarded-host",
            b"x-forwarded-proto",
            b"x-forwarded-port",
        ),
        b"x-envoy-external-address",
    }
)
OTHER_PAGES = frozenset(
    {b"cross-site", b"same-site"}
)  # of Sec-Fetch-Site; another port of this machine is the same site
JSON = b"application/json"
HIDDEN = b"null"  # the origin of a page without referrers, or in a sandbox
# what `curl -d` calls any body; a form of a page cannot write JSON in it
CURL = b"application/x-www-form-urlencoded"
Headers = Mapping[bytes, bytes]


class Guard:
    """Decides by the head of a request alone."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._open = paths("open") | (frozenset() if settings.metrics_need_key else paths("probe"))
        self._probes = paths("probe")
        self._key_always = paths("admin key")
        self._api_keys = settings.api_keys
        self._admin_keys = (*settings.admin_keys, *settings.made_admin_keys)
        self._all_keys = (*settings.api_keys, *self._admin_keys)
        self._keyless = settings.keyless_admin and not (settings.api_keys or settings.admin_keys)
        self._max_body_bytes = settings.max_body_bytes
        self._too_large = denials.too_large(settings.max_body_bytes)
        self._metrics_need_key = settings.metrics_need_key
        self._allowed_origins = frozenset(
            origin.lower().encode() for origin in settings.allowed_origins
        )

    def rejection(self, scope: Scope) -> RejectionResponse | None:
        """The answer to a call that may not be; None where it may. Does not read the body."""
        path = scope["path"]
        asks = scope["method"] == "OPTIONS"  # a browser, without a key, what it may do
        if asks or path in self._open or path.startswith(PAGE_FILES):
            return None
        headers = dict(scope["headers"])
        return self._right_refused(scope, path, headers) or self._length_refused(
            headers.get(b"content-length")
        )

    def _length_refused(self, length: bytes | None) -> RejectionResponse | None:
        if (
            length is None
            or not length.isdigit()
            or (len(length) < 19 and int(length) <= self._max_body_bytes)
        ):
            return None
        return self._too_large

    def _right_refused(self, scope: Scope, path: str, headers: Headers) -> RejectionResponse | None:
        if path.startswith(ADMIN):
            return self._admin_refused(scope, path, headers)
        if self._api_keys or (self._metrics_need_key and path in self._probes):
            return self._client_refused(scope, headers)
        if path in WORK and scope["method"] == "POST" and not _may_be_json(headers):
            return denials.NOT_JSON
        origin = headers.get(b"origin", b"").lower()
        return (
            denials.OTHER_NAME
            if origin and origin not in self._allowed_origins and _rebound(origin, headers)
            else None
        )

    def _client_refused(self, scope: Scope, headers: Headers) -> RejectionResponse | None:
        token = _bearer(headers)
        if token is None and scope["path"] in ANTHROPIC:
            token = headers.get(b"x-api-key") or None
        if token is None:
            return denials.NO_KEY
        key = holder(self._all_keys, token)
        if key is None:
            return denials.WRONG_KEY
        scope[CALLER] = key.name
        return None

    def _admin_refused(self, scope: Scope, path: str, headers: Headers) -> RejectionResponse | None:
        if headers.get(b"sec-fetch-site") in OTHER_PAGES:
            return denials.OTHER_PAGE
        token = _bearer(headers)
        key = None if token is None else holder(self._admin_keys, token)
        if key is not None:
            scope[CALLER] = key.name
            return None
        if self._keyless and path not in self._key_always:
            return None if _from_this_machine(scope, headers) else denials.NOT_HERE
        if token is None:
            return denials.NO_ADMIN_KEY
        return denials.NOT_ADMIN if holder(self._api_keys, token) else denials.WRONG_KEY


def _from_this_machine(scope: Scope, headers: Headers) -> bool:
    client = scope.get("client")
    if client is None or not is_loopback(client[0]) or HANDED_ON & headers.keys():
        return False
    if scope.get("http_version") == "1.0":
        return False  # nginx's plain `proxy_pass` before 1.29.7; no client of today
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = _host_of("//" + host)
    if name is None or not is_loopback(name):
        return False  # a name that a page elsewhere bound to this machine's address
    origin = headers.get(b"origin")
    return origin is None or origin.decode("latin-1").lower().partition("://")[2] == host


def _rebound(origin: bytes, headers: Headers) -> bool:
    """Whether a page calls its own origin, by a name that anybody may have bound to this address:
    not an address, and not a name that only this network knows (of one label, `.local`,
    `.internal`, `.localhost`). A page may hide its origin (`null`).
    """
    host = headers.get(b"host", b"").lower()
    if origin.partition(b"://")[2] != host and origin != HIDDEN:
        return False  # another origin: the browser asked first
    name = _host_of("//" + host.decode("latin-1"))
    if name is None or "." not in name.rstrip(".") or address_of(name) is not None:
        return False
    return not name.rstrip(".").endswith((".local", ".internal", ".localhost"))


def _may_be_json(headers: Headers) -> bool:
    """Whether no page could have sent this without asking first: its body is called JSON, or it
    shows no sign of a browser.
    """
    said = headers.get(b"content-type", b"")
    if said == JSON:
        return True
    kind = said.partition(b";")[0].strip().lower()
    if kind == JSON:
        return True
    return kind in (b"", CURL) and b"origin" not in headers and b"sec-fetch-site" not in headers


def _bearer(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return (token.strip() or None) if scheme.lower() == b"bearer" else None


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
