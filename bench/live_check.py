"""Does the live check hold on a real engine, and do the gains come that were predicted?

    .venv/bin/python bench/live_check.py cells       24 cells: six policies at four loads, 60 s each
    .venv/bin/python bench/live_check.py overload    load 1.3 for 60 s, two policies
    .venv/bin/python bench/live_check.py switches    ten changes of policy, batch size and limit at
                                                     one arrival rate
    .venv/bin/python bench/live_check.py orders      six orders in place of the order of arrival,
                                                     lengths predicted from prompts
    .venv/bin/python bench/live_check.py traces --trace FILE ...    loads 0.5 and 0.8, each for 20
                                                     minutes

Starts a gateway with the tiny model, calibrates it, and sends Poisson load. A cell holds where the
verdict of `/admin/prediction`'s check is not "disagree" and the observed mean lies in its interval
or within 10 % of the model's; it is read 30 s after the switch to the cell, and at its end. A
change holds where the gain that is measured after it lies in the interval of its predicted gain,
that of nine in ten stretches as long as the setting is then in force. The measured gain is
1 - observed mean / the model's mean of the same requests under the setting before, at the ratio of
observed to model that its own check had. One line a cell on standard output, all answers in
runs/live-check/.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.prompt_lengths import rows
from kendall.loadgen.datasets import Dataset, draw_dataset
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.policies import parse_policy
from kendall.queueing.arrivals.timetable import Timetable, draw
from kendall.queueing.arrivals.traces import read_trace
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.gain.same_requests import SameRequests
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.checked import check_run
from kendall.queueing.estimation.outlook import RecentArrivals, forecast_error, outlook
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.window.of_run import window_of_run
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile
from kendall.queueing.measurement.record import read_run
from kendall.queueing.measurement.recursion import Served, served
from kendall.queueing.prediction.steady_state import largest_stable_rate
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantity

PROMPTS, LENGTHS = "deterministic:value=32", "geometric:mean=16"
LIMIT, SLOTS = 96, 16  # output tokens, sequences at once
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
)
CELL_LOADS = (0.3, 0.5, 0.6, 0.75)
OVERLOAD = 1.3
OVERLOADED = ("capped:max_batch_size=8", "continuous:max_batch_size=4")
SWITCH_LOAD = 0.7
SWITCHES = tuple(  # settings in turn, each one knob or several from the one before
    Setting(policy=policy, max_output_tokens=limit)
    for policy, limit in (
        ("capped:max_batch_size=4", LIMIT),
        ("capped:max_batch_size=8", LIMIT),
        ("elastic:max_batch_size=8", LIMIT),
        ("continuous:max_batch_size=8", LIMIT),
        ("continuous:max_batch_size=4", LIMIT),
        ("dynamic", LIMIT),
        ("capped:max_batch_size=4", LIMIT),
        ("capped:max_batch_size=4", 24),
        ("elastic:max_batch_size=4", 24),
        ("capped:max_batch_size=8", 24),
        ("capped:max_batch_size=2", 24),
    )
)
# an order in place of that of arrival, and back; answers as long as smollm2's to the same prompts
PLAIN, ORDER_LOAD, ANSWER = "continuous:max_batch_size=4", 0.8, 256
ORDERS = (
    "spjf",
    "srpt-b",
    "boost,gamma=0.5,token_time=0.0006",
    "trail",
    "spjf,aging=0.01",
    "threshold,threshold=150",
)
ORDERED = tuple(
    Setting(policy=policy, max_output_tokens=ANSWER)
    for order in ORDERS
    for policy in (PLAIN, f"{PLAIN},order={order}")
)
EARLY, SECONDS, BETWEEN = 30.0, 60.0, 6.0
# recorded traffic, the first file under the first policy and so on: seconds, windows, tokens
TRACE_POLICIES = ("dynamic", "continuous:max_batch_size=8", "capped:max_batch_size=8")
TRACE_LOADS = (0.5, 0.8)
WINDOW, WINDOWS, LONGEST, CONTEXT = 300.0, 4, 256, 2_048
HOUR = 3_600.0  # seconds
RUNS = Path(__file__).parents[1] / "runs" / "live-check"
History = tuple[RecentArrivals, SpeedHistory]  # what a gateway knows across epochs


@dataclass
class Trial:
    """A gateway under load, and what its live check said."""

    gateway: GatewayProcess
    law: LatencyModel
    folder: Path
    seed: int = 1
    answers: list[dict[str, Any]] = field(default_factory=list)
    forecasts_held: list[bool] = field(default_factory=list)  # of the next five minutes, each

    def rate(self, policy: str, load: float) -> float:
        """The calls per second that make the load."""
        return load * largest_stable_rate(
            parse_policy(policy),
            parse_distribution(LENGTHS, LIMIT),
            self.law,
            max_num_seqs=SLOTS,
            prompt_tokens=parse_distribution(PROMPTS),
        )

    async def send(self, rate: float, seconds: float) -> None:
        """Poisson arrivals for so long."""
        self.seed += 1
        count = max(20, round(rate * seconds))
        lengths = parse_distribution(PROMPTS), parse_distribution(LENGTHS, LIMIT)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=LIMIT)
        await run_load(target, draw(rate, count, self.seed, *lengths), seed=self.seed)

    async def prediction(self) -> dict[str, Any]:
        """The last assessment's; empty where there is none."""
        assessment = await self.gateway.ask("GET", "/admin/prediction")
        return assessment.get("prediction") or {}

    async def put(self, setting: Setting) -> None:
        """Put another setting in force."""
        body = {"policy": setting.policy, "max_output_tokens": setting.max_output_tokens}
        await self.gateway.ask("PUT", "/admin/policy", body)

    async def cell(self, policy: str, load: float) -> bool:
        """Load one policy for `SECONDS`; True where the check holds at the end."""
        await self.put(Setting(policy=policy, max_output_tokens=LIMIT))
        sending = asyncio.create_task(self.send(self.rate(policy, load), SECONDS))
        await asyncio.sleep(EARLY)
        early = (await self.prediction()).get("check")
        await asyncio.wait([sending], timeout=SECONDS - EARLY)
        await asyncio.sleep(BETWEEN)
        late = (await self.prediction()).get("check")
        # fixed would keep the last batch, which is not full
        await self.put(Setting(policy="dynamic", max_output_tokens=LIMIT))
        await sending
        for name, check in (("30 s", early), ("60 s", late)):
            self.keep(f"{policy} {load} {name}", check=check, holds=holds(check))
            print(f"{policy:28} {load:5.2f}  {name}  {in_words(check)}", flush=True)
        return holds(late)

    async def recorded(self, path: Path, policy: str, load: float) -> bool:
        """Send 20 minutes of a trace's traffic; True where nine in ten windows hold."""
        engine = (await self.gateway.ask("GET", "/v1/models"))["data"][0]
        table = thinned(
            read_trace(path),
            policy,
            load,
            self.law,
            slots=SLOTS,
            longest=LONGEST,
            context=CONTEXT,
            batch_tokens=engine["max_num_batched_tokens"],
        )
        table = table.rows(np.flatnonzero(table.intended_at < WINDOW * WINDOWS))
        await self.put(Setting(policy=policy, max_output_tokens=LONGEST))
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=LONGEST)
        sending = asyncio.create_task(run_load(target, table, seed=self.seed))
        held: list[bool] = []
        forecast: dict[str, Any] | None = None  # that the window before made of this one
        for number in range(WINDOWS):
            await asyncio.sleep(WINDOW)
            prediction = await self.prediction()
            check = prediction.get("check")
            held.append(holds(check))
            name = f"{path.stem} {load}"
            self.keep(f"{policy} {name} {number + 1}", prediction=prediction, holds=held[-1])
            print(f"{policy:28} {name}  window {number + 1}  {in_words(check)}", flush=True)
            if forecast is not None and check is not None:
                low, high = forecast["low"], forecast["high"]
                self.forecasts_held.append(low <= check["observed"] <= high)
                print(
                    f"{'':28} predicted {1e3 * low:.0f} to {1e3 * high:.0f} ms"
                    f"{'' if self.forecasts_held[-1] else '  DID NOT HOLD'}",
                    flush=True,
                )
            forecast = (prediction.get("forecast") or {}).get("next")
        await sending
        await self.put(Setting(policy="dynamic", max_output_tokens=LONGEST))
        return sum(held) >= 0.9 * len(held)

    async def switches(self) -> bool:
        """Change the setting under load; True where nine in ten gains came."""
        rate = self.rate(SWITCHES[0].policy, SWITCH_LOAD)
        seconds = 1.2 * (SECONDS + BETWEEN) * len(SWITCHES)
        return await self._changed(SWITCHES, asyncio.create_task(self.send(rate, seconds)))

    async def orders(self) -> bool:
        """The same of orders of service, before which lengths are learned."""
        answers = [(row["prompt"], row["tokens"][0]) for row in rows()]
        prompts, lengths = zip(*answers, strict=True)
        law = TokenDistribution(np.bincount(lengths) / len(lengths))
        queue = Queue.read(PLAIN, law, self.law, max_num_seqs=SLOTS, prompt_tokens=PROMPTS)
        rate = ORDER_LOAD * queue.largest_stable_rate
        seconds = 1.1 * (SECONDS + BETWEEN) * (len(ORDERED) + 1)
        drawn = draw(rate, round(rate * seconds), self.seed, parse_distribution(PROMPTS), law)
        dataset = Dataset(list(prompts), [None] * len(prompts), list(lengths))
        table, texts = draw_dataset(drawn, dataset, self.seed)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=ANSWER)
        await self.put(ORDERED[0])
        sending = asyncio.create_task(run_load(target, table, seed=self.seed, prompts=texts))
        await asyncio.sleep(SECONDS + BETWEEN)
        await self.put(Setting(policy="dynamic", max_output_tokens=ANSWER))  # another epoch
        return await self._changed(ORDERED, sending, step=2)

    async def _changed(
        self, settings: Sequence[Setting], sending: asyncio.Task[Any], step: int = 1
    ) -> bool:
        """Each setting in turn; every `step`-th change is judged."""
        for setting in settings:
            await self.put(setting)
            await asyncio.sleep(SECONDS + BETWEEN)
        sending.cancel()
        await asyncio.wait([sending])
        await asyncio.sleep(BETWEEN)
        came = []
        for line, held in gains(self.folder / "gateway.jsonl", self.law, settings, step):
            print(line, flush=True)
            self.keep(line, holds=held)
            came.append(held)
        print(f"{sum(came)} of {len(came)} gains came")
        return sum(came) >= 0.9 * len(came) - 1e-9

    def keep(self, name: str, **facts: Any) -> None:
        """Write one more answer into the folder."""
        self.answers.append({"name": name, **facts})
        self.folder.joinpath("answers.json").write_text(json.dumps(self.answers, indent=1))


