"""The live prediction: beside the observation, in `/admin/prediction` and in the gauges."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.policies import Request, parse_policy
from kendall.policies.ordered import order_of
from kendall.policies.orders.preemptive import Gittins, PredictedGittins
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.choosing.forecast import WhatIf
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.interval import symmetric, without_interval
from kendall.queueing.estimation.summaries import Judgement
from kendall.queueing.estimation.window.snapshot import COLUMN
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object, to_json
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import SAID
from kendall.queueing.models.gittins import gittins_ranks
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.server.admission.settings import OverloadSettings
from kendall.server.live import prediction_worker
from kendall.server.live.answers import Answer, AssessmentSummary
from kendall.server.live.gauges import LiveGauges
from kendall.server.live.prediction_worker import described
from kendall.server.telemetry.metrics import Metrics
from tests.queueing.estimation_runs import LAW, LENGTHS
from tests.queueing.estimation_windows import window_of
from tests.server.asgi import Call, running
from tests.server.live_harness import answered
from tests.server.made_answers import what_if
from tests.server.questions import question_at
from tests.virtual_time import run_virtual

BATCHES, JOINING = (
    ("single", "capped:max_batch_size=8", "elastic:max_batch_size=8"),
    "continuous:max_batch_size=8",
)
SHORT, PROMPTS = (
    parse_distribution("uniform:low=4,high=20"),
    parse_distribution("deterministic:value=8"),
)
each_policy = pytest.mark.parametrize("policy", [*BATCHES, JOINING])


@cache
def look_of(policy: str) -> AssessmentSummary:
    """6,000 simulated requests at load 0.6."""
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=16)
    seen = window_of(model, 0.6, 6000, 1)
    question = question_at(seen.now, policy)
    prediction_worker._memory = prediction_worker._Memory()
    prediction_worker._memory.recent.add(seen)
    return described(
        question, seen, assess(seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16)))
    )


def said(policy: str) -> str:
    """What `/admin/prediction` says of them, as JSON."""
    return json.dumps(json_object(look_of(policy)), allow_nan=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("order", ["gittins", "fb"])
def test_an_order_that_learns_has_its_ranks_from_the_lengths_of_the_window(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, law = f"single:order={order}", LatencyModel(k4=0.01)
    lengths = parse_distribution("weibull:shape=0.5,scale=15", 200)
    seen = window_of(Queue.read(policy, lengths, law), 0.6, 2000, 1)
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: seen)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())
    question = question_at(seen.now, policy, shape=law, longest=200)
    ranking = prediction_worker.assess_window(question).ranking
    if order == "fb":
        assert ranking is None
        return
    assert isinstance(ranking, Gittins)
    found, (starts, ranks) = ranking.form, gittins_ranks(lengths)
    assert found.starts[1:4] == pytest.approx(starts[1:4], abs=1)
    assert found.ranks[0] == pytest.approx(ranks[0], rel=0.2)


@pytest.mark.left_out
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("told", [True, False])
def test_ranks_by_prediction_follow_from_what_predictions_became(
    calibrated: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lognormal lengths and errors. Predictions Y, or e^(a + b Y) with the least squared error in
    ln N, say the same; without any the ranks are those of `gittins`.
    """
    policy, law = "single:order=gittins-predicted", LatencyModel(k4=0.01)
    exact = Queue.read(
        policy, "lognormal:mu=3,sigma=1", law, max_output_tokens=400, predictor="lognormal:sigma=1"
    )
    seen = window_of(exact.but(policy=parse_policy("single")), 0.6, 4000, 1)
    rows = seen.rows.copy()
    noise = np.random.default_rng(2).standard_normal(len(rows))
    log_told = np.log(rows[:, COLUMN["output_tokens"]]) + noise
    shown = 3 + (log_told - 3) / 2 if calibrated else log_told
    rows[:, COLUMN["predicted_tokens"]] = np.exp(shown) if told else np.nan
    seen = dataclasses.replace(seen.having(rows), policy=policy)
    monkeypatch.setattr(prediction_worker, "_seen", lambda _: seen)
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())
    question = question_at(seen.now, policy, shape=law, longest=400)
    ranking = prediction_worker.assess_window(question).ranking
    assert isinstance(ranking, PredictedGittins)
    if not told:
        assert not ranking.form.classes
        return
    for predicted in (5.0, 20.0, 80.0):
        request = Request("a", 0.0, 8, 400, predicted)
        own = math.exp(3 + (math.log(predicted) - 3) / 2) if calibrated else predicted
        found = ranking.rank(request._replace(predicted_output_tokens=own), 0)
        assert found == pytest.approx(order_of(exact.policy).rank(request, 0), rel=0.15)


