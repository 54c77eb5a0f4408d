"""Predictions of a service (`--length-predictor http:url=...`), of a client, and a model in a file:
whatever they say, every request is served.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.predictors.learned import LearnedLengths, learn
from kendall.queueing.predictors.learned_file import load_model, save_model
from kendall.server.predictors import length_service, lengths
from kendall.server.predictors.length_service import FAILURES, PAUSE
from kendall.server.predictors.lengths import LengthPredictor
from kendall.server.runtime.length_text import LengthPredictorText, parse_length_predictor
from tests.queueing.test_learned_lengths import ended, made
from tests.server.asgi import call, running
from tests.virtual_time import run_virtual

HTTP = "http:url=http://lengths.test/predict,deadline=20ms"
Reply = Callable[[list[int]], httpx.Response]


@pytest.fixture(autouse=True)
def files_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread takes real time, and the clock of these tests does not wait for it."""

    async def at_once(work: Callable[[], Any], _: float) -> Any:
        return work()

    monkeypatch.setattr(lengths, "in_a_thread", at_once)


class Service(httpx.AsyncBaseTransport):
    """Answers each question of requests with these limits; `delay` in seconds."""

    def __init__(self, reply: Reply, delay: float = 0.0) -> None:
        self.reply, self.delay, self.asked = reply, delay, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        await asyncio.sleep(self.delay)
        body = httpx.Response(200, content=await request.aread()).json()
        return self.reply([each["max_output_tokens"] for each in body["requests"]])


def says(value: Any) -> Reply:
    return lambda limits: httpx.Response(
        200, json={"predicted_output_tokens": [value] * len(limits)}
    )


def dead(_: list[int]) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


async def answered(app: Any, prompt: str, tokens: int, **fields: Any) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 500}
    body |= {"kendall_forced_output_tokens": tokens}
    found = await call(app, "POST", "/v1/completions", body | fields)
    assert found.status == 200, found.body


