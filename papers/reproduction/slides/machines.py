"""Prefill and decode on several GPUs, and several models on one: the slides' claims, checked in
simulation. GPUs, lengths and loading times are ours; the slides give none.
"""

from __future__ import annotations

import dataclasses

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from papers.reproduction.artefact import Artefact, Panel, Say, Statement
from papers.reproduction.simulate import SEED
from papers.reproduction.slides.serving import clear, line, shown
from papers.scenarios.phases import PhaseWork, queue_of_phases, simulate_queue
from papers.scenarios.runs import Measured, Replications
from papers.scenarios.several_models import simulate_models

RUNS = Replications(50_000, 16, SEED)

# prefill and decode

LOADS = (0.3, 0.5, 0.7, 0.8)
LAW = LatencyModel(kp=1e-3, k4=1e-2)
MIXED = PhaseWork(
    arrival_rate=1.0,
    kinds=(
        (1.0, parse_distribution("geometric:mean=500"), parse_distribution("geometric:mean=50")),
    ),
    law=LAW,
)
ALIKE = dataclasses.replace(  # both take a second
    MIXED,
    kinds=tuple(
        (0.5, parse_distribution(f"deterministic:value={prompt}"),
         parse_distribution(f"deterministic:value={output}"))
        for prompt, output in ((200, 80), (800, 20))
    ),
)  # fmt: skip
DEDICATED = {
    "dedicated, first come": "single",
    "dedicated, shortest phase": "single:order=spjf,by=service",
}
POOLED = {
    "pooled, first come": "single",
    "pooled, prefill first": "single:order=prefill-first",
    "pooled, shortest phase": "single:order=spjf,by=service",
    "pooled, shortest left": f"single:order=spjf,by=service,prompt_weight={LAW.kp / LAW.k4:g}",
}
LAYOUTS = (*DEDICATED, *POOLED)


def phases(say: Say) -> Artefact:
    """Dedicated and pooled GPUs, orders by phase."""
    found: dict[str, list[tuple[Measured, Measured]]] = {name: [] for name in LAYOUTS}
    for name in LAYOUTS:
        for load in LOADS:
            say(f"{name}, load {load:g}")
            found[name].append(_phases(_at(MIXED, load), name))
    say("equal totals")
    alike = {name: _phases(_at(ALIKE, 0.8), name) for name in LAYOUTS}
    say("one GPU of twice the speed")
    fast = dataclasses.replace(_at(MIXED, 0.8), law=LAW.at_speed(0.5))
    queue = queue_of_phases(fast, "single", 1)
    single = simulate_queue(fast, queue, RUNS)[0]
    panels = tuple(
        Panel(
            "Two GPUs, half a second each for prefill and decode",
            "load",
            label,
            tuple(line(name, LOADS, [row[part] for row in rows]) for name, rows in found.items()),
            "y",
        )
        for part, label in ((0, "E[T] (s)"), (1, "E[time to the end of the prefill] (s)"))
    )
    return Artefact(
        "slides-phases",
        "Prefill and decode: dedicated or pooled GPUs",
        _phase_statements(found, alike, single),
        panels,
        assumed=(
            "two GPUs, each serves one phase of one request at a time; 1 ms a prompt token, 10 ms "
            "an output token; 500 and 50 tokens, geometric; nothing is paid for moving a KV cache",
            "equal totals: 200 + 80 or 800 + 20 tokens, half of the requests each",
        ),
        remarks=(
            "Decodes of several requests share no step here, which is what makes a dedicated "
            "decode GPU worth while.",
        ),
    )


def _phases(work: PhaseWork, layout: str) -> tuple[Measured, Measured]:
    if layout in POOLED:
        return simulate_queue(work, queue_of_phases(work, POOLED[layout], 2), RUNS)
    return simulate_queue(work, queue_of_phases(work, DEDICATED[layout], 1, 1), RUNS)


def _at(work: PhaseWork, load: float) -> PhaseWork:
    return dataclasses.replace(work, arrival_rate=2 * load / sum(work.seconds))


