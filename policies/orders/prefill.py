"""By phase, not interrupted: prefills before decodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import Form, Order


@dataclass(frozen=True, kw_only=True)
class PrefillFirst(Order):
    """Requests without a token before those that have been prefilled, both in order of arrival. As
    FCFS where no request waits between its prefill and its decode.
    """

    name: ClassVar[str] = "prefill-first"

    @cached_property
    def form(self) -> Form:
        return Form(starts=(0, 1))
