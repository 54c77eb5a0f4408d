"""When Python looks for reference cycles: seldom, and never among what came up with the engine.

A full collection walks every object of the process, some hundred thousand once vLLM is imported, while the event loop stands
still. What exists when the gateway is ready lives as long as it does: it is collected once and then set aside.
"""

from __future__ import annotations

import gc

# allocations between collections of the young, collections of the young between those of the middle-aged, and so on; Python's
# own are 700, 10, 10: a few dozen requests
THRESHOLDS = (10_000, 20, 50)


def settle() -> None:
    """Once everything is up: later collections leave alone what is there now. Takes some tenths of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def collect_everything() -> None:
    """What was set aside too: an engine that was let go stands in cycles. May run in a thread."""
    gc.unfreeze()
    gc.collect()
