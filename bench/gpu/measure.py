"""The measurement: designed batches in random order, each served as a static batch, every step's
end stamped.

A batch is a prefill of all its prompts, which gives the first token of each, and one step for each
further token. A step ends when its tokens are on the host, as a server that streams them needs:
that waits for the device, so the clock reads true times and no step is launched before the one
before it has ended. Rounds: each holds every cell once, in an order of its own, so that the
machine's drift falls on all alike and a run cut short is balanced to within one round. A batch that
the budget has no time for is not begun. Results are written as they come, one JSON object a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, TextIO

import numpy as np
import torch

from .decoder import Cache, Decoder, random_decoder
from .design import Cell, Shape, longest

WARM_UP_STEPS = 8
BUCKET = 128  # tokens: a graph reads a multiple of so many positions
Joules = Callable[[], "float | None"]  # since some instant; None where the device does not tell


class Graphs:
    """The decode step as CUDA graphs, one for each number of sequences and length that is read:
    the processor launches a step as one piece, as serving engines do.
    """

    def __init__(self, decoder: Decoder, cache: Cache, tokens: int) -> None:
        self._decoder, self._cache, self._tokens = decoder, cache, tokens
        self._captured: dict[
            tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, torch.Tensor]
        ] = {}

    def step(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """The token after `ids` (sequences, 1), which are at `position`."""
        key = ids.shape[0], bucket(position, self._tokens)
        graph, given, at, tokens = self._captured[key]
        given.copy_(ids)
        at.fill_(position)
        graph.replay()
        return tokens

    def capture(self, sequences: int, length: int) -> None:
        """Capture the step that reads `length` positions."""
        if (sequences, length) in self._captured:
            return
        device = self._cache.numbers.device
        given = torch.zeros((sequences, 1), dtype=torch.int64, device=device)
        at = torch.tensor([length - 1], device=device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries allocate when they run first
            for _ in range(2):
                self._decoder.step(given, self._cache, at, length).argmax(-1)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = self._decoder.step(given, self._cache, at, length).argmax(-1)
        self._captured[sequences, length] = graph, given, at, tokens


def bucket(position: int, tokens: int) -> int:
    """Positions that a graph reads whose new token is at `position`, of at most `tokens`."""
    return min(tokens, BUCKET * (position // BUCKET + 1))


class Bench:
    """A model and its cache on a device; `graphs`: steps are captured CUDA graphs."""

    def __init__(
        self,
        shape: Shape,
        cells: Sequence[Cell],
        *,
        device: str,
        dtype: str,
        seed: int,
        graphs: bool = False,
    ) -> None:
        number, tokens = getattr(torch, dtype), longest(cells)
        self._vocabulary, self._device = shape.vocabulary, device
        self._decoder = random_decoder(shape, tokens, device=device, dtype=number, seed=seed)
        self._cache = Cache(
            shape, max(cell.batch_size for cell in cells), tokens, device=device, dtype=number
        )
        self._generator = torch.Generator(device).manual_seed(seed)
        self._tokens = tokens
        self._graphs = Graphs(self._decoder, self._cache, tokens) if graphs else None

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def serve(self, cell: Cell) -> list[float]:
        """Seconds from the start of the batch until its 1st, 2nd, .. tokens were on the host."""
        size = (cell.batch_size, cell.prompt_tokens)
        ids = torch.randint(self._vocabulary, size, generator=self._generator, device=self._device)
        if self._device != "cpu":
            torch.cuda.synchronize()
        position, ends, began = 0, [], perf_counter()
        for made in range(cell.output_tokens):
            if made == 0 or self._graphs is None:
                tokens = self._decoder(ids, self._cache, position).argmax(-1)
            else:
                tokens = self._graphs.step(ids, position)
            tokens.tolist()  # to the host
            ends.append(perf_counter() - began)
            position, ids = position + ids.shape[1], tokens[:, None]
        return ends

    def warm_up(
        self, cells: Sequence[Cell], until: float
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """Every batch size and prompt twice, and all graphs; seconds of the prefill and of a step,
        from the second time. None after `until`.
        """
        self._capture(cells, until)
        warm: dict[tuple[int, int], tuple[float, float]] = {}
        for size, prompt in sorted({(cell.batch_size, cell.prompt_tokens) for cell in cells}):
            for _ in range(2):
                if perf_counter() > until:
                    return warm
                ends = self.serve(Cell(size, prompt, min(WARM_UP_STEPS, longest(cells) - prompt)))
            warm[size, prompt] = ends[0], (ends[-1] - ends[0]) / max(1, len(ends) - 1)
        return warm

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _capture(self, cells: Sequence[Cell], until: float) -> None:
        if self._graphs is None:
            return
        lengths = {
            (cell.batch_size, bucket(position, self._tokens))
            for cell in cells
            for position in range(
                cell.prompt_tokens, cell.prompt_tokens + max(cell.output_tokens, WARM_UP_STEPS)
            )
        }
        for sequences, length in sorted(lengths):
            if perf_counter() > until:
                return
            self._graphs.capture(sequences, length)

    def measure(
        self,
        cells: Sequence[Cell],
        *,
        repeats: int,
        seed: int,
        until: float,
        joules: Joules,
        write: Callable[[dict[str, Any]], None],
    ) -> int:
        """Serve every cell `repeats` times unless the clock would pass `until`; how many batches
        were served.
        """
        warm, began, served = self.warm_up(cells, until), perf_counter(), 0
        if began > until:
            print("the warm-up took the whole budget")
            return 0
        expected = {}
        for cell in cells:  # from a warm-up at short contexts; steps grow with the context
            prefill, step = warm[cell.batch_size, cell.prompt_tokens]
            expected[cell] = 1.5 * (prefill + step * cell.output_tokens)
        rng = np.random.default_rng(seed)
        print(
            f"{len(cells)} cells, {repeats} rounds: at most about "
            f"{repeats * sum(expected.values()):.0f} s, {until - began:.0f} s left",
            flush=True,
        )
        for turn in range(repeats):
            for index in rng.permutation(len(cells)):
                cell = cells[index]
                if perf_counter() + expected[cell] > until:
                    return served
                at, before = perf_counter() - began, joules()
                ends = self.serve(cell)
                after = joules()
                spent = None if before is None or after is None else round(after - before, 3)
                expected[cell] = ends[-1]
                served += 1
                write(
                    asdict(cell)
                    | {
                        "round": turn,
                        "at": round(at, 3),
                        "joules": spent,
                        "ends": [round(end, 7) for end in ends],
                    }
                )
            print(
                f"round {turn + 1} of {repeats} done at {perf_counter() - began:.0f} s", flush=True
            )
        return served


def line_writer(file: TextIO) -> Callable[[dict[str, Any]], None]:
    """One JSON object a line, on disk at once: a killed run keeps what it had."""

    def write(value: dict[str, Any]) -> None:
        file.write(json.dumps(value) + "\n")
        file.flush()

    return write
