"""Output lengths by kind of prompt, and predictors of them on prompts that were left out: the
tables in docs/how-to/predictors.md that bench/prompt_lengths.py writes.

Lengths and predictions are those up to the token limit, so that answers which it cut are judged.
Predictors learn the first answer to each prompt, and are judged by the first ones to those left
out. Kendall's tau (b) is the mean of the folds, as predictions of different folds are not to be
compared; that within kinds the mean over the kinds, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from scipy.stats import CensoredData, ecdf, kendalltau

from kendall.queueing.errors import CommandError
from kendall.queueing.predictors.history import LengthHistory
from kendall.queueing.predictors.learned import FEWEST, LEVELS, learn, words_of

FOLDS = 5
INTERVAL = [4, 94]  # places in LEVELS: 90 %
Vector = npt.NDArray[np.float64]


class Row(TypedDict):
    """A prompt, and of each of its answers the tokens and whether the limit cut it."""

    kind: str
    template: str
    prompt: str
    tokens: list[int]
    cut: list[bool]


class Predicted(NamedTuple):
    """ln(tokens) of n prompts: `points` [n], `quantiles` [n, levels], or None."""

    points: Vector
    quantiles: Vector | None


Method = Callable[
    [Sequence[Row], Sequence[Row]], Predicted
]  # learns the first, predicts the others


def rank_correlation(first: Vector, second: Vector) -> float:
    """Kendall's tau, 0 where one of the two is constant."""
    tau = float(kendalltau(first, second).statistic) if len(first) > 1 else 0.0
    return 0.0 if np.isnan(tau) else tau


def pinball(lengths: Vector, quantiles: Vector) -> float:
    """Mean loss over `LEVELS`, tokens; quantiles [answers, levels], or one for all levels."""
    over = lengths[:, None] - quantiles
    return float(np.mean(np.maximum(LEVELS * over, (LEVELS - 1) * over)))


def best_tau(tau: float) -> float:
    """What a predictor would have that knew the mean of each prompt, where two answers have `tau`:
    2/pi arcsin sqrt(rho), rho = sin(pi tau / 2), of normal scores (Kruskal 1958).
    """
    return float(2 / np.pi * np.arcsin(np.sqrt(max(np.sin(np.pi * tau / 2), 0.0))))


