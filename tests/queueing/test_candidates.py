"""The settings that what-ifs, advice and autopilot compare: one knob away from the one in force."""

from __future__ import annotations

import pytest

from kendall.policies import SpecError, format_policy, parse_policy
from kendall.queueing.choosing.candidates import (
    at_sizes,
    batch_sizes,
    canonical,
    one_knob_away,
    preferred,
    sized,
    sized_policy,
    usual_policies,
    usual_sizes,
    with_size,
)
from kendall.queueing.choosing.forecast import Setting

CAPPED = "capped:max_batch_size=8"


def setting(policy: str, limit: int | None = 256) -> Setting:
    return Setting(policy=policy, max_output_tokens=limit)


def test_each_other_setting_comes_once_in_canonical_text_without_the_one_in_force() -> None:
    in_force = setting("capped:max_batch_size=8.0")
    found = one_knob_away(
        in_force,
        policies=["single", CAPPED, "capped:max_batch_size=16.0", "single"],
        token_limits=[256, 128, None],
        sizes=["capped:max_batch_size=16", "capped:max_batch_size=4"],
    )
    assert found == [
        setting("single"),
        setting("capped:max_batch_size=16"),
        setting(CAPPED, 128),
        setting(CAPPED, None),
        setting("capped:max_batch_size=4"),
    ]
    assert one_knob_away(in_force) == []
    assert canonical(in_force) == setting(CAPPED)


@pytest.mark.parametrize(
    ("policy", "bound", "size"),
    [
        ("dynamic", None, 8),  # no size of its own: the usual one
        ("single", None, 8),
        (CAPPED.replace("8", "1"), None, 8),  # a batch of 1 is single, which is there
        (CAPPED.replace("8", "12"), None, 12),
        (CAPPED.replace("8", "12"), 6, 6),
        (CAPPED.replace("8", "12"), 12, 12),
        (CAPPED.replace("8", "12"), 64, 12),
    ],
)
def test_the_usual_policies_have_the_size_in_force_within_what_the_engine_holds(
    policy: str, bound: int | None, size: int
) -> None:
    there = {
        "single": "single",
        "dynamic": "dynamic",
        "capped": f"capped:max_batch_size={size}",
        "elastic": f"elastic:max_batch_size={size}",
        "continuous": f"continuous:max_batch_size={size}",
        "fixed": f"fixed:batch_size={size}",
    }
    there[policy.partition(":")[0]] = policy  # that in force as it is
    assert usual_policies(setting(policy), bound) == tuple(there.values())


@pytest.mark.parametrize(
    ("policy", "bound", "sizes"),
    [
        (CAPPED, None, [4, 16, 32]),
        (CAPPED, 16, [4, 16]),
        (CAPPED, 15, [4]),
        ("capped:max_batch_size=1", None, [2, 4]),
        ("capped:max_batch_size=5", None, [2, 10, 20]),
        ("dynamic", None, [4, 8, 16]),
        ("dynamic", 8, [4, 8]),
        ("single", None, []),
    ],
)
def test_the_usual_sizes_are_half_twice_and_four_times_that_in_force(
    policy: str, bound: int | None, sizes: list[int]
) -> None:
    expected = [f"capped:max_batch_size={size}" for size in sizes]
    assert usual_sizes(setting(policy), bound) == expected


def test_sizes_from_1_on_are_kept_with_what_else_the_policy_has() -> None:
    policy = setting("fixed:batch_size=8,max_wait=0.5,order=spjf")
    assert at_sizes(policy, [0, 1, 2, 3], 2) == [
        "fixed:batch_size=1,max_wait=0.5,order=spjf",
        "fixed:batch_size=2,max_wait=0.5,order=spjf",
    ]


def test_dynamic_gets_a_size_as_capped_in_its_order_and_single_gets_none() -> None:
    made = sized_policy(parse_policy("dynamic:order=spjf,route=prefix"))
    assert made == parse_policy("capped:max_batch_size=8,order=spjf,route=prefix")
    assert sized_policy(parse_policy("single")) is None
    with pytest.raises(SpecError, match="got policy=single; expected fixed, capped, elastic or"):
        with_size(parse_policy("single"), 4)


@pytest.mark.parametrize(
    ("family", "size", "bound", "in_force", "expected"),
    [
        ("capped", 4, None, None, "capped:max_batch_size=4"),
        ("capped", 4, 4, None, "capped:max_batch_size=4"),  # it must have one
        ("continuous", 3, 4, None, "continuous:max_batch_size=3"),
        ("continuous", 4, 4, None, "continuous"),
        ("continuous", 5, 4, None, "continuous"),
        ("continuous", 5, None, None, "continuous:max_batch_size=5"),
        ("continuous", 4, 4, "continuous:max_batch_size=2,order=spjf", "continuous:order=spjf"),
        ("continuous", 3, 4, "continuous:order=spjf", "continuous:max_batch_size=3,order=spjf"),
        ("fixed", 4, None, "fixed:batch_size=8,max_wait=2", "fixed:batch_size=4,max_wait=2"),
        ("fixed", 4, None, "capped:max_batch_size=8,order=spjf", "fixed:batch_size=4"),
        ("single", 4, None, "single:order=spjf", "single:order=spjf"),
        ("single", 4, None, "dynamic:order=spjf", "single"),
        ("dynamic", 4, 4, None, "dynamic"),
    ],
)
def test_a_family_at_a_size(
    family: str, size: int, bound: int | None, in_force: str | None, expected: str
) -> None:
    own = None if in_force is None else parse_policy(in_force)
    made = sized(family, size, bound, own)
    assert made == expected
    assert format_policy(parse_policy(made)) == made


def test_preferred_numbers() -> None:
    assert preferred(1, 16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert preferred(3, 12) == (3, 4, 6, 8, 12)
    assert preferred(1, 1) == (1,)
    assert preferred(1, 0) == ()
    assert preferred(1, 24) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert batch_sizes(10) == (1, 2, 3, 4, 6, 8, 10)
    assert batch_sizes(8) == (1, 2, 3, 4, 6, 8)
