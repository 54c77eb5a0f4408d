"""Texts of orders beside their policies: split, put into a policy's text and read back."""

from __future__ import annotations

import pytest

from kendall.loadgen.commands.flags import SweepCommand, in_a_row
from kendall.policies import format_policy, parse_policy
from kendall.policies.orders import ORDERS
from kendall.policies.text import SpecError, first_come_form, order_text, split_orders, with_order
from tests.sample_policy.kendall_sample_policy import Shortest


@pytest.mark.parametrize(
    ("text", "orders"),
    [
        ("fcfs", ("fcfs",)),
        ("fcfs, spjf:aging=0.02 ,sprpt", ("fcfs", "spjf:aging=0.02", "sprpt")),
        ("mlfq:quantum=8,levels=3,trail:c=0.8", ("mlfq:quantum=8,levels=3", "trail:c=0.8")),
        ("trail,c=0.8,fcfs", ("trail:c=0.8", "fcfs")),
    ],
)
def test_a_part_without_a_name_is_a_parameter_of_the_order_before_it(
    text: str, orders: tuple[str, ...]
) -> None:
    assert split_orders(text) == orders


@pytest.mark.parametrize("text", ["", "fcfs,", ",fcfs", "fcfs,,spjf", "aging=1", ":c=1", "a=1:b"])
def test_a_list_of_orders_with_a_gap_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="expected names with commas between them"):
        split_orders(text)


@pytest.mark.parametrize(
    ("policy", "order", "expected"),
    [
        ("single", "spjf", "single:order=spjf"),
        ("single", "fcfs", "single"),
        (
            "continuous:max_batch_size=4",
            "spjf:aging=0.020",
            "continuous:max_batch_size=4,order=spjf,aging=0.02",
        ),
        ("single", "mlfq:levels=3,quantum=8", "single:order=mlfq,quantum=8,levels=3"),
        ("single", "sprpt:max_preemptions=2", "single:order=sprpt,max_preemptions=2"),
        ("fixed:batch_size=8", "binned:bins=3", "fixed:batch_size=8,order=binned,bins=3"),
    ],
)
def test_an_order_is_put_into_a_policy_and_taken_out_again(
    policy: str, order: str, expected: str
) -> None:
    found = with_order(parse_policy(policy), order)
    assert format_policy(found) == expected
    assert format_policy(first_come_form(found)) == policy
    assert format_policy(with_order(parse_policy(policy), order_text(found))) == expected


def test_the_text_of_an_order_names_its_parameters_in_their_order() -> None:
    assert order_text(parse_policy("single:levels=3,quantum=8,order=mlfq")) == (
        "mlfq:quantum=8,levels=3"
    )
    assert order_text(parse_policy("dynamic")) == "fcfs"


def test_a_policy_without_orders_has_that_of_arrival_and_no_other() -> None:
    outside = Shortest(max_batch_size=2)
    assert order_text(outside) == "fcfs"
    assert first_come_form(outside) is outside


@pytest.mark.parametrize(
    ("policy", "order", "said"),
    [
        ("dynamic", "sprpt", "which interrupts a batch"),
        ("single", "binned:bins=2", "which forms batches"),
        ("single", "spjf:agng=1", "did you mean 'aging'"),
        ("single", "sjf", "did you mean 'spjf'"),
        ("single:order=spjf", "fcfs", "has an order of its own; expected a policy without one"),
        ("single", "", "expected name"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(policy: str, order: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        with_order(parse_policy(policy), order)


def test_orders_may_follow_one_another_on_the_command_line() -> None:
    arguments = ["--orders", "fcfs", "spjf:aging=1", "levels=3", "single", "trail"]
    assert in_a_row(arguments, SweepCommand.lists) == [
        "--orders",
        "fcfs,spjf:aging=1,levels=3",
        "single",
        "trail",
    ]
    for name in ORDERS:
        assert SweepCommand.lists["--orders"](name)
    assert not SweepCommand.lists["--orders"]("fixed:batch_size=8,max_wait=1")