def holds(check: dict[str, Any] | None) -> bool:
    """True where the model agrees, by its interval or within 10 %."""
    if check is None or check["verdict"] == "disagree":
        return False
    within = abs(check["ratio"] - 1) <= 0.1
    return within or bool(check["ratio_low"] <= 1 <= check["ratio_high"])


def in_words(check: dict[str, Any] | None) -> str:
    if check is None:
        return "no check"
    if check["ratio_low"] is None:
        return f"{check['requests']} requests, no interval"
    half = 100 * (check["ratio_high"] - check["ratio"])
    return (
        f"{check['requests']:5} requests  observed {1e3 * check['observed']:8.1f} ms  model "
        f"{1e3 * check['modelled']:8.1f} ms  {100 * (check['ratio'] - 1):+6.1f} +- {half:.1f} %  "
        f"{check['verdict']}{'' if holds(check) else '  DOES NOT HOLD'}"
    )


def thinned(
    trace: Timetable,
    policy: str,
    load: float,
    law: LatencyModel,
    *,
    slots: int,
    longest: int,
    context: int,
    batch_tokens: int,
) -> Timetable:
    """Draw as many requests of the trace's first hour as make the load; answers have `longest`
    tokens at most and prompts that leave room for them in the context, `slots` at once. The prompts
    of a batch have `batch_tokens` at most.
    """
    hour = trace.intended_at < HOUR
    arrived_at = trace.intended_at[hour]
    outputs = np.clip(trace.output_tokens[hour], 1, longest)
    prompts = np.clip(trace.prompt_tokens[hour], 1, context - longest)
    model = Queue.read(
        policy,
        TokenDistribution.from_counts(outputs),
        law,
        prompt_tokens=TokenDistribution.from_counts(prompts),
        max_num_seqs=slots,
        step_tokens=None if parse_policy(policy).joins_running else batch_tokens,
    )
    share = load * model.largest_stable_rate / (arrived_at.size / HOUR)
    kept = np.random.default_rng(0).random(arrived_at.size) < share
    return Timetable(arrived_at[kept], prompts[kept], outputs[kept])


