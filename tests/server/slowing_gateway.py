"""`kendall serve` on an emulated engine that can be slowed down from outside: SIGUSR1 doubles
its law's times, SIGUSR2 ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from kendall.loadgen.gateway.gateway_child import end_with
from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.server.engines import emulated
from kendall.server.engines.base import Capabilities

FACTOR = 2.0


class SlowingEngine(emulated.EmulatedEngine):
    """What it is in the middle of goes on at the old speed until the next change of its
    composition.
    """

    async def start(self) -> Capabilities:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._run_at, FACTOR)
        loop.add_signal_handler(signal.SIGUSR2, self._run_at, 1.0)
        return await super().start()

    def _run_at(self, factor: float) -> None:
        for server in self._servers:
            process = server.process
            process.law = process._stretch.law = self.law.at_speed(factor)


class SlowingGateway(GatewayProcess):
    """Its child is this module."""

    module = "tests.server.slowing_gateway"

    @contextlib.contextmanager
    def slower(self) -> Iterator[None]:
        """Inside, every batch takes twice as long."""
        os.kill(self.pid, signal.SIGUSR1)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGUSR2)


if __name__ == "__main__":
    from kendall import cli

    end_with(int(sys.argv[1]))
    emulated.EmulatedEngine = SlowingEngine  # type: ignore[misc]
    cli.main(sys.argv[2:])
