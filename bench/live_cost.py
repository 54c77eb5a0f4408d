"""What the live model costs: the share of one core, and the pauses it puts into the event loop, at
500 requests/s.

Each policy serves a simulated run at 500 requests/s and load 0.6; its records go into the producer
in the order of their ends, its arrivals in theirs, as in the gateway. Every 5 s of the run a delta
is taken, pickled, unpickled and added to the replica, and the window is assessed, with what the
last assessment handed on. Looks are counted once the window has reached its full number of rows.
CPU seconds are `process_time`, all in one process (the gateway's part and the predicting
process's):

    share = (on_arrival + on_record) x rate + (take, pickle, unpickle, assess_window) / 5 s
    total = share + ask_what_ifs, until none is pending, with their gains / 60 s

What is asked is the predicting process's own functions (server.live.prediction_worker), which
keep what they keep: the long run and the simulation of the next minutes are within the looks with
their true frequency, as the looks cover five minutes. Compilation of the simulator is over before
(it is kept on disk). Pauses of the event loop: feeding by request, in wall seconds; take and pickle
by look, in CPU seconds and in wall seconds, which on a busy machine hold what others did meanwhile.
OpenBLAS has one thread, as in the predicting process. The length predictor `learned` is fed the
prompts of bench/prompt_lengths.py, in turn:

    share = (predict + on_record) x rate

Learning is apart (`learn_s`, CPU seconds each time, in the niced predicting process): the gateway
learns again when at least 100 times as long has passed. Not in here are the autopilot (off by
default), what the interpreter and the pool's pipe do besides, and starting the process (seconds,
once).

    .venv/bin/python bench/live_cost.py [--json FILE] [--policy TEXT ...]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import pickle
import resource
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from bench.prompt_lengths import rows
from kendall.policies import Request
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window.producer import MOST, WindowDelta, WindowProducer
from kendall.queueing.estimation.window.replica import WindowReplica
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.machine import hardware
from kendall.queueing.measurement.record import Record
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.live import prediction_worker
from kendall.server.live.answers import Answer
from kendall.server.live.assessment_request import AssessmentRequest
from kendall.server.predictors.lengths import ANSWERS, LengthPredictor

RATE = 500.0  # requests/s
LOAD = 0.6
EVERY, SECONDS = 5.0, 300.0  # between looks, and of a window
WHAT_IF_EVERY = 60.0  # seconds
LOOKS = 60  # five minutes of them
ALLOWED = 0.03  # of one core
LONGEST_PAUSE = 1e-3  # seconds, p99
LENGTHS = parse_distribution("lognormal:mu=3.85,sigma=0.7", 256)
# of the small engine of docs, before it is scaled
LAW = LatencyModel(k1=0.0003, k2=0.0014, k3=0.00002, k4=0.0012, cv=0.15)
LIMITS = QueueLimits(max_output_tokens=256, engine=EngineBounds(max_num_seqs=64))
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=8",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=16",
    "continuous:max_batch_size=8",
)


@dataclass
class Costs:
    """CPU seconds by part; wall seconds of pauses."""

    feeding: float = 0.0
    fed: int = 0
    handing: list[float] = field(default_factory=list)
    assessing: list[float] = field(default_factory=list)
    what_ifs: list[float] = field(default_factory=list)
    feeding_pauses: list[float] = field(default_factory=list)
    handing_pauses: list[float] = field(default_factory=list)
    taking: list[float] = field(default_factory=list)

    @property
    def per_request(self) -> float:
        """CPU seconds of feeding one request: its arrival and its record."""
        return self.feeding / self.fed

    @property
    def per_look(self) -> float:
        """CPU seconds of handing over and assessing."""
        return float(np.mean(self.handing) + np.mean(self.assessing))


def scaled(policy: str) -> Queue:
    """The queue whose load is `LOAD` at `RATE`."""
    model = Queue.read(policy, LENGTHS, LAW, max_num_seqs=LIMITS.engine.max_num_seqs)
    factor = LOAD * model.largest_stable_rate / RATE
    law = LatencyModel(
        **{name: factor * getattr(LAW, name) for name in ("k1", "k2", "k3", "k4")}, cv=LAW.cv
    )
    return model.but(law=law)


def events(model: Queue, seconds: float) -> Iterator[tuple[float, Record | None]]:
    """Instants of arrivals (without a record) and of ends (with it), in order."""
    run = simulate_run(model, RATE, int(seconds * RATE), np.random.SeedSequence(1))
    size = run.arrived_at.size
    instants = np.concatenate([run.released_at, run.arrived_at])
    for index in np.argsort(instants, kind="stable").tolist():
        if index >= size:
            yield float(run.arrived_at[index - size]), None
            continue
        record = Record(
            request_id=str(index),
            outcome="completed",
            epoch=0,
            server_id=0,
            batch_id=int(run.batch_id[index]),
            batch_size=int(run.batch_size[index]),
            arrived_at=float(run.arrived_at[index]),
            dispatched_at=float(run.dispatched_at[index]),
            released_at=float(run.released_at[index]),
            server_free_at=float(run.server_free_at[index]),
            first_token_at=float(run.first_token_at[index]),
            prompt_tokens=32,
            output_tokens=int(run.output_tokens[index]),
        )
        yield float(run.released_at[index]), record


def slices(model: Queue, looks: int) -> Iterator[list[tuple[float, Record | None]]]:
    """Yield the events between two looks."""
    kept: list[tuple[float, Record | None]] = []
    until = EVERY
    for at, record in events(model, EVERY * (looks + 1)):
        while at > until:
            yield kept
            kept, until = [], until + EVERY
        kept.append((at, record))


def feed(
    producer: WindowProducer,
    part: Sequence[tuple[float, Record | None]],
    costs: Costs,
    *,
    timed: bool,
) -> None:
    """One slice; `timed`: with the wall time of each call (then the CPU time is not counted: the
    clock costs as much as the call).
    """
    on_arrival, on_record, clock = producer.on_arrival, producer.on_record, time.perf_counter
    if timed:
        for at, record in part:
            began = clock()
            if record is None:
                on_arrival(at)
            else:
                on_record(record)
            costs.feeding_pauses.append(clock() - began)
        return
    began = time.process_time()
    for at, record in part:
        if record is None:
            on_arrival(at)
        else:
            on_record(record)
    costs.feeding += time.process_time() - began
    costs.fed += sum(record is not None for _, record in part)


def look(
    policy: str, law: LatencyModel, producer: WindowProducer, now: float, costs: Costs
) -> tuple[bytes, Answer]:
    """The message and the answer of one assessment: taken and pickled as on the event loop,
    unpickled and assessed as in the predicting process, which is this one; from time to time the
    what-ifs.
    """
    wall, began = time.perf_counter(), time.process_time()
    message = pickle.dumps(producer.take(), protocol=5)
    costs.handing_pauses.append(time.perf_counter() - wall)
    costs.taking.append(time.process_time() - began)
    delta: WindowDelta = pickle.loads(message)
    costs.handing.append(time.process_time() - began)
    question = AssessmentRequest(
        delta=delta,
        at=now,
        window=SECONDS,
        shape=law,
        setting=Setting(policy=policy, max_output_tokens=LIMITS.max_output_tokens),
        engine=LIMITS.engine,
        longest=LIMITS.max_output_tokens or 0,
        decides=False,
    )
    began = time.process_time()
    answer = prediction_worker.assess_window(question)
    costs.assessing.append(time.process_time() - began)
    if len(costs.assessing) % (WHAT_IF_EVERY / EVERY) == 1:
        began, what_ifs = time.process_time(), prediction_worker.ask_what_ifs()
        while any(what_if.forecast.pending for what_if in what_ifs):
            what_ifs = prediction_worker.ask_what_ifs(anew=False)
        costs.what_ifs.append(time.process_time() - began)
    return message, answer


def measure(policy: str) -> dict[str, Any]:
    """One policy: milliseconds, microseconds, shares of one core, and the last verdict."""
    importlib.reload(prediction_worker)  # as a process that has just begun
    model = scaled(policy)
    filling = int(np.ceil(MOST / RATE / EVERY)) + 1
    producer, replica, costs = WindowProducer(epoch_at=0.0), WindowReplica(), Costs()
    replica.seconds = SECONDS
    message, prediction = b"", None
    for number, part in enumerate(slices(model, filling + LOOKS), start=1):
        now = number * EVERY
        feed(producer, part, costs, timed=number % 2 == 0)
        message, answer = look(policy, model.engine.law, producer, now, costs)
        replica.add(pickle.loads(message))
        prediction = answer.prediction
        if number == filling:
            costs.handing, costs.assessing, costs.what_ifs = [], [], []
        if number == filling + LOOKS:
            break
    window = replica.snapshot(policy, now)
    tracemalloc.start()
    assess(window, model.engine.law, LIMITS)  # with nothing to build on
    look_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    began = time.process_time()
    predict_model(replace(model), RATE)  # a copy has no tables yet
    predicted = time.process_time() - began
    feeding, handing = np.array(costs.feeding_pauses), np.array(costs.handing_pauses)
    what_ifs = float(np.mean(costs.what_ifs))
    share = costs.per_request * RATE + costs.per_look / EVERY
    assert prediction is not None
    comparison = prediction.comparison
    return {
        "policy": policy,
        "verdict": comparison.verdict,
        "failing": [name for name, one in comparison.assumptions.items() if one.holds is False],
        "rows": prediction.estimates.count,
        "feed_us": costs.per_request * 1e6,
        "hand_over_ms": float(np.mean(costs.handing)) * 1e3,
        "assess_ms": float(np.mean(costs.assessing)) * 1e3,
        "assess_max_ms": max(costs.assessing) * 1e3,
        "predict_ms": predicted * 1e3,
        "what_if_ms": what_ifs * 1e3,
        "share": share,
        "total": share + what_ifs / WHAT_IF_EVERY,
        "feed_p99_us": float(np.quantile(feeding, 0.99)) * 1e6,
        "feed_max_us": float(feeding.max()) * 1e6,
        "take_cpu_max_us": max(costs.taking) * 1e6,
        "take_p50_us": float(np.median(handing)) * 1e6,
        "take_max_us": float(handing.max()) * 1e6,
        "pause_p99_us": float(np.quantile(np.concatenate([feeding, handing]), 0.99)) * 1e6,
        "message_bytes": len(message),
        "look_bytes": look_bytes,
    }


def measure_predictor() -> dict[str, float]:
    """`learned`, once it has learned from as many answers as it keeps: microseconds a request,
    share of one core, CPU seconds of learning.
    """
    data, learning = rows(), list[float]()
    prompts = [
        ([crc32(word.encode()) for word in row["prompt"].split()], row["tokens"][0]) for row in data
    ]
    numbers = itertools.count()

    async def ask(_: str, *arguments: Any) -> Any:
        began = time.process_time()
        model = prediction_worker.learn_lengths(*arguments)
        learning.append(time.process_time() - began)
        return model

    async def fed(predictor: LengthPredictor, count: int) -> float:
        began = time.process_time()
        for number in itertools.islice(numbers, count):
            prompt, tokens = prompts[number % len(prompts)]
            request = Request(str(number), 0.0, len(prompt), 256)
            call = EngineRequest(request, prompt, Sampling(max_tokens=256))
            await predictor.predicted([call])
            predictor.on_record(
                Record(request_id=str(number), outcome="completed", output_tokens=tokens)
            )
        return (time.process_time() - began) / count

    async def main() -> float:
        predictor = LengthPredictor("learned", ask)
        await fed(predictor, ANSWERS)
        await predictor.learn()
        assert predictor.version == 1
        return await fed(predictor, ANSWERS)

    per_request = asyncio.run(main())
    return {
        "predict_us": per_request * 1e6,
        "share": per_request * RATE,
        "learn_s": learning[0],
    }


COLUMNS = (
    *("feed_us", "hand_over_ms", "assess_ms", "assess_max_ms", "predict_ms", "what_if_ms"),
    *("share", "total", "feed_p99_us", "feed_max_us", "take_cpu_max_us", "take_p50_us"),
    *("take_max_us", "pause_p99_us"),
)


def main() -> int:
    """Measure, print, and fail where the share or the pauses are beyond what is allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", action="append", help="policy text; repeatable (default: six)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    measured = []
    print("policy".ljust(30), *(name.rjust(13) for name in COLUMNS), "look_MB verdict")
    for policy in options.policy or POLICIES:
        row = measure(policy)
        measured.append(row)
        numbers = (f"{row[name]:13.4g}" for name in COLUMNS)
        memory = f"{row['look_bytes'] / 2**20:7.1f}"
        print(policy.ljust(30), *numbers, memory, row["verdict"], *row["failing"], flush=True)
    lengths = measure_predictor()
    print(
        f"length predictor learned: {lengths['predict_us']:.3g} us a request, "
        f"{lengths['share']:.2%} of one core; learning {lengths['learn_s']:.2g} s each time"
    )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    good = all(
        row["total"] < ALLOWED
        and max(row["pause_p99_us"], row["take_cpu_max_us"]) < LONGEST_PAUSE * 1e6
        for row in measured
    )
    share, total = (max(row[name] for row in measured) for name in ("share", "total"))
    print(
        f"largest share of one core {share:.2%}, with what-ifs {total:.2%}; largest resident "
        f"memory {resident:.0f} MiB"
    )
    good &= lengths["share"] < ALLOWED
    print("within 3 % of one core and 1 ms" if good else "NOT within 3 % of one core and 1 ms")
    if options.json:
        facts = {"rate": RATE, "hardware": hardware(), "resident_mib": resident}
        options.json.write_text(
            json.dumps(facts | {"policies": measured, "length_predictor": lengths}, indent=1)
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
