"""What a sender asks of the operating system: enough files, CPUs away from the engine's, real-time
scheduling while it sends, and signals that end a run but keep what it has.

On a machine that has other work, the gateway's too, an ordinary process that wakes up waits for its
turn, 3 ms and more: at 1,000 requests/s on two cores the requests of several senders then reach the
server neither when they should nor as a Poisson process. With the lowest real-time priority the
same senders are 0.02 ms late on average and 0.1 ms at p99. A sender sleeps between requests, so it
takes no more time than before; it takes it at once. Permitted to root, in containers with
CAP_SYS_NICE, and under `ulimit -r`; elsewhere nothing changes, and the run's header says which it
was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress

from kendall.loadgen.sending.client.target import LoadError
from kendall.queueing.measurement.machine import split_cpus

PRIORITY = 1  # the lowest of the real-time ones
SPARE = 64  # descriptors that the process needs for itself


@contextmanager
def real_time_scheduling() -> Iterator[bool]:
    """Real-time scheduling of this thread, not of its children, inside; whether it was
    permitted.
    """
    if sys.platform != "linux":
        yield False
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, parameter)


def real_time_permitted() -> bool:
    """Whether this user's senders get real-time scheduling."""
    with real_time_scheduling() as permitted:
        return permitted


def pin_to_gateway_cpus() -> None:
    """Keep off the engine's CPU: on 2 to 4 CPUs the gateway leaves it the last one, and so do
    we.
    """
    gateway_cpus, _ = split_cpus()
    if gateway_cpus:
        os.sched_setaffinity(0, gateway_cpus)


def raise_file_limit(streams: int | None = None) -> int:
    """Lift the soft limit on open files to the hard one; the number of streams that then fit, each
    with a file of its own.

    Raises LoadError where `streams` at once are known to be wanted and do not fit.
    """
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a system may promise more than it gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    fit = (1 << 20 if soft == resource.RLIM_INFINITY else soft) - SPARE
    if streams is not None and streams > fit:
        raise LoadError(
            f"got {streams} requests at once; this system gives a process {soft} files (ulimit "
            "-n): raise it or use --processes"
        )
    return fit


@contextmanager
def cancelled_by(*signals: signal.Signals) -> Iterator[None]:
    """Each of the signals cancels this task, which ends early and keeps what it has."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # not on Windows, not outside the main thread
    unavailable = (NotImplementedError, RuntimeError, ValueError)
    for number in signals:
        with suppress(*unavailable):
            loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in signals:
            with suppress(*unavailable):
                loop.remove_signal_handler(number)


async def undisturbed(work: Awaitable[object]) -> bool:
    """Wait for the end of `work`, which a cancellation of this task does not reach; whether there
    was one. For what ends a run: a second signal must not cost what the first one has kept.
    """
    task, current, disturbed = asyncio.ensure_future(work), asyncio.current_task(), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            disturbed = True
            assert current is not None
            current.uncancel()
    task.result()
    return disturbed
