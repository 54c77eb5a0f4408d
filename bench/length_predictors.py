"""Predictors of output lengths, judged on prompts that were left out: the tables of
docs/how-to/predictors.md that bench/prompt_lengths.py writes, and those on public data:

    .venv/bin/python bench/length_predictors.py FOLDER [--cost]

FOLDER has AlpacaEval's prompts with the lengths of six models' answers (lengths/alpaca-eval.jsonl,
one object a line: `prompt`, `lengths`) and Mooncake's trace (traces/mooncake-conversation.jsonl).
The numbers go into bench/results/lengths.json; `--cost` measures processor times, on a quiet
machine.

Lengths and predictions are those up to the token limit, so that answers which it cut are judged.
Predictors learn the first answer to each prompt, and are judged by the first ones to those left
out. Kendall's tau (b) is the mean of the folds, as predictions of different folds are not to be
compared; that within kinds the mean over the kinds, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from scipy.stats import CensoredData, ecdf, kendalltau

import kendall
from kendall.queueing.errors import CommandError
from kendall.queueing.predictors.history import LengthHistory
from kendall.queueing.predictors.learned import FEWEST, LEVELS, LearnedLengths, learn, words_of

FOLDS, SEED, LOADS, LIMIT = 5, 0, (0.5, 0.8, 0.9), 2048
SECONDS_A_TOKEN = 0.01
SIZES = {"10 tokens": 10, "200 tokens": 200, "2,000 tokens": 2000, "100 KB": 17_000}  # words
CALLS = 2000
LONGEST = 0.9  # quantile of the lengths from which on they are the longest tenth
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


def ridge(learned: Sequence[Row], others: Sequence[Row]) -> Predicted:
    """Words and pairs of neighbours by tf-idf with smooth idf, rows of length 1, ridge regression
    of ln(tokens) with a penalty of 1: what the table of gains was first made with.
    """
    grams = [Counter(words_and_pairs(row["prompt"])) for row in [*learned, *others]]
    count, logs = len(learned), _logs(learned)[0]
    prompts = Counter(gram for each in grams[:count] for gram in each)
    column = {gram: place for place, gram in enumerate(prompts)}
    found = np.zeros((len(grams), len(column)))
    for row, each in zip(found, grams, strict=True):
        for gram in each.keys() & column.keys():
            row[column[gram]] = each[gram]
    found *= np.log((1 + count) / (1 + np.array(list(prompts.values())))) + 1
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    own, mean = found[:count], logs.mean()
    weights = own.T @ np.linalg.solve(own @ own.T + np.eye(count), logs - mean)
    return Predicted(mean + found[count:] @ weights, None)


def words_and_pairs(prompt: str) -> list[str]:
    """Words of at least two characters, and each with the next one."""
    words = re.findall(r"\b\w\w+\b", prompt.lower())
    return [*words, *map(" ".join, itertools.pairwise(words))]


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


ON_PUBLIC_DATA: dict[str, Method] = {
    "one law": one_law,
    "history": history,
    "learned": words,
    "ridge": ridge,
    "max_tokens": token_limit,
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
    for kept_out, fold in folds.items():
        for name, method in METHODS.items():
            tau, within, loss, covered = judged(left_out(method, data, fold), data, fold, limit)
            share = "" if np.isnan(covered) else f"{covered:.2f}"
            lines.append(
                f"| {kept_out} | {name} | {tau:.2f} | {within:.2f} | {loss:.1f} | {share} |"
            )
    return "\n".join(lines)


def left_out(method: Method, data: Sequence[Row], fold: npt.NDArray[np.int64]) -> Predicted:
    """What it predicts of each fold, from the others."""
    points, quantiles = np.empty(len(data)), np.empty((len(data), len(LEVELS)))
    for each in range(FOLDS):
        learned, others = (
            [row for row, own in zip(data, fold, strict=True) if (own == each) == out]
            for out in (False, True)
        )
        found = method(learned, others)
        points[fold == each] = found.points
        quantiles[fold == each] = np.nan if found.quantiles is None else found.quantiles
    return Predicted(points, None if np.isnan(quantiles).any() else quantiles)


def judged(
    predicted: Predicted, data: Sequence[Row], fold: npt.NDArray[np.int64], limit: int
) -> tuple[float, float, float, float]:
    """Tau, tau within kinds, mean pinball loss of all levels, coverage: means of the folds."""
    parts = []
    for each in range(FOLDS):
        out = fold == each
        others = [row for row, own in zip(data, out, strict=True) if own]
        tokens = np.array([row["tokens"][0] for row in others], dtype=float)
        points = np.minimum(np.exp(predicted.points[out]), limit)
        names = np.array([row["kind"] for row in others])
        kinds = [names == kind for kind in sorted(set(names.tolist()))]
        within = float(np.mean([rank_correlation(points[own], tokens[own]) for own in kinds]))
        quantiles, covered = points[:, None], np.nan
        if predicted.quantiles is not None:
            quantiles = np.minimum(np.exp(predicted.quantiles[out]), limit)
            low, high = quantiles[:, INTERVAL].T
            covered = float(np.mean((low <= tokens) & (tokens <= high)))
        tau, loss = rank_correlation(points, tokens), pinball(tokens, quantiles)
        parts.append((tau, within, loss, covered))
    tau, within, loss, covered = np.mean(parts, axis=0).tolist()
    return tau, within, loss, covered


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


def gains(lengths: Vector, predicted: Vector) -> list[dict[str, float]]:
    """SPJF over FCFS at each load, by `kendall.predict`."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        pairs, own = Path(folder, "pairs.csv"), Path(folder, "lengths.txt")
        rows = [f"{n:.0f},{max(1.0, y):.6g}" for n, y in zip(lengths, predicted, strict=True)]
        pairs.write_text("\n".join(["output_tokens,predicted_output_tokens", *rows]) + "\n")
        own.write_text("\n".join(f"{n:.0f}" for n in lengths) + "\n")
        for load in LOADS:
            rate = load / (SECONDS_A_TOKEN * float(lengths.mean()))
            law, texts = f"a={SECONDS_A_TOKEN},c=0", f"empirical:path={own}"
            delays = [
                kendall.predict(
                    policy, arrival_rate=rate, output_tokens=texts, latency=law, predictor=predictor
                ).queueing_delay
                for policy, predictor in (
                    ("single", "none"),
                    ("single:order=spjf", f"joint:path={pairs}"),
                )
            ]
            (first, first_p99), (mean, p99) = [(d.mean or 0.0, d.p99 or 0.0) for d in delays]
            mean, p99 = mean / first, p99 / first_p99
            tenth = longest_tenth(lengths, np.maximum(1.0, predicted), load)
            found.append({"load": load, "mean": mean, "p99": p99, "longest tenth": tenth})
            print(
                f"    load {load}: mean {mean:.2f}, p99 {p99:.2f}, longest tenth {tenth:.2f}",
                flush=True,
            )
    return found


