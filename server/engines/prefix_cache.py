"""Which prompts an engine has computed already: whole blocks of them, the least recently used
forgotten first, as vLLM's prefix cache has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

BLOCK = 16  # tokens


def block_keys(prompt: Sequence[int], salt: str | None = None, size: int = BLOCK) -> list[int]:
    """Of each whole block of `size` tokens, or bytes, the hash of the salt and of all up to the
    block's end.
    """
    keys, chain = list[int](), hash(salt)
    for start in range(0, len(prompt) - size + 1, size):
        block = prompt[start : start + size]
        chain = hash((chain, block if isinstance(block, bytes) else tuple(block)))
        keys.append(chain)
    return keys


class PrefixCache:
    """A prefix cache with room for so many tokens."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: dict[int, None] = {}  # by the hash of all up to their ends; oldest first

    def take(self, prompt: Sequence[int], salt: str | None = None) -> int:
        """How many of its first tokens need not be computed; the last one always is. Its blocks are
        there from here on, for prompts of the same salt.
        """
        keys = block_keys(prompt, salt)
        known = next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):  # the end of a prompt is forgotten before its beginning
            self._blocks.pop(key, None)
            self._blocks[key] = None
        excess = max(0, len(self._blocks) - self._most)
        for key in list(islice(self._blocks, excess)):
            del self._blocks[key]
        return min(known * BLOCK, max(0, len(prompt) - 1) // BLOCK * BLOCK)
