"""Measuring the engine's law through the gateway's own dispatch path.

Batch sizes and lengths are set here (never taken from traffic), in random order, each several times; a private batcher
on the same engine runs them under `fixed`, so that what is measured is exactly the service time that a queue feels:
from the dispatch until the server could be dispatched to again. The continuous engine's turnaround is the one at which
the law's closed loop holds a slot as long as measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from policies import Continuous, Elastic, Fixed, Policy, Request, SpecError
from queueing.fit import Fit, Measured, fit_law
from queueing.latency import LatencyModel, parse_law
from queueing.profile import Profile
from queueing.service import Member, ServiceProcess
from server.batcher import Batcher
from server.engines.base import Sampling, Token, Work
from server.errors import ApiError
from server.schema import CalibrationRequest
from server.ticket import Ticket

if TYPE_CHECKING:
    from server.gateway import Gateway

SIZES = (1, 2, 4, 8, 16, 32, 64)
LOOP_REQUESTS = 40  # of one closed loop
LENGTHS = (1, 4, 16, 32, 64, 128, 256)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One designed batch: the members' own lengths, the prompt of each, and how it is served."""

    lengths: tuple[int, ...]
    prompt_tokens: int
    padded: bool = True


class Awaited:
    """A consumer that lets a coroutine wait for its ticket."""

    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_dispatched(self) -> None:
        """Nothing to do."""

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """Not kept."""

    def on_release(self) -> None:
        """Released as soon as the loop runs on."""
        if not self.answered.done():
            self.answered.set_result(None)

    def on_lost(self, outcome: str, code: str, message: str) -> None:
        """The calibration fails with it."""
        del outcome
        if not self.answered.done():
            self.answered.set_exception(ApiError(503, code, f"calibration: {message}"))


