"""An engine with continuous batching whose law is known, written step by step, and the counters
that vLLM keeps of it: what `kendall watch` is tried on. Nothing of the product computes here.
"""

from __future__ import annotations

import heapq
import math
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.counters.track_record import PARTS, Hour
from kendall.queueing.measurement.server_signals import VLLM
from kendall.server.watch.signals import Series, samples_of
from tests.support import require_program

Vector = npt.NDArray[Any]
BUCKETS = np.array([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, np.inf])


@dataclass(frozen=True, kw_only=True)
class Law:
    """Seconds of a step: k4 + k3 sequences + k1 admitted + kp tokens of their prompts."""

    k1: float = 0.001
    k3: float = 0.002
    k4: float = 0.02
    kp: float = 0.0001


@dataclass(frozen=True, eq=False)
class Served:
    """What became of each request, and of the tokens by time."""

    arrived: Vector
    prompts: Vector
    outputs: Vector
    scheduled: Vector
    first: Vector
    finished: Vector
    at: Vector  # ends of runs of equal steps
    steps: Vector  # until then
    gaps: Vector  # gaps between tokens, and their seconds
    gap_seconds: Vector

    @property
    def delay(self) -> Vector:
        return self.scheduled - self.arrived

    @property
    def sojourn(self) -> Vector:
        return self.finished - self.arrived


def serve(arrived: Vector, prompts: Vector, outputs: Vector, law: Law, slots: int) -> Served:
    """First come, first served; who comes in a step enters the next one that has a slot."""
    count = len(arrived)
    scheduled, first, finished = (np.zeros(count) for _ in range(3))
    path = [(0.0, 0, 0, 0.0)]
    now, step, gaps, gap_seconds, coming = 0.0, 0, 0, 0.0, 0
    waiting: deque[int] = deque()
    ends: list[tuple[int, int]] = []  # number of the last step, request
    while coming < count or waiting or ends:
        if not ends and not waiting:
            now = max(now, float(arrived[coming]))
        while coming < count and arrived[coming] <= now:
            waiting.append(coming)
            coming += 1
        decoding, tokens, entered = len(ends), 0, []
        while waiting and len(ends) < slots:
            request = waiting.popleft()
            entered.append(request)
            tokens += int(prompts[request])
            heapq.heappush(ends, (step + int(outputs[request]), request))
        seconds = law.k4 + law.k3 * len(ends) + law.k1 * len(entered) + law.kp * tokens
        number = 1
        if not entered:  # equal steps until somebody ends, or may enter
            number = ends[0][0] - step
            if coming < count and len(ends) < slots:
                number = min(number, math.ceil((arrived[coming] - now) / seconds))
            number = max(1, number)
        scheduled[entered] = now
        now, step = now + number * seconds, step + number
        first[entered] = now
        gaps, gap_seconds = gaps + number * decoding, gap_seconds + number * decoding * seconds
        path.append((now, step, gaps, gap_seconds))
        while ends and ends[0][0] <= step:
            finished[heapq.heappop(ends)[1]] = now
    columns = np.array(path).T
    return Served(arrived, prompts, outputs, scheduled, first, finished, *columns)


def counters(
    served: Served,
    instants: Vector,
    *,
    model: str = "tiny",
    instance: str = "a:8000",
    cached: Vector | None = None,
) -> list[Series]:
    """vLLM's series at the instants of scrapes, as if it had begun with the first request;
    `cached`: tokens of each prompt, beside those that it computes, that the prefix cache held.
    """
    held = np.zeros(served.prompts.size) if cached is None else cached
    found: list[Series] = []
    labels = {"model_name": model, "instance": instance, "engine": "0"}

    def add(name: str, values: Vector, **more: str) -> None:
        found.append(Series(f"vllm:{name}", labels | more, instants, values.astype(float)))

    def until(when: Vector, values: Vector | None = None) -> Vector:
        return _until(when, instants, values)

    def histogram(name: str, when: Vector, values: Vector, *, buckets: bool = False) -> None:
        add(f"{name}_sum", until(when, values))
        add(f"{name}_count", until(when))
        for upper in BUCKETS if buckets else ():
            within = values <= upper
            le = "+Inf" if math.isinf(upper) else f"{upper:.1f}"
            add(f"{name}_bucket", until(when[within]), le=le)

    end = served.finished
    for reason in ("stop", "length"):
        kind = np.arange(end.size) % 2 == (reason == "stop")
        add("request_success_total", until(end[kind]), finished_reason=reason)
    histogram("request_queue_time_seconds", end, served.delay)
    histogram("e2e_request_latency_seconds", end, served.sojourn)
    histogram("time_to_first_token_seconds", served.first, served.first - served.arrived)
    histogram("request_prefill_time_seconds", end, served.first - served.scheduled)
    histogram("request_inference_time_seconds", end, end - served.scheduled)
    for name, values in (
        ("request_prompt_tokens", served.prompts + held),
        ("request_prefill_kv_computed_tokens", served.prompts),
        ("request_generation_tokens", served.outputs),
    ):
        histogram(name, end, values.astype(float), buckets=True)
    add("inter_token_latency_seconds_sum", np.interp(instants, served.at, served.gap_seconds))
    add("inter_token_latency_seconds_count", np.interp(instants, served.at, served.gaps).round())
    add("num_preemptions_total", np.zeros(instants.size))
    add("prefix_cache_queries_total", until(served.first, served.prompts + held))
    add("prefix_cache_hits_total", until(served.first, held))
    began = until(served.scheduled)
    add("num_requests_running", began - until(end))
    # who came in the running step waits for its end, and is not counted yet
    boundary = served.at[np.searchsorted(served.at, instants, "right") - 1]
    add("num_requests_waiting", np.maximum(0.0, _until(served.arrived, boundary) - began))
    add("kv_cache_usage_perc", np.full(instants.size, 0.2))
    return found


