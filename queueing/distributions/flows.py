"""Flows: whose the requests are, for an order that counts the service of each (`vtc`).

`heavy=9,light=1` names two flows; a request is of each with a probability in proportion to its
number, independently of all others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.policies.orders.order import LARGEST
from kendall.policies.text import SpecError, format_number, parse_number, split_pairs

EXAMPLE = "heavy=9,light=1"
MOST = 1000
_CHILD = 2**20  # of a seed, beyond those that it spawns
_NAME = re.compile(r"[!-~]{1,128}")  # what a gateway takes as a fairness id


@dataclass(frozen=True, slots=True)
class Flows:
    """Names and weights, in the order of the text."""

    names: tuple[str, ...]
    weights: tuple[float, ...]

    def __str__(self) -> str:
        """As `parse_flows` reads it."""
        pairs = zip(self.names, self.weights, strict=True)
        return ",".join(f"{name}={format_number(weight)}" for name, weight in pairs)

    def draw(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """The place of the flow of each of so many requests."""
        edges = np.cumsum(self.weights)
        places: npt.NDArray[np.int64] = np.searchsorted(
            edges, rng.random(size) * edges[-1], side="right"
        )
        return places

    def of_run(self, stream: np.random.SeedSequence, size: int) -> npt.NDArray[np.int64]:
        """The same for a simulated run of that seed, whatever else was drawn from it."""
        child = np.random.SeedSequence(stream.entropy, spawn_key=(*stream.spawn_key, _CHILD))
        return self.draw(np.random.default_rng(child), size)

    def names_of_run(self, stream: np.random.SeedSequence, size: int) -> npt.NDArray[np.str_]:
        """The flows of those requests."""
        return np.array(self.names)[self.of_run(stream, size)]


def parse_flows(text: str) -> Flows:
    """Raises SpecError."""
    if not text.strip():
        raise SpecError(f"got no flow; expected a name and a weight for each, as in {EXAMPLE}")
    pairs = split_pairs(text, text, EXAMPLE)
    if len(pairs) > MOST:
        raise SpecError(f"got {len(pairs)} flows; expected at most {MOST}")
    weights = {name: parse_number(name, value, text) for name, value in pairs.items()}
    for name, weight in weights.items():
        check_name(name)
        if not 0 < weight <= LARGEST:
            raise SpecError(
                f"got flow {name}={weight:g}; expected a weight > 0, at most {LARGEST:g}"
            )
    return Flows(tuple(weights), tuple(weights.values()))


def parse_models(texts: Sequence[str]) -> Flows:
    """The models of `["a=0.7", "b=0.3"]` with their shares; one alone is a name as it stands.
    Raises SpecError.
    """
    if len(texts) < 2:
        return Flows(tuple(texts), (1.0,) * len(texts))
    shares: dict[str, float] = {}
    for text in texts:
        name, equals, share = text.rpartition("=")
        if not name or not equals:
            raise SpecError(
                f"got --model {text} among several; expected NAME=SHARE, for example {text}=0.5"
            )
        if name in shares:
            raise SpecError(f"got --model {name} twice; expected each model once")
        shares[name] = parse_number(name, share, f"--model {text}")
        if not 0 < shares[name] <= LARGEST:
            raise SpecError(f"got --model {text}; expected a share > 0, for example {name}=0.5")
    return Flows(tuple(shares), tuple(shares.values()))


def check_name(name: str) -> None:
    """Raises SpecError for what a header cannot carry."""
    if _NAME.fullmatch(name) is None:
        raise SpecError(
            f"got flow {name!r:.140}; expected 1 to 128 printable ASCII characters without spaces"
        )
