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

What is asked is the predicting process's own functions (server.live.predicting), which keep what
they keep: the long run and the simulation of the next minutes are within the looks with their true
frequency, as the looks cover five minutes. Compilation of the simulator is over before (it is kept
on disk). Pauses of the event loop: feeding by request, in wall seconds; take and pickle by look, in
CPU seconds and in wall seconds, which on a busy machine hold what others did meanwhile. OpenBLAS
has one thread, as in the predicting process. Not in here are the autopilot (off by default), what
the interpreter and the pool's pipe do besides, and starting the process (seconds, once).

    .venv/bin/python bench/live_cost.py [--json FILE] [--policy TEXT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from policies import parse_policy
from queueing.choosing.forecast import Setting
from queueing.control.assess import Assessment, assess
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.window.producer import MOST, WindowDelta, WindowProducer
from queueing.estimation.window_queue import Limits
from queueing.latency.law import LatencyModel
from queueing.measurement.machine import hardware
from queueing.measurement.record import Record
from queueing.model import Model
from queueing.prediction import predict_model
from queueing.simulation.experiment import simulate_run
from server.live import predicting
from server.live.question import Question

RATE = 500.0  # requests/s
LOAD = 0.6
EVERY, SECONDS = 5.0, 300.0  # between looks, and of a window
WHAT_IF_EVERY = 60.0  # seconds
LOOKS = 60  # five minutes of them
ALLOWED = 0.03  # of one core
LONGEST_PAUSE = 1e-3  # seconds, p99
LENGTHS = parse_distribution("lognormal:mu=3.85,sigma=0.7", 256)
LAW = LatencyModel(
    k1=0.0003, k2=0.0014, k3=0.00002, k4=0.0012, cv=0.15
)  # of the small engine of docs, before it is scaled
LIMITS = Limits(max_output_tokens=256, max_num_seqs=64)
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
    wondering: list[float] = field(default_factory=list)
    feeding_pauses: list[float] = field(default_factory=list)
    handing_pauses: list[float] = field(default_factory=list)
    taking: list[float] = field(default_factory=list)
    message: int = 0  # bytes

    @property
    def per_request(self) -> float:
        """CPU seconds of feeding one request: its arrival and its record."""
        return self.feeding / self.fed

    def share(self, rate: float) -> float:
        """Of one core."""
        per_look = [sum(parts) for parts in zip(self.handing, self.assessing, strict=True)]
        return self.per_request * rate + float(np.mean(per_look)) / EVERY


def scaled(policy: str) -> Model:
    """The queue whose load is `LOAD` at `RATE`."""
    plain = Model(
        policy=parse_policy(policy),
        output_tokens=LENGTHS,
        law=LAW,
        max_num_seqs=LIMITS.max_num_seqs,
    )
    factor = LOAD * plain.largest_stable_rate / RATE
    law = LatencyModel(
        **{name: factor * getattr(LAW, name) for name in ("k1", "k2", "k3", "k4")}, cv=LAW.cv
    )
    return Model(
        policy=plain.policy, output_tokens=LENGTHS, law=law, max_num_seqs=LIMITS.max_num_seqs
    )


def events(model: Model, seconds: float) -> Iterator[tuple[float, Record | None]]:
    """Instants of arrivals (without a record) and of ends (with it), in order."""
    run = simulate_run(model, RATE, int(seconds * RATE), np.random.SeedSequence(1))
    arrived, left = run.arrived_at, run.released_at
    order = np.argsort(np.concatenate([left, arrived]), kind="stable")
    size = arrived.size
    for index in order.tolist():
        if index >= size:
            yield float(arrived[index - size]), None
        else:
            yield float(left[index]), _record(run, index)


def _record(run: Any, index: int) -> Record:
    return Record(
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


def slices(model: Model, looks: int) -> Iterator[list[tuple[float, Record | None]]]:
    """The events between looks."""
    kept: list[tuple[float, Record | None]] = []
    until = EVERY
    for at, record in events(model, EVERY * (looks + 1)):
        while at > until:
            yield kept
            kept, until = [], until + EVERY
        kept.append((at, record))


def feed_all(
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


def hand_over(producer: WindowProducer, costs: Costs) -> WindowDelta:
    """Take and pickle, as the event loop does; unpickle, as the predicting process does."""
    wall, began = time.perf_counter(), time.process_time()
    message = pickle.dumps(producer.take(), protocol=5)
    costs.handing_pauses.append(time.perf_counter() - wall)
    costs.taking.append(time.process_time() - began)
    delta: WindowDelta = pickle.loads(message)
    costs.handing.append(time.process_time() - began)
    costs.message = len(message)
    return delta


def question(policy: str, law: LatencyModel, delta: WindowDelta, now: float) -> Question:
    """What the gateway asks at a look."""
    return Question(
        delta=delta,
        at=now,
        window=SECONDS,
        shape=law,
        setting=Setting(policy=policy, max_output_tokens=LIMITS.max_output_tokens),
        max_num_seqs=LIMITS.max_num_seqs or 0,
        longest=LIMITS.max_output_tokens or 0,
        decides=False,
    )


def look(policy: str, law: LatencyModel, delta: WindowDelta, now: float, costs: Costs) -> None:
    """One, timed, in a predicting process that is this one; from time to time the what-ifs."""
    began = time.process_time()
    predicting.assess_window(question(policy, law, delta, now))
    costs.assessing.append(time.process_time() - began)
    if len(costs.assessing) % (WHAT_IF_EVERY / EVERY) == 1:
        began, found = time.process_time(), predicting.ask_what_ifs()
        while any(each.get("pending") for each in found):
            found = predicting.ask_what_ifs(anew=False)
        costs.wondering.append(time.process_time() - began)


def measure(policy: str) -> dict[str, Any]:
    """One policy: costs and the last assessment's verdict."""
    model = scaled(policy)
    filling = int(np.ceil(MOST / RATE / EVERY)) + 1
    producer, costs = WindowProducer(epoch_at=0.0), Costs()
    predicting._memory = predicting._Memory()  # as a process that has just begun
    for number, part in enumerate(slices(model, filling + LOOKS), start=1):
        feed_all(producer, part, costs, timed=number % 2 == 0)
        look(policy, model.law, hand_over(producer, costs), number * EVERY, costs)
        if number == filling:
            costs.handing, costs.assessing, costs.wondering = [], [], []
        if number == filling + LOOKS:
            break
    found = predicting._memory.last
    assert found is not None
    return summary(policy, model, costs, found) | {"look_bytes": _allocated(model.law)}


def _allocated(law: LatencyModel) -> int:
    """Largest memory taken at any moment of one look that has nothing to build on."""
    seen = predicting._memory.last_seen
    assert seen is not None
    tracemalloc.start()
    assess(seen, law, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def summary(policy: str, model: Model, costs: Costs, found: Assessment) -> dict[str, Any]:
    """Milliseconds, microseconds and shares of one core."""
    feeding, handing = np.array(costs.feeding_pauses), np.array(costs.handing_pauses)
    began = time.process_time()
    predict_model(
        Model(
            policy=model.policy,
            output_tokens=LENGTHS,
            law=model.law,
            max_num_seqs=model.max_num_seqs,
        ),
        RATE,
    )
    predicted = time.process_time() - began
    wondering = float(np.mean(costs.wondering))
    return {
        "policy": policy,
        "verdict": found.compared.verdict,
        "failing": [each.name for each in found.compared.assumptions if each.holds is False],
        "rows": found.estimates.count,
        "feed_us": costs.per_request * 1e6,
        "hand_over_ms": float(np.mean(costs.handing)) * 1e3,
        "assess_ms": float(np.mean(costs.assessing)) * 1e3,
        "assess_max_ms": max(costs.assessing) * 1e3,
        "predict_ms": predicted * 1e3,
        "what_if_ms": wondering * 1e3,
        "share": costs.share(RATE),
        "total": costs.share(RATE) + wondering / WHAT_IF_EVERY,
        "feed_p99_us": float(np.quantile(feeding, 0.99)) * 1e6,
        "feed_max_us": float(feeding.max()) * 1e6,
        "take_cpu_max_us": max(costs.taking) * 1e6,
        "take_p50_us": float(np.median(handing)) * 1e6,
        "take_max_us": float(handing.max()) * 1e6,
        "pause_p99_us": float(np.quantile(np.concatenate([feeding, handing]), 0.99)) * 1e6,
        "message_bytes": costs.message,
    }


COLUMNS = (
    "feed_us",
    "hand_over_ms",
    "assess_ms",
    "assess_max_ms",
    "predict_ms",
    "what_if_ms",
    "share",
    "total",
)
MORE = (
    "feed_p99_us",
    "feed_max_us",
    "take_cpu_max_us",
    "take_p50_us",
    "take_max_us",
    "pause_p99_us",
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
    print("policy".ljust(30), *(name.rjust(13) for name in (*COLUMNS, *MORE)), "look_MB verdict")
    for policy in options.policy or POLICIES:
        found = measure(policy)
        measured.append(found)
        numbers = (f"{found[name]:13.4g}" for name in (*COLUMNS, *MORE))
        print(
            policy.ljust(30),
            *numbers,
            f"{found['look_bytes'] / 2**20:7.1f}",
            found["verdict"],
            *found["failing"],
            flush=True,
        )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    good = all(
        each["total"] < ALLOWED
        and max(each["pause_p99_us"], each["take_cpu_max_us"]) < LONGEST_PAUSE * 1e6
        for each in measured
    )
    share, total = (max(each[name] for each in measured) for name in ("share", "total"))
    print(
        f"largest share of one core {share:.2%}, with what-ifs {total:.2%}; largest resident "
        f"memory {resident:.0f} MiB"
    )
    print("within 3 % of one core and 1 ms" if good else "NOT within 3 % of one core and 1 ms")
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "rate": RATE,
                    "hardware": hardware(),
                    "resident_mib": resident,
                    "policies": measured,
                },
                indent=1,
            )
        )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