def longest_tenth(lengths: Vector, predicted: Vector, load: float) -> float:
    """Mean delay of the longest tenth of the requests under SPJF, over that of all under FCFS:
    M/G/1 by classes of predicted length, W0 / ((1 - rho_shorter) (1 - rho_shorter - rho_own))
    (Cobham 1954) over W0 / (1 - rho).
    """
    work = load * lengths / lengths.sum()
    shorter, with_own = (
        np.array([work[own].sum() for own in compare(predicted[None, :], predicted[:, None])])
        for compare in (np.less, np.less_equal)
    )
    over = (1 - load) / ((1 - shorter) * (1 - with_own))
    return float(over[lengths >= np.quantile(lengths, LONGEST)].mean())


def repeats(by_model: dict[str, Vector]) -> dict[str, float]:
    """Prompts that come once for each model, in random order, a model's length over its geometric
    mean as the length: what history predicts of a prompt that came before, and the ceiling, what
    one earlier answer says of the next.
    """
    logs = np.array([np.log(each) - np.log(each).mean() for each in by_model.values()])
    models, prompts = logs.shape
    events = [(m, p) for m in range(models) for p in range(prompts)]
    order = np.random.default_rng(SEED).permutation(len(events))
    history, told, made = LengthHistory(), [], []
    came: set[int] = set()
    for place in order:
        model, prompt = events[place]
        groups, log_length = ("", "caller", prompt, prompt), float(logs[model, prompt])
        if prompt in came:
            told.append(history.log_length(groups))
            made.append(log_length)
        came.add(prompt)
        history.add(groups, 300 * float(np.exp(log_length)))
    pairs = [(a, b) for a in range(models) for b in range(a)]
    ceiling = float(np.mean([rank_correlation(logs[a], logs[b]) for a, b in pairs]))
    return {
        "history": rank_correlation(np.array(told), np.array(made)),
        "one earlier answer": ceiling,
    }


