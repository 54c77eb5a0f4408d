"""Compiled replays of the named policies on given arrivals and lengths: the sample paths of
`queueing.simulation.reference`, to the last bit (with stalls to rounding, as long as the drawn gaps
between them last).

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

from kendall.policies.core import UNBOUNDED
from kendall.queueing.latency.slots.token_gaps import GapCounts, bin_of, no_gaps

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.signedinteger[Any]]


def compiled(**options: Any) -> Any:
    """`numba.njit`; the result is kept for the next process where a folder for it can be written
    (NUMBA_CACHE_DIR, beside the module, the user's cache). Other threads go on meanwhile.
    """
    options["nogil"] = True

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)

    return decorate


# Numba counts references to each array in a tuple that is passed on or unpacked: in a loop, more
# work than the loop's own. What is compiled so counts none, and may allocate nothing.
inner = compiled(_nrt=False, forceinline=True)
_bin_of = inner(bin_of)


REJECTED = -2  # in place of the number of a batch


class Requests(NamedTuple):
    """In order of arrival; `call_ends` as above, `deadlines` empty for endless patience."""

    arrived_at: Floats
    output_tokens: Ints
    prompt_tokens: Ints
    call_ends: Ints
    deadlines: Floats


class Drawn(NamedTuple):
    """A row for each server: the residual of each batch, and the gaps between stalls in units of
    their mean, empty where the law has none; how long until the next stall, and how many gaps were
    used.
    """

    residuals: Floats
    gaps: Floats
    clocks: Floats


class Bounds(NamedTuple):
    """Of the servers and the policy: a batch waits until it has `wait_for` requests, the oldest
    `max_wait` seconds at most; of several requests it has `prompt_tokens` at most.
    """

    servers: int
    batch_size: int
    wait_for: int
    max_wait: float
    padded: bool
    prompt_tokens: int = UNBOUNDED


class BatchPath(NamedTuple):
    """Of each request its dispatch, of each batch the end of its first step, its end and its
    size.
    """

    dispatched_at: Floats
    first_token_at: Floats
    ended_at: Floats
    size: Ints


class RequestPath(NamedTuple):
    """Of each request: nan, or batch and server -1, where it was lost (rejected: batch -2)."""

    dispatched_at: Floats
    released_at: Floats
    first_token_at: Floats
    server_free_at: Floats
    batch_id: Ints
    batch_size: Ints
    server_id: Ints


class Servers(NamedTuple):
    """Of each server: the end of the batch in service (infinite where there is none), whether it is
    busy, the residuals it has used, the factor on its times; room to sort the lengths of a batch;
    the gaps between tokens of all.
    """

    ends: Floats
    busy: npt.NDArray[np.bool_]
    used: Ints
    paces: Floats
    ordered: Ints
    ordered_ends: Floats
    gaps: GapCounts


def new_servers(paces: Floats, largest: int, since: int = 0) -> Servers:
    """All idle, for batches of at most `largest`; gaps count from request `since` on."""
    count = len(paces)
    return Servers(
        np.full(count, np.inf),
        np.zeros(count, dtype=np.bool_),
        np.zeros(count, dtype=np.int64),
        paces,
        np.empty(largest, dtype=np.int64),
        np.empty(largest),
        no_gaps(since),
    )


def new_path(count: int) -> RequestPath:
    """Of requests that were not served yet."""
    dispatched_at, released_at, first_token_at, free_at = np.full((4, count), np.nan)
    return RequestPath(
        dispatched_at,
        released_at,
        first_token_at,
        free_at,
        np.full(count, -1, dtype=np.int64),
        np.zeros(count, dtype=np.int32),
        np.full(count, -1, dtype=np.int32),
    )


@compiled()
def accumulate(before, scale, gaps, out):  # type: ignore[no-untyped-def]
    """Instants from standard exponential gaps: the sums of `np.cumsum`; returns the last."""
    for i in range(len(gaps)):
        before += scale * gaps[i]
        out[i] = before
    return before


@compiled()
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


@compiled()
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


@inner
def stalled(seconds, law, gaps, clock):  # type: ignore[no-untyped-def]
    """What the stalls of the next lawful seconds take; `gaps` are used again once all were."""
    if clock[1] == 0:
        clock[0], clock[1] = gaps[0], 1
    number = 0
    clock[0] -= law[6] / law[7] * seconds
    while clock[0] < 0:
        clock[0] += gaps[int(clock[1]) % gaps.size]
        clock[1] += 1
        number += 1
    return law[7] * number


@inner
def inputs_of(prompts, members, law):  # type: ignore[no-untyped-def]
    """Prompt tokens of a batch, each as long as its longest one where they are padded."""
    first, last = members
    if law[4] == 0:
        return 0
    total = longest = 0
    for i in range(first, last):
        total += prompts[i]
        longest = max(longest, prompts[i])
    return (last - first) * longest if law[8] > 0 else total


@inner
def first_step(start, size, inputs, law, chance):  # type: ignore[no-untyped-def]
    """End of the first step of a batch; what each other one takes, as it is and by the law."""
    k1, k2, k3, k4, kp, speed, share, _, _ = law
    residual, gaps, clock = chance
    pace = residual * (1 - share)
    step, setup = speed * (k3 * size + k4), speed * (k1 * size + k2 + kp * inputs)
    rest = pace * step
    end = start + (pace * setup + rest)
    if share > 0:
        end += residual * stalled(setup + step, law, gaps, clock)
    return end, rest, step


@inner
def last_step(first_end, steps, rest, step, law, chance):  # type: ignore[no-untyped-def]
    """End of the last of these steps, the first of which ends at `first_end`."""
    end = first_end + (steps - 1) * rest
    if law[6] > 0:
        residual, gaps, clock = chance
        end += residual * stalled((steps - 1) * step, law, gaps, clock)
    return end


@compiled(_nrt=True)
def sort(values):  # type: ignore[no-untyped-def]
    values.sort()


@inner
def sort_lengths(members, lengths, ordered):  # type: ignore[no-untyped-def]
    """Put the lengths of a batch into `ordered`, ascending."""
    first, last = members
    size = last - first
    if size > 24:
        for i in range(size):
            ordered[i] = lengths[first + i]
        sort(ordered[:size])
        return
    for i in range(size):
        value, k = lengths[first + i], i
        while k > 0 and ordered[k - 1] > value:
            ordered[k] = ordered[k - 1]
            k -= 1
        ordered[k] = value


@inner
def count_gaps(gaps, seconds, times):  # type: ignore[no-untyped-def]
    """So many gaps of so many seconds."""
    if times > 0:
        place = _bin_of(seconds)
        gaps[0][place] += times
        gaps[1][place] = max(gaps[1][place], seconds)


@inner
def make_steps(stretch, steps, law, chance, counting):  # type: ignore[no-untyped-def]
    """End of the last of the first steps of a stretch, which is what `first_step` returns; counts
    the gaps after the first one, for so many members. No two stalls are in one step.
    """
    (first_end, rest, step), (counts, members) = stretch, counting
    end, stalled = last_step(first_end, steps, rest, step, law, chance), 0
    stall = chance[0] * law[7] if law[6] > 0 else 0.0
    if stall > 0:
        over = end - (first_end + (steps - 1) * rest)
        stalled = min(steps - 1, int(over / stall + 0.5))
        count_gaps(counts, rest + stall, members * stalled)
    count_gaps(counts, rest, members * (steps - 1 - stalled))
    return end


@inner
def release_one_by_one(started, members, lengths, law, chance, out):  # type: ignore[no-untyped-def]
    """Members leave at their last token; the instant at which the last one does. `started`: what
    `first_step` returned.
    """
    _, _, k3, k4, _, speed, share, _, _ = law
    residual, gaps, clock = chance
    released_at, ordered, ends, counts, counted = out
    first, last = members
    sort_lengths(members, lengths, ordered)
    size = last - first
    (first_end, rest, step), now, done, at = started, 0.0, 0, 0
    while at < size:
        counting = counts, (size - at) * counted
        if done > 0:
            count_gaps(counts, first_end - now, counting[1])
        now = make_steps((first_end, rest, step), ordered[at] - done, law, chance, counting)
        done = ordered[at]
        while at < size and ordered[at] == done:
            ends[at] = now
            at += 1
        step = speed * (k3 * (size - at) + k4)
        rest = residual * (1 - share) * step
        first_end = now + rest
        if share > 0 and at < size:
            first_end += residual * stalled(step, law, gaps, clock)
    for i in range(first, last):
        released_at[i] = ends[np.searchsorted(ordered[:size], lengths[i])]
    return now


@inner
def at_pace(law, pace):  # type: ignore[no-untyped-def]
    """The law of a server whose times are so many times as long."""
    k1, k2, k3, k4, kp, speed, share, stall, pads = law
    return k1, k2, k3, k4, kp, speed * pace, share, stall, pads


@inner
def serve_batch(start, members, requests, law, chance, out):  # type: ignore[no-untyped-def]
    """Service of the requests members[0] .. members[1] - 1 from `start`; the instant at which the
    server is free.
    """
    (padded, first_token_at, released_at, ordered, ends, gaps, counted), (first, last) = (
        out,
        members,
    )
    lengths, inputs = requests[1], inputs_of(requests[2], members, law)
    started = first_step(start, last - first, inputs, law, chance)
    longest = 0
    for i in range(first, last):
        first_token_at[i] = started[0]
        longest = max(longest, lengths[i])
    if not padded and last - first > 1:
        room = released_at, ordered, ends, gaps, counted
        return release_one_by_one(started, members, lengths, law, chance, room)
    end = make_steps(started, longest, law, chance, (gaps, counted and not padded))
    for i in range(first, last):
        released_at[i] = end
    return end


@inner
def run_single(requests, law, drawn, path):  # type: ignore[no-untyped-def]
    """One server, one request at a time, endless patience: the recursion start = max(arrival,
    end of the one before).
    """
    arrived_at, lengths, prompts, _, _ = requests
    (residuals, gaps, clocks), (starts, firsts, ends, _) = drawn, path
    has_residual, has_prompt = residuals.shape[1] > 0, law[4] != 0
    free = -np.inf
    for i in range(len(arrived_at)):
        chance = (residuals[0, i] if has_residual else 1.0), gaps[0], clocks[0]
        start = max(arrived_at[i], free)
        first, rest, step = first_step(start, 1, prompts[i] if has_prompt else 0, law, chance)
        free = last_step(first, lengths[i], rest, step, law, chance)
        starts[i] = start
        firsts[i] = first
        ends[i] = free


@inner
def cut(first, last, requests, bounds):  # type: ignore[no-untyped-def]
    """One behind the last of these whose prompts the engine takes together with the first."""
    if bounds.prompt_tokens == UNBOUNDED or last <= first:
        return last
    total = requests.prompt_tokens[first]
    for i in range(first + 1, last):
        total += requests.prompt_tokens[i]
        if total > bounds.prompt_tokens:
            return i
    return last


@inner
def next_padded(head, free, requests, bounds, dispatched_at):  # type: ignore[no-untyped-def]
    """The next batch of one server: one behind its last member, its longest output, its start."""
    arrived_at, lengths, _, call_ends, _ = requests
    size_bound, wait_for = bounds.batch_size, bounds.wait_for
    n = len(arrived_at)
    last, longest, start = head + 1, lengths[head], arrived_at[head]
    if wait_for > 1:
        wanted = min(head + wait_for, n)
        last = cut(head, wanted, requests, bounds)
        start = max(free, arrived_at[min(last, wanted - 1)])  # full, or the next one has no room
        for i in range(head + 1, last):
            longest = max(longest, lengths[i])
            dispatched_at[i] = start
    elif start >= free:  # an idle server
        room = min(call_ends[head], head + size_bound) if len(call_ends) > 0 else last
        room = cut(head, room, requests, bounds)
        while last < room:
            longest = max(longest, lengths[last])
            dispatched_at[last] = start
            last += 1
    else:  # a completion comes before an arrival at the same instant
        start, room, total = free, min(n, head + size_bound), requests.prompt_tokens[head]
        while last < room and arrived_at[last] < free:
            total += requests.prompt_tokens[last]
            if total > bounds.prompt_tokens:
                break
            longest = max(longest, lengths[last])
            dispatched_at[last] = start
            last += 1
    dispatched_at[head] = start
    return last, longest, start


@inner
def run_padded(requests, law, drawn, bounds, path):  # type: ignore[no-untyped-def]
    """One server, padded batches, endless patience, no max_wait: from batch to batch instead of
    from event to event.

    Returns how many there were.
    """
    prompts, n = requests[2], len(requests[0])
    (residuals, gaps, clocks), (dispatched_at, firsts, ends, sizes) = drawn, path
    has_residual = residuals.shape[1] > 0
    free, head, batches = -np.inf, 0, 0
    while head < n:
        last, longest, start = next_padded(head, free, requests, bounds, dispatched_at)
        chance = (residuals[0, batches] if has_residual else 1.0), gaps[0], clocks[0]
        inputs = inputs_of(prompts, (head, last), law)
        first, rest, step = first_step(start, last - head, inputs, law, chance)
        free = last_step(first, longest, rest, step, law, chance)
        firsts[batches] = first
        ends[batches] = free
        sizes[batches] = last - head
        batches += 1
        head = last
    return batches


@compiled()
def spread(values, sizes, out):  # type: ignore[no-untyped-def]
    """`np.repeat(values, sizes)`, several times faster."""
    at = 0
    for j in range(len(sizes)):
        value = values[j]
        for _ in range(sizes[j]):
            out[at] = value
            at += 1


def run_batches(
    requests: Requests, law: tuple[float, ...], drawn: Drawn, bounds: Bounds, servers: Servers
) -> RequestPath:
    """Single, dynamic, capped, elastic (`wait_for` = 1) and fixed (`wait_for` = its size). The
    `servers`: idle ones.
    """
    path = new_path(len(requests.arrived_at))
    _run_batches(requests, law, drawn, bounds, servers, path)
    return path


@inner
def earliest(instants):  # type: ignore[no-untyped-def]
    """Where the least is, the first of equal ones."""
    first = 0
    for s in range(1, len(instants)):
        if instants[s] < instants[first]:
            first = s
    return first


@inner
def idle(busy):  # type: ignore[no-untyped-def]
    """The first idle server, or -1."""
    for s in range(len(busy)):
        if not busy[s]:
            return s
    return -1


@inner
def _run_batches(requests, law, drawn, bounds, servers, path):  # type: ignore[no-untyped-def]
    arrived_at, _, _, call_ends, deadlines = requests
    size_bound, wait_for, max_wait = bounds.batch_size, bounds.wait_for, bounds.max_wait
    ends, busy = servers[0], servers[1]
    n, timer = len(arrived_at), np.inf
    head = tail = batches = 0
    while True:
        engine = earliest(ends)
        arrival = arrived_at[tail] if tail < n else np.inf
        lost = deadlines[head] if head < tail and len(deadlines) > 0 else np.inf
        now = min(ends[engine], arrival, lost, timer)
        if now == np.inf:
            return
        if ends[engine] == now:
            ends[engine] = np.inf
            busy[engine] = False
        elif arrival == now:
            tail = call_ends[tail] if len(call_ends) > 0 else tail + 1
        elif lost == now:
            head += 1
        timer = np.inf
        while head < tail:
            free = idle(busy)
            if free < 0:
                break
            size = min(tail - head, size_bound)
            fits = cut(head, head + size, requests, bounds) - head
            full = size >= wait_for or fits < size
            if not full and tail < n and now < arrived_at[head] + max_wait:
                timer = arrived_at[head] + max_wait
                break
            size = fits
            place = free, batches, bounds.padded
            _start_batch(now, (head, head + size), place, requests, (law, drawn, servers), path)
            batches += 1
            head += size


@inner
def _start_batch(now, members, place, requests, engine, path):  # type: ignore[no-untyped-def]
    (free, number, padded), (first, last) = place, members
    law, (residuals, stalls, clocks), servers = engine
    ends, busy, used, paces, ordered, ordered_ends, gaps = servers
    dispatched_at, released_at, first_token_at, free_at, batch, sizes, server_of = path
    residual = 1.0
    if residuals.shape[1] > 0:
        residual = residuals[free, used[free]]
        used[free] += 1
    chance = residual, stalls[free], clocks[free]
    out = padded, first_token_at, released_at, ordered, ordered_ends, gaps, first >= gaps[2]
    end = serve_batch(now, members, requests, at_pace(law, paces[free]), chance, out)
    for i in range(first, last):
        dispatched_at[i] = now
        batch[i] = number
        sizes[i] = last - first
        server_of[i] = free
        free_at[i] = end
    ends[free] = end
    busy[free] = True
