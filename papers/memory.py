"""How large a batch the engine's memory admits.

    bytes per token      = 2 layers kv_heads head_dim bytes_per_value          keys and values
    bytes per sequence   = bytes per token x tokens, rounded up to whole blocks where the engine
                           allocates in blocks
    largest batch        = floor((utilisation memory - weights - reserved) / bytes per sequence)

A printed example, 2 x 32 x 40 x 128 x 2048 x 2 bytes = "3.2 GB" per sequence, is 1.34e9 bytes; with
the 40 layers that LLaMA-13B has it is 1.68e9.

Yang et al. fit 49 sequences of 1280 tokens (256 in, 1024 out) of LLaMA-2-7b-chat on an A100 and do
not say how. The plain reading does not give 49: with 16-bit weights (13.48e9 bytes) and cache
(524,288 bytes a token) all of 40e9 bytes admit 39 and all of 80e9 bytes 99. `YANG_READINGS` holds
the readings that do give 49; the source does not decide between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kendall.policies.text import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What a model takes: the cache by the shape of its attention, the weights as they are."""

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: float = 2  # of the cache; 2 = 16 bits
    weights: float  # bytes

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.kv_heads, self.head_dim) < 1
            or self.bytes_per_value <= 0
            or self.weights < 0
        ):
            raise SpecError(
                f"got {self}; expected at least one layer, head and dimension, bytes_per_value > "
                "0, weights >= 0"
            )

    @property
    def bytes_per_token(self) -> float:
        """Keys and values of one token in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory in bytes; what of it the engine may use, and what of that is neither weights nor
    cache.
    """

    memory: float
    utilisation: float = 1.0
    reserved: float = 0.0  # activations, graphs, fragmentation

    def __post_init__(self) -> None:
        if not (0 < self.memory < math.inf and 0 < self.utilisation <= 1 and self.reserved >= 0):
            raise SpecError(
                f"got {self}; expected bytes > 0, a utilisation in (0, 1], and bytes >= 0 in "
                "reserve"
            )


def sequence_bytes(model: ModelMemory, tokens: int, block_size: int = 1) -> float:
    """Cache of a sequence of so many tokens (prompt and output), allocated in blocks of
    `block_size` tokens.
    """
    if tokens < 1 or block_size < 1:
        raise SpecError(
            f"got {tokens} tokens in blocks of {block_size}; expected at least 1 of both"
        )
    return model.bytes_per_token * block_size * math.ceil(tokens / block_size)


def largest_batch(model: ModelMemory, device: Device, tokens: int, block_size: int = 1) -> int:
    """Sequences of `tokens` tokens that fit at once. Raises SpecError where not even the weights
    do; may be 0.
    """
    free = device.utilisation * device.memory - model.weights - device.reserved
    if free < 0:
        raise SpecError(
            f"got {device} for weights of {model.weights:.4g} bytes; expected memory for the "
            "weights at least"
        )
    return math.floor(free / sequence_bytes(model, tokens, block_size))


def needed_memory(model: ModelMemory, batch_size: int, tokens: int, block_size: int = 1) -> float:
    """Bytes for the weights and a batch of `batch_size` sequences of `tokens` tokens."""
    return model.weights + batch_size * sequence_bytes(model, tokens, block_size)


_PARAMETERS = 6_738_415_616  # of LLaMA-2-7b
LLAMA2_7B = ModelMemory(layers=32, kv_heads=32, head_dim=128, weights=2 * _PARAMETERS)
YANG_READINGS: dict[str, tuple[ModelMemory, Device, int]] = {
    "80e9 bytes, 16-bit weights, 32-bit cache (or the cache held twice)": (
        ModelMemory(
            layers=32, kv_heads=32, head_dim=128, bytes_per_value=4, weights=2 * _PARAMETERS
        ),
        Device(memory=80e9),
        1280,
    ),
    "40e9 bytes, 8-bit weights, 16-bit cache": (
        ModelMemory(layers=32, kv_heads=32, head_dim=128, weights=_PARAMETERS),
        Device(memory=40e9),
        1280,
    ),
    "40e9 bytes, all 16-bit, only the 1024 generated tokens counted": (
        LLAMA2_7B,
        Device(memory=40e9),
        1024,
    ),
    "80 GiB, all 16-bit, 54.4 % of it used": (
        LLAMA2_7B,
        Device(memory=80 * 2**30, utilisation=0.544),
        1280,
    ),
}