@pytest.mark.parametrize(
    ("seconds", "load", "anew"),
    [(20.0, 1.0, False), (61.0, 1.0, True), (16.0, 0.8, True), (14.0, 0.8, False)],
)
def test_the_next_minutes_are_looked_at_anew_sooner_where_the_load_has_moved(
    seconds: float, load: float, anew: bool
) -> None:
    policy = "capped:max_batch_size=8"
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=16)
    seen = window_of(model, 0.6, 6000, 1)
    prediction_worker._memory = prediction_worker._Memory()
    prediction_worker._memory.recent.add(seen)
    found = assess(seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16)))
    question = question_at(seen.now, policy)
    first = prediction_worker._next(question, seen, found, joins=False)
    assert first is not None
    later = dataclasses.replace(seen, now=seen.now + seconds)
    moved = dataclasses.replace(found, load=found.load.scaled(load))
    again = prediction_worker._next(question, later, moved, joins=False)
    assert again is not None
    assert (again.at == later.now) == anew
    assert anew or again is first


def assert_inside(estimate: dict[str, float]) -> None:
    """A value that is a number, inside an interval that is one."""
    assert estimate["low"] < estimate["value"] < estimate["high"]


@each_policy
def test_a_live_prediction_is_whole(policy: str) -> None:
    found = json.loads(said(policy))
    compared, joins = found["compared"], policy == JOINING
    assert compared == ("sojourn_time" if joins else "queueing_delay")
    assert (found["stable"], found["comparison"]["verdict"]) == (True, "agree")
    for name in ("queueing_delay", "served_queueing_delay", "sojourn_time"):
        levels = [value for level in LEVELS if (value := found[name][level]) is not None]
        assert found[name]["mean"] > 0
        assert levels == sorted(levels), name
        assert joins or len(levels) == len(LEVELS), name
    assert (
        found["queueing_delay"]["mean"]
        < found["time_to_first_token"]["mean"]
        < found["sojourn_time"]["mean"]
    )
    observed, predicted = found["comparison"]["observed"], found["comparison"]["predicted"]
    for estimate in (
        observed,
        predicted,
        found["interval"],
        found["observed_queueing_delay"],
        found["load_interval"],
    ):
        assert_inside(estimate)
    assert found["interval"] == predicted
    assert predicted["value"] == pytest.approx(found[compared]["mean"])
    assert found["comparison"]["error"] == pytest.approx(observed["value"] / predicted["value"] - 1)
    for about in (observed, found["observed_queueing_delay"]):
        levels = [about[level]["value"] for level in LEVELS]
        assert levels == sorted(levels)
        known = [about[level] for level in LEVELS if about[level]["low"] is not None]
        assert about["p50"] in known
        assert all(each["low"] <= each["value"] <= each["high"] for each in known)
    assert found["load_interval"]["value"] == pytest.approx(0.6, abs=0.05)
    assert 0 < found["utilisation"] < 1
    assert 1 <= found["batch_size"]["mean"] <= 8
    assert found["speed"] == pytest.approx(1.0, abs=0.05)
    assert min(found["n"], found["arrival_rate"], found["window"]["seconds"]) > 0


def gauges_of(
    found: AssessmentSummary, then: Callable[[LiveGauges], None] = lambda _: None
) -> dict[str, dict[str, float]]:
    """By name, and by the last label's value; `` where there is none."""
    metrics = Metrics()
    gauges = LiveGauges(metrics)
    gauges.show(found)
    then(gauges)
    shown: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            label = next(
                (
                    sample.labels[name]
                    for name in ("stat", "assumption", "verdict")
                    if name in sample.labels
                ),
                "",
            )
            shown.setdefault(sample.name.removeprefix("kendall_"), {})[label] = sample.value
    return shown


