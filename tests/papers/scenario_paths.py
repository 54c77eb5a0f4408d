"""The scenarios again, slowly: one event at a time, plain lists, no compiled code. What the kernels
are compared with.
"""

import math

from kendall.queueing.latency.kv_memory import DISCARD, LEAST_WASTE, PRESERVE, SWAP


class SlowMemory:
    """A continuously batching engine with bounded memory. `ranks`: functions of the tokens made."""

    def __init__(self, work, ranking, engine):
        self.work, self.ranking, self.engine = work, ranking, engine
        count = len(work.arrived_at)
        self.made, self.memory = [0] * count, [0] * count
        self.waiting, self.running, self.calling, self.swapped = [], [], {}, set()
        self.lost, self.first, self.ended = [0] * count, [math.nan] * count, [math.nan] * count
        self.now, self.owed, self.idle_waste, self.stall_waste = 0.0, 0.0, 0.0, 0.0
        self.to_come = list(range(count))
        self.since, self.waited, self.last = [0.0] * count, [0.0] * count, [0.0] * count
        self.dispatch, self.size, self.rounds = [0] * count, [0] * count, 0
        self.gaps = [[] for _ in range(count)]  # between tokens

    def key(self, job):
        return self.ranking.value[job] + self.ranking.slope * self.made[job], job

    def used(self):
        return sum(self.memory)

    def drop(self, job):
        if self.engine.preempt == SWAP:
            self.owed += self.engine.swap_setup + self.engine.swap_token * self.memory[job]
            self.swapped.add(job)
        else:
            self.lost[job] += 1
        self.memory[job] = 0

    def holders(self, first=None):
        return [job for job in self.waiting if self.memory[job] and job != first]

    def movable(self, first):
        return [
            job
            for job in self.running
            if self.made[job] < self.ranking.limit[job] and self.key(job) > self.key(first)
        ]

    def arrive(self):
        while self.to_come and self.work.arrived_at[self.to_come[0]] <= self.now:
            job = self.to_come.pop(0)
            self.wait(job, self.work.arrived_at[job])
        for job in [job for job, at in self.calling.items() if at <= self.now]:
            self.wait(job, self.calling.pop(job))

    def wait(self, job, at):
        self.waiting.append(job)
        self.since[job] = at

    def overfull(self, job=None, new=0):
        entering = 0 if job is None else 1
        return self.used() + new + len(self.running) + entering > self.engine.memory

    def shrink(self):
        while self.overfull():
            if self.holders():
                self.drop(max(self.holders(), key=self.key))
            else:
                self.preempt(max(self.running, key=self.key), keep=False)

    def preempt(self, job, *, keep):
        self.running.remove(job)
        self.wait(job, self.now)
        if not keep:
            self.drop(job)

    def enter(self):
        """Returns the tokens computed, those computed again, how many entered, and how many of
        these computed tokens again.
        """
        computed, again, resumed, entered = 0, 0, 0, []
        while self.waiting:
            job = min(self.waiting, key=self.key)
            new = self.work.prompt[job] + self.made[job] - self.memory[job]
            full = len(self.running) >= self.engine.slots
            movable = self.movable(job)
            spare = sum(self.memory[other] + 1 for other in movable)
            spare += sum(self.memory[other] for other in self.holders(job))
            if self.used() + new + len(self.running) + 1 - spare > self.engine.memory:
                break
            if full and not movable:
                break
            if full:
                self.preempt(max(movable, key=self.key), keep=self.engine.preempt == PRESERVE)
            while self.overfull(job, new):
                if self.holders(job):
                    self.drop(max(self.holders(job), key=self.key))
                else:
                    self.preempt(max(self.movable(job), key=self.key), keep=False)
            self.waiting.remove(job)
            if job in self.swapped:
                self.swapped.remove(job)
                self.owed += self.engine.swap_setup + self.engine.swap_token * new
            else:
                computed += new
                again += new * (self.made[job] > 0)
                resumed += new > 0 and self.made[job] > 0
            self.memory[job] += new
            self.running.append(job)
            entered.append(job)
            self.waited[job] += self.now - self.since[job]
            self.dispatch[job] = self.rounds
        self.number(entered)
        return computed, again, len(entered), resumed

    def number(self, entered):
        for job in entered:
            self.size[job] = len(self.running)
        self.rounds += bool(entered)

    def call(self, job, used):
        kind, tokens, engine = self.work.handling[job], self.memory[job], self.engine
        swap = engine.swap_setup + engine.swap_token * tokens
        if kind == LEAST_WASTE:
            cost = {
                PRESERVE: self.work.predicted_call[job] * tokens,
                DISCARD: (engine.k1 + engine.kr + engine.kp * tokens) * used,
                SWAP: 2 * swap * used,
            }
            kind = min(cost, key=cost.get)
        if kind == SWAP:
            self.owed += swap
            self.swapped.add(job)
        if kind != PRESERVE:
            self.memory[job] = 0
        self.calling[job] = self.now + self.work.call_seconds[job]

    def step(self, computed, again, entered, resumed):
        engine, running = self.engine, list(self.running)
        seconds = engine.k3 * len(running) + engine.k4 + engine.k1 * entered
        seconds += engine.kp * computed + engine.kr * resumed + self.owed
        active = sum(self.memory[job] for job in running)
        self.idle_waste += seconds * (self.used() - active)
        self.stall_waste += (engine.kp * again + engine.kr * resumed + self.owed) * active
        self.owed = 0.0
        self.now += seconds
        for job in running:
            self.made[job] += 1
            self.memory[job] += 1
            if self.made[job] == 1:
                self.first[job] = self.now
            else:
                self.gaps[job].append(self.now - self.last[job])
            self.last[job] = self.now
        for job in running:
            if self.made[job] == self.work.output[job]:
                self.running.remove(job)
                self.memory[job] = 0
                self.ended[job] = self.now
        used = self.used()
        for job in running:
            if job in self.running and self.made[job] == self.work.call_after[job]:
                self.running.remove(job)
                self.call(job, used)

    def run(self):
        while True:
            self.arrive()
            self.shrink()
            entered = self.enter()
            if self.running:
                self.step(*entered)
                continue
            events = [self.work.arrived_at[job] for job in self.to_come[:1]]
            events += self.calling.values()
            if not events:
                return self
            gap = min(events) - self.now
            self.idle_waste += gap * self.used()
            self.owed = max(self.owed - gap, 0.0)
            self.now = min(events)


