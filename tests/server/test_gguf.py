"""GGUF files are read as ggml's documents say; other files are refused in words."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from kendall.server.engines.gguf import Gguf
from tests.server.gguf_file import F32, Q4_1, Q8_0, gguf_file


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    metadata = {
        "text": "Ġqueue",
        "count": 7,
        "ratio": 0.5,
        "flag": True,
        "words": ["a", "", "b c"],
        "numbers": [3, 1],
    }
    assert Gguf(gguf_file(tmp_path / "m.gguf", metadata, {})).metadata == metadata


def test_weights_of_each_type_are_dequantised(tmp_path: Path) -> None:
    plain = np.array([[1.5, -2.0, 3.0], [0.0, 1e-3, 7.0]], np.float32)
    # one block: scale 0.5, values -16 .. 15
    eights = struct.pack("<e32b", 0.5, *range(-16, 16))
    # two blocks: scale 0.25 and least -1; weight i has value i mod 16, then 15 everywhere
    fours = struct.pack("<ee16B", 0.25, -1.0, *(i | i << 4 for i in range(16)))
    fours += struct.pack("<ee16B", 2.0, 8.0, *([0xF0] * 16))
    source = Gguf(
        gguf_file(
            tmp_path / "m.gguf",
            {},
            {
                "plain": (F32, (2, 3), plain.tobytes()),
                "eights": (Q8_0, (32,), eights),
                "fours": (Q4_1, (2, 32), fours),
            },
        )
    )
    assert source.tensors["plain"].shape == (2, 3)
    np.testing.assert_array_equal(source.weights("plain"), plain)
    np.testing.assert_array_equal(source.weights("eights"), np.arange(-16, 16) / 2)
    first, second = source.weights("fours")
    np.testing.assert_array_equal(first, 0.25 * np.tile(np.arange(16), 2) - 1)
    np.testing.assert_array_equal(second, [8.0] * 16 + [38.0] * 16)


def test_data_begins_where_the_alignment_says(tmp_path: Path) -> None:
    data = {"w": (F32, (1,), np.float32([3.25]).tobytes())}
    path = gguf_file(tmp_path / "m.gguf", {"general.alignment": 128}, data, alignment=128)
    assert Gguf(path).weights("w").tolist() == [3.25]


def test_another_file_another_version_and_another_type_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"PK\3\4" + b"\0" * 30)
    with pytest.raises(ValueError, match="does not begin with GGUF; expected a GGUF file"):
        Gguf(other)
    other.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="of version 1; expected 2 or 3"):
        Gguf(other)
    source = Gguf(gguf_file(tmp_path / "m.gguf", {}, {"w": (14, (256,), b"\0" * 210)}))
    with pytest.raises(ValueError, match="got tensor w of type 14; expected one of"):
        source.weights("w")
