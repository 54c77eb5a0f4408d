"""Prefill and decode on servers of their own, under every policy: pools, KV transfers, orders."""

import heapq
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.latency.kv_transfer import KvTransfer, parse_kv_transfer
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.solutions import methods
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles
from kendall.queueing.simulation.experiment import run_trace, simulate_model
from kendall.queueing.simulation.fast import Trace, draw_trace

LENGTHS = {"output_tokens": "uniform:low=1,high=20", "prompt_tokens": "uniform:low=1,high=200"}
# no multiples of each other: no two events at one instant
SETUP, PROMPT, MEMBER, STEP = 7.137e-3, 1.00317e-3, 1.0193e-3, 4.8711e-3
LAW = LatencyModel(k1=2e-3, k2=SETUP - 2e-3, k3=MEMBER, k4=STEP, kp=PROMPT)
MEAN_PREFILL = SETUP + PROMPT * 100.5
EXPONENTIAL = "k1=0,k2=0.5,k3=0,k4=1,cv=1"  # prefill 0.5 s, decode 1 s, one token
TRANSFER = "setup=10ms,token=0.7071ms"


def queue(policy: str, **limits: Any) -> Queue:
    given: dict[str, Any] = {"latency": LAW, **LENGTHS, **limits}
    return Queue.read(policy, disaggregated=True, **given)


def assert_meets(found: Quantiles, expected: float) -> None:
    assert found.mean is not None
    assert found.standard_error is not None
    assert found.standard_error < 0.05 * expected
    assert abs(found.mean - expected) < 4 * found.standard_error


def delay_of_mmc(rate: float, mean: float, servers: int) -> float:
    """Erlang C."""
    work = rate * mean
    waiting = work**servers / math.factorial(servers) / (1 - work / servers)
    empty = 1 / (sum(work**n / math.factorial(n) for n in range(servers)) + waiting)
    return waiting * empty * mean / (servers - work)


# against closed forms


@pytest.mark.thinned(3)
@pytest.mark.parametrize("servers", [(1, 1), (1, 3), (2, 3)])
def test_pools_of_exponential_servers_are_m_m_c_queues_in_turn(servers: tuple[int, int]) -> None:
    model = queue(
        "single",
        latency=EXPONENTIAL,
        output_tokens="deterministic:value=1",
        prompt_tokens="geometric:mean=20",
        prefill_servers=servers[0],
        servers=servers[1],
        kv_transfer=TRANSFER,
    )
    rate = 0.8 * model.largest_stable_rate
    assert model.largest_stable_rate == pytest.approx(min(servers[0] / 0.5, servers[1] / 1.0))
    delays = delay_of_mmc(rate, 0.5, servers[0]), delay_of_mmc(rate, 1.0, servers[1])
    found = simulate_model(model, rate, num_requests=1_000_000, seed=4)
    assert_meets(found.queueing_delay, sum(delays))
    way = 1.5 + 0.01 + 0.7071e-3 * 20
    assert_meets(found.sojourn_time, sum(delays) + way)
    for station, delay, load in zip(
        found.stations, delays, (rate * 0.5 / servers[0], rate / servers[1]), strict=True
    ):
        assert_meets(station.queueing_delay, delay)
        assert station.load == pytest.approx(load, rel=0.01)
    answer = predict_model(model, rate)
    assert answer.method == ("exact" if servers == (1, 1) else "approximation")
    assert answer.sojourn_time.mean == pytest.approx(sum(delays) + way, rel=1e-3)


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        ("capped:max_batch_size=3", "exact"),
        ("fixed:batch_size=3", "exact"),
        ("capped:max_batch_size=3,order=spjf", "simulation"),
        ("single:order=sprpt", "simulation"),
    ],
)
def test_behind_exponential_prefills_a_policy_has_its_own_formula(policy: str, method: str) -> None:
    """Burke: decodes come by a Poisson process."""
    law = "k1=0,k2=0.05,k3=2e-3,k4=5e-3,cv=1"
    model = queue(policy, latency=law, kv_transfer="20ms", predictor="exact")
    assert methods(model)[0] == method
    if method == "simulation":
        return
    rate = 0.7 * model.largest_stable_rate
    answer = predict_model(model, rate, method)
    found = simulate_model(model, rate, num_requests=400_000, seed=5)
    assert answer.sojourn_time.mean is not None
    assert_meets(found.sojourn_time, answer.sojourn_time.mean)
    assert answer.time_to_first_token.mean == pytest.approx(
        found.time_to_first_token.mean, rel=0.03
    )
    for mine, theirs in zip(answer.stations, found.stations, strict=True):
        assert mine.load == pytest.approx(theirs.load, rel=0.01)
        assert mine.queueing_delay.mean == pytest.approx(theirs.queueing_delay.mean, rel=0.08)