def _fill(waiting, ranks, idle_for, begin):
    """Those who wait, in order, as far as there are servers."""

    def key(entry):
        phase, job = entry
        return ranks[phase][job], job

    for entry in sorted(waiting, key=key):
        idle = idle_for(entry[0])
        if idle:
            waiting.remove(entry)
            begin(idle, *entry)


def slow_phases(arrived_at, seconds, ranks, servers, prefill=0, moves=None):
    """Ends of prefill and decode, whose ranks are [2, n]; the first `prefill` servers serve
    prefills, the others decodes, or all serve both. `moves`: seconds between the two.
    """
    count = len(arrived_at)
    busy, ends = {}, [[math.nan] * count, [math.nan] * count]
    waiting, to_come = [], sorted((at, 0, job) for job, at in enumerate(arrived_at))

    def begin(server, phase, job, now):
        busy[server] = now + seconds[phase][job], phase, job

    while to_come or busy or waiting:
        ending = min(((at, server) for server, (at, _, _) in busy.items()), default=(math.inf, 0))
        now = min(ending[0], to_come[0][0] if to_come else math.inf)
        if ending[0] == now:
            _, phase, job = busy.pop(ending[1])
            ends[phase][job] = now
            if phase == 0:
                to_come = sorted([*to_come, (now + (0 if moves is None else moves[job]), 1, job)])
        while to_come and to_come[0][0] == now:
            waiting.append(to_come.pop(0)[1:])
        _fill(
            waiting,
            ranks,
            lambda phase: [
                s
                for s in range(servers)
                if s not in busy and (not prefill or (s < prefill) == (phase == 0))
            ],
            lambda idle, phase, job, now=now: begin(idle[0], phase, job, now),
        )
    return ends


def slow_choices(work, servers):
    """Ends."""
    count, now, ended = len(work.arrived_at), 0.0, [math.nan] * len(work.arrived_at)
    queues = [([], []) for _ in range(servers)]
    left = list(work.seconds)

    def served():
        return [(short or long)[0] for short, long in queues if short or long]

    for job in range(count + 1):
        until = work.arrived_at[job] if job < count else math.inf
        while served() and now + min(left[each] for each in served()) <= until:
            first = min(served(), key=lambda each: left[each])
            seconds = left[first]
            for each in served():
                left[each] -= seconds
            now += seconds
            ended[first] = now
            queue = next(q for pair in queues for q in pair if first in q)
            queue.remove(first)
        if job < count:
            for each in served():
                left[each] -= until - now
            now = until
            sizes = [sum(map(len, queues[s])) for s in work.picked[job]]
            chosen = work.picked[job][sizes.index(min(sizes))]
            queues[chosen][work.long[job]].append(job)
    return ended
