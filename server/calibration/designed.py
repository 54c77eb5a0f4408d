"""Designed batches: batches of chosen sizes and lengths, served through the gateway's own dispatch
path and counted nowhere.

A private batcher on the same engine runs them under `fixed`, so that what is measured is exactly
the service time that a queue feels: from the dispatch until the server could be dispatched to
again. It has no observers: nothing of this counts as a request. The one path of a calibration and
of the probes in idle moments.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kendall.policies import Continuous, Elastic, Fixed, Policy, Request
from kendall.queueing.latency.fit import Measured
from kendall.server.calibration.turnaround import ClosedLoop
from kendall.server.engines.base import Capabilities, Engine, EngineRequest, Sampling, Token
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState
from kendall.server.runtime.errors import ApiError

LONGEST_CELL = 300.0  # seconds that one designed batch may take
TOO_LONG = "calibration_timeout"  # code of the error
SIZES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 4, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 32
# of the cells with the longest answers: steps, of those of all others; times that each is measured
LONGEST_SHARE, LONGEST_REPEATS = 0.5, 2
# tokens beyond the longest member's: a padded batch ends because it is cancelled, some steps after
# its last token
OVERRUN = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """One designed batch: the members' own lengths, the prompt of each, and how it is served."""

    lengths: tuple[int, ...]
    prompt_tokens: int
    padded: bool = True

    def limit(self, max_model_len: int) -> int:
        """Token limit of each member: it ends before."""
        return min(max(self.lengths) + OVERRUN, max_model_len - self.prompt_tokens)

    def context_tokens(self, max_model_len: int) -> int:
        """That they may come to hold together."""
        return len(self.lengths) * (self.prompt_tokens + self.limit(max_model_len))


class InterruptedCellError(Exception):
    """The cell was given up before its end: someone else wants the engine."""


