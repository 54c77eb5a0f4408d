"""Whether requests wait for slots only, as the model has it, or for the engine's KV memory too.

enough_memory    of policies whose requests join running ones. A request waits from `lag` after its
                 arrival to its dispatch, and is in service until `lag` after its slot is free; lag
                 is twice the gateway's shortest delay, at least `LEAST_LAG`: the gateway's own work
                 is no wait for memory. Fails where for more than `NEGLIGIBLE` of the window a
                 request waited while fewer were in service than there are slots. Without a bound on
                 the slots each wait is one for memory.

Not judged: batches; an order that preempts, whose records do not say when each wait was; a window
in which nobody was served.
"""

from __future__ import annotations

import math

import numpy as np

from policies.core import Policy
from policies.ordered import order_of
from queueing.estimation.assumptions.assumption import Assumption
from queueing.estimation.change import Vector
from queueing.estimation.window.snapshot import Snapshot

NEGLIGIBLE = 0.02  # of the time
LEAST_LAG = 0.002  # seconds


def enough_memory(seen: Snapshot, policy: Policy, slots: int | None) -> Assumption:
    """`slots` of each server; None: no bound."""
    if not policy.joins_running or order_of(policy).preemptive:
        return Assumption("enough_memory", None, math.nan, "not judged: batches, or preemption")
    if not len(seen.rows) or not seen.now > seen.start:
        return Assumption("enough_memory", None, math.nan, "nobody was served")
    share = waits_beside_free_slots(seen, math.inf if slots is None else slots * seen.servers)
    if share <= NEGLIGIBLE:
        return Assumption("enough_memory", True, share, "requests wait for slots only")
    says = (
        f"for {share:.0%} of the time a request waited although a slot was free: prompts and token "
        "limits of those in service fill the KV memory"
    )
    return Assumption("enough_memory", False, share, says)


def waits_beside_free_slots(seen: Snapshot, slots: float) -> float:
    """The share of the window in which a request waited and not all slots were taken."""
    shortest = seen.shortest_delay if math.isfinite(seen.shortest_delay) else 0.0
    lag = max(LEAST_LAG, 2 * shortest)
    mine = seen.column("epoch") == seen.epoch
    arrived_at, begun_at, free_at = (
        seen.column(name)[mine] for name in ("arrived_at", "dispatched_at", "server_free_at")
    )
    waited = begun_at > arrived_at + lag
    running = np.array([at for at, _ in seen.in_service])
    changes = (
        (arrived_at[waited] + lag, 1, 0),
        (begun_at[waited], -1, 0),
        (begun_at, 0, 1),
        (np.where(np.isnan(free_at), begun_at, free_at) + lag, 0, -1),
        (running, 0, 1),
    )
    return _share(changes, (seen.start, seen.now), slots)


def _share(
    changes: tuple[tuple[Vector, int, int], ...], window: tuple[float, float], slots: float
) -> float:
    """Of the window, in which some wait and fewer than `slots` are in service."""
    times = np.clip(np.concatenate([at for at, _, _ in changes]), *window)
    waits, serves = (
        np.concatenate([np.full(len(change[0]), change[kind]) for change in changes])
        for kind in (1, 2)
    )
    order = np.argsort(times, kind="stable")
    waiting, serving = np.cumsum(waits[order]), np.cumsum(serves[order])
    seconds = np.diff(times[order], append=window[1])
    return float(seconds[(waiting > 0) & (serving < slots)].sum()) / (window[1] - window[0])
