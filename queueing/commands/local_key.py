"""The admin key that a gateway made for one run: kept in a file of the user's own, where
commands on the same machine find it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from queueing.commands.remote import check_key, is_loopback

_PORTS = {"http": 80, "https": 443}


def key_file(port: int) -> Path:
    """The file of the gateway on this port: in XDG_RUNTIME_DIR, else in the user's cache. Raises
    RuntimeError without a home.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    cache = os.environ.get("XDG_CACHE_HOME")
    usable = runtime.is_dir() and os.access(runtime, os.W_OK)
    folder = runtime if usable else Path(cache) if cache else Path.home() / ".cache"
    return folder / "kendall" / f"admin-key-{port}"


def local_admin_key(url: str) -> str | None:
    """The key for a gateway of this user on this machine; None where there is no such file, or
    where others can read it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if parts.hostname is None or not is_loopback(parts.hostname):
            return None
        with key_file(port).open(encoding="ascii") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                return None
            return file.read().strip() or None
    except (OSError, RuntimeError, ValueError):
        return None


def key_for_admin(url: str, admin_key: str | None, api_key: str | None = None) -> str | None:
    """What a call to `/admin` carries: the admin key that was given, else the one that the gateway
    made, else an API key.

    Raises SpecError for a key that cannot be sent.
    """
    check_key(admin_key, "--admin-key")
    check_key(api_key, "--api-key")
    return admin_key or local_admin_key(url) or api_key
