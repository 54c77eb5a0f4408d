"""What `kendall optimize` says of its best setting is what `kendall predict` says there.

    python -m tests.queueing.optimum_is_predicted --count 300 [--seed 0]

Random queues, ways to their servers, targets and SLOs. Both commands run as a user runs them; what
they say of the durations that the SLOs bound may differ by three standard errors of a simulation,
and the best setting keeps every SLO by either. Prints each miss, and ends with status 1 if there is
one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from typer.testing import CliRunner

from kendall.policies import format_policy, parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.candidates import with_size
from kendall.queueing.choosing.objective import Slo, parse_slo
from kendall.queueing.commands.cli import app as predicting
from kendall.queueing.commands.optimize_cli import app as optimizing
from kendall.queueing.description.parts import ROUTINGS
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run

POLICIES = (
    "single",
    "single:order=spjf",
    "dynamic",
    "capped:max_batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "fixed:batch_size=3",
    "fixed:batch_size=4,max_wait=1",
    "continuous:max_batch_size=8",
    "continuous:max_batch_size=32",
)
LENGTHS = (
    "geometric:mean=40",
    "uniform:low=1,high=120",
    "lognormal:mu=3.4,sigma=0.9",
    "deterministic:value=50",
)
LAWS = (
    "k1=0,k2=0,k3=0,k4=0.02",
    "k1=0.003,k2=0.01,k3=0.0003,k4=0.012",
    "k1=0.002,k2=0.005,k3=0.0002,k4=0.01,cv=0.3",
)
TARGETS = ("arrival-rate", "servers", "max-output-tokens", "batch-size", "policy")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99.9")
DURATIONS = ("queueing_delay", "sojourn_time", "time_to_first_token", "service_time")
LIMIT, ERRORS, REQUESTS, BATCHES = 400, 3.0, 200_000, 20
NONE_KEEPS = 3  # exit status


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of both commands, and those of the search."""

    queue: dict[str, str]
    target: str
    slo: str
    policy: str
    rate: float | None
    largest: int | None

    def optimize(self) -> list[str]:
        """Its arguments."""
        given = self.queue | {"target": self.target, "slo": self.slo, "policy": self.policy}
        given |= {} if self.rate is None else {"arrival-rate": repr(self.rate)}
        given |= {} if self.largest is None else {"largest": str(self.largest)}
        return [*_flags(given), "--json"]

    def predicted(self, best: dict[str, Any]) -> dict[str, str]:
        """The arguments of `predict` at the best setting."""
        given = self.queue | {"slo": self.slo, "policy": self.policy}
        given["arrival-rate"] = repr(best.get("arrival_rate", self.rate))
        match self.target:
            case "servers":
                given["servers"] = str(best["servers"])
            case "max-output-tokens":
                given["max-output-tokens"] = str(best["max_output_tokens"])
            case "batch-size":
                sized = with_size(parse_policy(self.policy), int(best["batch_size"]))
                given["policy"] = format_policy(sized)
            case "policy":
                given["policy"] = best["policy"]
        return given


def _flags(given: dict[str, str]) -> list[str]:
    """A flag without a value has none."""
    return [part for name, value in given.items() for part in (f"--{name}", value) if part]


def cases(seed: int, count: int, *, stations: bool = False) -> Iterator[Case]:
    """So many that make sense; with `stations`, of prefill and decode on servers of their own."""
    rng = np.random.default_rng(seed)
    while count:
        case = _case(rng, stations=stations)
        if case is not None:
            count -= 1
            yield case


def _case(rng: np.random.Generator, *, stations: bool) -> Case | None:
    """None where target and policy do not fit, or nothing would be stable."""

    def one_of(values: tuple[Any, ...]) -> Any:
        return values[int(rng.integers(len(values)))]

    policy, target, servers = one_of(POLICIES), one_of(TARGETS), int(rng.integers(1, 5))
    queue = {
        "latency": one_of(LAWS),
        "output-tokens": one_of(LENGTHS),
        "max-output-tokens": str(LIMIT),
        "servers": str(servers),
        "routing": one_of(ROUTINGS),
    }
    if stations:
        queue |= {
            "routing": "central",
            "latency": f"{queue['latency']},kp=0.0002",
            "disaggregated": "",
            "prefill-servers": str(rng.integers(1, 4)),
            "prompt-tokens": one_of(LENGTHS),
            "kv-transfer": one_of(("0s", "20ms", "setup=2ms,token=50us")),
        }
    load = float(rng.uniform(0.2, 0.85))
    texts = [f"{one_of(STATISTICS)}_{one_of(DURATIONS)}" for _ in range(int(rng.integers(1, 3)))]
    spare = [float(rng.uniform(1.02, 3.0)) for _ in texts]
    if target == "batch-size" and ("single" in policy or policy == "dynamic"):
        return None
    try:
        model = _model(queue, policy)
        rate = load * model.largest_stable_rate
        if not math.isfinite(rate):
            return None
        slo = ",".join(
            f"{text}={seconds!r}s" for text, seconds in _bounds(model, rate, texts, spare).items()
        )
    except SpecError:
        return None
    return Case(
        queue=queue,
        target=target,
        slo=slo,
        policy=policy,
        rate=None if target == "arrival-rate" else rate,
        largest={"batch-size": 12, "servers": 16}.get(target),
    )


