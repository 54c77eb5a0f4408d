"""Lengths of answers from prompts: by the words of the prompt, and by the answers to like ones."""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import kendalltau

from kendall.queueing.predictors.history import MOST_GROUPS, LengthHistory
from kendall.queueing.predictors.learned import (
    FEWEST,
    HEAD,
    TAIL,
    ErrorLaws,
    LearnedLengths,
    Words,
    learn,
    words_of,
)
from tests.support import measured_data

WORDS = ("list", "why", "name", "essay", "code", "tell", "yes", "translate")


def made(count: int, seed: int, *, spread: float = 0.4) -> tuple[list[Words], np.ndarray]:
    """Prompts of a few words, each of which makes an answer longer or shorter."""
    rng = np.random.default_rng(seed)
    prompts = [list(rng.choice(WORDS, 4)) for _ in range(count)]
    effect = {word: 0.35 * (place - 3.5) for place, word in enumerate(WORDS)}
    means = np.array([4 + sum(effect[word] for word in set(prompt)) for prompt in prompts])
    tokens = np.maximum(1, np.rint(np.exp(means + spread * rng.standard_normal(count))))
    return [words_of(" ".join(prompt)) for prompt in prompts], tokens


def ended(count: int) -> np.ndarray:
    return np.zeros(count, dtype=bool)


def learned(count: int, seed: int = 1) -> LearnedLengths:
    prompts, tokens = made(count, seed)
    found = learn(prompts, tokens, ended(count))
    assert found is not None
    return found


def test_words_are_those_of_the_text_whatever_their_case_and_of_tokens_their_numbers() -> None:
    assert words_of("Why is it so?").tolist() == words_of("why IS it so?").tolist()
    assert words_of("why so").tolist() != words_of("so why").tolist(), "pairs and places count"
    assert words_of([5, 6, 7]).tolist() == words_of((5, 6, 7)).tolist()
    assert len(words_of("")) == len(words_of([])) == 1
    for prompt in ("a b " * 50_000, list(range(50_000))):
        found = words_of(prompt)
        assert len(found) <= 2 * (HEAD + TAIL) + 64
        assert (np.diff(found.astype(int)) > 0).all()
        assert found.max() < 2**18


def test_lengths_follow_the_words() -> None:
    model, (prompts, tokens) = learned(800), made(500, 2)
    told = [model.log_length(words) for words in prompts]
    assert kendalltau(told, tokens).statistic > 0.55
    assert model.tau == pytest.approx(kendalltau(told, tokens).statistic, abs=0.06)
    assert model.helps
    assert model.loss < 0.75 * model.plain_loss
    intervals = np.array([model.quantiles(words, (0.05, 0.95)) for words in prompts])
    covered = np.mean((intervals[:, 0] <= tokens) & (tokens <= intervals[:, 1]))
    assert 0.86 < covered < 0.94


def test_errors_are_as_wide_as_those_of_answers_of_like_length() -> None:
    """Long answers vary by e^.8, short ones by e^.1: one law for both covers 90 % of neither."""
    rng = np.random.default_rng(8)
    long = rng.random(1200) < 0.5
    prompts = [words_of(f"{'essay' if each else 'yes'} {rng.integers(9)}") for each in long]
    spread = np.where(long, 0.8, 0.1)
    tokens = np.exp(np.where(long, 6.0, 3.0) + spread * rng.standard_normal(1200))
    model = learn(prompts[:800], tokens[:800], ended(800))
    assert model is not None
    for kind, width in ((True, 0.8), (False, 0.1)):
        own = np.flatnonzero(long[800:] == kind) + 800
        told = np.array([model.quantiles(prompts[place], (0.05, 0.95)) for place in own])
        assert np.log(told[:, 1] / told[:, 0]).mean() == pytest.approx(3.29 * width, rel=0.25)
        covered = np.mean((told[:, 0] <= tokens[own]) & (tokens[own] <= told[:, 1]))
        assert 0.84 < covered < 0.96


def test_where_words_say_nothing_it_does_not_help() -> None:
    prompts, tokens = made(600, 3)
    shuffled = np.random.default_rng(4).permutation(tokens)
    found = learn(prompts, shuffled, ended(600))
    assert found is not None
    assert abs(found.tau) < 0.08
    assert not found.helps


