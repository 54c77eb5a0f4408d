"""Compiled replays of the named policies on given arrivals and lengths: the sample paths of `queueing.simulation`, to the last bit.

Every instant is computed by the expressions of `queueing.service.ServiceProcess` in their order (no fast-math): step k of a stretch that
began at t ends at t + first + (k - 1) rest. Events at one instant come in the driver's order: completions (by server), arrivals, ends of
patience, the policy's timer. With one patience for all, requests are lost from the head of the queue, so the queue is a range.
Results are arrays indexed by request, in order of arrival; a lost request has batch -1.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def invert(cdf, guide, uniforms):  # type: ignore[no-untyped-def]
    """The first n with cdf[n] > u for each u: `searchsorted(side="right")` from a guide table, in constant time."""
    counts = np.empty(len(uniforms), dtype=np.int64)
    size = len(guide)
    for i in range(len(uniforms)):
        u = uniforms[i]
        n = guide[int(u * size)]
        while cdf[n] <= u:
            n += 1
        counts[i] = n
    return counts


@njit(cache=True)
def build_guide(cdf, size):  # type: ignore[no-untyped-def]
    """guide[i] = the first n with cdf[n] > i / size: never beyond the answer for u in [i, i + 1) / size."""
    guide = np.empty(size, dtype=np.int64)
    n = 0
    for i in range(size):
        while cdf[n] <= i / size:
            n += 1
        guide[i] = n
    return guide


@njit(cache=True)
def serve_batch(start, first, last, lengths, prompts, law, residual, padded, first_token_at, released_at, scratch):  # type: ignore[no-untyped-def]
    """Service of the requests first .. last - 1 from `start`; the instant at which the server is free."""
    k1, k2, k3, k4, kp, speed = law
    size = last - first
    inputs = 0
    for i in range(first, last):
        inputs += prompts[i]
    rest = residual * (speed * (k3 * size + k4))
    first_end = start + (residual * (speed * (k1 * size + k2 + kp * inputs)) + rest)
    for i in range(first, last):
        first_token_at[i] = first_end
        scratch[i - first] = lengths[i]
    if padded or size == 1:
        longest = 0
        for i in range(size):
            longest = max(longest, scratch[i])
        end = first_end if longest == 1 else first_end + (longest - 1) * rest
        for i in range(first, last):
            released_at[i] = end
        return end
    ordered = scratch[:size]
    if size > 24:
        ordered = np.sort(ordered)
    else:
        for i in range(1, size):
            value, k = ordered[i], i
            while k > 0 and ordered[k - 1] > value:
                ordered[k] = ordered[k - 1]
                k -= 1
            ordered[k] = value
    ends = np.empty(size)
    now, done, at = first_end, 0, 0
    while at < size:
        steps = ordered[at] - done
        now = first_end if steps == 1 else first_end + (steps - 1) * rest
        done = ordered[at]
        while at < size and ordered[at] == done:
            ends[at] = now
            at += 1
        rest = residual * (speed * (k3 * (size - at) + k4))
        first_end = now + (residual * (speed * (k1 * 0 + kp * 0)) + rest)
    for i in range(first, last):
        released_at[i] = ends[np.searchsorted(ordered, lengths[i])]
    return now


@njit(cache=True)
def run_one_server(arrived_at, lengths, prompts, law, residuals, size_bound, batch_size, padded):  # type: ignore[no-untyped-def]
    """`run_batches` for one server, endless patience and no max_wait, from batch to batch instead of from event to event."""
    n = len(arrived_at)
    dispatched_at, released_at, first_token_at, free_at = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    batch, sizes, server_of = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    scratch = np.empty(min(size_bound, n), dtype=np.int64)
    has_residual = residuals.shape[1] > 0
    k1, k2, k3, k4, kp, speed = law
    free, head, batches = -np.inf, 0, 0
    while head < n:
        last = head + 1
        if batch_size > 1:
            last = min(head + batch_size, n)
            start = max(free, arrived_at[last - 1])
        elif arrived_at[head] >= free:  # a completion comes before an arrival at the same instant
            start = arrived_at[head]
        else:
            start = free
            while last < n and last - head < size_bound and arrived_at[last] < free:
                last += 1
        residual = residuals[0, batches] if has_residual else 1.0
        if last - head == 1:  # as serve_batch does it, without the call
            rest = residual * (speed * (k3 * 1 + k4))
            free = start + (residual * (speed * (k1 * 1 + k2 + kp * prompts[head])) + rest)
            first_token_at[head] = free
            if lengths[head] > 1:
                free += (lengths[head] - 1) * rest
            released_at[head] = free
        else:
            free = serve_batch(start, head, last, lengths, prompts, law, residual, padded, first_token_at, released_at, scratch)
        for i in range(head, last):
            dispatched_at[i] = start
            batch[i] = batches
            sizes[i] = last - head
            free_at[i] = free
        batches += 1
        head = last
    return dispatched_at, released_at, first_token_at, free_at, batch, sizes, server_of


@njit(cache=True)
def run_batches(arrived_at, lengths, prompts, deadlines, law, residuals, servers, size_bound, wait_for, max_wait, padded):  # type: ignore[no-untyped-def]
    """Single, dynamic, capped, elastic (`wait_for` = 1) and fixed (`wait_for` = its size)."""
    n = len(arrived_at)
    dispatched_at, released_at, first_token_at = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    free_at = np.full(n, np.nan)
    batch, sizes, server_of = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int32), np.full(n, -1, dtype=np.int32)
    ends = np.full(servers, np.inf)  # of the batch in service; infinite where the server is empty
    busy = np.zeros(servers, dtype=np.bool_)
    drawn = np.zeros(servers, dtype=np.int64)
    scratch = np.empty(min(size_bound, n), dtype=np.int64)
    has_residual = residuals.shape[1] > 0
    head = tail = batches = 0
    timer = np.inf
    while True:
        engine = 0
        for s in range(1, servers):
            if ends[s] < ends[engine]:
                engine = s
        arrival = arrived_at[tail] if tail < n else np.inf
        lost = deadlines[head] if head < tail else np.inf
        now = min(ends[engine], arrival, lost, timer)
        if now == np.inf:
            break
        if ends[engine] == now:
            ends[engine] = np.inf
            busy[engine] = False
        elif arrival == now:
            tail += 1
        elif lost == now:
            head += 1
        while True:
            timer = np.inf
            free = -1
            for s in range(servers):
                if not busy[s]:
                    free = s
                    break
            if free < 0 or head == tail:
                break
            size = min(tail - head, size_bound)
            if size < wait_for and tail < n and now < arrived_at[head] + max_wait:
                timer = arrived_at[head] + max_wait
                break
            residual = 1.0
            if has_residual:
                residual = residuals[free, drawn[free]]
                drawn[free] += 1
            end = serve_batch(now, head, head + size, lengths, prompts, law, residual, padded, first_token_at, released_at, scratch)
            for i in range(head, head + size):
                dispatched_at[i] = now
                batch[i] = batches
                sizes[i] = size
                server_of[i] = free
                free_at[i] = end
            ends[free] = end
            busy[free] = True
            batches += 1
            head += size
    return dispatched_at, released_at, first_token_at, free_at, batch, sizes, server_of