async def order_of(app: Any, gateway: Any, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What is predicted of those that wait together, in the order of service."""
    gateway.batcher.pause_dispatch(True)
    waiting = []
    for prompt, fields in calls:
        waiting.append(asyncio.create_task(answered(app, prompt, 5, **fields)))
        await asyncio.sleep(0.1)
    told = [each.request.predicted_output_tokens for each in gateway.batcher.waiting]
    gateway.batcher.pause_dispatch(False)
    await asyncio.gather(*waiting)
    return told


@pytest.mark.parametrize(
    ("reply", "delay"),
    [
        (dead, 0.0),
        (says(9), 1.0),
        (says(-3), 0.0),
        (says(0), 0.0),
        (says("long"), 0.0),
        (says(True), 0.0),
        (lambda _: httpx.Response(200, content=b'{"predicted_output_tokens": [NaN]}'), 0.0),
        (lambda _: httpx.Response(200, content=b'{"predicted_output_tokens": [1e999]}'), 0.0),
        (lambda _: httpx.Response(200, json={"predicted_output_tokens": [1, 2, 3]}), 0.0),
        (lambda _: httpx.Response(200, json=[]), 0.0),
        (lambda _: httpx.Response(200, content=b"x" * (2 << 20)), 0.0),
        (lambda _: httpx.Response(500), 0.0),
    ],
)
def test_a_service_that_answers_nothing_usable_costs_a_deadline_each_at_most_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reply: Reply, delay: float
) -> None:
    service = Service(reply, delay)
    monkeypatch.setattr(length_service, "TRANSPORT", service)

    async def main() -> None:
        async with running("single:order=spjf", length_predictor=HTTP) as (app, gateway):
            for _ in range(FAILURES + 10):
                await answered(app, "a", 30)
            assert service.asked == FAILURES, "a service that fails is left alone"
            told = await order_of(app, gateway, [("a", {}), ("b", {}), ("a", {})])
            assert told == sorted(told)
            assert told[0] == pytest.approx(30), "history predicts meanwhile"
            metrics = (await call(app, "GET", "/metrics")).body.decode()
            assert f"kendall_predictor_service_failures {float(FAILURES)}" in metrics
            await asyncio.sleep(PAUSE)
            service.reply, service.delay = says(77), 0.0
            assert await order_of(app, gateway, [("a", {}), ("b", {})]) == [77, 77]

    run_virtual(main())
    assert caplog.text.count("failed 5 times in a row") == 1


def test_a_services_prediction_orders_the_queue_and_a_constant_one_leaves_that_of_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(lambda limits: httpx.Response(200, json={"predicted_output_tokens": limits}))
    monkeypatch.setattr(length_service, "TRANSPORT", service)

    async def main() -> None:
        async with running("single:order=spjf", length_predictor=HTTP) as (app, gateway):
            limits = [{"max_tokens": most} for most in (300, 20, 100)]
            calls = [("a", each) for each in limits]
            assert await order_of(app, gateway, calls) == [20, 100, 300]
            service.reply = says(40)
            gateway.batcher.pause_dispatch(True)
            waiting = [asyncio.create_task(answered(app, text, 5)) for text in "abc"]
            await asyncio.sleep(0.1)
            arrived = [each.request.arrived_at for each in gateway.batcher.waiting]
            assert arrived == sorted(arrived)
            service.reply = says(None)  # knows nothing of it
            gateway.batcher.pause_dispatch(False)
            await asyncio.gather(*waiting)
            (told,) = await order_of(app, gateway, [("new", {})])
            assert told == pytest.approx(5), "history"

    run_virtual(main())


def test_a_service_that_says_short_of_the_long_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turn = {"length": 1}

    def reply(limits: list[int]) -> httpx.Response:
        said = [400 / turn["length"]] * len(limits)
        return httpx.Response(200, json={"predicted_output_tokens": said})

    monkeypatch.setattr(length_service, "TRANSPORT", Service(reply))

    async def main() -> None:
        async with running("single:order=spjf", length_predictor=HTTP) as (app, gateway):
            for number in range(60):
                turn["length"] = (3, 300)[number % 2]
                await answered(app, ("say yes", "an essay")[number % 2], turn["length"])
            told = await order_of(app, gateway, [("an essay", {}), ("say yes", {})])
            assert told[0] < 30 < told[1], "history"

    run_virtual(main())
    assert caplog.text.count("predicts to be short become long") == 1


# what a client says


def test_who_understates_is_charged_and_who_is_right_is_not() -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor="sent") as (app, gateway):
            for _ in range(12):
                await answered(app, "a", 300, predicted_output_tokens=10)
            told = await order_of(
                app, gateway, [("a", {"predicted_output_tokens": 10}), ("b", {"max_tokens": 90})]
            )
            assert told[0] is None, "the limit of 90 counts, and 10 counts as some 250 now"
            assert 150 < told[1] <= 300
            for _ in range(60):
                await answered(app, "a", 30, predicted_output_tokens=30)
            (told_again,) = await order_of(app, gateway, [("a", {"predicted_output_tokens": 30})])
            assert told_again == pytest.approx(30, rel=0.1)
            for _ in range(20):
                await answered(app, "a", 3, predicted_output_tokens=30)
            assert await order_of(app, gateway, [("a", {"predicted_output_tokens": 30})]) == [30]

    run_virtual(main())


@pytest.mark.parametrize(
    ("text", "told"), [("max_tokens", 500), ("sent:keys=0123abcd", None), ("none", 7)]
)
def test_whose_predictions_count(text: str, told: float | None) -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor=text) as (app, gateway):
            assert await order_of(app, gateway, [("a", {"predicted_output_tokens": 7})]) == [told]

    run_virtual(main())


def test_another_quantile_is_a_longer_prediction() -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor="history:quantile=0.9") as (
            app,
            gateway,
        ):
            for tokens in (10, 20, 40, 80, 160) * 8:
                await answered(app, "a", tokens)
            (told,) = await order_of(app, gateway, [("a", {})])
            assert 90 < told < 250

    run_virtual(main())


NAMES = "none | max_tokens | sent | history | learned | http"
A_URL = "http:url=http://127.0.0.1:9000/lengths,deadline=50ms,quantile=0.9"
KEY_NAMES = "expected names of API keys as the log has them: eight hexadecimal digits, joined by +"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"got no length predictor; expected {NAMES}"),
        (" ", f"got no length predictor; expected {NAMES}"),
        ("nope", f"got length predictor 'nope'; expected {NAMES}; did you mean 'none'?"),
        ("http", f"got 'http'; expected url too, for example {A_URL}"),
        ("http:url=ftp://a/", f"got url=ftp://a/; expected url=URL, for example {A_URL}"),
        ("http:url=http:///a", f"got url=http:///a; expected url=URL, for example {A_URL}"),
        ("http:url=http://a:0/", f"got url=http://a:0/; expected url=URL, for example {A_URL}"),
        ("http:url=http://a:99999/", "got url=http://a:99999/; expected url=URL"),
        (
            "http:url=http://a/,deadline=2s",
            "got deadline=2s; expected a deadline from 1ms to 1s: a request waits for it",
        ),
        ("http:url=http://a/,deadline=0.9ms", "got deadline=0.9ms; expected a deadline from 1ms"),
        ("http:url=http://a/,deadline=nan", "got "),
        ("learned:quantile=nan", "got quantile=nan; expected a quantile from 0.01 to 0.99"),
        ("learned:quantile=half", "got quantile=half; expected a quantile from 0.01 to 0.99"),
        ("learned:quantile=0.991", "got quantile=0.991; expected a quantile from 0.01 to 0.99"),
        ("learned:quantile=0.009", "got quantile=0.009; expected a quantile from 0.01 to 0.99"),
        (
            "learned:path=/",
            "got the folder path=/; expected path=FILE, for example lengths.npz",
        ),
        ("sent:keys=me", f"got 'me' in keys=me; {KEY_NAMES}"),
        ("sent:keys=0123abcd+", f"got '' in keys=0123abcd+; {KEY_NAMES}"),
        ("history:path=a", "got "),
        ("none:quantile=0.5", "got "),
    ],
)
def test_a_wrong_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=r"got .*expected") as refused:
        parse_length_predictor(text)
    assert str(refused.value).startswith(said)


def test_a_text_says_what_it_names_and_the_rest_is_as_ever() -> None:
    assert parse_length_predictor("history") == LengthPredictorText(name="history", quantile=0.5)
    assert parse_length_predictor("sent:keys=0123abcd+4567abcd").keys == {"0123abcd", "4567abcd"}
    assert parse_length_predictor("learned:path=a,quantile=0.01") == LengthPredictorText(
        name="learned", path=Path("a"), quantile=0.01
    )
    most = parse_length_predictor("http:url=https://a/b,deadline=1s,quantile=0.99")
    assert (most.url, most.deadline, most.quantile) == ("https://a/b", 1.0, 0.99)
    assert parse_length_predictor("http:url=http://a").deadline == 0.05
    assert parse_length_predictor("http:url=http://a,deadline=1ms").deadline == 0.001


# the model's file


def model_of(count: int = 200, seed: int = 1) -> LearnedLengths:
    prompts, tokens = made(count, seed)
    found = learn(prompts, tokens, ended(count))
    assert found is not None
    return found


async def no_process(*_: Any) -> None:
    raise AssertionError


def test_a_model_comes_back_from_its_file_and_the_file_has_no_words(tmp_path: Path) -> None:
    path, model = tmp_path / "lengths.npz", model_of()
    save_model(path, model, 7)
    assert b"essay" not in path.read_bytes()
    again, version = load_model(path)
    prompts, _ = made(50, 2)
    assert version == 7
    for words in prompts:
        assert (
            again.quantiles(words, (0.1, 0.5)).tolist()
            == model.quantiles(words, (0.1, 0.5)).tolist()
        )
    predictor = LengthPredictor(f"learned:path={path}", no_process)
    predictor.restore()
    assert predictor.version == 7


@pytest.mark.parametrize("content", [b"", b"not a model", b"PK\x03\x04 cut off"])
def test_a_broken_file_is_put_aside_and_service_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = tmp_path / "lengths.npz"
    path.write_bytes(content)

    async def main() -> None:
        async with running(length_predictor=f"learned:path={path}") as (app, gateway):
            await answered(app, "a", 30)
            assert gateway.length_predictor.version == 0

    run_virtual(main())
    assert caplog.text.count("cannot use the length predictor") == 1
    assert not path.exists()


def test_numbers_that_are_none_are_no_model(tmp_path: Path) -> None:
    path, model = tmp_path / "lengths.npz", model_of()
    model.regression.weights[model.regression.idf > 0] = math.nan
    save_model(path, model, 1)
    with pytest.raises(SpecError, match="its numbers"):
        load_model(path)


def test_a_version_that_predicts_worse_is_taken_back_in_force_and_in_the_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The second model was learned from other lengths than those that come."""
    caplog.set_level(logging.INFO, "kendall")
    path, versions = tmp_path / "lengths.npz", []

    async def ask(_: object, __: str, words: Any, tokens: Any, cut: Any) -> Any:
        found = learn(words, tokens if not versions else tokens.max() / tokens, cut)
        versions.append(found)
        return found

    monkeypatch.setattr("kendall.server.live.prediction_client.PredictorClient.ask", ask)
    monkeypatch.setattr(lengths, "ENOUGH", 60)
    texts = [f"{name} {rest}" for rest in map(str, range(400)) for name in ("essay", "yes")]

    async def main() -> None:
        async with running(length_predictor=f"learned:path={path}") as (app, gateway):
            predictor, sent, at = gateway.length_predictor, iter(texts), []
            for _ in range(3):
                for _ in range(65):
                    text = next(sent)
                    await answered(app, text, 300 if "essay" in text else 3)
                at.append(predictor.version)
                await asyncio.sleep(30)
            assert at == [0, 1, 1], "the second was in force at the begin of the third"
            assert len(versions) >= 2

    run_virtual(main())
    assert caplog.text.count("version 1 predicts again") == 1
    assert np.isfinite(load_model(path)[0].tau)
