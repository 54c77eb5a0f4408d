"""`kendall serve` in a process whose wall clock steps by an hour, forwards and back, five times
a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kendall.loadgen.gateway.gateway_child import end_with
from kendall.loadgen.gateway.gateway_process import GatewayProcess

EVERY = 0.2  # seconds
STEP = 3600.0


class SteppingGateway(GatewayProcess):
    """Its child is this module."""

    module = "tests.server.stepping_gateway"


def step_the_wall_clock() -> None:
    """Whatever in this process reads it sees it stepping; the kernel's stamps do not, as those
    of before a step.
    """
    monotonic = time.monotonic  # noqa: TID251 - not the gateway

    def stepped() -> float:
        return STEP if int(monotonic() / EVERY) % 2 else 0.0

    def shifted(read: Callable[[int], float], unit: float) -> Callable[[int], float]:
        return lambda clock: (
            read(clock)
            + (type(read(clock))(stepped() * unit) if clock == time.CLOCK_REALTIME else 0)
        )

    wall, wall_ns = time.time, time.time_ns  # noqa: TID251 - not the gateway
    time.time = lambda: wall() + stepped()  # noqa: TID251 - this is the step
    time.time_ns = lambda: wall_ns() + int(stepped() * 1e9)
    time.clock_gettime = shifted(time.clock_gettime, 1.0)  # type: ignore[assignment]
    time.clock_gettime_ns = shifted(time.clock_gettime_ns, 1e9)  # type: ignore[assignment]


if __name__ == "__main__":
    from kendall import cli

    end_with(int(sys.argv[1]))
    step_the_wall_clock()
    cli.main(sys.argv[2:])
