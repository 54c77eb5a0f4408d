"""What the length predictor says after answers that are counted by hand, without a gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from kendall.policies import Request
from kendall.queueing.measurement.record import Record
from kendall.queueing.predictors.learned import LearnedLengths, learn
from kendall.queueing.predictors.learned_file import save_model
from kendall.server.predictors import length_service, lengths
from kendall.server.predictors.lengths import LengthPredictor
from kendall.server.telemetry.metrics import Metrics
from tests.queueing.test_learned_lengths import ended, made
from tests.server.harness import engine_request_of

LIMIT = 500


async def no_process(*_: Any) -> None:
    raise AssertionError


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What it returns without a wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError


class Told:
    """A predictor, its requests and their answers."""

    def __init__(self, text: str) -> None:
        self.predictor = LengthPredictor(text, no_process)
        self._run = asyncio.run if text.startswith("http") else at_once
        self._count = 0

    def says(
        self,
        prompt: Sequence[int] = (1,),
        sent: float | None = None,
        *,
        caller: str = "",
        limit: int = LIMIT,
        **sampling: Any,
    ) -> float | None:
        """What the next request is taken to be."""
        self._count += 1
        request = Request(str(self._count), 0.0, len(prompt), limit, sent)
        asked = replace(
            engine_request_of(request, None, lambda _: prompt, **sampling), caller=caller
        )
        (found,) = self._run(self.predictor.predicted([asked]))
        return found.request.predicted_output_tokens

    def becomes(self, tokens: int | None, *, back: int = 0, **more: Any) -> None:
        """The last request is over, or one before it."""
        facts = {"outcome": "completed", "finish_reason": "stop", "max_output_tokens": LIMIT} | more
        self.predictor.on_record(
            Record(request_id=str(self._count - back), output_tokens=tokens, **facts)
        )

    def answers(self, prompt: Sequence[int], tokens: Sequence[int], **more: Any) -> None:
        for each in tokens:
            self.says(prompt, **more)
            self.becomes(each)


def shrunk(own: float, count: float, wider: float, weight: float) -> float:
    return (count * own + weight * wider) / (count + weight)


def test_an_unknown_prompt_is_like_all_and_a_known_one_like_itself() -> None:
    """One answer of 10 tokens to each of two prompts that begin alike, one of 1000 to another; the
    weights of the groups are those of the history: 20, 5, 0.7, and 0.98 for what is older.
    """
    told = Told("history")
    alike = [7] * lengths.BEGINNING
    assert told.says([1]) is None
    told.answers([*alike, 1], [10], caller="a")
    told.answers([*alike, 2], [1000], caller="a")
    one, two = math.log(10), math.log(1000)
    everything = (0.98 * one + two) / 1.98
    assert told.says([3], caller="b") == pytest.approx(math.exp(everything), abs=1e-3)
    assert told.says([3], caller="a") == pytest.approx(math.exp(everything), abs=1e-3)
    begun = shrunk(everything, 1.98, everything, 5.0)
    assert told.says([*alike, 3], caller="a") == pytest.approx(math.exp(begun), abs=1e-3)
    same = shrunk(one, 1.0, begun, 0.7)
    assert told.says([*alike, 1], caller="a") == pytest.approx(math.exp(same), abs=1e-3)
    other = told.says([*alike, 1], caller="b")
    assert other == pytest.approx(math.exp(everything), abs=1e-3), "another client's"
    told.answers([5], [20], caller="b")
    for _ in range(4):
        told.answers([5], [20], caller="b")
    client = told.says([6], caller="b")
    assert client is not None
    assert 20 < client < math.exp(everything), "towards what this client has"


def test_prompts_that_differ_far_behind_their_beginning_are_one_if_equally_long() -> None:
    told, long = Told("history"), [7] * lengths.COMPARED
    told.answers([1], [100] * 20)
    told.answers([*long, 1], [10])
    same = told.says([*long, 1])
    assert told.says([*long, 2]) == same
    assert told.says([*long, 2, 2]) != same
    assert told.says([*long[1:], 9, 1]) != same


@pytest.mark.parametrize(
    "more",
    [
        {"outcome": "failed"},
        {"outcome": "cancelled"},
        {"finish_reason": "length"},
    ],
)
def test_only_a_whole_answer_is_learned_from(more: dict[str, Any]) -> None:
    told = Told("history")
    told.says()
    told.becomes(20, **more)
    told.becomes(20)  # it was over
    told.says()
    told.becomes(None)
    told.says()
    told.becomes(0)
    assert told.says() is None
    assert told.predictor.quality().answers == 0


def test_the_last_requests_only_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_TOLD", 2)
    told = Told("history")
    for _ in range(3):
        told.says()
    told.becomes(20, back=2)
    assert told.says() is None
    told.becomes(20, back=1)
    assert told.says() == 20


def test_no_prediction_is_beyond_the_limit_or_below_one_token() -> None:
    told = Told("history")
    told.answers([1], [400])
    assert [told.says(limit=limit) for limit in (399, 400, 401)] == [399, 400, 400]
    claims = Told("sent")
    claims.answers([1], [20], sent=10.0, caller="a")
    assert claims.says(sent=0.25, caller="a") == 1.0


def test_a_length_that_is_sure_is_the_prediction() -> None:
    told = Told("history")
    told.answers([1], [20])
    assert told.says(ignore_eos=True) == LIMIT
    assert told.says(ignore_eos=True, stop=("x",)) == 20
    told.becomes(40)
    told.says(ignore_eos=True)
    told.becomes(LIMIT)
    assert told.says() == pytest.approx(
        math.exp((0.98 * math.log(20) + math.log(40)) / 1.98), abs=1e-3
    )


@pytest.mark.parametrize("sent", [10.12345, 0.25, 600.0])
def test_what_a_client_says_stays_as_it_is_where_nothing_corrects_it(sent: float) -> None:
    assert Told("sent").says(sent=sent) == sent


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_client_that_says_half_is_corrected_by_its_last_answers(count: int) -> None:
    """The mean of ln 2 over so many answers, an older one a tenth less, and one as it was said."""
    told = Told("sent")
    assert told.says(sent=10.0, caller="a") == 10
    told.becomes(20)
    told.answers([1], [20] * (count - 1), sent=10.0, caller="a")
    weight = sum(0.9**age for age in range(count))
    expected = 10 * math.exp(math.log(2) * weight / (weight + 1))
    assert told.says(sent=10.0, caller="a") == pytest.approx(expected, abs=1e-3)
    assert told.says(sent=10.0, caller="b") == 10
    assert told.says(caller="a") is None


def test_a_client_that_says_too_much_is_believed() -> None:
    told = Told("sent")
    told.answers([1], [5] * 20, sent=10.0)
    assert told.says(sent=10.0) == 10


@pytest.mark.parametrize(("tokens", "counts"), [(5, False), (10, True), (20, True)])
def test_a_cut_answer_tells_of_its_client_from_what_was_said_on(tokens: int, counts: bool) -> None:
    told = Told("sent")
    told.answers([1], [20], sent=10.0)
    before = told.says(sent=10.0)
    told.becomes(tokens, finish_reason="length")
    assert (told.says(sent=10.0) != before) is counts


def test_clients_beyond_the_most_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MOST_GROUPS", 2)
    told = Told("sent")
    for caller in "abac":
        told.answers([1], [20], sent=10.0, caller=caller)
    corrected = {caller for caller in "abc" if told.says(sent=10.0, caller=caller) != 10}
    assert corrected == {"a", "c"}


def test_the_limit_alone_is_a_prediction_too() -> None:
    told = Told("max_tokens")
    assert told.says(sent=10.0) == LIMIT
    told.answers([1], [LIMIT // 2, LIMIT // 5])
    assert told.predictor.bias_ratio == pytest.approx(math.sqrt(2 * 5))


def test_a_key_that_does_not_count_is_predicted_as_if_it_said_nothing() -> None:
    told = Told("sent:keys=0123abcd+4567abcd")
    assert told.says(sent=10.0, caller="4567abcd") == 10
    assert told.says(sent=10.0, caller="4567abce") is None


def test_a_quantile_is_as_far_above_the_middle_as_answers_were() -> None:
    middle, high = Told("history"), Told("history:quantile=0.9")
    told, errors = [], []
    for tokens in (10, 20, 40, 80, 160, 15, 25, 35, 45, 55, 65, 75):
        for each in (middle, high):
            told.append(each.says())
            each.becomes(tokens)
        if told[-2] is not None:
            errors.append(math.log(tokens / told[-2]))
            assert (told[-1] == told[-2]) is (len(errors) <= 10), "ten tell, and no fewer"
    assert len(errors) == 11
    expected = middle.says() * math.exp(np.quantile(errors, 0.9))
    assert high.says() == pytest.approx(expected, rel=1e-3)


def test_the_quality_is_of_what_was_said_and_what_came() -> None:
    """Each client says something once, and nothing of it is corrected."""
    told = Told("sent")
    said = (19, 9, 30, 1, 100, 2, 40, 5, 60, 10)
    came = (10, 20, 10, 2, 101, 1, 35, 11, 58, 19)
    for caller, (sent, tokens) in enumerate(zip(said, came, strict=True)):
        if caller == 9:
            assert math.isnan(told.predictor.rank_correlation), "too few"
        told.answers([1], [tokens], sent=float(sent), caller=str(caller))
    found = told.predictor.quality()
    assert (found.predictor, found.version, found.answers) == ("sent", 0, 10)
    bias = np.exp(np.mean(np.log(said) - np.log(came)))
    assert found.bias_ratio == pytest.approx(bias)
    assert found.over_fraction == 0.1, "more than twice: 30 of 10"
    assert found.under_fraction == 0.2, "less than half: 9 of 20, 5 of 11"
    places = [sorted(said).index(each) for each in said]
    ranks = [
        (sum(each < other for each in came) + sum(each <= other for each in came) - 1) / 2
        for other in came
    ]
    assert found.rank_correlation == pytest.approx(np.corrcoef(places, ranks)[0, 1])
    assert math.isnan(found.interval_coverage)


def test_without_an_answer_no_quality_is_known() -> None:
    found = Told("sent").predictor.quality()
    numbers = (
        *(found.rank_correlation, found.interval_coverage, found.bias_ratio),
        *(found.over_fraction, found.under_fraction),
    )
    assert all(map(math.isnan, numbers))
    assert Told("sent").predictor.service_failures == 0


@pytest.mark.parametrize(("answers", "believed"), [(49, True), (50, False)])
def test_a_service_whose_ranks_are_the_wrong_way_round_is_not_believed_until_they_turn(
    answers: int, believed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kendall")
    says = [1]
    monkeypatch.setattr(
        length_service,
        "TRANSPORT",
        httpx.MockTransport(
            lambda _: httpx.Response(200, json={"predicted_output_tokens": [says[0]]})
        ),
    )
    told = Told("http:url=http://lengths.test/")
    for number in range(answers):
        says[0] = 1 + number % 40
        told.says()
        told.becomes(401 - 10 * says[0])
    says[0] = 33
    assert (told.says() == 33) is believed
    if believed:
        return
    for number in range(100):
        says[0] = 1 + number % 40
        told.says()
        told.becomes(10 * says[0])
    says[0] = 33
    assert told.says() == 33
    assert [text.partition(": ")[2] for text in caplog.messages if "http://" in text] == [
        "the answers that http://lengths.test/ predicts to be short become long (rank correlation "
        "-1.00); history predicts until that changes",
        "http://lengths.test/ predicts again",
    ]


@cache
def learned() -> LearnedLengths:
    prompts, lengths_made = made(200, 1)
    found = learn(prompts, lengths_made, ended(200))
    assert found is not None
    return found


def model_of(tokens: float) -> LearnedLengths:
    """Says so many tokens of any prompt, with errors as they were."""
    found = learned()
    none = found.regression
    flat = dataclasses.replace(none, weights=0 * none.weights, intercept=math.log(tokens))
    return dataclasses.replace(found, tau=0.5, loss=1.0, plain_loss=2.0, regression=flat)


class Learning(Told):
    """Learns these models, one after the other; no two prompts are alike."""

    def __init__(self, text: str, *models: LearnedLengths | None) -> None:
        super().__init__(text)
        answers = iter(models)

        async def ask(function: str, *_: Any) -> Any:
            assert function == "learn_lengths"
            return next(answers)

        self.predictor = LengthPredictor(text, ask)

    def learn(self) -> int:
        at_once(self.predictor.learn())
        return self.predictor.version

    def become(self, count: int, tokens: int = 20) -> int:
        for _ in range(count):
            self.says([self._count, 1])
            self.becomes(tokens)
        return self.predictor.version


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (20.0, 20.6, "a factor 1.03 more than version 1, over 50 answers; version 1 predicts"),
        (20.0, 19.3, "a factor 1.04 more than version 1, over 50 answers; version 1 predicts"),
        (20.0, 20.3, None),  # less than two percent
        (30.0, 20.0, None),
    ],
)
def test_a_version_that_is_worse_by_two_percent_over_fifty_answers_is_taken_back(
    first: float, second: float, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    told = Learning("learned", model_of(first), model_of(second))
    told.become(1)
    assert (told.learn(), told.learn()) == (1, 2)
    assert told.become(49) == 2
    assert told.become(1) == (2 if says is None else 1)
    assert told.says([0, 0]) == pytest.approx(second if says is None else first, abs=1e-3)
    lines = [] if says is None else [f"length predictor: version 2 is off by {says} again"]
    assert caplog.messages == lines


def test_the_first_version_is_compared_with_the_history(caplog: pytest.LogCaptureFixture) -> None:
    told = Learning("learned", model_of(30.0))
    told.become(1)
    assert told.learn() == 1
    assert told.become(50) == 0
    assert told.says([0, 0]) == 20
    assert caplog.messages == [
        "length predictor: version 1 is off by a factor 1.50 more than history, over 50 answers; "
        "history predicts again"
    ]


def test_versions_are_compared_after_every_fifty_answers_and_no_more_after_five_hundred() -> None:
    """The second is off by a half in every other answer, which 50 answers do not tell from chance;
    after 500 nothing is compared.
    """
    told = Learning("learned", model_of(20.0), model_of(30.0))
    told.become(1)
    told.learn()
    told.learn()
    for _ in range(250):
        told.become(1, 20)
        told.become(1, 30)
    assert told.become(200) == 2
    late = Learning("learned", model_of(20.0), model_of(30.0))
    late.become(1)
    late.learn()
    late.learn()
    late.become(50, 30)
    assert late.become(99) == 2, "both are compared after 100, and then after 150"
    assert late.become(1) == 1


@pytest.mark.parametrize("useless", [None, "no rank", "no gain"])
def test_a_model_that_does_not_help_is_said(
    useless: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kendall")
    model = model_of(20.0)
    changed = {
        None: None,
        "no rank": dataclasses.replace(model, tau=0.0),
        "no gain": dataclasses.replace(model, loss=2.0),
    }[useless]
    told = Learning("learned", changed, model)
    told.become(2)
    assert (told.learn(), told.learn()) == (0, 1)
    assert [text.removeprefix("length predictor: ") for text in caplog.messages] == [
        "nothing learned from 2 answers that predicts better than the law of all lengths",
        f"version 1, from {model.answers} answers: rank correlation 0.50, loss 1 tokens (2 without "
        "prompts)",
    ]


def test_a_model_says_how_far_answers_may_lie(tmp_path: Path) -> None:
    model = model_of(20.0)
    save_model(tmp_path / "model", model, 3)
    middle, high = (
        Told(f"learned:path={tmp_path / 'model'}{more}") for more in ("", ",quantile=0.9")
    )
    for each in (middle, high):
        each.predictor.restore()
        assert each.predictor.version == 3
    assert middle.says([1]) == 20
    (above,) = model.log_quantiles(math.log(20), (0.9,)).tolist()
    assert high.says([1]) == pytest.approx(math.exp(above), abs=1e-3)
    low, top = np.exp(model.log_quantiles(math.log(20), (0.05, 0.95)))
    for place, tokens in enumerate((math.ceil(low), int(top), int(top) + 1, int(low), 10_000)):
        middle.says([place, 2])
        middle.becomes(tokens)
    assert middle.predictor.interval_coverage == 0.4


def test_a_model_of_a_file_is_compared_with_the_history_too(tmp_path: Path) -> None:
    save_model(tmp_path / "model", model_of(30.0), 3)
    told = Learning(f"learned:path={tmp_path / 'model'}")
    told.predictor.restore()
    told.become(1)  # of which the history knows nothing yet
    assert told.become(49) == 3
    assert told.become(1) == 0
    at_once(told.predictor.close())  # without a service there is nothing to close


def test_the_gauges_are_the_quality() -> None:
    told, metrics = Told("sent"), Metrics()
    lengths.add_gauges(told.predictor, metrics)
    for caller, (sent, tokens) in enumerate([(30, 10), (9, 20), (5, 11), (8, 8), (1, 9)] * 2):
        told.answers([1], [tokens], sent=float(sent), caller=str(caller))
    found = told.predictor.quality()
    values = {
        "rank_correlation": found.rank_correlation,
        "bias_ratio": found.bias_ratio,
        "over_fraction": 0.2,
        "under_fraction": 0.6,
        "service_failures": 0.0,
        "version": 0.0,
    }
    for name, value in values.items():
        assert metrics.registry.get_sample_value(f"kendall_predictor_{name}") == value
    coverage = metrics.registry.get_sample_value("kendall_predictor_interval_coverage")
    assert coverage is not None
    assert math.isnan(coverage)


def test_a_model_that_cannot_be_read_or_renamed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(f"learned:path={tmp_path / 'none'}")
    told.predictor.restore()
    assert not caplog.records, "none yet"
    (tmp_path / "none").mkdir()
    told.predictor.restore()
    (said,) = caplog.messages
    assert said.startswith(f"cannot use the length predictor {tmp_path / 'none'} (")
    assert said.partition(": none yet; ")[2].startswith(("renamed to ", "cannot rename it: "))
    assert (told.predictor.version, told.says()) == (0, None)
