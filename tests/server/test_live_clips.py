"""The delay under another token limit, foreseen by a gateway on the real engine and then measured
there.

A lower limit is answered from the window alone; a higher one, beyond which no length was seen, only
under a named family. All runs have the same arrivals and lengths. What is foreseen holds at the
speed of the run before; where the machine was another one by the run after (a neighbour's work
makes it slower by a fifth, and then not), it is brought to that run's speed by the ratio of two
predictions with the lengths and the rate that were sent. Runs further apart than `FAR` say nothing.
On a machine that wanders one run knows its mean to 10 or 30 %: runs are added, each with its own
gateway and forecast, until their weighted mean is known to `WITHIN`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kendall.policies import parse_policy
from kendall.queueing.arrivals.processes import Poisson
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.window.producer import MOST
from kendall.queueing.measurement.record import Record
from kendall.queueing.prediction import predict
from tests.server.live_harness import (
    BOUND,
    PROMPTS,
    AssessmentJson,
    Site,
    looked,
    real_site,
    records_of,
    sent,
)

log = logging.getLogger("tests.live")
LONG = parse_distribution("lognormal:mu=2.5,sigma=0.6")  # median 12 tokens, 90th percentile 26
CLIENTS = 200  # tokens: the clients' own limit
POLICY, LOAD, SECONDS = "dynamic", 0.5, 100.0
# requests: on a quick machine the window is full before it is so long, and then never is
FULL = 0.9 * MOST
WITHIN, FAR, TRIES = 0.10, 0.20, 4
# of the calibration's cells: an error of the law's shape looks like a speed that depends on the
# limit
REPEATS = 20
WHAT_IF = "/admin/prediction?what_if=true"
ADVICE = "/admin/advice?objective=clipped&max_clipped_fraction=0.1&target=max-output-tokens"
NAMED = ADVICE + "&family=lognormal"


@dataclass(frozen=True)
class Run:
    """One limit in force for a while."""

    limit: int
    assessment: AssessmentJson
    records: list[Record]

    @property
    def delay(self) -> float:
        """Mean queueing delay, seconds."""
        return float(self.assessment["observed_queueing_delay"]["value"])

    @property
    def half_width(self) -> float:
        """Of its 95 % interval, relative."""
        observed = self.assessment["observed_queueing_delay"]
        return float((observed["high"] - observed["low"]) / 2 / observed["value"])

    def __str__(self) -> str:
        return (
            f"limit {self.limit}: {1e3 * self.delay:.2f} ms +-{self.half_width:.1%} of "
            f"{self.assessment['n']} at speed {self.assessment['speed']:.3f}"
        )


def rate_of(site: Site) -> float:
    """Requests/s, the same under every limit."""
    return LOAD * site.capacity(POLICY, LONG.clip(LONG.quantile(0.9)))


async def run_at(site: Site, limit: int, *asked: str) -> Run:
    rate = rate_of(site)
    seconds = min(SECONDS, FULL / rate)
    load = sent(site, site.timetable(Poisson(rate), 11, seconds, LONG), longest=CLIENTS)
    assessment = await looked(site, POLICY, load, seconds, limit=limit, asked=asked)
    return Run(limit, assessment, await records_of(site, assessment["epoch"]))


async def three_runs(site: Site) -> tuple[Run, Run, Run]:
    """At the median; where the family puts the 90th percentile; at the median as known from
    there.
    """
    low = await run_at(site, LONG.quantile(0.5), ADVICE, NAMED)
    (advice,) = low.assessment[NAMED]["advice"]
    high = await run_at(site, advice["best"]["max_output_tokens"], WHAT_IF)
    return low, high, await run_at(site, foreseen(high)["max_output_tokens"])


def foreseen(run: Run) -> dict[str, Any]:
    """The what-if of the lowest of the other limits, which is the median."""
    others = [
        each
        for each in run.assessment[WHAT_IF]["what_if"]
        if each["policy"] == POLICY and each["max_output_tokens"] != run.limit
    ]
    found: dict[str, Any] = min(others, key=lambda each: each["max_output_tokens"])
    return found


@dataclass(frozen=True)
class Pair:
    """A run that foresaw and one that measured, and what the difference of their speeds makes of
    the delay.
    """

    before: Run
    after: Run
    slower: (
        float  # the delay at the speed of the run after, over that at the speed of the run before
    )

    @classmethod
    def of(cls, site: Site, before: Run, after: Run) -> Pair:
        """By theory, of the lengths and the rate that were sent."""
        policy, lengths = parse_policy(POLICY), LONG.clip(after.limit)

        def delay(run: Run) -> float:
            law = site.law.at_speed(run.assessment["speed"])
            found = predict(
                policy, rate_of(site), lengths, law, prompt_tokens=PROMPTS, max_num_seqs=BOUND
            )
            return found.queueing_delay.mean or math.nan

        return cls(before, after, delay(after) / delay(before))

    @property
    def near(self) -> bool:
        """Whether the correction is small enough to be believed."""
        return bool(
            abs(self.after.assessment["speed"] / self.before.assessment["speed"] - 1) <= FAR
        )

    def __str__(self) -> str:
        return (
            f"from limit {self.before.limit} to {self.after.limit} the speeds make "
            f"{self.slower:.3f}"
        )


@pytest.mark.engine
@pytest.mark.slow
def test_the_delay_under_another_limit_is_foreseen(tmp_path: Path) -> None:
    lower: list[Pair] = []
    higher: list[Pair] = []
    for attempt in range(TRIES):
        with real_site(
            tmp_path / str(attempt), repeats=REPEATS, warm=False
        ) as cold:  # a new gateway: it has seen no longer answers
            site = cold.now()
            low, high, low_again = site.run(three_runs(site))
        assert_clipped(low, 0.5)
        assert_clipped(high, 0.1)
        to_lower = [
            Pair.of(site, high, run) for run in (low_again, low) if run.limit == low_again.limit
        ]
        to_higher = Pair.of(site, low, high)
        log.info(f"{low}; {high}; {low_again}; {'; '.join(map(str, [*to_lower, to_higher]))}")
        log.info(f"foreseen at the lower limit: {foreseen(high)['interval']}")
        log.info(f"foreseen at the higher limit: {low.assessment[NAMED]['advice'][0]['best']}")
        lower += sorted(
            (pair for pair in to_lower if pair.near), key=lambda pair: pair.after.half_width
        )[:1]
        higher += [to_higher] if to_higher.near else []
        if lower and higher and pooled(lower)[1] <= WITHIN:
            break
    assert lower, f"no two runs had speeds within {FAR:.0%}, {TRIES} times"
    assert higher, f"no two runs had speeds within {FAR:.0%}, {TRIES} times"
    assert_foreseen(lower)
    assert_extrapolated(min(higher, key=lambda pair: pair.after.half_width))


def pooled(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Observed over foreseen, at the speed of the observation, and the half-width that the
    observations give it.
    """
    weights = [pair.after.half_width**-2 for pair in pairs]
    ratios = [
        pair.after.delay / (foreseen(pair.before)["queueing_delay"]["mean"] * pair.slower)
        for pair in pairs
    ]
    return sum(w * r for w, r in zip(weights, ratios, strict=True)) / sum(weights), sum(
        weights
    ) ** -0.5


