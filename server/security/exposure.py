"""What must hold before the gateway listens: open to others only where that was asked for, and
certificates that can be used.
"""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path
from typing import Any

from kendall.policies.text import SpecError
from kendall.remote import is_loopback
from kendall.server.security.keys import SHORT
from kendall.server.security.settings import SecuritySettings, TlsSettings

log = logging.getLogger("kendall")


def check_exposure(host: str, security: SecuritySettings) -> None:
    """Raises SpecError: other machines could reach a gateway without keys, and nobody said that
    they may.
    """
    if security.api_keys or security.allow_unauthenticated or is_loopback(host):
        return
    raise SpecError(
        f"got --host {host or repr('')} without an API key; expected one, because other "
        "machines can reach the gateway: set --api-key or --api-key-file (or "
        "KENDALL_API_KEY), or --allow-unauthenticated"
    )


def check_tls(tls: TlsSettings) -> None:
    """Raises SpecError: a file is missing, cannot be read, or does not fit the other."""
    if tls.certfile is None:
        if tls.keyfile or tls.ca_certs:
            raise SpecError(
                "got --ssl-keyfile or --ssl-ca-certs without --ssl-certfile; expected the "
                "certificate too"
            )
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certfile, tls.keyfile, password=no_password)
        if tls.ca_certs is not None:
            context.load_verify_locations(tls.ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(str(file) for file in (tls.certfile, tls.keyfile, tls.ca_certs) if file)
        raise SpecError(
            f"got TLS files {files}; expected a certificate in PEM and its key without a password "
            f"({error})"
        ) from None


def no_password() -> str:
    """Instead of OpenSSL's question on the terminal. Raises ValueError."""
    raise ValueError("the key has a password")


def uvicorn_tls(tls: TlsSettings) -> dict[str, Any]:
    """uvicorn's TLS arguments. Clients must show a certificate where CAs are given."""
    if tls.certfile is None:
        return {}
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": None if tls.ca_certs is None else str(tls.ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca_certs is None else ssl.CERT_REQUIRED,
    }


def _readable_by_others(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def warn_of(host: str, security: SecuritySettings) -> None:
    """Say in the log what is weak, though it was asked for."""
    short = [key.name for key in (*security.api_keys, *security.admin_keys) if key.short]
    if short:
        log.warning(
            "keys %s have fewer than %d characters and can be guessed", ", ".join(short), SHORT
        )
    for file in security.key_files:
        if _readable_by_others(file):
            log.warning(
                "every user of this machine can read the keys in %s: chmod 600 %s", file, file
            )
    if is_loopback(host):
        return
    if not security.api_keys:
        log.warning(
            "anyone who can reach %s can use this gateway, because of --allow-unauthenticated",
            host or "this machine",
        )
    elif security.tls.certfile is None:
        log.warning(
            "keys and prompts cross the network unencrypted: set --ssl-certfile and "
            "--ssl-keyfile, or use a proxy with TLS"
        )