def gains(
    path: Path, law: LatencyModel, settings: Sequence[Setting], step: int
) -> Iterator[tuple[str, bool]]:
    """Every `step`-th switch of a run in a line, and whether the measured gain lies in the interval
    of the predicted one.
    """
    requests = served(read_run(path)[1])
    numbers = sorted({request.epoch for request in requests})[-len(settings) :]
    epochs = [
        (setting, epoch_window([request for request in requests if request.epoch == number]))
        for setting, number in zip(settings, numbers, strict=True)
    ]
    history = RecentArrivals(), SpeedHistory()
    for (before, first), (after, second) in itertools.islice(
        itertools.pairwise(epochs), 0, None, step
    ):
        quantity = compared_by((parse_policy(before.policy), parse_policy(after.policy)))
        outcome = same_requests(first, before, law, history)
        predicted = outcome.next_gain(after, quantity)
        same = outcome.gain(after, quantity)
        modelled = same_requests(second, after, law).mean(before, quantity)
        if modelled is None:
            continue
        observed = float(second.judged(sojourn=quantity == "sojourn_time").mean())
        measured = 1 - observed / (modelled * observed_over_model(first, before, law, quantity))
        held = predicted.low <= measured <= predicted.high
        yield (
            f"{text(before):32} -> {text(after):32} {quantity:14} predicted "
            f"{100 * predicted.value:+7.1f} % ({100 * predicted.low:+.1f} to "
            f"{100 * predicted.high:+.1f}; same requests {100 * same.low:+.1f} to "
            f"{100 * same.high:+.1f})  measured {100 * measured:+7.1f} %"
            f"{'' if held else '  DID NOT'}",
            held,
        )


