"""How much an operator lets go wrong before the gateway gives up; one default each."""

from __future__ import annotations

from dataclasses import dataclass

from kendall.options import option
from kendall.policies.durations import Duration
from kendall.server.runtime.option_panels import Panel

MOST_REPLICAS = 64


@dataclass(frozen=True, kw_only=True)
class SupervisionSettings:
    """Seconds and counts. More than `max_restarts` starts within `restart_window` and the
    gateway ends with a non-zero status.
    """

    start_timeout: float = option(
        Panel.FAILURES,
        "Time limit of the engine's first start, including the download of a model.",
        default=3600.0,
        parser=Duration(1.0),
    )
    max_restarts: int = option(
        Panel.FAILURES,
        (
            "Number of engine restarts allowed within --restart-window; after one more failure the "
            "gateway exits."
        ),
        default=8,
        min=0,
    )
    restart_window: float = option(
        Panel.FAILURES,
        "Length of the window in which restarts are counted.",
        default=600.0,
        parser=Duration(1.0),
    )
    # of one start after it; `RestartBudget` says when it may take longer
    restart_timeout: float = option(
        Panel.FAILURES,
        (
            "Time limit of an engine restart; never below the longest start so far. Doubled after "
            "each restart that exceeds it."
        ),
        default=300.0,
        parser=Duration(1.0),
    )
    # a request that saw more engines die is given up: it may be what kills them
    max_interruptions: int = option(
        Panel.FAILURES,
        (
            "Number of engine failures that a request may survive; after one more it fails, "
            "because it may be the cause."
        ),
        default=3,
        min=0,
    )
    suspect_after: int = option(
        Panel.FAILURES,
        (
            "Number of engine failures during a request after which it is run alone, as a possible "
            "cause."
        ),
        default=2,
        min=1,
    )
    max_parked: int = option(
        Panel.FAILURES,
        (
            "Largest number of text prompts that wait for the tokenizer while the engine restarts; "
            "further ones get 503."
        ),
        default=1024,
        min=0,
    )
    stuck_timeout: float = option(
        Panel.FAILURES,
        (
            "Restart an engine that has work but produces no token for this long, or give up a "
            "call of which a server behind sends nothing (0: never)."
        ),
        default=60.0,
        parser=Duration(),
    )
    slow_reader_timeout: float = option(
        Panel.STREAMS,
        "Time a client may leave its response unread before it is disconnected (0: no limit).",
        default=60.0,
        parser=Duration(),
    )