# against a path made one event at a time


def prefilled(trace: Trace, servers: int, *, shortest: bool = False) -> list[float]:
    """Ends of the prefills."""
    free, ends = [0.0] * servers, [math.nan] * len(trace.arrived_at)
    waiting: list[tuple[float, int]] = []
    to_come = list(enumerate(trace.arrived_at.tolist()))
    while to_come or waiting:
        now = heapq.heappop(free)
        if not waiting:
            now = max(now, to_come[0][1])
        while to_come and to_come[0][1] <= now:
            place, _ = to_come.pop(0)
            rank = int(trace.prompt_tokens[place]) if shortest else place
            heapq.heappush(waiting, (rank, place))
        _, place = heapq.heappop(waiting)
        ends[place] = now + SETUP + PROMPT * int(trace.prompt_tokens[place])
        heapq.heappush(free, ends[place])
    return ends


def decoded(
    trace: Trace, ready: list[float], servers: int, most: int, wait_for: int = 1
) -> list[float]:
    """Ends of padded batches of at most `most`, which wait until they have `wait_for` or all have
    come.
    """
    free, ends = [0.0] * servers, [math.nan] * len(ready)
    to_come = sorted(range(len(ready)), key=ready.__getitem__)
    waiting: list[int] = []
    while to_come or waiting:
        now = heapq.heappop(free)
        while to_come and (ready[to_come[0]] <= now or len(waiting) < wait_for):
            now = max(now, ready[to_come[0]])
            waiting.append(to_come.pop(0))
        batch, waiting = waiting[:most], waiting[most:]
        longest = max(int(trace.output_tokens[place]) for place in batch)
        end = now + (MEMBER * len(batch) + STEP) * longest
        for place in batch:
            ends[place] = end
        heapq.heappush(free, end)
    return ends


@pytest.mark.thinned(6)
@pytest.mark.parametrize("transfer", [None, TRANSFER])
@pytest.mark.parametrize("servers", [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        ("single", (1, 1)),
        ("dynamic", (10**9, 1)),
        ("capped:max_batch_size=3", (3, 1)),
        ("fixed:batch_size=3", (3, 3)),
    ],
)
def test_a_path_is_that_of_one_event_after_the_other(
    policy: str, batch: tuple[int, int], servers: tuple[int, int], transfer: str | None
) -> None:
    model = queue(policy, prefill_servers=servers[0], servers=servers[1], kv_transfer=transfer)
    trace = draw_trace(model, 0.9 * servers[0] / MEAN_PREFILL, 999, np.random.SeedSequence(3))
    run = run_trace(model, trace)
    ends = prefilled(trace, servers[0])
    assert run.stations[0].released_at == pytest.approx(np.array(ends), rel=1e-12)
    moved = np.zeros(999) if transfer is None else 0.01 + 0.7071e-3 * trace.prompt_tokens
    expected = decoded(trace, (np.array(ends) + moved).tolist(), servers[1], *batch)
    assert run.released_at == pytest.approx(np.array(expected), rel=1e-12)
    delays = sum(station.queueing_delay for station in run.stations)
    assert run.queueing_delay == pytest.approx(delays, abs=1e-9)


def test_an_order_by_service_ranks_prompts_where_they_are_prefilled() -> None:
    model = queue("single:order=spjf,by=service", predictor="exact")
    trace = draw_trace(model, 0.9 / MEAN_PREFILL, 500, np.random.SeedSequence(6))
    run = run_trace(model, trace)
    ends = prefilled(trace, 1, shortest=True)
    assert run.stations[0].released_at == pytest.approx(np.array(ends), rel=1e-12)
    assert model.prefill.text == "single:order=spjf,by=service"
    assert queue("single:order=sprpt").prefill.text == "single"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "policy",
    [
        "continuous:max_batch_size=4",
        "elastic",
        "dynamic:order=binned,bins=2",
        "capped:max_batch_size=4,order=spjf",
        "single:order=sprpt",
        "fixed:batch_size=3,max_wait=0.1",
    ],
)
def test_the_compiled_loops_are_the_policies_themselves(policy: str) -> None:
    model = queue(policy, servers=2, kv_transfer=TRANSFER, predictor="exact")
    rate = 0.8 * model.largest_stable_rate
    trace, again = (draw_trace(model, rate, 400, np.random.SeedSequence(7)) for _ in range(2))
    fast, generic = run_trace(model, trace), run_trace(model, again, generic=True)
    for name in ("released_at", "first_token_at", "queueing_delay"):
        assert getattr(fast, name) == pytest.approx(getattr(generic, name), rel=1e-9, abs=1e-9)


