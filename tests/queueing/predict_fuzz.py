"""`kendall predict` on random arguments, sensible ones and absurd ones: `python -m
tests.queueing.predict_fuzz --count 2000 --seed 1`.

Each case runs in a process of its own, forked from one that has imported everything, which may use
10 s of CPU time and 1 GB of memory. Right is one answer (a JSON object, or now and then a table,
without a number below zero or not finite, nothing on stderr but the warning of a law that takes a
second per token) or one line that says what was wrong, with exit status 1 or 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import shlex
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CPU_SECONDS, MEGABYTES = 10, 1000
# megabytes of a process that has imported everything; one that is forked here has also what the
# tests before have left
FRESH = 200
POLICIES = ("single", "dynamic", "capped", "elastic", "fixed", "continuous")
METHODS = ("exact", "approximation", "bound", "paper", "simulation")
SWITCHES = ("--disaggregated", "--pad-prompts")
ORDERS = ("fcfs", "fcfs", "sjf", "none")


def arguments(rng: np.random.Generator) -> list[str]:
    """One command line after `predict`."""
    tokens = _lengths(rng)
    given = {"--policy": _policy(rng), "--output-tokens": tokens, "--latency": _law(rng)}
    given["--arrival-rate"] = _number(rng, 1e-3, 1e3)
    optional = {
        "--max-output-tokens": lambda: str(_pick(rng, (1, 2, 64, 1000, 4096, 32768, 200_000))),
        "--max-num-seqs": lambda: str(_pick(rng, (1, 4, 64, 512, 4096, 100_000))),
        "--prompt-tokens": lambda: _lengths(rng),
        "--patience": lambda: _number(rng, 1e-3, 1e3),
        "--servers": lambda: str(_pick(rng, (1, 2, 8, 64, 1000, 100_000))),
        "--method": lambda: _pick(rng, METHODS),
        "--sequences": lambda: _sequences(rng),
        "--arrival-scv": lambda: (
            str(_pick(rng, (0, 0.25, 0.5, 1, 1.5, 4, 20)))
            if rng.random() < 0.8
            else _number(rng, 1e-3, 1e3)
        ),
    }
    given |= {flag: make() for flag, make in optional.items() if rng.random() < 0.17}
    if rng.random() < 0.08:  # these exclude much of the rest, which most of the draws would show
        given = {
            flag: value
            for flag, value in given.items()
            if flag not in ("--servers", "--patience", "--sequences")
        }
        given |= {"--policy": "single", "--disaggregated": ""}
    if rng.random() < (0.5 if "--prompt-tokens" in given else 0.02):
        given["--pad-prompts"] = ""
    parts = [
        "--json",
        *(
            f"{flag}={value}" if value or flag not in SWITCHES else flag
            for flag, value in given.items()
        ),
    ]
    return [parts[place] for place in rng.permutation(len(parts))]


def at_load(rng: np.random.Generator, line: list[str]) -> list[str]:
    """The same with an arrival rate of a load that has a steady state, where there is one."""
    from kendall.policies.text import SpecError
    from kendall.queueing.errors import PredictionError
    from kendall.queueing.queue import Queue

    given = dict(part.removeprefix("--").split("=", 1) for part in line if "=" in part)
    limits: dict[str, Any] = {
        name.replace("-", "_"): int(given[name])
        for name in ("max-output-tokens", "max-num-seqs", "servers")
        if name in given
    }
    limits |= {name.removeprefix("--").replace("-", "_"): True for name in SWITCHES if name in line}
    limits |= {
        name.replace("-", "_"): given[name]
        for name in ("prompt-tokens", "sequences")
        if name in given
    }
    load = _pick(rng, (0.05, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.3))
    try:
        model = Queue.read(given["policy"], given["output-tokens"], given["latency"], **limits)
        rate = load * model.largest_stable_rate
    except (SpecError, PredictionError):
        return line
    return [
        f"--arrival-rate={rate!r}" if part.startswith("--arrival-rate") else part for part in line
    ]


def _policy(rng: np.random.Generator) -> str:
    name = _pick(rng, POLICIES)
    size = (
        _pick(rng, (1, 2, 3, 8, 16, 64, 200, 512, 2048, 8192, 100_000))
        if rng.random() < 0.95
        else _pick(rng, (0, -1, "x", 1.5, "inf"))
    )
    keys = [f"order={_pick(rng, ORDERS)}"] if rng.random() < 0.1 else []
    if name == "fixed":
        keys += [
            f"batch_size={size}",
            *([f"max_wait={_number(rng, 1e-3, 10)}"] if rng.random() < 0.3 else []),
        ]
    elif name not in ("single", "dynamic") and rng.random() > 0.15:
        keys.append(f"max_batch_size={size}")
    return f"{name}:{','.join(keys)}" if keys else name


def _sequences(rng: np.random.Generator) -> str:
    """Of a call: few, now and then as absurd as lengths."""
    if rng.random() < 0.15:
        return _lengths(rng)
    high = _pick(rng, (1, 2, 4, 8, 64, 1000))
    return _pick(
        rng,
        (f"deterministic:value={high}", f"uniform:low=1,high={high + 1}", f"geometric:mean={high}"),
    )


def _lengths(rng: np.random.Generator) -> str:
    def part() -> str:
        name = _pick(
            rng,
            (
                "deterministic",
                "uniform",
                "normal",
                "lognormal",
                "lognormal",
                "exponential",
                "geometric",
                "weibull",
                "pareto",
            ),
        )
        keys: dict[str, Callable[[], str]] = {
            "deterministic": lambda: f"value={_number(rng, 1, 5000)}",
            "uniform": lambda: f"low={_number(rng, 1, 50)},high={_number(rng, 50, 5000)}",
            "normal": lambda: f"mean={_number(rng, 10, 2000)},std={_number(rng, 1, 500)}",
            "lognormal": lambda: (
                f"mu={_pick(rng, (0, 3, 5, 6, 7, 8, 12))},"
                f"sigma={_pick(rng, (0.1, 0.5, 0.7, 1, 1.5, 3))}"
            ),
            "exponential": lambda: f"mean={_number(rng, 1, 5000)}",
            "geometric": lambda: f"mean={_number(rng, 1, 5000)}",
            "weibull": lambda: (
                f"shape={_pick(rng, (0.3, 0.5, 1, 2, 5))},scale={_number(rng, 1, 2000)}"
            ),
            "pareto": lambda: (
                f"alpha={_pick(rng, (0.5, 1, 1.2, 1.5, 2, 2.1, 2.5, 3, 5))},"
                f"minimum={_number(rng, 1, 100)}"
            ),
        }
        return f"{name}:{keys[name]()}"

    if rng.random() < 0.08:
        first = round(rng.uniform(0.05, 0.95), 3)
        return (
            f"mixture:weights={first}+{1 - first},"
            f"parts={'+'.join(part().replace(',', ':') for _ in range(2))}"
        )
    return part()


def _law(rng: np.random.Generator) -> str:
    if rng.random() < 0.1:
        return f"a={_number(rng, 1e-5, 0.1)},c={_number(rng, 1e-4, 1)}"
    given = {"k1": _coefficient(rng, 1e-5, 1e-2), "k2": _coefficient(rng, 1e-4, 0.1)}
    given |= {"k3": _coefficient(rng, 1e-6, 1e-3), "k4": _coefficient(rng, 1e-5, 3e-2)}
    optional = {
        "kp": lambda: _coefficient(rng, 1e-7, 1e-3),
        "cv": lambda: _number(rng, 1e-3, 2),
        "turnaround": lambda: _number(rng, 1e-4, 0.1),
        "speed": lambda: _number(rng, 0.3, 3),
    }
    given |= {name: make() for name, make in optional.items() if rng.random() < 0.3}
    if rng.random() < 0.2:
        given |= {"stall_share": _number(rng, 1e-3, 0.5), "stall": _number(rng, 1e-2, 10)}
        if rng.random() < 0.05:
            given.pop(_pick(rng, ("stall", "stall_share")))
    return ",".join(f"{name}={value}" for name, value in given.items())


def _coefficient(rng: np.random.Generator, low: float, high: float) -> str:
    draw = rng.random()
    if draw < 0.2:
        return "0"
    value = _number(rng, low, high)
    return value if draw < 0.92 or value.startswith("-") else f"-{value}"


def _pick(rng: np.random.Generator, options: tuple[Any, ...]) -> Any:
    return options[int(rng.integers(len(options)))]


def _number(rng: np.random.Generator, low: float, high: float) -> str:
    """Log-uniform, now and then nonsense or absurdly large or small."""
    if rng.random() < 0.03:
        return _pick(
            rng,
            ("0", "-1", "nan", "inf", "-inf", "1e300", "1e-300", "1e15", "1e-9", "abc", "", "1e6"),
        )
    return f"{low * (high / low) ** rng.random():.4g}"


def cases(count: int, seed: int) -> Iterator[list[str]]:
    """Command lines; half of them at a load that was chosen."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        line = arguments(rng)
        line = at_load(rng, line) if rng.random() < 0.6 else line
        yield line if rng.random() < 0.9 else [part for part in line if part != "--json"]


