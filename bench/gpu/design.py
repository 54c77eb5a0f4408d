"""What is measured: the model's shape and the cells, with nothing but the standard library.

Every batch size meets every output length at the first prompt length, and every other prompt length
at the shortest output: b, l and the prompt vary independently, which the law's coefficients need to
be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama without weights; as many key and value heads as query heads."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        """Numbers per head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Weights in all; input and output embeddings are two."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def cached_per_token(self) -> int:
        """Numbers that one token of one sequence leaves in the key-value cache."""
        return 2 * self.layers * self.hidden


@dataclass(frozen=True, slots=True)
class Cell:
    """One designed batch: all members have the same prompt and output lengths, so that nothing
    is padding.
    """

    batch_size: int
    prompt_tokens: int  # of each member
    output_tokens: int  # of each member, the one that the prefill gives included


PRESETS = {
    "llama-7b": Shape(layers=32, hidden=4096, heads=32, ffn=11008, vocabulary=32000),
    "tiny": Shape(layers=2, hidden=64, heads=4, ffn=128, vocabulary=256),
}


def cells_of(sizes: Sequence[int], prompts: Sequence[int], outputs: Sequence[int]) -> list[Cell]:
    """The design; the first of `prompts` is the one that every output length is measured with."""
    lengths = [Cell(size, prompts[0], output) for size in sizes for output in outputs]
    return lengths + [Cell(size, prompt, min(outputs)) for size in sizes for prompt in prompts[1:]]


def longest(cells: Sequence[Cell]) -> int:
    """Tokens of the longest sequence, prompt and output."""
    return max(cell.prompt_tokens + cell.output_tokens for cell in cells)


def fitting(
    sizes: Sequence[int], shape: Shape, tokens: int, number_bytes: int, memory: float
) -> list[int]:
    """The batch sizes whose weights and cache of `tokens` a sequence fill at most nine tenths of
    `memory` bytes.
    """
    free = 0.9 * memory - shape.parameters * number_bytes
    return [size for size in sizes if size * tokens * shape.cached_per_token * number_bytes <= free]