# what the answer says


def test_the_first_token_is_made_by_the_server_that_decodes() -> None:
    """One prefill, a transfer, then 4 steps; nobody waits."""
    lengths = {
        "prompt_tokens": "deterministic:value=100",
        "output_tokens": "deterministic:value=4",
    }
    model = queue("continuous:max_batch_size=8", kv_transfer=TRANSFER, **lengths)
    answer = predict_model(model, 1e-3)
    assert answer.method == "simulation"
    before, step = SETUP + 100 * PROMPT + 0.01 + 100 * 0.7071e-3, MEMBER + STEP
    assert answer.time_to_first_token.mean == pytest.approx(before + step, rel=1e-3)
    assert answer.inter_token_latency.mean == pytest.approx(step, rel=1e-4)
    assert answer.sojourn_time.mean == pytest.approx(before + 4 * step, rel=1e-3)
    assert answer.model == "M/G/1 -> ./G(n)-PS[8]/1"


@pytest.mark.parametrize(("prefills", "slower"), [(1, "prefill"), (20, "decode")])
def test_the_load_is_that_of_the_slower_station(prefills: int, slower: str) -> None:
    model = queue("capped:max_batch_size=4", prefill_servers=prefills)
    rate = 0.5 * model.largest_stable_rate
    found = simulate_model(model, rate, num_requests=2000)
    loads = {station.name: station.load for station in found.stations}
    assert max(loads, key=loads.__getitem__) == slower
    assert loads[slower] == pytest.approx(0.5, rel=0.05)
    assert found.load == pytest.approx(0.5)
    assert found.utilisation is not None
    assert found.utilisation < 0.55


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"prefill_servers": 0}, "for prefill_servers=0; expected single: servers that prefill"),
        ({"prefill_servers": -1}, "got prefill_servers=-1; expected a whole number"),
        ({"prefill_servers": 1.5}, "got prefill_servers=1.5; expected a whole number"),
        ({"kv_transfer": "-2ms"}, "got setup=-2ms in the KV transfer '-2ms'; expected a duration"),
        ({"kv_transfer": "setup=nan"}, "got setup=nan in the KV transfer"),
        ({"kv_transfer": "setup=inf"}, "got setup=inf in a KV transfer; expected 0 to 1,000,000 s"),
        ({"kv_transfer": "tokn=1us"}, "did you mean 'token'"),
        ({"kv_transfer": ""}, "got an empty KV transfer"),
        ({"disaggregated": False, "kv_transfer": "2ms"}, "expected disaggregated too"),
        ({"disaggregated": False, "prefill_servers": 2}, "expected disaggregated too"),
        ({"step_tokens": 100}, "got step_tokens=100 for disaggregated"),
        ({"pad_prompts": True}, "got pad_prompts for disaggregated"),
        ({"sequences": "deterministic:value=2"}, "got sequences for disaggregated"),
    ],
)
def test_what_cannot_be_is_refused(limits: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"disaggregated": True, "latency": LAW, **LENGTHS, **limits}
    with pytest.raises(SpecError, match=message):
        Queue.read("capped:max_batch_size=8", **given)


def test_a_transfer_has_one_text() -> None:
    assert parse_kv_transfer("2ms") == KvTransfer(0.002)
    again = parse_kv_transfer("setup=2ms,token=5us")
    assert parse_kv_transfer(str(again)) == again == KvTransfer(0.002, 5e-6)


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_the_commands_take_pools_and_transfers(command: str) -> None:
    given = "--policy continuous:max_batch_size=8 --arrival-rate 12 --disaggregated"
    given += f" --prefill-servers 2 --servers 2 --kv-transfer 2ms --latency {LAW}"
    given += " --output-tokens uniform:low=1,high=20 --prompt-tokens uniform:low=1,high=200"
    result = CliRunner().invoke(app, [command, *given.split()])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("continuous:max_batch_size=8  M/G/2 -> ./G(n)-PS[8]/2")
    assert "servers       prefill at load 0.6" in result.stdout
    assert "KV transfer of 0.002 s" in " ".join(result.stdout.split())
