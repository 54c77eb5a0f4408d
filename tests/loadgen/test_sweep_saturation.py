"""Searches: the bracket closes around where probes turn from passing to failing."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayError, free_port
from kendall.loadgen.sweep import search as search_module
from kendall.loadgen.sweep.grid import SweepCell
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.saturation import RateBracket, bisect, predicted_rate, probe_requests
from kendall.loadgen.sweep.search import Search, search_all
from kendall.loadgen.sweep.slo import parse_slo
from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Header, Record, write_run
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from tests.loadgen.sweeping import LAW, events, finish, start


def model(policy: str) -> Queue:
    return Queue.read(
        parse_policy(policy),
        parse_distribution("uniform:low=2,high=10"),
        parse_law(LAW),
        max_num_seqs=16,
    )


@pytest.mark.parametrize("true", [1.0, 0.93, 1.08, 0.31, 3.7])
@pytest.mark.parametrize("tolerance", [0.05, 0.3])
def test_the_bracket_holds_the_true_rate_and_is_narrow(true: float, tolerance: float) -> None:
    """Also where the prediction, 1, is far off."""
    probed = []

    async def passes(rate: float) -> bool:
        probed.append(rate)
        return rate <= true

    found = asyncio.run(bisect(passes, 1.0, tolerance))
    assert found.low <= true < found.high
    assert found.within(tolerance)
    assert found.probes == len(probed) == len(set(probed))
    if 0.92 < true < 1.09:
        assert found.probes <= 5


def test_a_search_that_never_fails_or_never_passes_ends() -> None:
    async def always(rate: float) -> bool:
        return True

    async def never(rate: float) -> bool:
        return False

    assert asyncio.run(bisect(always, 1.0, 0.05, most=6)).high == math.inf
    assert asyncio.run(bisect(never, 1.0, 0.05, most=6)).low == 0.0


def test_under_fixed_the_predicted_rate_lies_beyond_rates_where_batches_form_too_slowly() -> None:
    """The delay falls with the rate before it rises: at half the largest stable rate it is above
    the bound, at higher ones below.
    """
    fixed = model("fixed:batch_size=4")
    top = fixed.largest_stable_rate

    def delay(load: float) -> float:
        found = predict_model(fixed, load * top).queueing_delay.mean
        assert found is not None
        return found

    slow, lowest = delay(0.5), min(delay(load) for load in (0.6, 0.65, 0.7, 0.75, 0.8))
    assert lowest < slow
    bound = (lowest + slow) / 2
    rate = predicted_rate(fixed, parse_slo(f"mean_queueing_delay={bound * 1e3:.6f}ms"))
    assert rate is not None
    assert 0.6 < rate / top < 1
    assert delay(rate / top) == pytest.approx(bound, rel=1e-3)
    assert predicted_rate(fixed, parse_slo(f"mean_queueing_delay={lowest * 1e3 / 2:.6f}ms")) is None


@pytest.mark.parametrize(("high", "within"), [(1.0499, True), (1.0501, False)])
def test_a_bracket_is_narrow_up_to_its_tolerance(high: float, within: bool) -> None:
    assert RateBracket(1.0, high, 5).within(0.05) == within
    assert RateBracket(20.0, 20 * high, 5).within(0.05) == within
    assert not RateBracket(0.0, high, 5).within(0.05), "nothing passed"
    assert not RateBracket(1.0, math.inf, 5).within(0.05), "nothing failed"


def searching(goal: str, folder: Path = Path()) -> Search:
    """A search at a tolerance of 5 %, which asks nobody."""
    plan = SweepPlan(loads=(0.5,), num_prompts=100, tolerance=0.05)
    return Search(
        SimpleNamespace(plan=plan, store=SimpleNamespace(folder=folder)), "single", None, goal
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "kept"), [(0.0249, True), (0.0251, False), (-0.5, True)])
def test_a_probe_passes_where_it_grows_by_less_than_half_the_tolerance(
    share: float, kept: bool
) -> None:
    search = searching("saturation")
    assert search.kept({"ended": "complete", "growth": {"share": share}}) == kept
    assert not search.kept({"ended": "unstable", "growth": {"share": share}})
    assert not search.notes
    assert search.kept({"ended": "complete", "growth": None})
    assert search.notes == ["a probe was too short to be judged and passed"]


class ProbedSweep:
    """A sweep whose probes are stable up to a rate, on a machine that takes 1.1 times the law; one
    that stops has no result.
    """

    def __init__(self, true: float, *, stops: bool = False, cut: bool = False) -> None:
        self.plan = SweepPlan(loads=(), policies=("single",), find_saturation=True, tolerance=0.05)
        self.true, self.stops, self.cut = true, stops, cut
        self.rig = SimpleNamespace(basis=self)
        self.status = SimpleNamespace(left_after=1.0)
        self.journal = SimpleNamespace(events=[])
        self.cells: dict[str, SweepCell] = {}
        self.speed = 1.0

    store = progress = property(lambda self: self)

    def model(self, policy: str, limit: int | None) -> Queue:
        assert limit is None
        one = model(policy)
        return one.but(law=one.engine.law.at_speed(self.speed))

    def at_speed(self, speed: float) -> ProbedSweep:
        slower = ProbedSweep(self.true)
        slower.speed = speed
        return slower

    def count(self, model: Queue, rate: float, needed: int) -> tuple[int, bool]:
        return needed, self.cut

    async def measure(self, cell: SweepCell, label: str) -> None:
        assert label == f"saturation, probe {len(self.cells) + 1}"
        self.cells[cell.name] = cell

    def of(self, name: str) -> SimpleNamespace:
        if self.stops:
            return SimpleNamespace(done=None, reason="the gateway left")
        share = 0.0 if self.cells[name].rate <= self.true else 0.2
        done = {"ended": "complete", "growth": {"share": share}, "speeds": [1.1, None]}
        return SimpleNamespace(done=done, reason=None)

    def append(self, event: str, **fields: object) -> None:
        self.journal.events.append({"event": event, **fields})


def searched(sweep: ProbedSweep) -> None:
    """Everything that the plan asks for: the saturation of one policy."""
    asyncio.run(search_all(sweep))  # type: ignore[arg-type]


def test_a_search_writes_down_its_bracket_beside_the_prediction_at_the_machines_speed() -> None:
    stable = model("single").largest_stable_rate
    sweep = ProbedSweep(0.9 * stable)
    searched(sweep)
    (found,) = sweep.journal.events
    assert found["low"] <= 0.9 * stable < found["high"] <= 1.05 * found["low"]
    assert found["predicted"] == pytest.approx(stable)
    assert found["speed"] == pytest.approx(1.1)
    assert found["predicted_at_speed"] == pytest.approx(stable / 1.1)
    assert found["probes"] == len(sweep.cells) > 2
    assert found["note"] is None
    assert all(cell.evenly and cell.purpose == "saturation" for cell in sweep.cells.values())
    assert sweep.status.left_after == 0.0
    searched(sweep)
    assert len(sweep.journal.events) == 1, "one that is done is not done again"


def test_a_search_with_short_probes_says_so_and_one_that_stops_can_go_on() -> None:
    sweep = ProbedSweep(0.95 * model("single").largest_stable_rate, cut=True)
    searched(sweep)
    (found,) = sweep.journal.events
    assert found["note"] == (
        "probes shorter than they should be (--cell-limit): the bracket may be off"
    )
    with pytest.raises(GatewayError, match="under single stopped: the gateway left; the same"):
        searched(ProbedSweep(0.5, stops=True))


@pytest.mark.parametrize(("delay", "kept"), [(0.2499, True), (0.25, True), (0.2501, False)])
def test_a_probe_keeps_an_slo_up_to_its_bound(delay: float, kept: bool, tmp_path: Path) -> None:
    """Of 100 requests the first 5 are warm-up: they may be as late as they like."""
    delays = [9.0] * 5 + [delay] * 95
    records = [
        Record(request_id=str(i), outcome="completed", arrived_at=float(i), queueing_delay=each)
        for i, each in enumerate(delays)
    ]
    write_run(tmp_path / "x.gateway.jsonl", Header(writer="gateway"), records)
    for stat in ("mean", "p50", "p99"):
        search = searching(f"{stat}_queueing_delay=250ms", tmp_path)
        assert (
            search.kept({"ended": "complete", "files": ["x.gateway.jsonl"], "growth": None}) == kept
        ), stat


def test_the_predicted_rate_is_where_the_prediction_meets_the_bound() -> None:
    single = model("single")
    slo = parse_slo("mean_queueing_delay=30ms")
    rate = predicted_rate(single, slo)
    assert rate is not None
    assert predict_model(single, rate).queueing_delay.mean == pytest.approx(0.03, rel=1e-3)
    assert predicted_rate(single, None) == single.largest_stable_rate
    assert (
        predicted_rate(model("continuous:max_batch_size=4"), parse_slo("p99_sojourn_time=1s"))
        is None
    )


def test_narrow_tolerances_take_longer_probes() -> None:
    assert (
        probe_requests(model("single"), 1.0, 0.02)
        > 2 * probe_requests(model("single"), 1.0, 0.05)
        >= 600
    )
    assert probe_requests(model("single"), 500.0, 0.05) == 7500, "and no less than fifteen seconds"
    one = model("single")
    cv2 = one.requests.output_tokens.moment(2) / one.requests.output_tokens.mean**2 - 1
    assert probe_requests(one, 1.0, 0.04) == pytest.approx((3.5 / 0.02) ** 2 * cv2, abs=1)
    scattered = one.but(law=dataclasses.replace(one.engine.law, cv=0.6))
    assert probe_requests(scattered, 1.0, 0.04) == pytest.approx(
        (3.5 / 0.02) ** 2 * (cv2 + 0.36), abs=1
    )


@pytest.mark.slow
def test_a_saturation_search_on_the_emulated_engine_brackets_the_laws_largest_stable_rate(
    tmp_path: Path,
) -> None:
    """Steps of ten milliseconds: the machine's own noise is small beside them."""
    law = "k1=0.0003,k2=0.001,k3=0.00002,k4=0.01"
    common = (
        "--engine",
        "emulated",
        "--latency",
        law,
        "--output-tokens",
        "deterministic:value=6",
        "--bracket",
        "1",
        "--json",
    )
    goal = (
        "capped:max_batch_size=4",
        "--find-saturation",
        "--tolerance",
        "0.1",
        "--duration",
        "8",
        "--port",
        str(free_port(0)),
    )
    result = finish(start(tmp_path / "sweep", *goal, *common, own=False))
    (search,) = result["searches"]
    assert search["low"] * 0.95 < search["predicted_at_speed"] < search["high"] * 1.05, search
    assert search["high"] / search["low"] <= 1.1
    assert search["predicted"] / search["predicted_at_speed"] == pytest.approx(
        search["speed"], rel=1e-6
    )
    assert len(events(tmp_path / "sweep", "done")) == search["probes"]


