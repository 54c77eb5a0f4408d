"""The compiled replay of continuous batching (see queueing.simulation.kernels): c slots per server,
step by step as `ServiceProcess` goes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(cache=True)
def _instant(first_end, rest, step):  # type: ignore[no-untyped-def]
    return first_end if step == 1 or first_end == np.inf else first_end + (step - 1) * rest


@njit(cache=True)
def _step_at_or_after(at, first_end, rest):  # type: ignore[no-untyped-def]
    step = max(1, math.ceil((at - first_end) / rest) + 1)
    while step > 1 and _instant(first_end, rest, step - 1) >= at:
        step -= 1
    while _instant(first_end, rest, step) < at:
        step += 1
    return step


@njit(cache=True)
def _open(s, real, whole, active, pending, entry, prompts, law):  # type: ignore[no-untyped-def]
    """Begin a new stretch where the composition changed or someone may enter now
    (ServiceProcess._open).
    """
    k1, _k2, k3, k4, kp, speed = law
    now = real[s, 0]
    if whole[s, 0] == 0:
        real[s, 2] = real[s, 3] = np.inf
        if whole[s, 1] == 0:
            return
        earliest = np.inf
        for i in range(whole[s, 1]):
            earliest = min(earliest, entry[s, i])
        at = max(now, earliest)
    else:
        due = whole[s, 4] == 1
        for i in range(whole[s, 1]):
            due = due or entry[s, i] <= now
        if not due:
            return
        at = now
    if at > real[s, 1]:
        real[s, 1] = at
        whole[s, 2] = whole[s, 3] = 0
    kept = 0
    for i in range(whole[s, 1]):
        if entry[s, i] <= at:
            active[s, whole[s, 0]] = pending[s, i]
            whole[s, 0] += 1
            whole[s, 2] += 1
            whole[s, 3] += prompts[pending[s, i]]
        else:
            pending[s, kept] = pending[s, i]
            entry[s, kept] = entry[s, i]
            kept += 1
    whole[s, 1] = kept
    real[s, 3] = 1.0 * (speed * (k3 * whole[s, 0] + k4))
    real[s, 2] = at + (1.0 * (speed * (k1 * whole[s, 2] + kp * whole[s, 3])) + real[s, 3])
    whole[s, 4] = whole[s, 5] = 0


@njit(cache=True)
def _target(s, real, whole, active, entry, left):  # type: ignore[no-untyped-def]
    """The step of the next end or entry."""
    least = -1
    for i in range(whole[s, 0]):
        remaining = left[active[s, i]]
        if least < 0 or remaining < least:
            least = remaining
    steps = whole[s, 5]
    if least < 0:
        return steps + 1
    steps += least
    for i in range(whole[s, 1]):
        steps = min(steps, _step_at_or_after(entry[s, i], real[s, 2], real[s, 3]))
    return max(steps, whole[s, 5] + 1)


@njit(cache=True)
def run_slots(requests, deadlines, law, turnaround, bounds):  # type: ignore[no-untyped-def]
    """Continuous batching, `bounds.batch_size` in service per server."""
    arrived_at, lengths, prompts, call_ends = requests
    servers, slots, _, _, _ = bounds
    n = len(arrived_at)
    dispatched_at, released_at, first_token_at = (
        np.full(n, np.nan),
        np.full(n, np.nan),
        np.full(n, np.nan),
    )
    batch, sizes, server_of = (
        np.full(n, -1, dtype=np.int64),
        np.zeros(n, dtype=np.int32),
        np.full(n, -1, dtype=np.int32),
    )
    left = lengths.copy()
    real = np.full(
        (servers, 4), -np.inf
    )  # end of the last step, start of the stretch, end of its first step, its other steps
    real[:, 2:] = np.inf
    whole = np.zeros(
        (servers, 6), dtype=np.int64
    )  # active, pending, entered, their prompts, changed, steps done
    whole[:, 4] = 1
    active, pending = (
        np.zeros((servers, slots), dtype=np.int64),
        np.zeros((servers, slots), dtype=np.int64),
    )
    entry = np.zeros((servers, slots))
    in_service = np.zeros(servers, dtype=np.int64)
    changes_at = np.full(servers, np.inf)
    delay = turnaround * law[5]
    has_calls = len(call_ends) > 0
    head = tail = batches = 0
    while True:
        engine = 0
        for s in range(1, servers):
            if changes_at[s] < changes_at[engine]:
                engine = s
        arrival = arrived_at[tail] if tail < n else np.inf
        lost = deadlines[head] if head < tail else np.inf
        now = min(changes_at[engine], arrival, lost)
        if now == np.inf:
            break
        leaving = 0
        completed = changes_at[engine] == now
        if completed:
            leaving = _advance(
                engine,
                real,
                whole,
                active,
                pending,
                entry,
                left,
                lengths,
                prompts,
                law,
                first_token_at,
                released_at,
            )
        elif arrival == now:
            tail = call_ends[tail] if has_calls else tail + 1
        else:
            head += 1
        while True:  # the policy is asked after each departure, and once more after the event
            if leaving > 0:
                in_service[engine] -= 1
                leaving -= 1
            elif completed:
                completed = False
                if whole[engine, 0] + whole[engine, 1] == 0:
                    changes_at[engine] = np.inf
                else:
                    _open(engine, real, whole, active, pending, entry, prompts, law)
                    changes_at[engine] = _instant(
                        real[engine, 2],
                        real[engine, 3],
                        _target(engine, real, whole, active, entry, left),
                    )
            while head < tail:
                best = 0
                for s in range(1, servers):
                    if in_service[s] < in_service[best]:
                        best = s
                size = min(slots - in_service[best], tail - head)
                if size <= 0:
                    break
                for i in range(head, head + size):
                    dispatched_at[i] = now
                    batch[i] = batches
                    sizes[i] = size + in_service[best]
                    server_of[i] = best
                    pending[best, whole[best, 1]] = i
                    entry[best, whole[best, 1]] = now + delay
                    whole[best, 1] += 1
                in_service[best] += size
                batches += 1
                head += size
                _open(best, real, whole, active, pending, entry, prompts, law)
                changes_at[best] = _instant(
                    real[best, 2], real[best, 3], _target(best, real, whole, active, entry, left)
                )
            if leaving == 0 and not completed:
                break
    return dispatched_at, released_at, first_token_at, released_at.copy(), batch, sizes, server_of


@njit(cache=True)
def _advance(  # type: ignore[no-untyped-def]
    s, real, whole, active, pending, entry, left, lengths, prompts, law, first_token_at, released_at
):
    """Complete the steps up to the next change; how many ended."""
    _open(s, real, whole, active, pending, entry, prompts, law)
    done = whole[s, 5]
    steps = _target(s, real, whole, active, entry, left) - done
    whole[s, 5] = done + steps
    now = _instant(real[s, 2], real[s, 3], done + steps)
    real[s, 0] = now
    kept = ended = 0
    for i in range(whole[s, 0]):
        member = active[s, i]
        if left[member] == lengths[member]:
            first_token_at[member] = _instant(real[s, 2], real[s, 3], done + 1)
        left[member] -= steps
        if left[member] <= 0:
            released_at[member] = now
            ended += 1
        else:
            active[s, kept] = member
            kept += 1
    whole[s, 0] = kept
    if ended:
        whole[s, 4] = 1
    return ended
