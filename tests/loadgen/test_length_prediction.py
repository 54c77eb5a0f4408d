"""Predicted lengths err as the named model says, from a stream of their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import parse_length_prediction, predict_lengths
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.arrivals.timetable import draw_timetable, with_predictions
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.predictors.predictor_text import EXAMPLES

LENGTHS = parse_distribution("uniform:low=1,high=2000")
TRUE = LENGTHS.sample(np.random.default_rng(7), 20_000)
PREDICTING = [text for name, text in EXAMPLES.items() if name not in ("none", "joint")]


def _predict(text: str, true: np.ndarray = TRUE, seed: int = 1) -> np.ndarray:
    found = predict_lengths(parse_length_prediction(text), np.random.default_rng(seed), true)
    assert found is not None
    return found


def test_none_predicts_nothing_and_takes_a_prediction_away() -> None:
    none = parse_length_prediction("none")
    assert predict_lengths(none, np.random.default_rng(1), TRUE) is None
    drawn = draw_timetable(
        Poisson(5.0), count=30, seed=3, prompt_tokens=LENGTHS, output_tokens=LENGTHS
    )
    predicted = with_predictions(drawn, parse_length_prediction("exact"), seed=3)
    assert with_predictions(predicted, none, seed=3).predicted_output_tokens is None


def test_exact_is_the_true_length() -> None:
    assert np.array_equal(_predict("exact"), TRUE)


def test_exponential_predictions_have_the_true_length_as_their_mean() -> None:
    long = np.full(20_000, 10**6, dtype=np.int64)  # rounding does not matter there
    assert stats.kstest(_predict("exponential", long) / 10**6, "expon").pvalue > 1e-3
    assert np.corrcoef(TRUE, _predict("exponential"))[0, 1] == pytest.approx(0.45, abs=0.05)


def test_lognormal_errors_are_a_factor_of_median_one() -> None:
    long = np.full(20_000, 10**6, dtype=np.int64)
    assert (
        stats.kstest(
            np.log(_predict("lognormal:sigma=0.5", long) / 10**6), "norm", args=(0, 0.5)
        ).pvalue
        > 1e-3
    )
    assert np.array_equal(_predict("lognormal:sigma=0"), TRUE)


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_one_bit_is_right_as_often_as_asked_in_both_classes(accuracy: float) -> None:
    predicted = _predict(f"onebit:threshold=500,accuracy={accuracy}")
    assert set(predicted.tolist()) <= {250, 1000}
    for above in (False, True):
        chosen = predicted[(TRUE > 500) == above]
        right = np.mean((chosen > 500) == above)
        assert right == pytest.approx(
            accuracy, abs=4 * math.sqrt(0.25 / chosen.size) if 0 < accuracy < 1 else 0
        )


def test_the_threshold_itself_is_not_above_it() -> None:
    assert _predict("onebit:threshold=10", np.array([9, 10, 11])).tolist() == [5, 5, 20]
    assert _predict("onebit:threshold=1", np.array([1, 2])).tolist() == [1, 2]


def test_a_prediction_is_not_cut_at_the_longest_length() -> None:
    assert _predict("exponential", np.full(1000, 2000)).max() > 4000
    assert _predict("onebit:threshold=9", np.array([10])).tolist() == [18]


@pytest.mark.parametrize("text", PREDICTING)
def test_predictions_are_whole_numbers_from_one_and_repeat(text: str) -> None:
    short = np.ones(5000, dtype=np.int64)
    predicted = _predict(text, short)
    assert predicted.dtype == np.int64
    assert predicted.min() >= 1
    assert np.array_equal(predicted, _predict(text, short))
    assert np.array_equal(predicted[:100], _predict(text, short[:100]))


@pytest.mark.parametrize("text", PREDICTING)
def test_predicting_leaves_arrivals_lengths_and_prompts_alone(text: str) -> None:
    model = parse_length_prediction(text)
    without = draw_timetable(
        Poisson(5.0), count=300, seed=3, prompt_tokens=LENGTHS, output_tokens=LENGTHS
    )
    with_it = with_predictions(without, model, seed=3)
    assert without.predicted_output_tokens is None
    assert with_it.predicted_output_tokens is not None
    for name, column in without.columns().items():
        assert np.array_equal(column, getattr(with_it, name))
    again = with_predictions(without, model, seed=3).predicted_output_tokens
    assert again is not None
    assert np.array_equal(again, with_it.predicted_output_tokens)


@pytest.mark.parametrize("text", ["none", *PREDICTING])
def test_text_reads_back(text: str) -> None:
    assert str(parse_length_prediction(text)) == text


def test_the_old_name_of_a_bit_is_read() -> None:
    assert str(parse_length_prediction(" one_bit:threshold=9,accuracy=0.8")) == (
        "onebit:threshold=9,accuracy=0.8"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exakt", "did you mean 'exact'"),
        ("exact:sigma=1", "got key 'sigma' for predictor exact; expected no key"),
        ("lognormal", "expected sigma too, for example lognormal:sigma=0.5"),
        ("one_bit:accuracy=1", "expected threshold too"),
    ],
)
def test_a_wrong_text_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_length_prediction(text)
