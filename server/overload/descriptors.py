"""Files that the process may have open: each connection takes two (`server.receiving`), and the usual soft limit of 1024 is soon met."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("kendall")
ENOUGH = 65536  # more is not asked for: some programs walk through every number below their limit


def raise_descriptor_limit() -> None:
    """The soft limit up to the hard one, where the system permits it."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("cannot raise the limit on open files above %d (%s): enough for %d connections", soft, error, soft // 2)
