"""Compiled sample paths on continuous lengths (queueing.simulation.kernels counts whole tokens)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.queueing.simulation.kernels import compiled


@compiled()
def single_server(gaps, services, patience):  # type: ignore[no-untyped-def]
    """Delay of each request, first come first served; infinite where it is lost because it would
    wait longer than `patience`.
    """
    delays = np.empty(len(gaps))
    work = 0.0
    for i in range(len(gaps)):
        work = max(0.0, work - gaps[i])
        if work > patience:
            delays[i] = np.inf
        else:
            delays[i] = work
            work += services[i]
    return delays


class BatchServer(NamedTuple):
    """Serves in k1 b + k2 + k3 sum(l) + k4 max(l) seconds, b max(l) for the sum where `padded`.

    `wait_for` = 1: dynamic; = bound: fixed batches (a rest at the end that fills no batch is left
    out).
    """

    k1: float
    k2: float
    k3: float
    k4: float
    bound: int
    wait_for: int
    padded: bool


@compiled()
def batch_server(arrived_at, lengths, mean_longest, server):  # type: ignore[no-untyped-def]
    """Dispatch and end of the batch of each request. `mean_longest[b]` stands for the longest of b
    drawn lengths, unless it is empty.
    """
    k1, k2, k3, k4, bound, wait_for, padded = server
    n = len(arrived_at)
    dispatched, ended, sizes = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n, dtype=np.int64)
    free, head = -np.inf, 0
    while head < n:
        last = head + wait_for
        if last > n:
            break
        start = max(free, arrived_at[last - 1])
        while last < n and last - head < bound and arrived_at[last] < start:
            last += 1
        b = last - head
        longest = total = 0.0
        for i in range(head, last):
            longest = max(longest, lengths[i])
            total += lengths[i]
        if len(mean_longest) > b:
            longest = mean_longest[b]
        if padded:
            total = b * longest
        free = start + k1 * b + k2 + k3 * total + k4 * longest
        for i in range(head, last):
            dispatched[i] = start
            ended[i] = free
            sizes[i] = b
        head = last
    return dispatched, ended, sizes
