"""The check of a model: the requests that came, as observed and as the model serves the same ones.

    difference = mean of (observed - modelled) over the same requests
    ratio      = observed / modelled

Both sides have the same arrivals and lengths, so the chance of these drops out of the difference:
its interval (batch means of the pairs) is far narrower than that of either mean, and neither
Poisson arrivals nor a steady state are assumed. What is left is the engine, which may not follow
the law, and the gateway.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

AGREE = 0.10  # |observed / modelled - 1| that counts as agreement whatever the interval
TELLING = 0.50  # half width over the modelled mean beyond which an agreement says nothing
GATEWAY = 0.02  # share of the delay that the gateway may lose before it is named
ENGINE = "the engine: its service times do not follow the law, or it stalled"
CheckVerdict = Literal["agree", "disagree", "too_few"]
SAID: Mapping[CheckVerdict, str] = {
    "agree": "agree",
    "disagree": "disagree",
    "too_few": "not enough data",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Means over the same requests, seconds."""

    observed: float
    modelled: float
    half_width: float  # 95 %, of the difference; infinite where there are too few pairs
    requests: int
    # the recursion on the measured service times; None under an order of service
    measured_services: float | None = None
    # what fails of that which the model takes for granted of the engine, in sentences
    suspects: tuple[str, ...] = ()
    # clients wait for their answers: when they come hangs on the very services
    closed_loop: bool = False
    # what overlapping windows have shown before; None: this one alone decides
    settled: CheckVerdict | None = None

    @property
    def difference(self) -> float:
        """observed - modelled."""
        return self.observed - self.modelled

    @property
    def ratio(self) -> float:
        """observed / modelled."""
        return self.observed / self.modelled if self.modelled else math.nan

    @property
    def ratio_low(self) -> float:
        """The ends of its interval."""
        return self.ratio - self.relative_half_width

    @property
    def ratio_high(self) -> float:
        """See `ratio_low`."""
        return self.ratio + self.relative_half_width

    @property
    def relative_half_width(self) -> float:
        """That of the difference over the modelled mean."""
        return self.half_width / self.modelled if self.modelled else math.inf

    @property
    def gateway_share(self) -> float | None:
        """observed / measured_services - 1: what the gateway added to the delays."""
        measured = self.measured_services
        return None if not measured else self.observed / measured - 1

    @property
    def verdict(self) -> CheckVerdict:
        """disagree: the difference is beyond both 10 % and its interval; too_few: it is not, but
        the interval reaches further than half of the mean. Of overlapping windows: what two in a
        row have shown.
        """
        return self.settled or self.own_verdict

    @property
    def own_verdict(self) -> CheckVerdict:
        """Of these requests alone."""
        if not self.modelled or not math.isfinite(self.half_width):
            return "too_few"
        allowed = max(AGREE * self.modelled, self.half_width)
        if abs(self.difference) > allowed:
            return "disagree" if self._founded else "too_few"
        return "agree" if self.relative_half_width <= TELLING else "too_few"

    @property
    def _founded(self) -> bool:
        """A closed loop that is always full does not take the same instants twice: there a
        difference alone is none, without a fault of the engine or time that the gateway lost.
        """
        return not self.closed_loop or bool(self.suspects) or self.of_gateway

    @property
    def of_gateway(self) -> bool:
        """Whether what the gateway lost, or saved, is in the direction of the difference."""
        share = self.gateway_share or 0.0
        return abs(share) > GATEWAY and share * self.difference > 0

    @property
    def causes(self) -> tuple[str, ...]:
        """What a disagreement is named after; none where there is none."""
        if self.verdict != "disagree":
            return ()
        if self.of_gateway:
            return (f"the gateway: {abs(self.gateway_share or 0.0) * 100:.0f} % of the delay",)
        return self.suspects or (ENGINE,)

    def after(self, before: Check | None) -> Check:
        """With the verdict that stands: another one than before takes two in a row."""
        if before is None or self.own_verdict in (before.verdict, before.own_verdict):
            return self
        if before.verdict == "too_few":
            return self
        return dataclasses.replace(self, settled=before.verdict)

    def as_dict(self) -> dict[str, object]:
        """As JSON; null where there is no interval."""
        modelled, known = self.modelled, math.isfinite(self.relative_half_width)
        return {
            "observed": self.observed,
            "modelled": modelled,
            "measured_services": self.measured_services,
            "difference": self.difference,
            "difference_low": self.difference - self.half_width if known else None,
            "difference_high": self.difference + self.half_width if known else None,
            "ratio": self.ratio if modelled else None,
            "ratio_low": self.ratio_low if known else None,
            "ratio_high": self.ratio_high if known else None,
            "requests": self.requests,
            "verdict": self.verdict,
            "causes": list(self.causes),
        }


def pooled(checks: Sequence[Check]) -> Check | None:
    """All their requests together, each with its own weight; None where none can be used."""
    used = [check for check in checks if math.isfinite(check.half_width) and check.modelled]
    requests = sum(check.requests for check in used)
    if not requests:
        return None

    def mean(name: str) -> float:
        return math.fsum(check.requests * getattr(check, name) for check in used) / requests

    squares = math.fsum((check.requests * check.half_width) ** 2 for check in used)
    return Check(
        observed=mean("observed"),
        modelled=mean("modelled"),
        half_width=math.sqrt(squares) / requests,
        requests=requests,
    )


def signed(percent: float) -> str:
    """With one decimal and its sign; 0.0 has none."""
    text = f"{percent:+.1f}"
    return text[1:] if text[1:] == "0.0" else text


def in_words(check: Check) -> str:
    """How far the observed delays are from the model's, with the interval, in percent."""
    off, half = 100 * (check.ratio - 1), 100 * check.relative_half_width
    low, high = off - half, off + half
    side = "above" if off >= 0 else "below"
    distance = f"{abs(off):.1f} % {side}" if signed(off) != "0.0" else "within 0.1 % of"
    if low * high > 0:
        ends = sorted((abs(low), abs(high)))
        interval = f"{ends[0]:.1f} to {ends[1]:.1f} %"
    else:
        interval = f"{signed(low)} to {signed(high)} %"
    return f"observed delays are {distance} the model's (95 %: {interval})"