def _phase_statements(
    found: dict[str, list[tuple[Measured, Measured]]],
    alike: dict[str, tuple[Measured, Measured]],
    single: Measured,
) -> tuple[Statement, ...]:
    dedicated, pooled = (found[f"{name}, first come"][-1][0] for name in ("dedicated", "pooled"))
    first = found["pooled, prefill first"][-1]
    gains = {
        name: alike[f"{name}, first come"][0].mean / alike[f"{name}, shortest phase"][0].mean
        for name in ("dedicated", "pooled")
    }
    return (
        Statement(
            "pooled: 'improves flexibility and utilization' (E[T] at load 0.8: pooled, dedicated; "
            "s)",
            "in words",
            shown((pooled, dedicated)),
            holds=clear(pooled, dedicated),
        ),
        Statement(
            "two requests of the same total, 'the better request may depend on hardware' (E[T] "
            "first come / shortest phase first: dedicated, pooled)",
            "in words",
            f"{gains['dedicated']:.3f}, {gains['pooled']:.3f}",
            "short prefills first help dedicated GPUs and harm pooled ones",
            holds=gains["dedicated"] > 1.02 and gains["pooled"] < 0.98,
        ),
        Statement(
            "prefill first: E[time to its end] and E[T] at load 0.8, pooled (s)",
            "",
            f"{shown((first[1], first[0]))}; first come "
            f"{shown((found['pooled, first come'][-1][1], pooled))}",
        ),
        Statement(
            "'can a group of lower-capacity GPUs match a single high-end GPU?' (E[T] first come: "
            "two, one of twice the speed; s)",
            "",
            shown((pooled, single)),
        ),
    )


# several models

SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4)  # to load a model
THRESHOLD = 30  # tokens, up to which the small model is chosen
OUTPUTS = parse_distribution("lognormal:mu=3,sigma=1", 400)
LARGE, SMALL = "a=0.02,c=0.1", "a=0.005,c=0.05"
POLICIES = {
    "fcfs": "single",
    "exhaustive": "single",
    "shortest": "single:order=spjf,by=service",
}


def models(say: Say) -> Artefact:
    """A small and a large model on one machine, chosen by predicted length."""
    large = {order: _models(say, order, 0.0, 0) for order in ("fcfs", "shortest")}
    found = {
        order: [_models(say, order, seconds, THRESHOLD) for seconds in SECONDS]
        for order in POLICIES
    }
    panels = (
        Panel(
            "1 request/s",
            "seconds to load a model",
            "E[T] (s)",
            (
                *(line(f"by length, {order}", SECONDS, rows) for order, rows in found.items()),
                *(
                    line(f"always large, {order}", (0.0, SECONDS[-1]), [each] * 2)
                    for order, each in large.items()
                ),
            ),
        ),
    )
    return Artefact(
        "slides-models",
        "Several models on one machine",
        _model_statements(large, found),
        panels,
        assumed=(
            "lognormal (3, 1) outputs cut at 400 tokens, predicted times exp(0.5 Z); small model "
            f"0.05 s + 5 ms a token, up to {THRESHOLD} predicted tokens, large one 0.1 s + 20 ms",
            "one model is loaded at a time; answers of the small model are good enough",
        ),
    )


def _models(say: Say, order: str, seconds: float, threshold: float) -> Measured:
    say(f"{order}, {seconds:g} s to load, up to {threshold:g} tokens")
    first = "loaded" if order == "exhaustive" else "arrival"
    small = f"threshold={threshold:g},switch={seconds:g},first={first},latency={SMALL}"
    queue = Queue.read(
        POLICIES[order],
        OUTPUTS,
        LARGE,
        predictor="lognormal:sigma=0.5",
        second_model=small if threshold else None,
    )
    return simulate_models(queue, 1.0, RUNS)


def _model_statements(
    large: dict[str, Measured], found: dict[str, list[Measured]]
) -> tuple[Statement, ...]:
    paid = [
        seconds
        for seconds, each in zip(SECONDS, found["shortest"], strict=True)
        if clear(each, large["shortest"])
    ]
    last = {order: rows[-1] for order, rows in found.items()}
    return (
        Statement(
            "'always using large models leads to unnecessary latency' (E[T], first come: chosen by "
            "length, always large; s)",
            "in words",
            shown((found["fcfs"][0], large["fcfs"])),
            "models in memory at once: nothing to load",
            holds=clear(found["fcfs"][0], large["fcfs"]),
        ),
        Statement(
            "choosing by length pays, shortest first, while loading a model takes at most (s)",
            "",
            f"{max(paid):g}" if paid else "never",
        ),
        Statement(
            f"E[T] with {SECONDS[-1]:g} s to load: first come, all of one model first, shortest "
            "first with the loading counted (s)",
            "",
            shown(last.values()),
        ),
    )