def token_limit(_: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """Without a prediction: the limit of the request."""
    return Predicted(np.full(len(others), np.inf), None)


def one_law(learned: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """The same quantiles for all."""
    law = _quantiles(*_logs(learned))
    return Predicted(np.full(len(others), law[49]), np.tile(law, (len(others), 1)))


def history(learned: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """`LengthHistory` with the groups all, kind, template, prompt; quantiles from its errors at the
    prompts that it then learned. As in the gateway, an answer that was cut is not learned.
    """
    lengths, (logs, cut) = LengthHistory(), _logs(learned)
    points = np.empty(len(learned))
    for place, row in enumerate(learned):
        known = lengths.log_length(_groups(row))
        points[place] = logs[place] if known is None else known
        if not cut[place]:
            lengths.add(_groups(row), row["tokens"][0])
    errors = _quantiles(logs - points, cut)
    found = np.array([lengths.log_length(_groups(row)) for row in others], dtype=float)
    return Predicted(found, found[:, None] + errors)


def words(learned: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """`--length-predictor learned`. Raises CommandError: too few answers."""
    tokens, cut = np.exp(_logs(learned)[0]), _logs(learned)[1]
    model = learn([words_of(row["prompt"]) for row in learned], tokens, cut)
    if model is None:
        ended = int((~cut).sum())
        raise CommandError(f"got {ended} answers that ended; expected at least {FEWEST}: ask more")
    asked = [words_of(row["prompt"]) for row in others]
    points = np.array([model.log_length(each) for each in asked])
    quantiles = np.log([model.quantiles(each, tuple(LEVELS)) for each in asked])
    return Predicted(points, quantiles)


def described(data: Sequence[Row]) -> str:
    """The data by kind, and the tau between two answers: Markdown."""
    lines = [
        f"{len(data):,} prompts from {len({row['template'] for row in data})} templates, "
        f"{len(_pairs(data)):,} of them asked twice:",
        "",
        "| kind | prompts | median tokens | 90 % quantile | cut | tau of two answers |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind in [*dict.fromkeys(row["kind"] for row in data), "all"]:
        own = [row for row in data if kind in {row["kind"], "all"}]
        first, pairs = [row["tokens"][0] for row in own], _pairs(own)
        tau = f"{rank_correlation(*pairs.T):.2f}" if len(pairs) > 1 else ""
        middle, long = np.quantile(first, [0.5, 0.9], method="inverted_cdf")
        cut = np.mean([row["cut"][0] for row in own])
        lines.append(f"| {kind} | {len(own):,} | {middle} | {long} | {cut:.1%} | {tau} |")
    if len(_pairs(data)) > 1:
        best = best_tau(rank_correlation(*_pairs(data).T))
        known = f"A predictor that knew the mean of each prompt would have a tau of {best:.2f}"
        lines += ["", f"{known} (normal scores)."]
    return "\n".join(lines)


METHODS: dict[str, Method] = {
    "the token limit": token_limit,
    "one law for all": one_law,
    "`history`, by template": history,
    "`learned`": words,
}


def evaluation(data: Sequence[Row], limit: int, seed: int = 1) -> str:
    """Five folds of prompts, and five of templates: a table in Markdown."""
    rng = np.random.default_rng(seed)
    templates = sorted({row["template"] for row in data})
    of_template = dict(zip(templates, rng.permutation(len(templates)) % FOLDS, strict=True))
    folds = {
        "prompts": rng.permutation(len(data)) % FOLDS,
        "templates": np.array([of_template[row["template"]] for row in data]),
    }
    lines = [
        "| left out | predictor | tau | within kinds | loss, tokens | in the 90 % interval |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for left_out, fold in folds.items():
        for name, method in METHODS.items():
            parts = [_judged(method, data, fold == each, limit) for each in range(FOLDS)]
            tau, within, loss, covered = np.mean(parts, axis=0)
            share = "" if np.isnan(covered) else f"{covered:.2f}"
            lines.append(
                f"| {left_out} | {name} | {tau:.2f} | {within:.2f} | {loss:.1f} | {share} |"
            )
    return "\n".join(lines)


def _judged(
    method: Method, data: Sequence[Row], out: npt.NDArray[np.bool_], limit: int
) -> tuple[float, float, float, float]:
    """Tau, tau within kinds, mean pinball loss of all levels, coverage."""
    learned = [row for row, other in zip(data, out, strict=True) if not other]
    others = [row for row, other in zip(data, out, strict=True) if other]
    predicted, tokens = method(learned, others), np.array([row["tokens"][0] for row in others])
    points, kinds = np.minimum(np.exp(predicted.points), limit), [row["kind"] for row in others]
    parts = [np.array([each == kind for each in kinds]) for kind in sorted(set(kinds))]
    within = float(np.mean([rank_correlation(points[own], tokens[own]) for own in parts]))
    if predicted.quantiles is None:
        covered, quantiles = np.nan, points[:, None]
    else:
        quantiles = np.minimum(np.exp(predicted.quantiles), limit)
        low, high = quantiles[:, INTERVAL].T
        covered = float(np.mean((low <= tokens) & (tokens <= high)))
    return rank_correlation(points, tokens), within, pinball(tokens, quantiles), covered


def _pairs(data: Sequence[Row]) -> Vector:
    """Tokens of both answers [n, 2] of those that have two."""
    return np.array([row["tokens"] for row in data if len(row["tokens"]) > 1], float).reshape(-1, 2)


def _groups(row: Row) -> tuple[str, ...]:
    return "", row["kind"], row["template"], row["prompt"]


def _logs(data: Sequence[Row]) -> tuple[Vector, npt.NDArray[np.bool_]]:
    cut = np.array([row["cut"][0] for row in data], dtype=bool)
    return np.log([row["tokens"][0] for row in data]), cut


def _quantiles(values: Vector, cut: npt.NDArray[np.bool_]) -> Vector:
    """At LEVELS, by the product-limit estimator; infinite beyond the last one that was not cut."""
    law = ecdf(CensoredData(uncensored=values[~cut], right=values[cut])).sf
    place = np.searchsorted(1 - law.probabilities, LEVELS - 1e-12)
    return np.append(law.quantiles, np.inf)[place]