def test_answers_that_were_cut_are_no_short_answers() -> None:
    """A limit at the median: the longer half is known as longer only."""
    prompts, tokens = made(1500, 5)
    limit = float(np.median(tokens))
    cut = tokens > limit
    model = learn(prompts, np.minimum(tokens, limit), cut)
    naive = learn(prompts, np.minimum(tokens, limit), ended(1500))
    assert model is not None
    assert naive is not None
    others, actual = made(500, 6)
    told, taken = (
        np.array([each.log_length(words) for words in others]) for each in (model, naive)
    )
    assert abs(np.mean(told - np.log(actual))) < 0.5 * abs(np.mean(taken - np.log(actual)))
    assert kendalltau(told, actual).statistic > kendalltau(taken, actual).statistic - 0.01


def test_too_few_answers_or_answers_all_alike_teach_nothing() -> None:
    prompts, tokens = made(FEWEST, 7)
    assert learn(prompts, tokens, ended(FEWEST)) is not None
    assert learn(prompts[:-1], tokens[:-1], ended(FEWEST - 1)) is None
    assert learn(prompts, tokens, ~ended(FEWEST)) is None
    assert learn(prompts, np.full(FEWEST, 7.0), ended(FEWEST)) is None


def test_a_prompt_of_unknown_words_has_the_mean_length() -> None:
    model = learned(300)
    unknown = np.flatnonzero(model.regression.idf == 0)[:5]
    assert model.log_length(unknown.astype(np.uint32)) == model.regression.intercept


# real prompts


def alpaca() -> dict[str, tuple[list[Words], np.ndarray]]:
    """AlpacaEval's prompts and the lengths of six models' answers (Apache-2.0)."""
    path = measured_data("lengths/alpaca-eval.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    prompts = [words_of(row["prompt"]) for row in rows]
    found = {}
    for name in rows[0]["lengths"]:
        known = [place for place, row in enumerate(rows) if row["lengths"].get(name)]
        lengths = np.array([float(rows[place]["lengths"][name]) for place in known])
        found[name] = [prompts[place] for place in known], lengths
    return found


@pytest.mark.slow
def test_lengths_of_six_models_are_predicted_from_prompts_that_were_left_out() -> None:
    """Five folds; docs/how-to/predictors.md has the numbers."""
    taus, covered = [], []
    for prompts, lengths in alpaca().values():
        whole = learn(prompts, lengths, ended(len(lengths)))
        assert whole is not None
        assert whole.loss < 0.92 * whole.plain_loss
        taus.append(whole.tau)
        for fold in range(5):
            own = np.arange(len(lengths)) % 5 == fold
            rest = [words for words, out in zip(prompts, own, strict=True) if not out]
            model = learn(rest, lengths[~own], ended(int((~own).sum())))
            assert model is not None
            for place in np.flatnonzero(own):
                low, high = model.quantiles(prompts[place], (0.05, 0.95))
                covered.append(low <= lengths[place] <= high)
    assert min(taus) >= 0.30
    assert np.mean(taus) >= 0.35
    assert 0.86 <= np.mean(covered) <= 0.94


# answers to like prompts


def groups(prompt: str, caller: str = "a") -> tuple[object, ...]:
    return "", caller, (caller, prompt[:3]), (caller, prompt)


def test_what_came_again_is_predicted_from_itself_and_what_begins_alike_from_its_kind() -> None:
    history = LengthHistory()
    assert history.log_length(groups("abc 1")) is None
    assert history.log_length(groups("abc 1"), 2.0) == 2.0
    for _ in range(40):
        for text, tokens in (("abc 1", 10), ("abc 2", 12), ("xyz 1", 1000)):
            history.add(groups(text), tokens)
    again, alike, new = (history.log_length(groups(text)) for text in ("abc 1", "abc 3", "new"))
    assert again == pytest.approx(math.log(10), abs=0.05)
    assert alike == pytest.approx(math.log(11), abs=0.3)
    assert math.log(12) < new < math.log(1000)
    assert history.log_length(groups("abc 1", "b")) == pytest.approx(new, abs=0.1)
    assert history.log_length(groups("abc 1"), 9.0) == pytest.approx(math.log(10), abs=0.2)
    assert history.log_length(groups("abc 3"), 9.0) == 9.0, "what the prompt's words say stays"


def test_newer_answers_count_more_and_no_more_groups_are_kept_than_fit() -> None:
    history = LengthHistory()
    for tokens in [10] * 200 + [100] * 100:
        history.add(groups("abc"), tokens)
    assert history.log_length(groups("abc")) > math.log(70)
    for number in range(MOST_GROUPS):
        history.add(groups(f"{number:09d}"), 5)
    assert history.log_length(groups("abc")) < math.log(20)
    assert len(history) <= MOST_GROUPS


# ---- once more, by hand ----


def bucket(number: int) -> int:
    """The highest 18 bits of a hash of 32."""
    return (number * 0x9E3779B1) % 2**32 >> 14


def buckets_by_hand(prompt: str | Sequence[int]) -> list[int]:
    """What saved models know a prompt by; they are read by later versions too."""
    one, two, sign, tag = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F
    steps: list[tuple[int, int, int]] = []
    if isinstance(prompt, str):
        text = prompt.lower()
        if len(text) > 2048:
            text = text[:512] + text[-1536:]
        found = [each.encode() for each in re.findall(r"[0-9a-z_\x80-\U0010ffff]+|\S", text)]
        words = [zlib.crc32(word) for word in found]
        signs = text.count(".") + text.count("?")
        digits = sum(each in "0123456789" for each in text)
        marks = (0x12345671, 0x22345679, 0x3234567B, 0x5234567D)
        counts = (len(prompt), text.count("\n"), digits, signs)
        steps = [
            (each, count + 1, mark)
            for each, count, mark in zip((4, 2, 2, 2), counts, marks, strict=True)
        ]
    else:
        words = list(prompt)
    if len(words) > 256:
        words = words[:64] + words[-192:]
    hashed = [word * one % 2**32 for word in words]
    pairs = [(a ^ b * two % 2**32) * sign % 2**32 for a, b in itertools.pairwise(hashed)]
    seen = [*hashed, *pairs, one]
    seen += [hashed[0] + tag, hashed[-1] * tag] if hashed else []
    seen += [pairs[0] + tag] if pairs else []
    for each, count, mark in [(6, max(len(words), 1), tag), *steps]:
        seen += [number * mark for number in range(1, int(each * math.log2(count)) + 1)]
    return sorted({bucket(number % 2**32) for number in seen})


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "one",
        "Why are 12 of 345 cats in\nStraße 7? Say so. (Or not!)\n",
        "a long one, " * 70 + "3. " * 100,
        " ".join(f"w{n}" for n in range(700)),
        [],
        [5],
        [1, 2, 2, 7, 2**31],
        list(range(256)),
        list(range(300)),
    ],
)
def test_a_prompt_is_known_by_its_words_pairs_ends_and_size(prompt: str | list[int]) -> None:
    assert words_of(prompt).tolist() == buckets_by_hand(prompt)


