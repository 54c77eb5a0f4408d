"""Lengths of answers from prompts: by the words of the prompt, and by the answers to like ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from kendall.queueing.predictors.history import MOST_GROUPS, LengthHistory
from kendall.queueing.predictors.learned import (
    FEWEST,
    HEAD,
    TAIL,
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
