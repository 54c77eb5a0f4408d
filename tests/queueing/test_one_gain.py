"""One window, four asks, one gain: advice, what-ifs, the autopilot and `kendall optimize` compare
the same two settings by the same two numbers.
"""

from __future__ import annotations

import dataclasses

import pytest

from kendall.policies import parse_policy
from kendall.queueing.choosing.advice.advise import advise as choices
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.choices import best_batch_size, best_policy
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.estimation_error import NIL
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.queue import Queue
from tests.queueing.advised import advise, what_ifs
from tests.queueing.families import DELAY, LAWS, LIMITS, POLICY, TURNAROUND, USUAL, assessed, window

MACHINES = [("page", 0.6), ("tiny", 0.6), ("steps", 0.5)]
CURRENT = Setting(policy=POLICY)


def estimates(law: str, load: float) -> Estimates:
    """Without a turnaround of the gateway: `kendall optimize` knows of no gateway."""
    return dataclasses.replace(window(law, load), gateway_turnaround=0.0)


def gain(before: float, after: float) -> float:
    return 1 - (after + NIL) / (before + NIL)


def decided(known: Estimates, law: str, after: str) -> Decision:
    """What the autopilot says of that one setting."""
    bounds = AutopilotBounds(policies=(after,), max_clipped_fraction=0.0)
    seen = dataclasses.replace(assessed(POLICY), estimates=known, shape=LAWS[law][0])
    found = Autopilot(mode="act", bounds=bounds).decide(seen)
    assert found is not None
    assert found.after.policy == after
    return found


def asked(known: Estimates, law: str, after: str) -> tuple[float, float]:
    """The gain by the what-ifs, and by `kendall optimize` for the window's model."""
    shape = LAWS[law][0]
    forecasts = what_ifs(known, shape, CURRENT, LIMITS, policies=(after,), beside=True)[:2]
    assert [each.setting.policy for each in forecasts] == [POLICY, after]
    quantity = compared_by(map(parse_policy, (POLICY, after)))
    means = [getattr(each.prediction, quantity).mean for each in forecasts]
    operating_point = OperatingPoint(estimates=known, shape=shape, limits=LIMITS)
    model: Queue = operating_point.model(CURRENT)
    found = best_policy(model, (POLICY, after), operating_point.rate, DELAY)
    assert found.compared == quantity
    scores = [point["score"] for point in found.curve]
    return gain(means[0], means[1]), gain(scores[0], scores[1])


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("law", "load"), MACHINES)
def test_four_asks_about_the_policy_give_one_gain(law: str, load: float) -> None:
    known = estimates(law, load)
    (advice,) = advise(known, LAWS[law][0], CURRENT, LIMITS, DELAY, targets=["policy"])
    assert advice.best is not None
    best = advice.best.setting.policy
    assert best != POLICY
    decision = decided(known, law, best)
    by_what_if, by_optimize = asked(known, law, best)
    assert advice.gain.value == decision.predicted_gain.value == by_what_if == by_optimize
    assert (advice.gain, advice.compared) == (decision.predicted_gain, decision.compared)


def test_four_asks_about_the_batch_size_give_one_gain() -> None:
    """`kendall optimize` looks for the best size by exact predictions, advice by simulations that
    take a hundredth of the time: near the best one they may choose neighbours, whose gain is that
    of the chosen one within the tolerance of a choice.
    """
    known = estimates("page", 0.8)
    (advice,) = advise(known, LAWS["page"][0], CURRENT, LIMITS, DELAY, targets=["batch-size"])
    assert advice.best is not None
    best = advice.best.setting.policy
    decision = decided(known, "page", best)
    by_what_if, by_optimize = asked(known, "page", best)
    assert advice.gain.value == decision.predicted_gain.value == by_what_if == by_optimize
    assert advice.gain == decision.predicted_gain
    operating_point = OperatingPoint(estimates=known, shape=LAWS["page"][0], limits=LIMITS)
    found = best_batch_size(operating_point.model(CURRENT), operating_point.rate, DELAY, 16)
    (now,) = (point["score"] for point in found.curve if point["batch_size"] == 8)
    chosen = gain(now, found.best["score"])
    assert chosen == pytest.approx(advice.gain.value, abs=0.005)
    assert advice.gain.covers(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("after", [policy for policy in USUAL if policy not in (POLICY, "single")])
def test_only_of_continuous_a_window_knows_more_than_optimize(after: str) -> None:
    """By design `kendall optimize` asks about the queue alone, given by a law and lengths: the
    gateway's own shortest delay and the queue behind a stall of a continuous engine, which only a
    window shows, are missing there. Both make its sojourns longer.
    """
    known = dataclasses.replace(window("page", 0.6), stalls=Stalls(40, 0.02, 0.4, 50.0, 0.4))
    assert known.gateway_turnaround == TURNAROUND
    operating_point = OperatingPoint(estimates=known, shape=LAWS["page"][0], limits=LIMITS)
    quantity = compared_by(map(parse_policy, (POLICY, after)))
    by_what_if, by_optimize = asked(known, "page", after)
    found = operating_point.gain(CURRENT, Setting(policy=after), Criterion(DELAY, quantity)).value
    assert found == by_what_if
    if parse_policy(after).joins_running:
        assert found < by_optimize < found + 0.05
    else:
        assert found == by_optimize


def test_a_search_that_takes_too_long_leaves_the_targets_behind_it_out() -> None:
    """Under a policy that only simulation predicts each takes half a minute of a processor."""
    operating_point = OperatingPoint(
        estimates=estimates("page", 0.6), shape=LAWS["page"][0], limits=LIMITS
    )
    both = ("servers", "policy")
    first, second = choices(operating_point, CURRENT, DELAY, both, over=lambda: True)
    assert not first.says.startswith("no choice of servers: the searches")
    assert (second.target, second.best, second.curve) == ("policy", None, ())
    assert second.says == (
        "no choice of policy: the searches before it took too long; ask for this target alone"
    )
    assert [each.target for each in choices(operating_point, CURRENT, DELAY, both)] == [*both]
