"""From the flags of `kendall serve` to the settings of security."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policies.text import SpecError
from queueing.commands.remote import is_loopback
from server.security.cors import read_origins
from server.security.exposure import check_exposure, check_tls
from server.security.keys import read_keys
from server.security.settings import SecuritySettings, TlsSettings


def read_security(
    host: str,
    *,
    api_key: Sequence[str],
    api_key_file: Path | None,
    admin_key: Sequence[str],
    admin_key_file: Path | None,
    allow_unauthenticated: bool,
    metrics_need_key: bool,
    max_body_bytes: int,
    max_prompt_tokens: int | None,
    max_form_bytes: int,
    max_form_compile_time: float,
    max_connections_per_address: int | None,
    allowed_origins: str | None,
    ssl_keyfile: Path | None,
    ssl_certfile: Path | None,
    ssl_ca_certs: Path | None,
) -> SecuritySettings:
    """Raises SpecError: a key, a file or a list that cannot be used; a door left open that
    nobody asked for.
    """
    found = SecuritySettings(
        api_keys=read_keys("--api-key", api_key, api_key_file),
        admin_keys=read_keys("--admin-key", admin_key, admin_key_file),
        keyless_admin=is_loopback(host),
        key_files=tuple(
            file for file in (api_key_file, admin_key_file, ssl_keyfile) if file is not None
        ),
        allow_unauthenticated=allow_unauthenticated,
        metrics_need_key=metrics_need_key,
        max_body_bytes=max_body_bytes,
        max_prompt_tokens=max_prompt_tokens,
        max_form_bytes=max_form_bytes,
        max_form_compile_time=max_form_compile_time,
        max_connections_per_address=max_connections_per_address,
        allowed_origins=read_origins(allowed_origins),
        tls=TlsSettings(keyfile=ssl_keyfile, certfile=ssl_certfile, ca_certs=ssl_ca_certs),
    )
    if metrics_need_key and not (found.api_keys or found.admin_keys):
        raise SpecError(
            "got --metrics-need-key without a key; expected --api-key or --admin-key too"
        )
    check_tls(found.tls)
    check_exposure(host, found)
    return found
