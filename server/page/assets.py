"""The page's files: read and compressed once, named by what they hold, so that a browser may keep
them.

Their address has the version, a digest of all of them, in its path: modules import each other by
relative names and stay within it. Only the document itself is asked for again each time, and
answered with 304 where it is the same.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable

DOCUMENT = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
SECURITY = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
KEEP = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    plain: bytes
    gzipped: bytes | None  # None: it is compressed already
    content_type: str
    etag: str

    def body(self, *, gzip_accepted: bool) -> bytes:
        """The shortest that the client understands."""
        return self.gzipped if gzip_accepted and self.gzipped is not None else self.plain

    def headers(self, cache_control: str, *, gzip_accepted: bool) -> dict[str, str]:
        """Of an answer with this file."""
        found = {
            "content-type": self.content_type,
            "etag": self.etag,
            "cache-control": cache_control,
            **SECURITY,
        }
        if self.gzipped is not None:
            found["vary"] = "accept-encoding"
            if gzip_accepted:
                found["content-encoding"] = "gzip"
        return found


@dataclass(frozen=True, slots=True)
class Assets:
    """All files of the page by name, the document apart; `version` changes with any of them."""

    version: str
    document: Asset
    files: Mapping[str, Asset]


@cache
def load_assets() -> Assets:
    """From the package; a few milliseconds, once."""
    found = dict(_files(resources.files("kendall.server.page").joinpath("static"), ""))
    digest = sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + found[name])
    version = digest.hexdigest()[:12]
    document = found.pop(DOCUMENT).replace(b"@VERSION@", version.encode())
    return Assets(
        version,
        _asset(DOCUMENT, document),
        {name: _asset(name, data) for name, data in found.items() if _is_served(name)},
    )


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_bytes()


def _is_served(name: str) -> bool:
    return name.rpartition(".")[2] in TYPES


def _asset(name: str, data: bytes) -> Asset:
    kind = name.rpartition(".")[2]
    gzipped = None if kind == "woff2" else gzip.compress(data, 9, mtime=0)
    return Asset(data, gzipped, TYPES[kind], f'"{sha256(data).hexdigest()[:16]}"')
