"""A Llama decoder in plain PyTorch: random weights, one static key-value cache, no padding.

    x = x + O softmax(rope(q) rope(k)^T / sqrt(d)) v,    q, k, v = QKV norm(x)
    x = x + D (silu(g) u),                               g, u = GU norm(x)

The projections that share an input are one matrix each, as serving engines have it. Equal to
transformers' LlamaForCausalLM (tests/bench/test_gpu_law.py); own code, so that the measuring
machine needs PyTorch alone (2.4 or newer).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .design import Shape

EPSILON = 1e-6  # of RMSNorm
THETA = 10_000.0  # of the rotary positions
Held = tuple[Tensor, Tensor]  # keys and values


class Cache:
    """Keys and values of at most `sequences` sequences of at most `tokens` tokens, allocated
    once, for all layers.
    """

    def __init__(
        self, shape: Shape, sequences: int, tokens: int, *, device: str, dtype: torch.dtype
    ) -> None:
        size = (shape.layers, 2, sequences, shape.heads, tokens, shape.head_dim)
        self.numbers = torch.zeros(size, device=device, dtype=dtype)

    def extend(self, layer: int, keys: Tensor, values: Tensor, *, start: int) -> Held:
        """Store these from position `start` on; all keys and values of these sequences up to the
        last of them.
        """
        sequences, end = keys.shape[0], start + keys.shape[2]
        held = self.numbers[layer, :, :sequences, :, :end]
        held[0, :, :, start:], held[1, :, :, start:] = keys, values
        return held[0], held[1]

    def put(self, layer: int, keys: Tensor, values: Tensor, *, at: Tensor, length: int) -> Held:
        """Store those of one token at position `at`, a tensor of one number; all of the first
        `length` positions.
        """
        held = self.numbers[layer, :, : keys.shape[0], :, :length]
        held[0].index_copy_(2, at, keys)
        held[1].index_copy_(2, at, values)
        return held[0], held[1]


class Layer(nn.Module):  # type: ignore[misc]  # PyTorch is not followed by mypy
    """Attention and the gated feed-forward, each with its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        store: Callable[[Tensor, Tensor], Held],
        mask: Tensor | None,
    ) -> Tensor:
        """One layer over the new tokens, whose keys and values `store` keeps; `mask`: what one
        new token sees, None: everything before it.
        """
        sequences, tokens, hidden = x.shape
        joint = (
            self.qkv(norm(x, self.attention_norm))
            .view(sequences, tokens, 3, self.heads, hidden // self.heads)
            .transpose(1, 3)
        )
        query, keys = rotated(joint[:, :, :2], rotation).unbind(2)
        keys, values = store(keys, joint[:, :, 2])
        attended = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=tokens > 1
        )
        x = x + self.out(attended.transpose(1, 2).reshape(sequences, tokens, hidden))
        gate, up = self.gate_up(norm(x, self.ffn_norm)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):  # type: ignore[misc]
    """Logits of the next token. Prompts are given whole: more than one new token only at
    position 0.
    """

    def __init__(self, shape: Shape, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.angles: Tensor
        self.register_buffer("angles", positions(shape.head_dim, tokens), persistent=False)

    def forward(self, ids: Tensor, cache: Cache, start: int) -> Tensor:
        """Logits after the last of `ids` (sequences, new tokens), whose first is at position
        `start`.
        """
        angles = self.angles[:, start : start + ids.shape[1]]
        return self._through(ids, angles, partial(cache.extend, start=start), None)

    def step(self, ids: Tensor, cache: Cache, at: Tensor, length: int) -> Tensor:
        """The same for one new token at position `at`, a tensor of one number below `length`. Its
        shapes do not depend on the position, as a captured graph needs: `length` positions are
        read, and those behind `at` are masked.
        """
        angles = self.angles.index_select(1, at)
        mask = (torch.arange(length, device=at.device) <= at)[None, None, None]
        return self._through(ids, angles, partial(cache.put, at=at, length=length), mask)

    def _through(
        self, ids: Tensor, angles: Tensor, store: Callable[..., Held], mask: Tensor | None
    ) -> Tensor:
        x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, partial(store, index), mask)
        logits: Tensor = self.head(norm(x[:, -1], self.norm))
        return logits


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension."""
    return functional.rms_norm(x, weight.shape, weight, EPSILON)


def positions(head_dim: int, tokens: int) -> Tensor:
    """Cosines and sines (2, tokens, head_dim) of the rotary angles; both halves of a head turn
    alike.
    """
    frequencies = THETA ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    )
    angles = torch.outer(
        torch.arange(tokens, dtype=torch.float64, device="cpu"), frequencies
    ).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Each pair (i, i + d/2) of a head's numbers turned by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def random_decoder(
    shape: Shape, tokens: int, *, device: str, dtype: torch.dtype, seed: int
) -> Decoder:
    """Weights drawn on the device, N(0, 0.02^2): times do not depend on them, the power draw
    does a little.
    """
    with torch.device("meta"):
        decoder = Decoder(shape, tokens)
    decoder.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.fill_(1.0) if name.endswith("norm") else weight.normal_(
                0.0, 0.02, generator=generator
            )
    decoder.angles = positions(shape.head_dim, tokens).to(device=device, dtype=dtype)
    decoder.eval()
    return decoder
