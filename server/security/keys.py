"""Keys: kept as SHA-256 digests, compared in constant time, never written anywhere.

A key is a long random text, not a password: a fast digest without salt is enough, and costs a
request one microsecond.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kendall.policies.text import SpecError
from kendall.remote import check_key

SHORT = 16  # characters: a shorter key can be guessed


@dataclass(frozen=True, slots=True)
class Key:
    """One key, of which only the digest is known."""

    digest: bytes
    short: bool  # as it was given: fewer than 16 characters

    @property
    def name(self) -> str:
        """Its name in logs and limits: eight hexadecimal digits that tell nothing of the key."""
        return self.digest.hex()[:8]


def read_keys(flag: str, given: Sequence[str], file: Path | None) -> tuple[Key, ...]:
    """The keys of a flag and of its file (one per line; blank lines and `#` comments are
    skipped). Raises SpecError.
    """
    texts = list(given)
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(
                f"got {flag}-file {file}; expected a readable text file, one key per line ({error})"
            ) from None
        kept = [line for line in lines if line and not line.startswith("#")]
        if not kept:
            raise SpecError(f"got {flag}-file {file}, which holds no key; expected one per line")
        texts += kept
    keys: dict[bytes, Key] = {}
    for text in texts:
        if not text:
            raise SpecError(
                f"got {flag} with an empty key; expected printable ASCII, at least one character"
            )
        check_key(text, flag)
        digest = sha256(text.encode()).digest()
        keys[digest] = Key(digest, len(text) < SHORT)
    return tuple(keys.values())


def holder(keys: Sequence[Key], token: bytes) -> Key | None:
    """The key that the token is. All of them are compared, each in constant time: how long it
    takes tells nothing.
    """
    digest, found = sha256(token).digest(), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found
