"""A gateway spoken to over its HTTP interface, and one of one's own: `kendall serve` as a child
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from kendall.loadgen.sending.client.stream import read_error
from kendall.loadgen.sending.client.target import NO_KEYS, Keys
from kendall.policies.registry import VARIABLE
from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.measurement.paths import writing
from kendall.remote import REFUSED, key_for_admin, key_refusal, reason, server_root

START_LIMIT = 180.0  # seconds
STOP_LIMIT = 20.0
# of the variables: no options, and the modules that policies are read from
KEPT = frozenset({"KENDALL_DEBUG", "KENDALL_ENGINE_CPUS", VARIABLE})
OWN_PORTS = range(20_000, 32_000)  # Linux takes 32768 to 60999 for outgoing connections
HEALTH_LIMIT = 10.0  # a gateway that takes longer to say that it is well is not


class GatewayError(CommandError):
    """The gateway could not be started or refused; one line."""


class GatewayLostError(GatewayError):
    """Nobody answers there, or not any more."""


class KeyRefusedError(GatewayError, SpecError):
    """It does not take the key that was given, or wants one: a wrong argument."""


class GatewayClient:
    """Questions to a gateway that is there."""

    def __init__(self, url: str, keys: Keys = NO_KEYS) -> None:
        self.url = server_root(url)
        self._keys = keys
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=keys.headers,
            verify=keys.trust.verification(url),
            trust_env=False,
            timeout=900,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One call to the gateway. Raises GatewayError on an error status, KeyRefusedError and
        GatewayLostError, which are such.
        """
        try:
            response = await self._client.request(
                method, path, json=body, headers=self._admin_headers(path)
            )
        except httpx.TransportError as error:
            raise GatewayLostError(f"{method} {self.url}{path}: {reason(error)}") from None
        if response.status_code != 200:
            where, status = f"{method} {self.url}{path}", response.status_code
            message = read_error(response.content)[1]
            if status in REFUSED:
                option = "--admin-key" if path.startswith("/admin") else "--api-key"
                raise KeyRefusedError(key_refusal(where, status, message, option))
            raise GatewayError(f"{where} answered {status}: {message}")
        return dict(response.json())

    def _admin_headers(self, path: str) -> dict[str, str]:
        """The key of a call to /admin. A gateway on this machine may have made one itself: its file
        is there once it listens.
        """
        if not path.startswith("/admin"):
            return {}
        key = key_for_admin(self.url, self._keys.admin_key, self._keys.api_key)
        return {"authorization": f"Bearer {key}"} if key else {}

    async def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get("/ready", timeout=HEALTH_LIMIT)).status_code == 200
        return False

    async def is_healthy(self) -> bool:
        """Whether it answers and its engine lives."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self._client.get("/health", timeout=HEALTH_LIMIT)).status_code == 200
        return False


class GatewayProcess(GatewayClient):
    """Starts on entering, stops on leaving; the log goes to a file."""

    module = "kendall.loadgen.gateway.gateway_child"  # what the child runs

    def __init__(self, arguments: Sequence[str], port: int, log_file: Path) -> None:
        super().__init__(f"http://127.0.0.1:{port}")
        self._arguments = [*arguments, "--port", str(port)]
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        with writing(self._log_file):
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            opened = self._log_file.open("wb")
        command = [sys.executable, "-m", self.module, str(os.getpid()), "serve", *self._arguments]
        with opened as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, start_new_session=True, env=own_environment()
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self._process is None:
            return
        try:
            if self._process.returncode is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_LIMIT):
                        await self._process.wait()
        finally:  # also where the wait is cancelled by a second signal
            with contextlib.suppress(ProcessLookupError):
                # whatever it left behind: an engine outlives a gateway that was killed
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    @property
    def pid(self) -> int:
        """The gateway's process, which leads a group of its own."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def ready(self) -> None:
        """Return once the engine serves. Raises GatewayError with the gateway's own last line."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_LIMIT
        while loop.time() < deadline:
            if self.ended:
                raise GatewayError(self.last_line())
            if await self.is_ready():
                return
            await asyncio.sleep(0.1)
        raise GatewayError(
            f"the gateway was not ready after {START_LIMIT:.0f} s; {self._log_file} is its log"
        )

    async def finished(self) -> None:
        """Wait until the gateway ends by itself."""
        assert self._process is not None
        await self._process.wait()

    def log(self) -> str:
        """All that the gateway has said so far."""
        return self._log_file.read_text(errors="replace")

    def last_line(self) -> str:
        """The last line of its log, without the prefix."""
        lines = self.log().strip().splitlines()
        return (
            lines[-1].removeprefix("kendall: ") if lines else "the gateway ended without a message"
        )


def own_environment() -> dict[str, str]:
    """This process's environment without the options in it: a gateway that is measured is what
    its arguments say.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KENDALL_") or name in KEPT
    }


def free_port(wanted: int) -> int:
    """`wanted` where it is free, else a free one, if possible below those that the system takes
    for outgoing connections.
    """
    for port in (*([wanted] if wanted else []), *(secrets.choice(OWN_PORTS) for _ in range(20)), 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])
    raise GatewayError(
        "found no free port on 127.0.0.1; expected one: end a process that listens, or name "
        "another --port"
    )
