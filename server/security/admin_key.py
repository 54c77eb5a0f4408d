"""The admin key of a gateway that was given none: made for this run, printed once, kept where the
user's own commands find it.

That nothing of a request tells of a proxy does not prove that there is none: nginx's plain
`proxy_pass`, `ssh -L`, a sidecar and `kubectl port-forward` make every caller a caller of this
machine. So what a caller must hold is a secret, not an address.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from kendall.remote import key_file
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings

log = logging.getLogger("kendall")
FLAG = "--admin-key"


@contextmanager
def with_admin_key(security: SecuritySettings, port: int) -> Iterator[SecuritySettings]:
    """The settings with an admin key; the file of a key that was made is gone afterwards."""
    if security.admin_keys:
        with suppress(OSError, RuntimeError):
            key_file(port).unlink()  # of an earlier gateway on this port, which was killed
        yield security
        return
    text = secrets.token_urlsafe(24)
    keys = read_keys(FLAG, [text], None)
    file = _written(port, text)
    kept = "" if file is None else f"; commands of this user on this machine read it from {file}"
    log.info(
        "made an admin key for this run, called %s in the log: %s%s (%s or %s-file sets one)",
        keys[0].name,
        text,
        kept,
        FLAG,
        FLAG,
    )
    try:
        yield replace(security, made_admin_keys=keys)
    finally:
        if file is not None:
            with suppress(OSError):  # another gateway may have written its own there
                if file.read_text(encoding="ascii").strip() == text:
                    file.unlink()


def _written(port: int, text: str) -> Path | None:
    """The new file, readable by this user alone; None where there is no place for it."""
    try:
        file = key_file(port)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(text + "\n")
    except (OSError, RuntimeError) as error:
        log.warning(
            "cannot keep the admin key in a file (%s): commands on this machine need it as %s",
            error,
            FLAG,
        )
        return None
    return file
