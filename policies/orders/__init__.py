"""Orders of service: who of those that wait, and with some orders of those in service, goes
first. ORDERS has every class of this folder's modules that has a name of its own: those that
interrupt nobody first, by module.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from kendall.policies.errors import SpecError
from kendall.policies.orders.by_arrival import FirstCome
from kendall.policies.orders.order import Order


def _classes() -> Iterator[type[Order]]:
    for name in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        module = import_module(f"{__name__}.{name}")
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and issubclass(cls, Order) and "name" in vars(cls):
                yield cls


FIRST_COME = FirstCome()
ORDERS: dict[str, type[Order]] = {}
for _cls in sorted(_classes(), key=lambda cls: cls.preemptive):
    if ORDERS.setdefault(_cls.name, _cls) is not _cls:
        raise TypeError(f"got two orders with the name {_cls.name!r}; expected one")
PARAMETERS = {
    field.name: field for cls in ORDERS.values() for field in dataclasses.fields(cls) if field.init
}


def make_order(name: str, given: dict[str, Any]) -> Order:
    """The order with these parameters. Raises SpecError for an unknown order, a parameter that it
    does not have, one that it needs and did not get, and a value out of range.
    """
    if name not in ORDERS:
        raise SpecError(f"got order={name!r}; expected one of {', '.join(ORDERS)}")
    cls = ORDERS[name]
    fields = [each for each in dataclasses.fields(cls) if each.init]
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