@each_policy
def test_the_gauges_show_the_live_prediction_in_order(policy: str) -> None:
    found = json.loads(said(policy))
    shown, comparison = gauges_of(look_of(policy)), found["comparison"]
    compared = found["compared"]
    for name in ("predicted", "observed"):
        stats = shown[f"{name}_{compared}_seconds"]
        assert set(stats) == {"mean", "mean_low", "mean_high", *LEVELS}
        assert (stats["mean"], stats["mean_low"], stats["mean_high"]) == tuple(
            comparison[name][end] for end in ("value", "low", "high")
        )
        assert stats["mean_low"] < stats["mean"] < stats["mean_high"]
        levels = [stats[level] for level in LEVELS]
        assert levels == sorted(levels)
    assert shown["predicted_queueing_delay_seconds"]["mean"] == found["queueing_delay"]["mean"]
    assert shown["observed_queueing_delay_seconds"]["mean"] == found["observed_mean"]
    assert shown["prediction_error_ratio"][""] == comparison["error"]
    check = comparison["check"]
    assert shown[f"checked_{compared}_seconds"] == {
        "observed": check["observed"],
        "modelled": check["modelled"],
    }
    for name in ("ratio", "ratio_low", "ratio_high"):
        assert shown[f"check_{name}"] == {"": check[name]}
    assert shown["check_verdict"] == {
        verdict: float(verdict == "agree") for verdict in SAID.values()
    }
    assert found["check"] == check | {"at": found["at"]}
    forecast = found["forecast"]
    told = shown[f"forecast_{compared}_seconds"]
    ahead = {name: told.pop(f"next_{name}") for name in ("mean", "low", "high")}
    assert told == shown[f"predicted_{compared}_seconds"]
    assert ahead.items() <= forecast["next"].items()
    assert ahead["low"] <= ahead["mean"] <= ahead["high"]
    assert forecast[compared] == found[compared]
    assert (forecast["interval"], forecast["at"]) == (found["interval"], found["at"])
    assert forecast["conditions"].items() <= comparison["assumptions"].items()
    assert "poisson_arrivals" in forecast["conditions"]
    assert "constant_speed" not in forecast["conditions"]
    assert (shown["load"][""], shown["engine_speed_ratio"][""]) == (found["load"], found["speed"])
    assert shown["assumption_holds"].keys() == comparison["assumptions"].keys()
    assert shown["prediction_verdict"] == {
        verdict: float(verdict == "agree") for verdict in SAID.values()
    }


class Asked:
    """Stands for the predicting process: what it was asked, and nothing to say."""

    def __init__(self) -> None:
        self.questions: list[tuple[Any, ...]] = []
        self.busy = False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ask(self, *question: Any) -> Any:
        self.questions.append(question)
        return [] if question[0] == "ask_advice" else Answer()


def test_who_asks_for_advice_takes_no_decision_from_the_autopilot() -> None:
    """A decision changes what the autopilot remembers: it is made where it is carried out."""

    async def main() -> None:
        async with running() as (_, gateway):
            live, asked = gateway.live_model(), Asked()
            live._predictor = asked  # type: ignore[assignment]
            await live.update()
            await live.advice({})
            assert [
                (name, of[0].decides) for name, *of in asked.questions if name == "assess_window"
            ] == [
                ("assess_window", True),
                ("assess_window", False),
            ]

    run_virtual(main())


def test_a_look_without_a_decision_leaves_the_autopilot_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory())
    monkeypatch.setattr(prediction_worker.Autopilot, "decide", lambda *_: asked.append(True))
    for decides in (False, True):
        prediction_worker.assess_window(question_at(1.0, "single", decides=decides))
        assert asked == ([True] if decides else [])


@pytest.mark.parametrize("life", [1, 2])
def test_a_predicting_process_that_comes_again_has_the_autopilot_and_a_window_that_begins_now(
    life: int,
) -> None:
    """It would divide the arrivals of some seconds by the whole window, and the autopilot would
    be off for good.
    """

    async def main() -> None:
        async with running(autopilot="act") as (_, gateway):
            live, asked = gateway.live_model(), Asked()
            remembered = msgspec.Raw(b"{}")
            live.pilot.remember(remembered)
            await asyncio.sleep(3.0)
            live._producer.take()
            await live._begin_life(asked.ask, life)
            delta = live._producer.take()
            assert asked.questions == [("start_pilot", "act", remembered, 0.0)]
            began = gateway.now() if life > 1 else -math.inf
            assert (delta.begun, delta.forgets_lengths, delta.carried_from) == (
                life > 1,
                life > 1,
                began,
            )
            assert delta.epoch == gateway.batcher.epoch
            live.saved.estimates = msgspec.Raw(b"{}")

            async def broken(*question: Any) -> Any:
                asked.questions.append(question)
                if question[0] == "restore":
                    raise ValueError("schema 1")

            await live._begin_life(broken, life)
            assert [name for name, *_ in asked.questions] == [
                "start_pilot",
                "restore",
                "start_pilot",
            ]

    run_virtual(main())


