"""Fleets whose number of replicas a rule sets: the HPA's rule, what is conserved, the bill."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import Timetable, save_timetable
from kendall.queueing.choosing.autoscaling import FixedReplicas, ForecastScaler, Hpa, within
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.commands.plan_cli import app
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fleet import FleetRun, ScalingDecision, Seen, serve_by_fleet
from kendall.queueing.simulation.recorded import recorded_model, simulate_recorded

LAW = "k1=0,k2=0,k3=0.001,k4=0.05,kp=1e-4"
GOAL = Objective(name="slo", **parse_slos("p99_queueing_delay<=2s"))
SECONDS = 1500.0


def traffic(rates: tuple[float, ...], seed: int = 1) -> Timetable:
    """Poisson arrivals, each rate for an equal part of the time; answers of about 100 tokens."""
    rng, part = np.random.default_rng(seed), SECONDS / len(rates)
    at = [
        np.sort(number * part + part * rng.random(rng.poisson(rate * part)))
        for number, rate in enumerate(rates)
    ]
    instants = np.concatenate(at)
    lengths = rng.geometric(0.01, instants.size)
    return Timetable(instants, rng.integers(50, 500, instants.size), lengths)


def queue(trace: Timetable) -> Queue:
    return recorded_model(trace, "continuous:max_batch_size=8", LAW)


@dataclass(frozen=True)
class Steps:
    """Sets these numbers, one after the other and then the last again."""

    numbers: tuple[int, ...]
    every: float = 40.0

    def decide(self, seen: Seen) -> ScalingDecision:
        number = self.numbers[min(len(seen.earlier), len(self.numbers)) - 1]
        return ScalingDecision(at=seen.now, asked=number, replicas=number)


def seen(
    waiting: int, ready: int, *earlier: ScalingDecision, starting: int = 0, now: float = 1e4
) -> Seen:
    none = np.zeros(0, dtype=np.int64)
    return Seen(
        now=now,
        ready=ready,
        starting=starting,
        waiting=waiting,
        arrived_at=np.zeros(0),
        prompt_tokens=none,
        output_tokens=none,
        earlier=earlier,
    )


@pytest.mark.parametrize(
    ("metric", "target", "replicas", "desired"),
    [
        (0.2, 0.1, 4, 8),  # "if the current metric value is 200m, and the desired value is 100m"
        (0.05, 0.1, 4, 2),  # "if the current value is instead 50m, you'll halve the number"
        (90.0, 75.0, 50, 60),  # the example of the configurable tolerance, KEP-4951
        (1.09, 1.0, 5, 5),  # within the tolerance of 0.1
        (0.91, 1.0, 5, 5),
        (1.11, 1.0, 5, 6),  # ceil(5.55)
        (0.0, 5.0, 7, 1),  # never fewer than minReplicas, 1
        (0.3, 0.1, 1, 3),  # 0.3 / 0.1 is above 3 in binary, and is not 4
    ],
)
def test_the_hpa_desires_what_the_documentation_of_kubernetes_says(
    metric: float, target: float, replicas: int, desired: int
) -> None:
    assert Hpa(target=target).desired(metric, replicas) == desired


@pytest.mark.parametrize(
    ("metric", "starting", "desired"),
    [
        (30.0, 2, 6),  # two that start count as 0: 60 waiting, 10 for each of 6
        (15.0, 2, 4),  # 30 / 4 is below the target: the direction would turn, nothing changes
        (1.0, 2, 3),  # they count as at the target: (2 + 20) / 4 / 10 of 4
        (10.5, 0, 2),
    ],
)
def test_replicas_that_start_dampen_the_hpa(metric: float, starting: int, desired: int) -> None:
    assert Hpa(target=10.0).desired(metric, 2, starting) == desired


def test_the_hpa_goes_down_to_the_most_of_five_minutes_and_up_by_four_or_twice() -> None:
    rule, now = Hpa(target=1.0), 1e4
    old = ScalingDecision(at=now - 301, asked=9, replicas=9)
    late = ScalingDecision(at=now - 200, asked=6, replicas=9)
    assert rule.decide(seen(0, 9, old, late, now=now)).replicas == 6
    assert rule.decide(seen(0, 9, old, now=now)).replicas == 1
    assert rule.decide(seen(0, 4, late, now=now)).replicas == 4, "held, not raised"
    assert rule.decide(seen(1000, 2, now=now)).replicas == 6
    assert rule.decide(seen(1000, 9, now=now)).replicas == 18


def check_conserved(run: FleetRun, trace: Timetable, start_up: float) -> None:
    served = run.run
    assert served.arrived_at.tolist() == trace.intended_at.tolist()
    assert served.output_tokens.tolist() == trace.output_tokens.tolist()
    assert np.isfinite(served.released_at).all()
    assert (served.dispatched_at >= served.arrived_at).all()
    at, number = run.paid()
    area = float(np.sum(np.diff(at) * number[:-1]))
    assert run.replica_seconds == pytest.approx(area, rel=1e-12)
    assert number[-1] == 0
    for dispatched, released, place in zip(
        served.dispatched_at, served.released_at, served.server_id, strict=True
    ):
        owners = [
            each
            for each in run.replicas
            if each.place == place
            and each.ready_at <= dispatched <= each.given_up_at
            and released <= each.ended_at
        ]
        assert len(owners) == 1, "by one replica, which is paid for and has started"
    for each in run.replicas:
        assert each.ready_at - each.ordered_at in (0.0, pytest.approx(start_up))
        assert each.ordered_at <= each.given_up_at <= each.ended_at or each.ended_at <= run.seconds


def test_every_request_ends_once_and_the_replica_seconds_add_up() -> None:
    trace = traffic((1.0, 3.0, 0.5))
    numbers = (2, 5, 1, 4, 4, 2, 6, 1, 3)
    run = serve_by_fleet(queue(trace), trace, Steps(numbers), first=2, largest=6, start_up=25.0)
    check_conserved(run, trace, 25.0)
    assert len(run.replicas) == 2 + 3 + 3 + 4 + 2
    given_up = [each for each in run.replicas if each.given_up_at < math.inf]
    assert any(each.ended_at > each.given_up_at for each in given_up), "one drained"


def test_a_fleet_that_nobody_changes_is_the_queue_with_so_many_servers() -> None:
    trace = traffic((1.5,))
    model = queue(trace)
    run = serve_by_fleet(model, trace, FixedReplicas(replicas=2), first=2, largest=2, start_up=60.0)
    expected = simulate_recorded(model.but(servers=2), trace)
    delays = run.run.queueing_delay
    assert delays.mean() == pytest.approx(expected.queueing_delay.mean, abs=1e-9)
    assert np.quantile(delays, 0.99) == pytest.approx(expected.queueing_delay.p99, abs=1e-9)
    assert run.replica_seconds == pytest.approx(2 * run.seconds)


def test_an_ordered_replica_serves_after_its_start_up_and_not_before() -> None:
    trace = traffic((4.0,))
    run = serve_by_fleet(queue(trace), trace, Steps((1, 3)), first=1, largest=3, start_up=70.0)
    later = run.run.dispatched_at[run.run.server_id > 0]
    assert later.min() == 80.0 + 70.0, "ordered by the second decision, with a queue to serve"


def test_of_a_constant_rate_the_forecast_asks_for_what_plan_says_and_its_margin() -> None:
    trace = traffic((3.0,))
    model = queue(trace)
    planned = planned_servers(trace)
    rule = ForecastScaler(model, GOAL, start_up=60.0, largest=3 * planned)
    run = serve_by_fleet(model, trace, rule, first=planned, largest=3 * planned, start_up=60.0)
    assert within(run.run, GOAL.slos[0]).mean() >= 0.99
    assert set(paid_at(run, np.arange(950.0, SECONDS))) <= {planned, planned + 1}


def test_more_traffic_has_more_replicas_and_less_has_fewer() -> None:
    trace = traffic((4.0, 4.0, 1.0, 1.0))
    model = queue(trace)
    most = planned_servers(trace)
    rule = ForecastScaler(model, GOAL, start_up=30.0, largest=most)
    run = serve_by_fleet(model, trace, rule, first=most, largest=most, start_up=30.0)
    assert paid_at(run, np.array([600.0])) == [most]
    assert max(paid_at(run, np.arange(1300.0, SECONDS))) < most
    assert within(run.run, GOAL.slos[0]).mean() >= 0.99


@dataclass(frozen=True)
class ByHand:
    """The forecast of the class's docstring, written once more: requests one by one, each stretch
    anew. A service takes 0.5 s a token, the SLO is a delay of 4 s at most for 9 in 10.
    """

    arrived: np.ndarray
    tokens: np.ndarray
    largest: int
    ahead: int  # decisions, of 15 s each, until a replica that is ordered serves

    def late(self, stretch: int) -> tuple[list[int], int]:
        """Late requests of a stretch with 1, 2, .. replicas, and its requests."""
        begin = 150 + 15 * stretch
        end = begin + 15 * self.ahead
        found = []
        for replicas in range(1, self.largest + 1):
            free, late, number = [-math.inf] * replicas, 0, 0
            for at, count in zip(self.arrived, self.tokens, strict=True):
                if not max(0.0, begin - 600.0) <= at < end:
                    continue
                start = max(at, free.pop(free.index(min(free))))
                free.append(start + 0.5 * count)
                number += at >= begin
                late += at >= begin and start - at > 4
            found.append(late)
        return found, number

    def needed(self, stretches: list[tuple[list[int], int]]) -> int:
        """The fewest with which one in ten is late, of so many stretches."""
        number = sum(each for _, each in stretches)
        for replicas in range(1, self.largest + 1):
            late = sum(each[replicas - 1] for each, _ in stretches)
            if stretches and late <= 0.1 * number + 1e-9:
                return replicas
        return self.largest

    def asked(self, now: float) -> int:
        known = [self.late(k) for k in range(int((now - 150 - 15 * self.ahead) // 15) + 1)]
        answers = []
        for window in (75, 150, 300, 600, 1200, 3600):

            def said(behind: int, window: int = window) -> int:
                return self.needed(known[max(0, behind - window // 15) : max(0, behind)])

            hour = range(max(self.ahead, len(known) - 240), len(known))
            allowed = 0.1 * sum(known[k][1] for k in hour)
            for margin in range(self.largest + 1):
                numbers, *_, now_number = (
                    [self.with_margin(said(k - self.ahead + 1), margin) for k in hour],
                    self.with_margin(said(len(known)), margin),
                )
                late = sum(known[k][0][n - 1] for k, n in zip(hour, numbers, strict=True))
                if late <= allowed + 1e-9:
                    break
            answers.append((float(np.mean(numbers)), now_number))
        return min(answers)[1]

    def with_margin(self, replicas: int, margin: int) -> int:
        return min(self.largest, replicas + max(margin, math.ceil(0.1 * replicas)))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_forecast_is_that_of_its_record(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = np.repeat(rng.choice([0.05, 0.2, 0.45], 9), 100)
    arrived = np.flatnonzero(rng.random(900) < rates) + rng.random()
    tokens = rng.integers(5, 25, arrived.size)
    model = Queue.read("single", "uniform:low=5,high=24", "a=0.5,c=0")
    goal = Objective(name="slo", **parse_slos("p90_queueing_delay<=4s"))
    start_up, largest = 20.0, 7
    by_hand = ByHand(arrived, tokens, largest, ahead=3)
    rule = ForecastScaler(model, goal, start_up=start_up, largest=largest, seed=seed)
    none = np.zeros(arrived.size, dtype=np.int64)

    def decide(now: float, waiting: int = 0, *earlier: ScalingDecision) -> int:
        past = arrived < now
        given = Seen(
            now=now,
            ready=2,
            starting=1,
            waiting=waiting,
            arrived_at=arrived[past],
            prompt_tokens=none[past],
            output_tokens=tokens[past],
            earlier=earlier,
        )
        made = rule.decide(given)
        assert made.at == now
        assert made.replicas == max([made.asked, *[each.asked for each in earlier[-1:]]])
        return made.asked

    assert decide(839.0) == 3, "a record of 600 s: what there is"
    for now in (840.0, 900.0):
        assert decide(now) == by_hand.asked(now)
    old, recent = (ScalingDecision(at=900 - each, asked=7, replicas=7) for each in (20, 19))
    assert decide(900.0, 0, old, recent) == by_hand.asked(900.0)
    last = np.flatnonzero(arrived < 890)[-1]
    behind = arrived.size - last
    assert decide(900.0, behind) == largest, "one has waited beyond its bound"


def paid_at(run: FleetRun, instants: np.ndarray) -> list[int]:
    """Replicas that are paid for."""
    at, number = run.paid()
    return list(number[np.searchsorted(at, instants, "right") - 1].tolist())


def planned_servers(trace: Timetable) -> int:
    model = queue(trace)
    return next(
        number
        for number in range(1, 40)
        if GOAL.kept(simulate_recorded(model.but(servers=number), trace))
    )


def run_plan(trace: Path, *more: str) -> Result:
    slo = () if "--slo" in more else ("--slo", "p99_queueing_delay<=2s")
    arguments = ["--trace", str(trace), *slo, "--latency", LAW, "--max-num-seqs", "8", *more]
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "timetable.jsonl"
    save_timetable(path, traffic((1.5, 0.3)))
    return path


def test_plan_prints_the_bill_and_one_seed_is_one_bill(recorded: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    more = ("--start-up", "30s", "--hpa-waiting", "1,16", "--seed", "5")
    found = run_plan(recorded, *more, "--json", "--plot", str(picture))
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    bill, planned = told["bill"], told["best"]["servers"]
    rules = [line["rule"] for line in bill["lines"]]
    assert rules == ["peak pool", "forecast", "HPA, 1 waiting", "HPA, 16 waiting"]
    peak = bill["lines"][0]
    assert (peak["fewest"], peak["most"], peak["cost"], peak["kept"]) == (planned, planned, 1, True)
    for line in bill["lines"]:
        assert line["cost"] == pytest.approx(line["replica_seconds"] / peak["replica_seconds"])
        assert line["fewest"] <= line["mean"] <= line["most"]
        assert line["kept"] is (line["attained"] >= 0.99)
    assert bill["seed"] == 5
    assert picture.read_text().count("<svg") == 1
    assert json.loads(run_plan(recorded, *more, "--json").stdout) == told
    text = run_plan(recorded, *more).stdout
    assert "the bill of p99_queueing_delay=2 over" in text
    assert f"{peak['attained']:.2%}" in text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--slo", "mean_queueing_delay<=2s"), "got --slo mean_queueing_delay"),
        (("--slo", "p99_itl<=2s"), "expected a quantile of queueing_delay, sojourn_time, "),
        (("--slo", "soon"), "expected mean_QUANTITY=TIME or pNN_QUANTITY=TIME"),
        (("--hpa-waiting", "1,many"), "got --hpa-waiting 1,many; expected numbers > 0"),
        (("--hpa-waiting", "0"), "got --hpa-waiting 0; expected numbers > 0"),
        (("--seed", "-1"), "seed"),
        (("--routing", "random"), "got --start-up with --routing random; expected central"),
    ],
)
def test_bad_terms_say_what_was_expected(recorded: Path, more: tuple[str, ...], says: str) -> None:
    found = run_plan(recorded, "--start-up", "30s", *more)
    assert isinstance(found.exception, SpecError)
    assert says in str(found.exception)


def test_a_bill_needs_a_trace_with_time_stamps(tmp_path: Path) -> None:
    untimed = tmp_path / "untimed.csv"
    untimed.write_text("ContextTokens,GeneratedTokens\n100,20\n")
    found = run_plan(untimed, "--start-up", "30s")
    assert isinstance(found.exception, SpecError)
    assert "untimed.csv, line 1: got " in str(found.exception)
    rate = ["--arrival-rate", "1", "--output-tokens", "geometric:mean=20", "--latency", LAW]
    found = CliRunner().invoke(app, [*rate, "--slo", "p99_ttft<=2s", "--start-up", "30s"])
    assert isinstance(found.exception, SpecError)
    assert "got --start-up without --trace; expected a recorded trace" in str(found.exception)
