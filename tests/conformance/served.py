"""A gateway for the suites: one process, under every model name that they have written down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from loadgen.gateway_process import GatewayProcess, free_port

NAMES = ("tiny", "gpt-3.5-turbo-instruct", "gpt-6-astra", "gpt-4o-mini")  # ours, and those in the pinned tests of openai-python
MAX_OUTPUT_TOKENS = 8  # the suites ask for shapes, not for words


@contextlib.contextmanager
def served(engine: str, folder: Path) -> Iterator[str]:
    """The URL of a gateway on this engine, as long as it is wanted."""
    arguments = ["tiny", "--engine", engine, "--max-output-tokens", str(MAX_OUTPUT_TOKENS), "--prediction-interval", "0"]
    arguments += [part for name in NAMES for part in ("--served-model-name", name)]
    with asyncio.Runner() as runner:
        gateway = GatewayProcess(arguments, free_port(0), folder / f"{engine}.log")

        async def start() -> None:
            await gateway.__aenter__()
            await gateway.ready()

        try:
            runner.run(start())
            yield gateway.url
        finally:
            runner.run(gateway.__aexit__(None, None, None))
