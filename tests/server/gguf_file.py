"""Writes small GGUF files for the tests of what reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

F32, Q4_1, Q8_0 = 0, 3, 8  # types of tensors
_ARRAY, _STRING = 9, 8
Tensors = Mapping[str, tuple[int, tuple[int, ...], bytes]]  # type, shape as numpy has it, data


def gguf_file(
    path: Path, metadata: Mapping[str, Any], tensors: Tensors, alignment: int = 32
) -> Path:
    """Version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        head += _text(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (kind, shape, data) in tensors.items():
        body += b"\0" * (-len(body) % alignment)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _text(name) + sizes + struct.pack("<IQ", kind, len(body))
        body += data
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + body)
    return path


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return _STRING, _text(value)
        case _:
            parts = [_value(part) for part in value]
            data = b"".join(part for _, part in parts)
            return _ARRAY, struct.pack("<IQ", parts[0][0], len(parts)) + data
