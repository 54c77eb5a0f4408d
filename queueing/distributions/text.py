"""The text form of token distributions: which names and keys there are, what a mixture looks like,
the canonical form.

    name:key=value{,key=value}
    mixture:weights=0.3+0.7,parts=lognormal:mu=5:sigma=0.4+geometric:mean=300

A part of a mixture is an ordinary text whose commas are colons; `+` separates parts, and weights.
No character of it needs quoting in a shell. Mixtures do not nest. Canonical: keys in the order of
the examples, shortest numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kendall.policies.text import (
    SpecError,
    check_keys,
    check_text,
    counted,
    format_number,
    parse_number,
    split_spec,
    suggest,
)

EXAMPLES = {
    "deterministic": "deterministic:value=128",
    "uniform": "uniform:low=0,high=1000",
    "normal": "normal:mean=800,std=20",
    "lognormal": "lognormal:mu=7,sigma=0.7",
    "exponential": "exponential:mean=200",
    "geometric": "geometric:mean=200",
    "weibull": "weibull:shape=1.5,scale=200",
    "pareto": "pareto:alpha=2.5,minimum=20",
    "empirical": "empirical:path=counts.txt",
    "mixture": "mixture:weights=0.3+0.7,parts=lognormal:mu=5:sigma=0.4+geometric:mean=300",
}
KEYS = {name: tuple(split_spec(example)[1]) for name, example in EXAMPLES.items()}
_NEXT_PART = re.compile(r"\+(?=[A-Za-z_]+:)")  # the plus of 1e+3 stays


@dataclass(frozen=True, slots=True)
class DistributionText:
    """A text, taken apart. Values are checked to be numbers, not to be sensible ones."""

    name: str
    numbers: tuple[float, ...] = ()  # in the order of the keys; a mixture's weights
    path: str | None = None  # empirical
    parts: tuple[DistributionText, ...] = ()  # mixture

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.name}:path={self.path}"
        values = [format_number(number) for number in self.numbers]
        if self.parts:
            parts = "+".join(str(part).replace(",", ":") for part in self.parts)
            return f"{self.name}:weights={'+'.join(values)},parts={parts}"
        return f"{self.name}:" + ",".join(
            f"{key}={value}" for key, value in zip(KEYS[self.name], values, strict=True)
        )


def read_text(text: str) -> DistributionText:
    """The text, taken apart. Raises SpecError: no text, unknown or missing name or key, not a
    number, a mixture within a mixture.
    """
    check_text("output_tokens", text, EXAMPLES["geometric"])
    if not text.strip():
        raise SpecError(
            f"got an empty distribution; expected one of {', '.join(KEYS)}, for example "
            f"{EXAMPLES['geometric']}"
        )
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        raise SpecError(
            f"got lengths {text.strip()!r}; expected a distribution: did you mean "
            f"deterministic:value={format_number(value)}?"
        )
    name, pairs = split_spec(text, EXAMPLES)
    _check_keys(name, pairs)
    if name == "empirical":
        return DistributionText(name, path=pairs["path"])
    if name == "mixture":
        return _read_mixture(text, pairs["weights"], pairs["parts"])
    return DistributionText(name, tuple(parse_number(key, pairs[key], text) for key in KEYS[name]))


def format_distribution(text: str) -> str:
    """The canonical text of the same law. Raises SpecError as `read_text` does."""
    return str(read_text(text))


def _check_keys(name: str, pairs: dict[str, str]) -> None:
    if name not in KEYS:
        raise SpecError(
            f"got distribution {name!r}; expected one of "
            f"{', '.join(KEYS)}{suggest(name, tuple(KEYS))}"
        )
    check_keys(pairs, KEYS[name], f"distribution {name}")
    for key in KEYS[name]:
        if key not in pairs:
            raise SpecError(
                f"got distribution {name} without {key}; expected it, for example {EXAMPLES[name]}"
            )


def _read_mixture(text: str, weights: str, parts: str) -> DistributionText:
    numbers = tuple(parse_number("weights", weight, text) for weight in weights.split("+"))
    laws = []
    for part in _NEXT_PART.split(parts):
        name, colon, rest = part.partition(":")
        if name == "mixture":
            raise SpecError(f"got a mixture within {text!r}; expected its parts themselves")
        laws.append(read_text(f"{name}{colon}{rest.replace(':', ',')}"))
    if len(numbers) != len(laws):
        raise SpecError(
            f"got {counted(len(numbers), 'weight')} and {counted(len(laws), 'part')} in {text!r}; "
            "expected one weight for each part"
        )
    return DistributionText("mixture", numbers, parts=tuple(laws))
