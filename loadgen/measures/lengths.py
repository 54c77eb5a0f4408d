"""Output lengths as drawn and as received, where each request carried its own as `max_tokens` with
`ignore_eos`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kendall.policies.text import short_number
from kendall.queueing.measurement.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsReceived:
    """Of completed requests: mean numbers of tokens, and how many answers were shorter or longer
    than drawn.
    """

    requests: int
    drawn: float
    received: float
    shorter: int
    longer: int

    @property
    def in_words(self) -> str:
        """One line for a terminal."""
        means = f"drawn {short_number(self.drawn)}, received {short_number(self.received)}"
        if not (self.shorter or self.longer):
            return f"{means} on average: each as drawn"
        parts = []
        if self.shorter:
            parts.append(f"{self.shorter:,} shorter (does the server honour ignore_eos?)")
        if self.longer:
            parts.append(f"{self.longer:,} longer (does it honour max_tokens?)")
        return f"{means} on average: of {self.requests:,} answers {', '.join(parts)}"


def lengths_received(records: Iterable[Record]) -> LengthsReceived | None:
    """None where no request completed."""
    pairs = [
        (record.max_output_tokens, record.output_tokens)
        for record in records
        if record.outcome == "completed"
        and record.max_output_tokens is not None
        and record.output_tokens is not None
    ]
    if not pairs:
        return None
    return LengthsReceived(
        requests=len(pairs),
        drawn=sum(drawn for drawn, _ in pairs) / len(pairs),
        received=sum(received for _, received in pairs) / len(pairs),
        shorter=sum(received < drawn for drawn, received in pairs),
        longer=sum(received > drawn for drawn, received in pairs),
    )