def survivors(values: np.ndarray, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kaplan and Meier: the values, and the share of more than each."""
    at = np.unique(values)
    ended = ((values[:, None] == at) & ~cut[:, None]).sum(axis=0)
    return at, np.cumprod(1 - ended / (values[:, None] >= at).sum(axis=0))


def quantiles_by_hand(values: np.ndarray, cut: np.ndarray) -> np.ndarray:
    at, above = survivors(values, cut)
    return np.array(
        [
            next((x for x, more in zip(at, above, strict=True) if 1 - more >= level - 1e-9), at[-1])
            for level in np.arange(1, 100) / 100
        ]
    )


def beyond_by_hand(errors: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The mean of what is more than each that was cut; the largest holds what outlives it."""
    at, above = survivors(errors, cut)
    mass = -np.diff(above, prepend=1.0)
    mass[-1] += above[-1]
    found = []
    for own in errors[cut]:
        more = at > own
        whole = float(mass[more].sum())
        found.append(max(own, float(mass[more] @ at[more]) / whole) if whole else max(own, at[-1]))
    return np.array(found)


class RidgeByHand:
    """Rows of idf of unit length; w = X' (X X' + penalty)^-1 (y - mean y)."""

    def __init__(
        self, prompts: list[np.ndarray], logs: np.ndarray, cut: np.ndarray, penalty: float
    ) -> None:
        self.idf = np.zeros(64)
        for each in range(64):
            having = sum(each in prompt for prompt in prompts)
            self.idf[each] = (math.log((1 + len(prompts)) / (1 + having)) + 1) * (having > 0)
        rows = np.array([self.row(prompt) for prompt in prompts])
        inverse = np.linalg.inv(rows @ rows.T + penalty * np.eye(len(prompts)))
        expected = logs.copy()
        for _ in range(4 if cut.any() else 1):
            self.intercept = float(expected.mean())
            self.weights = rows.T @ inverse @ (expected - self.intercept)
            fitted = self.intercept + rows @ self.weights
            expected[cut] = fitted[cut] + beyond_by_hand(logs - fitted, cut)

    def row(self, prompt: np.ndarray) -> np.ndarray:
        found = np.zeros(64)
        found[prompt] = self.idf[prompt]
        norm = float(np.linalg.norm(found))
        return found / norm if norm else found

    def log_length(self, prompt: np.ndarray) -> float:
        return float(self.intercept + self.row(prompt) @ self.weights)


@pytest.mark.parametrize(("count", "cutting"), [(70, 0.0), (235, 0.1)])
def test_what_is_learned_is_what_the_equations_say(count: int, cutting: float) -> None:
    rng = np.random.default_rng(count)
    prompts = [np.sort(rng.choice(60, rng.integers(2, 9), replace=False)) for _ in range(count)]
    effects = rng.normal(0, 0.5, 60)
    logs = np.array([3 + effects[each].mean() + rng.normal(0, 0.3) for each in prompts])
    tokens = np.ceil(np.exp(logs))
    cut = rng.random(count) < cutting
    tokens[cut] = np.ceil(0.8 * tokens[cut])
    logs, ended = np.log(tokens), ~cut
    tried = []
    for penalty in (0.5, 1.0, 2.0, 4.0):
        left_out = np.empty(count)
        for fold in range(5):
            own = np.arange(count) % 5 == fold
            rest = [each for each, out in zip(prompts, own, strict=True) if not out]
            fitted = RidgeByHand(rest, logs[~own], cut[~own], penalty)
            left_out[own] = [
                fitted.log_length(each) for each, out in zip(prompts, own, strict=True) if out
            ]
        square = float(np.mean((logs - left_out)[ended] ** 2))
        tried.append((square, penalty, left_out))
    _, penalty, left_out = min(tried, key=lambda each: each[0])
    whole = RidgeByHand(prompts, logs, cut, penalty)
    groups = max(1, np.count_nonzero(ended) // 100)
    edges = np.quantile(left_out[ended], np.arange(1, groups) / groups)
    group = np.array([sum(each >= edges) for each in left_out])
    laws = [
        quantiles_by_hand((logs - left_out)[group == each], cut[group == each])
        for each in range(groups)
    ]
    centres = [float(left_out[group == each].mean()) for each in range(groups)]

    found = learn([each.astype(np.uint32) for each in prompts], tokens, cut)
    assert found is not None
    assert found.answers == np.count_nonzero(ended)
    assert found.regression.intercept == pytest.approx(whole.intercept, abs=2e-4)
    for each in (prompts[0], np.array([3, 17, 63]), np.array([63])):
        own = found.log_length(each.astype(np.uint32))
        assert own == pytest.approx(whole.log_length(each), abs=2e-4)
    assert found.errors.centres == pytest.approx(centres, abs=2e-4)
    assert found.errors.quantiles == pytest.approx(np.array(laws), abs=2e-3)
    assert found.tau == pytest.approx(kendalltau(left_out[ended], logs[ended])[0])
    levels = np.arange(1, 100) / 100

    def loss(quantiles: np.ndarray) -> float:
        """Of quantiles of a length, a row each."""
        off = tokens[ended][:, None] - np.exp(quantiles)
        return float(np.where(off > 0, levels * off, (levels - 1) * off).mean())

    own_laws = np.array([found.errors.at(float(each)) for each in left_out[ended]])
    assert found.loss == pytest.approx(loss(left_out[ended][:, None] + own_laws), rel=1e-3)
    plain = quantiles_by_hand(logs, cut)
    assert found.plain_loss == pytest.approx(loss(plain[None, :]), rel=1e-9)
    assert found.helps == (found.tau > 0 and found.loss < found.plain_loss)


def test_laws_of_errors_are_mixed_between_their_centres() -> None:
    laws = ErrorLaws(np.array([1.0, 3.0, 4.0]), np.arange(3.0)[:, None] * np.ones(99) * [[1.0]])
    assert [laws.at(each)[0] for each in (0.0, 1.0, 1.5, 3.0, 3.9, 4.0, 9.0)] == pytest.approx(
        [0, 0, 0.25, 1, 1.9, 2, 2]
    )