def assert_clipped(run: Run, share: float) -> None:
    """What the limit cut, and nothing else, is marked so: a lower bound of a length."""
    answered = [record for record in run.records if record.outcome == "completed"]
    clipped = [record for record in answered if record.clipped]
    assert {record.output_tokens for record in clipped} == {run.limit}
    assert len(clipped) / len(answered) == pytest.approx(share, abs=0.06)
    assert run.assessment["estimates"]["output_tokens"]["known_to"] <= run.limit + 1


def assert_foreseen(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        assert pair.after.limit == foreseen(pair.before)["max_output_tokens"]
        assert foreseen(pair.before)["notes"] == [], "nothing is extrapolated"
    ratio, half_width = pooled(pairs)
    log.info(
        f"observed over foreseen at the lower limit: {ratio:.3f} +-{half_width:.3f} of {len(pairs)}"
    )
    assert half_width <= WITHIN, (
        f"the machine wanders too much: the mean of {len(pairs)} runs is known to "
        f"{half_width:.0%} only"
    )
    assert ratio == pytest.approx(1.0, abs=WITHIN)


def assert_extrapolated(pair: Pair) -> None:
    (unnamed,), (named,) = (
        pair.before.assessment[ADVICE]["advice"],
        pair.before.assessment[NAMED]["advice"],
    )
    assert unnamed["best"] is None, "without a family nothing is said of limits that cut a tenth"
    best = named["best"]
    assert pair.after.limit == best["max_output_tokens"] > pair.before.limit
    assert any(note.startswith("extrapolated") for note in best["notes"])
    low, high = best["interval"]["low"], best["interval"]["high"]
    assert low * pair.slower <= pair.after.delay <= high * pair.slower
    assert high < 3 * low, "so wide an interval covers everything"