def fault_of(line: list[str]) -> str | None:
    """What is wrong with what `kendall predict` did, or None."""
    with tempfile.TemporaryDirectory() as folder:
        child = multiprocessing.get_context("fork").Process(
            target=_predict, args=(line, Path(folder))
        )
        child.start()
        child.join()
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        memory = Path(folder) / "memory"
        peak = float(memory.read_text()) if memory.exists() else 0.0
    if child.exitcode == -signal.SIGXCPU:
        return f"more than {CPU_SECONDS} s"
    if peak > MEGABYTES:
        return f"{peak:.0f} MB"
    return _fault(child.exitcode, stdout, stderr, _documented(line))


def _predict(line: list[str], folder: Path) -> None:
    from kendall.cli import main

    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(number), "w") for number in (1, 2)
    )  # pytest has replaced them
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU,
        (int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1, resource.RLIM_INFINITY),
    )
    warnings.simplefilter("always")
    try:
        main(["predict", *line])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used.ru_maxrss
        (folder / "memory").write_text(str(FRESH + grown / 1024))


def _documented(line: list[str]) -> str | None:
    """The one warning that is no fault: of a law that takes a second per token or longer."""
    from kendall.policies.text import SpecError
    from kendall.queueing.latency.law import parse_law, slow_law

    try:
        sentence = slow_law(
            parse_law(
                next(part for part in line if part.startswith("--latency=")).removeprefix(
                    "--latency="
                )
            )
        )
    except SpecError:
        return None
    return None if sentence is None else f"kendall: warning: {sentence}"


