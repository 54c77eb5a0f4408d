"""A gateway of one's own: `kendall serve` as a child process, spoken to over its HTTP interface."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

START_LIMIT = 180.0  # seconds


class GatewayError(RuntimeError):
    """The gateway could not be started or refused; one line."""


class GatewayProcess:
    """Starts on entering, stops on leaving; the log goes to a file."""

    def __init__(self, arguments: Sequence[str], port: int, log_file: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [*arguments, "--port", str(port)]
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self._client = httpx.AsyncClient(base_url=self.url, timeout=900)

    async def __aenter__(self) -> GatewayProcess:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kendall", "serve", *self._arguments, stdout=log, stderr=log, start_new_session=True
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await self._process.wait()
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    async def ready(self) -> None:
        """Return once the engine serves. Raises GatewayError with the gateway's own last line."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_LIMIT
        while loop.time() < deadline:
            if self._process.returncode is not None:
                raise GatewayError(self._last_line())
            with contextlib.suppress(httpx.HTTPError):
                if (await self._client.get("/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
        raise GatewayError(f"the gateway was not ready after {START_LIMIT:.0f} s; its log is {self._log_file}")

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call to the gateway. Raises GatewayError on an error status."""
        response = await self._client.request(method, path, json=body)
        if response.status_code != 200:
            raise GatewayError(f"{method} {path}: {response.status_code} {response.text}")
        return dict(response.json())

    async def finished(self) -> None:
        """Wait until the gateway ends by itself."""
        assert self._process is not None
        await self._process.wait()

    def _last_line(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("kendall: ") if lines else "the gateway ended without a word"


def free_port(wanted: int) -> int:
    """`wanted` where it is free, else one that the system chooses."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise GatewayError("no free port on 127.0.0.1")
