"""A sequence that the engine makes no token for while others move: continued once where that is
exact, else failed with 504.
"""

from __future__ import annotations

import logging

from server.queue.batcher import Batcher
from server.queue.continuing import detach
from server.queue.ticket import Ticket

log = logging.getLogger("kendall.supervision")
CODE = "sequence_stalled"


def on_still(batcher: Batcher, ticket: Ticket, seconds: float) -> None:
    """Take it out of the engine, and hand it over again behind the tokens it has; a second time,
    or where that is not exact, it fails.
    """
    reason = "also after it was submitted again" if ticket.continued else detach(ticket)
    if reason is not None:
        log.error("request %s got no token for %.0f s and fails: %s", ticket.id, seconds, reason)
        batcher.lose(
            ticket,
            "failed",
            CODE,
            f"the engine produced no token of this answer for {seconds:.0f} s: {reason}",
        )
        return
    log.warning(
        "request %s got no token for %.0f s; it is submitted to the engine again",
        ticket.id,
        seconds,
    )
    ticket.continued = True
    batcher.hand_over_again(ticket)
