"""The settings one knob away from the one in force, which what-ifs, advice, autopilot and `kendall
optimize` ask about.

Batch sizes and token limits that are turned without anybody asking are preferred numbers, 2^k and
3 2^k (1, 2, 3, 4, 6, 8, 12, ...). A window of some thousand answers tells the length that 5 %
exceed to a few per cent only; a limit that followed its noise would begin a new epoch every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kendall.policies import Policy, format_policy, parse_policy, policy_batch_size
from kendall.policies.immediate import Capped, Dynamic
from kendall.policies.parameters import parameters_of, size_field
from kendall.policies.registry import policy_class
from kendall.policies.text import SpecError
from kendall.queueing.choosing.forecast import Setting

FAMILIES = ("single", "dynamic", "capped", "elastic", "continuous", "fixed")
USUAL_SIZE = 8
LARGEST_SIZE = 64  # batch size, where neither engine nor operator says one


def one_knob_away(
    current: Setting,
    *,
    policies: Iterable[str] = (),
    token_limits: Iterable[int | None] = (),
    sizes: Iterable[str] = (),
) -> list[Setting]:
    """Each once, policies in canonical text, without the setting in force; `sizes`: its policy at
    other batch sizes.
    """
    current = canonical(current)
    asked = [
        *(canonical(dataclasses.replace(current, policy=text)) for text in policies),
        *(dataclasses.replace(current, max_output_tokens=limit) for limit in token_limits),
        *(canonical(dataclasses.replace(current, policy=text)) for text in sizes),
    ]
    return [each for each in dict.fromkeys(asked) if each != current]


def canonical(setting: Setting) -> Setting:
    """The same setting with its policy's canonical text. Raises SpecError."""
    return dataclasses.replace(setting, policy=format_policy(parse_policy(setting.policy)))


def usual_policies(current: Setting, max_num_seqs: int | None) -> tuple[str, ...]:
    """The six, with the batch size in force, or 8, or what the engine can hold; that in force as
    it is.
    """
    policy = parse_policy(current.policy)
    size = policy_batch_size(policy) or USUAL_SIZE
    size = USUAL_SIZE if size == 1 else size
    size = size if max_num_seqs is None else min(size, max_num_seqs)
    usual = {name: sized(name, size) for name in FAMILIES}
    return tuple((usual | {policy.name: format_policy(policy)}).values())


def usual_sizes(current: Setting, max_num_seqs: int | None) -> list[str]:
    """The policy in force at half, twice and four times its batch size."""
    in_force = policy_batch_size(parse_policy(current.policy))
    return at_sizes(
        current,
        (USUAL_SIZE // 2, USUAL_SIZE, 2 * USUAL_SIZE)
        if in_force is None
        else (in_force // 2, 2 * in_force, 4 * in_force),
        max_num_seqs,
    )


def at_sizes(current: Setting, sizes: Iterable[int], max_num_seqs: int | None) -> list[str]:
    """The policy in force at those sizes that the engine can hold; none of single."""
    base = sized_policy(parse_policy(current.policy))
    if base is None:
        return []
    kept = (size for size in sizes if size >= 1 and (max_num_seqs is None or size <= max_num_seqs))
    return [format_policy(with_size(base, size)) for size in kept]


def sized_policy(policy: Policy) -> Policy | None:
    """The policy with a batch size to turn; None for one that has none, such as single."""
    if isinstance(policy, Dynamic):
        return Capped(max_batch_size=USUAL_SIZE, order=policy.order, route=policy.route)
    return None if size_field(type(policy)) is None else policy


def size_of(family: str) -> str | None:
    """The field with its batch size; None where it has none. Raises SpecError."""
    cls = policy_class(family)
    return None if cls is None else size_field(cls)


def sized(
    family: str, size: int, max_num_seqs: int | None = None, in_force: Policy | None = None
) -> str:
    """A family at a batch size, as canonical text; the engine's own bound is left out where it may
    be.

    What else the policy `in_force` has stays (`max_wait`), where it is of this family.
    """
    field, own = size_of(family), None
    if in_force is not None and in_force.name == family:
        own = in_force
    if field is None:
        return family if own is None else format_policy(own)
    cls = policy_class(family)
    # whether a policy without a size of its own takes what the engine takes
    optional = cls is not None and parameters_of(cls)[field].default is None
    if max_num_seqs is not None and size >= max_num_seqs and optional:
        if own is None:
            return family
        return format_policy(dataclasses.replace(own, **{field: None}))  # type: ignore[type-var]
    if own is not None:
        return format_policy(with_size(own, size))
    return f"{family}:{field}={size}"


def with_size(policy: Policy, size: int) -> Policy:
    """The policy with another batch size. Raises SpecError for single and dynamic."""
    field = size_field(type(policy))
    if field is None:
        raise SpecError(
            f"got policy={policy.name}; expected fixed, capped, elastic or continuous: they have "
            "a batch size"
        )
    return dataclasses.replace(policy, **{field: size})  # type: ignore[type-var]


def batch_sizes(bound: int) -> tuple[int, ...]:
    """Preferred numbers up to the bound, and the bound itself."""
    return tuple(sorted({*preferred(1, bound), bound}))


def preferred(low: int, high: int) -> tuple[int, ...]:
    """2^k and 3 2^k in [low, high], ascending."""
    found = {factor * 2**power for factor in (1, 3) for power in range(max(high, 1).bit_length())}
    return tuple(sorted(number for number in found if low <= number <= high))