def test_the_metrics_have_the_epoch_in_force_whatever_began_it() -> None:
    async def main() -> None:
        async with running() as (_, gateway):
            for epoch in (0, 1, 2):
                assert not epoch or gateway.limits.begin_epoch() == epoch
                shown = gateway.metrics.exposition().decode()
                assert [
                    line for line in shown.splitlines() if line.startswith("kendall_policy_info{")
                ] == [
                    f'kendall_policy_info{{epoch="{epoch}",max_output_tokens="none",'
                    'policy="continuous:max_batch_size=4"} 1.0'
                ]
            assert "kendall_policy_switches_total 0.0" in shown

    run_virtual(main())


def test_as_many_servers_as_the_slo_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Queue.read("single", LENGTHS, LAW, max_num_seqs=16)
    seen = window_of(model, 0.9, 6000, 1)
    question = question_at(seen.now, "single")
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory(question=question))
    assert prediction_worker.ask_servers("mean_queueing_delay<=1s") is None
    found = assess(seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16))).estimates
    prediction_worker._memory.estimates = found
    two, three = (predict_model(model.but(servers=c), found.arrival_rate.value) for c in (2, 3))
    assert two.queueing_delay.mean is not None
    assert three.queueing_delay.mean is not None
    between = math.sqrt(two.queueing_delay.mean * three.queueing_delay.mean)
    assert prediction_worker.ask_servers(f"mean_queueing_delay<={between:.9f}s") == 3
    assert prediction_worker.ask_servers("mean_queueing_delay<=1h") == 1
    assert prediction_worker.ask_servers("mean_sojourn_time<=1us") is None
    slow = two.queueing_delay.p99
    assert slow is not None
    assert prediction_worker.ask_servers(f"p99.9_queueing_delay<={slow:.9f}s") == 3, (
        "two keep p99 within"
    )


def test_what_ifs_end_in_time_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limit of the process, it would be killed with all that it knows."""
    model = Queue.read("single", LENGTHS, LAW, max_num_seqs=16)
    seen = window_of(model, 0.6, 2000, 1)
    memory = prediction_worker._Memory(question=question_at(seen.now, "single"))
    memory.estimates = assess(
        seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16))
    ).estimates
    monkeypatch.setattr(prediction_worker, "_memory", memory)
    every = prediction_worker.ask_what_ifs()
    monkeypatch.setattr(prediction_worker, "WHAT_IF_SECONDS", 0.0)
    assert len(every) > 5
    assert to_json(prediction_worker.ask_what_ifs()) == to_json(every[:1])


def known_estimates(
    load: float, policy: str = "capped:max_batch_size=4"
) -> prediction_worker._Memory:
    """What the process keeps of a window under that load."""
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=16)
    seen = window_of(model, load, 2000, 1)
    memory = prediction_worker._Memory(question=question_at(seen.now, policy))
    memory.estimates = assess(
        seen, LAW, QueueLimits(engine=EngineBounds(max_num_seqs=16))
    ).estimates
    memory.estimated_at = seen.now
    return memory


def rows(what_ifs: list[WhatIf]) -> list[dict[str, Any]]:
    """As JSON."""
    return [json_object(each) for each in what_ifs]


def test_what_ifs_come_bit_by_bit_the_most_telling_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once the load of each, by which those without a steady state are known; then forecasts:
    that of the setting in force, and those with the lowest load.
    """
    memory = known_estimates(0.9)
    monkeypatch.setattr(prediction_worker, "_memory", memory)
    monkeypatch.setattr(prediction_worker, "WHAT_IF_SLICE", 1e9)
    whole = rows(prediction_worker.ask_what_ifs())
    monkeypatch.setattr(prediction_worker, "WHAT_IF_SLICE", 0.0)
    found, came = rows(prediction_worker.ask_what_ifs()), list[dict[str, Any]]()
    assert [each["policy"] for each in found] == [each["policy"] for each in whole]
    assert [each["load"] for each in found] == [each["load"] for each in whole]
    assert {each["at"] for each in found} == {memory.question.at}  # type: ignore[union-attr]
    overloaded = [each for each in found if each["load"] >= 1]
    assert overloaded
    assert all(each["stable"] is False and "pending" not in each for each in overloaded)
    assert found[0]["stable"] is True
    pending = [each for each in found if each.get("pending")]
    assert len(pending) == len(found) - len(overloaded) - 1
    assert all(each["stable"] is None and each["queueing_delay"] is None for each in pending)
    while any(each.get("pending") for each in found):
        before = {json.dumps(each) for each in found}
        found = rows(prediction_worker.ask_what_ifs(False))
        came += [each for each in found if json.dumps(each) not in before]
    loads = [each["load"] for each in came]
    assert loads == sorted(loads)
    assert len(came) == len(pending)
    assert not any(each.get("pending") for each in found)
    means = [
        [each["queueing_delay"] and each["queueing_delay"]["mean"] for each in some]
        for some in (found, whole)
    ]
    assert means[0] == means[1]


