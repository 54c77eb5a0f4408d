"""A second model beside that of the latency law: which requests it serves, and where. As a text,
with its latency law or profile last:

    threshold=30,switch=0.4,latency=a=0.005,c=0.05

    threshold  tokens: requests whose predicted length is at most so long go to the second model
    share      instead: so large a share of the requests asks for it, whatever their lengths
    switch     seconds to load either model on a machine that holds one at a time (0: it holds both)
    first      arrival, or loaded: requests of the model in memory go before all others
    servers    instead: so many of the servers have the second model, the others the first one

With servers of their own, chosen by length, it is size interval task assignment (SITA; Harchol-
Balter, Crovella and Murta 1999).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.durations import Duration
from kendall.policies.text import (
    SpecError,
    check_text,
    format_number,
    parse_number,
    split_pairs,
    suggest,
)
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import load_law
from kendall.queueing.models.soap.token_orders import predictor_in_tokens
from kendall.queueing.predictors.predictor_text import PredictorText

EXAMPLE = "threshold=30,switch=0.4,latency=a=0.005,c=0.05"
FIRST = ("arrival", "loaded")
_KEYS = ("threshold", "share", "switch", "first", "servers")
_LATENCY = "latency="


@dataclass(frozen=True, kw_only=True)
class SecondModel:
    """Raises SpecError."""

    law: LatencyModel
    threshold: float | None = None  # predicted tokens
    share: float | None = None
    switch: float = 0.0  # seconds
    first: str = FIRST[0]
    servers: int | None = None  # None: both models are on every server

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.share is None):
            given = "neither" if self.threshold is None else "both"
            self._refuse(f"{given} of threshold and share", "one of them")
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            self._refuse(f"threshold={self.threshold:g}", "a finite number of tokens > 0")
        if self.share is not None and not 0 < self.share < 1:
            self._refuse(f"share={self.share:g}", "a share of the requests between 0 and 1")
        if not 0 <= self.switch < math.inf:
            self._refuse(f"switch={self.switch:g}", "finite seconds >= 0")
        if self.first not in FIRST:
            self._refuse(f"first={self.first}", f"arrival or loaded{suggest(self.first, FIRST)}")
        if self.servers is not None and self.servers < 1:
            self._refuse(f"{self.servers} servers", "a whole number >= 1")
        if self.servers is not None and (self.switch or self.first != FIRST[0]):
            other = f"switch={self.switch:g}" if self.switch else f"first={self.first}"
            self._refuse(
                f"servers and {other}",
                "one of the two: servers with a model of their own load no other",
            )

    @staticmethod
    def _refuse(got: str, expected: str) -> None:
        raise SpecError(f"got {got} in second_model; expected {expected}")

    def chosen(self, predicted: Vector) -> np.ndarray:
        """Which requests with these predicted lengths go to it, by its threshold."""
        assert self.threshold is not None
        return np.asarray(predicted <= self.threshold)

    def chances(self, lengths: TokenDistribution, predictor: PredictorText, limit: int) -> Vector:
        """That a request goes to it, by its length: 0, 1, ..; predictions are at most `limit`."""
        if self.share is not None:
            return np.full(len(lengths.pmf), self.share)
        law = predictor_in_tokens(predictor, limit)
        below = law.at_most(np.array(self.threshold), lengths.counts[1:])
        return np.append(0.0, below)

    def __str__(self) -> str:
        values = {
            "threshold": self.threshold,
            "share": self.share,
            "switch": self.switch or None,
            "servers": self.servers,
        }
        parts = [f"{key}={format_number(value)}" for key, value in values.items() if value]
        first = [f"first={self.first}"] if self.first != FIRST[0] else []
        return ",".join([*parts, *first, f"{_LATENCY}{self.law}"])


def parse_second_model(text: str) -> SecondModel:
    """Raises SpecError: no latency, unknown keys, values out of range."""
    check_text("second_model", text, EXAMPLE)
    head, found, latency = text.partition(_LATENCY)
    if not found or not latency.strip() or (head.strip() and not head.rstrip().endswith(",")):
        raise SpecError(
            f"got {text!r:.80} for the second model; expected settings and its latency law or "
            f"profile last, for example {EXAMPLE}"
        )
    settings = head.strip().removesuffix(",")
    pairs = split_pairs(settings, context=settings, example=EXAMPLE) if settings else {}
    for key in pairs:
        if key not in _KEYS:
            raise SpecError(
                f"got key {key!r} in second_model; expected {', '.join(_KEYS)}, and latency last"
                f"{suggest(key, _KEYS)}"
            )
    numbers = {
        key: parse_number(key, pairs[key], settings)
        for key in ("threshold", "share")
        if key in pairs
    }
    return SecondModel(
        law=load_law(latency.strip()),
        switch=Duration()(pairs.get("switch", 0.0)),
        first=pairs.get("first", FIRST[0]),
        servers=_servers(pairs["servers"]) if "servers" in pairs else None,
        **numbers,
    )


def _servers(value: str) -> int:
    if not value.isdecimal():
        raise SpecError(f"got {value} servers in second_model; expected a whole number >= 1")
    return int(value)
