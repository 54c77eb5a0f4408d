"""From the flags of `kendall serve` to the settings of security."""

from __future__ import annotations

import dataclasses

from kendall.policies.text import SpecError
from kendall.remote import is_loopback
from kendall.server.security.cors import read_origins
from kendall.server.security.exposure import check_exposure, check_tls
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import KeyFlags, SecuritySettings


def read_security(host: str, settings: SecuritySettings, keys: KeyFlags) -> SecuritySettings:
    """`settings` with what the flags say of keys and origins.

    Raises SpecError: a key, a file or a list that cannot be used; an address that other machines
    reach without a key, unless `allow_unauthenticated` is set.
    """
    files = (keys.api_key_file, keys.admin_key_file, settings.tls.keyfile)
    found = dataclasses.replace(
        settings,
        api_keys=read_keys("--api-key", keys.api_key, keys.api_key_file),
        admin_keys=read_keys("--admin-key", keys.admin_key, keys.admin_key_file),
        keyless_admin=is_loopback(host),
        key_files=tuple(file for file in files if file is not None),
        allowed_origins=read_origins(keys.allowed_origins),
    )
    if found.metrics_need_key and not (found.api_keys or found.admin_keys):
        raise SpecError(
            "got --metrics-need-key without a key; expected --api-key or --admin-key too"
        )
    check_tls(found.tls)
    check_exposure(host, found)
    return found
