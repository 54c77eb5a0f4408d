"""Reads a GGUF file, the format of llama.cpp's models: metadata, and weights as float32.

    magic "GGUF", version, number of tensors, number of metadata entries
    entries   key, type, value
    tensors   name, shape with the fastest dimension first, type, offset
    data      aligned; quantised in blocks of 32 weights

Of the quantised types those that the model `smollm2` has: of a block of weights w,

    Q8_0  w = d q       float16 d, 32 signed bytes q
    Q4_1  w = d q + m   float16 d, float16 m, 16 bytes: q of weight i in the lower half of byte i,
                        of weight i + 16 in the upper half

Source: docs/gguf.md of ggml (version 3) and `block_q8_0`, `block_q4_1` of its ggml-common.h.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VERSIONS = (2, 3)
BLOCK = 32  # weights
ALIGNMENT = 32  # bytes, unless the metadata says otherwise
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # of `struct`, by type
_STRING, _ARRAY = 8, 9
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where the weights of one tensor are; `shape` as numpy has it."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # from the beginning of the file


class Gguf:
    """One file, mapped into memory. Raises ValueError where it is none."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._data[:4] != b"GGUF":
            raise ValueError(f"got {path}, which does not begin with GGUF; expected a GGUF file")
        self._at = 4
        if (version := self._scalar("I")) not in VERSIONS:
            raise ValueError(f"got {path} of version {version}; expected 2 or 3")
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors = dict(self._tensor() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        self._begin = -(-self._at // alignment) * alignment

    def weights(self, name: str) -> Floats:
        """One tensor, dequantised. Raises ValueError for a type that is not read here."""
        tensor = self.tensors[name]
        if tensor.kind not in _KINDS:
            raise ValueError(
                f"got tensor {name} of type {tensor.kind}; expected one of {sorted(_KINDS)}"
            )
        count = int(np.prod(tensor.shape))
        weights, size, read = _KINDS[tensor.kind]
        raw = np.frombuffer(
            self._data, np.uint8, count // weights * size, self._begin + tensor.offset
        )
        return read(raw.reshape(-1, size)).reshape(tensor.shape)

    def _scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += struct.calcsize(kind)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            return [self._value(element) for _ in range(count)]
        return self._scalar(_SCALARS[kind])

    def _tensor(self) -> tuple[str, Tensor]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, Tensor(shape[::-1], self._scalar("I"), self._scalar("Q"))


def _f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32, copy=False)


def _q8_0(blocks: Bytes) -> Floats:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    scale, least = (blocks[:, at : at + 2].view("<f2").astype(np.float32) for at in (0, 2))
    halves = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    weights: Floats = scale * halves.astype(np.float32) + least
    return weights


# by type: weights of a block, its bytes, how they are read
_KINDS: dict[int, tuple[int, int, Callable[[Bytes], Floats]]] = {
    0: (1, 4, _f32),
    3: (BLOCK, 20, _q4_1),
    8: (BLOCK, 34, _q8_0),
}
