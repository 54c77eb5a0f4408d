"""Quality, gain and cost of the predictors of output lengths (`--length-predictor`), on a folder
with AlpacaEval's prompts and the lengths of six models' answers (`lengths/alpaca-eval.jsonl`: one
object a line, `prompt` and `lengths`) and Mooncake's trace (`traces/mooncake-conversation.jsonl`).

.venv/bin/python bench/lengths.py FOLDER --output bench/results/lengths.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import kendall
from bench.length_predictors import pinball, rank_correlation
from kendall.queueing.predictors.history import LengthHistory
from kendall.queueing.predictors.learned import LEVELS, LearnedLengths, Words, learn, words_of

FOLDS, SEED, LOADS, LIMIT = 5, 0, (0.5, 0.8, 0.9), 2048
SECONDS_A_TOKEN = 0.01
SIZES = {"10 tokens": 10, "200 tokens": 200, "2,000 tokens": 2000, "100 KB": 17_000}  # words
CALLS = 2000


def left_out(prompts: list[Words], lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Quantiles [answers, levels] of each predictor, of prompts that were left out. A new prompt
    has no history but that of all answers, whose mean the history predicts.
    """
    found = {
        name: np.empty((len(lengths), len(LEVELS))) for name in ("one law", "history", "learned")
    }
    for fold in range(FOLDS):
        own = np.arange(len(lengths)) % FOLDS == fold
        rest = [words for words, out in zip(prompts, own, strict=True) if not out]
        model = learn(rest, lengths[~own], np.zeros(int((~own).sum()), bool))
        assert model is not None
        history = LengthHistory()
        for known in lengths[~own]:
            history.add(("", "caller", "beginning", "prompt"), float(known))
        told = history.log_length(("", "caller", "another", "new"))
        assert told is not None
        logs = np.log(lengths[~own])
        found["one law"][own] = np.quantile(lengths[~own], LEVELS)
        found["history"][own] = np.exp(told + np.quantile(logs - logs.mean(), LEVELS))
        found["learned"][own] = [model.quantiles(prompts[k], LEVELS) for k in np.flatnonzero(own)]
    found["max_tokens"] = np.full((len(lengths), len(LEVELS)), float(LIMIT))
    return found


def quality(prompts: list[Words], lengths: np.ndarray) -> dict[str, Any]:
    """Of each predictor: tau and loss; of `learned` the coverage of its 90 % intervals too."""
    told = left_out(prompts, lengths)
    middle = len(LEVELS) // 2
    result: dict[str, Any] = {
        name: {"tau": rank_correlation(each[:, middle], lengths), "loss": pinball(lengths, each)}
        for name, each in told.items()
    }
    low, high = told["learned"][:, 4], told["learned"][:, 94]  # 5 % and 95 %
    result["learned"]["coverage"] = float(np.mean((low <= lengths) & (lengths <= high)))
    result["median"] = told["learned"][:, middle].tolist()
    return result


def gains(lengths: np.ndarray, predicted: list[float]) -> list[dict[str, float]]:
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
            found.append({"load": load, "mean": mean, "p99": p99})
            print(f"    load {load}: mean {mean:.2f}, p99 {p99:.2f}", flush=True)
    return found


def repeats(by_model: dict[str, np.ndarray]) -> dict[str, float]:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("bench/results/lengths.json"))
    asked = parser.parse_args()
    lines = (asked.folder / "lengths/alpaca-eval.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [rows[k] for k in np.random.default_rng(SEED).permutation(len(rows))]
    names = list(rows[0]["lengths"])
    rows = [row for row in rows if all(row["lengths"].get(name) for name in names)]
    prompts = [words_of(row["prompt"]) for row in rows]
    by_model = {name: np.array([float(r["lengths"][name]) for r in rows]) for name in names}
    result: dict[str, Any] = {"prompts": len(rows), "folds": FOLDS, "models": {}}
    for name, lengths in by_model.items():
        found = quality(prompts, lengths)
        own = found["learned"]
        print(
            f"{name}: tau {own['tau']:.2f}, loss {own['loss'] / found['one law']['loss']:.2f} of "
            f"one law, coverage {own['coverage']:.3f}",
            flush=True,
        )
        found["gain"] = gains(lengths, found.pop("median"))
        result["models"][name] = found
    result["repeats"] = repeats(by_model)
    print("repeated prompts:", result["repeats"])
    result["mooncake"] = mooncake(asked.folder / "traces/mooncake-conversation.jsonl")
    print("Mooncake:", result["mooncake"])
    whole = by_model[names[0]]
    model = learn(prompts, whole, np.zeros(len(whole), bool))
    assert model is not None
    text = " ".join(row["prompt"] for row in rows)
    result["milliseconds of processor time"] = cost(model, text)
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
