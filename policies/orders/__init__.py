"""Orders of service: who of those that wait, and with some orders of those in service, goes
first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kendall.policies.errors import SpecError
from kendall.policies.orders.by_age import LeastAttained, Levels
from kendall.policies.orders.by_flow import VirtualTokens
from kendall.policies.orders.by_length import Binned, LongestFirst, ShortestFirst, Threshold
from kendall.policies.orders.by_urgency import ByPriority, EarliestDeadline, HighestRatio
from kendall.policies.orders.order import Order
from kendall.policies.orders.preemptive import (
    PreemptiveShortest,
    PreemptiveThreshold,
    ShortestRemaining,
    Trail,
)

FIRST_COME = Order()
ORDERS: dict[str, type[Order]] = {
    cls.name: cls
    for cls in (
        Order,
        ShortestFirst,
        LongestFirst,
        EarliestDeadline,
        ByPriority,
        Threshold,
        VirtualTokens,
        Binned,
        HighestRatio,
        ShortestRemaining,
        PreemptiveShortest,
        PreemptiveThreshold,
        Trail,
        Levels,
        LeastAttained,
    )
}


def make_order(name: str, given: dict[str, Any]) -> Order:
    """The order with these parameters. Raises SpecError for an unknown order, a parameter that it
    does not have, one that it needs and did not get, and a value out of range.
    """
    if name not in ORDERS:
        raise SpecError(f"got order={name!r}; expected one of {', '.join(ORDERS)}")
    cls = ORDERS[name]
    fields = dataclasses.fields(cls)
    known = [each.name for each in fields]
    unknown = [key for key in given if key not in known]
    if unknown:
        own = [*known, *(["max_preemptions"] if cls.preemptive else [])]
        expected = f"{', '.join(own)}, or nothing" if own else "no parameter"
        raise SpecError(f"got {unknown[0]} for order {name}; expected {expected}")
    for each in fields:
        if each.default is dataclasses.MISSING and each.name not in given:
            raise SpecError(f"got order {name} without {each.name}; expected {each.name}=NUMBER")
    return cls(**given)
