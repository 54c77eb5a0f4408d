"""By arrival: first come, first served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.orders.order import Order


@dataclass(frozen=True, kw_only=True)
class FirstCome(Order):
    """FCFS."""

    name: ClassVar[str] = "fcfs"
    assumption: ClassVar[str] = "first come, first served"