class Assessing(Asked):
    """Whose assessments are of 12 requests/s, and whose what-ifs take two questions a round."""

    def __init__(self, gateway: Any) -> None:
        super().__init__()
        self.gateway = gateway
        self.rate = 12.0
        self.last_call: float | None = None  # before a silence
        self.rounds: list[float] = []
        self.left = 0

    async def ask(self, *question: Any) -> Any:
        found = await super().ask(*question)
        now = self.gateway.now()
        if question[0] == "ask_what_ifs":
            if question[1]:
                self.rounds.append(now)
                self.left = 2
            self.left -= 1
            await asyncio.sleep(4.0)
            row = what_if(at=self.rounds[-1], queueing_delay=None)
            waiting = what_if(at=self.rounds[-1], queueing_delay=None, pending=True)
            return [row, waiting if self.left else row]
        if question[0] != "assess_window":
            return None
        look = look_of("single")
        estimates = dataclasses.replace(
            look.estimates,
            arrival_rate=symmetric(self.rate, 0.1 * self.rate, 900.0),
            speed=symmetric(1.0, 0.05, 900.0),
            dispersion=without_interval(1.0),
            now=now if self.last_call is None else self.last_call,
        )
        look = dataclasses.replace(look, at=now, arrival_rate=self.rate, estimates=estimates)
        return dataclasses.replace(
            found, can_say_what_if=True, prediction=look, estimates=estimates
        )


@contextlib.asynccontextmanager
async def assessed(**settings: Any) -> AsyncIterator[tuple[Any, Assessing]]:
    """A gateway whose what-ifs are due once an hour, and which assesses when it is told to."""
    async with running(prediction_interval=1e6, what_if_interval=3600, **settings) as (_, gateway):
        live = gateway.live_model()
        live._predictor = asked = Assessing(gateway)  # type: ignore[assignment]
        live._gauges.show = lambda _: None  # type: ignore[method-assign]
        live._gateway.settings = dataclasses.replace(gateway.settings, prediction_interval=5.0)
        live.begin_epoch(0)
        yield live, asked


def test_what_ifs_follow_a_change_of_the_rate_though_they_are_not_due() -> None:
    """They were held back for ten times as long as the last ones had taken."""

    async def main() -> None:
        async with assessed() as (live, asked):
            await live.update()
            assert (len(asked.rounds), live.what_if_left) == (1, 0)
            await asyncio.sleep(30.0)
            await live.update()
            assert len(asked.rounds) == 1, "nothing changed"
            asked.rate = 12.5
            await live.update()
            assert len(asked.rounds) == 1, "that is chance"
            asked.rate = 45.0
            await live.update()
            assert len(asked.rounds) == 2
            assert live.what_if_at == asked.rounds[1]
            assert not live.what_if_outdated
            await live.update()
            assert len(asked.rounds) == 2, "once for each change"

    run_virtual(main())


def test_what_ifs_that_take_long_are_shown_bit_by_bit_between_the_assessments() -> None:
    async def main() -> None:
        async with assessed() as (live, asked):
            asked.gateway.settings = dataclasses.replace(
                asked.gateway.settings, prediction_interval=1.0
            )
            await live.update()
            assert (len(live.what_if), live.what_if_left) == (1, 1), "the first part of them"
            await live.update()
            assert (len(asked.rounds), live.what_if_left) == (1, 0), "the rest, of the same round"

    run_virtual(main())


@pytest.mark.parametrize(
    ("gap", "outdated", "stopped"),
    [(1 / 12, False, False), (1 / 45, True, False), (1 / 2, True, False), (None, False, True)],
)
def test_arrivals_say_that_a_prediction_is_of_another_rate_before_it_is_renewed(
    gap: float | None, outdated: bool, stopped: bool
) -> None:
    """The predicting process may have no time for minutes. Where nothing comes any more, the last
    prediction is of the requests that came.
    """

    async def main() -> None:
        async with assessed() as (live, _):
            await live.update()
            await live.update()  # without what-ifs: no time passes
            for _ in range(0 if gap is None else int(15 / gap)):
                await asyncio.sleep(gap or 0.0)
                live.activity.recent.saw(live.activity._now(), begins_call=True)
            if gap is None:
                await asyncio.sleep(15.0)
            assert (live.outdated, live.what_if_outdated) == (outdated, outdated)
            assert live.stopped is stopped
            factor = 1 / 12 / gap if outdated and gap else 1.0
            assert live.rate_factor == pytest.approx(factor, rel=0.05)
            assert live.what_if_rate_factor == pytest.approx(factor, rel=0.05)
            live.begin_epoch(1)
            assert (live.outdated, live.what_if_outdated, live.stopped) == (False,) * 3

    run_virtual(main())


