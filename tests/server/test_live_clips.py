"""The delay under another token limit, foreseen by a gateway on the real engine and then measured there.

A lower limit is answered from the window alone; a higher one, beyond which no length was seen, only under a named family. All
runs have the same arrivals and lengths. What is foreseen holds at the speed of the run before: runs between which the engine's speed
moved by more than `STEADY` are measured again, as AGREEMENT's noise gate has it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadgen.arrivals import Poisson
from queueing.distributions import parse_distribution
from queueing.record import Record
from tests.server.live_harness import Look, Site, looked, real_site, records_of, sent

log = logging.getLogger("tests.live")
LONG = parse_distribution("lognormal:mu=2.5,sigma=0.6")  # median 12 tokens, 90th percentile 26
CLIENTS = 200  # tokens: the clients' own limit
POLICY, LOAD, SECONDS = "dynamic", 0.5, 100.0
WITHIN, STEADY, TRIES = 0.10, 0.05, 3
WHAT_IF = "/admin/prediction?what_if=true"
ADVICE = "/admin/advice?objective=clipped&max_clipped_fraction=0.1&target=max-output-tokens"
NAMED = ADVICE + "&family=lognormal"


@dataclass(frozen=True)
class Run:
    """One limit in force for a while."""

    limit: int
    look: Look
    records: list[Record]

    @property
    def delay(self) -> float:
        """Mean queueing delay, seconds."""
        return float(self.look["observed_queueing_delay"]["value"])

    @property
    def half_width(self) -> float:
        """Of its 95 % interval, relative."""
        observed = self.look["observed_queueing_delay"]
        return float((observed["high"] - observed["low"]) / 2 / observed["value"])

    def __str__(self) -> str:
        return (
            f"limit {self.limit}: {1e3 * self.delay:.2f} ms +-{self.half_width:.1%} of {self.look['n']} at speed {self.look['speed']:.3f}"
        )


async def run_at(site: Site, limit: int, *asked: str) -> Run:
    rate = LOAD * site.capacity(POLICY, LONG.clip(LONG.quantile(0.9)))
    load = sent(site, site.timetable(Poisson(rate), 11, SECONDS, LONG), longest=CLIENTS)
    look = await looked(site, POLICY, load, SECONDS, limit=limit, asked=asked)
    return Run(limit, look, await records_of(site, look["epoch"]))


async def three_runs(site: Site) -> tuple[Run, Run, Run]:
    """At the median; where the family puts the 90th percentile; at the median as known from there."""
    low = await run_at(site, LONG.quantile(0.5), ADVICE, NAMED)
    (advice,) = low.look[NAMED]["advice"]
    high = await run_at(site, advice["best"]["max_output_tokens"], WHAT_IF)
    return low, high, await run_at(site, foreseen(high)["max_output_tokens"])


def foreseen(run: Run) -> dict[str, Any]:
    """The what-if of the lowest of the other limits, which is the median."""
    others = [each for each in run.look[WHAT_IF]["what_if"] if each["policy"] == POLICY and each["max_output_tokens"] != run.limit]
    found: dict[str, Any] = min(others, key=lambda each: each["max_output_tokens"])
    return found


def steady(one: Run, other: Run) -> bool:
    return bool(abs(one.look["speed"] / other.look["speed"] - 1) <= STEADY)


@pytest.mark.engine
@pytest.mark.slow
def test_the_delay_under_another_limit_is_foreseen(tmp_path: Path) -> None:
    lower = higher = None
    for attempt in range(TRIES):
        with real_site(tmp_path / str(attempt), warm=False) as site:  # a new gateway: it has seen no longer answers
            low, high, low_again = site.run(three_runs(site.now()))
        log.info(f"{low}; {high}; {low_again}")
        log.info(f"foreseen at the lower limit: {foreseen(high)['interval']}")
        log.info(f"foreseen at the higher limit: {low.look[NAMED]['advice'][0]['best']}")
        assert_clipped(low, 0.5)
        assert_clipped(high, 0.1)
        lower = next(((high, run) for run in (low_again, low) if run.limit == low_again.limit and steady(high, run)), lower)
        higher = (low, high) if steady(low, high) else higher
        if lower and higher:
            break
    assert lower, f"the engine's speed moved by more than {STEADY:.0%} between the runs, {TRIES} times"
    assert higher, f"the engine's speed moved by more than {STEADY:.0%} between the runs, {TRIES} times"
    assert_foreseen(*lower)
    assert_extrapolated(*higher)


def assert_clipped(run: Run, share: float) -> None:
    """What the limit cut, and nothing else, is marked so: a lower bound of a length."""
    answered = [record for record in run.records if record.outcome == "completed"]
    clipped = [record for record in answered if record.clipped]
    assert {record.output_tokens for record in clipped} == {run.limit}
    assert len(clipped) / len(answered) == pytest.approx(share, abs=0.06)
    assert run.look["estimates"]["output_tokens"]["known_to"] <= run.limit + 1


def assert_foreseen(before: Run, after: Run) -> None:
    what_if = foreseen(before)
    assert after.limit == what_if["max_output_tokens"]
    assert what_if["notes"] == [], "nothing is extrapolated"
    assert after.half_width < WITHIN, after
    assert what_if["queueing_delay"]["mean"] == pytest.approx(after.delay, rel=WITHIN)


def assert_extrapolated(before: Run, after: Run) -> None:
    (unnamed,), (named,) = before.look[ADVICE]["advice"], before.look[NAMED]["advice"]
    assert unnamed["best"] is None, "without a family nothing is said of limits that cut a tenth"
    best = named["best"]
    assert after.limit == best["max_output_tokens"] > before.limit
    assert any(note.startswith("extrapolated") for note in best["notes"])
    assert best["interval"]["low"] <= after.delay <= best["interval"]["high"]
    assert best["interval"]["high"] < 3 * best["interval"]["low"], "so wide an interval covers everything"