def text(setting: Setting) -> str:
    return f"{setting.policy.replace('max_batch_size=', '')}, {setting.max_output_tokens} tokens"


def epoch_window(requests: Sequence[Served]) -> Snapshot:
    """An epoch's requests from its first dispatch on: those that waited then are its first."""
    window = window_of_run(requests, min(r.dispatched_at - r.arrived_at for r in requests))
    began = min(request.dispatched_at for request in requests)
    return dataclasses.replace(window, start=began, epoch_at=began)


def same_requests(
    window: Snapshot, current: Setting, law: LatencyModel, history: History | None = None
) -> SameRequests:
    """The settings' durations of the window's requests and, where the history is known, of those
    until the next switch.
    """
    limits = QueueLimits(
        max_output_tokens=current.max_output_tokens, engine=EngineBounds(max_num_seqs=SLOTS)
    )
    arrivals, speeds = history or (None, None)
    assessment = assess(window, law, limits, history=speeds)
    point = OperatingPoint(estimates=assessment.estimates, shape=law, limits=limits)
    ahead = None
    if arrivals is not None and speeds is not None and assessment.model is not None:
        arrivals.add(window)
        error = forecast_error(assessment.estimates, speeds)
        ahead = outlook(window, assessment.model, arrivals, error, seconds=SECONDS + BETWEEN)
    return SameRequests(window, point, current, ahead)


def observed_over_model(
    window: Snapshot, current: Setting, law: LatencyModel, quantity: Quantity
) -> float:
    """The check's ratio, which both sides of a gain have in common."""
    check = check_run(window, same_requests(window, current, law).point.model(current))
    return 1.0 if check is None else float(getattr(check, quantity).ratio)


async def measure(options: argparse.Namespace) -> bool:
    """Run one of the trials; True where it holds."""
    traces, folder = options.what == "traces", options.folder / options.what
    longest = ANSWER if options.what == "orders" else LIMIT
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("gateway.jsonl").unlink(missing_ok=True)
    window = WINDOW if traces else SECONDS + BETWEEN
    arguments = [
        "tiny",
        *("--allow-forced-lengths", "--served-model-name", "tiny"),
        *("--max-output-tokens", str(longest), "--max-num-seqs", str(SLOTS)),
        *(("--length-predictor", "learned") if options.what == "orders" else ()),
        *("--max-num-queued-reqs", "0", "--prediction-window", f"{window:g}"),
        *("--record-file", str(folder / "gateway.jsonl")),
    ]
    async with GatewayProcess(
        arguments, free_port(options.port), folder / "gateway.log"
    ) as gateway:
        await gateway.ready()
        body = {"max_output_tokens": 32, "prompt_tokens": 32, "repeats": 12}
        if traces:
            body = {"max_output_tokens": 64, "prompt_tokens": 512, "repeats": 6}
        if options.what == "orders":
            body = {"max_output_tokens": 200, "prompt_tokens": 64, "repeats": 6}
            body["resume_cost"] = True
        profile = Profile.from_dict(await gateway.ask("POST", "/admin/calibrate", body))
        print(f"law: {profile.law}, cells within {profile.mape:.1%}", flush=True)
        trial = Trial(gateway, profile.law.at_speed(1.0), folder)
        if options.what == "switches":
            return await trial.switches()
        if options.what == "orders":
            return await trial.orders()
        if traces:
            files = list(zip(options.trace, itertools.cycle(TRACE_POLICIES), strict=False))
            loads = options.loads or TRACE_LOADS
            runs = [await trial.recorded(*file, load) for load in loads for file in files]
            right = sum(trial.forecasts_held)
            every = len(trial.forecasts_held)
            print(f"{right} of {every} means of the next five minutes as predicted")
            return all(runs) and right >= 0.8 * every
        cells = [(policy, load) for load in options.loads or CELL_LOADS for policy in POLICIES]
        if options.what == "overload":
            cells = [(policy, OVERLOAD) for policy in OVERLOADED]
        held = [await trial.cell(*cell) for cell in cells]
        print(f"{sum(held)} of {len(held)} cells hold")
        return sum(held) >= 11 / 12 * len(held)


def main() -> int:
    """Exit status 0 where what was asked for holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cells", "overload", "switches", "orders", "traces"))
    parser.add_argument("--folder", type=Path, default=RUNS)
    parser.add_argument("--loads", type=float, nargs="+", default=())
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--port", type=int, default=8094)
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