def test_requests_that_stopped_are_told_however_lately_the_window_was_assessed() -> None:
    """Each assessment of a window that they have left is of the time until the last of them."""

    async def main() -> None:
        async with assessed() as (live, asked):
            asked.last_call = asked.gateway.now()
            for _ in range(4):
                await asyncio.sleep(10.0)
                await live.update()
                assert (live.stopped, live.outdated) == (True, False)
                assert live.age is not None
                assert live.age < 10.0
            live.activity.recent.saw(live.activity._now(), begins_call=True)
            assert not live.stopped

    run_virtual(main())


def test_a_parameter_that_is_none_of_a_prediction_is_refused() -> None:
    async def main() -> None:
        async with running() as (app, _):
            for query, got in (
                (b"rate_facter=2", "got rate_facter; expected what_if or rate_factor"),
                (b"rate_factor=1&rate_factor=2", "got rate_factor=1 and rate_factor=2"),
            ):
                made = Call(app, "GET", "/admin/prediction", query=query)
                await made.task
                assert made.status == 400
                assert got in made.json()["error"]["message"]
            made = Call(app, "GET", "/admin/prediction")
            await made.task
            known = made.json()
            assert (known["age"], known["outdated"], known["stopped"]) == (None, False, False)

    run_virtual(main())


def test_a_rate_that_is_hardly_known_is_no_other_rate_because_more_requests_came() -> None:
    """Of a few requests an estimate is off by a quarter and more."""

    async def main() -> None:
        async with assessed() as (live, _):
            await live.update()
            await live.update()  # without what-ifs: no time passes

            def know(half_width: float) -> None:
                rate = symmetric(12.0, half_width, 900.0)
                estimates = dataclasses.replace(live.prediction.estimates, arrival_rate=rate)
                live.prediction = dataclasses.replace(live.prediction, estimates=estimates)

            know(6.0)
            for _ in range(900):  # 15 requests/s for a minute
                await asyncio.sleep(1 / 15)
                live.activity.recent.saw(live.activity._now(), begins_call=True)
            assert not live.outdated
            know(0.1)
            assert live.outdated

    run_virtual(main())


@pytest.mark.parametrize("slo", [None, "p99_queueing_delay<=1s"])
def test_the_gauge_of_the_servers_that_are_needed(slo: str | None) -> None:
    class Needed(Asked):
        async def ask(self, *question: Any) -> Any:
            await super().ask(*question)
            return 3 if question[0] == "ask_servers" else []

    async def main() -> None:
        async with running(overload=OverloadSettings(slo=slo)) as (_, gateway):

            def shown() -> str:
                text = gateway.metrics.exposition().decode()
                return next(
                    line for line in text.splitlines() if line.startswith("kendall_replicas_needed")
                )

            live, asked = gateway.live_model(), Needed()
            live._predictor = asked  # type: ignore[assignment]
            assert shown().endswith(" NaN")
            await live.update_what_if()
            assert shown().endswith(" NaN" if slo is None else " 3.0")
            assert (("ask_servers", slo) in asked.questions) == (slo is not None)
            gateway.limits.begin_epoch()
            assert shown().endswith(" NaN")

    run_virtual(main())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("seconds", "waited"), [(1.0, 60.0), (6.0, 60.0), (38.0, 380.0)])
def test_what_ifs_take_at_most_a_tenth_of_the_time(seconds: float, waited: float) -> None:
    """Under an order that interrupts each is simulated."""
    at: list[float] = []

    class Slow(Asked):
        async def ask(self, *question: Any) -> Any:
            found = await super().ask(*question)
            if question[0] != "ask_what_ifs":
                return dataclasses.replace(found, can_say_what_if=True)
            at.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)
            return [what_if()]

    async def main() -> None:
        async with running(prediction_interval=1e6) as (_, gateway):
            live = gateway.live_model()
            live._predictor = Slow()  # type: ignore[assignment]
            while len(at) < 3:
                await live.update()
                await asyncio.sleep(0.5)
            assert np.diff(at) == pytest.approx(waited, abs=0.6)

    run_virtual(main())


