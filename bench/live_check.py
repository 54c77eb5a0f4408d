"""Does the live check hold on a real engine, and does a gain come that was foretold?

    .venv/bin/python bench/live_check.py cells       24 cells: six policies at four loads, 60 s each
    .venv/bin/python bench/live_check.py overload    load 1.3 for 60 s, two policies
    .venv/bin/python bench/live_check.py switches    ten changes of policy, batch size and limit at
                                                     one arrival rate
    .venv/bin/python bench/live_check.py traces --trace FILE ...    loads 0.5 and 0.8, each for 20
                                                     minutes

Starts a gateway with the tiny model, calibrates it, and sends Poisson load. A cell holds where the
verdict of `/admin/prediction`'s check is not "disagree" and the observed mean lies in its interval
or within 10 % of the model's; it is read 30 s after the switch to the cell, and at its end. A
change holds where the band of its gain over as long a time as the setting is then in force, of
which nine in ten are within, covers the gain that is measured after it: 1 - observed mean / the
model's mean of the same requests under the setting before, at the ratio of observed to model that
its own check had. One line a cell on standard output, all answers in runs/live-check/.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.live.design import KINDS, TABLE  # noqa: E402 - behind the path
from bench.live.thinned import thinned  # noqa: E402

PROMPTS, LIMIT, MOST = TABLE.prompt_tokens, TABLE.longest, TABLE.max_num_seqs
LENGTHS = KINDS["g"][1]
OVERLOADED = ("capped:max_batch_size=8", "continuous:max_batch_size=4")
CHANGES: tuple[tuple[str, int], ...] = (  # settings in turn, each one knob or several away
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
EARLY, SECONDS, BETWEEN = 30.0, 60.0, 6.0
# recorded traffic, the first file under the first policy and so on: seconds, windows, tokens
RECORDED = ("dynamic", "continuous:max_batch_size=8", "capped:max_batch_size=8")
LOADS = (0.5, 0.8)
WINDOW, WINDOWS, LONGEST, CONTEXT = 300.0, 4, 256, 2_048


@dataclass
class Bench:
    """A gateway under load."""

    gateway: Any
    law: Any
    folder: Path
    seed: int = 1
    answers: list[dict[str, Any]] = field(default_factory=list)
    foretold: list[bool] = field(default_factory=list)  # whether the next five minutes held

    def rate(self, policy: str, load: float, limit: int = LIMIT) -> float:
        """Calls per second."""
        from policies import parse_policy
        from queueing.distributions.token_distribution import parse_distribution
        from queueing.prediction.steady_state import largest_stable_rate

        return load * largest_stable_rate(
            parse_policy(policy),
            parse_distribution(LENGTHS, limit),
            self.law,
            max_num_seqs=MOST,
            prompt_tokens=parse_distribution(PROMPTS),
        )

    async def load(self, rate: float, seconds: float) -> None:
        """Poisson arrivals for so long."""
        from loadgen.sending.client.target import Target
        from loadgen.sending.run import run_load
        from queueing.arrivals.timetable import draw
        from queueing.distributions.token_distribution import parse_distribution

        self.seed += 1
        count = max(20, round(rate * seconds))
        lengths = parse_distribution(PROMPTS), parse_distribution(LENGTHS, LIMIT)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=LIMIT)
        await run_load(target, draw(rate, count, self.seed, *lengths), seed=self.seed)

    async def looked(self) -> dict[str, Any]:
        """The last assessment."""
        return dict(await self.gateway.ask("GET", "/admin/prediction"))

    async def put(self, policy: str, limit: int = LIMIT) -> None:
        """Another setting."""
        await self.gateway.ask(
            "PUT", "/admin/policy", {"policy": policy, "max_output_tokens": limit}
        )

    async def cell(self, policy: str, load: float) -> bool:
        """Whether both looks hold."""
        await self.put(policy)
        sending = asyncio.create_task(self.load(self.rate(policy, load), SECONDS))
        await asyncio.sleep(EARLY)
        looks = [await self.looked()]
        await asyncio.wait([sending], timeout=SECONDS - EARLY)
        await asyncio.sleep(BETWEEN)
        looks.append(await self.looked())
        await self.put("dynamic")  # fixed would keep the last batch, which is not full
        await sending
        held = []
        for name, look in zip(("30 s", "60 s"), looks, strict=True):
            check = (look.get("prediction") or {}).get("check")
            held.append(holds(check))
            self.keep(f"{policy} {load} {name}", check=check, holds=held[-1])
            print(f"{policy:28} {load:5.2f}  {name}  {said(check)}", flush=True)
        return held[-1]

    async def recorded(self, path: Path, policy: str, load: float) -> bool:
        """Whether nine in ten windows hold of 20 minutes of a trace's traffic."""
        from loadgen.sending.client.target import Target
        from loadgen.sending.run import run_load
        from queueing.arrivals.traces import read_trace

        engine = (await self.gateway.ask("GET", "/v1/models"))["data"][0]
        tokens = engine["max_num_batched_tokens"]
        given = {"most": MOST, "longest": LONGEST, "context": CONTEXT, "batch_tokens": tokens}
        table = thinned(read_trace(path), policy, load, self.law, **given)
        table = table.rows(np.flatnonzero(table.intended_at < WINDOW * WINDOWS))
        await self.put(policy, LONGEST)
        target = Target(base_url=self.gateway.url, model="tiny", max_tokens=LONGEST)
        sending = asyncio.create_task(run_load(target, table, seed=self.seed))
        held: list[bool] = []
        told: dict[str, Any] | None = None  # of the next five minutes, a window before
        for number in range(WINDOWS):
            await asyncio.sleep(WINDOW)
            look = await self.looked()
            found = look.get("prediction") or {}
            check = found.get("check")
            held.append(holds(check))
            name = f"{path.stem} {load}"
            self.keep(f"{policy} {name} {number + 1}", look=look, holds=held[-1])
            print(f"{policy:28} {name}  window {number + 1}  {said(check)}", flush=True)
            if told is not None and check is not None:
                self.foretold.append(told["low"] <= check["observed"] <= told["high"])
                print(
                    f"{'':28} foretold {1e3 * told['low']:.0f} to {1e3 * told['high']:.0f} ms"
                    f"{'' if self.foretold[-1] else '  DID NOT HOLD'}",
                    flush=True,
                )
            told = (found.get("forecast") or {}).get("next")
        await sending
        await self.put("dynamic", LONGEST)
        return sum(held) >= 0.9 * len(held)

    async def changes(self) -> bool:
        """Whether nine in ten gains came."""
        rate = self.rate(CHANGES[0][0], 0.7)
        await self.put(*CHANGES[0])
        sending = asyncio.create_task(self.load(rate, 1.2 * (SECONDS + BETWEEN) * len(CHANGES)))
        for setting in CHANGES[1:]:
            await asyncio.sleep(SECONDS + BETWEEN)
            await self.put(*setting)
        await asyncio.sleep(SECONDS + BETWEEN)
        sending.cancel()
        await asyncio.wait([sending])
        await asyncio.sleep(BETWEEN)
        came = list(gains(self.folder / "gateway.jsonl", self.law))
        for line, told in came:
            print(line, flush=True)
            self.keep(line, holds=told)
        print(f"{sum(told for _, told in came)} of {len(came)} gains came")
        return sum(told for _, told in came) >= 0.9 * len(came) - 1e-9

    def keep(self, name: str, **about: Any) -> None:
        """For later looks."""
        self.answers.append({"name": name, **about})
        self.folder.joinpath("answers.json").write_text(json.dumps(self.answers, indent=1))


