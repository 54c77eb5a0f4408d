"""A real Prometheus scrapes a gateway under load: what the dashboards and the rules ask is
answered, finite, in the right unit.

vLLM's own metrics: tests/server/test_real_gateway.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from grafana.agreement import VERDICTS
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.run import run_load
from kendall.queueing.arrivals.timetable import draw
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.measurement.record import Record, read_run
from tests.eventually import eventually
from tests.grafana.asked import FILES, Asked, faults, filled, queries_of
from tests.prometheus_server import ROOT, Prometheus
from tests.serving import started

# docs/why/live-validation.md
LAW = "k1=1.8e-05,k2=0.0044,k3=0.00013,k4=0.0035,kp=5.4e-05,cv=0.08,turnaround=0.0095"
POLICIES = ("dynamic", "continuous:max_batch_size=4")
RATE = 15.0  # requests a second: far from unstable, also on a machine that does something else
AT_LEAST, AT_MOST = (
    6.0,
    60.0,
)  # seconds of load under each policy: until the gateway predicts, and Prometheus has seen it
SEEN = 3  # scrapes


@dataclass
class Watched:
    """A run that is over, and the Prometheus that saw it."""

    prometheus: Prometheus
    start: float  # Unix time of the first arrival, roughly
    end: float
    records: list[Record]

    @property
    def longest(self) -> float:
        """Seconds, of any sojourn."""
        return max(
            record.sojourn_time for record in self.records if record.sojourn_time is not None
        )

    def answer(self, asked: Asked) -> list[dict[str, Any]]:
        """As Grafana would ask: over the run, or at its end."""
        expr = filled(asked.expr, window="5s", shown=f"{round(self.end - self.start)}s")
        return (
            self.prometheus.at(expr, self.end)
            if asked.instant
            else self.prometheus.over(expr, self.start, self.end)
        )

    def faults(self, asked: Asked) -> list[str]:
        """Empty: the panel can be drawn."""
        return list(faults(asked, self.answer(asked), self.longest))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """An emulated engine with the tiny model's law (what vLLM adds is tested where a real one
    runs anyway); one policy after the other.
    """
    folder = tmp_path_factory.mktemp("watched")
    port = free_port(0)
    records = folder / "records.jsonl"
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--policy",
        POLICIES[0],
        "--latency",
        LAW,
        "--allow-forced-lengths",
    ]
    arguments += [
        "--prediction-interval",
        "1",
        "--what-if-interval",
        "5",
        "--max-output-tokens",
        "24",
        "--record-file",
        str(records),
    ]
    gateway = GatewayProcess(arguments, port, folder / "gateway.log")
    with Prometheus(folder, f"127.0.0.1:{port}") as prometheus, started(gateway) as runner:
        start, end = runner.run(_drive(gateway, prometheus))
        yield Watched(prometheus, start, end, read_run(records)[1])


async def _drive(gateway: GatewayProcess, prometheus: Prometheus) -> tuple[float, float]:
    """Load under each policy. Returns when it began and ended."""
    target = Target(base_url=gateway.url, model="tiny", max_tokens=32)
    lengths, prompts = (
        parse_distribution("uniform:low=1,high=31"),
        parse_distribution("deterministic:value=32"),
    )
    start = _unix_time()
    for number, policy in enumerate(POLICIES):
        await gateway.ask("PUT", "/admin/policy", {"policy": policy})
        timetable = draw(RATE, round(RATE * AT_MOST), number, prompts, lengths)
        load = asyncio.create_task(run_load(target, timetable, seed=number))
        await _predicts(gateway, policy)
        await _is_scraped(prometheus)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
    await gateway.ask("GET", "/admin/state")  # writes the records out
    return start, _unix_time()


async def _predicts(gateway: GatewayProcess, policy: str) -> None:
    """Return once the gateway shows a prediction for this policy beside what it observed, and
    what-ifs of others.
    """
    await asyncio.sleep(AT_LEAST / 2)
    async with asyncio.timeout(AT_MOST - AT_LEAST):
        while True:
            found = await gateway.ask("GET", "/admin/prediction")
            prediction = found["prediction"]
            if (
                found["what_if"]
                and prediction
                and prediction["policy"] == policy
                and prediction["comparison"]["error"] is not None
            ):
                break
            await asyncio.sleep(0.3)


async def _is_scraped(prometheus: Prometheus) -> None:
    """Return once Prometheus has scraped what the gateway shows now, and a little later."""
    since = _unix_time()

    async def often_enough() -> bool:
        return await asyncio.to_thread(prometheus.scrapes_since, since) >= SEEN

    await eventually(often_enough, seconds=AT_MOST)


def _unix_time() -> float:
    """Prometheus' own clock; the banned `time.time` is for code that measures."""
    return datetime.datetime.now(tz=datetime.UTC).timestamp()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_returns_finite_data_in_its_unit(
    watched: Watched, path: Path
) -> None:
    found = [
        fault for asked in queries_of(path) if not asked.vllm for fault in watched.faults(asked)
    ]
    assert found == []