def test_without_a_prediction_the_reason_is_of_this_epoch_and_of_this_moment() -> None:
    async def main() -> None:
        async with running(prediction_interval=5) as (_, gateway):
            live, asked = gateway.live_model(), Asked()
            live._predictor = asked  # type: ignore[assignment]
            live.reason = "12 requests of this epoch have ended in the last 300 s; 50 are needed"
            assert live.why_nothing().startswith("12 requests")
            asked.busy = True
            await asyncio.sleep(5.0)
            assert live.why_nothing().startswith("12 requests")
            await asyncio.sleep(20.0)  # what was told is old, and something else takes long
            assert live.why_nothing().endswith("which is niced, is at work")
            asked.busy = False
            live.begin_epoch(1)
            assert live.why_nothing().startswith("no prediction yet: one is made every 5 s")
            asked.busy = True
            assert live.why_nothing().endswith("which is niced, is at work")

    run_virtual(main())


def test_a_new_epoch_shows_nothing_of_the_one_before() -> None:
    found = look_of(BATCHES[1])

    def beside(gauges: LiveGauges) -> None:
        gauges.what_if([what_if("dynamic")], None)

    def next_epoch(gauges: LiveGauges) -> None:
        beside(gauges)
        gauges.begin_epoch()

    before, after = gauges_of(found, beside), gauges_of(found, next_epoch)
    begun = gauges_of(found, LiveGauges.begin_epoch)
    gone = {
        "prediction_verdict",
        "check_verdict",
        "assumption_holds",
        "prediction_error_ratio",
        "what_if_queueing_delay_seconds",
    }
    gone |= {
        f"{kind}_{name}_seconds"
        for kind in ("predicted", "observed")
        for name in ("queueing_delay",)
    }
    assert gone <= before.keys()
    assert gone.isdisjoint(after)
    assert after.keys() == begun.keys()
    for name in ("load", "engine_speed_ratio", "predicted_utilisation", "predicted_batch_size"):
        assert before[name][""] > 0
        assert math.isnan(after[name][""])


@pytest.mark.parametrize("error", [0.25, -0.25, None])
def test_the_gauges_show_the_sign_of_an_error_and_nothing_of_what_is_not_known(
    error: float | None,
) -> None:
    found = look_of(BATCHES[1])
    judged = (("open_loop", True), ("no_stalls", False), ("settled", None))
    comparison = dataclasses.replace(
        found.comparison,
        error=math.nan if error is None else error,
        verdict="disagree",
        assumptions={name: Judgement(holds, "") for name, holds in judged},
    )
    shown = gauges_of(dataclasses.replace(found, comparison=comparison))
    assert shown.get("prediction_error_ratio", {}).get("") == error
    assert shown["prediction_verdict"] == {"agree": 0.0, "disagree": 1.0, "not enough data": 0.0}
    holds = shown["assumption_holds"]
    assert (holds["open_loop"], holds["no_stalls"]) == (1.0, 0.0)
    assert math.isnan(holds["settled"])


