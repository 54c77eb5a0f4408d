"""Output lengths predicted from prompts: ridge regression of ln(tokens) on the words of the prompt.

    ln N = a + w . v / |v| + e        v: idf of the words, of the pairs of neighbours, and of signs:
                                      the first two, the last; steps of how many words there are,
                                      and of a text its characters, lines, digits and sentences

Words are those of a text, or the tokens of a prompt; only their hashes are kept. Answers that a
limit cut are at least so long: ln N is their expectation given that (Buckley and James 1979). The
penalty of w is that of the least squared error on prompts that were left out (five folds; with
many answers it is given). The law of e is the product-limit estimate over these predictions, in
groups of near predictions, so that quantiles hold for prompts that were never seen.

Measured on AlpacaEval (docs/how-to/predictors.md): Kendall's tau with the length .33 to .38.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BUCKET_BITS = 18
HEAD, TAIL = 64, 192  # words of a long prompt that are looked at
PENALTY = 1.0  # of the squared weights
PENALTIES = (0.5, 1.0, 2.0, 4.0)  # that are tried with few answers
FEW = 1000  # 5,000 answers take 0.6 s of a processor for each fold and penalty
FOLDS = 5
FEWEST = 50  # answers to learn from
LEVELS = np.arange(1, 100) / 100  # of the quantiles of e
_ROUNDS = 4  # of expectations of lengths that were cut
# of UTF-8 in lower case: a crc32 of bytes costs a third of the time of one of characters
_WORD = re.compile(rb"[0-9a-z_\x80-\xff]+|[^\s0-9a-z_\x80-\xff]")
_DIGITS = bytes(range(ord("0"), ord("9") + 1))
_LETTERS = 8  # characters of a word, at most, on average
WORD_STEPS, TEXT_STEPS = 6, (4, 2, 2, 2)  # buckets for each doubling: of characters, lines, ..
GROUP, MOST_GROUPS = 100, 3  # answers whose errors are one law, at least; such laws
_MIX = np.array([0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F], dtype=np.uint32)
_MARKS = np.array([0x12345671, 0x22345679, 0x3234567B, 0x5234567D], dtype=np.uint32)


def words_of(prompt: str | Sequence[int]) -> Words:
    """The buckets of a prompt, distinct and ascending; a prompt is a text or its tokens."""
    text = isinstance(prompt, str)
    counts: tuple[int, ...] = ()
    if text:
        kept = _ends(prompt, HEAD * _LETTERS, TAIL * _LETTERS).lower().encode(errors="replace")
        found = _ends(_WORD.findall(kept), HEAD, TAIL)
        words = np.fromiter(map(crc32, found), np.uint32, len(found))
        digits = len(kept) - len(kept.translate(None, _DIGITS))
        counts = len(prompt), kept.count(b"\n"), digits, kept.count(b".") + kept.count(b"?")
    else:
        words = np.array(_ends(prompt, HEAD, TAIL), dtype=np.uint32)
    one, two, sign, tag = _MIX
    hashed = words * one
    pairs = (hashed[:-1] ^ hashed[1:] * two) * sign
    parts = [hashed, pairs, hashed[:1] + tag, pairs[:1] + tag, hashed[-1:] * tag]
    parts += [_steps(WORD_STEPS, max(len(words), 1)) * tag, _MIX[:1]]  # never empty
    for count, steps, mark in zip(counts, TEXT_STEPS, _MARKS, strict=False):
        parts.append(_steps(steps, count + 1) * mark)
    found = np.concatenate(parts) * one >> np.uint32(32 - BUCKET_BITS)
    found.sort()
    new = np.empty(len(found), dtype=np.bool_)  # a third of the time of np.unique
    new[0] = True
    np.not_equal(found[1:], found[:-1], out=new[1:])
    return np.asarray(found[new])


def _steps(per_doubling: int, count: int) -> Words:
    """One more for each step that a count >= 1 has reached."""
    return np.arange(1, int(per_doubling * math.log2(count)) + 1, dtype=np.uint32)


def _ends(of: Any, head: int, tail: int) -> Any:
    """Its first and last elements, if they are not all of it."""
    return of if len(of) <= head + tail else of[:head] + of[-tail:]


@dataclass(frozen=True, eq=False)
class Regression:
    """ln(tokens) of a prompt: `intercept`, and for every bucket its `idf` (0: in no prompt that was
    learned from) and `weights`.
    """

    intercept: float
    idf: Vector
    weights: Vector

    def log_length(self, words: Words) -> float:
        """The expected ln(tokens)."""
        idf = self.idf[words]
        square = float(idf @ idf)
        return self.intercept + (float(idf @ self.weights[words]) / square**0.5 if square else 0.0)


@dataclass(frozen=True, eq=False)
class ErrorLaws:
    """Quantiles of e at `LEVELS` [groups, levels], at predictions around each of the `centres`, ln
    tokens, increasing; between two of them in between.
    """

    centres: Vector
    quantiles: Vector

    def at(self, log_length: float) -> Vector:
        """e at `LEVELS` of a prediction."""
        place = float(np.interp(log_length, self.centres, range(len(self.centres))))
        below = int(place)
        if place == below:
            return np.asarray(self.quantiles[below])
        low, high = self.quantiles[below : below + 2]
        return np.asarray((1 - place + below) * low + (place - below) * high)


@dataclass(frozen=True, eq=False)
class LearnedLengths:
    """A regression of so many `answers`, and its `errors`. Quality on prompts that were left out:
    `tau`, Kendall's with the length, and the mean `loss` of the quantiles in tokens beside that of
    one law for all (`plain_loss`).
    """

    answers: int
    regression: Regression
    errors: ErrorLaws
    tau: float
    loss: float
    plain_loss: float

    def log_length(self, words: Words) -> float:
        """The expected ln(tokens)."""
        return self.regression.log_length(words)

    def log_quantiles(self, log_length: float, levels: Sequence[float] | Vector) -> Vector:
        """ln(tokens) at each of the levels, of a prompt of this expected ln(tokens)."""
        return np.asarray(log_length + np.interp(levels, LEVELS, self.errors.at(log_length)))

    def quantiles(self, words: Words, levels: Sequence[float] | Vector = (0.5,)) -> Vector:
        """Tokens, not rounded, at each of the levels."""
        return np.exp(self.log_quantiles(self.log_length(words), levels))

    @property
    def helps(self) -> bool:
        """Whether it predicts better than one law for all prompts."""
        return self.tau > 0 and self.loss < self.plain_loss


def learn(prompts: Sequence[Words], tokens: Vector, cut: Mask) -> LearnedLengths | None:
    """A model of the answers to these prompts; `cut`: those that a limit ended. None where they
    are too few, or all alike.
    """
    ended = ~cut
    if ended.sum() < FEWEST or np.ptp(tokens[ended]) == 0:
        return None
    logs = np.log(tokens)
    penalties = PENALTIES if len(tokens) <= FEW else (PENALTY,)
    tried = [_left_out(prompts, logs, cut, penalty) for penalty in penalties]
    squares = [float(np.mean((logs - left_out)[ended] ** 2)) for left_out in tried]
    best = int(np.argmin(squares))
    left_out, errors = tried[best], _error_laws(tried[best], logs, cut)
    plain = _quantiles(logs, cut)
    from scipy.stats import kendalltau  # noqa: PLC0415 - heavy, and only here

    tau = kendalltau(left_out[ended], logs[ended]).statistic
    return LearnedLengths(
        int(ended.sum()),
        _fitted(prompts, logs, cut, penalties[best]),
        errors,
        tau=0.0 if np.isnan(tau) else float(tau),
        loss=_loss(
            tokens[ended], np.array([log + errors.at(float(log)) for log in left_out[ended]])
        ),
        plain_loss=_loss(tokens[ended], plain[None, :]),
    )


def _left_out(prompts: Sequence[Words], logs: Vector, cut: Mask, penalty: float) -> Vector:
    """ln(tokens) of each prompt, predicted from those of the other folds."""
    folds, found = np.arange(len(logs)) % FOLDS, np.empty(len(logs))
    for fold in range(FOLDS):
        own = folds == fold
        rest = [words for words, out in zip(prompts, own, strict=True) if not out]
        fitted = _fitted(rest, logs[~own], cut[~own], penalty)
        found[own] = [fitted.log_length(prompts[place]) for place in np.flatnonzero(own)]
    return found


def _error_laws(predicted: Vector, logs: Vector, cut: Mask) -> ErrorLaws:
    """As many as there are groups of enough answers that no limit cut."""
    count = int(min(MOST_GROUPS, max(1, (~cut).sum() // GROUP)))
    edges = np.quantile(predicted[~cut], np.arange(1, count) / count)
    group = np.searchsorted(edges, predicted, side="right")
    kept = [own for place in range(count) if not cut[own := group == place].all() and own.any()]
    centres = np.array([predicted[own].mean() for own in kept])
    return ErrorLaws(
        centres, np.array([_quantiles((logs - predicted)[own], cut[own]) for own in kept])
    )


def _fitted(prompts: Sequence[Words], logs: Vector, cut: Mask, penalty: float) -> Regression:
    """To ln(tokens), of which those that were cut are bounds."""
    from scipy.sparse import csr_matrix  # noqa: PLC0415 - heavy, and only to learn
    from scipy.sparse.linalg import lsmr  # noqa: PLC0415 - as above

    counts = [len(words) for words in prompts]
    buckets, columns = np.unique(np.concatenate(prompts), return_inverse=True)
    known_in = np.bincount(columns, minlength=len(buckets))
    idf = np.log((1 + len(prompts)) / (1 + known_in)) + 1
    ends = np.concatenate([[0], np.cumsum(counts)])
    values = idf[columns]
    norms = np.sqrt(np.add.reduceat(values**2, ends[:-1]))
    shape = (len(prompts), len(buckets))
    matrix = csr_matrix((values / np.repeat(norms, counts), columns, ends), shape)
    expected = logs.copy()
    for _ in range(_ROUNDS if cut.any() else 1):
        intercept = float(expected.mean())
        weights = lsmr(matrix, expected - intercept, damp=penalty**0.5)[0]
        fitted = intercept + matrix @ weights
        expected[cut] = fitted[cut] + _beyond(logs - fitted, cut)
    dense = np.zeros((2, 1 << BUCKET_BITS))
    dense[:, buckets] = idf, weights
    return Regression(intercept, *dense)


def _survival(values: Vector, cut: Mask) -> tuple[Vector, Vector]:
    """Values and the probability of more than each, by the product-limit estimator."""
    from scipy.stats import CensoredData, ecdf  # noqa: PLC0415 - heavy, and only to learn

    found = ecdf(CensoredData(uncensored=values[~cut], right=values[cut])).sf
    return np.asarray(found.quantiles), np.asarray(found.probabilities)


def _quantiles(values: Vector, cut: Mask) -> Vector:
    """At `LEVELS`; beyond the last value that ended, that one."""
    at, above = _survival(values, cut)
    place = np.searchsorted(1 - above, LEVELS - 1e-12)
    return np.asarray(at[np.minimum(place, len(at) - 1)])


def _beyond(errors: Vector, cut: Mask) -> Vector:
    """E[e | e > each of those that were cut], at least that."""
    at, above = _survival(errors, cut)
    mass = -np.diff(above, prepend=1.0)
    mass[-1] += above[-1]  # what outlives the last one that ended
    rest, weighted = np.cumsum(mass[::-1])[::-1], np.cumsum((mass * at)[::-1])[::-1]
    place = np.searchsorted(at, errors[cut], side="right")
    known = np.minimum(place, len(at) - 1)
    expected = weighted[known] / np.maximum(rest[known], 1e-12)
    return np.asarray(np.maximum(expected, errors[cut]))


def _loss(tokens: Vector, log_quantiles: Vector) -> float:
    """Mean pinball loss over all levels, tokens."""
    over = tokens[:, None] - np.exp(log_quantiles)
    return float(np.mean(np.maximum(LEVELS * over, (LEVELS - 1) * over)))
