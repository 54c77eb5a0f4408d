"""Runs of every policy versus theory, as kept: each number and verdict, and the tables of them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kendall.loadgen.compare.compare import Comparison, compare
from kendall.loadgen.compare.comparison import Predicted
from kendall.loadgen.compare.epoch_sample import epoch_samples, first_dispatches
from kendall.loadgen.compare.residual import verdict
from kendall.loadgen.compare.sampling_error import sampling_error
from kendall.loadgen.compare.theory import (
    predict_means,
    published_delay,
    replay_arrivals,
    theory_of,
)
from kendall.loadgen.report.report import as_object, show
from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.recursion import served
from kendall.queueing.queue import Queue
from tests.golden_files import is_as_kept
from tests.kept_values import moved
from tests.loadgen.driver import LAW, LENGTHS, drive

RUNS: dict[str, tuple[str, float, float]] = {
    "single": ("single", 8.0, 1.0),
    "single, slower": ("single", 7.0, 1.3),
    "dynamic": ("dynamic", 20.0, 1.0),
    "capped": ("capped:max_batch_size=4", 14.0, 1.1),
    "fixed": ("fixed:batch_size=4", 14.0, 1.0),
    "continuous": ("continuous:max_batch_size=4", 20.0, 1.0),
    "overloaded": ("single", 13.0, 1.0),
}


def sent(record: Record) -> Record:
    at = record.arrived_at or 0.0
    return msgspec.structs.replace(
        record, request_id=f"c-{record.request_id}", intended_at=at - 0.002, sent_at=at - 0.001
    )


@cache
def found(name: str) -> Comparison:
    text, rate, speed = RUNS[name]
    records = [
        msgspec.structs.replace(each, client_request_id=f"c-{each.request_id}")
        for each in drive(parse_policy(text), rate, n=240, law=LAW.at_speed(speed), max_num_seqs=16)
    ]
    theory = theory_of(LAW, LENGTHS, asked_rate=rate, bounds=EngineBounds(max_num_seqs=16))
    (comparison,) = compare(records, theory, [sent(each) for each in records])
    return comparison


@pytest.mark.parametrize("name", RUNS)
def test_comparisons_are_as_kept(name: str) -> None:
    def numbers() -> list[Any]:
        each = found(name)
        return [as_object(each), verdict(each)]

    assert (
        moved(f"compared-{name.replace(', ', '-').replace(' ', '-')}.json", {name: numbers}) == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 150])
def test_their_tables_are_as_kept(width: int) -> None:
    to = io.StringIO()
    show([found(name) for name in RUNS], Console(file=to, width=width))
    assert is_as_kept(f"comparisons-{width}.txt", to.getvalue())


def test_a_run_without_theory_is_as_kept() -> None:
    records = drive(parse_policy("dynamic"), 20.0, n=100, law=LAW, max_num_seqs=16)
    assert (
        moved("compared-alone.json", {"": lambda: [as_object(each) for each in compare(records)]})
        == []
    )


def test_means_and_published_delays_are_as_kept() -> None:
    texts = [text for text, _, _ in RUNS.values()]
    cases: dict[str, Callable[[], Any]] = {}
    for text in dict.fromkeys(texts):
        plain = Queue.read(text, LENGTHS, LAW)
        bounded = plain.but(max_num_seqs=16)
        prompted = plain.but(prompt_tokens=parse_distribution("uniform:low=1,high=9"))
        models = [
            bounded,
            *(
                plain.but(law=dataclasses.replace(LAW, **about))
                for about in ({"kp": 1e-3}, {"cv": 0.2})
            ),
            plain.but(servers=2),
            prompted,
        ]
        for rate in (0.0, 5.0):
            cases[f"{text} at {rate}"] = lambda models=models, rate=rate: [  # type: ignore[misc]
                predict_means(models[0], rate),
                *(published_delay(model, rate) for model in models),
            ]
    assert moved("published-delays.json", cases) == []


def test_replays_are_as_kept() -> None:
    def replayed(name: str, bound: int | None) -> Any:
        text, rate, _ = RUNS[name]
        policy = parse_policy(text)
        records = drive(policy, rate, n=60, law=LAW, max_num_seqs=16)
        (sample,) = epoch_samples(served(records), first_dispatches(records))
        return [
            list(
                replay_arrivals(
                    policy, sample, law, EngineBounds(max_num_seqs=bound), seed=2
                ).values()
            )
            for law in (LAW, LAW.at_speed(1.5))
        ]

    names = ("single", "dynamic", "fixed", "continuous")
    cases = {
        f"{name} {bound}": lambda name=name, bound=bound: replayed(name, bound)
        for name in names
        for bound in (3, None)
    }
    assert moved("replays.json", cases) == []


def test_sampling_errors_are_as_kept() -> None:
    model = Queue.read("dynamic", LENGTHS, LAW, max_num_seqs=16)

    def of(count: int, delay: float | None, method: Any = "exact") -> Any:
        answer = Predicted(load=0.5, queueing_delay=delay, sojourn_time=None, method=method)
        return sampling_error(model, 20.0, count, "queueing_delay", answer)

    cases: dict[str, Callable[[], Any]] = {
        "exact": lambda: of(300, 0.05),
        "approximate": lambda: of(300, 0.05, "approximation"),
        "without a mean": lambda: of(300, None),
        "endless": lambda: of(300, float("inf")),
        "short": lambda: [of(n, 0.05) for n in (1, 2, 3)],
    }
    assert moved("sampling-error.json", cases) == []
