"""The machine under a live model: an engine's process slowed down from outside, and whether its
own speed moved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.loadgen.sending.operating_system import real_time_scheduling
from kendall.policies import parse_policy
from kendall.queueing.estimation.speed.batch_times import batch_times
from kendall.queueing.estimation.window.window import snapshot_of
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record

ON, OFF = 0.004, 0.004  # seconds that a slowed engine runs and rests
BLOCK, BLOCK_DEVIATION, BRACKET_DEVIATION = (
    5.0,
    0.10,
    0.05,
)  # AGREEMENT's noise gate: seconds, fractions


@contextlib.contextmanager
def stopped_half_of_the_time(gateway: GatewayProcess) -> Iterator[None]:
    """The engine's process runs for 4 ms and rests for 4 ms: a step, 1 to 2 ms long, takes twice as
    long on average, and none is lost.

    What is stretched are steps; a batch of many sees about the factor 2, with little scatter. An
    engine that is given another batch while it rests begins it late: that is part of its slowness.
    """
    pid, over = engine_process(gateway.pid), threading.Event()

    def beat() -> None:
        with real_time_scheduling():
            while not over.wait(ON):
                os.kill(pid, signal.SIGSTOP)
                over.wait(OFF)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def engine_process(gateway: int) -> int:
    """The process of the gateway's session that calls itself EngineCore."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == gateway
                and b"EngineCore" in (entry / "cmdline").read_bytes()
            ):
                return int(entry.name)
    raise AssertionError(f"the gateway {gateway} has no engine process")


def block_speeds(records: Sequence[Record], policy: str, law: LatencyModel) -> list[float]:
    """Measured over lawful time in blocks of `BLOCK` seconds."""
    ends = [record.arrived_at for record in records if record.arrived_at is not None]
    times = batch_times(
        parse_policy(policy), snapshot_of(list(records), policy, min(ends) - 1e-6, max(ends)), law
    )
    block = ((times.at - times.at[0]) / BLOCK).astype(int)
    measured, fitted = np.bincount(block, times.measured), np.bincount(block, times.fitted)
    return [
        float(one / other)
        for one, other in zip(measured, fitted, strict=True)
        if other > BLOCK / 20
    ]


def moved(blocks: Sequence[float], bracket: tuple[float, float]) -> bool:
    """Whether the machine's own speed changed, by AGREEMENT's gate: a block off by a tenth, or
    the brackets apart by a twentieth.
    """
    off = max(abs(block / float(np.mean(blocks)) - 1) for block in blocks)
    return off > BLOCK_DEVIATION or abs(bracket[1] / bracket[0] - 1) > BRACKET_DEVIATION