def _until(when: Vector, instants: Vector, values: Vector | None = None) -> Vector:
    order = np.argsort(when, kind="stable")
    given = np.ones(when.size) if values is None else values
    sums = np.concatenate([[0.0], np.cumsum(given[order])])
    return sums[np.searchsorted(when[order], instants, "right")]


def exposition(series: list[Series], scrape: int) -> str:
    """What the server shows at one scrape."""
    lines = []
    for each in series:
        own = {name: text for name, text in each.labels.items() if name != "instance"}
        labels = ",".join(f'{name}="{text}"' for name, text in own.items())
        lines.append(f"{each.name}{{{labels}}} {float(each.values[scrape])!r}")
    return "\n".join(lines) + "\n"


def poisson(rates: Vector, seconds: float, rng: np.random.Generator) -> Vector:
    """Arrivals whose rate is constant for so many seconds each."""
    found = [
        np.sort(index * seconds + seconds * rng.random(rng.poisson(rate * seconds)))
        for index, rate in enumerate(rates)
    ]
    return np.concatenate(found)


def of_lengths(
    arrived: Vector, mean: float, prompt: int, law: Law, slots: int, rng: np.random.Generator
) -> Served:
    """Geometric answers, prompts that are equally likely up to twice the mean."""
    outputs = rng.geometric(1 / mean, arrived.size)
    prompts = rng.integers(1, 2 * prompt, arrived.size)
    return serve(arrived, prompts, outputs, law, slots)


def at_speed(
    arrived: Vector,
    mean: float,
    prompt: int,
    law: Law,
    slots: int,
    rng: np.random.Generator,
    *,
    knots: Vector,
    speed: Vector,
) -> Served:
    """The same of an engine on which everything takes `speed` times as long from one knot to the
    next; 1 after the last.
    """
    clock = np.append(0.0, np.cumsum(np.diff(knots) / speed))  # of the engine at speed 1
    last = max(float(arrived[-1]), float(knots[-1])) + 3600.0
    at, clock = np.append(knots, last), np.append(clock, clock[-1] + last - knots[-1])
    found = of_lengths(np.interp(arrived, at, clock), mean, prompt, law, slots, rng)
    scheduled, first, finished, ends = (
        np.interp(each, clock, at)
        for each in (found.scheduled, found.first, found.finished, found.at)
    )
    took = np.diff(found.at)
    making = np.diff(found.gap_seconds) / np.where(took > 0, took, 1.0)
    return Served(
        arrived,
        found.prompts,
        found.outputs,
        scheduled,
        first,
        finished,
        ends,
        found.steps,
        found.gaps,
        np.append(0.0, np.cumsum(making * np.diff(ends))),
    )


def wandering(seconds: float, spread: float, rng: np.random.Generator) -> tuple[Vector, Vector]:
    """Knots half a second apart, and speeds whose log wanders about as far as this in 5 seconds."""
    each, memory = 0.5, math.exp(-0.5 / 5.0)
    log, logs = 0.0, []
    for drawn in rng.standard_normal(math.ceil(seconds / each)):
        log = memory * log + math.sqrt(1 - memory**2) * drawn
        logs.append(spread * log - spread**2 / 2)
    return each * np.arange(len(logs) + 1), np.exp(logs)


def begun_anew(series: list[Series], at: float) -> list[Series]:
    """The same server, whose process began anew then: its counters count from there."""
    found = []
    for each in series:
        later = each.at >= at
        before = each.values[~later][-1] if "num_requests" not in each.name else 0.0
        found.append(
            Series(
                each.name, each.labels, each.at, np.where(later, each.values - before, each.values)
            )
        )
    return found


def seen(series: list[Series], kept: Vector) -> list[Series]:
    """Only these scrapes."""
    return [Series(each.name, each.labels, each.at[kept], each.values[kept]) for each in series]


def hours(series: list[Series], number: int, seconds: float = 3600.0) -> list[Hour]:
    """Rows of a track record."""
    replicas = samples_of(VLLM, series)
    found = []
    for hour in range(number):
        edges = [seconds * (hour + part / PARTS) for part in range(PARTS + 1)]
        found.append(Hour.of(edges, [each.between(edges) for each in replicas]))
    return found


def backfilled(folder: Path, series: list[Series], now: float) -> None:
    """The data folder of a Prometheus that has scraped these series; the last scrape was `now`."""
    text = folder / "history.txt"
    shift = now - float(series[0].at[-1])
    with text.open("w") as file:
        for each in series:
            labels = ",".join(f'{name}="{value}"' for name, value in each.labels.items())
            for at, value in zip(each.at, each.values, strict=True):
                file.write(f"{each.name}{{{labels}}} {float(value)!r} {at + shift:.3f}\n")
        file.write("# EOF\n")
    command = [require_program("promtool"), "tsdb", "create-blocks-from", "openmetrics"]
    subprocess.run([*command, str(text), str(folder / "data")], check=True, capture_output=True)