def _fault(status: int | None, stdout: str, stderr: str, documented: str | None) -> str | None:
    lines = [line for line in stderr.splitlines() if line != documented]
    if status == 0:
        if lines:
            return f"on stderr: {lines}"
        return _wrong_number(json.loads(stdout)) if stdout.startswith("{") else _wrong_word(stdout)
    if status not in (1, 2) or stdout or len(lines) != 1:
        return f"status {status}: {stdout[:200]}{stderr[-300:]}"
    return (
        f"not a clear line: {lines}"
        if "KENDALL_DEBUG" in stderr or not lines[0].startswith("kendall: ")
        else None
    )


def _wrong_number(answer: Any, path: str = "") -> str | None:
    if isinstance(answer, dict):
        found = (_wrong_number(value, f"{path}.{name}") for name, value in answer.items())
        return next((fault for fault in found if fault), None)
    if (
        isinstance(answer, float | int)
        and not isinstance(answer, bool)
        and not 0 <= answer < float("inf")
    ):
        return f"{path} = {answer}"
    return None


def _wrong_word(text: str) -> str | None:
    """In the lines of numbers: below the first line, above the assumptions, without the lines
    that go on with one before.
    """
    numbers = [
        line
        for line in text.partition("\nassumes")[0].splitlines()[1:]
        if line.strip() and not line.startswith(" ")
    ]
    found = re.search(r"(?<![\w-])(nan|inf|-\d[\d.]*)(?!\w)", "\n".join(numbers))
    return f"{found[0]} in {numbers}" if found else None if numbers else f"no numbers in {text!r}"


def warm_up() -> None:
    """Import and compile before the first fork; one thread, because a fork keeps only one."""
    from kendall.api import predict

    law = "k1=0.001,k2=0.01,k3=0.0001,k4=0.01,cv=0.1"
    for policy in (
        "single",
        "capped:max_batch_size=4",
        "elastic:max_batch_size=4",
        "continuous:max_batch_size=4",
    ):
        for method in ("auto", "simulation"):
            predict(policy, 0.1, "geometric:mean=20", law, method=method)


def main() -> None:
    """Print each fault and its command line; status 1 where there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    warm_up()
    faults = 0
    for number, line in enumerate(cases(chosen.count, chosen.seed)):
        fault = fault_of(line)
        if fault:
            faults += 1
            sys.stdout.write(f"{number}: {fault}\n    kendall predict {shlex.join(line)}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{chosen.count} command lines, {faults} faults\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