def test_every_recording_rule_records_finite_data(watched: Watched) -> None:
    rules = yaml.safe_load((ROOT / "docker/rules.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        unit = "percentunit" if "error" in rule["record"] else "s"
        assert watched.faults(Asked("rules.yml", rule["record"], rule["record"], unit)) == []
    assert {rule["health"] for rule in watched.prometheus.rules()} == {"ok"}


def test_what_prometheus_computes_is_what_happened(watched: Watched) -> None:
    """The delay's mean over the run, the arrival rate and the mean batch against the gateway's
    own records.
    """
    of_policy = [record for record in watched.records if record.policy == POLICIES[0]]
    delays = [
        record.queueing_delay or 0.0
        for record in of_policy
        if record.dispatched_at is not None  # not those that were waiting when the load ended
    ]

    def value(expr: str) -> float:
        (series,) = watched.prometheus.at(expr, watched.end)
        return float(series["values"][0][1])

    mine = f'{{policy="{POLICIES[0]}"}}'
    total, count = (
        value(f"kendall_queueing_delay_seconds_{part}{mine}") for part in ("sum", "count")
    )
    assert count == len(delays)
    assert math.isclose(total, sum(delays), rel_tol=1e-6)
    completed = value(f'kendall_requests_total{{policy="{POLICIES[0]}", outcome="completed"}}')
    assert completed == sum(record.outcome == "completed" for record in of_policy)
    clipped = value(f"kendall_clipped_requests_total{mine}")
    assert clipped == sum(bool(record.clipped) for record in of_policy) > 0
    tokens = sum(record.output_tokens or 0 for record in of_policy if record.outcome == "completed")
    assert tokens == value(f"kendall_output_tokens_sum{mine}")


OVERVIEW = {
    "Observed": ("observed", "mean"),
    "Model, same requests": ("checked", "modelled"),
    "Forecast": ("predicted", "mean"),
}


def test_the_first_row_of_the_overview_shows_what_the_gateway_compared(watched: Watched) -> None:
    """The queueing delay of the one policy, the sojourn time of the other; the gateway's verdict;
    nothing where Prometheus knows nothing yet.
    """
    (path,) = (path for path in FILES if path.stem == "kendall")
    panels = {asked.panel: asked for asked in queries_of(path) if asked.reference == "A"}
    for side, (metric, stat) in OVERVIEW.items():
        (now,) = watched.answer(panels[side])
        assert now["metric"]["quantity"] == "sojourn time", POLICIES[1]
        gauge = f'kendall_{metric}_sojourn_time_seconds{{stat="{stat}"}}'
        (same,) = watched.prometheus.at(gauge, watched.end)
        assert now["values"] == same["values"]
        over = watched.answer(dataclasses.replace(panels[side], instant=False))
        seen = {series["metric"]["quantity"] for series in over}
        assert seen == {"queueing delay", "sojourn time"}, "one policy each"
    (verdict,) = watched.answer(panels["Verdict"])
    word, _ = VERDICTS[verdict["values"][0][1]]
    (shown,) = watched.prometheus.at("kendall_check_verdict == 1", watched.end)
    assert word == shown["metric"]["verdict"]
    for panel in (*OVERVIEW, "Verdict"):
        expr = filled(panels[panel].expr, window="5s", shown="60s")
        assert watched.prometheus.at(expr, watched.start - 3600) == []


def test_each_switch_of_the_policy_is_marked(watched: Watched) -> None:
    (mark,) = (asked for asked in queries_of(FILES[0]) if asked.panel.startswith("annotation"))
    marked = {series["metric"]["policy"] for series in watched.answer(mark)}
    assert marked == set(POLICIES)


def broken(asked: Asked, **changes: str) -> Asked:
    return dataclasses.replace(asked, **changes)


def test_a_broken_panel_is_found(watched: Watched) -> None:
    """A metric, a label or a function that is not there, milliseconds under "s", a mean of
    nothing, an expression that is none.
    """
    (path,) = (path for path in FILES if path.stem == "kendall")
    good = next(asked for asked in queries_of(path) if asked.panel == "Queueing delay")
    assert watched.faults(good) == []
    assert (
        "no data"
        in watched.faults(broken(good, expr=good.expr.replace("queueing_delay", "queuing_delay")))[
            0
        ]
    )
    assert (
        "no data"
        in watched.faults(
            broken(good, expr=good.expr.replace("policy=~", "polcy=~").replace("$policy", "x"))
        )[0]
    )
    assert "unit 's'" in watched.faults(broken(good, expr=f"1000 * ({good.expr})"))[0]
    assert "not finite" in watched.faults(broken(good, expr="0 * kendall_queue_length / 0"))[0]
    with pytest.raises(ValueError, match="parse error"):
        watched.faults(broken(good, expr=good.expr.removesuffix("0") + ")"))
