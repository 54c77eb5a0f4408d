"""File descriptors: one per stream under way, and systems give a process few of them unless it
asks.
"""

from __future__ import annotations

from contextlib import suppress

from loadgen.sending.client.target import LoadError

SPARE = 64  # descriptors that the process needs for itself


def raise_file_limit(streams: int | None = None) -> int:
    """Lift the soft limit to the hard one; the number of streams that then fit.

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