class Awaited:
    """A consumer that lets a coroutine wait for its sequence."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_dispatched(self) -> None:
        """A dispatch changes nothing here."""

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """The text of a designed batch is not kept."""

    def on_release(self) -> None:
        """Released as soon as the loop runs on."""
        if not self.answered.done():
            self.answered.set_result(None)

    def on_failed(self, outcome: str, code: str, message: str) -> None:
        """The measurement fails with it."""
        del outcome
        if not self.answered.done():
            self.answered.set_exception(ApiError(503, code, f"calibration: {message}"))


class DesignedBatches:
    """Serves one designed batch after the other. The caller must have the engine to itself."""

    def __init__(
        self, engine: Engine, capabilities: Capabilities, longest: float = LONGEST_CELL
    ) -> None:
        self._capabilities = capabilities
        self._longest = longest
        self.batcher = Batcher(engine, capabilities, Fixed(batch_size=1))
        self._ids = itertools.count()
        self.made = 0  # requests so far
        self._sequences: list[SequenceState] = []  # of the batch that is served now
        self._consumers: list[Awaited] = []
        self._interrupted = False

    async def measure(self, cell: Cell, rng: np.random.Generator) -> Measured:
        """One batch: its service time. Raises InterruptedCellError, and ApiError where the
        engine fails or takes too long.
        """
        size = len(cell.lengths)
        sequences = await self._serve(
            Fixed(batch_size=size) if cell.padded else Elastic(max_batch_size=size), cell, rng
        )
        return Measured(cell.lengths, size * cell.prompt_tokens, _held(sequences)[0])

    async def served_together(self, cell: Cell, rng: np.random.Generator) -> int:
        """Send the members of a cell at once; how many of them had a token before the first of them
        ended, which is how many the engine serves at once. Raises as `measure`.
        """
        sequences = await self._serve(Elastic(max_batch_size=len(cell.lengths)), cell, rng)
        instants = [sequence.at for sequence in sequences]
        ended = min(at.last_token for at in instants if at.last_token is not None)
        return sum(at.first_token is not None and at.first_token < ended for at in instants)

    async def slot_time(self, loop: ClosedLoop, rng: np.random.Generator) -> float:
        """Mean seconds a slot of the continuous engine is held when the next request always
        waits. Raises as `measure`.
        """
        sequences = await self._serve(
            Continuous(max_batch_size=loop.slots), Cell(loop.lengths, loop.prompt_tokens), rng
        )
        return float(np.mean(_held(sequences)))

    async def resume_cost(
        self, prompt_tokens: int, stints: tuple[int, int], rng: np.random.Generator
    ) -> float:
        """A request generates `stints` tokens, in two stints. Returns how many seconds longer the
        second stint takes than a new request with the same context and as many tokens. Raises as
        `measure`.
        """
        made, rest = stints
        alone, context = Elastic(max_batch_size=1), prompt_tokens + made
        cell = Cell((made + rest,), prompt_tokens, padded=False)
        first = self._engine_request(cell, made, rng)
        begun = await self._serve_requests(alone, cell, [first])
        behind = msgspec.structs.replace(
            first,
            request=first.request._replace(id=f"{first.request.id}-resumed"),
            forced_output_tokens=made + rest,
            output_token_ids=tuple(begun[0].output_token_ids),
        )
        ended = await self._serve_requests(alone, cell, [behind])
        fresh = await self._serve(alone, Cell((rest,), context, padded=False), rng)
        return _held(ended)[0] - _held(fresh)[0]

    def serve_on_one_of(self, servers: Collection[int]) -> None:
        """The law is of one server: the first of these takes every batch."""
        self.batcher.use_only(sorted(servers)[:1])

    def interrupt(self) -> None:
        """Give up what is being served: its server is free when this returns (an engine may
        still end the step in flight).
        """
        sequences, self._sequences = self._sequences, []
        self._interrupted = True
        for sequence in reversed(
            sequences
        ):  # those that wait first, or they would enter in the place of the others
            sequence.cancel()
        for consumer in self._consumers:
            consumer.on_release()

    async def _serve(
        self, policy: Policy, cell: Cell, rng: np.random.Generator
    ) -> list[SequenceState]:
        requests = [self._engine_request(cell, length, rng) for length in cell.lengths]
        return await self._serve_requests(policy, cell, requests)

    async def _serve_requests(
        self, policy: Policy, cell: Cell, requests: Sequence[EngineRequest]
    ) -> list[SequenceState]:
        self._interrupted = False
        self.batcher.switch(policy)
        self._consumers = [Awaited() for _ in requests]
        self._sequences = sequences = self.batcher.submit(requests, self._consumers)
        try:
            await self._answered(cell)
            if self._interrupted:
                raise InterruptedCellError
            for sequence in sequences:
                sequence.released()
        finally:
            for sequence in reversed(sequences):
                sequence.cancel()  # no effect on those that were answered
            self._sequences, self._consumers = [], []
        return sequences

    async def _answered(self, cell: Cell) -> None:
        try:
            async with asyncio.timeout(self._longest) as limit:
                await asyncio.gather(*(consumer.answered for consumer in self._consumers))
        except TimeoutError:
            if not limit.expired():
                raise
            size, tokens = len(cell.lengths), max(cell.lengths)
            got = (
                f"got no end of a batch of {size} sequences of up to {tokens} tokens within "
                f"{self._longest:g} s"
            )
            raise ApiError(
                504,
                TOO_LONG,
                f"calibration: {got}; expected an engine that answers, or ask for smaller batches",
            ) from None

    def _engine_request(self, cell: Cell, length: int, rng: np.random.Generator) -> EngineRequest:
        limit = cell.limit(self._capabilities.max_model_len)
        self.made += 1
        request = Request(
            id=f"calibrate-{id(self):x}-{next(self._ids)}",
            arrived_at=self.batcher.now(),
            prompt_tokens=cell.prompt_tokens,
            max_output_tokens=limit,
        )
        prompt = rng.integers(5, self._capabilities.vocab_size, cell.prompt_tokens).tolist()
        return EngineRequest(request, prompt, Sampling(max_tokens=limit, temperature=0.0), length)


def design(
    bounds: Capabilities,
    prompt_tokens: int = PROMPT_TOKENS,
    max_batch_size: int | None = None,
    max_output_tokens: int = 64,
) -> list[Cell]:
    """The grid of sizes and lengths within an engine's bounds, with prompts so short that all of a
    batch are computed in one step, and a few sizes with prompts 4, 16, ... times as long, up to
    four times `prompt_tokens`.
    """
    budget, context = bounds.max_num_batched_tokens, bounds.max_model_len
    largest = min(max_batch_size or bounds.max_num_seqs, bounds.max_num_seqs, budget)
    short = min(prompt_tokens, budget // largest, context // 2)
    longest = min(max_output_tokens, context - short)
    sizes = sorted({size for size in SIZES if size < largest} | {largest})
    lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
    length = lengths[min(2, len(lengths) - 1)]
    cells = [Cell((length,) * size, short) for size in sizes for length in lengths]
    cells += [
        Cell((length,) * size, prompt)
        for prompt in _longer(short, min(4 * prompt_tokens, budget, context - length))
        for size in [size for size in sizes if size * prompt <= budget][:4]
    ]
    return [cell for cell in cells if cell.context_tokens(context) <= bounds.kv_cache_tokens]


def longest_cells(
    bounds: Capabilities, grid: Sequence[Cell], repeats: int, limit: int | None
) -> list[Cell]:
    """One sequence, and as many as the memory holds, with the longest answers that the token limit
    allows and that take `LONGEST_SHARE` of the steps of the grid; none where that is no longer than
    what the grid has.
    """
    short, context = grid[0].prompt_tokens, bounds.max_model_len
    steps = LONGEST_SHARE * repeats * sum(max(cell.lengths) for cell in grid)
    length = min(int(steps / (2 * LONGEST_REPEATS)), context - short, limit or context)
    if length <= max(max(cell.lengths) for cell in grid):
        return []
    cells = {size: Cell((length,) * size, short) for size in {len(cell.lengths) for cell in grid}}
    fitting = [
        size
        for size, cell in cells.items()
        if cell.context_tokens(context) <= bounds.kv_cache_tokens
    ]
    return [cells[size] for size in sorted({min(fitting), max(fitting)})] if fitting else []


def usual_length(measured: Sequence[Sequence[int]]) -> int:
    """The longest answers of the whole grid of a calibration, whose batches are given by their
    lengths, and not of `longest_cells`; 0 where nothing was measured.
    """
    counts = Counter(map(max, measured))
    often = [length for length, times in counts.items() if times > 2 * LONGEST_REPEATS]
    return max(often or counts, default=0)


def _longer(short: int, longest: int) -> Iterator[int]:
    """Prompt lengths above `short`, each four times the one before, up to `longest`."""
    prompt = short
    while prompt < longest:
        prompt = min(4 * prompt, longest)
        yield prompt


def _held(sequences: Sequence[SequenceState]) -> list[float]:
    """Seconds from the dispatch of each until its server was free again."""
    return [
        sequence.at.server_free - sequence.at.dispatched
        for sequence in sequences
        if sequence.at.server_free is not None and sequence.at.dispatched is not None
    ]
