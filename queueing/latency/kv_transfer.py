"""How long the KV memory of a request takes from the server that prefills to the one that decodes,
as a text:

    2ms                    for every request
    setup=2ms,token=5us    and for each token of its prompt

Transfers do not wait for each other, and take no time of the servers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kendall.policies.arguments import real_number
from kendall.policies.durations import parse_duration
from kendall.policies.text import (
    SpecError,
    check_keys,
    check_text,
    format_number,
    short_number,
    split_pairs,
)
from kendall.queueing.latency.kv_memory import LONGEST

EXPECTED = "a duration such as 2ms, or setup=2ms,token=5us"


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """`setup` seconds for a request and `token` for each token of its prompt. Raises SpecError."""

    setup: float = 0.0
    token: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = real_number(field.name, getattr(self, field.name))
            if not 0 <= value <= LONGEST:
                raise SpecError(
                    f"got {field.name}={format_number(value)} in a KV transfer; expected 0 to "
                    f"{LONGEST:,.0f} s"
                )

    def __bool__(self) -> bool:
        return bool(self.setup or self.token)

    def in_words(self) -> str:
        """What it takes, for people."""
        parts = [f"{short_number(self.setup)} s"] if self.setup else []
        parts += [f"{short_number(self.token)} s a prompt token"] if self.token else []
        return " and ".join(parts) or "0 s"

    def __str__(self) -> str:
        values = dataclasses.asdict(self).items()
        return ",".join(f"{key}={format_number(value)}" for key, value in values if value)


def parse_kv_transfer(text: str) -> KvTransfer:
    """Raises SpecError: no text, an unknown key, not a duration."""
    check_text("kv_transfer", text, "2ms")
    if not text.strip():
        raise SpecError(f"got an empty KV transfer; expected {EXPECTED}")
    given = text if "=" in text.partition(",")[0] else f"setup={text.strip()}"
    pairs = split_pairs(given, context=text, example="setup=2ms")
    known = tuple(field.name for field in dataclasses.fields(KvTransfer))
    check_keys(pairs, known, "a KV transfer", EXPECTED)
    return KvTransfer(**{key: _seconds(key, value, text) for key, value in pairs.items()})


def _seconds(key: str, value: str, text: str) -> float:
    try:
        return parse_duration(value)
    except SpecError:
        raise SpecError(
            f"got {key}={value} in the KV transfer {text!r}; expected {EXPECTED}"
        ) from None
