"""What an operator says about security: one frozen part of the settings, one default each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kendall.options import DERIVED, JSON, RELOADED, option
from kendall.policies.durations import Duration
from kendall.server.runtime.option_panels import Panel
from kendall.server.security.keys import Key

MAX_BODY_BYTES = 16 << 20
MAX_FORM_BYTES = 128 << 10  # of a JSON schema, a grammar or a list of choices
MAX_FORM_COMPILE_TIME = 5.0


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Files in PEM; names as uvicorn and vLLM have them."""

    keyfile: Path | None = option(
        Panel.SECURITY,
        "PEM file of the TLS private key (vLLM's name).",
        "--ssl-keyfile",
        reloaded=True,
    )
    certfile: Path | None = option(
        Panel.SECURITY,
        "PEM file of the TLS certificate (vLLM's name).",
        "--ssl-certfile",
        reloaded=True,
    )
    ca_certs: Path | None = option(
        Panel.SECURITY,
        (
            "PEM file of the authorities that may sign client certificates; clients must present "
            "one (vLLM's name)."
        ),
        "--ssl-ca-certs",
    )


@dataclass(frozen=True, kw_only=True)
class SecuritySettings:
    """Keys, limits, TLS, CORS."""

    api_keys: tuple[Key, ...] = field(default=(), metadata=RELOADED)
    admin_keys: tuple[Key, ...] = field(default=(), metadata=RELOADED)
    made_admin_keys: tuple[Key, ...] = field(
        default=(), metadata=DERIVED
    )  # for this run, where none was given
    keyless_admin: bool = field(
        default=True, metadata=DERIVED
    )  # while no key is given: no other machine reaches the gateway
    key_files: tuple[Path, ...] = field(
        default=(), metadata=DERIVED | RELOADED
    )  # where keys were read from
    allow_unauthenticated: bool = option(
        Panel.SECURITY,
        "Let other machines connect without a key.",
        "--allow-unauthenticated",
        default=False,
    )
    metrics_need_key: bool = option(
        Panel.SECURITY,
        "Require a key for /metrics and /load too.",
        "--metrics-need-key",
        default=False,
    )
    max_body_bytes: int = option(
        Panel.SECURITY,
        "Largest request body in bytes; larger ones get 413.",
        default=MAX_BODY_BYTES,
        min=1024,
    )
    max_prompt_tokens: int | None = option(
        Panel.SECURITY, "Longest prompt in tokens. Default: what the model's context allows.", min=1
    )
    max_form_bytes: int = option(
        Panel.SECURITY,
        (
            "Largest structured-output definition (JSON schema, grammar, choices) in bytes; larger "
            "ones get 400."
        ),
        default=MAX_FORM_BYTES,
        min=64,
    )
    max_form_compile_time: float = option(
        Panel.SECURITY,
        "Longest time a structured-output definition may take to compile; slower ones get 400.",
        default=MAX_FORM_COMPILE_TIME,
        parser=Duration(0.1),
    )
    max_connections_per_address: int | None = option(
        Panel.SECURITY,
        (
            "Largest number of connections per client address; further ones get 429. Default: no "
            "limit."
        ),
        min=1,
    )
    allowed_origins: tuple[str, ...] = ()  # CORS is off without
    tls: TlsSettings = field(default_factory=TlsSettings)


@dataclass(frozen=True, kw_only=True)
class KeyFlags:
    """Keys, files with keys, of clients and of operators, and origins, as they are written."""

    api_key: tuple[str, ...] = option(
        Panel.SECURITY,
        "Key that clients must send as a bearer token; repeatable. Default: no key.",
        default=(),
    )
    api_key_file: Path | None = option(Panel.SECURITY, "File of such keys, one per line.")
    admin_key: tuple[str, ...] = option(
        Panel.SECURITY,
        "Key for /admin; repeatable. Default: a key generated for this run and printed in the log.",
        default=(),
    )
    admin_key_file: Path | None = option(Panel.SECURITY, "File of such keys, one per line.")
    allowed_origins: str | None = option(
        Panel.SECURITY,
        "Origins from which browsers may call (CORS), as a JSON list (vLLM's name). Default: none.",
        metavar=JSON,
    )
