"""Compiled sample paths of one server under ranks (queueing.models.soap.ranks): a heap of the jobs
that wait, ranks that change with the age of the job in service only.

Every order but equal ages that share the server. Where the rank of the job in service rises, it is
interrupted once it exceeds the best waiting one by `slack`.
"""

from __future__ import annotations

import numpy as np

from kendall.queueing.simulation.kernels import compiled, inner


@inner
def before(level, value, turn, other_level, other_value, other_turn):  # type: ignore[no-untyped-def]
    """Whether the first rank goes first."""
    if level != other_level:
        return level < other_level
    if value != other_value:
        return value < other_value
    return turn < other_turn


@inner
def move(heap, origin, place):  # type: ignore[no-untyped-def]
    """Copy a row."""
    for column in range(4):
        heap[place, column] = heap[origin, column]


@inner
def push(heap, count, rank, job):  # type: ignore[no-untyped-def]
    """Put (level, value, turn) of `job` into the heap of `count` rows [level, value, turn, job]."""
    level, value, turn = rank
    place = count
    while place > 0:
        parent = (place - 1) >> 1
        if not before(level, value, turn, heap[parent, 0], heap[parent, 1], heap[parent, 2]):
            break
        move(heap, parent, place)
        place = parent
    heap[place, 0] = level
    heap[place, 1] = value
    heap[place, 2] = turn
    heap[place, 3] = job


@inner
def pop(heap, count):  # type: ignore[no-untyped-def]
    """Take the first out of a heap of `count` rows: its job."""
    first, last = int(heap[0, 3]), count - 1
    level, value, turn, job = heap[last, 0], heap[last, 1], heap[last, 2], heap[last, 3]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            break
        other = child + 1
        if other < last and before(
            heap[other, 0], heap[other, 1], heap[other, 2],
            heap[child, 0], heap[child, 1], heap[child, 2],
        ):  # fmt: skip
            child = other
        if not before(heap[child, 0], heap[child, 1], heap[child, 2], level, value, turn):
            break
        move(heap, child, place)
        place = child
    heap[place, 0] = level
    heap[place, 1] = value
    heap[place, 2] = turn
    heap[place, 3] = job
    return first


@compiled()
def piece_at(start, job, piece, age):  # type: ignore[no-untyped-def]
    """The piece of a job in service at this age."""
    while piece + 1 < start.shape[1] and start[job, piece + 1] <= age:
        piece += 1
    return piece


@compiled()
def turn_of(level, job, last_come):  # type: ignore[no-untyped-def]
    """Among equal ranks: order of arrival, in the class `last_come` the other way round."""
    return -job if level == last_come else job


@compiled()
def overtaken_at(ranks, job, piece, age, top):  # type: ignore[no-untyped-def]
    """The first age at which the rank `top` = (level, value, turn) goes before that of the job in
    service; infinite if none.
    """
    start, level, value, slope, last_come, slack = ranks
    while piece < start.shape[1] and start[job, piece] < np.inf:
        begin = max(age, start[job, piece])
        own_level, rise = level[job, piece], slope[job, piece]
        own = value[job, piece] + rise * (begin - start[job, piece])
        turn = turn_of(own_level, job, last_come)
        margin = slack if rise > 0 else 0.0
        if before(top[0], top[1], top[2], own_level, own - margin, turn):
            return begin
        if rise > 0 and own_level == top[0]:
            crossing = begin + (top[1] + slack - own) / rise
            end = start[job, piece + 1] if piece + 1 < start.shape[1] else np.inf
            if crossing < end:
                return crossing
        piece += 1
    return np.inf


@compiled()
def rank_of(ranks, job, piece, age):  # type: ignore[no-untyped-def]
    """(level, value, turn) of a job at this age, inside this piece."""
    start, level, value, slope, last_come, _ = ranks
    own = level[job, piece]
    served = age - start[job, piece]
    return own, value[job, piece] + slope[job, piece] * served, turn_of(own, job, last_come)


@compiled()
def overtaking(ranks, job, piece, age, heap):  # type: ignore[no-untyped-def]
    """The age at which the first of the heap overtakes the job in service."""
    return overtaken_at(ranks, job, piece, age, (heap[0, 0], heap[0, 1], heap[0, 2]))


@compiled()
def exchange(heap, count, rank, job):  # type: ignore[no-untyped-def]
    """Put `job` into the heap for its first one, which is returned."""
    first = pop(heap, count)
    push(heap, count - 1, rank, job)
    return first


@compiled()
def admit(ranks, heap, waiting, own, running, coming):  # type: ignore[no-untyped-def]
    """Put the job that arrives, or the one in service of rank `own`, into the heap; returns the
    other one.
    """
    new = rank_of(ranks, coming, 0, 0.0)
    if before(new[0], new[1], new[2], own[0], own[1], own[2]):
        push(heap, waiting, own, running)
        return coming
    push(heap, waiting, new, coming)
    return running


@compiled()
def run_ranks(arrived_at, totals, ranks, resume):  # type: ignore[no-untyped-def]
    """Departure of each job. `ranks`: arrays [jobs, pieces], last_come (-2: none), slack. A job
    that was interrupted is served `resume` seconds before it ages, anew after another time.
    """
    start, n = ranks[0], len(arrived_at)
    left, ages, owed = np.full(n, np.nan), np.zeros(n), np.zeros(n)
    pieces, heap = np.zeros(n, dtype=np.int64), np.empty((n, 4))
    waiting, coming, running, now = 0, 0, -1, 0.0
    while running >= 0 or waiting > 0 or coming < n:
        if running < 0 and waiting > 0:
            running = pop(heap, waiting)
            waiting -= 1
        elif running < 0:
            now, running = arrived_at[coming], coming
            coming += 1
        pieces[running] = p = piece_at(start, running, pieces[running], ages[running])
        arrival = arrived_at[coming] if coming < n else np.inf
        age = overtaking(ranks, running, p, ages[running], heap) if waiting > 0 else np.inf
        begun = now + owed[running]
        overtaken = begun + age - ages[running]
        now = begun + totals[running] - ages[running]
        if now <= arrival and now <= overtaken:
            left[running], running = now, -1
            continue
        if overtaken > arrival:
            age = ages[running] + max(arrival, begun) - begun
        now = min(overtaken, arrival)
        owed[running] = max(begun - now, 0.0)
        ages[running] = age  # exactly: a piece that begins there has begun
        pieces[running] = p = piece_at(start, running, p, age)
        own, last = rank_of(ranks, running, p, age), running
        if overtaken <= arrival:
            running = exchange(heap, waiting, own, last)
        else:
            running = admit(ranks, heap, waiting, own, last, coming)
            waiting, coming = waiting + 1, coming + 1
        if running != last and age > 0:
            owed[last] = resume
    return left


@compiled()
def mean_work_ahead(arrived_at, sizes, first, last):  # type: ignore[no-untyped-def]
    """Unfinished work that arrivals first..last - 1 find on average, whatever the order."""
    work = total = 0.0
    for i in range(1, last):
        work = max(0.0, work + sizes[i - 1] - (arrived_at[i] - arrived_at[i - 1]))
        if i >= first:
            total += work
    return total / (last - first)
