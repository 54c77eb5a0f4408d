"""One engine that obeys the latency law, step by step: a pure state machine on exact instants.

The simulator jumps it from end to end, the emulated engine moves it token by token; because both
read the same closed form for the instants of a stretch of equal steps, they agree to the last bit.
Between two changes of composition the steps are equal: step k of a stretch that began at `t` ends
at `t + first + (k - 1) * rest`. A composition changes only at the end of a step: a member ends
(unpadded), a new one enters, one was removed.

A continuous engine may bound the tokens of a step (chunked prefill): each member that makes tokens
takes one of them, the prompts take the rest in the order of their entry. A prompt that is not whole
at the end of a step goes on in the next one; its first token comes with its last part.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kendall.policies.core import UNBOUNDED
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.token_gaps import GapCounter


class StallClock:
    """The instants of stalls ahead, on the clock of lawful seconds; draws from a child of `rng`,
    and only where the law has stalls.
    """

    def __init__(self, law: LatencyModel, rng: np.random.Generator) -> None:
        self.rate = law.stall_rate
        if self.rate:
            self._rng = rng.spawn(1)[0]
            self._ahead = [float(self._rng.standard_exponential())]

    def within(self, seconds: float) -> int:
        """How many come in the next lawful seconds; consumes nothing."""
        if not self.rate:
            return 0
        expected = self.rate * seconds
        while self._ahead[-1] < expected:
            self._ahead.append(self._ahead[-1] + float(self._rng.standard_exponential()))
        return bisect_left(self._ahead, expected)

    def pass_by(self, seconds: float) -> None:
        """So much was served."""
        if self.rate:
            gone = self.within(seconds)
            self._ahead = [each - self.rate * seconds for each in self._ahead[gone:]]


@dataclass(slots=True)
class Member:
    """One sequence in service: how many output tokens it will make (known here only) and has
    made.
    """

    id: str
    prompt_tokens: int  # with the tokens that it made before, where it goes on behind them
    output_tokens: int
    resumed: bool = False  # it goes on behind tokens that it made before
    produced: int = 0
    prompt_left: int = 0  # tokens that are still to be computed, where a step has a bound
    enters_at: float = 0.0
    left_off_at: float | None = None  # its last token before it was interrupted, also earlier
    first_token_at: float | None = None
    last_token_at: float | None = None  # its own end

    @property
    def ended(self) -> bool:
        """Whether it has met its own end."""
        return self.produced >= self.output_tokens


_BEYOND = 2**62  # steps


class _SlowStretch:
    """Equal steps from the end of a first one on, and the stalls in them."""

    def __init__(self, law: LatencyModel, rng: np.random.Generator) -> None:
        self.law = law
        self._clock = StallClock(law, rng)
        self._stalls = False
        self._residual = self._pace = 1.0  # factor on a stall, on a step
        # lawful seconds of the first step, of each that follows; 0 without stalls
        self._until_first = self._each = 0.0
        self.never()

    def never(self) -> None:
        """No step ends."""
        self.first_end = self.rest = math.inf

    def draw(self, residual: float) -> None:
        """The residual of a batch, whose steps may stall."""
        self._residual, self._pace = residual, residual * (1 - self.law.stall_share)
        self._stalls = self._clock.rate > 0

    def even(self) -> None:
        """Steps without residual and stalls: a continuous engine's."""
        self._residual = self._pace = 1.0
        self._stalls = False

    def begin(self, at: float, seconds: float, size: int) -> None:
        """Begin at `at`, with a first step that takes `seconds` longer than one of `size`
        members.
        """
        self._set_steps(size)
        self.first_end = at + (self._pace * seconds + self.rest)
        if self._stalls:
            self._until_first = seconds + self._each
            self.first_end += self._stalled(self._until_first)

    def shrink(self, done: int, size: int) -> None:
        """To `size` members from the end of the step in flight on, which is the first now."""
        self.first_end = self.instant(done + 1)
        self.serve(done + 1)
        self._set_steps(size)

    def instant(self, step: int) -> float:
        """End of a step, counted from 1."""
        if step == 1:
            return self.first_end
        end = self.first_end + (step - 1) * self.rest
        if not self._each or end == math.inf:
            return end
        return end + self._stalled(self._seconds(step)) - self._stalled(self._until_first)

    def first_step_at_or_after(self, at: float) -> int:
        """The first step that does not end before `at`; beyond any where steps take no time and all
        end before it.
        """
        if self.rest == 0:
            return 1 if at <= self.first_end else _BEYOND
        step = max(1, math.ceil((at - self.first_end) / self.rest) + 1)
        while step > 1 and self.instant(step - 1) >= at:
            step -= 1
        while self.instant(step) < at:
            step += 1
        return step

    def count_gaps(
        self, gaps: GapCounter, members: list[Member], before: float, steps: range
    ) -> None:
        """Of these members at these steps, the one before which ended at `before`."""
        first_end, first = self.instant(steps[0]), steps[0] == 1
        for member in members:
            if not member.produced and member.left_off_at is not None:
                gaps.add(first_end - member.left_off_at, 1)
        if first:  # the others are equal steps
            gaps.add(first_end - before, sum(member.produced > 0 for member in members))
        number, stalled, stall = len(steps) - first, 0, self._residual * self.law.stall
        if self._each and stall and number:  # no two stalls are in one step
            over = self.instant(steps[-1]) - self.instant(steps[-1] - number) - number * self.rest
            stalled = min(number, int(over / stall + 0.5))
            gaps.add(self.rest + stall, len(members) * stalled)
        gaps.add(self.rest, len(members) * (number - stalled))

    def serve(self, steps: int) -> None:
        """So much of it is over."""
        if self._each or self._until_first:
            self._clock.pass_by(self._seconds(steps))
            self._until_first = self._each = 0.0

    def _set_steps(self, size: int) -> None:
        step = self.law.step(size)
        self.rest = self._pace * step
        self._each = step if self._stalls else 0.0

    def _seconds(self, steps: int) -> float:
        """Lawful seconds of the first steps."""
        return self._until_first + (steps - 1) * self._each if steps else 0.0

    def _stalled(self, seconds: float) -> float:
        """What the stalls of the next lawful seconds take."""
        return self._residual * self.law.stall * self._clock.within(seconds)


