"""`kendall serve` as a child that ends with the process that started it, even where that one was
killed.

Where the system can say so (Linux), the death of the parent is a SIGTERM to the gateway: it lets
the engine go and does not stay behind to disturb the next measurement.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Ask for SIGTERM when the parent dies; exit now where it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    from kendall import cli

    end_with(int(sys.argv[1]))
    cli.main(sys.argv[2:])