@pytest.mark.slow
def test_an_slo_search_keeps_the_objective_at_its_lower_end(tmp_path: Path) -> None:
    arguments = (
        "single",
        "--slo",
        "p90_queueing_delay=60ms",
        "--tolerance",
        "0.3",
        "--num-prompts",
        "400",
    )
    result = finish(start(tmp_path / "sweep", *arguments))
    (search,) = result["searches"]
    assert 0 < search["low"] < search["high"] <= 1.3 * search["low"]
    assert search["predicted"] == pytest.approx(
        predicted_rate(model("single"), parse_slo("p90_queueing_delay=60ms"))
    )


def test_a_search_that_is_in_the_journal_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[object, ...]] = []

    class Noted:
        def __init__(self, _: object, *asked: object) -> None:
            self.asked = asked

        async def run(self) -> None:
            ran.append(self.asked)

    monkeypatch.setattr(search_module, "Search", Noted)
    done = {"event": "search", "policy": "single", "max_output_tokens": None, "goal": "saturation"}
    sweep = SimpleNamespace(
        store=SimpleNamespace(journal=SimpleNamespace(events=[{"event": "done"}, done])),
        status=SimpleNamespace(left_after=1.0),
        plan=SimpleNamespace(
            searches=[("single", None, "saturation"), ("dynamic", 8, "saturation")]
        ),
    )
    asyncio.run(search_module.search_all(sweep))  # type: ignore[arg-type]
    assert ran == [("dynamic", 8, "saturation")]
    assert sweep.status.left_after == 0.0