class ServiceProcess:
    """An engine under the law. Idle at first; `admit`, `remove` and `advance` are its only
    changes.
    """

    def __init__(
        self,
        law: LatencyModel,
        rng: np.random.Generator,
        *,
        pad_prompts: bool = False,
        step_tokens: int = UNBOUNDED,
        gaps: GapCounter | None = None,
    ) -> None:
        self.law = law
        self._gaps = gaps
        self._pad_prompts = pad_prompts  # of a batch, to its longest one
        self._step_tokens = step_tokens  # that a continuous engine computes in one step, at most
        self._parts: dict[str, int] = {}  # tokens of prompts in the first step of this stretch
        self._unready: set[str] = set()  # whose prompt is not whole with that step
        self._rng = rng
        self._active: dict[str, Member] = {}  # in a step; a padded batch keeps its ended members
        self._pending: dict[str, Member] = {}  # admitted, not yet in a step
        self._entry_at = math.inf  # the earliest instant at which one of them may enter
        self._padded = False
        self._stretch = _SlowStretch(law, rng)
        self._opens_batch = False  # the next stretch pays k2
        self._steps = 0  # completed in this stretch
        # composition changed at `_now`, or nobody is in a step: the next one opens a new stretch
        self._changed = True
        self._began_at = -math.inf  # start of this stretch
        self._entered: list[Member] = []  # those who entered with it
        self._now = -math.inf  # end of the last completed step
        # step at which the next change is, once it has been looked for
        self._target: int | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is in service or on its way."""
        return not (self._active or self._pending)

    def admit(self, now: float, members: Iterable[Member], *, padded: bool, joining: bool) -> None:
        """Take members in. A batch (`joining=False`) needs an idle engine and enters one step
        together, now.
        """
        self._target = None
        if not joining:
            if not self.idle:
                raise ValueError("a batch was dispatched to an engine that is not empty")
            self._stretch.draw(self.law.residual(self._rng))
            self._opens_batch, self._padded = True, padded
        elif not self._active:
            self._stretch.even()
            self._opens_batch, self._padded = False, False
        delay = self.law.turnaround * self.law.speed if joining else 0.0
        for member in members:
            member.enters_at = now + delay
            self._pending[member.id] = member
            if member.enters_at < self._entry_at:
                self._entry_at = member.enters_at

    def remove(self, member_id: str, now: float, *, catch_up: bool = True) -> None:
        """Drop a member (its client left); the step in flight keeps its end, where others are in
        it. Without `catch_up`, steps that are over are left for `step`. Unknown ids are no error.
        """
        if self._pending.pop(member_id, None) or member_id not in self._active:
            self._look_for_entry()
            self._target = None
            return
        if catch_up:
            self.catch_up(now)
        else:
            self._open()
        self._target = None
        removed = self._active.pop(member_id)
        if removed.produced:
            removed.left_off_at = self._now
        self._unready.discard(member_id)
        if all(member.ended for member in self._active.values()):
            self._active.clear()  # nobody is left who needs another token
            self._changed = True
            self._now = max(self._now, now)  # those who are pending enter no earlier
        else:
            self._stretch.shrink(self._steps, len(self._active))
            self._steps = 0

    def catch_up(self, now: float) -> None:
        """Complete the steps that end by `now`, up to the next change: that one is for `advance`,
        also where it is at `now`.
        """
        self._open()
        if self._stretch.instant(self._steps + 1) <= now:
            steps = self._stretch.first_step_at_or_after(now)
            if self._stretch.instant(steps) > now:
                steps -= 1
            steps = min(steps, self._steps_to_change() - 1)
            if steps > self._steps:
                self._complete(steps - self._steps, self._making())

    def next_step_at(self) -> float:
        """End of the step in flight; infinity when idle."""
        if self._changed or self._entry_at <= self._now:
            self._open()
        return self._stretch.instant(self._steps + 1)

    def next_change_at(self) -> float:
        """Instant of the next end of a member or, before it, of the next entry; infinity when
        idle.
        """
        self._open()
        return self._stretch.instant(self._steps_to_change())

    def advance(self, *, to_change: bool) -> list[Member]:
        """Complete one step, or all up to the next change; returns the members whose own end
        this is.
        """
        self._open()
        steps = self._steps_to_change() - self._steps if to_change else 1
        return self._depart(self._complete(steps, self._making()))

    def step(self) -> tuple[list[Member], list[Member]]:
        """Complete one step; returns the members that were in it, ended ones of a padded batch
        included, and those whose own end it is.
        """
        if self._changed or self._entry_at <= self._now:
            self._open()
        making = self._making() if self._unready else list(self._active.values())
        ended = self._complete(1, making)
        if ended or self._padded:
            self._depart(ended)
        return making, ended

    def _depart(self, ended: list[Member]) -> list[Member]:
        if not self._padded:
            if ended:
                for member in ended:
                    del self._active[member.id]
                self._changed = True
        elif all(member.ended for member in self._active.values()):
            self._active.clear()
            self._changed = True
        return ended

    def _complete(self, steps: int, making: list[Member]) -> list[Member]:
        """Go on by so many steps, in which these make tokens; returns the members whose own end is
        among them.
        """
        done, ended = self._steps, []
        if self._gaps is not None and not self._padded:
            counted = [member for member in making if member.id in self._gaps.of]
            self._stretch.count_gaps(
                self._gaps, counted, self._now, range(done + 1, done + steps + 1)
            )
        self._steps = done + steps
        self._target = None
        self._now = self._stretch.instant(self._steps)
        for member in making:
            if not member.produced:
                member.first_token_at = self._stretch.instant(done + 1)
            left = member.output_tokens - member.produced
            if 0 < left <= steps:
                member.last_token_at = self._stretch.instant(done + left)
                ended.append(member)
            member.produced += steps
        if self._parts:
            self._compute_parts()
        return ended

    def _making(self) -> list[Member]:
        """Those who make a token in the step in flight."""
        if not self._unready:
            return list(self._active.values())
        return [each for each in self._active.values() if each.id not in self._unready]

    def _compute_parts(self) -> None:
        """The step that had them is over."""
        for member_id, tokens in self._parts.items():
            if member_id in self._active:  # it was not removed
                self._active[member_id].prompt_left -= tokens
        self._changed = self._changed or bool(self._unready)
        self._parts, self._unready = {}, set()

    def _open(self) -> None:
        """Begin a new stretch where the composition changed or someone may enter now."""
        if not self._active:
            if self._pending:
                self._begin(self._entry_at if self._entry_at > self._now else self._now)
            else:
                self._stretch.never()
        elif self._changed or self._entry_at <= self._now:
            self._begin(self._now)

    def _begin(self, at: float) -> None:
        entering = [member for member in self._pending.values() if member.enters_at <= at]
        bounded = self._step_tokens < UNBOUNDED and not self._opens_batch
        for member in entering:
            self._active[member.id] = self._pending.pop(member.id)
            member.prompt_left = member.prompt_tokens if bounded else 0
        self._look_for_entry()
        if at > self._began_at or self._opens_batch:
            self._began_at, self._entered = at, []
        # a stretch reopened at its own start keeps what those before have to pay
        self._entered += entering
        prompts = self._divide_prompts() if bounded else self._prompt_tokens()
        self._stretch.serve(self._steps)
        resumed = sum([member.resumed for member in self._entered])
        seconds = (self.law.setup if self._opens_batch else self.law.admission)(
            len(self._entered), prompts, resumed
        )
        self._stretch.begin(at, seconds, max(1, len(self._active) - len(self._unready)))
        self._steps, self._opens_batch, self._changed, self._target = 0, False, False, None

    def _prompt_tokens(self) -> int:
        """Of those who entered, padding included."""
        tokens = [member.prompt_tokens for member in self._entered]
        return len(tokens) * max(tokens) if self._pad_prompts and self._opens_batch else sum(tokens)

    def _divide_prompts(self) -> int:
        """Which parts of prompts the next step computes; returns their tokens."""
        self._parts, self._unready = {}, set()
        waiting = [member for member in self._active.values() if member.prompt_left]
        left = room = max(0, self._step_tokens - (len(self._active) - len(waiting)))
        # who left in the instant in which this step began is in it all the same
        gone = [member for member in self._entered if member.id not in self._active]
        left -= min(left, sum([member.prompt_left for member in gone]))
        for member in waiting:
            part = min(member.prompt_left, left)
            left -= part
            self._parts[member.id] = part
            if part < member.prompt_left:
                self._unready.add(member.id)
        return room - left

    def _look_for_entry(self) -> None:
        self._entry_at = math.inf
        if self._pending:
            self._entry_at = min([member.enters_at for member in self._pending.values()])

    def _steps_to_change(self) -> int:
        if self._target is None:
            self._target = self._look_for_change()
        return self._target

    def _look_for_change(self) -> int:
        if self._unready:
            return self._steps + 1  # the next part of their prompts
        left = [
            member.output_tokens - member.produced
            for member in self._active.values()
            if member.produced < member.output_tokens
        ]
        if not left:
            return self._steps + 1
        steps = self._steps + (max(left) if self._padded else min(left))
        if self._pending:
            steps = min(steps, self._stretch.first_step_at_or_after(self._entry_at))
        return max(steps, self._steps + 1)
