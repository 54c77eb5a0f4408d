"""What if: the other policies, token limits and batch sizes at the estimates of a window, every
minute.

A setting is predicted at the window's rate, lengths, speed and residual, never from a delay.
Lengths are known up to the largest limit that was in force: a lower limit is answered from the
window alone, a higher one only under a named family ("extrapolated").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from policies import Policy, format_policy, parse_policy
from policies.immediate import Capped, Dynamic
from policies.text import policy_batch_size
from queueing.control.advice.answer import quick
from queueing.control.advice.forecast import Forecast, Knobs
from queueing.control.advice.situation import Situation
from queueing.estimation.assess import Limits
from queueing.estimation.estimates import Estimates
from queueing.latency.law import LatencyModel
from queueing.optimization.choices import with_size

USUAL_SIZE = 8
LEVELS = (0.5, 0.75, 0.9)  # of the lengths: the token limits asked about


def forecast(
    estimates: Estimates,
    shape: LatencyModel,
    knobs: Knobs,
    limits: Limits,
    *,
    family: str | None = None,
) -> Forecast:
    """One setting; `knobs` say policy, token limit and servers, `limits` the engine's bound and the
    patience.

    Raises SpecError for knobs that name no policy, or a family that there is not.
    """
    return Situation(estimates=estimates, shape=shape, limits=limits, family=family).forecast(knobs)


def what_ifs(
    estimates: Estimates,
    shape: LatencyModel,
    current: Knobs,
    limits: Limits,
    *,
    policies: Sequence[str] | None = None,
    token_limits: Sequence[int | None] | None = None,
    sizes: Sequence[int] | None = None,
    beside: bool = False,
) -> list[Forecast]:
    """Other policies, then other token limits, then other batch sizes, one knob turned at a time;
    the usual ones where none are given.

    `beside`: the setting in force comes first, by the same method.

    Raises SpecError for a text that names no policy.
    """
    situation = Situation(estimates=estimates, shape=shape, limits=limits, predict=quick)
    asked = [
        dataclasses.replace(current, policy=text)
        for text in (usual_policies(current, limits) if policies is None else policies)
    ]
    chosen = usual_token_limits(situation) if token_limits is None else token_limits
    asked += [dataclasses.replace(current, max_output_tokens=limit) for limit in chosen]
    asked += [dataclasses.replace(current, policy=text) for text in _sized(current, limits, sizes)]
    asked = [
        dataclasses.replace(each, policy=format_policy(parse_policy(each.policy))) for each in asked
    ]
    current = dataclasses.replace(current, policy=format_policy(parse_policy(current.policy)))
    first = [current] if beside else []
    return [
        situation.forecast(knobs)
        for knobs in (*first, *(each for each in dict.fromkeys(asked) if each != current))
    ]


def usual_policies(current: Knobs, limits: Limits) -> tuple[str, ...]:
    """The six, with the batch size in force, or 8, or what the engine can hold; that in force as
    it is.
    """
    policy = parse_policy(current.policy)
    size = policy_batch_size(policy) or USUAL_SIZE
    size = USUAL_SIZE if size == 1 else size
    size = size if limits.max_num_seqs is None else min(size, limits.max_num_seqs)
    named = {"fixed": f"fixed:batch_size={size}"} | {
        name: f"{name}:max_batch_size={size}" for name in ("capped", "elastic", "continuous")
    }
    usual = (
        {"single": "single", "dynamic": "dynamic"} | named | {policy.name: format_policy(policy)}
    )
    return tuple(usual.values())


def usual_token_limits(situation: Situation) -> tuple[int, ...]:
    """The median, the third quartile and the 90th percentile of the lengths, as far as these are
    known.
    """
    lengths = situation.lengths
    if lengths is None:
        return ()
    found = (lengths.whole.quantile(level) for level in LEVELS)
    return tuple(dict.fromkeys(limit for limit in found if limit <= lengths.known_to))


def sized_policy(policy: Policy) -> Policy | None:
    """The policy with a batch size to turn; None for single."""
    if isinstance(policy, Dynamic):
        return Capped(max_batch_size=USUAL_SIZE, order=policy.order)
    return None if policy_batch_size(policy) == 1 and policy.name == "single" else policy


def _sized(current: Knobs, limits: Limits, sizes: Sequence[int] | None) -> list[str]:
    policy = parse_policy(current.policy)
    base, most = sized_policy(policy), limits.max_num_seqs
    if base is None:
        return []
    in_force = policy_batch_size(policy)
    usual = (
        (USUAL_SIZE // 2, USUAL_SIZE, 2 * USUAL_SIZE)
        if in_force is None
        else (in_force // 2, 2 * in_force, 4 * in_force)
    )
    kept = [
        size
        for size in (usual if sizes is None else sizes)
        if size >= 1 and (most is None or size <= most)
    ]
    return [format_policy(with_size(base, size)) for size in kept]
