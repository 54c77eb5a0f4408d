"""The gateway predicts the lengths of answers whose requests bring no prediction."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from kendall.policies import Request
from kendall.queueing.measurement.record import Record
from kendall.queueing.predictors.learned import learn
from kendall.server.page.state import topics
from kendall.server.predictors import lengths
from kendall.server.predictors.lengths import LengthPredictor
from tests.server.asgi import call, running
from tests.server.harness import engine_request_of
from tests.virtual_time import run_virtual

LONG, SHORT = "write a long essay about tea", "say yes"


async def answered(app: Any, prompt: str, tokens: int, **fields: Any) -> None:
    """An answer that ends by itself after so many tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 500}
    body |= {"kendall_forced_output_tokens": tokens}
    found = await call(app, "POST", "/v1/completions", body | fields)
    assert found.status == 200, found.body


def predicted(gateway: Any) -> list[float | None]:
    """Of those that wait."""
    return [each.request.predicted_output_tokens for each in gateway.batcher.waiting]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual time there is no other process."""

    async def ask(self: object, function: str, *arguments: Any) -> Any:
        assert function == "learn_lengths"
        return learn(*arguments)

    monkeypatch.setattr("kendall.server.live.prediction_client.PredictorClient.ask", ask)
    monkeypatch.setattr(lengths, "ENOUGH", 60)


@pytest.mark.parametrize("kind", ["none", "history", "learned"])
def test_what_waits_is_predicted_from_the_answers_to_its_like(kind: str) -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor=kind) as (app, gateway):
            await answered(app, LONG, 300)
            for _ in range(40):
                await answered(app, LONG, 300)
                await answered(app, SHORT, 3)
            await asyncio.sleep(60)
            gateway.batcher.pause_dispatch(True)
            waiting = [
                asyncio.create_task(answered(app, prompt, tokens))
                for prompt, tokens in ((LONG, 300), (SHORT, 3), (f"please {LONG}", 290))
            ]
            await asyncio.sleep(0.1)
            told = predicted(gateway)
            gateway.batcher.pause_dispatch(False)
            await asyncio.gather(*waiting)
            if kind == "none":
                assert told == [None] * 3
                assert gateway.length_predictor is None
                return
            assert told == sorted(told), "the shortest first"
            assert told[0] == pytest.approx(3, rel=0.35)
            assert told[-1] == pytest.approx(300, rel=0.35)
            assert gateway.length_predictor.version == (kind == "learned")
            metrics = (await call(app, "GET", "/metrics")).body.decode()
            assert f"kendall_predictor_version {float(kind == 'learned')}" in metrics
            assert gateway.length_predictor.rank_correlation > 0.7
            assert 0.5 < gateway.length_predictor.bias_ratio < 2
            shown = topics(gateway, 0.0)["length_predictor"]
            assert (shown["predictor"], shown["answers"]) == (kind, 83)
            assert shown["rank_correlation"] == gateway.length_predictor.rank_correlation
            assert (shown["interval_coverage"] is None) == (kind == "history")

    run_virtual(main())


def test_a_clients_own_prediction_stays_and_nothing_is_told_above_the_limit() -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor="history") as (app, gateway):
            await answered(app, LONG, 300)
            gateway.batcher.pause_dispatch(True)
            waiting = [
                asyncio.create_task(answered(app, LONG, 9, predicted_output_tokens=77)),
                asyncio.create_task(answered(app, LONG, 9, max_tokens=20)),
            ]
            await asyncio.sleep(0.1)
            assert predicted(gateway) == [20, 77]
            gateway.batcher.pause_dispatch(False)
            await asyncio.gather(*waiting)

    run_virtual(main())


def test_what_a_client_claims_beyond_its_limit_counts_as_the_limit_in_the_quality() -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor="sent") as (app, gateway):
            for claimed in (1e308, 5e-324):
                await answered(app, LONG, 30, predicted_output_tokens=claimed)
            limit, least = 500, 1
            expected = math.sqrt(limit / 30 * least / 30)
            assert gateway.length_predictor.bias_ratio == pytest.approx(expected, rel=0.02)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(4))
def test_the_rank_correlation_of_equal_values_is_spearmans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    told, made = rng.integers(1, 5, 40).tolist(), rng.integers(1, 9, 40).tolist()
    assert lengths.spearman(told, made) == pytest.approx(spearmanr(told, made).statistic)
    assert math.isnan(lengths.spearman(told, [3.0] * 40))


def test_with_ignore_eos_the_length_is_the_limit() -> None:
    async def main() -> None:
        async with running("single:order=spjf", length_predictor="history") as (app, gateway):
            await answered(app, LONG, 30)
            gateway.batcher.pause_dispatch(True)
            body = {"model": "tiny", "prompt": LONG, "max_tokens": 83, "ignore_eos": True}
            waiting = asyncio.create_task(call(app, "POST", "/v1/completions", body))
            await asyncio.sleep(0.1)
            assert predicted(gateway) == [83]
            gateway.batcher.pause_dispatch(False)
            assert (await waiting).status == 200

    run_virtual(main())


@pytest.mark.parametrize("kind", ["history", "learned"])
def test_answers_that_a_limit_cut_are_not_taken_for_whole_ones(kind: str) -> None:
    async def main() -> None:
        async with running(length_predictor=kind) as (app, gateway):
            for _ in range(70):
                await answered(app, LONG, 300, max_tokens=20)
            await asyncio.sleep(60)
            gateway.batcher.pause_dispatch(True)
            waiting = asyncio.create_task(answered(app, LONG, 9))
            await asyncio.sleep(0.1)
            assert predicted(gateway) == [None]
            gateway.batcher.pause_dispatch(False)
            await waiting
            assert math.isnan(gateway.length_predictor.rank_correlation)

    run_virtual(main())


def test_a_process_that_is_lost_is_asked_again_and_service_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    async def ask(self: object, function: str, *arguments: Sequence[Any]) -> Any:
        asked.append(len(arguments[0]))
        if len(asked) == 1:
            raise RuntimeError("it is gone")
        return learn(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("kendall.server.live.prediction_client.PredictorClient.ask", ask)

    async def main() -> None:
        async with running(length_predictor="learned") as (app, gateway):
            for number in range(65):
                await answered(app, LONG if number % 2 else SHORT, 300 if number % 2 else 3)
            await asyncio.sleep(60)
            assert asked == [65]
            for number in range(65):
                await answered(app, LONG if number % 2 else SHORT, 300 if number % 2 else 3)
            await asyncio.sleep(60)
            assert asked == [65, 130]
            assert gateway.length_predictor.version == 1

    run_virtual(main())


def test_a_fault_of_the_predictor_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(lengths, "words_of", broken)

    async def main() -> None:
        async with running(length_predictor="learned") as (app, _):
            for _ in range(3):
                await answered(app, LONG, 30)

    run_virtual(main())
    assert caplog.text.count("no length is predicted") == 1


def test_a_model_that_does_not_help_leaves_the_one_before_in_force() -> None:
    class Useless:
        helps = False

    answers: list[Any] = [None, Useless()]

    async def ask(*_: Any) -> Any:
        return answers.pop()

    async def main() -> None:
        predictor = LengthPredictor("learned", ask)
        predictor._answers.append((np.zeros(1, np.uint32), 3, False))
        await predictor.learn()
        await predictor.learn()
        assert (predictor.version, answers) == (0, [])

    asyncio.run(main())


def test_learning_takes_one_percent_of_the_time_however_busy_the_clients_are() -> None:
    began: list[float] = []

    async def ask(function: str, *arguments: Any) -> None:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(2)

    async def busy(predictor: LengthPredictor) -> None:
        for number in range(10_000):
            name = str(number)
            request = Request(name, arrived_at=0.0, prompt_tokens=1, max_output_tokens=500)
            await predictor.predicted([engine_request_of(request, None)])
            predictor.on_record(Record(request_id=name, outcome="completed", output_tokens=20))
            await asyncio.sleep(0.1)

    async def main() -> None:
        predictor = LengthPredictor("learned", ask)
        learning = asyncio.create_task(predictor.run())
        await busy(predictor)
        learning.cancel()

    run_virtual(main())
    assert 4 <= len(began) <= 6
    assert min(later - earlier for earlier, later in itertools.pairwise(began)) >= 200


def test_a_version_that_is_worse_by_less_than_two_percent_stays() -> None:
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 1000, 4).astype(np.uint32) for _ in range(200)]
    first = learn(words, np.exp(rng.normal(3, 0.5, 200)), np.zeros(200, bool))
    assert first is not None
    flat = replace(first.regression, weights=0 * first.regression.weights, intercept=math.log(20))
    right, off = (
        replace(first, tau=0.5, loss=1.0, plain_loss=2.0, regression=replace(flat, intercept=at))
        for at in (flat.intercept, flat.intercept + 0.01)
    )
    models = [off, right]

    def prompt_by_chance(_: Request) -> list[int]:
        return [int(rng.integers(0, 1 << 30))]

    async def ask(function: str, *arguments: Any) -> Any:
        return models.pop()

    async def main() -> None:
        predictor = LengthPredictor("learned", ask)

        async def answer(count: int) -> None:
            for number in range(count):
                request = Request(str(number), 0.0, prompt_tokens=1, max_output_tokens=500)
                await predictor.predicted([engine_request_of(request, None, prompt_by_chance)])
                record = Record(request_id=str(number), outcome="completed", output_tokens=20)
                predictor.on_record(record)

        await answer(1)
        await predictor.learn()
        await predictor.learn()
        await answer(400)
        assert predictor.version == 2

    asyncio.run(main())
