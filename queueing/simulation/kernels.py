"""Compiled replays of the named policies on given arrivals and lengths: the sample paths of
`queueing.simulation.reference`, to the last bit.

Every instant is computed by the expressions of `queueing.latency.service.ServiceProcess` in their
order (no fast-math): step k of a stretch that began at t ends at t + first + (k - 1) rest. Events
at one instant come in the driver's order: completions (by server), arrivals, ends of patience, the
policy's timer. With one patience for all, requests are lost from the head of the queue, so the
queue is a range. Of calls of several requests `call_ends` says for each where its call ends: they
arrive together, and the policy is asked once; an empty one: one by one. Results are arrays indexed
by request, in order of arrival; a lost request has batch -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.signedinteger[Any]]


class Requests(NamedTuple):
    """In order of arrival; `call_ends` as above. A kernel unpacks a tuple before its loop: each
    access to an array in it counts references.
    """

    arrived_at: Floats
    output_tokens: Ints
    prompt_tokens: Ints
    call_ends: Ints


class Drawn(NamedTuple):
    """A row for each server: the residual of each batch, and the gaps between stalls in units of
    their mean; empty where the law has none.
    """

    residuals: Floats
    gaps: Floats


class Bounds(NamedTuple):
    """Of the servers and the policy: a batch waits until it has `wait_for` requests, the oldest
    `max_wait` seconds at most.
    """

    servers: int
    batch_size: int
    wait_for: int
    max_wait: float
    padded: bool


class BatchPath(NamedTuple):
    """Of each request its dispatch, of each batch the end of its first step, its end and its
    size.
    """

    dispatched_at: Floats
    first_token_at: Floats
    ended_at: Floats
    size: Ints


@njit(cache=True)
def accumulate(before, scale, gaps, out):  # type: ignore[no-untyped-def]
    """Instants from standard exponential gaps: the sums of `np.cumsum`; returns the last."""
    for i in range(len(gaps)):
        before += scale * gaps[i]
        out[i] = before
    return before


@njit(cache=True)
def invert(cdf, guide, uniforms, out):  # type: ignore[no-untyped-def]
    """The first n with cdf[n] > u for each u: `searchsorted(side="right")` from a guide table,
    in constant time.
    """
    size = len(guide)
    for i in range(len(uniforms)):
        u = uniforms[i]
        n = int(guide[int(u * size)])
        while cdf[n] <= u:
            n += 1
        out[i] = n


@njit(cache=True)
def build_guide(cdf, size):  # type: ignore[no-untyped-def]
    """guide[i] = the first n with cdf[n] > i / size: never beyond the answer for u in [i, i + 1)
    / size.
    """
    guide = np.empty(size, dtype=np.int32)
    n = 0
    for i in range(size):
        while cdf[n] <= i / size:
            n += 1
        guide[i] = n
    return guide


@njit(cache=True)
def stalled(seconds, law, gaps, clock):  # type: ignore[no-untyped-def]
    """What the stalls of the next lawful seconds take; `clock`: until the next one, and how many
    `gaps` were used (cyclic).
    """
    if not gaps.size:
        return 0.0
    if clock[1] == 0:
        clock[0], clock[1] = gaps[0], 1
    number = 0
    clock[0] -= law[6] / law[7] * seconds
    while clock[0] < 0:
        clock[0] += gaps[int(clock[1]) % gaps.size]
        clock[1] += 1
        number += 1
    return law[7] * number


@njit(cache=True)
def prompt_tokens(prompts, first, last, pad):  # type: ignore[no-untyped-def]
    """Of a batch, each as long as its longest one where they are padded."""
    total = longest = 0
    for i in range(first, last):
        total += prompts[i]
        longest = max(longest, prompts[i])
    return (last - first) * longest if pad > 0 else total


@njit(cache=True)
def serve_batch(  # type: ignore[no-untyped-def]
    start,
    first,
    last,
    lengths,
    prompts,
    law,
    residual,
    padded,
    first_token_at,
    released_at,
    scratch,
    gaps,
    clock,
):
    """Service of the requests first .. last - 1 from `start`; the instant at which the server is
    free.
    """
    k1, k2, k3, k4, kp, speed, share, _, pad = law
    pace = residual * (1 - share)
    size = last - first
    inputs = prompt_tokens(prompts, first, last, pad)
    step, setup = speed * (k3 * size + k4), speed * (k1 * size + k2 + kp * inputs)
    rest = pace * step
    first_end = start + (pace * setup + rest) + residual * stalled(setup + step, law, gaps, clock)
    for i in range(first, last):
        first_token_at[i] = first_end
        scratch[i - first] = lengths[i]
    if padded or size == 1:
        longest = 0
        for i in range(size):
            longest = max(longest, scratch[i])
        end = (
            first_end
            if longest == 1
            else first_end
            + (longest - 1) * rest
            + residual * stalled((longest - 1) * step, law, gaps, clock)
        )
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
        now = (
            first_end
            if steps == 1
            else first_end
            + (steps - 1) * rest
            + residual * stalled((steps - 1) * step, law, gaps, clock)
        )
        done = ordered[at]
        while at < size and ordered[at] == done:
            ends[at] = now
            at += 1
        if at == size:
            break
        step = speed * (k3 * (size - at) + k4)
        rest = pace * step
        first_end = (
            now
            + (pace * (speed * (k1 * 0 + kp * 0)) + rest)
            + residual * stalled(step, law, gaps, clock)
        )
    for i in range(first, last):
        released_at[i] = ends[np.searchsorted(ordered, lengths[i])]
    return now


@njit(cache=True)
def run_single(requests, law, drawn, path):  # type: ignore[no-untyped-def]
    """One server, one request at a time, endless patience: the recursion start = max(arrival,
    end of the one before).
    """
    arrived_at, lengths, prompts, _ = requests
    residuals, gaps = drawn
    starts, firsts, ends, _ = path
    k1, k2, k3, k4, kp, speed, share, _, _ = law
    clock = np.zeros(2)
    has_residual, has_prompt = residuals.shape[1] > 0, kp != 0
    free = -np.inf
    for i in range(len(arrived_at)):
        inputs = prompts[i] if has_prompt else 0
        residual = residuals[0, i] if has_residual else 1.0
        pace = residual * (1 - share)
        step, setup = speed * (k3 * 1 + k4), speed * (k1 * 1 + k2 + kp * inputs)
        rest = pace * step
        start = max(arrived_at[i], free)
        first_end = start + (pace * setup + rest)
        free = first_end + (lengths[i] - 1) * rest
        if share > 0:
            first_end += residual * stalled(setup + step, law, gaps[0], clock)
            free = (
                first_end
                + (lengths[i] - 1) * rest
                + residual * stalled((lengths[i] - 1) * step, law, gaps[0], clock)
            )
        starts[i] = start
        firsts[i] = first_end
        ends[i] = free


@njit(cache=True)
def run_padded(requests, law, drawn, bounds, path):  # type: ignore[no-untyped-def]
    """One server, padded batches, endless patience, no max_wait: from batch to batch instead of
    from event to event.

    Returns how many there were.
    """
    arrived_at, lengths, prompts, call_ends = requests
    residuals, gaps = drawn
    dispatched_at, firsts, ends, sizes = path
    _, size_bound, wait_for, _, _ = bounds
    n = len(arrived_at)
    k1, k2, k3, k4, kp, speed, share, _, pad = law
    has_residual, has_prompt, has_calls = residuals.shape[1] > 0, kp != 0, len(call_ends) > 0
    free, head, batches = -np.inf, 0, 0
    clock = np.zeros(2)
    while head < n:
        last, longest, start = head + 1, lengths[head], arrived_at[head]
        if wait_for > 1:
            last = min(head + wait_for, n)
            start = max(free, arrived_at[last - 1])
            for i in range(head + 1, last):
                longest = max(longest, lengths[i])
                dispatched_at[i] = start
        elif start >= free:  # an idle server
            room = min(call_ends[head], head + size_bound) if has_calls else last
            while last < room:
                longest = max(longest, lengths[last])
                dispatched_at[last] = start
                last += 1
        else:  # a completion comes before an arrival at the same instant
            start, room = free, min(n, head + size_bound)
            while last < room and arrived_at[last] < free:
                longest = max(longest, lengths[last])
                dispatched_at[last] = start
                last += 1
        dispatched_at[head] = start
        inputs = prompt_tokens(prompts, head, last, pad) if has_prompt else 0
        size = last - head
        residual = residuals[0, batches] if has_residual else 1.0
        pace = residual * (1 - share)
        step, setup = speed * (k3 * size + k4), speed * (k1 * size + k2 + kp * inputs)
        rest = pace * step
        first_end = start + (pace * setup + rest)
        free = first_end + (longest - 1) * rest
        if share > 0:
            first_end += residual * stalled(setup + step, law, gaps[0], clock)
            free = (
                first_end
                + (longest - 1) * rest
                + residual * stalled((longest - 1) * step, law, gaps[0], clock)
            )
        firsts[batches] = first_end
        ends[batches] = free
        sizes[batches] = size
        batches += 1
        head = last
    return batches


@njit(cache=True)
def spread(values, sizes, out):  # type: ignore[no-untyped-def]
    """`np.repeat(values, sizes)`, several times faster."""
    at = 0
    for j in range(len(sizes)):
        value = values[j]
        for _ in range(sizes[j]):
            out[at] = value
            at += 1


@njit(cache=True)
def run_batches(requests, deadlines, law, drawn, bounds):  # type: ignore[no-untyped-def]
    """Single, dynamic, capped, elastic (`wait_for` = 1) and fixed (`wait_for` = its size)."""
    arrived_at, lengths, prompts, call_ends = requests
    residuals, gaps = drawn
    servers, size_bound, wait_for, max_wait, padded = bounds
    n = len(arrived_at)
    dispatched_at, released_at, first_token_at = (
        np.full(n, np.nan),
        np.full(n, np.nan),
        np.full(n, np.nan),
    )
    free_at = np.full(n, np.nan)
    batch, sizes, server_of = (
        np.full(n, -1, dtype=np.int64),
        np.zeros(n, dtype=np.int32),
        np.full(n, -1, dtype=np.int32),
    )
    ends = np.full(servers, np.inf)  # of the batch in service; infinite where the server is empty
    busy = np.zeros(servers, dtype=np.bool_)
    drawn = np.zeros(servers, dtype=np.int64)
    clocks = np.zeros((servers, 2))
    scratch = np.empty(min(size_bound, n), dtype=np.int64)
    has_residual, has_calls = residuals.shape[1] > 0, len(call_ends) > 0
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
            tail = call_ends[tail] if has_calls else tail + 1
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
            given = law, residual, padded, first_token_at, released_at, scratch
            end = serve_batch(
                now, head, head + size, lengths, prompts, *given, gaps[free], clocks[free]
            )
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
