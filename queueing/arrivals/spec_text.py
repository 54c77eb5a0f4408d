"""Texts `name[:key=value{,key=value}]` read against a table of examples: which names, which
keys, which may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kendall.policies.text import SpecError, check_keys, parse_number, split_spec, suggest


def read_spec(
    text: str, noun: str, examples: Mapping[str, str], optional: frozenset[str] = frozenset()
) -> tuple[str, dict[str, str]]:
    """Name and pairs of a text; the keys of a name are those of its example. Raises SpecError:
    unknown or missing.
    """
    name, pairs = split_spec(text, examples)
    if name not in examples:
        raise SpecError(
            f"got {noun} {name!r}; expected one of "
            f"{', '.join(examples)}{suggest(name, tuple(examples))}"
        )
    keys = tuple(split_spec(examples[name])[1])
    check_keys(pairs, keys, f"{noun} {name}")
    for key in keys:
        if key not in pairs and key not in optional:
            raise SpecError(f"got {text!r}; expected {key} too, for example {examples[name]}")
    return name, pairs


def parse_numbers(key: str, text: str, context: str) -> tuple[float, ...]:
    """`"5/50"` as (5.0, 50.0). Raises SpecError."""
    return tuple(parse_number(key, part, context) for part in text.split("/"))


def listed(text: str) -> list[str]:
    """The values of a list with commas or blanks between them; empty where one is missing:
    `0.3,,0.5`.
    """
    return re.split(r"\s*,\s*|\s+", text.strip())
