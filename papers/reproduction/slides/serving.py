"""KV memory and calls to tools: the slides' claims on LLM serving, checked in simulation. The
slides draw measurements of real systems; the engine, lengths and calls here are ours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.kv_memory import parse_tool_calls
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.simulation.memory_kernels import Work
from papers.reproduction.artefact import Artefact, Curve, Panel, Say, Statement
from papers.reproduction.simulate import SEED, Simulated, points
from papers.scenarios.memory import (
    HANDLINGS,
    UNBOUNDED,
    MemoryEngine,
    MemoryMeans,
    MemoryWork,
    Ranking,
    memory_time,
    run_memory,
    simulate_memory,
)
from papers.scenarios.runs import Measured, Replications

LAW = LatencyModel(k3=2e-4, k4=2e-2, kp=2e-4)
RUNS = Replications(20_000, 16, SEED)
PLAIN = MemoryWork(
    arrival_rate=10.0,
    prompt_tokens=parse_distribution("geometric:mean=100", 1000),
    output_tokens=parse_distribution("lognormal:mu=3.6,sigma=1", 500),
    predictor=PredictorText("lognormal", 0.5),
)
ENGINE = MemoryEngine(law=LAW, slots=24, memory=4000)
ASSUMED = (
    "steps of 20 ms + 0.2 ms for each in service, 0.2 ms a prompt token computed",
    "prompts geometric of mean 100, outputs lognormal (3.6, 1) cut at 500 tokens, predicted times "
    "exp(0.5 Z)",
)
CALLING = dataclasses.replace(PLAIN, calls=parse_tool_calls("share=0.7,mean=100ms/10s,sigma=0.5"))
CALL_ENGINE = dataclasses.replace(ENGINE, slots=32, swap_setup=0.01, swap_token=2e-5)
SYSTEMS = {  # handling, order
    "vLLM: discard, first come": ("discard", "fcfs"),
    "INFERCEPT: least waste, first come": ("least-waste", "fcfs"),
    "least waste, shortest": ("least-waste", "shortest"),
    "least waste, size + call": ("least-waste", "with-call"),
    "MARS: least waste, memory-time": ("least-waste", "memory-time"),
}


def clear(*values: Measured) -> bool:
    """Whether each is less than the next by more than three standard errors of both."""
    return all(
        b.mean - a.mean > 3 * (a.standard_error**2 + b.standard_error**2) ** 0.5
        for a, b in itertools.pairwise(values)
    )


def line(label: str, x: Sequence[float], found: Iterable[Measured]) -> Curve:
    """Simulated means as a curve."""
    return points(label, x, [Simulated(each.mean, each.standard_error) for each in found])


def shown(values: Iterable[Measured]) -> str:
    """Means, of three digits."""
    return ", ".join(f"{each.mean:.3g}" for each in values)


# KV memory

ORDERS = {  # order, whether interrupted requests keep their memory
    "first come": ("fcfs", False),
    "shortest predicted": ("shortest", False),
    "memory-time": ("memory-time", False),
    "SPRPT, computed again": ("remaining", False),
    "SPRPT, memory kept": ("remaining", True),
}
NOT_INTERRUPTED = ("shortest predicted", "memory-time", "first come")
RATES = (6.0, 8.0, 9.0, 10.0)
MEMORIES = (3500, 4000, 4500, 5000, 6000, 8000)
SHARES = (0.1, 0.2, 0.5, 0.8, 1.0)


def memory(say: Say) -> Artefact:
    """Bounded KV memory: by load, by memory, and by how late a request may be interrupted."""
    by_rate: dict[str, list[Measured]] = {name: [] for name in ORDERS}
    by_memory: dict[str, list[Measured]] = {name: [] for name in ORDERS}
    for name, (order, keep) in ORDERS.items():
        for rate in RATES:
            say(f"{name}, {rate:g} requests/s")
            work = dataclasses.replace(PLAIN, arrival_rate=rate)
            by_rate[name].append(_sojourn(work, order, ENGINE.memory, keep))
        for tokens in MEMORIES:
            say(f"{name}, memory of {tokens} tokens")
            by_memory[name].append(_sojourn(PLAIN, order, tokens, keep))
    say("no bound")
    free = _sojourn(PLAIN, "fcfs", UNBOUNDED)
    limited = [_limited(say, share) for share in SHARES]
    panels = (
        _panel("Memory of 4,000 tokens", "E[T] (s)", RATES, by_rate),
        _panel("10 requests/s", "E[T] (s)", MEMORIES, by_memory, "memory (tokens)"),
        Panel(
            "TRAIL, memory of 8,000 tokens",
            "c: not interrupted from c x prediction on",
            "E[T] (s)",
            (line("computed again", SHARES, limited),),
        ),
    )
    return Artefact(
        "slides-memory",
        "KV memory: shortest first, preemption, memory-time",
        _memory_statements(by_memory, free, limited),
        panels,
        assumed=(*ASSUMED, "24 slots"),
        remarks=(
            "Interrupted requests lose their memory and compute prompt and tokens again, or keep "
            "it until others need it. A full memory takes that of the last in the order.",
            f"{RUNS.count} replications of {RUNS.jobs:,} requests a point, the same arrivals and "
            "lengths for every order.",
        ),
    )


def _sojourn(work: MemoryWork, order: str, tokens: int, keep: bool = False) -> Measured:
    machine = dataclasses.replace(ENGINE, memory=tokens, keep=keep)
    return simulate_memory(work, order, machine, RUNS).sojourn


def _limited(say: Say, share: float) -> Measured:
    say(f"TRAIL, c = {share:g}")
    machine = dataclasses.replace(ENGINE, memory=8000)
    return simulate_memory(PLAIN, "trail", machine, RUNS, c=share).sojourn


def _panel(
    title: str,
    label: str,
    x: Sequence[float],
    found: dict[str, list[Measured]],
    x_label: str = "requests/s",
) -> Panel:
    curves = tuple(line(name, x, values) for name, values in found.items())
    return Panel(title, x_label, label, curves, "y")


def _memory_statements(
    by_memory: dict[str, list[Measured]], free: Measured, limited: list[Measured]
) -> tuple[Statement, ...]:
    at = {
        tokens: {name: row[k] for name, row in by_memory.items()}
        for k, tokens in enumerate(MEMORIES)
    }
    bound, ample = at[4000], at[8000]
    kept, again = ample["SPRPT, memory kept"], ample["SPRPT, computed again"]
    return (
        Statement(
            "'storing KV cache for many requests becomes a bottleneck' (E[T] first come, 4,000 "
            "tokens / no bound)",
            "in words",
            f"{bound['first come'].mean / free.mean:.2f}",
            holds=clear(free, bound["first come"]),
        ),
        Statement(
            "'pausing a request is costly because KV memory must be preserved, swapped or "
            "recomputed' (E[T] under SPRPT, 8,000 tokens: kept, recomputed; s)",
            "in words",
            shown((kept, again)),
            holds=clear(kept, again),
        ),
        Statement(
            "'preempting late-stage requests is wasteful' (E[T], c = "
            f"{', '.join(f'{share:g}' for share in SHARES)}; s)",
            "in words",
            shown(limited),
            "not interrupting at all (shortest first) is better still: "
            f"{ample['shortest predicted'].mean:.3g} s",
            holds=clear(limited[0], limited[2]) and limited[2].mean <= limited[-1].mean,
        ),
        Statement(
            f"E[T] at 4,000 tokens: {', '.join(NOT_INTERRUPTED)} (s)",
            "",
            shown(bound[name] for name in NOT_INTERRUPTED),
        ),
    )


# calls to tools

CALL_RATES = (5.0, 6.0, 7.0, 8.0, 9.0)
EXAMPLE = Work(  # R1, R2, R3 of the slides
    np.zeros(3), np.zeros(3, dtype=np.int64), np.array([6, 2, 3]), np.array([5, 1, 2]),
    np.array([2.0, 7.0, 1.0]), np.array([2.0, 7.0, 1.0]),
    np.array([HANDLINGS[name] for name in ("preserve", "discard", "swap")]),
)  # fmt: skip
TRADITIONAL = {  # of the example, by number of the request
    "first come": (0, 1, 2),
    "shortest first": (1, 2, 0),
    "shortest (size + API) first": (2, 0, 1),
}


def calls(say: Say) -> Artefact:
    """Preserve, discard, swap, or what wastes least; and orders by predicted memory over time."""
    wasted = {
        kind: {handling: _handled(say, kind, handling) for handling in HANDLINGS}
        for kind in ("short", "long", "both")
    }
    found = {name: [_system(say, name, rate) for rate in CALL_RATES] for name in SYSTEMS}
    panels = tuple(
        _panel(
            "Calls of 0.1 s and 10 s",
            label,
            CALL_RATES,
            {name: [getattr(each, field) for each in rows] for name, rows in found.items()},
        )
        for label, field in (
            ("E[T] (s), calls included", "sojourn"),
            ("E[TTFT] (s)", "first_token"),
        )
    )
    return Artefact(
        "slides-calls",
        "Calls to tools: preserve, discard, swap; MARS",
        (*_example_statements(), *_waste_statements(wasted), *_system_statements(found)),
        panels,
        assumed=(
            *ASSUMED,
            "70 % of the requests call once, at a uniform token: half of the calls 0.1 s, half 10 "
            "s, exponential, predicted times exp(0.5 Z); 32 slots, memory of 4,000 tokens, a swap "
            "10 ms + 0.02 ms a token each way",
            "the slides' example: one request in service at a time, a token a second, memory of 6 "
            "tokens, recomputation and swaps take no time",
        ),
        remarks=(
            "Waste: token-seconds of memory held by nobody in service, or while all in service "
            "wait for a recomputation or a swap, per request.",
        ),
    )


def _handled(say: Say, kind: str, handling: str) -> MemoryMeans:
    say(f"{kind} calls, {handling}")
    kinds = {"short": ((1.0, 0.1),), "long": ((1.0, 10.0),), "both": CALLING.calls.kinds}[kind]
    called = dataclasses.replace(CALLING.calls, kinds=kinds)
    work = dataclasses.replace(CALLING, arrival_rate=6.0, calls=called, handling=handling)
    return simulate_memory(work, "fcfs", dataclasses.replace(CALL_ENGINE, memory=UNBOUNDED), RUNS)


def _system(say: Say, name: str, rate: float) -> MemoryMeans:
    say(f"{name}, {rate:g} requests/s")
    handling, order = SYSTEMS[name]
    work = dataclasses.replace(CALLING, arrival_rate=rate, handling=handling)
    return simulate_memory(work, order, CALL_ENGINE, RUNS)


def _example_statements() -> tuple[Statement, ...]:
    machine = MemoryEngine(law=LatencyModel(k4=1.0), slots=1, memory=6)

    def mean(first_to_last: Sequence[int]) -> float:
        rank = np.empty(3)
        rank[list(first_to_last)] = np.arange(3.0)
        path, _ = run_memory(EXAMPLE, Ranking(rank, 0.0, np.zeros(3)), machine.compiled())
        return float(path.ended_at.mean())

    means = {order: mean(order) for order in itertools.permutations(range(3))}
    best = min(means, key=lambda order: means[order])
    plain = EXAMPLE._replace(call_after=np.zeros(3, dtype=np.int64), predicted_call=np.zeros(3))
    lengths = EXAMPLE.output.astype(float)
    alike = np.array_equal(np.argsort(memory_time(plain, lengths, machine)), np.argsort(lengths))
    by_area = tuple(np.argsort(memory_time(EXAMPLE, lengths, machine)).tolist())
    return (
        Statement(
            "'traditional scheduling doesn't work with API' (mean completion: "
            f"{', '.join(TRADITIONAL)})",
            "in words",
            ", ".join(f"{means[order]:.4g}" for order in TRADITIONAL.values()),
            f"the best order is {', '.join(f'R{each + 1}' for each in best)}: {means[best]:.4g} s; "
            f"by memory over time {means[by_area]:.4g} s",
            holds=min(means[order] for order in TRADITIONAL.values()) > means[best],
        ),
        Statement(
            "'without API calls, this is the same as ranking according to request length' "
            "(memory over time, equal prompts)",
            "in words",
            "the same" if alike else "another order",
            holds=bool(alike),
        ),
    )


def _waste_statements(wasted: dict[str, dict[str, MemoryMeans]]) -> tuple[Statement, ...]:
    totals = {
        kind: {name: each.idle_waste.mean + each.stall_waste.mean for name, each in row.items()}
        for kind, row in wasted.items()
    }
    fixed = [name for name in HANDLINGS if name != "least-waste"]
    best = {kind: min(fixed, key=row.__getitem__) for kind, row in totals.items()}
    both = totals["both"]
    return (
        Statement(
            "'no one strategy for all API calls' (least waste for calls of 0.1 s, of 10 s)",
            "in words",
            f"{best['short']}, {best['long']}",
            holds=best["short"] != best["long"],
        ),
        Statement(
            "'for each request, we pick the strategy with the minimal memory waste' (waste: "
            f"{', '.join(HANDLINGS)})",
            "in words",
            ", ".join(f"{both[name]:.3g}" for name in HANDLINGS),
            holds=both["least-waste"] < min(both[name] for name in fixed),
        ),
    )


def _system_statements(found: dict[str, list[MemoryMeans]]) -> tuple[Statement, ...]:
    names = ("MARS: least waste, memory-time", "INFERCEPT: least waste, first come",
             "vLLM: discard, first come")  # fmt: skip
    rows = [found[name][-1] for name in names]
    sojourns, firsts = [row.sojourn for row in rows], [row.first_token for row in rows]
    called = found["least waste, size + call"][-1].sojourn
    return (
        Statement(
            "'MARS achieves lower latency' (E[T] at 9 requests/s: MARS, INFERCEPT, vLLM; s)",
            "in words",
            shown(sojourns),
            f"shortest first by size + call: {called.mean:.3g} s",
            holds=clear(sojourns[0], sojourns[-1]) and sojourns[0].mean < sojourns[1].mean,
        ),
        Statement(
            "'and faster time to first token' (the same; s)",
            "in words",
            shown(firsts),
            holds=clear(*firsts),
        ),
    )