@pytest.mark.left_out
# near: a machine that holds the gateway back adds delay of its own
@pytest.mark.parametrize(
    "near", [pytest.param(None, id="there"), pytest.param(0.5, id="near", marks=pytest.mark.slow)]
)
def test_a_serving_gateway_predicts_its_own_delay(tmp_path: Path, near: float | None) -> None:
    """After a few seconds of load the predicted mean is there beside the observed one, and a
    switch starts afresh.
    """
    # a load that a slow machine serves too, or one that makes a delay
    rate, requests = (10.0, 100) if near is None else (80.0, 1000)

    async def main() -> None:
        arguments = [
            "tiny",
            "--engine",
            "emulated",
            "--policy",
            "capped:max_batch_size=4",
            "--prediction-interval",
            "1",
        ]
        async with GatewayProcess(
            [*arguments, "--allow-forced-lengths"], free_port(0), tmp_path / "log"
        ) as gateway:
            await gateway.ready()
            timetable = draw(rate, requests, 3, PROMPTS, SHORT)
            load = asyncio.create_task(
                run_load(Target(base_url=gateway.url, model="tiny"), timetable, seed=3)
            )
            await answered(gateway, "/admin/prediction", "prediction")
            await load
            await asyncio.sleep(1.5)  # for a look at all of it
            found = (await gateway.ask("GET", "/admin/prediction"))["prediction"]
            assert found["observed_mean"] > 0
            if near is not None:
                assert found["stable"]
                assert found["queueing_delay"]["mean"] == pytest.approx(
                    found["observed_mean"], rel=near
                )
                assert 0.5 < found["speed"] < 3
            async with httpx.AsyncClient(timeout=60) as client:
                text = (await client.get(gateway.url + "/metrics")).text
            told = (
                'kendall_predicted_queueing_delay_seconds{method="exact",policy="capped:max_batch_size=4",stat="mean"}',
                'kendall_prediction_error_ratio{policy="capped:max_batch_size=4"}',
            )
            for series in told:  # a machine that hardly serves anything has no steady state
                assert (series in text) == found["stable"]
            arrivals = re.search(r"^kendall_arrival_rate ([\d.e+-]+)$", text, re.MULTILINE)
            assert arrivals is not None
            assert 0 < float(arrivals[1]) <= 2 * rate
            more = await gateway.ask("GET", "/admin/prediction?rate_factor=1.5")
            assert more["rate_factor"] == 1.5
            assert more["what_if_in_force"]["load"] == pytest.approx(1.5 * found["load"], rel=0.3)
            await gateway.ask("PUT", "/admin/policy", {"policy": "single"})
            await asyncio.sleep(1.2)
            assert (await gateway.ask("GET", "/admin/prediction"))["prediction"] is None

    asyncio.run(main())


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes of ordinary priority that do nothing but compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_starved_predicting_process_follows_a_change_of_the_rate(tmp_path: Path) -> None:
    """Three busy neighbours a processor leave the niced process some thousandths of it: no answer
    came within 125 s.
    """
    arguments = [
        *("tiny", "--engine", "emulated", "--policy", "capped:max_batch_size=4"),
        *("--prediction-interval", "2", "--what-if-interval", "5", "--allow-forced-lengths"),
    ]

    async def loaded(gateway: GatewayProcess, rate: float, seconds: float) -> None:
        timetable = draw(rate, int(rate * seconds), 3, PROMPTS, SHORT)
        await run_load(Target(base_url=gateway.url, model="tiny"), timetable, seed=3)

    async def main() -> None:
        async with GatewayProcess(arguments, free_port(0), tmp_path / "log") as gateway:
            await gateway.ready()
            before = asyncio.create_task(loaded(gateway, 12, 30))
            await answered(gateway, "/admin/prediction", "what_if")
            await before
            with neighbours(3 * len(os.sched_getaffinity(0))):
                load = asyncio.create_task(loaded(gateway, 45, 125))
                moved_at = math.inf
                while not load.done():
                    await asyncio.sleep(1)
                    found = await gateway.ask("GET", "/admin/prediction")
                    if found["prediction"]["arrival_rate"] > 25:
                        moved_at = min(moved_at, found["prediction"]["at"])
                    known = [each for each in found["what_if"] if not each.get("pending")]
                    if known and found["what_if_at"] >= moved_at:
                        break
                assert not load.done(), f"what-ifs of {found['what_if_at']}, changed {moved_at}"
                load.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await load

    asyncio.run(main())


@pytest.mark.slow
def test_what_is_known_survives_a_restart(tmp_path: Path) -> None:
    """Estimates and the autopilot's memory are in the state file; after a restart advice rests
    on them before a single request.
    """
    state = tmp_path / "state.json"
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--policy",
        "dynamic",
        "--prediction-interval",
        "0.5",
        "--state-file",
        str(state),
    ]
    arguments += ["--allow-forced-lengths", "--autopilot", "advise"]

    async def life(number: int, requests: int) -> tuple[dict[str, Any], dict[str, Any]]:
        async with GatewayProcess(arguments, free_port(0), tmp_path / f"log{number}") as gateway:
            await gateway.ready()
            if requests:
                await run_load(
                    Target(base_url=gateway.url, model="tiny"),
                    draw(100.0, requests, 3, PROMPTS, SHORT),
                    seed=3,
                )
            async with asyncio.timeout(60):
                advice = await answered(
                    gateway, "/admin/advice?objective=delay&target=policy", "advice"
                )
                return advice, await answered(gateway, "/admin/state", "estimates")

    asyncio.run(life(1, 600))
    assert state.exists()
    after, known = asyncio.run(life(2, 0))
    assert known["estimates"]["restored"]
    assert known["autopilot"]["mode"] == "advise"
    assert known["estimates"]["output_tokens"]["mean"]["value"] == pytest.approx(12, rel=0.05)
    assert after["advice"][0]["current"]["queueing_delay"]["mean"] > 0


def test_before_there_are_estimates_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question_at(10.0, "single")
    monkeypatch.setattr(prediction_worker, "_memory", prediction_worker._Memory(question=asked))
    assert prediction_worker.ask_what_ifs() == []
    assert prediction_worker.ask_advice({}) == []
    assert prediction_worker.ask_load_balancer({}) is None
    assert prediction_worker.ask_rates({}) is None
    assert prediction_worker.ask_servers("mean_queueing_delay<=1s") is None