def mooncake(path: Path) -> dict[str, float]:
    """A prompt as the product sees it: by its first block and by all of its blocks."""
    history, told, made = LengthHistory(), [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        blocks, length = tuple(row["hash_ids"]), max(1, row["output_length"])
        groups = ("", "caller", blocks[:1], blocks)
        if (expected := history.log_length(groups)) is not None:
            told.append(expected)
            made.append(length)
        history.add(groups, length)
    return {"history": rank_correlation(np.array(told), np.array(made)), "requests": len(made)}


def cost(model: LearnedLengths, text: str) -> dict[str, dict[str, float]]:
    """Processor time of a learned prediction, ms."""
    words, found = text.split(), {}
    ids = [int(each) for each in np.random.default_rng(SEED).integers(0, 50_000, 40_000)]
    for name, count in SIZES.items():
        for kind, prompt in (("text", " ".join(words[:count])), ("tokens", ids[:count])):
            spent = []
            for _ in range(CALLS):
                begun = time.thread_time_ns()
                model.log_quantiles(model.log_length(words_of(prompt)), (0.05, 0.5, 0.95))
                spent.append((time.thread_time_ns() - begun) * 1e-6)
            p50, p99 = np.percentile(spent, [50, 99]).tolist()
            found[f"{name}, {kind}"] = {"p50": p50, "p99": p99}
            print(f"    {name}, {kind}: {p50:.3f} ms, p99 {p99:.3f}", flush=True)
    return found


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("bench/results/lengths.json"))
    parser.add_argument("--cost", action="store_true", help="measure processor times too")
    asked = parser.parse_args()
    lines = (asked.folder / "lengths/alpaca-eval.jsonl").read_text(encoding="utf-8").splitlines()
    read = [json.loads(line) for line in lines]
    read = [read[k] for k in np.random.default_rng(SEED).permutation(len(read))]
    names = list(read[0]["lengths"])
    read = [row for row in read if all(row["lengths"].get(name) for name in names)]
    fold = np.arange(len(read)) % FOLDS
    by_model = {name: np.array([float(r["lengths"][name]) for r in read]) for name in names}
    result: dict[str, Any] = {"prompts": len(read), "folds": FOLDS, "models": {}}
    for name, lengths in by_model.items():
        data: list[Row] = [
            {"kind": "", "template": "", "prompt": row["prompt"], "tokens": [n], "cut": [False]}
            for row, n in zip(read, lengths.astype(int).tolist(), strict=True)
        ]
        told = {method: left_out(by, data, fold) for method, by in ON_PUBLIC_DATA.items()}
        found: dict[str, Any] = {}
        for method, predicted in told.items():
            tau, _, loss, covered = judged(predicted, data, fold, LIMIT)
            found[method] = {"tau": tau, "loss": loss}
            found[method] |= {} if np.isnan(covered) else {"coverage": covered}
        own = found["learned"]
        print(
            f"{name}: tau {own['tau']:.2f}, loss {own['loss']:.0f} / "
            f"{found['one law']['loss']:.0f} / {found['max_tokens']['loss']:.0f}, "
            f"coverage {own['coverage']:.3f}",
            flush=True,
        )
        middle = told["learned"].quantiles
        assert middle is not None
        found["gain"] = gains(lengths, np.exp(middle[:, len(LEVELS) // 2]))
        print(f"  ridge: tau {found['ridge']['tau']:.2f}")
        found["ridge"]["gain"] = gains(lengths, np.exp(told["ridge"].points))
        result["models"][name] = found
    result["repeats"] = repeats(by_model)
    print("repeated prompts:", result["repeats"])
    result["mooncake"] = mooncake(asked.folder / "traces/mooncake-conversation.jsonl")
    print("Mooncake:", result["mooncake"])
    times = "milliseconds of processor time"
    if asked.cost:
        whole = by_model[names[0]]
        prompts = [words_of(row["prompt"]) for row in read]
        model = learn(prompts, whole, np.zeros(len(whole), bool))
        assert model is not None
        result[times] = cost(model, " ".join(row["prompt"] for row in read))
    elif asked.output.is_file():
        result[times] = json.loads(asked.output.read_text(encoding="utf-8"))[times]
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