def _model(queue: dict[str, str], policy: str) -> Queue:
    return Queue.read(
        policy,
        queue["output-tokens"],
        queue["latency"],
        max_output_tokens=int(queue["max-output-tokens"]),
        servers=int(queue["servers"]),
        routing=queue["routing"],
        disaggregated="disaggregated" in queue,
        prefill_servers=int(queue.get("prefill-servers", 1)),
        prompt_tokens=queue.get("prompt-tokens"),
        kv_transfer=queue.get("kv-transfer"),
    )


def _bounds(model: Queue, rate: float, texts: list[str], spare: list[float]) -> dict[str, float]:
    """Near what holds there, so that the SLO binds."""
    run = simulate_run(model, rate, 20_000, np.random.SeedSequence(5)).after(2000)
    found = {}
    for text, times in zip(texts, spare, strict=True):
        slo = parse_slo(f"{text}=1")
        values = _values(run, slo)
        value = values.mean() if slo.level is None else np.quantile(values, slo.level)
        found[text] = max(times * float(value), 1e-3)
    return found


def _values(run: Any, slo: Slo) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One a request."""
    durations = {
        "queueing_delay": run.queueing_delay,
        "sojourn_time": run.sojourn_time,
        "time_to_first_token": run.first_token_at - run.arrived_at,
        "service_time": run.server_free_at - run.dispatched_at,
    }
    return np.asarray(durations[slo.field])


def misses(case: Case) -> list[str] | None:
    """What differs; None where nothing keeps the SLO."""
    best = _answer(optimizing, case.optimize())
    if best is None:
        return None
    given = case.predicted(best["best"])
    there = _answer(predicting, ["predict", *_flags(given), "--json"])
    if there is None:
        return [f"no prediction for {given}"]
    found = []
    for text, judged in zip(case.slo.split(","), there["slos"], strict=True):
        slo = parse_slo(text)
        said, predicted = best["best"][slo.name], judged["value"]
        if said is None or predicted is None:
            found.append(f"{slo.name}: optimize says {said}, predict {predicted}")
            continue
        error = 0.0 if said == predicted else _error(given, slo)
        if abs(said - predicted) > ERRORS * error + 1e-9 * predicted:
            found.append(
                f"{slo.name}: optimize says {said:.5g}, predict {predicted:.5g} +- {error:.2g}"
            )
        if said > slo.seconds:
            found.append(f"{slo.name}: optimize says {said:.5g}, more than {slo.seconds:.5g}")
    return found


def _error(given: dict[str, str], slo: Slo) -> float:
    """Standard error of such a simulated value, of two runs."""
    model, rate = _model(given, given["policy"]), float(given["arrival-rate"])
    run = simulate_run(model, rate, REQUESTS, np.random.SeedSequence(9)).after(REQUESTS // 10)
    parts = np.array_split(_values(run, slo), BATCHES)
    values = [part.mean() if slo.level is None else np.quantile(part, slo.level) for part in parts]
    return float(np.std(values, ddof=1)) / math.sqrt(BATCHES) * math.sqrt(2)


def _answer(app: Any, arguments: list[str]) -> Any:
    """The JSON; None where nothing keeps the SLO."""
    found = CliRunner().invoke(app, arguments)
    if found.exit_code == NONE_KEEPS:
        return None
    if found.exit_code != 0:
        raise RuntimeError(f"{found.exception!r}{found.output}")
    return json.loads(found.stdout)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    missed = without = 0
    for number, case in enumerate(cases(asked.seed, asked.count), start=1):
        try:
            found = misses(case)
        except RuntimeError as error:
            found = [str(error)]
        without += found is None
        missed += bool(found)
        for miss in found or ():
            print(f"case {number}: {miss}\n  {' '.join(case.optimize())}", flush=True)  # noqa: T201
    print(  # noqa: T201
        f"{asked.count} queues: {asked.count - missed - without} as predicted, {without} without a "
        f"choice that keeps the SLO, {missed} missed"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
