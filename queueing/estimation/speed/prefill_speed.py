"""What a token of a prompt takes on an engine whose requests join running ones, where that is not
what the speed of all else says.

One factor on the law holds where everything is slower alike. What makes steps slower need not
touch prompts: on a machine whose processors are shared, steps took 1.3 to 1.5 times the law's time
and prompts 1.0. From dispatch to first token pass the wait for a step, and the prompts of all who
enter with it; of these only its own depends on a request's prompt. So the slope on its tokens is
kp, in seconds, whatever the rest of a step takes. No delay enters.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from policies.core import Policy
from queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from queueing.estimation.speed.speeds import Speeds
from queueing.estimation.window.snapshot import Snapshot
from queueing.latency.law import LatencyModel

FEWEST = 200  # requests
CLOSE = 0.1  # half width over the value, at most
ROUNDS = 2  # the speed of the rest moves by what the prompts' moved


def own_prefill(policy: Policy, seen: Snapshot, shape: LatencyModel) -> LatencyModel:
    """The shape with the kp that, at the speed of the rest, is that of the window; as it is where
    the two are not told apart.
    """
    if not policy.joins_running or not shape.kp:
        return shape
    slope = prompt_token(seen.mine)
    if not slope.known or slope.relative > CLOSE:
        return shape
    speed = _speed(policy, seen, shape)
    if not math.isfinite(speed) or slope.covers(shape.kp * speed):
        return shape
    found = shape
    for _ in range(ROUNDS):
        found = dataclasses.replace(shape, kp=slope.value / speed)
        speed = _speed(policy, seen, found)
    return dataclasses.replace(shape, kp=slope.value / speed)


def prompt_token(mine: Snapshot) -> Estimate:
    """Seconds, with an interval for scatter of any kind (White, 1980): prompts are independent of
    all else.
    """
    tokens, first = mine.column("prompt_tokens"), mine.column("first_token_at")
    times = first - mine.column("dispatched_at")
    kept = np.isfinite(times) & (tokens >= 1) & (mine.column("preemptions") == 0)
    tokens, times = tokens[kept], times[kept]
    if tokens.size < FEWEST:
        return UNKNOWN
    apart = tokens - tokens.mean()
    square = float(apart @ apart)
    if not square:
        return UNKNOWN
    slope = float(apart @ times) / square
    rest = times - times.mean() - slope * apart
    half = NORMAL * math.sqrt(float((apart * rest) @ (apart * rest))) / square
    return Estimate(slope, slope - half, slope + half, float(tokens.size))


def _speed(policy: Policy, seen: Snapshot, shape: LatencyModel) -> float:
    times = Speeds.of(policy, seen, shape).telling
    fitted = float(times.fitted.sum())
    return float(times.measured.sum()) / fitted if fitted > 0 else math.nan
