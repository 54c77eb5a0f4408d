"""A gateway for the suites: one process, under every model name that they have written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from tests.serving import started

NAMES = (
    "tiny",
    "gpt-3.5-turbo-instruct",
    "gpt-6-astra",
    "gpt-4o-mini",
)  # ours, and those in the pinned tests of openai-python
ADMIN_KEY = "conformance"
MAX_OUTPUT_TOKENS = 8  # the suites ask for shapes, not for words


@contextlib.contextmanager
def served(engine: str, folder: Path) -> Iterator[str]:
    """The URL of a gateway on this engine, as long as it is wanted."""
    arguments = [
        "tiny",
        "--engine",
        engine,
        "--max-output-tokens",
        str(MAX_OUTPUT_TOKENS),
        "--prediction-interval",
        "0",
        "--admin-key",
        ADMIN_KEY,
    ]
    arguments += [part for name in NAMES for part in ("--served-model-name", name)]
    gateway = GatewayProcess(arguments, free_port(0), folder / f"{engine}.log")
    with started(gateway):
        yield gateway.url