class Calibrator:
    """Has the engine to itself while it runs; what arrives meanwhile waits."""

    def __init__(self, gateway: Gateway, on_progress: Progress | None = None) -> None:
        self._gateway = gateway
        self._capabilities = gateway.batcher.capabilities
        self._batcher = Batcher(gateway.engine, self._capabilities, Fixed(batch_size=1))
        self._ids = itertools.count()
        self._on_progress = on_progress

    async def run(self, plan: CalibrationRequest) -> Profile:
        """Measure, fit, and put the law in force in the gateway."""
        gateway = self._gateway
        gateway.calibrating = True
        gateway.batcher.hold(True)
        try:
            rng = np.random.default_rng(plan.seed)
            profile = await (self._speed(plan, rng) if plan.speed_only else self._full(plan, rng))
        finally:
            gateway.calibrating = False
            gateway.batcher.hold(False)
        gateway.law = profile.law
        gateway.profile = profile
        return profile

    async def measure(self, cell: Cell, rng: np.random.Generator) -> Measured:
        """One batch, through the queue: its service time."""
        size = len(cell.lengths)
        policy: Policy = Fixed(batch_size=size) if cell.padded else Elastic(max_batch_size=size)
        self._batcher.switch(policy)
        tickets = self._submit(cell.lengths, cell.prompt_tokens, rng)
        await _answers(tickets)
        first = tickets[0].at
        assert first.server_free is not None
        assert first.dispatched is not None
        return Measured(cell.lengths, size * cell.prompt_tokens, first.server_free - first.dispatched)

    async def _full(self, plan: CalibrationRequest, rng: np.random.Generator) -> Profile:
        """The cells and the closed loop in one random order: both see the same slow and fast moments of the machine."""
        grid = self._grid(plan)
        order = rng.permutation(np.repeat(np.arange(-1, len(grid)), plan.repeats))
        await self._warm_up(grid, rng)
        measured: list[Measured] = []
        held: list[float] = []
        slots, lengths = min(4, self._capabilities.max_num_seqs), [int(length) for length in rng.integers(8, 25, LOOP_REQUESTS)]
        for done, index in enumerate(order):
            if index < 0:
                held += [await self._closed_loop(slots, lengths, plan.prompt_tokens or 32, rng)]
            else:
                measured += [await self.measure(grid[index], rng)]
            if self._on_progress is not None:
                self._on_progress(done + 1, len(order))
        fit = fit_law(measured, rng)
        turnaround = solve_turnaround(fit.law, slots, lengths, plan.prompt_tokens or 32, float(np.mean(held)))
        return self._profile(plan, dataclasses.replace(fit, law=dataclasses.replace(fit.law, turnaround=turnaround)), measured)

    async def _speed(self, plan: CalibrationRequest, rng: np.random.Generator) -> Profile:
        """Measured over lawful time of a few mixed cells, for five seconds."""
        known = self._known(plan)
        if known is None:
            raise ApiError(409, "no_law", "speed_only needs a law: calibrate in full first, or give one as `latency`")
        grid = [cell for cell in self._grid(plan) if len(cell.lengths) in (1, 4, 16) and cell.lengths[0] in (4, 16, 32)]
        law = known.law.at_speed(1.0)
        await self._warm_up(grid, rng)
        until = self._gateway.now() + plan.seconds
        measured: list[Measured] = []
        while self._gateway.now() < until or len(measured) < len(grid):
            for index in rng.permutation(len(grid)):
                measured += [await self.measure(grid[index], rng)]
        lawful = sum(law.padded(len(batch.lengths), max(batch.lengths), batch.prompt_tokens) for batch in measured)
        speed = sum(batch.service_time for batch in measured) / lawful
        return msgspec.structs.replace(known, law=known.law.at_speed(speed), date=_now())

    def _known(self, plan: CalibrationRequest) -> Profile | None:
        """The law that the speed is measured against. Raises ApiError where the caller's is none."""
        if plan.latency is None:
            return self._gateway.profile
        try:
            return Profile(name=plan.name or self._gateway.settings.served_model_name, law=parse_law(plan.latency))
        except SpecError as error:
            raise ApiError(400, "invalid_latency", str(error), param="latency") from None

    async def _warm_up(self, grid: Sequence[Cell], rng: np.random.Generator) -> None:
        """Every batch size once, unmeasured."""
        for size in sorted({len(cell.lengths) for cell in grid}):
            await self.measure(next(cell for cell in grid if len(cell.lengths) == size), rng)

    def _grid(self, plan: CalibrationRequest) -> list[Cell]:
        bounds = self._capabilities
        prompt = plan.prompt_tokens or 32
        largest = min(plan.max_batch_size or bounds.max_num_seqs, bounds.max_num_seqs, bounds.max_num_batched_tokens // prompt)
        longest = min(plan.max_output_tokens or self._gateway.max_output_tokens or 64, bounds.max_model_len - 4 * prompt)
        sizes = sorted({size for size in SIZES if size < largest} | {largest})
        lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
        cells = [Cell((length,) * size, prompt) for size in sizes for length in lengths]
        few = [size for size in sizes if size * 4 * prompt <= bounds.max_num_batched_tokens][:4]
        return cells + [Cell((lengths[min(2, len(lengths) - 1)],) * size, 4 * prompt) for size in few]

    def _submit(self, lengths: Sequence[int], prompt_tokens: int, rng: np.random.Generator) -> list[Ticket]:
        now = self._gateway.now()
        works = [self._work(length, prompt_tokens, now, rng) for length in lengths]
        consumers = [Awaited() for _ in works]
        tickets = self._batcher.submit(works, consumers)
        for consumer, ticket in zip(consumers, tickets, strict=True):
            consumer.ticket = ticket
        return tickets

    def _work(self, length: int, prompt_tokens: int, now: float, rng: np.random.Generator) -> Work:
        limit = self._capabilities.max_model_len - prompt_tokens
        request = Request(
            id=f"calibrate-{id(self):x}-{next(self._ids)}", arrived_at=now, prompt_tokens=prompt_tokens, max_output_tokens=limit
        )
        prompt = rng.integers(5, self._capabilities.vocab_size, prompt_tokens).tolist()
        return Work(request, prompt, Sampling(max_tokens=limit, temperature=0.0), length)

    async def _closed_loop(self, slots: int, lengths: Sequence[int], prompt: int, rng: np.random.Generator) -> float:
        """Mean seconds a slot is held when the next request always waits."""
        self._batcher.switch(Continuous(max_batch_size=slots))
        tickets = self._submit(lengths, prompt, rng)
        await _answers(tickets)
        held = [
            ticket.at.server_free - ticket.at.dispatched
            for ticket in tickets
            if ticket.at.server_free is not None and ticket.at.dispatched is not None
        ]
        return float(np.mean(held))

    def _profile(self, plan: CalibrationRequest, fit: Fit, measured: Sequence[Measured]) -> Profile:
        bounds = self._capabilities
        return Profile(
            name=plan.name or self._gateway.settings.served_model_name,
            law=fit.law,
            intervals=fit.intervals,
            r2=fit.r2,
            mape=fit.mape,
            engine=bounds.engine,
            model=self._gateway.settings.served_model_name,
            machine=dict(bounds.hardware),
            date=_now(),
            versions=dict(bounds.versions),
            max_num_seqs=bounds.max_num_seqs,
            prompt_tokens=plan.prompt_tokens or 32,
            max_output_tokens=max(max(batch.lengths) for batch in measured),
            cells=[dataclasses.asdict(batch) for batch in measured],
        )


def solve_turnaround(law: LatencyModel, slots: int, lengths: Sequence[int], prompt_tokens: int, measured: float) -> float:
    """Seconds a slot is held outside the steps: bisection until the law's own closed loop holds a slot as long as measured."""
    low, high = 0.0, max(0.05, measured)
    for _ in range(30):
        middle = (low + high) / 2
        if closed_loop_slot_time(dataclasses.replace(law, turnaround=middle), slots, lengths, prompt_tokens) < measured:
            low = middle
        else:
            high = middle
    return low


def closed_loop_slot_time(law: LatencyModel, slots: int, lengths: Sequence[int], prompt_tokens: int) -> float:
    """Mean seconds a slot is held under the law when `slots` are always taken."""
    process = ServiceProcess(law, np.random.default_rng(0))
    left = iter(enumerate(lengths))
    started: dict[str, float] = {}
    held = []

    def admit(now: float, count: int) -> None:
        for index, length in itertools.islice(left, count):
            started[str(index)] = now
            process.admit(now, [Member(str(index), prompt_tokens, length)], padded=False, joining=True)

    admit(0.0, slots)
    while not process.idle:
        now = process.next_change_at()
        for member in process.advance(to_change=True):
            held.append(now - started[member.id])
            admit(now, 1)
    return float(np.mean(held))


async def _answers(tickets: Sequence[Ticket]) -> None:
    try:
        for ticket in tickets:
            await ticket.consumer.answered  # type: ignore[attr-defined]
            ticket.released()
    finally:
        for ticket in tickets:
            ticket.cancel()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