def holds(check: dict[str, Any] | None) -> bool:
    """Whether the model agrees, by its interval or within 10 %."""
    if check is None or check["verdict"] == "disagree":
        return False
    within = abs(check["ratio"] - 1) <= 0.1
    return within or bool(check["ratio_low"] <= 1 <= check["ratio_high"])


def said(check: dict[str, Any] | None) -> str:
    """In one line."""
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


def gains(path: Path, law: Any) -> Iterator[tuple[str, bool]]:
    """Of every change a line, and whether the gain that was foretold covers the measured one."""
    from queueing.estimation.outlook import RecentArrivals
    from queueing.estimation.speed.speed_history import SpeedHistory
    from queueing.measurement.record import read_run
    from queueing.measurement.recursion import served

    everyone = served(read_run(path)[1])
    numbers = sorted({each.epoch for each in everyone})[-len(CHANGES) :]
    epochs = [
        (setting, [each for each in everyone if each.epoch == epoch])
        for setting, epoch in zip(CHANGES, numbers, strict=True)
    ]
    known = RecentArrivals(), SpeedHistory()  # across epochs, as a gateway has them
    for (before, first), (after, second) in itertools.pairwise(epochs):
        quantity = compared(before[0], after[0])
        same = same_requests(first, before, law, known)
        told = same.next_gain(setting_of(after), quantity)
        narrow = same.gain(setting_of(after), quantity)
        back = same_requests(second, after, law)
        here = back.mean(setting_of(before), quantity)
        observed = mean_of(second, quantity)
        if here is None:
            continue
        gain = 1 - observed / (here * ratio(first, before, law, quantity))
        held = told.low <= gain <= told.high
        yield (
            f"{text(before):32} -> {text(after):32} {quantity:14} foretold {100 * told.value:+7.1f}"
            f" % ({100 * told.low:+.1f} to {100 * told.high:+.1f}; same requests "
            f"{100 * narrow.low:+.1f} to {100 * narrow.high:+.1f})  came {100 * gain:+7.1f} %"
            f"{'' if held else '  DID NOT'}",
            held,
        )


def compared(before: str, after: str) -> Any:
    """The duration by which the two are compared."""
    from policies import parse_policy
    from queueing.choosing.quantity import compared_by

    return compared_by((parse_policy(before), parse_policy(after)))


def setting_of(asked: tuple[str, int]) -> Any:
    """As a what-if has it."""
    from queueing.choosing.forecast import Setting

    return Setting(policy=asked[0], max_output_tokens=asked[1])


