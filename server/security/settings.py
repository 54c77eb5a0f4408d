"""What an operator says about security: one frozen part of the settings, one default each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kendall.server.runtime.field_marks import NO_OPTION, RELOADED
from kendall.server.security.keys import Key

MAX_BODY_BYTES = 16 << 20
MAX_FORM_BYTES = 128 << 10  # of a JSON schema, a grammar or a list of choices
MAX_FORM_COMPILE_TIME = 5.0


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Files in PEM; names as uvicorn and vLLM have them."""

    keyfile: Path | None = field(default=None, metadata=RELOADED)
    certfile: Path | None = field(default=None, metadata=RELOADED)
    ca_certs: Path | None = None  # of clients, which must then show a certificate


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Keys, limits, TLS, CORS."""

    api_keys: tuple[Key, ...] = field(default=(), metadata=RELOADED)
    admin_keys: tuple[Key, ...] = field(default=(), metadata=RELOADED)
    made_admin_keys: tuple[Key, ...] = field(
        default=(), metadata=NO_OPTION
    )  # for this run, where none was given
    keyless_admin: bool = field(
        default=True, metadata=NO_OPTION
    )  # while no key is given: no other machine reaches the gateway
    key_files: tuple[Path, ...] = field(
        default=(), metadata=NO_OPTION | RELOADED
    )  # where keys were read from
    allow_unauthenticated: bool = False  # off this machine without a key
    metrics_need_key: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    max_prompt_tokens: int | None = None  # less than the model's context
    max_form_bytes: int = MAX_FORM_BYTES
    max_form_compile_time: float = MAX_FORM_COMPILE_TIME  # seconds
    max_connections_per_address: int | None = None  # behind a proxy all come from one
    allowed_origins: tuple[str, ...] = ()  # CORS is off without
    tls: TlsSettings = field(default_factory=TlsSettings)
