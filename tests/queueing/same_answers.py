"""Answers and sample paths as lines, to be compared with another revision's by `diff`: `python -m
tests.queueing.same_answers`.

First what `kendall predict` prints on random arguments (tests.queueing.predict_fuzz, as JSON), then
a digest of the sample path of every policy and order that can be combined, of each seed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import sys
from collections.abc import Iterator

import numpy as np

from tests.public_surface import module
from tests.queueing.predict_fuzz import cases

LAW = "k1=0.001,k2=0.01,k3=0.0002,k4=0.004,cv=0.1,turnaround=0.001"
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=3,max_wait=0.5",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=4",
    "continuous:max_batch_size=4",
)
ORDERS = (
    "fcfs",
    "spjf,aging=0.1",
    "ljf",
    "edf",
    "priority",
    "threshold,threshold=20",
    "vtc",
    "binned,bins=2",
    "hrrn",
    "sprpt",
    "pspjf,max_preemptions=2",
    "threshold-preemptive,threshold=20",
    "trail,c=0.8",
    "mlfq",
    "fb,quantum=5",
)
REQUESTS, LOAD = 1500, 0.8


def answers(count: int, seed: int) -> Iterator[str]:
    """The output and exit status of `kendall predict`, in this process."""
    main = importlib.import_module("kendall.cli").main
    for line in cases(count, seed):
        out, err, status = io.StringIO(), io.StringIO(), 0
        asked = [*line, *(["--json"] if "--json" not in line else [])]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(["predict", *asked])
            except SystemExit as ended:
                status = int(ended.code or 0)
        complaint = err.getvalue().strip() if status else ""  # else how long it takes
        yield f"{' '.join(asked)} -> {status} {out.getvalue().strip()}{complaint}"


def paths(seeds: int) -> Iterator[str]:
    """Digests of sample paths; what cannot be combined says why."""
    errors, experiment = module("policies.text"), module("queueing.simulation.experiment")
    try:
        described = module("queueing.queue").Queue
    except ModuleNotFoundError:  # in earlier revisions
        described = module("queueing.model").Model
    for policy, order, servers in itertools.product(POLICIES, ORDERS, (1, 2)):
        text = f"{policy}{',' if ':' in policy else ':'}order={order}"
        try:
            queue = described.read(
                text, "geometric:mean=20", LAW, servers=servers, predictor="lognormal:sigma=0.5"
            )
            rate = LOAD * queue.largest_stable_rate
        except errors.SpecError as error:
            yield f"{text} on {servers}: {error}"
            continue
        for seed in range(seeds):
            run = experiment.simulate_run(queue, rate, REQUESTS, np.random.SeedSequence(seed))
            digest = hashlib.sha256()
            for name in ("arrived_at", "dispatched_at", "released_at", "batch_id", "server_id"):
                digest.update(np.ascontiguousarray(getattr(run, name)).tobytes())
            yield f"{text} on {servers}, seed {seed}: {digest.hexdigest()[:16]}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--count", type=int, default=300, help="command lines (300)")
    made.add_argument("--seed", type=int, default=1, help="of these (1)")
    made.add_argument("--seeds", type=int, default=10, help="of each sample path (10)")
    return made


if __name__ == "__main__":
    options = parser().parse_args()
    for line in itertools.chain(answers(options.count, options.seed), paths(options.seeds)):
        sys.stdout.write(f"{line}\n")