def same_requests(
    requests: Sequence[Any], asked: tuple[str, int], law: Any, known: tuple[Any, Any] | None = None
) -> Any:
    """What settings would have done with them, and, where the traffic and the speed before are
    known, will do in the next minute.
    """
    from queueing.choosing.gain.operating_point import OperatingPoint
    from queueing.choosing.gain.same_requests import SameRequests
    from queueing.control.assess import assess
    from queueing.estimation.outlook import forecast_error, outlook
    from queueing.estimation.window_queue import Limits

    limits = Limits(max_output_tokens=asked[1], max_num_seqs=MOST)
    seen = window_of_epoch(requests)
    recent, speeds = known or (None, None)
    found = assess(seen, law, limits, history=speeds)
    point = OperatingPoint(estimates=found.estimates, shape=law, limits=limits)
    ahead = None
    if recent is not None and speeds is not None and found.model is not None:
        recent.add(seen)
        error = forecast_error(found.estimates, speeds)
        ahead = outlook(seen, found.model, recent, error, seconds=SECONDS + BETWEEN)
    return SameRequests(seen, point, setting_of(asked), ahead)


def ratio(requests: Sequence[Any], asked: tuple[str, int], law: Any, quantity: str) -> float:
    """Observed over modelled, by the check: what both sides of a gain have in common."""
    from queueing.estimation.checked import check_run

    model = same_requests(requests, asked, law).point.model(setting_of(asked))
    found = check_run(window_of_epoch(requests), model)
    return 1.0 if found is None else float(getattr(found, quantity).ratio)


def mean_of(requests: Sequence[Any], quantity: str) -> float:
    """Observed, seconds, without the warm-up."""
    return float(window_of_epoch(requests).judged(sojourn=quantity == "sojourn_time").mean())


def window_of_epoch(requests: Sequence[Any]) -> Any:
    """Which begins with its first dispatch: who waited then stands at its beginning."""
    from queueing.estimation.window.of_run import window_of_run

    seen = window_of_run(requests, min(r.dispatched_at - r.arrived_at for r in requests))
    began = min(r.dispatched_at for r in requests)
    return dataclasses.replace(seen, start=began, epoch_at=began)


def text(asked: tuple[str, int]) -> str:
    """A setting, short."""
    return f"{asked[0].replace('max_batch_size=', '')}, {asked[1]} tokens"


async def measure(
    asked: str, folder: Path, port: int, loads: Sequence[float], traces: Sequence[Path]
) -> int:
    """All that was asked for; 0 where it holds."""
    from loadgen.gateway.gateway_process import GatewayProcess, free_port
    from queueing.latency.profile import Profile

    window = WINDOW if asked == "traces" else SECONDS + BETWEEN
    arguments = [
        "tiny",
        *("--allow-forced-lengths", "--served-model-name", "tiny"),
        *("--max-output-tokens", str(LIMIT), "--max-num-seqs", str(MOST)),
        *("--max-num-queued-reqs", "0", "--prediction-window", f"{window:g}"),
        *("--record-file", str(folder / "gateway.jsonl")),
    ]
    async with GatewayProcess(arguments, free_port(port), folder / "gateway.log") as gateway:
        await gateway.ready()
        body = {"max_output_tokens": 32, "prompt_tokens": 32, "repeats": 12}
        if asked == "traces":
            body = {"max_output_tokens": 64, "prompt_tokens": 512, "repeats": 6}
        profile = Profile.from_dict(await gateway.ask("POST", "/admin/calibrate", body))
        print(f"law: {profile.law}, cells within {profile.mape:.1%}", flush=True)
        bench = Bench(gateway, profile.law.at_speed(1.0), folder)
        if asked == "switches":
            return 0 if await bench.changes() else 1
        if asked == "traces":
            each = list(zip(traces, itertools.cycle(RECORDED), strict=False))
            runs = [await bench.recorded(*one, load) for load in loads or LOADS for one in each]
            right = sum(bench.foretold)
            print(f"{right} of {len(bench.foretold)} means of the next five minutes as foretold")
            return 0 if all(runs) and right >= 0.8 * len(bench.foretold) else 1
        cells = [(policy, load) for load in loads or TABLE.loads for policy in TABLE.policies]
        if asked == "overload":
            cells = [(policy, 1.3) for policy in OVERLOADED]
        held = [await bench.cell(*each) for each in cells]
        print(f"{sum(held)} of {len(held)} cells hold")
        return 0 if sum(held) >= 11 / 12 * len(held) else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cells", "overload", "switches", "traces"))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "live-check")
    parser.add_argument("--loads", type=float, nargs="+", default=())
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--port", type=int, default=8094)
    asked = parser.parse_args()
    folder = asked.folder / asked.what
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("gateway.jsonl").unlink(missing_ok=True)
    return asyncio.run(measure(asked.what, folder, asked.port, asked.loads, asked.trace))


if __name__ == "__main__":
    sys.exit(main())
